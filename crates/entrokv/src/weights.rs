//! The weights of a decoder, packed for the kernels.
//!
//! Every tensor of the file must be used: a tensor nobody asked for would mean that the model computes something this
//! engine does not, and that is an error, never a silent difference.

use std::collections::HashSet;

use entrokv_kernels::compute::Compute;
use entrokv_kernels::dequantize::dequantize;
use entrokv_kernels::matrix::{Matrix, MatrixError, WeightMemory};
use entrokv_kernels::weight_type::WeightType;

use crate::config::{Architecture, ModelConfig};
use crate::gguf::{Gguf, Tensor};

/// A linear map with an optional bias.
pub struct Projection {
    /// `[out, in]`.
    pub matrix: Matrix,
    /// `[out]`.
    pub bias: Option<Vec<f32>>,
}

/// Weights of one layer; norms are f32 vectors.
pub struct LayerWeights {
    /// Before attention, `[embedding_len]`.
    pub attention_norm: Vec<f32>,
    /// Query projection.
    pub q: Projection,
    /// Key projection.
    pub k: Projection,
    /// Value projection.
    pub v: Projection,
    /// Of every query head, `[head_dim]`.
    pub q_norm: Option<Vec<f32>>,
    /// Of every key head, `[head_dim]`.
    pub k_norm: Option<Vec<f32>>,
    /// Output projection of attention.
    pub output: Projection,
    /// After attention's projection (Gemma 3).
    pub post_attention_norm: Option<Vec<f32>>,
    /// Before the feed-forward block.
    pub ffn_norm: Vec<f32>,
    /// Gate projection.
    pub gate: Projection,
    /// Up projection.
    pub up: Projection,
    /// Down projection.
    pub down: Projection,
    /// After the feed-forward block (Gemma 3).
    pub post_ffn_norm: Option<Vec<f32>>,
}

/// All weights of a decoder.
pub struct Weights {
    /// Token embeddings `[vocab, embedding_len]`; also the output matrix when `output` is `None` (tied).
    pub embedding: Matrix,
    /// The layers.
    pub layers: Vec<LayerWeights>,
    /// Before the output matrix.
    pub output_norm: Vec<f32>,
    /// Output matrix of an untied model.
    pub output: Option<Matrix>,
}

/// Why weights could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// A tensor the architecture needs.
    #[error("tensor '{name}' is missing")]
    Missing {
        /// Its name.
        name: String,
    },
    /// A tensor of another shape than the metadata says.
    #[error("tensor '{name}' has shape {got:?}, expected {expected:?}")]
    Shape {
        /// Its name.
        name: String,
        /// Shape in the file, columns first.
        got: Vec<u64>,
        /// Shape the metadata implies.
        expected: Vec<u64>,
    },
    /// A tensor this engine would not use.
    #[error(
        "tensor '{name}' is not part of a {architecture} decoder, so this file computes something this engine does not"
    )]
    Unexpected {
        /// Its name.
        name: String,
        /// The architecture.
        architecture: &'static str,
    },
    /// A tensor that cannot be packed.
    #[error("tensor '{name}': {source}")]
    Pack {
        /// Its name.
        name: String,
        /// The kernels' reason.
        source: MatrixError,
    },
}

/// The values of `rope_freqs.weight`, where the file has them.
pub fn rope_factors(gguf: &Gguf) -> Option<Vec<f32>> {
    gguf.tensor(ROPE_FACTORS).map(|tensor| values(&tensor))
}

const ROPE_FACTORS: &str = "rope_freqs.weight";

fn values(tensor: &Tensor<'_>) -> Vec<f32> {
    let mut out = vec![0.0; tensor.shape.iter().product::<u64>() as usize];
    dequantize(tensor.weight_type, tensor.data, &mut out);
    out
}

/// Takes tensors out of a file by name and remembers which were taken.
struct Loader<'a> {
    gguf: &'a Gguf,
    compute: &'a Compute,
    memory: WeightMemory,
    taken: HashSet<String>,
}

impl<'a> Loader<'a> {
    fn find(&mut self, name: &str, expected: &[usize]) -> Result<Option<Tensor<'a>>, WeightsError> {
        let Some(tensor) = self.gguf.tensor(name) else { return Ok(None) };
        let expected: Vec<u64> = expected.iter().map(|&n| n as u64).collect();
        if tensor.shape != expected.as_slice() {
            return Err(WeightsError::Shape { name: name.to_string(), got: tensor.shape.to_vec(), expected });
        }
        self.taken.insert(name.to_string());
        Ok(Some(tensor))
    }

    fn optional_vector(&mut self, name: &str, len: usize) -> Result<Option<Vec<f32>>, WeightsError> {
        Ok(self.find(name, &[len])?.map(|tensor| values(&tensor)))
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>, WeightsError> {
        self.optional_vector(name, len)?.ok_or_else(|| WeightsError::Missing { name: name.to_string() })
    }

    fn optional_matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<Option<Matrix>, WeightsError> {
        let Some(tensor) = self.find(name, &[cols, rows])? else { return Ok(None) };
        Matrix::pack(self.compute, &mut self.memory, tensor.weight_type, rows, cols, tensor.data)
            .map(Some)
            .map_err(|source| WeightsError::Pack { name: name.to_string(), source })
    }

    fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<Matrix, WeightsError> {
        self.optional_matrix(name, rows, cols)?.ok_or_else(|| WeightsError::Missing { name: name.to_string() })
    }

    /// `{stem}.weight` and, where the file has it (or `bias` demands it), `{stem}.bias`.
    fn projection(&mut self, stem: &str, rows: usize, cols: usize, bias: Bias) -> Result<Projection, WeightsError> {
        let matrix = self.matrix(&format!("{stem}.weight"), rows, cols)?;
        let name = format!("{stem}.bias");
        let bias = match bias {
            Bias::Required => Some(self.vector(&name, rows)?),
            Bias::IfPresent => self.optional_vector(&name, rows)?,
        };
        Ok(Projection { matrix, bias })
    }
}

#[derive(Clone, Copy)]
enum Bias {
    Required,
    IfPresent,
}

impl Weights {
    /// Packs every tensor of `gguf` for the kernels of `compute`, calling `progress` with the share done after each layer.
    ///
    /// # Errors
    /// [`WeightsError`] naming the tensor.
    pub fn load(
        gguf: &Gguf,
        config: &ModelConfig,
        compute: &Compute,
        progress: &mut dyn FnMut(f32),
    ) -> Result<Self, WeightsError> {
        let mut loader = Loader { gguf, compute, memory: WeightMemory::new(), taken: HashSet::new() };
        let width = config.embedding_len;
        let name = "token_embd.weight";
        let vocab = gguf.tensor(name).ok_or_else(|| WeightsError::Missing { name: name.to_string() })?.rows();
        let embedding = loader.matrix(name, vocab, width)?;
        let output_norm = loader.vector("output_norm.weight", width)?;
        let output = loader.optional_matrix("output.weight", vocab, width)?;
        let mut layers = Vec::with_capacity(config.layers.len());
        for index in 0..config.layers.len() {
            layers.push(LayerWeights::load(&mut loader, config, index)?);
            progress((index + 1) as f32 / config.layers.len() as f32);
        }
        loader.taken.insert(ROPE_FACTORS.to_string());
        match gguf.tensors().find(|tensor| !loader.taken.contains(tensor.name)) {
            None => Ok(Self { embedding, layers, output_norm, output }),
            Some(tensor) => Err(WeightsError::Unexpected {
                name: tensor.name.to_string(),
                architecture: config.architecture.name(),
            }),
        }
    }

    /// Every matrix of the model.
    fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        let layer = |l| {
            let LayerWeights { q, k, v, output, gate, up, down, .. }: &LayerWeights = l;
            [q, k, v, output, gate, up, down].map(|projection| &projection.matrix)
        };
        [Some(&self.embedding), self.output.as_ref()].into_iter().flatten().chain(self.layers.iter().flat_map(layer))
    }

    /// Bytes the packed matrices hold.
    pub fn held_bytes(&self) -> usize {
        self.matrices().map(Matrix::held_bytes).sum()
    }

    /// Encodings of the matrices.
    pub fn types(&self) -> impl Iterator<Item = WeightType> {
        self.matrices().map(Matrix::weight_type)
    }
}

impl LayerWeights {
    fn load(loader: &mut Loader<'_>, config: &ModelConfig, index: usize) -> Result<Self, WeightsError> {
        let at = |part: &str| format!("blk.{index}.{part}");
        let (width, ffn, head_dim) = (config.embedding_len, config.ffn_len, config.head_dim);
        let (q_width, kv_width) = (config.num_heads * head_dim, config.num_kv_heads * head_dim);
        let qkv_bias = if config.architecture == Architecture::Qwen2 { Bias::Required } else { Bias::IfPresent };
        let qk_norm = matches!(config.architecture, Architecture::Qwen3 | Architecture::Gemma3);
        let post_norm = config.architecture == Architecture::Gemma3;
        let norm = |loader: &mut Loader<'_>, wanted: bool, part: &str, len: usize| {
            wanted.then(|| loader.vector(&at(part), len)).transpose()
        };
        Ok(Self {
            attention_norm: loader.vector(&at("attn_norm.weight"), width)?,
            q: loader.projection(&at("attn_q"), q_width, width, qkv_bias)?,
            k: loader.projection(&at("attn_k"), kv_width, width, qkv_bias)?,
            v: loader.projection(&at("attn_v"), kv_width, width, qkv_bias)?,
            q_norm: norm(loader, qk_norm, "attn_q_norm.weight", head_dim)?,
            k_norm: norm(loader, qk_norm, "attn_k_norm.weight", head_dim)?,
            output: loader.projection(&at("attn_output"), width, q_width, Bias::IfPresent)?,
            post_attention_norm: norm(loader, post_norm, "post_attention_norm.weight", width)?,
            ffn_norm: loader.vector(&at("ffn_norm.weight"), width)?,
            gate: loader.projection(&at("ffn_gate"), ffn, width, Bias::IfPresent)?,
            up: loader.projection(&at("ffn_up"), ffn, width, Bias::IfPresent)?,
            down: loader.projection(&at("ffn_down"), width, ffn, Bias::IfPresent)?,
            post_ffn_norm: norm(loader, post_norm, "post_ffw_norm.weight", width)?,
        })
    }
}
