//! The int8 activations of up to eight tokens, in the order in which the kernels read them.
//!
//! Step by step of 32 columns, and within a step token by token, so that a kernel that works on all tokens of a panel
//! reads one stream. The order of a panel of one token is that of its columns.

use super::PANEL_TOKENS;
use super::rounded::Rounded;
use crate::isa::{Isa, Level};
use crate::matrix::packing::{STEP_COLS, STEP_GROUPS};

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
        assert!(self.num_tokens <= PANEL_TOKENS, "a panel of {} tokens", self.num_tokens);
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
            Level::Avx2 | Level::AvxVnni | Level::Avx512 | Level::Avx512Bf16 | Level::Amx => unsafe {
                self.round_avx2(x, cols);
            },
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

#[cfg(test)]
mod tests {
    use super::*;

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
