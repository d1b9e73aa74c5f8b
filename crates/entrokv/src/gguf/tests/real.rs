//! Real model files, where they are at hand: `ENTROKV_MODELS` names their folder.

use std::{path::PathBuf, time::Instant};

use super::*;

/// What is known of a model file from elsewhere.
struct Known {
    name: &'static str,
    file_bytes: u64,
    architecture: &'static str,
    num_tensors: usize,
    num_entries: usize,
    vocabulary: usize,
    token: (usize, &'static str),
    embedding: (WeightType, [u64; 2]),
    last_tensor: &'static str,
}

const KNOWN: [Known; 4] = [
    Known {
        name: "smollm2-135m",
        file_bytes: 98_362_432,
        architecture: "llama",
        num_tensors: 272,
        num_entries: 33,
        vocabulary: 49_152,
        token: (1, "<|im_start|>"),
        embedding: (WeightType::Q8_0, [576, 49_152]),
        last_tensor: "output_norm.weight",
    },
    Known {
        name: "gemma3-270m",
        file_bytes: 253_113_024,
        architecture: "gemma3",
        num_tensors: 236,
        num_entries: 33,
        vocabulary: 262_144,
        token: (2, "<bos>"),
        embedding: (WeightType::Q8_0, [640, 262_144]),
        last_tensor: "blk.17.post_ffw_norm.weight",
    },
    Known {
        name: "qwen2.5-0.5b",
        file_bytes: 491_400_064,
        architecture: "qwen2",
        num_tensors: 291,
        num_entries: 26,
        vocabulary: 151_936,
        token: (151_644, "<|im_start|>"),
        embedding: (WeightType::Q5_0, [896, 151_936]),
        last_tensor: "output_norm.weight",
    },
    Known {
        name: "qwen2.5-1.5b",
        file_bytes: 1_117_320_768,
        architecture: "qwen2",
        num_tensors: 339,
        num_entries: 26,
        vocabulary: 151_936,
        token: (151_644, "<|im_start|>"),
        embedding: (WeightType::Q4K, [1536, 151_936]),
        last_tensor: "output_norm.weight",
    },
];

#[test]
fn real_models_open_in_milliseconds_and_say_what_is_known() {
    let Some(folder) = std::env::var_os("ENTROKV_MODELS").map(PathBuf::from) else {
        println!("note: ENTROKV_MODELS is not set, so no real model was opened");
        return;
    };
    for known in KNOWN {
        let path = folder.join(known.name).with_added_extension("gguf");
        if !path.exists() {
            println!("note: {} is not at hand", known.name);
            continue;
        }
        let start = Instant::now();
        let model = Gguf::open(&path).expect("a good model");
        let opened = start.elapsed();
        let tokens = model.metadata().strings("tokenizer.ggml.tokens").expect("a vocabulary");
        println!("{}: opened in {opened:?}, vocabulary after {:?}", known.name, start.elapsed());

        assert_eq!(model.file_bytes(), known.file_bytes, "{}", known.name);
        assert_eq!(model.metadata().str("general.architecture"), Ok(known.architecture), "{}", known.name);
        assert_eq!(
            (model.tensors().len(), model.metadata().len()),
            (known.num_tensors, known.num_entries),
            "{}",
            known.name
        );
        assert_eq!(tokens.len(), known.vocabulary, "{}", known.name);
        assert_eq!(tokens[known.token.0], known.token.1, "{}", known.name);
        let embedding = model.tensor("token_embd.weight").expect("every model has embeddings");
        assert_eq!(
            (embedding.weight_type, embedding.shape),
            (known.embedding.0, &known.embedding.1[..]),
            "{}",
            known.name
        );
        assert_eq!(model.tensors().last().map(|t| t.name), Some(known.last_tensor), "{}", known.name);
    }
}
