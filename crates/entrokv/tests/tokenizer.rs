//! The ids of real models, against those that llama.cpp gives on the same files (`tests/fixtures/tokenizer/tokenize-*.json`).
//!
//! A model is looked for in the folder that `ENTROKV_MODELS` names; without it the test says so and passes.

use std::{env, fs, path::Path, sync::Arc};

use entrokv::{
    detokenizer::Detokenizer,
    gguf::Gguf,
    tokenizer::{SpecialTokens, Tokenizer},
};
use serde::Deserialize;

#[derive(Deserialize)]
struct Row {
    text: String,
    /// Without special tokens parsed, without BOS.
    ids: Vec<u32>,
    /// With special tokens parsed, and BOS added where the file says so, even where the text has one.
    ids_with_special: Vec<u32>,
}

fn agrees_with_llama_cpp(model: &str, golden: &str) {
    let rows =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizer").join(format!("tokenize-{golden}.json"));
    let rows: Vec<Row> = serde_json::from_slice(&fs::read(rows).expect("a committed file")).expect("rows");
    assert_eq!(rows.len(), 60);
    let Some(path) = env::var_os("ENTROKV_MODELS").map(|dir| Path::new(&dir).join(format!("{model}.gguf"))) else {
        return eprintln!("ENTROKV_MODELS is not set: {model} is not checked");
    };
    if !path.exists() {
        return eprintln!("{} does not exist: {model} is not checked", path.display());
    }
    let gguf = Gguf::open(&path).expect("a model file");
    let tokenizer = Arc::new(Tokenizer::from_metadata(gguf.metadata(), None).expect("a supported tokenizer"));
    let mut differing = Vec::new();
    for Row { text, ids, ids_with_special } in &rows {
        let encode = |special| tokenizer.encode(text, special).expect("a short text");
        if encode(SpecialTokens::Plain) != *ids || encode(SpecialTokens::ParseDoubling) != *ids_with_special {
            differing.push(text);
        }
        assert_eq!(tokenizer.decode(ids).expect("ids of the vocabulary"), *text);
        let mut stream = Detokenizer::new(Arc::clone(&tokenizer));
        let mut streamed: String = ids.iter().map(|&id| stream.push(id).expect("an id of the vocabulary")).collect();
        streamed.push_str(&stream.finish());
        assert_eq!(streamed, *text);
    }
    assert!(differing.is_empty(), "{model}: {} of {} texts differ: {differing:?}", differing.len(), rows.len());
}

#[test]
fn smollm2_135m_agrees_with_llama_cpp() {
    agrees_with_llama_cpp("smollm2-135m", "smollm2-135m-instruct-q4_1");
}

#[test]
fn gemma3_270m_agrees_with_llama_cpp() {
    agrees_with_llama_cpp("gemma3-270m", "gemma3-270m-q4_k_m");
}

#[test]
fn qwen2_5_0_5b_agrees_with_llama_cpp() {
    agrees_with_llama_cpp("qwen2.5-0.5b", "qwen2.5-0.5b");
}

#[test]
fn qwen2_5_1_5b_agrees_with_llama_cpp() {
    agrees_with_llama_cpp("qwen2.5-1.5b", "qwen2.5-coder-1.5b");
}
