//! The gate of FastKVzip: a small attention of each token to itself, against learned sinks.

use entrokv_kernels::compute::Compute;

use super::GateSizes;
use super::error::GatesError;
use super::file::{Dim, GateFile};
use super::linear::{Linear, inputs};

/// What is added to the mean square in the norms, as where the gates were trained.
const EPSILON: f64 = 1e-6;

/// The gate of one layer (Kim et al. 2026), of queries and keys of `m` elements:
///
/// `q = norm(W_q x + b_q)`, `k = norm(W_k x)`, own logit `l = k q / sqrt(m) + b`, those of the sinks `e_j = E_j q / sqrt(m)`;
/// the score of a KV head is the mean over its query heads of `1 / (1 + sum_j exp(e_j - l))`.
#[derive(Debug)]
pub(super) struct FastKvzipGate {
    /// `[num_kv_heads group_size m, hidden]`.
    q: Linear,
    /// `[num_kv_heads m, hidden]`.
    k: Linear,
    /// `[m]`.
    q_norm: Vec<f64>,
    /// `[m]`.
    k_norm: Vec<f64>,
    /// `E`: `[num_kv_heads, sinks, m]`.
    base: Vec<f64>,
    /// `b`: `[num_kv_heads, group_size]`.
    bias: Vec<f64>,
}

impl FastKvzipGate {
    /// The tensors `stem.q_proj.weight`, `.q_proj.bias`, `.k_proj.weight`, `.q_norm.weight`, `.k_norm.weight`, `.k_base`, `.b`.
    pub(super) fn load(file: &mut GateFile<'_>, stem: &str, sizes: GateSizes) -> Result<Self, GatesError> {
        let GateSizes { hidden, num_kv_heads, group_size } = sizes;
        let heads = Dim::Is(num_kv_heads);
        let mut vector = |name: &str, shape: &[Dim]| -> Result<Vec<f64>, GatesError> {
            Ok(file.values(&format!("{stem}.{name}"), shape)?.into_iter().map(f64::from).collect())
        };
        let q_norm = vector("q_norm.weight", &[Dim::Any])?;
        let m = q_norm.len();
        let k_norm = vector("k_norm.weight", &[Dim::Is(m)])?;
        let base = vector("k_base", &[heads, Dim::Is(1), Dim::Any, Dim::Is(m)])?;
        let bias = vector("b", &[heads, Dim::Is(1), Dim::Is(group_size)])?;
        let q_rows = Dim::Is(num_kv_heads * group_size * m);
        Ok(Self {
            q: Linear::load(file, &format!("{stem}.q_proj"), q_rows, hidden)?,
            k: Linear::without_bias(file, &format!("{stem}.k_proj"), Dim::Is(num_kv_heads * m), hidden)?,
            q_norm,
            k_norm,
            base,
            bias,
        })
    }

    /// `[tokens, num_kv_heads]`.
    pub(super) fn scores(&self, compute: &Compute, x: &[f32]) -> Vec<f32> {
        let inputs = inputs(compute, x, self.q.num_inputs());
        let (queries, keys) = (self.q.of(compute, &inputs), self.k.of(compute, &inputs));
        let num_kv_heads = self.k.num_outputs() / self.k_norm.len();
        let mut scores = vec![0.0; inputs.num_tokens() * num_kv_heads];
        compute.threads.for_each_chunk(&mut scores, num_kv_heads, |token, scores| {
            let queries = &queries[token * self.q.num_outputs()..][..self.q.num_outputs()];
            let keys = &keys[token * self.k.num_outputs()..][..self.k.num_outputs()];
            for (kv_head, score) in scores.iter_mut().enumerate() {
                *score = self.score(kv_head, queries, keys) as f32;
            }
        });
        scores
    }

    /// The score of one token in one KV head, of the queries and keys of all.
    fn score(&self, kv_head: usize, queries: &[f32], keys: &[f32]) -> f64 {
        let m = self.k_norm.len();
        let num_kv_heads = self.k.num_outputs() / m;
        let group_size = self.bias.len() / num_kv_heads;
        let scale = 1.0 / (m as f64).sqrt();
        let key = normed(&keys[kv_head * m..][..m], &self.k_norm);
        let sinks = &self.base[kv_head * self.base.len() / num_kv_heads..][..self.base.len() / num_kv_heads];
        let of_head = |head: usize| {
            let query = normed(&queries[head * m..][..m], &self.q_norm);
            let own = dot(&key, &query) * scale + self.bias[head];
            let others: f64 = sinks.chunks_exact(m).map(|sink| (dot(sink, &query) * scale - own).exp()).sum();
            1.0 / (1.0 + others)
        };
        let heads = kv_head * group_size..(kv_head + 1) * group_size;
        heads.map(of_head).sum::<f64>() / group_size as f64
    }
}

/// `x_i / sqrt(mean x^2 + epsilon) gain_i`.
fn normed(x: &[f32], gain: &[f64]) -> Vec<f64> {
    let mean = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>() / x.len() as f64;
    let inverse = 1.0 / (mean + EPSILON).sqrt();
    x.iter().zip(gain).map(|(&x, gain)| f64::from(x) * inverse * gain).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
