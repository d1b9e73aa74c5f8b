//! The inputs of a linear layer, rounded once to what the integer dot products take.

mod panel;
mod panel_step;
mod rounded;

pub(crate) use panel::Panel;
pub(crate) use panel_step::PanelStep;
pub(crate) use rounded::Fraction;

use std::ops::Range;

use crate::compute::Compute;
use crate::disjoint::DisjointMut;
use crate::matrix::packing::STEP_COLS;
use crate::weight_type::WeightType;

/// Tokens of a full panel of few.
pub(crate) const PANEL_TOKENS: usize = 8;

/// Tokens of a panel of many.
pub(crate) const WIDE_PANEL_TOKENS: usize = 2 * PANEL_TOKENS;

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
    /// Per thread, the rows of a panel that are computed on the way.
    computed: Vec<Vec<f32>>,
}

/// Where activations come from.
enum Source<'a> {
    /// Rows in memory.
    Rows(&'a [f32]),
    /// Rows to be computed.
    Computed(&'a (dyn Fn(Range<usize>, &mut [f32]) + Sync)),
}

/// Rounded activations, in the form that their number asks for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rounding<'a> {
    /// Of few tokens: panels of up to 8.
    Few(&'a [Panel]),
    /// Of many tokens: [wide panels, steps], the last panel filled up with tokens of zeros.
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
            computed: Vec::new(),
        }
    }

    /// Takes `x` [tokens, cols] in, in place of what was there.
    ///
    /// # Panics
    /// If `cols` is 0 or `x` is not a whole number of rows.
    pub fn load(&mut self, compute: &Compute, x: &[f32], cols: usize) {
        assert!(cols > 0 && x.len().is_multiple_of(cols), "{} activations in rows of {cols}", x.len());
        self.load_from(compute, x.len() / cols, cols, Source::Rows(x));
    }

    /// [`Activations::load`] of rows that are computed on the way, by the thread that rounds them: they are in its nearest
    /// cache then and never in memory. `rows(elements, out)` computes elements `elements` of [tokens, cols], whole rows; every
    /// row is asked for once.
    ///
    /// # Panics
    /// If `cols` is 0.
    pub(crate) fn load_computed(
        &mut self,
        compute: &Compute,
        num_tokens: usize,
        cols: usize,
        rows: &(dyn Fn(Range<usize>, &mut [f32]) + Sync),
    ) {
        assert!(cols > 0, "activations in rows of 0");
        self.load_from(compute, num_tokens, cols, Source::Computed(rows));
    }

    fn load_from(&mut self, compute: &Compute, num_tokens: usize, cols: usize, source: Source<'_>) {
        (self.num_tokens, self.cols) = (num_tokens, cols);
        let (has_codes, is_few) = (self.has_codes(), num_tokens <= MAX_FEW_TOKENS);
        let panel_tokens = if is_few { PANEL_TOKENS } else { WIDE_PANEL_TOKENS };
        let (len, panel_len) = (num_tokens * cols, panel_tokens * cols);
        let (num_panels, num_steps) = (num_tokens.div_ceil(panel_tokens), cols / STEP_COLS);
        if has_codes && is_few && self.panels.len() < num_panels {
            self.panels.resize_with(num_panels, Panel::default);
        }
        // Buffers only grow: inputs of few and of many columns alternate, and growing writes zeros.
        if has_codes && !is_few && self.panel_steps.len() < num_panels * num_steps {
            self.panel_steps.resize(num_panels * num_steps, PanelStep::ZERO);
        }
        if self.keeps_floats && self.floats.len() < len {
            self.floats.resize(len, 0.0);
        }
        let Self { keeps_floats, floats, panels, panel_steps, computed, .. } = self;
        let (floats, panels) = (DisjointMut::new(floats), DisjointMut::new(panels));
        let panel_steps = DisjointMut::new(panel_steps);
        computed.resize_with(compute.threads.num_threads(), Vec::new);
        compute.threads.for_each_with(computed, num_panels, |computed, index| {
            let elements = index * panel_len..len.min((index + 1) * panel_len);
            let x: &[f32] = match &source {
                Source::Rows(x) if !*keeps_floats => &x[elements],
                _ => {
                    let out = if *keeps_floats {
                        // SAFETY: panels are of different tokens, and each is loaded once.
                        unsafe { floats.part(elements.clone()) }
                    } else {
                        computed.resize(panel_len.max(computed.len()), 0.0);
                        &mut computed[..elements.len()]
                    };
                    match &source {
                        Source::Rows(x) => out.copy_from_slice(&x[elements]),
                        Source::Computed(rows) => rows(elements, out),
                    }
                    out
                }
            };
            if has_codes && is_few {
                // SAFETY: each panel is loaded once.
                let panel = unsafe { panels.part(index..index + 1) };
                panel[0].load(compute.isa, x, cols);
            } else if has_codes {
                // SAFETY: each panel is loaded once.
                let steps = unsafe { panel_steps.part(index * num_steps..(index + 1) * num_steps) };
                PanelStep::load(compute.isa, x, steps);
            }
        });
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
            _ => {
                let num_panels = self.num_tokens.div_ceil(WIDE_PANEL_TOKENS);
                Rounding::Many(&self.panel_steps[..num_panels * (self.cols / STEP_COLS)])
            }
        })
    }

    /// Whether activations are rounded. No quantised type has other columns than multiples of 32.
    fn has_codes(&self) -> bool {
        self.keeps_codes && self.cols.is_multiple_of(STEP_COLS)
    }

    /// The unrounded activations [tokens, cols], if kept.
    pub(crate) fn floats(&self) -> Option<&[f32]> {
        self.keeps_floats.then(|| &self.floats[..self.num_tokens * self.cols])
    }
}
