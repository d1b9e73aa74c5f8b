//! EntroKV: an LLM inference engine whose KV cache is allocated, scored and freed at (layer, KV head, page).

pub mod chat_template;
pub mod config;
pub mod detokenizer;
pub mod engine;
pub mod eviction;
pub mod gguf;
pub mod model;
#[cfg(feature = "pull")]
pub mod pull;
pub mod sampler;
pub mod sequence;
pub mod stop;
pub mod store;
pub mod tiny;
pub mod tokenizer;
pub mod weights;
