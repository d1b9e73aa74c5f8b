//! The inputs of a linear layer, rounded once to what the integer dot products take.

mod panel;
mod panel_step;
mod rounded;

pub(crate) use panel::Panel;
pub(crate) use panel_step::PanelStep;
pub(crate) use rounded::Fraction;

use crate::compute::Compute;
use crate::matrix::packing::STEP_COLS;
use crate::weight_type::WeightType;

/// Tokens of a full panel.
pub(crate) const PANEL_TOKENS: usize = 8;

/// Tokens that meet packed weights; more of them are kept in full panels and meet unpacked ones.
const MAX_FEW_TOKENS: usize = 3 * PANEL_TOKENS;

/// How activations meet quantised weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    /// Activations are rounded to int8, one scale of 4 significant bits per 32 columns; sums of 16 or 32 products are exact
    /// integers, and so are their products with the scales: the only rounding is that of the sum over units.
    Int8,
    /// Activations stay f32 and weights are dequantised: slow, and the reference against which `Int8` is measured.
    F32,
}

/// A reusable buffer for the inputs [tokens, cols] of one or several linear layers.
///
/// Float weights always meet unrounded activations. A NaN, an infinity or a magnitude of 2^100 (1.3e30) or more makes every
/// `Int8` product of its token NaN. In a block of 32 whose largest magnitude is below 2^-100 (7.9e-31) all activations
/// count as zero. Between these, integer arithmetic neither overflows nor underflows.
#[derive(Debug)]
pub struct Activations {
    keeps_codes: bool,
    keeps_floats: bool,
    num_tokens: usize,
    cols: usize,
    floats: Vec<f32>,
    panels: Vec<Panel>,
    panel_steps: Vec<PanelStep>,
}

/// Rounded activations, in the form that their number asks for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rounding<'a> {
    /// Of few tokens: panels of up to 8.
    Few(&'a [Panel]),
    /// Of many tokens: [panels, steps], the last panel filled up with tokens of zeros.
    Many(&'a [PanelStep]),
}

impl Activations {
    /// A buffer for products with weights of any type.
    pub fn new(arithmetic: Arithmetic) -> Self {
        Self::for_weights(arithmetic, WeightType::ALL)
    }

    /// A buffer for products with weights of these types only: it keeps no form of the activations that none of them
    /// needs. Quantised models save a copy of every input.
    pub fn for_weights(arithmetic: Arithmetic, types: impl IntoIterator<Item = WeightType>) -> Self {
        let (mut keeps_codes, mut keeps_floats) = (false, false);
        for ty in types {
            match arithmetic {
                Arithmetic::Int8 if ty.is_quantised() => keeps_codes = true,
                Arithmetic::Int8 | Arithmetic::F32 => keeps_floats = true,
            }
        }
        Self {
            keeps_codes,
            keeps_floats,
            num_tokens: 0,
            cols: 0,
            floats: Vec::new(),
            panels: Vec::new(),
            panel_steps: Vec::new(),
        }
    }

    /// Takes `x` [tokens, cols] in, in place of what was there.
    ///
    /// # Panics
    /// If `cols` is 0 or `x` is not a whole number of rows.
    pub fn load(&mut self, compute: &Compute, x: &[f32], cols: usize) {
        assert!(cols > 0 && x.len().is_multiple_of(cols), "{} activations in rows of {cols}", x.len());
        (self.num_tokens, self.cols) = (x.len() / cols, cols);
        if self.keeps_floats {
            self.floats.resize(x.len(), 0.0);
            let chunk_len = PANEL_TOKENS * cols;
            compute.threads.for_each_chunk(&mut self.floats, chunk_len, |chunk, floats| {
                floats.copy_from_slice(&x[chunk * chunk_len..][..floats.len()]);
            });
        }
        if !self.has_codes() {
            return;
        }
        let (num_panels, num_steps) = (self.num_tokens.div_ceil(PANEL_TOKENS), cols / STEP_COLS);
        let panel_of = |index: usize| {
            let first = index * PANEL_TOKENS * cols;
            &x[first..x.len().min(first + PANEL_TOKENS * cols)]
        };
        if self.num_tokens <= MAX_FEW_TOKENS {
            if self.panels.len() < num_panels {
                self.panels.resize_with(num_panels, Panel::default);
            }
            compute.threads.for_each_chunk(&mut self.panels[..num_panels], 1, |index, panel| {
                panel[0].load(compute.isa, panel_of(index), cols);
            });
        } else {
            self.panel_steps.resize(num_panels * num_steps, PanelStep::ZERO);
            compute.threads.for_each_chunk(&mut self.panel_steps, num_steps, |index, steps| {
                PanelStep::load(compute.isa, panel_of(index), steps);
            });
        }
    }

    /// Tokens loaded.
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// Columns loaded: the input features.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The rounded activations; `None` where integer arithmetic does not apply.
    pub(crate) fn rounded(&self) -> Option<Rounding<'_>> {
        self.has_codes().then(|| match self.num_tokens {
            ..=MAX_FEW_TOKENS => Rounding::Few(&self.panels[..self.num_tokens.div_ceil(PANEL_TOKENS)]),
            _ => Rounding::Many(&self.panel_steps),
        })
    }

    /// Whether activations are rounded. No quantised type has other columns than multiples of 32.
    fn has_codes(&self) -> bool {
        self.keeps_codes && self.cols.is_multiple_of(STEP_COLS)
    }

    /// The unrounded activations [tokens, cols], if kept.
    pub(crate) fn floats(&self) -> Option<&[f32]> {
        self.keeps_floats.then_some(&self.floats)
    }
}
