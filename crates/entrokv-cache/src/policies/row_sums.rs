//! Attention that each token of a KV group has received, summed over rows and averaged over heads.

use crate::attention_rows::{AttentionRows, is_row};
use crate::token_table::TokenTable;

/// `sum over rows of the mean over heads of A_h(t)`, rows that are none being dropped.
#[derive(Clone, Debug)]
pub(super) struct RowSums {
    table: TokenTable,
    num_rows: usize,
    bad_rows: u64,
}

impl RowSums {
    pub(super) fn new() -> Self {
        Self { table: TokenTable::new(1), num_rows: 0, bad_rows: 0 }
    }

    /// Forgets all sums.
    pub(super) fn clear(&mut self) {
        self.table.clear();
        self.num_rows = 0;
    }

    /// Adds rows, `weight` times; sums that are there already count `keep` times from now on.
    pub(super) fn add(&mut self, rows: AttentionRows<'_>, keep: f64, weight: f64) {
        self.table.align(rows.positions);
        let sums = self.table.column_mut(0);
        let weight = weight / rows.group_size as f64;
        for row in 0..rows.num_rows() {
            if keep != 1.0 {
                sums.iter_mut().for_each(|sum| *sum *= keep);
            }
            for head in 0..rows.group_size {
                let masses = rows.head(row, head);
                if is_row(masses) {
                    sums.iter_mut().zip(masses).for_each(|(sum, &mass)| *sum += weight * f64::from(mass));
                } else {
                    self.bad_rows += 1;
                }
            }
        }
        self.num_rows += rows.num_rows();
    }

    /// Rows added since the last [`clear`](Self::clear).
    pub(super) fn num_rows(&self) -> usize {
        self.num_rows
    }

    /// Positions of the tokens that have a sum, ascending.
    pub(super) fn positions(&self) -> &[u32] {
        self.table.positions()
    }

    /// The sums.
    pub(super) fn sums(&self) -> &[f64] {
        self.table.column(0)
    }

    /// As [`sums`](Self::sums), to be written.
    pub(super) fn sums_mut(&mut self) -> &mut [f64] {
        self.table.column_mut(0)
    }

    /// The sum of each token at `positions` (ascending), 0 for one that has none.
    pub(super) fn at(&self, positions: &[u32]) -> impl Iterator<Item = f64> {
        self.table.at(0, positions)
    }

    /// Forgets every token that is not at one of `positions`, and gives the memory back.
    pub(super) fn retain(&mut self, positions: &[u32]) {
        self.table.align(positions);
        self.table.shrink();
    }

    pub(super) fn bad_rows(&self) -> u64 {
        self.bad_rows
    }

    pub(super) fn bytes(&self) -> u64 {
        (size_of::<Self>() + self.table.bytes()) as u64
    }
}
