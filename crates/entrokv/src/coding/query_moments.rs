//! How large the queries of a sequence are, channel by channel.

use std::ops::Range;
use std::sync::Arc;

use entrokv_cache::{CacheShape, LayerKind};

/// Sums of the squares of a sequence's queries, for each KV group of the global layers and each channel.
///
/// Invariants:
/// * Squares are added in f64 by ascending position and query head, so that chunks do not matter.
/// * A forward pass that is interrupted leaves half a step behind; [`QueryMoments::begin`] starts it again from what whole
///   steps left ([`QueryMoments::commit`]), so that no row counts twice.
pub(crate) struct QueryMoments {
    shape: Arc<CacheShape>,
    /// Absolute positions that count.
    positions: Range<usize>,
    /// `[num_groups, head_dim]` over the positions computed; empty once they are no longer wanted.
    sums: Vec<f64>,
    /// The same with the step under way; empty while none is.
    pending: Vec<f64>,
}

impl QueryMoments {
    /// For the queries at `positions`; nothing is summed where no constants are needed.
    pub(super) fn new(shape: &Arc<CacheShape>, needs_constants: bool, positions: Range<usize>) -> Self {
        let len = if needs_constants { shape.num_groups() * shape.head_dim } else { 0 };
        Self { shape: Arc::clone(shape), positions, sums: vec![0.0; len], pending: Vec::new() }
    }

    /// The sums of whole steps; empty once they have served.
    pub(super) fn squares(&self) -> &[f64] {
        &self.sums
    }

    /// Goes on from the sums of another sequence, as many as there are groups and channels, or none.
    pub(super) fn resume(&mut self, squares: Vec<f64>) {
        self.sums = squares;
    }

    /// Begins a step over `rows` (absolute positions).
    pub(crate) fn begin(&mut self, rows: &Range<usize>) {
        self.pending.clear();
        if rows.start < self.positions.end && rows.end > self.positions.start {
            self.pending.extend_from_slice(&self.sums);
        }
    }

    /// Adds the queries of one layer, after RoPE: `[rows, num_heads, head_dim]`, the first at `first_position`.
    pub(crate) fn add(&mut self, layer: usize, first_position: usize, queries: &[f32]) {
        if self.pending.is_empty() || self.shape.layers[layer] != LayerKind::Global {
            return;
        }
        let CacheShape { num_kv_heads, group_size, head_dim, .. } = *self.shape;
        let group_width = group_size * head_dim;
        let sums = &mut self.pending[layer * num_kv_heads * head_dim..][..num_kv_heads * head_dim];
        let rows = queries.chunks_exact(num_kv_heads * group_width).zip(first_position..);
        for (row, _) in rows.filter(|(_, position)| self.positions.contains(position)) {
            for (sums, group) in sums.chunks_exact_mut(head_dim).zip(row.chunks_exact(group_width)) {
                for head in group.chunks_exact(head_dim) {
                    sums.iter_mut().zip(head).for_each(|(sum, &q)| *sum += f64::from(q) * f64::from(q));
                }
            }
        }
    }

    /// The step was whole: its rows count.
    pub(crate) fn commit(&mut self) {
        if !self.pending.is_empty() {
            std::mem::swap(&mut self.sums, &mut self.pending);
            self.pending.clear();
        }
    }

    /// Root mean square `[head_dim]` of the queries of the group with this number, for a sequence of `len` tokens.
    pub(super) fn rms(&self, group: usize, len: usize) -> Vec<f32> {
        let rows = len.min(self.positions.end).saturating_sub(self.positions.start);
        let count = (rows * self.shape.group_size) as f64;
        let sums = &self.sums[group * self.shape.head_dim..][..self.shape.head_dim];
        sums.iter().map(|sum| (sum / count).sqrt() as f32).collect()
    }

    /// Forgets the sums: they have served.
    pub(super) fn finish(&mut self) {
        (self.sums, self.pending) = (Vec::new(), Vec::new());
    }

    /// Bytes of the sums.
    pub(super) fn bytes(&self) -> usize {
        (self.sums.capacity() + self.pending.capacity()) * size_of::<f64>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two layers, the second with a window; one KV head for two query heads of 32.
    fn shape() -> Arc<CacheShape> {
        Arc::new(CacheShape::new(vec![LayerKind::Global, LayerKind::Window(8)], 1, 2, 32, 16).unwrap())
    }

    fn queries(rows: Range<usize>) -> Vec<f32> {
        rows.flat_map(|row| (0..64).map(move |i| (row * 64 + i) as f32 * 0.37 - 100.0)).collect()
    }

    /// Of chunks that end at these positions.
    fn moments(ends: &[usize]) -> QueryMoments {
        let mut moments = QueryMoments::new(&shape(), true, 16..48);
        for (chunk, &end) in ends.iter().enumerate() {
            let rows = if chunk == 0 { 0 } else { ends[chunk - 1] }..end;
            moments.begin(&rows);
            for layer in 0..2 {
                moments.add(layer, rows.start, &queries(rows.clone()));
            }
            moments.commit();
        }
        moments
    }

    #[test]
    fn they_are_those_of_the_positions_that_count() {
        let rms = moments(&[60]).rms(0, 60);
        for (channel, rms) in rms.into_iter().enumerate() {
            let squares = |row: usize| [0, 32].map(|head| f64::from(queries(row..row + 1)[head + channel]).powi(2));
            let expected = ((16..48).flat_map(squares).sum::<f64>() / 64.0).sqrt() as f32;
            assert!((rms - expected).abs() <= expected * 1e-6, "{channel}: {rms}, {expected}");
        }
        assert_eq!(moments(&[60]).rms(1, 60), [0.0; 32], "window layers are not summed");
    }

    #[test]
    fn chunks_do_not_matter() {
        let whole = moments(&[40]).rms(0, 40);
        for ends in [vec![1, 17, 18, 40], vec![16, 40], vec![39, 40]] {
            assert_eq!(moments(&ends).rms(0, 40), whole, "{ends:?}");
        }
    }

    #[test]
    fn an_interrupted_step_counts_once() {
        let mut interrupted = moments(&[20]);
        interrupted.begin(&(20..40));
        interrupted.add(0, 20, &queries(20..40));
        interrupted.begin(&(20..40));
        interrupted.add(0, 20, &queries(20..40));
        interrupted.commit();
        assert_eq!(interrupted.rms(0, 40), moments(&[40]).rms(0, 40));
        interrupted.finish();
        assert_eq!(interrupted.bytes(), 0);
    }

    #[test]
    fn nothing_is_summed_where_nothing_is_needed() {
        let mut none = QueryMoments::new(&shape(), false, 16..48);
        none.begin(&(0..40));
        none.add(0, 0, &queries(0..40));
        none.commit();
        assert_eq!(none.bytes(), 0);
    }
}
