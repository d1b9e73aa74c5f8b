//! A number a KV head: how much it looks far back. Known from a table, or estimated from the prompt.

use std::ops::Range;

use entrokv_cache::LayerKind;
use entrokv_kernels::rope::RopeLayout;

use crate::config::{ModelConfig, RopeConfig};

/// Places over which the mean key is repeated.
const PLACES: usize = 500;

/// The gates of the KV groups of the global layers, in (layer, KV head) order.
#[derive(Clone, Debug)]
pub(crate) enum HeadGates {
    /// From a table.
    Given(Vec<f32>),
    /// To be estimated when the prompt has been read.
    Reading(HeadMeans),
    /// Estimated, for as long as the sequence lives.
    Estimated(Vec<f32>),
}

/// Sums of queries and keys before RoPE, in f64 and by ascending position: chunks do not show.
#[derive(Clone, Debug)]
pub(crate) struct HeadMeans {
    /// Of each global layer.
    layers: Vec<LayerSums>,
}

#[derive(Clone, Debug, Default)]
struct LayerSums {
    num_tokens: usize,
    /// `[num_heads, head_dim]`.
    queries: Vec<f64>,
    /// `[num_kv_heads, head_dim]`.
    keys: Vec<f64>,
}

impl HeadGates {
    /// Gates to be estimated from the queries and keys of `num_layers` global layers.
    pub(crate) fn to_be_read(num_layers: usize) -> Self {
        Self::Reading(HeadMeans { layers: vec![LayerSums::default(); num_layers] })
    }

    /// Whether queries and keys must be shown, each once.
    pub(crate) fn is_reading(&self) -> bool {
        matches!(self, Self::Reading(_))
    }

    /// Takes in the queries and keys of further tokens in a global layer.
    pub(crate) fn add(&mut self, layer: usize, num_tokens: usize, queries: &[f32], keys: &[f32]) {
        if let Self::Reading(means) = self {
            let sums = &mut means.layers[layer];
            sums.num_tokens += num_tokens;
            add_rows(&mut sums.queries, queries, num_tokens);
            add_rows(&mut sums.keys, keys, num_tokens);
        }
    }

    /// The gates; estimated now if they were not known.
    pub(crate) fn settle(&mut self, config: &ModelConfig) -> &[f32] {
        if let Self::Reading(means) = self {
            *self = Self::Estimated(means.estimate(config));
        }
        match self {
            Self::Given(gates) | Self::Estimated(gates) => gates,
            Self::Reading(_) => unreachable!("they have just been estimated"),
        }
    }

    /// Goes on with what the last turn of the sequence has estimated.
    pub(crate) fn carry_on(&mut self, last: Self) {
        if let (Self::Reading(_), Self::Estimated(_)) = (&self, &last) {
            *self = last;
        }
    }

    /// The gates `table` `[layers, num_kv_heads]` of the global layers among `kinds`.
    pub(crate) fn given(table: &[f32], kinds: &[LayerKind]) -> Self {
        let rows = table.chunks(table.len() / kinds.len().max(1)).zip(kinds);
        let of_global = rows.filter(|(_, kind)| **kind == LayerKind::Global);
        Self::Given(of_global.flat_map(|(row, _)| row).copied().collect())
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> u64 {
        let bytes = match self {
            Self::Given(gates) | Self::Estimated(gates) => gates.capacity() * size_of::<f32>(),
            Self::Reading(means) => {
                let elements = |sums: &LayerSums| sums.queries.capacity() + sums.keys.capacity();
                means.layers.iter().map(elements).sum::<usize>() * size_of::<f64>()
            }
        };
        bytes as u64
    }
}

fn add_rows(sums: &mut Vec<f64>, rows: &[f32], num_rows: usize) {
    let width = rows.len() / num_rows;
    sums.resize(width, 0.0);
    for row in rows.chunks_exact(width) {
        sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x));
    }
}

impl HeadMeans {
    /// The mean of [`attention_area`] over the query heads of each KV head.
    fn estimate(&self, config: &ModelConfig) -> Vec<f32> {
        let (d, group_size) = (config.head_dim, config.group_size());
        let mut gates = Vec::with_capacity(self.layers.len() * config.num_kv_heads);
        for LayerSums { num_tokens, queries, keys } in &self.layers {
            let mean = |sums: &[f64]| -> Vec<f64> { sums.iter().map(|sum| sum / *num_tokens as f64).collect() };
            let (queries, keys) = (mean(queries), mean(keys));
            for (key, heads) in keys.chunks_exact(d).zip(queries.chunks_exact(group_size * d)) {
                let areas = heads
                    .chunks_exact(d)
                    .map(|q| attention_area(q, key, &config.rope, f64::from(config.attention_scale)));
                gates.push((areas.sum::<f64>() / group_size as f64) as f32);
            }
        }
        gates
    }
}

/// How far back a head looks: `key` stands at 500 places, `query` at the last of them, both rotated; the mean over the places of the
/// attention up to each. 1 where all of it is on the first place, 0.002 where all is on the last.
///
/// The estimate that DuoAttention's authors offer in place of training, as kvpress has it (there over 50 texts).
fn attention_area(query: &[f64], key: &[f64], rope: &RopeConfig, scale: f64) -> f64 {
    let num_pairs = rope.global.len();
    let pair = |index: usize| match rope.layout {
        RopeLayout::Interleaved => (2 * index, 2 * index + 1),
        RopeLayout::Halves => (index, index + num_pairs),
    };
    let rest: f64 = unrotated(num_pairs, query.len()).map(|i| query[i] * key[i]).sum();
    // Rotated queries and keys meet by their distance alone.
    let logit = |place: usize| {
        let distance = (PLACES - 1 - place) as f64;
        let rotated = rope.global.iter().enumerate().map(|(index, frequency)| {
            let ((a, b), (sin, cos)) = (pair(index), (distance * frequency).sin_cos());
            (query[a] * key[a] + query[b] * key[b]) * cos + (query[a] * key[b] - query[b] * key[a]) * sin
        });
        (rotated.sum::<f64>() + rest) * scale
    };
    let logits: Vec<f64> = (0..PLACES).map(logit).collect();
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let (mut mass, mut area) = (0.0, 0.0);
    for (place, logit) in logits.into_iter().enumerate() {
        let weight = (logit - largest).exp();
        mass += weight;
        area += weight * (PLACES - place) as f64;
    }
    area / mass / PLACES as f64
}

/// The elements of a head that are not rotated.
fn unrotated(num_pairs: usize, head_dim: usize) -> Range<usize> {
    2 * num_pairs..head_dim
}

#[cfg(test)]
mod tests {
    use super::super::tests::{array, golden};
    use super::*;

    #[test]
    fn areas_are_those_of_the_reference() {
        let case = &golden("duo-attention")["cases"][1];
        let ((_, q), (_, k)) = (array(&case["means"]["q"]), array(&case["means"]["k"]));
        let (d, (_, expected)) = (16, array(&case["area_of_query_heads"]));
        let halves = RopeConfig {
            layout: RopeLayout::Halves,
            global: (0..d / 2).map(|i| 1e4_f64.powf(-2.0 * i as f64 / d as f64)).collect(),
            window: None,
        };
        let interleaved = RopeConfig { layout: RopeLayout::Interleaved, ..halves.clone() };
        // The same vectors with the elements of each pair side by side.
        let paired = |x: &[f64]| -> Vec<f64> { (0..d).map(|i| x[i / 2 + i % 2 * d / 2]).collect() };
        for (head, expected) in expected.iter().enumerate() {
            let wide = |x: &[f32]| -> Vec<f64> { x.iter().map(|&x| f64::from(x)).collect() };
            let (query, key) = (wide(&q[head * d..][..d]), wide(&k[head / 3 * d..][..d]));
            for got in [
                attention_area(&query, &key, &halves, 0.25),
                attention_area(&paired(&query), &paired(&key), &interleaved, 0.25),
            ] {
                assert!((got - f64::from(*expected)).abs() < 1e-6, "head {head}: {got} for {expected}");
            }
        }
    }

    #[test]
    fn sums_do_not_depend_on_chunks() {
        let rows: Vec<f32> = (0..70).map(|i| ((i * 37 % 101) as f32).sin() * 1e3).collect();
        let read = |chunk: usize| {
            let mut gates = HeadGates::to_be_read(1);
            for rows in rows.chunks(chunk * 7) {
                gates.add(0, rows.len() / 7, rows, rows);
            }
            let HeadGates::Reading(means) = gates else { panic!("still reading") };
            let bits = |sums: &[f64]| -> Vec<u64> { sums.iter().map(|sum| sum.to_bits()).collect() };
            (means.layers[0].num_tokens, bits(&means.layers[0].queries), bits(&means.layers[0].keys))
        };
        assert_eq!(read(1), read(10));
        assert_eq!(read(3), read(10));
    }
}
