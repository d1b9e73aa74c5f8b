//! Root-mean-square normalisation of rows.
//!
//! `y_i = x_i / sqrt(mean_j(x_j^2) + eps) * w_i` (Zhang and Sennrich 2019, equation 4). The squares of a row are summed in
//! 16 lanes by column and the lanes in a fixed tree, so a row's bits depend on nothing but the row.

use crate::compute::Compute;
use crate::simd::{Kernel, LANES, Simd, dispatch};

/// Rows are shared among threads in pieces of at least this many elements: less is not worth waking anybody.
const ELEMENTS_PER_TASK: usize = 8 * 1024;

/// Normalises every row of `x` `[rows, weight.len()]` into `out` of the same shape.
///
/// # Panics
/// If `x` and `out` differ in length, or `x` is not a whole number of rows.
pub fn rms_norm(compute: &Compute, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    assert_eq!(x.len(), out.len(), "x and out must have one shape");
    let Some(rows_per_task) = rows_per_task(x.len(), weight.len()) else { return };
    let cols = weight.len();
    compute.threads.for_each_chunk(out, rows_per_task * cols, |index, out| {
        let x = &x[index * rows_per_task * cols..][..out.len()];
        out.copy_from_slice(x);
        dispatch(compute.isa, NormRows { x: out, weight, eps });
    });
}

/// [`rms_norm`] with the result in the place of `x`; also used per head, `weight` being one head long.
///
/// # Panics
/// If `x` is not a whole number of rows.
pub fn rms_norm_in_place(compute: &Compute, x: &mut [f32], weight: &[f32], eps: f32) {
    let Some(rows_per_task) = rows_per_task(x.len(), weight.len()) else { return };
    compute.threads.for_each_chunk(x, rows_per_task * weight.len(), |_, x| {
        dispatch(compute.isa, NormRows { x, weight, eps });
    });
}

/// How many rows a task takes; `None` when there is nothing to do.
fn rows_per_task(len: usize, cols: usize) -> Option<usize> {
    if len == 0 {
        return None;
    }
    assert!(cols > 0 && len.is_multiple_of(cols), "{len} elements are not whole rows of {cols}");
    Some(ELEMENTS_PER_TASK.div_ceil(cols))
}

/// Whole rows, normalised in place.
struct NormRows<'a> {
    x: &'a mut [f32],
    weight: &'a [f32],
    eps: f32,
}

impl Kernel for NormRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let cols = self.weight.len();
        for row in self.x.chunks_exact_mut(cols) {
            let mut sum = s.splat(0.0);
            let (whole, rest) = row.as_chunks::<LANES>();
            for x in whole {
                let x = s.load(x);
                sum = s.mul_add(x, x, sum);
            }
            if !rest.is_empty() {
                let x = s.load_partial(rest);
                sum = s.mul_add(x, x, sum);
            }
            let mean = s.sum(sum) / cols as f32;
            let inverse = s.splat(1.0 / (mean + self.eps).sqrt());

            let (whole, rest) = row.as_chunks_mut::<LANES>();
            let (weights, weights_rest) = self.weight.as_chunks::<LANES>();
            for (x, w) in whole.iter_mut().zip(weights) {
                let y = s.mul(s.mul(s.load(x), inverse), s.load(w));
                s.store(x, y);
            }
            if !rest.is_empty() {
                let y = s.mul(s.mul(s.load_partial(rest), inverse), s.load_partial(weights_rest));
                s.store_partial(rest, y);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;
    use std::num::NonZeroUsize;

    /// f32 sums of up to a few thousand squares.
    const TOLERANCE: f64 = 2e-6;

    fn noise(len: usize, seed: u64) -> Vec<f32> {
        let mut state = seed;
        (0..len)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 40) as f32 / (1 << 23) as f32 - 1.0
            })
            .collect()
    }

    #[test]
    fn equals_the_f64_oracle_on_every_isa() {
        for isa in Isa::available() {
            let compute = Compute::new(isa, NonZeroUsize::new(2).unwrap());
            for (rows, cols) in [(1, 1), (1, 576), (5, 17), (3, 64), (40, 1536), (2, 15)] {
                let (x, w) = (noise(rows * cols, 1), noise(cols, 2));
                let mut out = vec![0.0; x.len()];
                rms_norm(&compute, &x, &w, 1e-5, &mut out);
                for (row, got) in x.chunks(cols).zip(out.chunks(cols)) {
                    let mean = row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / cols as f64;
                    for ((x, w), got) in row.iter().zip(&w).zip(got) {
                        let want = f64::from(*x) / (mean + 1e-5).sqrt() * f64::from(*w);
                        assert!((f64::from(*got) - want).abs() <= TOLERANCE * want.abs().max(1e-3), "{got} {want}");
                    }
                }
                let mut in_place = x.clone();
                rms_norm_in_place(&compute, &mut in_place, &w, 1e-5);
                assert_eq!(in_place, out);
            }
        }
    }

    #[test]
    fn a_row_has_the_same_bits_in_any_batch_and_on_any_number_of_threads() {
        let (x, w) = (noise(100 * 576, 3), noise(576, 4));
        for isa in Isa::available() {
            let one = Compute::new(isa, NonZeroUsize::MIN);
            let mut want = vec![0.0; x.len()];
            for (x, out) in x.chunks(576).zip(want.chunks_mut(576)) {
                rms_norm(&one, x, &w, 1e-6, out);
            }
            for num_threads in 1..4 {
                let mut got = vec![0.0; x.len()];
                rms_norm(&Compute::new(isa, NonZeroUsize::new(num_threads).unwrap()), &x, &w, 1e-6, &mut got);
                assert_eq!(got, want);
            }
        }
    }

    #[test]
    fn nothing_to_do_is_fine_and_zeros_stay_zeros() {
        let compute = Compute::new(Isa::detect(), NonZeroUsize::MIN);
        rms_norm(&compute, &[], &[1.0; 4], 1e-5, &mut []);
        let mut x = [0.0; 8];
        rms_norm_in_place(&compute, &mut x, &[1.0; 4], 1e-5);
        assert_eq!(x, [0.0; 8]);
    }
}
