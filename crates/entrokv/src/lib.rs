//! EntroKV: an LLM inference engine whose KV cache is allocated, scored and freed at (layer, KV head, page).
//!
//! ```no_run
//! use std::path::Path;
//! use entrokv::{EvictionOptions, Model, ModelOptions, Request, SpecialTokens, parse_policy};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut model = Model::open(Path::new("model.gguf"), &ModelOptions::default(), &mut |_| ())?;
//! let prompt = model.tokenizer.encode("Call me", SpecialTokens::Parse)?;
//! let request = Request {
//!     eviction: Some(EvictionOptions {
//!         budget: "20%".parse()?,
//!         policy: parse_policy("page-entro-kv:preset=serving")?.into(),
//!     }),
//!     ..Request::greedy(prompt, 64)
//! };
//! let completion = model.engine.generate(request, |step| print!("{}", step.text))?;
//! assert!(completion.kv.bytes_held <= completion.kv.bytes_budget.unwrap_or(u64::MAX));
//! # Ok(())
//! # }
//! ```
//!
//! The layers below: `entrokv-cache` (pages, budgets, policies; no tensors) and `entrokv-kernels` (the arithmetic).
//! Their types that appear here are re-exported, so this crate alone is enough to run models.

pub mod chat_template;
mod coding;
pub mod config;
pub mod detokenizer;
pub mod engine;
mod eviction;
pub mod forced_answer;
pub mod gates;
pub mod gguf;
pub mod kv_file;
pub mod load;
pub mod model;
pub mod needle;
mod output_norms;
mod probe;
#[cfg(feature = "pull")]
pub mod pull;
pub mod repeat_instruction;
pub mod sampler;
pub mod scoring;
pub mod segments;
mod sequence;
pub mod stop;
pub mod store;
mod text_stream;
pub mod tiny;
pub mod tokenizer;
pub mod turned_sinks;
pub mod weights;

pub use entrokv_cache::{
    AUTO, Budget, CacheShape, Encoding, EvictionPolicy, LayerKind, LeastBudget, POLICIES, PageKind, Pins, Question,
    Ratio, Reading, Rotation, RowOrigin, deciding_later, parse_policy, recipe, recipe_fits,
};
pub use entrokv_kernels::activations::Arithmetic;
pub use entrokv_kernels::isa::Isa;

pub use crate::chat_template::{ChatTemplate, Message, RenderOptions};
pub use crate::config::ModelConfig;
pub use crate::engine::{
    Completion, Engine, EngineOptions, ForkError, KvBytes, KvReport, PageKindRefused, PassProgress, StepOutput,
    SubmitError,
};
pub use crate::eviction::{EvictionReport, StepReads};
pub use crate::forced_answer::{AnswerError, AnswerScore};
pub use crate::gates::GatesError;
pub use crate::gguf::Gguf;
pub use crate::kv_file::{KvFileError, LoadOptions, LoadedSequence, ModelId, SaveError};
pub use crate::load::{Identity, LoadError, Model, ModelOptions};
pub use crate::repeat_instruction::RepeatInstruction;
pub use crate::sampler::SamplingOptions;
pub use crate::scoring::{Comparison, ScoreError, TextScore};
pub use crate::sequence::{EndTokens, EvictionOptions, FinishReason, Request, SequenceId, Timing};
pub use crate::tokenizer::{SpecialTokens, Tokenizer};
pub use crate::weights::rope_factors;
