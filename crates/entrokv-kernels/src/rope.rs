//! Rotary position embedding (Su et al. 2021, equation 34), at absolute positions.
//!
//! Pairs of a head's elements are rotated by `position * frequency`. The angle is computed in f64 and only its cosine and
//! sine are rounded to f32: at position 100,000 an f32 angle would be off by up to 0.004 radians.

use crate::compute::Compute;
use crate::simd::{Kernel, Simd, dispatch};

/// Tokens are shared among threads in pieces of at least this many elements.
const ELEMENTS_PER_TASK: usize = 8 * 1024;

/// Which elements of a head form a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeLayout {
    /// `(x[2i], x[2i + 1])`: what GGUF files of the `llama` architecture are permuted for ("norm").
    Interleaved,
    /// `(x[i], x[i + rot_dim / 2])`: all other architectures ("neox").
    Halves,
}

/// The cosine and sine of every (token, pair), computed once per forward pass and used by every layer.
#[derive(Clone, Debug)]
pub struct RopeAngles {
    num_tokens: usize,
    num_pairs: usize,
    /// `[num_tokens, num_pairs]`.
    cos: Vec<f32>,
    /// `[num_tokens, num_pairs]`.
    sin: Vec<f32>,
}

impl RopeAngles {
    /// Angles of tokens at `positions`, `frequencies` being the inverse frequencies in radians per position of each pair
    /// (`rot_dim / 2` of them, rope factors already divided out).
    pub fn new(positions: &[u32], frequencies: &[f64]) -> RopeAngles {
        let num_angles = positions.len() * frequencies.len();
        let (mut cos, mut sin) = (Vec::with_capacity(num_angles), Vec::with_capacity(num_angles));
        for &position in positions {
            for &frequency in frequencies {
                let (s, c) = (f64::from(position) * frequency).sin_cos();
                cos.push(c as f32);
                sin.push(s as f32);
            }
        }
        RopeAngles { num_tokens: positions.len(), num_pairs: frequencies.len(), cos, sin }
    }

    /// Number of tokens the angles are for.
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }
}

/// Rotates every head of `x` `[tokens, heads, head_dim]` in place. The first `2 * frequencies.len()` elements of a head
/// are rotated, the rest is left alone. The same bits on every instruction set.
///
/// # Panics
/// If `x` is not `angles.num_tokens()` equal numbers of heads, or the rotated part is longer than a head.
pub fn rope(compute: &Compute, x: &mut [f32], head_dim: usize, angles: &RopeAngles, layout: RopeLayout) {
    if x.is_empty() {
        return;
    }
    assert!(
        angles.num_tokens > 0 && head_dim > 0 && x.len().is_multiple_of(angles.num_tokens * head_dim),
        "{} elements are not whole heads of {head_dim} for {} tokens",
        x.len(),
        angles.num_tokens,
    );
    assert!(2 * angles.num_pairs <= head_dim, "{} pairs do not fit a head of {head_dim}", angles.num_pairs);
    let token_len = x.len() / angles.num_tokens;
    let tokens_per_task = ELEMENTS_PER_TASK.div_ceil(token_len);
    compute.threads.for_each_chunk(x, tokens_per_task * token_len, |index, x| {
        let first_token = index * tokens_per_task;
        dispatch(compute.isa, RotateTokens { x, token_len, head_dim, angles, first_token, layout });
    });
}

/// Whole tokens, rotated in place.
struct RotateTokens<'a> {
    x: &'a mut [f32],
    token_len: usize,
    head_dim: usize,
    angles: &'a RopeAngles,
    first_token: usize,
    layout: RopeLayout,
}

impl Kernel for RotateTokens<'_> {
    type Output = ();

    // Plain loops, which the compiler vectorises; products and sums are rounded apart, so the bits are the same everywhere.
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let num_pairs = self.angles.num_pairs;
        for (i, token) in self.x.chunks_exact_mut(self.token_len).enumerate() {
            let from = (self.first_token + i) * num_pairs;
            let cos = &self.angles.cos[from..from + num_pairs];
            let sin = &self.angles.sin[from..from + num_pairs];
            for head in token.chunks_exact_mut(self.head_dim) {
                match self.layout {
                    RopeLayout::Halves => {
                        let (low, high) = head[..2 * num_pairs].split_at_mut(num_pairs);
                        for (((a, b), c), s) in low.iter_mut().zip(high).zip(cos).zip(sin) {
                            (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
                        }
                    }
                    RopeLayout::Interleaved => {
                        let (pairs, _) = head[..2 * num_pairs].as_chunks_mut::<2>();
                        for (([a, b], c), s) in pairs.iter_mut().zip(cos).zip(sin) {
                            (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;
    use std::num::NonZeroUsize;

    fn frequencies(rot_dim: usize) -> Vec<f64> {
        (0..rot_dim / 2).map(|i| 10_000f64.powf(-2.0 * i as f64 / rot_dim as f64)).collect()
    }

    /// One rounding of cosine and sine, two products, one sum.
    const TOLERANCE: f64 = 3e-7;

    #[test]
    fn equals_the_f64_oracle_on_every_isa_and_leaves_the_rest_of_the_head() {
        let positions = [0, 1, 7, 4095, 131_071];
        for isa in Isa::available() {
            let compute = Compute::new(isa, NonZeroUsize::new(2).unwrap());
            for (head_dim, rot_dim, heads) in [(64, 64, 9), (128, 128, 2), (16, 8, 3), (6, 6, 1), (256, 256, 40)] {
                let frequencies = frequencies(rot_dim);
                let angles = RopeAngles::new(&positions, &frequencies);
                let x: Vec<f32> =
                    (0..positions.len() * heads * head_dim).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect();
                for layout in [RopeLayout::Interleaved, RopeLayout::Halves] {
                    let mut got = x.clone();
                    rope(&compute, &mut got, head_dim, &angles, layout);
                    for (h, (x, got)) in x.chunks(head_dim).zip(got.chunks(head_dim)).enumerate() {
                        let position = f64::from(positions[h / heads]);
                        assert_eq!(x[rot_dim..], got[rot_dim..]);
                        for (i, frequency) in frequencies.iter().enumerate() {
                            let (a, b) = match layout {
                                RopeLayout::Interleaved => (2 * i, 2 * i + 1),
                                RopeLayout::Halves => (i, i + rot_dim / 2),
                            };
                            let (sin, cos) = (position * frequency).sin_cos();
                            let (xa, xb) = (f64::from(x[a]), f64::from(x[b]));
                            assert!((f64::from(got[a]) - (xa * cos - xb * sin)).abs() < TOLERANCE);
                            assert!((f64::from(got[b]) - (xb * cos + xa * sin)).abs() < TOLERANCE);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn position_zero_changes_nothing_and_no_token_is_fine() {
        let compute = Compute::new(Isa::detect(), NonZeroUsize::MIN);
        let mut x = [1.0, 2.0, 3.0, 4.0];
        rope(&compute, &mut x, 4, &RopeAngles::new(&[0], &frequencies(4)), RopeLayout::Halves);
        assert_eq!(x, [1.0, 2.0, 3.0, 4.0]);
        rope(&compute, &mut [], 4, &RopeAngles::new(&[], &frequencies(4)), RopeLayout::Halves);
    }

    #[test]
    fn every_isa_batch_and_thread_count_gives_the_same_bits() {
        let positions: Vec<u32> = (1000..1100).collect();
        let x: Vec<f32> = (0..100 * 9 * 64).map(|i| ((i * 31 % 997) as f32 - 500.0) / 333.0).collect();
        let one = Compute::new(Isa::SCALAR, NonZeroUsize::MIN);
        let mut want = x.clone();
        for (token, &position) in want.chunks_mut(9 * 64).zip(&positions) {
            rope(&one, token, 64, &RopeAngles::new(&[position], &frequencies(64)), RopeLayout::Halves);
        }
        for isa in Isa::available() {
            let mut got = x.clone();
            let angles = RopeAngles::new(&positions, &frequencies(64));
            rope(&Compute::new(isa, NonZeroUsize::new(3).unwrap()), &mut got, 64, &angles, RopeLayout::Halves);
            assert_eq!(got, want, "{isa}");
        }
    }
}
