//! What the tokens of a prompt receive from each other inside blocks, for policies that look both ways.

use std::ops::Range;
use std::sync::Arc;

use entrokv_cache::{CacheShape, KvGroup, LayerKind};
use entrokv_kernels::compute::Compute;
use entrokv_kernels::two_way::TwoWayBlock;

/// Column sums of attention without a mask inside blocks that begin at fixed positions, of every global layer.
///
/// Queries and keys of a block that is not whole wait until it is, or the prompt ends: where a prompt was cut does not show. A
/// step that fails half way leaves half of its rows behind: its sequence is cancelled, as any is whose policy was watching.
#[derive(Clone)]
pub(super) struct TwoWaySums {
    shape: Arc<CacheShape>,
    blocks: Blocks,
    layers: Vec<OfLayer>,
}

/// Where blocks are.
#[derive(Clone, Copy)]
pub(super) struct Blocks {
    /// Tokens of a block.
    pub(super) chunk: usize,
    /// Position of the first block.
    pub(super) first: usize,
    /// Tokens before a prompt's end that no block holds.
    pub(super) last: usize,
    /// What a dot product is multiplied with.
    pub(super) scale: f32,
}

/// Rows of one layer that follow each other.
#[derive(Clone, Copy)]
pub(crate) struct LayerRows<'a> {
    /// The layer.
    pub(crate) layer: usize,
    /// Position of the first row.
    pub(crate) first_position: usize,
    /// `[rows, num_heads, head_dim]`, after RoPE.
    pub(crate) queries: &'a [f32],
    /// `[rows, num_kv_heads, head_dim]`, after RoPE.
    pub(crate) keys: &'a [f32],
}

#[derive(Clone, Default)]
struct OfLayer {
    /// Rows of the block that is being filled.
    queries: Vec<f32>,
    keys: Vec<f32>,
    /// Positions of the tokens that have sums, ascending.
    positions: Vec<u32>,
    /// `[tokens, num_kv_heads]`.
    sums: Vec<f32>,
}

impl TwoWaySums {
    pub(super) fn new(shape: &Arc<CacheShape>, blocks: Blocks) -> Self {
        Self { shape: Arc::clone(shape), blocks, layers: vec![OfLayer::default(); shape.layers.len()] }
    }

    /// Adds rows of a prompt that ends before `prompt_end`.
    pub(super) fn add(&mut self, rows: LayerRows<'_>, prompt_end: usize, compute: &Compute) {
        if self.shape.layers[rows.layer] != LayerKind::Global {
            return;
        }
        let CacheShape { num_kv_heads, group_size, head_dim, .. } = *self.shape;
        let Blocks { chunk, first, last, scale } = self.blocks;
        let width = num_kv_heads * head_dim;
        let num_rows = rows.keys.len() / width;
        let end = prompt_end.saturating_sub(last);
        let layer = &mut self.layers[rows.layer];
        let mut from = rows.first_position.max(first);
        let rows_end = (rows.first_position + num_rows).min(end);
        while from < rows_end {
            // Up to the end of the block that `from` lies in.
            let block_end = first + ((from - first) / chunk + 1) * chunk;
            let to = block_end.min(rows_end);
            let part = |width: usize| -> Range<usize> {
                (from - rows.first_position) * width..(to - rows.first_position) * width
            };
            layer.queries.extend_from_slice(&rows.queries[part(width * group_size)]);
            layer.keys.extend_from_slice(&rows.keys[part(width)]);
            layer.positions.extend(from as u32..to as u32);
            if to == block_end || to == end {
                let OfLayer { queries, keys, .. } = &*layer;
                let block = TwoWayBlock { queries, keys, group_size, num_kv_heads, head_dim, scale };
                let sums = block.column_sums(compute);
                let num_tokens = sums.len() / num_kv_heads;
                let by_token = (0..sums.len()).map(|at| sums[at % num_kv_heads * num_tokens + at / num_kv_heads]);
                layer.sums.extend(by_token);
                (layer.queries, layer.keys) = (Vec::new(), Vec::new());
            }
            from = to;
        }
    }

    /// What each token of `group` at one of `positions` (ascending) received; NaN for one that no block held.
    pub(super) fn at(&self, group: KvGroup, positions: &[u32]) -> Vec<f32> {
        let OfLayer { positions: known, sums, .. } = &self.layers[group.layer as usize];
        let of_head = sums.iter().skip(group.kv_head as usize).step_by(self.shape.num_kv_heads);
        let mut known = known.iter().zip(of_head).peekable();
        let received = |position: &u32| {
            while known.next_if(|(known, _)| *known < position).is_some() {}
            known.next_if(|(known, _)| *known == position).map_or(f32::NAN, |(_, sum)| *sum)
        };
        positions.iter().map(received).collect()
    }

    /// Bytes of the sums and of what waits.
    pub(super) fn bytes(&self) -> u64 {
        let numbers = |layer: &OfLayer| {
            layer.queries.capacity() + layer.keys.capacity() + layer.positions.capacity() + layer.sums.capacity()
        };
        // All of them have four bytes.
        self.layers.iter().map(|layer| (numbers(layer) * size_of::<f32>()) as u64).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use entrokv_kernels::isa::Isa;
    use std::num::NonZeroUsize;

    const GROUP: KvGroup = KvGroup { layer: 0, kv_head: 1 };

    /// Two KV heads of two query heads of 4; rows of a prompt of 30 tokens, cut where `ends` say.
    fn sums(ends: &[usize]) -> Vec<f32> {
        let shape = Arc::new(CacheShape::new(vec![LayerKind::Global], 2, 2, 4, 16).unwrap());
        let compute = Compute::new(Isa::detect(), NonZeroUsize::MIN);
        let noise = |i: usize| ((i * 7919 + 13) % 1009) as f32 / 500.0 - 1.0;
        let (queries, keys): (Vec<f32>, Vec<f32>) =
            ((0..30 * 16).map(noise).collect(), (0..30 * 8).map(|i| noise(i + 5)).collect());
        let mut sums = TwoWaySums::new(&shape, Blocks { chunk: 10, first: 3, last: 2, scale: 1.0 });
        let mut from = 0;
        for &end in ends {
            let (queries, keys) = (&queries[from * 16..end * 16], &keys[from * 8..end * 8]);
            sums.add(LayerRows { layer: 0, first_position: from, queries, keys }, 30, &compute);
            from = end;
        }
        sums.at(GROUP, &(0..30).collect::<Vec<_>>())
    }

    #[test]
    fn blocks_are_at_fixed_positions_the_last_one_shorter_and_cuts_do_not_show() {
        let whole = sums(&[30]);
        let taken: Vec<bool> = whole.iter().map(|sum| !sum.is_nan()).collect();
        assert_eq!(taken, (0..30).map(|token| (3..28).contains(&token)).collect::<Vec<_>>());
        for block in [3..13, 13..23, 23..28] {
            let (together, len) = (whole[block.clone()].iter().sum::<f32>(), block.len() as f32);
            assert!((together - len).abs() < 1e-4, "each query of {block:?} gives 1: {together}");
        }
        let bits = |sums: Vec<f32>| sums.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        let whole = bits(whole);
        for ends in [&[1, 2, 3, 4, 13, 14, 27, 28, 29, 30][..], &[15, 30], &[28, 30]] {
            assert_eq!(bits(sums(ends)), whole, "{ends:?}");
        }
    }
}
