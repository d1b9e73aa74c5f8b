//! The naive oracle of the engine: a dense decoder in f64, the whole attention matrix at once, with a mask.
//!
//! It shares nothing with the engine but the file reader, the configuration and the dequantiser: no pages, no chunks, no
//! threads, no kernels.

use std::ops::Range;

use entrokv::config::FeedForward;
use entrokv::gguf::Gguf;
use entrokv::{LayerKind, ModelConfig};
use entrokv_kernels::dequantize::dequantize;
use entrokv_kernels::rope::RopeLayout;

/// A decoder of a file.
pub struct DenseDecoder<'a> {
    gguf: &'a Gguf,
    config: &'a ModelConfig,
}

/// Which keys a query sees, beyond causality and windows: `(layer, kv_head, query position, key position)`.
pub type Mask<'a> = dyn Fn(usize, usize, usize, usize) -> bool + 'a;

/// Where a token stands, for the rotation of its query or key, when a query attends: `(query position, token's position)`. Of global
/// layers only: in window layers every token stands at its position.
pub type Slots<'a> = dyn Fn(usize, usize) -> usize + 'a;

/// A row-major matrix.
struct Rows {
    width: usize,
    data: Vec<f64>,
}

impl Rows {
    fn row(&self, i: usize) -> &[f64] {
        &self.data[i * self.width..(i + 1) * self.width]
    }

    fn rows(&self) -> impl Iterator<Item = &[f64]> {
        self.data.chunks_exact(self.width)
    }
}

impl<'a> DenseDecoder<'a> {
    pub fn new(gguf: &'a Gguf, config: &'a ModelConfig) -> Self {
        Self { gguf, config }
    }

    fn tensor(&self, name: &str) -> Option<Rows> {
        let tensor = self.gguf.tensor(name)?;
        let mut values = vec![0.0f32; tensor.shape.iter().product::<u64>() as usize];
        dequantize(tensor.weight_type, tensor.data, &mut values);
        Some(Rows { width: tensor.cols(), data: values.into_iter().map(f64::from).collect() })
    }

    fn need(&self, name: &str) -> Rows {
        self.tensor(name).unwrap_or_else(|| panic!("tensor {name}"))
    }

    fn norm(&self, x: &Rows, name: &str) -> Rows {
        let weight = self.need(name);
        let width = weight.data.len();
        let mut data = Vec::with_capacity(x.data.len());
        for part in x.data.chunks_exact(width) {
            let mean = part.iter().map(|v| v * v).sum::<f64>() / width as f64;
            let scale = 1.0 / (mean + f64::from(self.config.rms_epsilon)).sqrt();
            data.extend(part.iter().zip(&weight.data).map(|(v, w)| v * scale * w));
        }
        Rows { width: x.width, data }
    }

    fn norm_if_present(&self, x: Rows, name: &str) -> Rows {
        if self.gguf.tensor(name).is_some() { self.norm(&x, name) } else { x }
    }

    fn project(&self, x: &Rows, stem: &str) -> Rows {
        let weight = self.need(&format!("{stem}.weight"));
        let bias = self.tensor(&format!("{stem}.bias"));
        let width = weight.data.len() / weight.width;
        let mut data = Vec::new();
        for row in x.rows() {
            for (i, w) in weight.rows().enumerate() {
                let dot: f64 = row.iter().zip(w).map(|(a, b)| a * b).sum();
                data.push(dot + bias.as_ref().map_or(0.0, |b| b.data[i]));
            }
        }
        Rows { width, data }
    }

    /// Rotates one head to `position`.
    fn rope(&self, head: &mut [f64], layer: usize, position: usize) {
        let rope = &self.config.rope;
        let frequencies = match (self.config.layers[layer], &rope.window) {
            (LayerKind::Window(_), Some(window)) => window,
            _ => &rope.global,
        };
        let half = frequencies.len();
        for (i, frequency) in frequencies.iter().enumerate() {
            let (sin, cos) = (position as f64 * frequency).sin_cos();
            let (a, b) = match rope.layout {
                RopeLayout::Interleaved => (2 * i, 2 * i + 1),
                RopeLayout::Halves => (i, i + half),
            };
            let (x, y) = (head[a], head[b]);
            head[a] = x * cos - y * sin;
            head[b] = x * sin + y * cos;
        }
    }

    /// The heads of `x` as they are when every token stands at its position.
    fn at_positions(&self, x: &Rows, layer: usize) -> Rows {
        let mut data = x.data.clone();
        for (position, row) in data.chunks_exact_mut(x.width).enumerate() {
            row.chunks_exact_mut(self.config.head_dim).for_each(|head| self.rope(head, layer, position));
        }
        Rows { width: x.width, data }
    }

    /// Logits of every position, `[tokens][vocab]`.
    pub fn logits(&self, tokens: &[u32], mask: &Mask<'_>) -> Vec<Vec<f64>> {
        self.run(tokens, mask, &|_, token| token, &mut |_, _, _| ())
    }

    /// The same where queries and keys are rotated by `slots`.
    pub fn logits_by_slot(&self, tokens: &[u32], mask: &Mask<'_>, slots: &Slots<'_>) -> Vec<Vec<f64>> {
        self.run(tokens, mask, slots, &mut |_, _, _| ())
    }

    /// What a pass that repeats `chunk` of the first `len` tokens, by those from `len` on, looks for: the largest softmax
    /// probability over heads and rows, `[layers][KV heads][chunk]`, over `sinks`, the chunk and the pass.
    pub fn reconstruction(&self, tokens: &[u32], len: usize, chunk: Range<usize>, sinks: usize) -> Vec<Vec<Vec<f64>>> {
        let config = self.config;
        let d = config.head_dim;
        let mut scores = vec![vec![vec![0.0_f64; chunk.len()]; config.num_kv_heads]; config.layers.len()];
        self.run(tokens, &|_, _, _, _| true, &|_, token| token, &mut |layer, q, k| {
            let (q, k) = (self.at_positions(q, layer), self.at_positions(k, layer));
            for query in len..tokens.len() {
                let keys: Vec<usize> =
                    (0..=query).filter(|key| *key < sinks || chunk.contains(key) || *key >= len).collect();
                for head in 0..config.num_heads {
                    let kv_head = head / config.group_size();
                    let qh = &q.row(query)[head * d..(head + 1) * d];
                    let score = |&key: &usize| {
                        let kh = &k.row(key)[kv_head * d..(kv_head + 1) * d];
                        qh.iter().zip(kh).map(|(a, b)| a * b).sum::<f64>() * f64::from(config.attention_scale)
                    };
                    let logits: Vec<f64> = keys.iter().map(score).collect();
                    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let total: f64 = logits.iter().map(|s| (s - max).exp()).sum();
                    for (logit, key) in logits.iter().zip(&keys).filter(|(_, key)| chunk.contains(key)) {
                        let best = &mut scores[layer][kv_head][key - chunk.start];
                        *best = ((logit - max).exp() / total).max(*best);
                    }
                }
            }
        });
        scores
    }

    /// As [`DenseDecoder::logits_by_slot`]; `see` is shown every layer's queries and keys before they are rotated.
    fn run(
        &self,
        tokens: &[u32],
        mask: &Mask<'_>,
        slots: &Slots<'_>,
        see: &mut dyn FnMut(usize, &Rows, &Rows),
    ) -> Vec<Vec<f64>> {
        let config = self.config;
        let embedding = self.need("token_embd.weight");
        let scale = f64::from(config.embedding_scale);
        let data = tokens.iter().flat_map(|&t| embedding.row(t as usize).iter().map(move |v| v * scale)).collect();
        let mut x = Rows { width: config.embedding_len, data };
        for layer in 0..config.layers.len() {
            let at = |part: &str| format!("blk.{layer}.{part}");
            let normed = self.norm(&x, &at("attn_norm.weight"));
            let q = self.norm_if_present(self.project(&normed, &at("attn_q")), &at("attn_q_norm.weight"));
            let k = self.norm_if_present(self.project(&normed, &at("attn_k")), &at("attn_k_norm.weight"));
            let v = self.project(&normed, &at("attn_v"));
            see(layer, &q, &k);
            let attended = self.attend(layer, &q, &k, &v, mask, slots);
            let out =
                self.norm_if_present(self.project(&attended, &at("attn_output")), &at("post_attention_norm.weight"));
            add(&mut x, &out);

            let normed = self.norm(&x, &at("ffn_norm.weight"));
            let mut gate = self.project(&normed, &at("ffn_gate"));
            let up = self.project(&normed, &at("ffn_up"));
            for (g, u) in gate.data.iter_mut().zip(&up.data) {
                *g = u * match config.feed_forward {
                    FeedForward::SwiGlu => *g / (1.0 + (-*g).exp()),
                    FeedForward::GeGlu => {
                        let inner = (2.0 / std::f64::consts::PI).sqrt() * (*g + 0.044715 * g.powi(3));
                        0.5 * *g * (1.0 + inner.tanh())
                    }
                };
            }
            let out = self.norm_if_present(self.project(&gate, &at("ffn_down")), &at("post_ffw_norm.weight"));
            add(&mut x, &out);
        }
        let x = self.norm(&x, "output_norm.weight");
        let tied = self.gguf.tensor("output.weight").is_none();
        let out = self.project(&x, if tied { "token_embd" } else { "output" });
        out.rows().map(<[f64]>::to_vec).collect()
    }

    /// `q` and `k` are not rotated yet.
    fn attend(&self, layer: usize, q: &Rows, k: &Rows, v: &Rows, mask: &Mask<'_>, slots: &Slots<'_>) -> Rows {
        let config = self.config;
        let (d, tokens) = (config.head_dim, q.data.len() / q.width);
        let mut out = Rows { width: q.width, data: vec![0.0; q.data.len()] };
        let (q_there, k_there) = (self.at_positions(q, layer), self.at_positions(k, layer));
        // One head of a token, at its position where it stands there.
        let head_of = |there: &Rows, rows: &Rows, query: usize, token: usize, head: usize| -> Vec<f64> {
            let slot = match config.layers[layer] {
                LayerKind::Global => slots(query, token),
                LayerKind::Window(_) => token,
            };
            if slot == token {
                return there.row(token)[head * d..(head + 1) * d].to_vec();
            }
            let mut turned = rows.row(token)[head * d..(head + 1) * d].to_vec();
            self.rope(&mut turned, layer, slot);
            turned
        };
        for query in 0..tokens {
            for head in 0..config.num_heads {
                let kv_head = head / config.group_size();
                let sees = |key: &usize| {
                    let in_window = match config.layers[layer] {
                        LayerKind::Global => true,
                        LayerKind::Window(window) => query - key < window as usize,
                    };
                    in_window && mask(layer, kv_head, query, *key)
                };
                let keys: Vec<usize> = (0..=query).filter(sees).collect();
                let qh = head_of(&q_there, q, query, query, head);
                let part = |rows: &'_ Rows, key: usize, i: usize| rows.data[key * rows.width + kv_head * d + i];
                let scores: Vec<f64> = keys
                    .iter()
                    .map(|&key| {
                        let kh = head_of(&k_there, k, query, key, kv_head);
                        qh.iter().zip(&kh).map(|(q, k)| q * k).sum::<f64>() * f64::from(config.attention_scale)
                    })
                    .collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let total: f64 = scores.iter().map(|s| (s - max).exp()).sum();
                for (score, &key) in scores.iter().zip(&keys) {
                    let p = (score - max).exp() / total;
                    for i in 0..d {
                        out.data[query * q.width + head * d + i] += p * part(v, key, i);
                    }
                }
            }
        }
        out
    }
}

fn add(x: &mut Rows, y: &Rows) {
    for (a, b) in x.data.iter_mut().zip(&y.data) {
        *a += b;
    }
}
