//! The tensors of a tiny model: their names, their shapes, and scales at which every part of a layer matters.

use std::f64::consts::TAU;

use super::{Random, TinyArchitecture, TinyModel};

/// Llama 3.1's own base and scaling, but for an original context so short that tiny heads feel all three bands.
pub(super) const LLAMA3_ROPE_BASE: f32 = 500_000.0;
const LLAMA3_FACTOR: f64 = 8.0;
const LLAMA3_LOW: f64 = 1.0;
const LLAMA3_HIGH: f64 = 4.0;
const LLAMA3_ORIGINAL_CONTEXT: f64 = 256.0;

/// One tensor before it is encoded.
pub(super) struct Weights {
    pub(super) name: String,
    /// The fastest dimension first: `[cols]` or `[cols, rows]`.
    pub(super) shape: Vec<u64>,
    pub(super) values: Vec<f32>,
    /// Matrices take the model's weight type; everything else is F32 in real files too.
    pub(super) is_matrix: bool,
}

/// Draws every tensor of `model` in the order in which files have them.
pub(super) fn draw(model: &TinyModel, vocab_size: usize, random: &mut Random) -> Vec<Weights> {
    let mut draw = Draw { random, drawn: Vec::new() };
    let embedding = model.embedding_length;
    draw.matrix("token_embd.weight", vocab_size, embedding, 2.0);
    draw.around("output_norm.weight", embedding, 1.0);
    if !model.tied {
        draw.matrix("output.weight", vocab_size, embedding, 2.0);
    }
    if model.architecture == TinyArchitecture::LlamaRopeFactors {
        draw.vector("rope_freqs.weight", llama3_rope_factors(model.head_dim));
    }
    for layer in 0..model.num_layers {
        draw.layer(model, &format!("blk.{layer}."));
    }
    draw.drawn
}

struct Draw<'a> {
    random: &'a mut Random,
    drawn: Vec<Weights>,
}

impl Draw<'_> {
    fn layer(&mut self, model: &TinyModel, prefix: &str) {
        let TinyModel { architecture, embedding_length: embedding, feed_forward_length: feed_forward, .. } = *model;
        let q_width = model.num_heads * model.head_dim;
        let kv_width = model.num_kv_heads * model.head_dim;
        let name = |tensor: &str| format!("{prefix}{tensor}");

        self.around(&name("attn_norm.weight"), embedding, 1.0);
        // Scores q k / sqrt(head_dim) of about 2 nats of spread; where q and k are normalised, the norms set it.
        let qk_gain = if architecture.has_qk_norm() { 1.0 } else { 1.4 };
        self.matrix(&name("attn_q.weight"), q_width, embedding, qk_gain);
        self.matrix(&name("attn_k.weight"), kv_width, embedding, qk_gain);
        self.matrix(&name("attn_v.weight"), kv_width, embedding, 1.2);
        if architecture == TinyArchitecture::Qwen2 {
            for (tensor, width) in [("attn_q.bias", q_width), ("attn_k.bias", kv_width), ("attn_v.bias", kv_width)] {
                let values = (0..width).map(|_| self.random.bell(0.7)).collect();
                self.vector(&name(tensor), values);
            }
        }
        if architecture.has_qk_norm() {
            self.around(&name("attn_q_norm.weight"), model.head_dim, 1.4);
            self.around(&name("attn_k_norm.weight"), model.head_dim, 1.4);
        }
        self.matrix(&name("attn_output.weight"), embedding, q_width, 1.5);
        if architecture == TinyArchitecture::Gemma3 {
            self.around(&name("post_attention_norm.weight"), embedding, 1.0);
        }
        self.around(&name("ffn_norm.weight"), embedding, 1.0);
        self.matrix(&name("ffn_gate.weight"), feed_forward, embedding, 1.5);
        self.matrix(&name("ffn_up.weight"), feed_forward, embedding, 1.5);
        self.matrix(&name("ffn_down.weight"), embedding, feed_forward, 1.0);
        if architecture == TinyArchitecture::Gemma3 {
            self.around(&name("post_ffw_norm.weight"), embedding, 1.0);
        }
    }

    /// A matrix that turns inputs of size 1 into outputs of size `gain`.
    fn matrix(&mut self, name: &str, rows: usize, cols: usize, gain: f32) {
        let deviation = gain / (cols as f32).sqrt();
        let values = (0..rows * cols).map(|_| self.random.bell(deviation)).collect();
        self.drawn.push(Weights {
            name: name.to_owned(),
            shape: vec![cols as u64, rows as u64],
            values,
            is_matrix: true,
        });
    }

    /// The weights of a norm: a fifth up and down of `mean`.
    fn around(&mut self, name: &str, len: usize, mean: f32) {
        let values = (0..len).map(|_| mean * (1.0 + self.random.bell(0.2))).collect();
        self.vector(name, values);
    }

    fn vector(&mut self, name: &str, values: Vec<f32>) {
        self.drawn.push(Weights { name: name.to_owned(), shape: vec![values.len() as u64], values, is_matrix: false });
    }
}

/// The divisors of Llama 3.1's rope frequencies: 1 where more than `LLAMA3_HIGH` wavelengths fit the original context,
/// `LLAMA3_FACTOR` where fewer than `LLAMA3_LOW` do, and between them what blends the two frequencies linearly.
fn llama3_rope_factors(head_dim: usize) -> Vec<f32> {
    let factor = |i: usize| {
        let frequency = f64::from(LLAMA3_ROPE_BASE).powf(-((2 * i) as f64) / head_dim as f64);
        let wavelengths = LLAMA3_ORIGINAL_CONTEXT * frequency / TAU;
        let smooth = ((wavelengths - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)).clamp(0.0, 1.0);
        (1.0 / ((1.0 - smooth) / LLAMA3_FACTOR + smooth)) as f32
    };
    (0..head_dim / 2).map(factor).collect()
}
