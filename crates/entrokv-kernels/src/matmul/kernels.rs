//! The table of kernels: which function multiplies which type on which instruction set.
//!
//! Adding an instruction set: a module beside [`super::avx2`] with `one_token`, `unpack` and `tokens`, and an arm in each
//! `of` below.

use std::ops::Range;

use super::Sums;
use super::float::{self, FLOAT_TOKENS, FloatTile};
use super::scalar;
use super::unpacked::Unpacked;
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};
use crate::activations::{PANEL_TOKENS, Panel};
use crate::dequantize::{BlockFormat, with_block_format};
use crate::isa::{Isa, Level};
use crate::matrix::{Matrix, Tile};
use crate::weight_type::WeightType;

type OneToken = unsafe fn(Tile<'_>, &Panel, &mut Sums);
type Unpack = unsafe fn(Tile<'_>, Range<usize>, &mut Unpacked);
type Tokens = unsafe fn(&Unpacked, Range<usize>, &Panel, &mut [Sums; PANEL_TOKENS]);

/// The int8 kernels of one quantised type on one instruction set.
///
/// Invariant, which every call below relies on: this CPU has the instruction set of the functions held, because
/// [`Kernels::of`] was handed the [`Isa`].
#[derive(Clone, Copy)]
pub(super) struct Kernels {
    one_token: OneToken,
    unpack: Unpack,
    tokens: Tokens,
}

impl Kernels {
    /// Those of `weight_type`; `None` for float types.
    pub(super) fn of(isa: Isa, weight_type: WeightType) -> Option<Kernels> {
        with_block_format!(weight_type, F => Some(Self::of_format::<F>(isa)), else None)
    }

    fn of_format<F: BlockFormat>(isa: Isa) -> Kernels {
        match isa.level() {
            Level::Scalar => {
                Kernels { one_token: scalar::one_token::<F>, unpack: scalar::unpack::<F>, tokens: scalar::tokens::<F> }
            }
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => {
                Kernels { one_token: avx2::one_token::<F>, unpack: avx2::unpack::<F>, tokens: avx2::tokens::<F> }
            }
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => {
                Kernels { one_token: avx512::one_token::<F>, unpack: avx512::unpack::<F>, tokens: avx512::tokens::<F> }
            }
        }
    }

    /// Adds the products of all columns of `tile` with the only token of `panel` to `sums`.
    pub(super) fn one_token(self, tile: Tile<'_>, panel: &Panel, sums: &mut Sums) {
        // SAFETY: the CPU has the instruction set, by the invariant.
        unsafe { (self.one_token)(tile, panel, sums) }
    }

    /// Unpacks `steps` of `tile`, which start and end with a block.
    pub(super) fn unpack(self, tile: Tile<'_>, steps: Range<usize>, unpacked: &mut Unpacked) {
        // SAFETY: the CPU has the instruction set, by the invariant.
        unsafe { (self.unpack)(tile, steps, unpacked) }
    }

    /// Adds the products of `steps`, unpacked, with each token of `panel` to the token's `sums`.
    pub(super) fn tokens(
        self,
        unpacked: &Unpacked,
        steps: Range<usize>,
        panel: &Panel,
        sums: &mut [Sums; PANEL_TOKENS],
    ) {
        // SAFETY: the CPU has the instruction set, by the invariant.
        unsafe { (self.tokens)(unpacked, steps, panel, sums) }
    }
}

type Weights = unsafe fn(&Matrix, usize, Range<usize>, &mut FloatTile);
type Product = unsafe fn(&FloatTile, &[f32], usize, Range<usize>, &mut [Sums; FLOAT_TOKENS]);

/// The f32 kernels of one type on one instruction set; the invariant is that of [`Kernels`].
#[derive(Clone, Copy)]
pub(super) struct FloatKernels {
    weights: Weights,
    product: Product,
}

impl FloatKernels {
    /// Those of `weight_type`, quantised ones being dequantised.
    pub(super) fn of(isa: Isa, weight_type: WeightType) -> FloatKernels {
        let weights: Weights = match weight_type {
            WeightType::F32 => float::weights_f32,
            WeightType::F16 => float::weights_f16,
            WeightType::Bf16 => float::weights_bf16,
            _ => with_block_format!(
                weight_type,
                F => match isa.level() {
                    Level::Scalar => float::dequantised_scalar::<F>,
                    #[cfg(target_arch = "x86_64")]
                    Level::Avx2 => float::dequantised_avx2::<F>,
                    #[cfg(target_arch = "x86_64")]
                    Level::Avx512 => float::dequantised_avx512::<F>,
                },
                else unreachable!("float types are above")
            ),
        };
        let product: Product = match isa.level() {
            Level::Scalar => float::product_scalar,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => float::product_avx2,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => float::product_avx512,
        };
        FloatKernels { weights, product }
    }

    /// Writes columns `cols` (at most [`super::FLOAT_COLS`], from a whole block to a whole block) of tile `tile` as f32.
    pub(super) fn weights(self, w: &Matrix, tile: usize, cols: Range<usize>, weights: &mut FloatTile) {
        // SAFETY: the CPU has the instruction set, by the invariant.
        unsafe { (self.weights)(w, tile, cols, weights) }
    }

    /// Adds the products of `weights`, which are columns `stretch`, with each row of `x` [tokens, cols] to its `sums`.
    pub(super) fn product(
        self,
        weights: &FloatTile,
        x: &[f32],
        cols: usize,
        stretch: Range<usize>,
        sums: &mut [Sums; FLOAT_TOKENS],
    ) {
        // SAFETY: the CPU has the instruction set, by the invariant.
        unsafe { (self.product)(weights, x, cols, stretch, sums) }
    }
}
