//! A block's queries in the forms its strips ask for.

use super::AttentionParams;
use super::aligned::Aligned;

/// The queries of one block, prepared once and used by every tile.
#[derive(Default)]
pub(super) struct Queries {
    /// `[rows, head_dim]`, times the scale of the scores.
    pub(super) scaled: Aligned,
}

impl Queries {
    /// Prepares `rows`, each `[head_dim]`.
    pub(super) fn load<'q>(&mut self, params: &AttentionParams, rows: impl ExactSizeIterator<Item = &'q [f32]>) {
        self.scaled.reserve(rows.len() * params.head_dim);
        for (query, row) in self.scaled.chunks_exact_mut(params.head_dim).zip(rows) {
            query.iter_mut().zip(row).for_each(|(to, from)| *to = from * params.scale);
        }
    }
}
