//! The prompt rows of one turn, folded into one row a head.

use crate::attention_rows::{AttentionRows, RowSource, is_row};
use crate::page_entro_kv::options::ObservedRow;
use crate::token_table::TokenTable;

/// Running sum of a prompt's rows, each head on its own.
///
/// Rows are added one by one in ascending order, so a column's sum does not depend on the pieces they came in: a token
/// that a piece does not reach yet is 0 either way. (Column sums have been added in f32 by whoever made them; to be
/// independent of pieces they must come in one.)
#[derive(Clone, Debug)]
pub(crate) struct PromptRows {
    row: ObservedRow,
    /// A column of sums a head.
    sums: TokenTable,
    /// Rows summed, a head.
    num_rows: Vec<u64>,
    /// Rows dropped for an entry that is not a mass, or for having no mass (rule R5).
    bad_rows: u64,
}

impl PromptRows {
    /// No rows of a group of `group_size` heads.
    pub(crate) fn new(row: ObservedRow, group_size: usize) -> Self {
        Self { row, sums: TokenTable::new(group_size), num_rows: vec![0; group_size], bad_rows: 0 }
    }

    /// Adds the rows of a piece, or with `row=last` puts its last row in the place of what was there.
    pub(crate) fn observe(&mut self, rows: AttentionRows<'_>) {
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
            RowSource::Prompt | RowSource::Step | RowSource::Probe | RowSource::Reconstruction => 1,
            RowSource::ColumnSums { num_rows } => num_rows as u64,
        };
        self.sums.align(rows.positions);
        for row in first..rows.num_rows() {
            for head in 0..rows.group_size {
                let masses = rows.head(row, head);
                if !is_row(masses) {
                    self.bad_rows += 1;
                    continue;
                }
                self.num_rows[head] += queries_a_row;
                for (sum, &mass) in self.sums.column_mut(head).iter_mut().zip(masses) {
                    *sum += f64::from(mass);
                }
            }
        }
    }

    /// Rows dropped in this turn.
    pub(crate) fn bad_rows(&self) -> u64 {
        self.bad_rows
    }

    /// The mean row of every head, one a column, and which heads have one.
    ///
    /// A head all of whose rows were dropped has zeros.
    pub(crate) fn into_means(mut self) -> (TokenTable, Vec<bool>) {
        for (head, &num_rows) in self.num_rows.iter().enumerate() {
            for mass in self.sums.column_mut(head) {
                *mass /= num_rows.max(1) as f64;
            }
        }
        let has_row = self.num_rows.iter().map(|&num_rows| num_rows > 0).collect();
        (self.sums, has_row)
    }

    /// Bytes reserved.
    pub(crate) fn bytes(&self) -> usize {
        self.sums.bytes() + self.num_rows.capacity() * size_of::<u64>()
    }
}
