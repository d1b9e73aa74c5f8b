//! Tiny models are files that our reader and other engines accept, and their weights are what they are described to be.

use std::collections::HashSet;

use entrokv_kernels::dequantize::dequantize;

use super::*;
use crate::gguf::Gguf;

fn open(model: &TinyModel) -> Gguf {
    Gguf::from_bytes(model.gguf().expect("a possible model")).expect("a readable file")
}

/// The values of a tensor, in order.
fn values(model: &Gguf, name: &str) -> Vec<f32> {
    let tensor = model.tensor(name).expect("the tensor is in the file");
    let mut values = vec![0.0; tensor.rows() * tensor.cols()];
    dequantize(tensor.weight_type, tensor.data, &mut values);
    values
}

#[test]
fn every_architecture_has_the_tensors_that_make_it_one() {
    let cases: [(TinyArchitecture, usize, &[&str]); 5] = [
        (TinyArchitecture::Llama, 2 + 2 * 9, &[]),
        (TinyArchitecture::LlamaRopeFactors, 3 + 2 * 9, &["rope_freqs.weight"]),
        (TinyArchitecture::Qwen2, 2 + 2 * 12, &["blk.0.attn_q.bias", "blk.1.attn_k.bias", "blk.1.attn_v.bias"]),
        (TinyArchitecture::Qwen3, 2 + 2 * 11, &["blk.0.attn_q_norm.weight", "blk.1.attn_k_norm.weight"]),
        (
            TinyArchitecture::Gemma3,
            2 + 7 * 13,
            &["blk.0.attn_q_norm.weight", "blk.6.post_attention_norm.weight", "blk.6.post_ffw_norm.weight"],
        ),
    ];
    for (architecture, num_tensors, own) in cases {
        let tied = open(&TinyModel::new(architecture));
        assert_eq!(tied.tensors().len(), num_tensors, "{architecture:?}");
        assert!(tied.tensor("output.weight").is_none());
        for &name in own {
            assert!(tied.tensor(name).is_some(), "{architecture:?} {name}");
        }
        let untied = open(&TinyModel { tied: false, ..TinyModel::new(architecture) });
        assert_eq!(untied.tensors().len(), num_tensors + 1);
        assert_ne!(values(&untied, "output.weight"), values(&untied, "token_embd.weight"));
    }
}

#[test]
fn one_description_gives_one_file() {
    for architecture in TinyArchitecture::ALL {
        let model = TinyModel::new(architecture);
        assert_eq!(model.gguf(), model.gguf());
        assert_ne!(model.gguf(), TinyModel { seed: 2, ..model.clone() }.gguf());
        assert_eq!(architecture.name().parse(), Ok(architecture));
    }
    assert_eq!(
        "gpt5".parse::<TinyArchitecture>().expect_err("there is none").to_string(),
        "no tiny model is called \"gpt5\": there are llama, llama-rope-factors, qwen2, qwen3, gemma3"
    );
}

#[test]
fn drawn_weights_have_the_deviation_they_are_asked_for() {
    let mut random = Random::new(7);
    let drawn: Vec<f64> = (0..100_000).map(|_| f64::from(random.bell(0.5))).collect();
    let mean = drawn.iter().sum::<f64>() / drawn.len() as f64;
    let deviation = (drawn.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / drawn.len() as f64).sqrt();
    // Four standard errors of each.
    assert!(mean.abs() < 4.0 * 0.5 / 316.0, "{mean}");
    assert!((deviation - 0.5).abs() < 4.0 * 0.5 / 447.0, "{deviation}");
}

#[test]
fn encoded_weights_are_the_drawn_ones_rounded() {
    let exact = open(&TinyModel { weight_type: WeightType::F32, ..TinyModel::default() });
    let exact = values(&exact, "blk.1.ffn_down.weight");
    let spread = |block: &[f32]| block.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    // The largest error in units of the largest weight of a block: half a step, and what rounding the step to f16 adds.
    let cases = [
        (WeightType::F16, 1.0 / 2048.0),
        (WeightType::Bf16, 1.0 / 256.0),
        (WeightType::Q8_0, 0.51 / 127.0 + 1.0 / 2048.0),
        (WeightType::Q4_1, 0.51 / 7.5 + 3.0 / 2048.0),
    ];
    for (ty, bound) in cases {
        let model = open(&TinyModel { weight_type: ty, ..TinyModel::default() });
        assert_eq!(model.tensor("blk.1.ffn_down.weight").map(|t| t.weight_type), Some(ty));
        let encoded = values(&model, "blk.1.ffn_down.weight");
        for (exact, encoded) in exact.chunks(32).zip(encoded.chunks(32)) {
            for (x, y) in exact.iter().zip(encoded) {
                assert!((x - y).abs() <= bound * spread(exact), "{}: {x} became {y}", ty.name());
            }
        }
        // A row of equal weights has no spread: it stays what it is.
        let flat = encode(ty, &[0.0; 32]).expect("the type has an encoder");
        let mut back = [1.0; 32];
        dequantize(ty, &flat, &mut back);
        assert_eq!(back, [0.0; 32]);
    }
}

#[test]
fn vocabularies_hold_every_byte_once() {
    for architecture in TinyArchitecture::ALL {
        let model = open(&TinyModel::new(architecture));
        let meta = model.metadata();
        let tokens = meta.strings("tokenizer.ggml.tokens").expect("a vocabulary");
        let types = meta.i32s("tokenizer.ggml.token_type").expect("types");
        assert_eq!(tokens.len(), types.len());
        assert_eq!(tokens.iter().collect::<HashSet<_>>().len(), tokens.len(), "{architecture:?}");
        assert_eq!(model.tensor("token_embd.weight").map(|t| t.rows()), Some(tokens.len()));
        let eos = meta.u32("tokenizer.ggml.eos_token_id").expect("an end of sequence");
        assert_eq!(types[eos as usize], 3, "{architecture:?} ends with {}", tokens[eos as usize]);
        if architecture != TinyArchitecture::Gemma3 {
            assert_eq!(
                (tokens[b'A' as usize], tokens[b' ' as usize], tokens[b'\n' as usize]),
                ("A", "\u{120}", "\u{10a}")
            );
            assert_eq!((tokens[0], tokens[0xad], tokens[0xff]), ("\u{100}", "\u{143}", "\u{ff}"));
        }
    }
}

#[test]
fn rope_factors_feel_all_three_bands() {
    let model = open(&TinyModel::new(TinyArchitecture::LlamaRopeFactors));
    let factors = values(&model, "rope_freqs.weight");
    assert_eq!(factors.len(), 8);
    assert_eq!(factors[..2], [1.0, 1.0]);
    assert!(factors[2] > 1.0 && factors[2] < 8.0, "{factors:?}");
    assert_eq!(factors[3..], [8.0; 5]);
}

#[test]
fn impossible_descriptions_are_errors() {
    let usual = TinyModel::default();
    let cases = [
        (
            TinyModel { num_kv_heads: 3, ..usual.clone() },
            "4 heads of dimension 16 with 3 KV heads: \
             the dimension must be even, and the KV heads must divide the heads",
        ),
        (
            TinyModel { head_dim: 15, ..usual.clone() },
            "4 heads of dimension 15 with 2 KV heads: \
             the dimension must be even, and the KV heads must divide the heads",
        ),
        (TinyModel { weight_type: WeightType::Q4K, ..usual.clone() }, "tiny models cannot have weights of type Q4_K"),
        (
            TinyModel { feed_forward_length: 80, ..usual.clone() },
            "tensor \"blk.0.ffn_down.weight\" of shape [80, 64] has 5440 bytes of data, none are expected",
        ),
    ];
    for (model, expected) in cases {
        assert_eq!(model.gguf().expect_err(expected).to_string(), expected);
    }
}
