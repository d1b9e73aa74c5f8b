//! The prompt rows of one turn, folded into one row a head.

use crate::attention_rows::{AttentionRows, RowSource};
use crate::page_entro_kv::options::ObservedRow;
use crate::page_entro_kv::token_table::TokenTable;

/// Running sum of a prompt's rows, each head on its own.
///
/// Rows are added one by one in ascending order, so a column's sum does not depend on the pieces they came in: a token
/// that a piece does not reach yet is 0 either way.
#[derive(Clone, Debug)]
pub(super) struct PromptRows {
    row: ObservedRow,
    /// Sums, `[tokens, group_size]`.
    sums: TokenTable,
    /// Rows summed, a head.
    num_rows: Vec<u64>,
    /// Rows dropped for an entry that is not a mass, or for having no mass (rule R5).
    bad_rows: u64,
}

impl PromptRows {
    /// No rows of a group of `group_size` heads.
    pub(super) fn new(row: ObservedRow, group_size: usize) -> Self {
        Self { row, sums: TokenTable::new(group_size), num_rows: vec![0; group_size], bad_rows: 0 }
    }

    /// Adds the rows of a piece, or with `row=last` puts its last row in the place of what was there.
    pub(super) fn observe(&mut self, rows: AttentionRows<'_>) {
        let first = match self.row {
            ObservedRow::Last => {
                self.sums.clear();
                self.num_rows.fill(0);
                self.bad_rows = 0;
                rows.num_rows().saturating_sub(1)
            }
            ObservedRow::Window(_) | ObservedRow::Accumulated => 0,
        };
        let queries_a_row = match rows.source {
            RowSource::Prompt | RowSource::Step => 1,
            RowSource::ColumnSums { num_rows } => num_rows as u64,
        };
        self.sums.align(rows.positions);
        let group_size = rows.group_size;
        for row in first..rows.num_rows() {
            for head in 0..group_size {
                let masses = rows.head(row, head);
                if !is_row(masses) {
                    self.bad_rows += 1;
                    continue;
                }
                self.num_rows[head] += queries_a_row;
                let sums = self.sums.values_mut().iter_mut().skip(head).step_by(group_size);
                for (sum, &mass) in sums.zip(masses) {
                    *sum += f64::from(mass);
                }
            }
        }
    }

    /// Rows dropped in this turn.
    pub(super) fn bad_rows(&self) -> u64 {
        self.bad_rows
    }

    /// The mean row of every head, `[positions.len(), group_size]`, and which heads have one.
    ///
    /// A head all of whose rows were dropped has zeros.
    pub(super) fn into_means(mut self) -> (TokenTable, Vec<bool>) {
        let group_size = self.num_rows.len();
        for masses in self.sums.values_mut().chunks_exact_mut(group_size) {
            for (mass, &num_rows) in masses.iter_mut().zip(&self.num_rows) {
                *mass /= num_rows.max(1) as f64;
            }
        }
        let has_row = self.num_rows.iter().map(|&num_rows| num_rows > 0).collect();
        (self.sums, has_row)
    }

    /// Bytes reserved.
    pub(super) fn bytes(&self) -> usize {
        self.sums.bytes() + self.num_rows.capacity() * size_of::<u64>()
    }
}

/// Whether masses can be a head's attention row: all finite, none negative, not all 0.
pub(super) fn is_row(masses: &[f32]) -> bool {
    masses.iter().all(|mass| mass.is_finite() && *mass >= 0.0) && masses.iter().any(|mass| *mass > 0.0)
}
