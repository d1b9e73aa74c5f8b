//! Attention inside a block of tokens in which every query sees every key: what each key receives.
//!
//! A query's weights are an f32 softmax over the block, summed in f64 by ascending query and head: a block's bits depend on
//! nothing but the block.

use crate::compute::Compute;
use crate::simd::{Kernel, Simd, dispatch};

/// Queries and keys of one block of tokens.
#[derive(Clone, Copy, Debug)]
pub struct TwoWayBlock<'a> {
    /// `[tokens, num_heads, head_dim]`.
    pub queries: &'a [f32],
    /// `[tokens, num_kv_heads, head_dim]`.
    pub keys: &'a [f32],
    /// Query heads that read a KV head.
    pub group_size: usize,
    /// KV heads.
    pub num_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// What a dot product is multiplied with.
    pub scale: f32,
}

impl TwoWayBlock<'_> {
    /// What each key receives, the mean over the heads of a group of the sum over queries: `[num_kv_heads, tokens]`.
    ///
    /// # Panics
    /// If queries and keys are not of one number of whole tokens.
    pub fn column_sums(&self, compute: &Compute) -> Vec<f32> {
        let Self { queries, keys, group_size, num_kv_heads, head_dim, .. } = *self;
        let width = num_kv_heads * head_dim;
        assert!(width > 0 && keys.len().is_multiple_of(width), "{} elements are not whole rows of {width}", keys.len());
        assert_eq!(queries.len(), keys.len() * group_size, "as many rows of queries as of keys");
        let num_tokens = keys.len() / width;
        let mut sums = vec![0.0; num_kv_heads * num_tokens];
        compute.threads.for_each_chunk(&mut sums, num_tokens.max(1), |kv_head, sums| {
            let mut channels = vec![0.0; keys.len() / num_kv_heads];
            for (token, row) in keys.chunks_exact(width).enumerate() {
                for (i, k) in row[kv_head * head_dim..(kv_head + 1) * head_dim].iter().enumerate() {
                    channels[i * num_tokens + token] = *k;
                }
            }
            dispatch(compute.isa, OfHead { block: *self, kv_head, channels: &channels, sums });
        });
        sums
    }
}

/// One KV head of a block.
struct OfHead<'a> {
    block: TwoWayBlock<'a>,
    kv_head: usize,
    /// Keys `[head_dim, tokens]`.
    channels: &'a [f32],
    sums: &'a mut [f32],
}

impl Kernel for OfHead<'_> {
    type Output = ();

    // Plain loops over tokens, which the compiler vectorises; products and sums are rounded apart, so the bits are the same
    // everywhere.
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let TwoWayBlock { queries, group_size, num_kv_heads, head_dim, scale, .. } = self.block;
        let num_tokens = self.sums.len();
        let (mut weights, mut totals) = (vec![0.0_f32; num_tokens], vec![0.0_f64; num_tokens]);
        for head in self.kv_head * group_size..(self.kv_head + 1) * group_size {
            for row in queries.chunks_exact(num_kv_heads * group_size * head_dim) {
                weights.fill(0.0);
                let query = &row[head * head_dim..(head + 1) * head_dim];
                for (q, keys) in query.iter().zip(self.channels.chunks_exact(num_tokens)) {
                    weights.iter_mut().zip(keys).for_each(|(logit, k)| *logit += q * k);
                }
                let most = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let mut sum = 0.0_f64;
                for weight in &mut weights {
                    *weight = ((*weight - most) * scale).exp();
                    sum += f64::from(*weight);
                }
                totals.iter_mut().zip(&weights).for_each(|(total, weight)| *total += f64::from(*weight) / sum);
            }
        }
        for (sum, total) in self.sums.iter_mut().zip(totals) {
            *sum = (total / group_size as f64) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;
    use std::num::NonZeroUsize;

    const NUM_TOKENS: usize = 37;

    fn noise(len: usize, seed: usize) -> Vec<f32> {
        (0..len).map(|i| (((i + seed) * 7919 + 13) % 1009) as f32 / 500.0 - 1.0).collect()
    }

    fn sums(isa: Isa, num_threads: usize) -> Vec<f32> {
        let (queries, keys) = (noise(NUM_TOKENS * 6 * 20, 1), noise(NUM_TOKENS * 2 * 20, 5));
        let block =
            TwoWayBlock { queries: &queries, keys: &keys, group_size: 3, num_kv_heads: 2, head_dim: 20, scale: 0.5 };
        block.column_sums(&Compute::new(isa, NonZeroUsize::new(num_threads).unwrap()))
    }

    #[test]
    fn they_are_column_sums_of_a_softmax_without_a_mask() {
        let (queries, keys) = (noise(NUM_TOKENS * 6 * 20, 1), noise(NUM_TOKENS * 2 * 20, 5));
        for (kv_head, got) in sums(Isa::detect(), 2).chunks(NUM_TOKENS).enumerate() {
            let mut expected = [0.0; NUM_TOKENS];
            for head in 3 * kv_head..3 * kv_head + 3 {
                for query in queries.chunks(6 * 20).map(|row| &row[head * 20..head * 20 + 20]) {
                    let logit = |key: &[f32]| -> f64 {
                        let key = &key[kv_head * 20..kv_head * 20 + 20];
                        query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>() * 0.5
                    };
                    let weights: Vec<f64> = keys.chunks(2 * 20).map(|key| logit(key).exp()).collect();
                    let total: f64 = weights.iter().sum();
                    expected.iter_mut().zip(weights).for_each(|(sum, weight)| *sum += weight / total / 3.0);
                }
            }
            let together: f32 = got.iter().sum();
            assert!((together - NUM_TOKENS as f32).abs() < 1e-3, "every query gives 1: {together}");
            for (got, expected) in got.iter().zip(expected) {
                assert!((f64::from(*got) - expected).abs() < 1e-5 * expected, "{got} for {expected}");
            }
        }
    }

    #[test]
    fn neither_threads_nor_instruction_sets_show() {
        let one = sums(Isa::detect(), 1);
        for isa in Isa::available() {
            for num_threads in 1..4 {
                assert_eq!(sums(isa, num_threads), one, "{isa}, {num_threads} threads");
            }
        }
    }

    #[test]
    fn no_token_receives_nothing() {
        let block = TwoWayBlock { queries: &[], keys: &[], group_size: 3, num_kv_heads: 2, head_dim: 20, scale: 1.0 };
        assert!(block.column_sums(&Compute::new(Isa::detect(), NonZeroUsize::MIN)).is_empty());
    }
}
