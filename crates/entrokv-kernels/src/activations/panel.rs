//! The int8 activations of up to eight tokens, in the order in which the kernels read them.
//!
//! Step by step of 32 columns, and within a step token by token, so that a kernel that works on all tokens of a panel
//! reads one stream. The order of a panel of one token is that of its columns.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use crate::isa::{Isa, Level};
use crate::matrix::packing::{STEP_COLS, STEP_GROUPS};

/// Tokens of a full panel: those whose sums the widest kernel keeps in registers.
pub(crate) const PANEL_TOKENS: usize = 8;

/// int8 activations [steps, tokens, 32] with a scale and sums for every (step, token).
///
/// An activation is `scale * code`, code in -127..=127. Vectors are indexed by `at = step * num_tokens + token`, those of
/// halves by `2 * at + half`.
#[derive(Debug, Default)]
pub(crate) struct Panel {
    /// Tokens in it, at most [`PANEL_TOKENS`].
    pub(crate) num_tokens: usize,
    /// Codes, four columns a word (column `4 g` in the lowest byte), a word a group of the packed weights.
    pub(crate) words: Vec<[i32; STEP_GROUPS]>,
    /// Scales.
    pub(crate) scales: Vec<f32>,
    /// Sums of the 32 codes, negated: what offsets of weights are multiplied with.
    pub(crate) negated_sums: Vec<i32>,
    /// Sums of the first and last 16 codes, negated.
    pub(crate) negated_half_sums: Vec<i32>,
    /// `scale * sum`, what minima of weights are multiplied with.
    pub(crate) scaled_sums: Vec<f32>,
    /// `scale * sum` of the first and last 16 codes.
    pub(crate) scaled_half_sums: Vec<f32>,
}

impl Panel {
    /// Rounds `x` [at most 8 tokens, cols], `cols` a multiple of 32.
    pub(super) fn load(&mut self, isa: Isa, x: &[f32], cols: usize) {
        self.num_tokens = x.len() / cols;
        let len = x.len() / STEP_COLS;
        self.words.resize(len, [0; STEP_GROUPS]);
        self.scales.resize(len, 0.0);
        self.negated_sums.resize(len, 0);
        self.negated_half_sums.resize(2 * len, 0);
        self.scaled_sums.resize(len, 0.0);
        self.scaled_half_sums.resize(2 * len, 0.0);
        match isa.level() {
            Level::Scalar => self.round(x, cols, Rounded::of),
            // SAFETY: an `Isa` of these levels exists only if the CPU has AVX2.
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 | Level::AvxVnni | Level::Avx512 | Level::Avx512Bf16 => unsafe { self.round_avx2(x, cols) },
        }
    }

    /// [`Self::round`] on AVX2.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn round_avx2(&mut self, x: &[f32], cols: usize) {
        self.round(x, cols, |x| Rounded::of_avx2(x));
    }

    #[inline(always)]
    fn round(&mut self, x: &[f32], cols: usize, rounded: impl Fn(&[f32; STEP_COLS]) -> Rounded) {
        for (token, row) in x.chunks_exact(cols).enumerate() {
            let (steps, _) = row.as_chunks::<STEP_COLS>();
            for (step, x) in steps.iter().enumerate() {
                let at = step * self.num_tokens + token;
                let rounded = rounded(x);
                self.words[at] = rounded.words;
                self.scales[at] = rounded.scale;
                let sum = rounded.half_sums[0] + rounded.half_sums[1];
                // Sums of 32 codes are exact in f32; one rounding each.
                self.negated_sums[at] = -sum;
                self.scaled_sums[at] = rounded.scale * sum as f32;
                for (half, &sum) in rounded.half_sums.iter().enumerate() {
                    self.negated_half_sums[2 * at + half] = -sum;
                    self.scaled_half_sums[2 * at + half] = rounded.scale * sum as f32;
                }
            }
        }
    }
}

/// 32 activations rounded.
struct Rounded {
    words: [i32; STEP_GROUPS],
    scale: f32,
    half_sums: [i32; 2],
}

impl Rounded {
    /// Scale `max |x| / 127`, codes `round(x * (127 / max |x|))`, halves to even. Codes stay within 127: the product
    /// exceeds it by two roundings at most.
    fn of(x: &[f32; STEP_COLS]) -> Self {
        // Bits of magnitudes are ordered as the magnitudes are, and NaN above infinity: one integer maximum finds both
        // the largest magnitude and whether all are finite.
        let max = x.iter().fold(0, |max, x| max.max(x.to_bits() & 0x7fff_ffff));
        let Some(inverse) = Self::inverse(f32::from_bits(max)) else { return Self::without_codes(f32::from_bits(max)) };
        let codes = x.map(|x| (x * inverse).round_ties_even() as i8);
        let (halves, _) = codes.as_chunks::<16>();
        let (groups, _) = codes.as_chunks::<4>();
        Self {
            words: std::array::from_fn(|g| i32::from_le_bytes(groups[g].map(i8::cast_unsigned))),
            scale: f32::from_bits(max) / 127.0,
            half_sums: std::array::from_fn(|h| halves[h].iter().map(|&code| i32::from(code)).sum()),
        }
    }

    /// [`Self::of`], operation by operation, on AVX2.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    #[target_feature(enable = "avx2")]
    fn of_avx2(x: &[f32; STEP_COLS]) -> Self {
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
        let Some(inverse) = Self::inverse(max) else { return Self::without_codes(max) };

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
        Self { words, scale: max / 127.0, half_sums: [_mm_cvtsi128_si32(sums), _mm_extract_epi32::<1>(sums)] }
    }

    /// What activations are multiplied with to become codes, where there is such a number.
    #[inline(always)]
    fn inverse(max: f32) -> Option<f32> {
        let inverse = 127.0 / max;
        (inverse.is_finite() && inverse > 0.0).then_some(inverse)
    }

    /// Activations of zero or too small for an inverse; or infinite or NaN, of which the scale tells.
    #[cold]
    fn without_codes(max: f32) -> Self {
        let scale = if max.is_finite() { 0.0 } else { f32::NAN };
        Self { words: [0; STEP_GROUPS], scale, half_sums: [0; 2] }
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
        assert_eq!(rounded.scale, 12.7 / 127.0);
        for (x, code) in x.iter().zip(codes(&rounded)) {
            assert_eq!(f32::from(code), (x * (127.0 / 12.7)).round_ties_even(), "{x}");
        }
        assert_eq!(codes(&rounded)[31], -127);
        let sums = [0, 16].map(|from| codes(&rounded)[from..from + 16].iter().map(|&c| i32::from(c)).sum::<i32>());
        assert_eq!(rounded.half_sums, sums);
    }

    #[test]
    fn extremes_round_to_something_defined() {
        let mut x = [0.0; 32];
        assert_eq!(Rounded::of(&x).scale, 0.0);
        x[3] = f32::from_bits(1);
        assert_eq!((Rounded::of(&x).scale, codes(&Rounded::of(&x))), (0.0, vec![0; 32]));
        x[3] = f32::MAX;
        assert_eq!(codes(&Rounded::of(&x))[3], 127);
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            x[7] = bad;
            assert!(Rounded::of(&x).scale.is_nan());
            assert_eq!(codes(&Rounded::of(&x)), vec![0; 32]);
        }
    }

    #[test]
    fn every_isa_rounds_to_the_same_bits() {
        let x: Vec<f32> = (0u32..3 * 96).map(|i| (i.wrapping_mul(2_654_435_761).cast_signed() as f32) * 1e-9).collect();
        let panels: Vec<Panel> = Isa::available()
            .into_iter()
            .map(|isa| {
                let mut panel = Panel::default();
                panel.load(isa, &x, 96);
                panel
            })
            .collect();
        for panel in &panels {
            assert_eq!(panel.words, panels[0].words);
            assert_eq!(panel.scales, panels[0].scales);
            assert_eq!(panel.scaled_half_sums, panels[0].scaled_half_sums);
            assert_eq!(panel.negated_half_sums, panels[0].negated_half_sums);
        }
    }
}
