//! Integer sums by `vpdpbusd`: four products of unsigned and signed bytes added to 32 bits.

use std::arch::x86_64::*;

use crate::matmul::avx2::{group, start};
use crate::matmul::layout::Layout;
use crate::matrix::packing::STEP_GROUPS;

/// Defines the functions for one encoding of the instruction.
macro_rules! dots {
    ($features:literal, $dpbusd:path) => {
        /// Sides of an unpacked tile that are multiplied together.
        pub(in crate::matmul::avx2) const fn unpacked_sides<L: Layout>() -> usize {
            2
        }

        /// Integer sums of unit `half` of a step, less the offset's share: `S` sides of a tile from `first_side` on, `T` tokens.
        /// `at_group` is called at each of its groups.
        #[inline]
        #[target_feature(enable = $features)]
        pub(in crate::matmul::avx2) fn unit_dots<L: Layout, const T: usize, const S: usize>(
            codes: &[u8],
            half: usize,
            first_side: usize,
            words: &[[i32; STEP_GROUPS]; T],
            x_sums: [i32; T],
            at_group: impl Fn(usize),
        ) -> [[__m256i; T]; S] {
            let mut dots = [[_mm256_setzero_si256(); T]; S];
            for token in 0..T {
                let start = start::<L>(x_sums[token]);
                for dots in &mut dots {
                    dots[token] = start;
                }
            }
            for g in half * L::UNIT_GROUPS..(half + 1) * L::UNIT_GROUPS {
                at_group(g);
                for (side, dots) in dots.iter_mut().enumerate() {
                    let codes = group::<L>(codes, g, first_side + side);
                    for token in 0..T {
                        dots[token] = $dpbusd(dots[token], codes, _mm256_set1_epi32(words[token][g]));
                    }
                }
            }
            dots
        }
    };
}

dots!("avx2,fma,f16c,avxvnni", _mm256_dpbusd_avx_epi32);

/// The same in the encoding of AVX-512, which gives the same sums.
#[cfg(test)]
pub(in crate::matmul::avx2) mod evex {
    use super::*;

    dots!("avx2,fma,f16c,avx512vl,avx512vnni", _mm256_dpbusd_epi32);
}
