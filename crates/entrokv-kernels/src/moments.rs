//! Second moments of rows: running sums of `q` and of `q q^T`, head by head.
//!
//! Products of two f32 are exact in f64, and every sum runs in f64 by ascending row: the same bits on every instruction set and
//! number of threads, and however the rows were cut into calls.

use crate::compute::Compute;
use crate::simd::{Kernel, Simd, dispatch};

/// Adds `rows` `[rows, heads, head_dim]` to `moments` `[heads, head_dim (head_dim + 3) / 2]`: of each head the sum of its rows, then
/// the lower triangle of the sum of their products, row by row.
///
/// # Panics
/// If `moments` is of no whole number of heads, or `rows` of no whole number of rows of as many.
pub fn add_moments(compute: &Compute, rows: &[f32], head_dim: usize, moments: &mut [f64]) {
    let len = head_dim * (head_dim + 3) / 2;
    assert!(len > 0 && moments.len().is_multiple_of(len), "{} moments are not whole heads of {len}", moments.len());
    let width = moments.len() / len * head_dim;
    if rows.is_empty() {
        return;
    }
    assert!(width > 0 && rows.len().is_multiple_of(width), "{} elements are not whole rows of {width}", rows.len());
    compute.threads.for_each_chunk(moments, len, |head, moments| {
        let of_head = rows.chunks_exact(width).flat_map(|row| &row[head * head_dim..(head + 1) * head_dim]);
        let rows: Vec<f64> = of_head.copied().map(f64::from).collect();
        dispatch(compute.isa, AddMoments { rows: &rows, head_dim, moments });
    });
}

/// Rows of one head.
struct AddMoments<'a> {
    rows: &'a [f64],
    head_dim: usize,
    moments: &'a mut [f64],
}

impl Kernel for AddMoments<'_> {
    type Output = ();

    // Plain loops, which the compiler vectorises. A row of sums stays in the nearest cache while all rows go by.
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let (sums, mut rest) = self.moments.split_at_mut(self.head_dim);
        for row in self.rows.chunks_exact(self.head_dim) {
            sums.iter_mut().zip(row).for_each(|(sum, q)| *sum += q);
        }
        for i in 0..self.head_dim {
            let (products, after) = rest.split_at_mut(i + 1);
            rest = after;
            for row in self.rows.chunks_exact(self.head_dim) {
                let factor = row[i];
                products.iter_mut().zip(row).for_each(|(sum, q)| *sum += factor * q);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;
    use std::num::NonZeroUsize;

    const HEAD_DIM: usize = 20;
    const WIDTH: usize = 3 * HEAD_DIM;
    const LEN: usize = HEAD_DIM * (HEAD_DIM + 3) / 2;

    fn rows(count: usize) -> Vec<f32> {
        (0..count * WIDTH).map(|i| ((i * 7919 + 13) % 1009) as f32 / 500.0 - 1.0).collect()
    }

    fn moments(isa: Isa, num_threads: usize, pieces: &[usize]) -> Vec<f64> {
        let compute = Compute::new(isa, NonZeroUsize::new(num_threads).unwrap());
        let rows = rows(pieces.iter().sum());
        let (mut moments, mut from) = (vec![0.0; 3 * LEN], 0);
        for piece in pieces {
            add_moments(&compute, &rows[from * WIDTH..(from + piece) * WIDTH], HEAD_DIM, &mut moments);
            from += piece;
        }
        moments
    }

    #[test]
    fn they_are_sums_of_rows_and_of_their_products() {
        let (rows, got) = (rows(37), moments(Isa::detect(), 2, &[37]));
        for (head, got) in got.chunks(LEN).enumerate() {
            let of_head = |i: usize| rows.chunks(WIDTH).map(move |row| f64::from(row[head * HEAD_DIM + i]));
            for i in 0..HEAD_DIM {
                assert_eq!(got[i], of_head(i).sum::<f64>());
                for j in 0..=i {
                    let product = of_head(i).zip(of_head(j)).map(|(a, b)| a * b).sum::<f64>();
                    assert_eq!(got[HEAD_DIM + i * (i + 1) / 2 + j], product, "{head}, {i}, {j}");
                }
            }
        }
    }

    #[test]
    fn neither_pieces_nor_threads_nor_instruction_sets_show() {
        let whole = moments(Isa::detect(), 1, &[64]);
        for isa in Isa::available() {
            for pieces in [&[64][..], &[1, 62, 1], &[0, 30, 34]] {
                for num_threads in 1..4 {
                    assert_eq!(moments(isa, num_threads, pieces), whole, "{isa}, {pieces:?}, {num_threads} threads");
                }
            }
        }
    }
}
