//! 32 columns of 16 tokens, all that a kernel for many tokens reads of them side by side.

#[cfg(target_arch = "x86_64")]
mod avx512;

use super::WIDE_PANEL_TOKENS as TOKENS;
use super::rounded::{Fraction, Rounded, exponent};
use crate::isa::{Isa, Level};
use crate::matrix::packing::{STEP_COLS, STEP_GROUPS};

/// The int8 activations of 16 tokens in one step of 32 columns, in the order in which kernels ask for cache lines: what all
/// of them read, what only types with two units a step read, and what AVX-512 does without.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub(crate) struct PanelStep {
    /// Codes, four columns a word (column `4 g` in the lowest byte), a word a group of the packed weights.
    pub(crate) words: [[i32; STEP_GROUPS]; TOKENS],
    /// Exponents of the scales; of a scale of 0, any; NaN of NaN.
    pub(crate) exponents: [f32; TOKENS],
    /// `scale * sum`, what minima of weights are multiplied with.
    pub(crate) scaled_sums: [f32; TOKENS],
    /// Fractions of the scales.
    pub(crate) fractions: [Fraction; TOKENS],
    /// Sums of the 32 codes, negated: what offsets of weights are multiplied with.
    pub(crate) negated_sums: [i32; TOKENS],
    /// Sums of the first and last 16 codes, negated.
    pub(crate) negated_half_sums: [[i32; 2]; TOKENS],
    /// `scale * sum` of the first and last 16 codes.
    pub(crate) scaled_half_sums: [[f32; 2]; TOKENS],
    /// Scales.
    pub(crate) scales: [f32; TOKENS],
}

const _: () = assert!(std::mem::offset_of!(PanelStep, negated_half_sums) <= 12 * 64);
const _: () = assert!(std::mem::offset_of!(PanelStep, scales) <= 16 * 64);

impl PanelStep {
    /// Tokens of zeros.
    pub(super) const ZERO: Self = Self {
        words: [[0; STEP_GROUPS]; TOKENS],
        exponents: [0.0; TOKENS],
        fractions: [Fraction::F0; TOKENS],
        scales: [0.0; TOKENS],
        negated_sums: [0; TOKENS],
        scaled_sums: [0.0; TOKENS],
        negated_half_sums: [[0; 2]; TOKENS],
        scaled_half_sums: [[0.0; 2]; TOKENS],
    };

    /// Rounds the rows of `x` [at most 16 tokens, cols] into `steps`; tokens that are not there become zeros.
    pub(super) fn load(isa: Isa, x: &[f32], steps: &mut [PanelStep]) {
        match isa.level() {
            Level::Scalar => Self::round(x, steps, Rounded::of),
            // SAFETY: an `Isa` of these levels exists only if the CPU has AVX2.
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 | Level::AvxVnni => unsafe { Self::round_avx2(x, steps) },
            // SAFETY: an `Isa` of these levels exists only if the CPU has AVX2 and AVX-512 F, BW, DQ, VL and VNNI.
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 | Level::Avx512Bf16 | Level::Amx => unsafe { avx512::round(x, steps) },
        }
    }

    /// [`Self::round`] on AVX2.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn round_avx2(x: &[f32], steps: &mut [PanelStep]) {
        Self::round(x, steps, |x| Rounded::of_avx2(x));
    }

    #[inline(always)]
    fn round(x: &[f32], steps: &mut [PanelStep], rounded: impl Fn(&[f32; STEP_COLS]) -> Rounded) {
        let num_tokens = x.len() / (steps.len() * STEP_COLS);
        if num_tokens < TOKENS {
            steps.fill(Self::ZERO);
        }
        for (token, row) in x.chunks_exact(steps.len() * STEP_COLS).enumerate() {
            for (step, x) in steps.iter_mut().zip(row.as_chunks::<STEP_COLS>().0) {
                step.put(token, rounded(x));
            }
        }
    }

    #[inline(always)]
    fn put(&mut self, token: usize, rounded: Rounded) {
        let Rounded { words, scale, half_sums } = rounded;
        let sum = half_sums[0] + half_sums[1];
        self.words[token] = words;
        self.exponents[token] = exponent(scale);
        self.fractions[token] = Fraction::of(scale);
        self.scales[token] = scale;
        self.negated_sums[token] = -sum;
        self.scaled_sums[token] = scale * sum as f32;
        self.negated_half_sums[token] = half_sums.map(|sum| -sum);
        self.scaled_half_sums[token] = half_sums.map(|sum| scale * sum as f32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps with ordinary, tiny, huge, infinite and absent activations.
    #[test]
    fn every_isa_rounds_to_the_same_bits() {
        let num_steps = 5;
        let cols = num_steps * STEP_COLS;
        let noise = |i: usize| ((i as u32).wrapping_mul(2_654_435_761).cast_signed() as f32) * 1e-9;
        for num_tokens in [1, 7, 8, 9, 16] {
            let mut x: Vec<f32> = (0..num_tokens * cols).map(noise).collect();
            x[STEP_COLS..2 * STEP_COLS].iter_mut().for_each(|x| *x *= 1e-31);
            x[2 * STEP_COLS + 3] = 1e29;
            x[3 * STEP_COLS + 30] = f32::NEG_INFINITY;
            x[4 * STEP_COLS..].iter_mut().take(STEP_COLS).for_each(|x| *x = 0.0);
            let rounded: Vec<Vec<PanelStep>> = Isa::available()
                .into_iter()
                .map(|isa| {
                    let mut steps = vec![PanelStep::ZERO; num_steps];
                    PanelStep::load(isa, &x, &mut steps);
                    steps
                })
                .collect();
            for (isa, steps) in Isa::available().iter().zip(&rounded) {
                for (step, (got, expected)) in steps.iter().zip(&rounded[0]).enumerate() {
                    let name = format!("{isa}, {num_tokens} tokens, step {step}");
                    assert_eq!(got.words, expected.words, "{name}");
                    assert_eq!(got.scales.map(f32::to_bits), expected.scales.map(f32::to_bits), "{name}");
                    assert_eq!(got.fractions, expected.fractions, "{name}");
                    assert_eq!(got.negated_sums, expected.negated_sums, "{name}");
                    assert_eq!(got.negated_half_sums, expected.negated_half_sums, "{name}");
                    for token in 0..TOKENS {
                        let scale = got.scales[token];
                        if scale > 0.0 {
                            let fraction = 1.0 + got.fractions[token].eighths() as f32 / 8.0;
                            assert_eq!(got.exponents[token].exp2() * fraction, scale, "{name}, token {token}");
                        }
                        let sum = -got.negated_sums[token] as f32 * scale;
                        assert_eq!(got.scaled_sums[token].to_bits(), sum.to_bits(), "{name}, token {token}");
                        assert_eq!(got.exponents[token].is_nan(), scale.is_nan(), "{name}, token {token}");
                    }
                    let bits = |step: &PanelStep| step.scaled_half_sums.map(|sums| sums.map(f32::to_bits));
                    assert_eq!(bits(got), bits(expected), "{name}");
                }
            }
        }
    }
}
