//! 32 activations rounded to int8: what the arithmetic of every product starts from.
//!
//! An activation becomes `scale * code`, code in -127..=127. A scale is `2^exponent * (1 + fraction / 8)`, `fraction` one of
//! eight: with four significant bits its products with the scales of weights (19 bits at most) and with integer sums (18
//! at most) are exact in f32. They may then be formed in any order and on any unit of the CPU that is free, and the only
//! rounding of a product is that of its sum over units.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use crate::matrix::packing::{STEP_COLS, STEP_GROUPS};

/// 32 activations rounded.
pub(super) struct Rounded {
    /// Codes, four columns a word.
    pub(super) words: [i32; STEP_GROUPS],
    /// Their scale.
    pub(super) scale: f32,
    /// Sums of the first and last 16 codes.
    pub(super) half_sums: [i32; 2],
}

impl Rounded {
    /// Codes `round(x * (1 / scale))`, halves to even. Codes stay within 127: the product exceeds it by three roundings at
    /// most.
    pub(super) fn of(x: &[f32; STEP_COLS]) -> Self {
        // Bits of magnitudes are ordered as the magnitudes are, and NaN above infinity: one integer maximum finds both
        // the largest magnitude and whether all are finite.
        let max = x.iter().fold(0, |max, x| max.max(x.to_bits() & 0x7fff_ffff));
        let scale = scale_of(f32::from_bits(max));
        let Some(inverse) = inverse(scale) else { return Self::without_codes(scale) };
        let codes = x.map(|x| (x * inverse).round_ties_even() as i8);
        let (halves, _) = codes.as_chunks::<16>();
        let (groups, _) = codes.as_chunks::<4>();
        Self {
            words: std::array::from_fn(|g| i32::from_le_bytes(groups[g].map(i8::cast_unsigned))),
            scale,
            half_sums: std::array::from_fn(|h| halves[h].iter().map(|&code| i32::from(code)).sum()),
        }
    }

    /// [`Self::of`], operation by operation, on AVX2.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    #[target_feature(enable = "avx2")]
    pub(super) fn of_avx2(x: &[f32; STEP_COLS]) -> Self {
        let mut max = _mm256_setzero_si256();
        let mut parts = [_mm256_setzero_ps(); 4];
        for (part, x) in parts.iter_mut().zip(x.as_chunks::<8>().0) {
            // SAFETY: 8 readable f32, no alignment asked for.
            *part = unsafe { _mm256_loadu_ps(x.as_ptr()) };
            let magnitude = _mm256_and_si256(_mm256_castps_si256(*part), _mm256_set1_epi32(i32::MAX));
            max = _mm256_max_epi32(max, magnitude);
        }
        let max = _mm_max_epi32(_mm256_castsi256_si128(max), _mm256_extracti128_si256::<1>(max));
        let max = _mm_max_epi32(max, _mm_shuffle_epi32::<0b01_00_11_10>(max));
        let max = _mm_max_epi32(max, _mm_shuffle_epi32::<0b10_11_00_01>(max));
        let max = f32::from_bits(_mm_cvtsi128_si32(max).cast_unsigned());
        let scale = scale_of(max);
        let Some(inverse) = inverse(scale) else { return Self::without_codes(scale) };

        // Conversion rounds halves to even: nobody changes the rounding mode in Rust.
        let codes = parts.map(|part| _mm256_cvtps_epi32(_mm256_mul_ps(part, _mm256_set1_ps(inverse))));
        let sums = _mm256_hadd_epi32(_mm256_add_epi32(codes[0], codes[1]), _mm256_add_epi32(codes[2], codes[3]));
        let sums = _mm256_hadd_epi32(sums, sums);
        let sums = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256::<1>(sums));

        // Packing works on the two 128-bit lanes apart: lane by lane the words come out in the order 0 2 4 6, 1 3 5 7.
        let low = _mm256_packs_epi32(codes[0], codes[1]);
        let high = _mm256_packs_epi32(codes[2], codes[3]);
        let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        let packed = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
        let mut words = [0; STEP_GROUPS];
        // SAFETY: 32 writable bytes, no alignment asked for.
        unsafe { _mm256_storeu_si256(words.as_mut_ptr().cast(), packed) };
        Self { words, scale, half_sums: [_mm_cvtsi128_si32(sums), _mm_extract_epi32::<1>(sums)] }
    }

    /// Activations that have no codes; why, the scale tells.
    #[cold]
    fn without_codes(scale: f32) -> Self {
        Self { words: [0; STEP_GROUPS], scale, half_sums: [0; 2] }
    }
}

/// From here on magnitudes count as infinite: their products with any scale of weights would not fit an f32.
pub(super) const INFINITE: f32 = f32::from_bits((127 + 100) << 23);

/// Below this, magnitudes count as zero: products of their scales with those of weights would not all be exact.
pub(super) const ZERO: f32 = f32::from_bits((127 - 100) << 23);

/// Bits of an f32 below the three of a scale's fraction.
pub(super) const FRACTION_SHIFT: u32 = f32::MANTISSA_DIGITS - 1 - 3;

/// The least scale of three fraction bits that makes codes of 127 or less out of magnitudes up to `max`; 0 if they are too
/// small to have one, NaN if they are infinite or NaN.
#[inline(always)]
fn scale_of(max: f32) -> f32 {
    if max < ZERO {
        0.0
    } else if max < INFINITE {
        let below = (1 << FRACTION_SHIFT) - 1;
        f32::from_bits(((max / 127.0).to_bits() + below) & !below)
    } else {
        f32::NAN
    }
}

/// What activations are multiplied with to become codes, where there is such a number.
#[inline(always)]
fn inverse(scale: f32) -> Option<f32> {
    (scale > 0.0).then(|| 1.0 / scale)
}

/// The exponent of a scale: NaN for NaN.
#[inline(always)]
pub(super) fn exponent(scale: f32) -> f32 {
    if scale.is_nan() { scale } else { (scale.to_bits() >> 23) as f32 - 127.0 }
}

/// What the scale of activations has behind the point, in eighths: an index that needs no check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Fraction {
    F0,
    F1,
    F2,
    F3,
    F4,
    F5,
    F6,
    F7,
}

impl Fraction {
    /// All of them, ascending.
    pub(crate) const ALL: [Fraction; 8] =
        [Self::F0, Self::F1, Self::F2, Self::F3, Self::F4, Self::F5, Self::F6, Self::F7];

    /// Eighths: less than 8.
    #[inline(always)]
    pub(crate) fn eighths(self) -> usize {
        self as usize
    }

    /// That of a scale.
    #[inline(always)]
    pub(super) fn of(scale: f32) -> Fraction {
        Self::ALL[(scale.to_bits() >> FRACTION_SHIFT & 7) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn codes(rounded: &Rounded) -> Vec<i8> {
        rounded.words.iter().flat_map(|word| word.to_le_bytes().map(u8::cast_signed)).collect()
    }

    #[test]
    fn codes_are_the_nearest_and_reach_127() {
        let mut x: [f32; 32] = std::array::from_fn(|i| (i as f32 - 11.0) * 0.37);
        x[31] = -12.7;
        let rounded = Rounded::of(&x);
        // 0.1 is 1.6 / 16, between the eighths 12 and 13 of a sixteenth.
        assert_eq!(rounded.scale, 13.0 / 128.0);
        assert_eq!((exponent(rounded.scale), Fraction::of(rounded.scale)), (-4.0, Fraction::F5));
        for (x, code) in x.iter().zip(codes(&rounded)) {
            assert_eq!(f32::from(code), (x * (128.0 / 13.0)).round_ties_even(), "{x}");
        }
        x[31] = -127.0 * 13.0 / 128.0;
        assert_eq!((codes(&Rounded::of(&x))[31], Rounded::of(&x).scale), (-127, 13.0 / 128.0));
        let sums = [0, 16].map(|from| codes(&rounded)[from..from + 16].iter().map(|&c| i32::from(c)).sum::<i32>());
        assert_eq!(rounded.half_sums, sums);
    }

    #[test]
    fn extremes_round_to_something_defined() {
        let mut x = [0.0; 32];
        assert_eq!(Rounded::of(&x).scale, 0.0);
        for small in [f32::from_bits(1), ZERO.next_down()] {
            x[3] = small;
            assert_eq!((Rounded::of(&x).scale, codes(&Rounded::of(&x))), (0.0, vec![0; 32]));
        }
        for good in [ZERO, 1.0, INFINITE.next_down()] {
            x[3] = good;
            assert!((112..=127).contains(&codes(&Rounded::of(&x))[3]), "{good}");
        }
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, INFINITE] {
            x[7] = bad;
            assert!(Rounded::of(&x).scale.is_nan());
            assert_eq!(codes(&Rounded::of(&x)), vec![0; 32]);
        }
    }
}
