//! Integer sums by `vpmaddubsw`: unsigned times signed bytes to sums of two in 16 bits, then `vpmaddwd` with ones.
//!
//! Sums of two saturate at 32,767. With activations within 127, codes below 16 may be added up over 8 groups before they
//! are widened, below 32 over 4, below 64 over 2 ([`narrow_groups`]). 8-bit codes are made signed again: `|code| * (x with
//! the sign of code)` is at most 2 * 128 * 127 = 32,512; they need no correction for their offset then.

use std::arch::x86_64::*;

use super::{group, start};
use crate::dequantize::BlockFormat;
use crate::matmul::layout::Layout;
use crate::matrix::packing::STEP_GROUPS;

/// Sides of an unpacked tile that are multiplied together: both where 8 sums of 4 tokens are all that is kept of a unit.
pub(super) const fn unpacked_sides<L: Layout>() -> usize {
    if narrow_groups::<L>() == L::UNIT_GROUPS { 2 } else { 1 }
}

/// Groups whose sums of two products fit 16 bits together.
const fn narrow_groups<L: Layout>() -> usize {
    let fit = match L::Format::CODE_BITS {
        8 => 1,
        bits => 32_767 / (2 * 127 * ((1 << bits) - 1)),
    };
    if fit < L::UNIT_GROUPS { fit } else { L::UNIT_GROUPS }
}

/// Integer sums of unit `half` of a step, less the offset's share: `S` sides of a tile from `first_side` on, `T` tokens.
/// `at_group` is called at each of its groups.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn unit_dots<L: Layout, const T: usize, const S: usize>(
    codes: &[u8],
    half: usize,
    first_side: usize,
    words: &[[i32; STEP_GROUPS]; T],
    x_sums: [i32; T],
    at_group: impl Fn(usize),
) -> [[__m256i; T]; S] {
    let mut dots = [[_mm256_setzero_si256(); T]; S];
    for token in 0..T {
        // 8-bit codes are signed by the time they are multiplied.
        let start = if L::Format::CODE_BITS == 8 { _mm256_setzero_si256() } else { start::<L>(x_sums[token]) };
        for side in 0..S {
            dots[side][token] = start;
        }
    }
    for first in (half * L::UNIT_GROUPS..(half + 1) * L::UNIT_GROUPS).step_by(narrow_groups::<L>()) {
        let mut narrow = [[_mm256_setzero_si256(); T]; S];
        for g in first..first + narrow_groups::<L>() {
            at_group(g);
            for side in 0..S {
                let codes = Codes::of::<L>(group::<L>(codes, g, first_side + side));
                for token in 0..T {
                    narrow[side][token] = _mm256_add_epi16(narrow[side][token], codes.pair_sums::<L>(words[token][g]));
                }
            }
        }
        for side in 0..S {
            for token in 0..T {
                dots[side][token] = widen(dots[side][token], narrow[side][token]);
            }
        }
    }
    dots
}

/// Codes ready to be multiplied: themselves, or magnitudes and signs.
#[derive(Clone, Copy)]
struct Codes {
    unsigned: __m256i,
    signs: __m256i,
}

impl Codes {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn of<L: Layout>(codes: __m256i) -> Self {
        if L::Format::CODE_BITS < 8 {
            return Self { unsigned: codes, signs: codes };
        }
        let signed = _mm256_xor_si256(codes, _mm256_set1_epi8(i8::MIN));
        Self { unsigned: _mm256_abs_epi8(signed), signs: signed }
    }

    /// Sums of two products in 16 bits.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn pair_sums<L: Layout>(self, word: i32) -> __m256i {
        let x = _mm256_set1_epi32(word);
        let x = if L::Format::CODE_BITS < 8 { x } else { _mm256_sign_epi8(x, self.signs) };
        _mm256_maddubs_epi16(self.unsigned, x)
    }
}

/// Adds the 16-bit sums, two and two, to the 32-bit ones.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn widen(dot: __m256i, narrow: __m256i) -> __m256i {
    _mm256_add_epi32(dot, _mm256_madd_epi16(narrow, _mm256_set1_epi16(1)))
}
