//! The rotation of rotated codes: random signs, then an orthonormal Walsh-Hadamard transform.
//!
//! `y = H (s * x)` with `s_i` = -1 where the top bit of the `i`-th output of SplitMix64 seeded with 1 is set, and `H` in
//! Sylvester order divided by the root of its size, in blocks of the largest power of two that divides the length. `H` is
//! its own inverse, so `x = s * H y`. Additions run in one order on every instruction set and in both shapes below.

use crate::simd::{LANES, Simd};

/// The longest vector.
pub(crate) const MAX_LEN: usize = 512;

static SIGNS: [f32; MAX_LEN] = splitmix_signs();

const fn splitmix_signs() -> [f32; MAX_LEN] {
    let mut signs = [1.0; MAX_LEN];
    let mut state = 1u64;
    let mut i = 0;
    while i < MAX_LEN {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        if (z ^ (z >> 31)) >> 63 == 1 {
            signs[i] = -1.0;
        }
        i += 1;
    }
    signs
}

/// The signs of vectors of `len` elements.
///
/// # Panics
/// If `len` is no multiple of 32 or above [`MAX_LEN`].
pub(crate) fn signs(len: usize) -> &'static [f32] {
    assert!(len.is_multiple_of(super::BLOCK_LEN) && len <= MAX_LEN, "rotated vectors of {len} elements");
    &SIGNS[..len]
}

/// Elements of a block of the transform of vectors of `len` elements.
fn block_len(len: usize) -> usize {
    1 << len.trailing_zeros()
}

/// Transforms 16 vectors, `x` being `[len, 16]`: `H x` in every lane.
#[inline(always)]
pub(crate) fn transform_columns<S: Simd>(s: S, x: &mut [[f32; LANES]]) {
    let n = block_len(x.len());
    let norm = s.splat(1.0 / (n as f32).sqrt());
    for block in x.chunks_exact_mut(n) {
        combine_rows(s, block, norm);
    }
}

/// Transforms one vector, `x` being `[len / 16, 16]`: `H x`.
#[inline(always)]
pub(crate) fn transform<S: Simd>(s: S, x: &mut [[f32; LANES]]) {
    let n = block_len(x.len() * LANES);
    let norm = s.splat(1.0 / (n as f32).sqrt());
    for block in x.chunks_exact_mut(n / LANES) {
        for row in block.iter_mut() {
            butterflies(row);
        }
        combine_rows(s, block, norm);
    }
}

/// The sums and differences of rows 1, 2, 4, .. apart, times `norm`.
#[inline(always)]
fn combine_rows<S: Simd>(s: S, block: &mut [[f32; LANES]], norm: S::V) {
    let mut apart = 1;
    while apart < block.len() {
        for pair in block.chunks_exact_mut(2 * apart) {
            let (low, high) = pair.split_at_mut(apart);
            for (low, high) in low.iter_mut().zip(high) {
                let (a, b) = (s.load(low), s.load(high));
                s.store(low, s.add(a, b));
                s.store(high, s.sub(a, b));
            }
        }
        apart *= 2;
    }
    for row in block {
        let scaled = s.mul(s.load(row), norm);
        s.store(row, scaled);
    }
}

/// The sums and differences of elements 1, 2, 4 and 8 apart.
#[inline(always)]
fn butterflies(x: &mut [f32; LANES]) {
    for apart in [1, 2, 4, 8] {
        // `i ^ apart` is the partner; the upper one of a pair has the sign.
        *x = std::array::from_fn(|i| if i & apart == 0 { x[i] + x[i ^ apart] } else { x[i ^ apart] - x[i] });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;
    use crate::simd::{Kernel, dispatch};

    struct Both<'a>(&'a mut [[f32; LANES]], &'a mut [[f32; LANES]]);
    impl Kernel for Both<'_> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            transform(s, self.0);
            transform_columns(s, self.1);
        }
    }

    #[test]
    fn both_shapes_are_the_matrix_and_equal_each_other_bit_for_bit() {
        for len in [32, 64, 96, 128, 160, 256, 512] {
            let x: Vec<f32> = (0..len).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.37).collect();
            for isa in Isa::available() {
                let mut row = x.as_chunks::<LANES>().0.to_vec();
                let mut columns: Vec<[f32; LANES]> =
                    x.iter().map(|&x| std::array::from_fn(|lane| x * (1 << lane) as f32)).collect();
                dispatch(isa, Both(&mut row, &mut columns));
                let row = row.as_flattened();
                let n = block_len(len);
                for (i, got) in row.iter().enumerate() {
                    let sign = |j: usize| if ((i % n) & (j % n)).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
                    let block = i / n * n..(i / n + 1) * n;
                    let want: f64 = block.map(|j| sign(j) * f64::from(x[j])).sum::<f64>() / (n as f64).sqrt();
                    assert!((f64::from(*got) - want).abs() < 1e-4, "{isa} {len} {i}: {got} instead of {want}");
                    for (lane, column) in columns[i].iter().enumerate() {
                        assert_eq!(*column, got * (1 << lane) as f32, "{isa} {len} {i}");
                    }
                }
            }
        }
    }

    #[test]
    fn signs_start_as_splitmix_does() {
        let want = [-1., -1., -1., 1., 1., -1., -1., -1., 1., -1., 1., -1., 1., -1., 1., 1.];
        assert_eq!(signs(64)[..16], want);
    }

    #[test]
    #[should_panic(expected = "rotated vectors of 48 elements")]
    fn lengths_that_are_no_blocks_panic() {
        signs(48);
    }
}
