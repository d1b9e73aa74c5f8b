//! Geometry and constants of a decoder, read from a GGUF's metadata.
//!
//! One decoder serves every architecture: what differs between them is data here, not code elsewhere. Whatever this
//! file does not know how to compute exactly is an error that lists what is supported.

use entrokv_cache::{CacheShape, LayerKind, ShapeError};
use entrokv_kernels::rope::RopeLayout;

use crate::gguf::{Metadata, MetadataError, Value};

/// A family of decoders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// Llama 1 to 3 and what shares their shape (SmolLM2, Mistral).
    Llama,
    /// Qwen2 and Qwen2.5: biases on the Q, K and V projections.
    Qwen2,
    /// Qwen3 (dense): RMS norm of every query and key head.
    Qwen3,
    /// Gemma 3 (text): window layers, q/k norms, post norms, scaled embeddings, two RoPE bases.
    Gemma3,
}

impl Architecture {
    /// All of them, in the order error messages list them.
    pub const ALL: [Self; 4] = [Self::Llama, Self::Qwen2, Self::Qwen3, Self::Gemma3];

    /// Spelling in `general.architecture`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Gemma3 => "gemma3",
        }
    }
}

/// The gated activation of the feed-forward block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeedForward {
    /// `silu(gate) * up`.
    SwiGlu,
    /// `gelu_tanh(gate) * up`.
    GeGlu,
}

/// Rotary position embedding of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Which elements form a pair.
    pub layout: RopeLayout,
    /// Inverse frequencies `[rotated dims / 2]` of global layers.
    pub global: Vec<f64>,
    /// Those of window layers, where they differ.
    pub window: Option<Vec<f64>>,
}

/// Everything the forward pass needs to know that is not a weight.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The family.
    pub architecture: Architecture,
    /// `general.name`, or the architecture's where the file has none.
    pub name: String,
    /// Attention reach of each layer.
    pub layers: Vec<LayerKind>,
    /// Width of the residual stream.
    pub embedding_len: usize,
    /// Width of the feed-forward block.
    pub ffn_len: usize,
    /// Query heads.
    pub num_heads: usize,
    /// KV heads; `num_heads / num_kv_heads` query heads share one.
    pub num_kv_heads: usize,
    /// Elements of a query, key or value.
    pub head_dim: usize,
    /// Tokens the model was trained to read.
    pub context_len: usize,
    /// Epsilon of every RMS norm.
    pub rms_epsilon: f32,
    /// Factor on `q . k`.
    pub attention_scale: f32,
    /// Factor on token embeddings.
    pub embedding_scale: f32,
    /// Gated activation.
    pub feed_forward: FeedForward,
    /// Rotary embedding.
    pub rope: RopeConfig,
}

/// Why a model cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Metadata missing or of the wrong type.
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    /// An architecture this engine has no decoder for.
    #[error("architecture '{got}' is not supported (supported: {})", supported_architectures())]
    Architecture {
        /// `general.architecture` of the file.
        got: String,
    },
    /// A position scaling this engine does not compute.
    #[error(
        "rope scaling '{got}' is not supported (supported: none, linear, and Llama-3 factors in rope_freqs.weight)"
    )]
    RopeScaling {
        /// `rope.scaling.type` of the file.
        got: String,
    },
    /// A feature of the file that the decoder does not compute.
    #[error("{key} = {got} is not supported ({limit})")]
    Unsupported {
        /// Metadata key.
        key: String,
        /// Its value.
        got: String,
        /// What would be.
        limit: &'static str,
    },
    /// A number outside what can be true of a decoder.
    #[error("{key} = {got} is out of range ({limit})")]
    Range {
        /// Metadata key.
        key: String,
        /// Its value.
        got: u64,
        /// The range.
        limit: String,
    },
}

fn supported_architectures() -> String {
    Architecture::ALL.map(Architecture::name).join(", ")
}

/// Limits that no real decoder reaches; they keep a hostile header from asking for absurd tables.
const MAX_LAYERS: u64 = 1024;
const MAX_WIDTH: u64 = 1 << 20;
const MAX_CONTEXT: u64 = 1 << 30;

/// Gemma 3's constants that its GGUF files do not carry.
const GEMMA3_GLOBAL_EVERY: usize = 6;
const GEMMA3_WINDOW_ROPE_BASE: f64 = 10_000.0;
/// The 27B model scales attention by the width of a head as if there were no separate key length.
const GEMMA3_27B_LAYERS: usize = 62;
/// RoPE base of files that do not name one (the original Llama's).
const DEFAULT_ROPE_BASE: f64 = 10_000.0;

/// Which layers see a window only.
enum WindowPattern {
    /// Every n-th layer is global.
    GlobalEvery(usize),
    /// One flag a layer, set for window layers.
    Flags(Vec<bool>),
}

/// Reads `{architecture}.{key}` entries.
struct Keys<'a> {
    metadata: &'a Metadata,
    prefix: &'static str,
}

impl Keys<'_> {
    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.prefix)
    }

    fn has(&self, key: &str) -> bool {
        self.metadata.get(&self.key(key)).is_some()
    }

    fn count(&self, key: &str, limit: u64) -> Result<usize, ConfigError> {
        let key = self.key(key);
        let got = self.metadata.u64(&key)?;
        if (1..=limit).contains(&got) {
            Ok(got as usize)
        } else {
            Err(ConfigError::Range { key, got, limit: format!("1 to {limit}") })
        }
    }

    fn optional_count(&self, key: &str, limit: u64, default: usize) -> Result<usize, ConfigError> {
        if self.has(key) { self.count(key, limit) } else { Ok(default) }
    }

    fn optional_f32(&self, key: &str, default: f64) -> Result<f64, ConfigError> {
        if self.has(key) { Ok(f64::from(self.metadata.f32(&self.key(key))?)) } else { Ok(default) }
    }

    /// A RoPE base: positions would not be told apart, or be no numbers, with one that is not above 0.
    fn base(&self, key: &str, default: f64) -> Result<f64, ConfigError> {
        let base = self.optional_f32(key, default)?;
        if base.is_finite() && base > 0.0 {
            Ok(base)
        } else {
            Err(self.unsupported(key, base, "must be a positive number"))
        }
    }

    fn epsilon(&self, key: &str) -> Result<f32, ConfigError> {
        let epsilon = self.metadata.f32(&self.key(key))?;
        if (0.0..1.0).contains(&epsilon) {
            Ok(epsilon)
        } else {
            Err(self.unsupported(key, epsilon, "must be at least 0 and below 1"))
        }
    }

    fn window_pattern(&self, num_layers: usize) -> Result<WindowPattern, ConfigError> {
        let key = "attention.sliding_window_pattern";
        match self.metadata.get(&self.key(key)) {
            None => Ok(WindowPattern::GlobalEvery(GEMMA3_GLOBAL_EVERY)),
            Some(Value::Array(array)) => {
                let flags: Vec<bool> =
                    array.iter().filter_map(|v| if let Value::Bool(b) = v { Some(b) } else { None }).collect();
                if flags.len() == num_layers && array.len() == num_layers {
                    Ok(WindowPattern::Flags(flags))
                } else {
                    Err(self.unsupported(key, format!("{} values", array.len()), "must be one flag a layer"))
                }
            }
            Some(_) => Ok(WindowPattern::GlobalEvery(self.count(key, MAX_LAYERS)?)),
        }
    }

    fn unsupported(&self, key: &str, got: impl ToString, limit: &'static str) -> ConfigError {
        ConfigError::Unsupported { key: self.key(key), got: got.to_string(), limit }
    }
}

impl ModelConfig {
    /// Reads the configuration; `rope_factors` are the values of `rope_freqs.weight` where the file has that tensor
    /// (Llama 3.1's long-context factors: each inverse frequency is divided by its factor).
    ///
    /// # Errors
    /// [`ConfigError`]: a missing key, or anything the decoder would not compute exactly.
    pub fn from_metadata(metadata: &Metadata, rope_factors: Option<&[f32]>) -> Result<Self, ConfigError> {
        let got = metadata.str("general.architecture")?;
        let architecture = Architecture::ALL
            .into_iter()
            .find(|architecture| architecture.name() == got)
            .ok_or_else(|| ConfigError::Architecture { got: got.to_string() })?;
        let keys = Keys { metadata, prefix: architecture.name() };

        let num_layers = keys.count("block_count", MAX_LAYERS)?;
        let embedding_len = keys.count("embedding_length", MAX_WIDTH)?;
        let num_heads = keys.count("attention.head_count", MAX_WIDTH)?;
        let num_kv_heads = keys.optional_count("attention.head_count_kv", MAX_WIDTH, num_heads)?;
        if !num_heads.is_multiple_of(num_kv_heads) {
            return Err(keys.unsupported(
                "attention.head_count_kv",
                num_kv_heads,
                "must divide the number of query heads",
            ));
        }
        let head_dim = keys.optional_count("attention.key_length", 1024, embedding_len / num_heads)?;
        let value_dim = keys.optional_count("attention.value_length", 1024, head_dim)?;
        if value_dim != head_dim {
            return Err(keys.unsupported("attention.value_length", value_dim, "must equal the key length"));
        }
        for key in ["attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"] {
            if architecture != Architecture::Gemma3 && keys.has(key) {
                let value = keys.metadata.f32(&keys.key(key)).unwrap_or(f32::NAN);
                if value != 0.0 {
                    return Err(keys.unsupported(key, value, "only gemma3 has window layers, and no soft caps"));
                }
            }
        }
        if keys.has("expert_count") {
            let experts = metadata.u64(&keys.key("expert_count"))?;
            if experts > 0 {
                return Err(keys.unsupported("expert_count", experts, "mixtures of experts have no decoder here"));
            }
        }

        let layers = match architecture {
            Architecture::Gemma3 => {
                let window = keys.count("attention.sliding_window", MAX_CONTEXT)? as u32;
                // Newer converters write the pattern: a period, or one flag a layer.
                let kind = |is_window: bool| if is_window { LayerKind::Window(window) } else { LayerKind::Global };
                match keys.window_pattern(num_layers)? {
                    WindowPattern::GlobalEvery(n) => (1..=num_layers).map(|l| kind(!l.is_multiple_of(n))).collect(),
                    WindowPattern::Flags(flags) => flags.into_iter().map(kind).collect(),
                }
            }
            _ => vec![LayerKind::Global; num_layers],
        };
        Ok(Self {
            architecture,
            name: metadata.str("general.name").unwrap_or(architecture.name()).to_string(),
            layers,
            embedding_len,
            ffn_len: keys.count("feed_forward_length", MAX_WIDTH)?,
            num_heads,
            num_kv_heads,
            head_dim,
            context_len: keys.count("context_length", MAX_CONTEXT)?,
            rms_epsilon: keys.epsilon("attention.layer_norm_rms_epsilon")?,
            attention_scale: match architecture {
                Architecture::Gemma3 if num_layers == GEMMA3_27B_LAYERS => {
                    (1.0 / (embedding_len as f64 / num_heads as f64).sqrt()) as f32
                }
                _ => (1.0 / (head_dim as f64).sqrt()) as f32,
            },
            embedding_scale: if architecture == Architecture::Gemma3 { (embedding_len as f32).sqrt() } else { 1.0 },
            feed_forward: if architecture == Architecture::Gemma3 { FeedForward::GeGlu } else { FeedForward::SwiGlu },
            rope: RopeConfig::from_keys(&keys, architecture, head_dim, rope_factors)?,
        })
    }

    /// Geometry of the cache, in pages of `page_size` tokens.
    ///
    /// # Errors
    /// [`ShapeError`] for a page size outside 1 to 256.
    pub fn cache_shape(&self, page_size: usize) -> Result<CacheShape, ShapeError> {
        CacheShape::new(self.layers.clone(), self.num_kv_heads, self.group_size(), self.head_dim, page_size)
    }

    /// Query heads that share a KV head (the paper's r).
    pub fn group_size(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }
}

impl RopeConfig {
    fn from_keys(
        keys: &Keys<'_>,
        architecture: Architecture,
        head_dim: usize,
        factors: Option<&[f32]>,
    ) -> Result<Self, ConfigError> {
        let rotated = keys.optional_count("rope.dimension_count", head_dim as u64, head_dim)?;
        if !rotated.is_multiple_of(2) {
            return Err(keys.unsupported("rope.dimension_count", rotated, "must be even"));
        }
        let base = keys.base("rope.freq_base", DEFAULT_ROPE_BASE)?;
        let scaling = match keys.metadata.get(&keys.key("rope.scaling.type")) {
            None => "none",
            Some(_) => keys.metadata.str(&keys.key("rope.scaling.type"))?,
        };
        let linear = match scaling {
            "none" => keys.optional_f32("rope.scale_linear", 1.0)?,
            "linear" => keys.optional_f32("rope.scaling.factor", 1.0)?,
            got => return Err(ConfigError::RopeScaling { got: got.to_string() }),
        };
        if !(linear.is_finite() && linear > 0.0) {
            return Err(keys.unsupported("rope.scaling.factor", linear, "must be a positive number"));
        }
        let mut global = inverse_frequencies(rotated, base, linear);
        if let Some(factors) = factors {
            if factors.len() != global.len() {
                let limit = "one factor for every pair of rotated elements";
                return Err(ConfigError::Unsupported {
                    key: "rope_freqs.weight".into(),
                    got: factors.len().to_string(),
                    limit,
                });
            }
            for (frequency, &factor) in global.iter_mut().zip(factors) {
                *frequency /= f64::from(factor);
            }
        }
        // Window layers of Gemma 3 have a base of their own and are never scaled.
        let window = (architecture == Architecture::Gemma3)
            .then(|| keys.base("rope.freq_base_swa", GEMMA3_WINDOW_ROPE_BASE))
            .transpose()?
            .map(|base| inverse_frequencies(rotated, base, 1.0));
        let layout = match architecture {
            Architecture::Llama => RopeLayout::Interleaved,
            Architecture::Qwen2 | Architecture::Qwen3 | Architecture::Gemma3 => RopeLayout::Halves,
        };
        Ok(Self { layout, global, window })
    }
}

/// `base^(-2i/d) / linear` for each pair `i` (Su et al. 2021; linear interpolation: Chen et al. 2023).
fn inverse_frequencies(rotated: usize, base: f64, linear: f64) -> Vec<f64> {
    (0..rotated / 2).map(|i| base.powf(-((2 * i) as f64) / rotated as f64) / linear).collect()
}
