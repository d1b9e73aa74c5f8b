//! The inputs of a linear layer, rounded once to what the integer dot products take.

mod panel;

pub(crate) use panel::{PANEL_TOKENS, Panel};

use crate::compute::Compute;
use crate::matrix::packing::STEP_COLS;
use crate::weight_type::WeightType;

/// How activations meet quantised weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    /// Activations are rounded to int8, one f32 scale per 32 columns; sums of 16 or 32 products are exact integers.
    Int8,
    /// Activations stay f32 and weights are dequantised: slow, and the reference against which `Int8` is measured.
    F32,
}

/// A reusable buffer for the inputs [tokens, cols] of one or several linear layers.
///
/// Float weights always meet unrounded activations. A NaN or an infinity makes every `Int8` product of its token NaN. In
/// a block of 32 whose largest magnitude is below about 4e-37 all activations count as zero: the inverse of their scale
/// is no f32.
#[derive(Debug)]
pub struct Activations {
    keeps_codes: bool,
    keeps_floats: bool,
    num_tokens: usize,
    cols: usize,
    floats: Vec<f32>,
    panels: Vec<Panel>,
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
        Self { keeps_codes, keeps_floats, num_tokens: 0, cols: 0, floats: Vec::new(), panels: Vec::new() }
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
        // No quantised type has other columns than multiples of 32.
        if self.keeps_codes && cols.is_multiple_of(STEP_COLS) {
            let num_panels = self.num_tokens.div_ceil(PANEL_TOKENS);
            if self.panels.len() < num_panels {
                self.panels.resize_with(num_panels, Panel::default);
            }
            compute.threads.for_each_chunk(&mut self.panels[..num_panels], 1, |index, panel| {
                let first = index * PANEL_TOKENS * cols;
                let last = x.len().min(first + PANEL_TOKENS * cols);
                panel[0].load(compute.isa, &x[first..last], cols);
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

    /// The rounded activations, 8 tokens a panel; `None` where integer arithmetic does not apply.
    pub(crate) fn panels(&self) -> Option<&[Panel]> {
        let applies = self.keeps_codes && self.cols.is_multiple_of(STEP_COLS);
        applies.then(|| &self.panels[..self.num_tokens.div_ceil(PANEL_TOKENS)])
    }

    /// The unrounded activations [tokens, cols], if kept.
    pub(crate) fn floats(&self) -> Option<&[f32]> {
        self.keeps_floats.then_some(&self.floats)
    }
}
