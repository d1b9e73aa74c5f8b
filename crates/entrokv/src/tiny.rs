//! Seeded tiny models: whole GGUF files of a few hundred kilobytes, one kind per architecture, built in memory.
//!
//! They answer nonsense, but in every other respect they are models: real tensor names, metadata, a vocabulary that can
//! encode any text, a chat template. Whatever is not about the quality of an answer is tested on them, without a
//! download and in milliseconds.
//!
//! ```
//! use entrokv::{gguf::Gguf, tiny::{TinyArchitecture, TinyModel}};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let model = Gguf::from_bytes(TinyModel::new(TinyArchitecture::Qwen3).gguf()?)?;
//! assert_eq!(model.metadata().str("general.architecture")?, "qwen3");
//! # Ok(())
//! # }
//! ```
//!
//! The weights are drawn so that every part of a layer matters: attention is neither uniform nor on one token, what a
//! layer adds has the size of what it is added to, and logits spread over several nats. The same description gives the
//! same bytes on every machine.

use std::str::FromStr;

use entrokv_kernels::weight_type::WeightType;
use thiserror::Error;

use crate::gguf::{GgufWriter, WriteError};

mod encode;
mod random;
mod vocabulary;
mod weights;

use encode::encode;
use random::Random;
use weights::Weights;

/// The ways in which a model can be built; most are architectures, one is a variant that a file can have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TinyArchitecture {
    /// The plain decoder.
    #[default]
    Llama,
    /// The same with Llama 3's rope factors in the file (`rope_freqs.weight`) and a BOS token before every text.
    LlamaRopeFactors,
    /// Biases of q, k and v.
    Qwen2,
    /// Norms of q and k, and heads that are wider together than the embedding.
    Qwen3,
    /// Window layers with every 6th global, norms of q and k and after each block, a scaled embedding, and a
    /// SentencePiece vocabulary.
    Gemma3,
}

impl TinyArchitecture {
    /// Every one of them.
    pub const ALL: [Self; 5] = [Self::Llama, Self::LlamaRopeFactors, Self::Qwen2, Self::Qwen3, Self::Gemma3];

    /// The name by which [`FromStr`] knows it.
    pub fn name(self) -> &'static str {
        match self {
            Self::LlamaRopeFactors => "llama-rope-factors",
            other => other.gguf_name(),
        }
    }

    /// The value of `general.architecture`, and the prefix of the architecture's keys.
    pub fn gguf_name(self) -> &'static str {
        match self {
            Self::Llama | Self::LlamaRopeFactors => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Gemma3 => "gemma3",
        }
    }

    fn has_qk_norm(self) -> bool {
        matches!(self, Self::Qwen3 | Self::Gemma3)
    }
}

/// No tiny architecture of this name.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("no tiny model is called {got:?}: there are {}", TinyArchitecture::ALL.map(TinyArchitecture::name).join(", "))]
pub struct UnknownTinyArchitecture {
    /// The name asked for.
    pub got: String,
}

impl FromStr for TinyArchitecture {
    type Err = UnknownTinyArchitecture;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let found = Self::ALL.into_iter().find(|architecture| architecture.name() == name);
        found.ok_or_else(|| UnknownTinyArchitecture { got: name.to_owned() })
    }
}

/// The description of a tiny model; start from [`TinyModel::new`] and change what the test is about.
#[derive(Clone, Debug, PartialEq)]
pub struct TinyModel {
    /// How it is built.
    pub architecture: TinyArchitecture,
    /// Whether the output matrix is the embedding's (no `output.weight` in the file).
    pub tied: bool,
    /// Decoder layers.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of a head; even.
    pub head_dim: usize,
    /// Width of the residual stream.
    pub embedding_length: usize,
    /// Width of the feed-forward block.
    pub feed_forward_length: usize,
    /// The longest text that the file says the model can read.
    pub context_length: u32,
    /// Tokens that a window layer sees (Gemma 3 only).
    pub window: u32,
    /// Of all matrices; norms and biases are F32. One of F32, F16, BF16, Q4_1 and Q8_0.
    pub weight_type: WeightType,
    /// Other seeds give other weights.
    pub seed: u64,
}

impl Default for TinyModel {
    fn default() -> Self {
        Self::new(TinyArchitecture::default())
    }
}

/// Why a description gives no file.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum TinyModelError {
    /// A type to which weights cannot be encoded here.
    #[error("tiny models cannot have weights of type {}", got.name())]
    WeightType {
        /// The type asked for.
        got: WeightType,
    },
    /// Heads that do not go together.
    #[error(
        "{num_heads} heads of dimension {head_dim} with {num_kv_heads} KV heads: \
         the dimension must be even, and the KV heads must divide the heads"
    )]
    Heads {
        /// Query heads asked for.
        num_heads: usize,
        /// Key and value heads asked for.
        num_kv_heads: usize,
        /// Width of a head asked for.
        head_dim: usize,
    },
    /// A width of zero, or one that is no whole number of blocks of the weight type.
    #[error(transparent)]
    Write(#[from] WriteError),
}

impl TinyModel {
    /// The usual model of this architecture: tied, of 2 layers (7 for Gemma 3: one is global and one comes after it).
    pub fn new(architecture: TinyArchitecture) -> Self {
        let model = Self {
            architecture,
            tied: true,
            num_layers: 2,
            num_heads: 4,
            num_kv_heads: 2,
            head_dim: 16,
            embedding_length: 64,
            feed_forward_length: 96,
            context_length: 8192,
            window: 32,
            weight_type: WeightType::Q8_0,
            seed: 1,
        };
        match architecture {
            TinyArchitecture::Llama | TinyArchitecture::LlamaRopeFactors | TinyArchitecture::Qwen2 => model,
            TinyArchitecture::Qwen3 => Self { head_dim: 32, ..model },
            TinyArchitecture::Gemma3 => Self { num_layers: 7, num_kv_heads: 1, head_dim: 32, ..model },
        }
    }

    /// The bytes of the model's file.
    ///
    /// # Errors
    /// The geometry or the weight type is impossible.
    pub fn gguf(&self) -> Result<Vec<u8>, TinyModelError> {
        let Self { num_heads, num_kv_heads, head_dim, .. } = *self;
        if num_kv_heads == 0 || !num_heads.is_multiple_of(num_kv_heads) || !head_dim.is_multiple_of(2) {
            return Err(TinyModelError::Heads { num_heads, num_kv_heads, head_dim });
        }
        let mut file = GgufWriter::new();
        self.write_metadata(&mut file);
        let vocab_size = vocabulary::write(&mut file, self.architecture);
        let mut random = Random::new(self.seed);
        for Weights { name, shape, values, is_matrix } in weights::draw(self, vocab_size, &mut random) {
            let ty = if is_matrix { self.weight_type } else { WeightType::F32 };
            let data = encode(ty, &values).ok_or(TinyModelError::WeightType { got: ty })?;
            file.tensor(name, ty, &shape, data);
        }
        Ok(file.to_bytes()?)
    }

    fn write_metadata(&self, file: &mut GgufWriter) {
        let architecture = self.architecture.gguf_name();
        let key = |name: &str| format!("{architecture}.{name}");
        let rope_base = match self.architecture {
            TinyArchitecture::Llama => 10_000.0_f32,
            TinyArchitecture::LlamaRopeFactors => weights::LLAMA3_ROPE_BASE,
            TinyArchitecture::Qwen2 | TinyArchitecture::Qwen3 | TinyArchitecture::Gemma3 => 1_000_000.0,
        };
        file.metadata("general.architecture", architecture)
            .metadata("general.name", format!("tiny {}, seed {}", self.architecture.name(), self.seed).as_str())
            .metadata(key("context_length"), self.context_length)
            .metadata(key("embedding_length"), self.embedding_length as u32)
            .metadata(key("block_count"), self.num_layers as u32)
            .metadata(key("feed_forward_length"), self.feed_forward_length as u32)
            .metadata(key("attention.head_count"), self.num_heads as u32)
            .metadata(key("attention.head_count_kv"), self.num_kv_heads as u32)
            .metadata(key("attention.layer_norm_rms_epsilon"), 1e-5)
            .metadata(key("rope.freq_base"), rope_base);
        // Files of the llama family say how much of a head is rotated; all say a head's width where it is no quotient.
        if architecture == "llama" {
            file.metadata(key("rope.dimension_count"), self.head_dim as u32);
        }
        if self.num_heads * self.head_dim != self.embedding_length {
            file.metadata(key("attention.key_length"), self.head_dim as u32)
                .metadata(key("attention.value_length"), self.head_dim as u32);
        }
        if self.architecture == TinyArchitecture::Gemma3 {
            file.metadata(key("attention.sliding_window"), self.window);
        }
    }
}

#[cfg(test)]
mod tests;
