//! Sums over the queries of a sequence, for policies that reckon with queries to come.

use std::sync::Arc;

use entrokv_cache::{CacheShape, KvGroup, LayerKind, QueryMoments, moments_len};
use entrokv_kernels::compute::Compute;
use entrokv_kernels::moments::add_moments;

/// Moments of the queries of every global layer, before RoPE.
///
/// Sums run in f64 by ascending position, so neither chunks nor batches show. A step that fails half way leaves half of its rows
/// in them: its sequence is cancelled, as any is whose policy was watching.
#[derive(Clone)]
pub(super) struct QuerySums {
    shape: Arc<CacheShape>,
    /// Queries at positions before this one are left out.
    first: usize,
    layers: Vec<OfLayer>,
}

/// Queries of one layer before RoPE.
#[derive(Clone, Copy)]
pub(crate) struct UnrotatedQueries<'a> {
    /// The layer.
    pub(crate) layer: usize,
    /// Position of the first.
    pub(crate) first_position: usize,
    /// `[rows, num_heads, head_dim]`.
    pub(crate) rows: &'a [f32],
}

/// Of one layer.
#[derive(Clone, Default)]
struct OfLayer {
    count: usize,
    /// `[num_heads, moments_len]`; empty before the first query.
    sums: Vec<f64>,
}

impl QuerySums {
    pub(super) fn new(shape: &Arc<CacheShape>, first: usize) -> Self {
        Self { shape: Arc::clone(shape), first, layers: vec![OfLayer::default(); shape.layers.len()] }
    }

    /// Adds queries.
    pub(super) fn add(&mut self, queries: UnrotatedQueries<'_>, compute: &Compute) {
        let UnrotatedQueries { layer, first_position, rows } = queries;
        if self.shape.layers[layer] != LayerKind::Global {
            return;
        }
        let CacheShape { num_kv_heads, group_size, head_dim, .. } = *self.shape;
        let num_heads = num_kv_heads * group_size;
        let num_rows = rows.len() / (num_heads * head_dim);
        let skipped = self.first.saturating_sub(first_position).min(num_rows);
        let OfLayer { count, sums } = &mut self.layers[layer];
        sums.resize(num_heads * moments_len(head_dim), 0.0);
        add_moments(compute, &rows[skipped * num_heads * head_dim..], head_dim, sums);
        *count += num_rows - skipped;
    }

    /// Those of the heads that read `group`.
    pub(super) fn of(&self, group: KvGroup) -> QueryMoments<'_> {
        let OfLayer { count, sums } = &self.layers[group.layer as usize];
        let len = self.shape.group_size * moments_len(self.shape.head_dim);
        QueryMoments { count: *count, sums: sums.chunks_exact(len).nth(group.kv_head as usize).unwrap_or(&[]) }
    }

    /// Bytes of the sums.
    pub(super) fn bytes(&self) -> u64 {
        self.layers.iter().map(|layer| (layer.sums.capacity() * size_of::<f64>()) as u64).sum()
    }
}
