//! Root-mean-square normalisation of rows.
//!
//! `y_i = x_i / sqrt(mean_j(x_j^2) + eps) * w_i` (Zhang and Sennrich 2019, equation 4). The squares of a row are summed in
//! 16 lanes by column and the lanes in a fixed tree, so a row's bits depend on nothing but the row.

use crate::activations::Activations;
use crate::compute::Compute;
use crate::disjoint::DisjointMut;
use crate::simd::{Kernel, LANES, Simd, dispatch};

/// Rows are shared among threads in pieces of at least this many elements: less is not worth waking anybody.
const ELEMENTS_PER_TASK: usize = 8 * 1024;

/// A norm of rows of `weight.len()` elements.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm<'a> {
    /// What a normalised element is multiplied with.
    pub weight: &'a [f32],
    /// What is added to the mean square.
    pub eps: f32,
}

impl RmsNorm<'_> {
    /// Normalises every row of `x` in place; also used per head, `weight` being one head long.
    ///
    /// # Panics
    /// If `x` is not a whole number of rows.
    pub fn in_place(self, compute: &Compute, x: &mut [f32]) {
        let Some(rows_per_task) = rows_per_task(x.len(), self.weight.len()) else { return };
        compute.threads.for_each_chunk(x, rows_per_task * self.weight.len(), |_, x| {
            dispatch(compute.isa, InPlace { x, norm: self });
        });
    }

    /// The step from one block of a decoder to the next: adds to the residual stream `x` what the last block put out, and
    /// loads the normalised sums as the next block's input. One pass instead of three, and the bits of these.
    ///
    /// # Panics
    /// If `x` and `added` differ in length, or `x` is not a whole number of rows.
    pub fn load_sum(self, compute: &Compute, x: &mut [f32], added: &[f32], into: &mut Activations) {
        let cols = self.weight.len();
        assert_eq!(x.len(), added.len(), "x and added must have one shape");
        assert!(cols > 0 && x.len().is_multiple_of(cols), "{} elements are not whole rows of {cols}", x.len());
        let num_rows = x.len() / cols;
        let x = DisjointMut::new(x);
        into.load_computed(compute, num_rows, cols, &|elements, out| {
            // SAFETY: every row is asked for once.
            let x = unsafe { x.part(elements.clone()) };
            dispatch(compute.isa, OfSum { x, added: &added[elements], out, norm: self });
        });
    }
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
struct InPlace<'a> {
    x: &'a mut [f32],
    norm: RmsNorm<'a>,
}

impl Kernel for InPlace<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let RmsNorm { weight, eps } = self.norm;
        for row in self.x.chunks_exact_mut(weight.len()) {
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
            let inverse = inverse_rms(s, sum, weight.len(), eps);

            let (whole, rest) = row.as_chunks_mut::<LANES>();
            let (weights, weights_rest) = weight.as_chunks::<LANES>();
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

/// Whole rows, to which others are added, and the norm of the sums in a place of its own.
struct OfSum<'a> {
    x: &'a mut [f32],
    added: &'a [f32],
    out: &'a mut [f32],
    norm: RmsNorm<'a>,
}

impl Kernel for OfSum<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let RmsNorm { weight, eps } = self.norm;
        let cols = weight.len();
        let rows = self.x.chunks_exact_mut(cols).zip(self.added.chunks_exact(cols));
        for ((row, added), out) in rows.zip(self.out.chunks_exact_mut(cols)) {
            let mut sum = s.splat(0.0);
            let (whole, rest) = row.as_chunks_mut::<LANES>();
            let (addeds, added_rest) = added.as_chunks::<LANES>();
            for (x, added) in whole.iter_mut().zip(addeds) {
                let y = s.add(s.load(x), s.load(added));
                s.store(x, y);
                sum = s.mul_add(y, y, sum);
            }
            if !rest.is_empty() {
                let y = s.add(s.load_partial(rest), s.load_partial(added_rest));
                s.store_partial(rest, y);
                sum = s.mul_add(y, y, sum);
            }
            let inverse = inverse_rms(s, sum, cols, eps);

            let (outs, out_rest) = out.as_chunks_mut::<LANES>();
            let (weights, weights_rest) = weight.as_chunks::<LANES>();
            for ((out, x), w) in outs.iter_mut().zip(&*whole).zip(weights) {
                let y = s.mul(s.mul(s.load(x), inverse), s.load(w));
                s.store(out, y);
            }
            if !out_rest.is_empty() {
                let y = s.mul(s.mul(s.load_partial(rest), inverse), s.load_partial(weights_rest));
                s.store_partial(out_rest, y);
            }
        }
    }
}

/// The inverse of the root of the mean of squares whose sum is in the lanes of `sum`, in all lanes.
#[inline(always)]
fn inverse_rms<S: Simd>(s: S, sum: S::V, cols: usize, eps: f32) -> S::V {
    let mean = s.sum(sum) / cols as f32;
    s.splat(1.0 / (mean + eps).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::activations::Arithmetic;
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

    fn compute(isa: Isa, num_threads: usize) -> Compute {
        Compute::new(isa, NonZeroUsize::new(num_threads).unwrap())
    }

    /// What [`RmsNorm::load_sum`] makes of `x` and `added`: the sums and their norms.
    fn of_sum(compute: &Compute, norm: RmsNorm<'_>, x: &[f32], added: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let (mut x, mut input) = (x.to_vec(), Activations::new(Arithmetic::F32));
        norm.load_sum(compute, &mut x, added, &mut input);
        assert_eq!((input.num_tokens(), input.cols()), (x.len() / norm.weight.len(), norm.weight.len()));
        (x, input.floats().unwrap().to_vec())
    }

    #[test]
    fn equals_the_f64_oracle_on_every_isa() {
        for isa in Isa::available() {
            let compute = compute(isa, 2);
            for (rows, cols) in [(1, 1), (1, 576), (5, 17), (3, 64), (40, 1536), (2, 15)] {
                let (x, weight) = (noise(rows * cols, 1), noise(cols, 2));
                let norm = RmsNorm { weight: &weight, eps: 1e-5 };
                let mut out = x.clone();
                norm.in_place(&compute, &mut out);
                for (row, got) in x.chunks(cols).zip(out.chunks(cols)) {
                    let mean = row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / cols as f64;
                    for ((x, w), got) in row.iter().zip(&weight).zip(got) {
                        let want = f64::from(*x) / (mean + 1e-5).sqrt() * f64::from(*w);
                        assert!((f64::from(*got) - want).abs() <= TOLERANCE * want.abs().max(1e-3), "{got} {want}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_norm_of_a_sum_has_the_bits_of_a_sum_and_a_norm() {
        for isa in Isa::available() {
            let compute = compute(isa, 2);
            for (rows, cols) in [(1, 1), (1, 576), (5, 17), (9, 64), (40, 1536), (2, 15)] {
                let (x, added, weight) = (noise(rows * cols, 1), noise(rows * cols, 3), noise(cols, 2));
                let norm = RmsNorm { weight: &weight, eps: 1e-5 };
                let sums: Vec<f32> = x.iter().zip(&added).map(|(x, added)| x + added).collect();
                let mut norms = sums.clone();
                norm.in_place(&compute, &mut norms);
                assert_eq!(of_sum(&compute, norm, &x, &added), (sums, norms), "{isa} {rows} {cols}");
            }
        }
    }

    #[test]
    fn a_row_has_the_same_bits_in_any_batch_and_on_any_number_of_threads() {
        let (x, added, weight) = (noise(100 * 576, 3), noise(100 * 576, 5), noise(576, 4));
        let norm = RmsNorm { weight: &weight, eps: 1e-6 };
        for isa in Isa::available() {
            let one = compute(isa, 1);
            let mut want = x.clone();
            want.chunks_mut(576).for_each(|row| norm.in_place(&one, row));
            let rows = x.chunks(576).zip(added.chunks(576));
            let of_sums: Vec<_> = rows.map(|(x, added)| of_sum(&one, norm, x, added).1).collect();
            for num_threads in 1..4 {
                let compute = compute(isa, num_threads);
                let mut got = x.clone();
                norm.in_place(&compute, &mut got);
                assert_eq!(got, want);
                assert_eq!(of_sum(&compute, norm, &x, &added).1, of_sums.concat());
            }
        }
    }

    #[test]
    fn nothing_to_do_is_fine_and_zeros_stay_zeros() {
        let compute = compute(Isa::detect(), 1);
        let norm = RmsNorm { weight: &[1.0; 4], eps: 1e-5 };
        norm.in_place(&compute, &mut []);
        assert_eq!(of_sum(&compute, norm, &[], &[]), (vec![], vec![]));
        let mut x = [0.0; 8];
        norm.in_place(&compute, &mut x);
        assert_eq!(x, [0.0; 8]);
    }
}
