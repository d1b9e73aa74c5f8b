//! A row of attention, averaged over the query heads of a group.

use crate::attention_rows::{AttentionRows, is_row};

/// The mean over those heads whose row is one; the others are counted.
#[derive(Clone, Debug, Default)]
pub(super) struct HeadMean {
    /// Kept to spare a step the allocation.
    masses: Vec<f64>,
    bad_rows: u64,
}

impl HeadMean {
    /// The mean masses of row `row`, `[columns]`; `None` where no head has a row.
    pub(super) fn of(&mut self, rows: AttentionRows<'_>, row: usize) -> Option<&[f64]> {
        self.masses.clear();
        self.masses.resize(rows.positions.len(), 0.0);
        let mut num_heads = 0_u32;
        for head in 0..rows.group_size {
            let masses = rows.head(row, head);
            if is_row(masses) {
                self.masses.iter_mut().zip(masses).for_each(|(sum, &mass)| *sum += f64::from(mass));
                num_heads += 1;
            } else {
                self.bad_rows += 1;
            }
        }
        self.masses.iter_mut().for_each(|mass| *mass /= f64::from(num_heads.max(1)));
        (num_heads > 0).then_some(self.masses.as_slice())
    }

    /// Gives the buffer back.
    pub(super) fn shrink(&mut self) {
        self.masses = Vec::new();
    }

    pub(super) fn bad_rows(&self) -> u64 {
        self.bad_rows
    }

    pub(super) fn bytes(&self) -> u64 {
        (self.masses.capacity() * size_of::<f64>()) as u64
    }
}
