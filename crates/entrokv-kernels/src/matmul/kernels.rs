//! The table of kernels: which function multiplies which type on which instruction set.
//!
//! Adding an instruction set: a module beside [`super::avx2`] with `tokens` and `unpack`, and an arm in each `of` below.

use std::ops::Range;

use super::float::{self, FLOAT_TOKENS, FloatTile};
use super::layout::{FRACTIONS, Packed, Scratch, Unpacked};
use super::scalar;
use super::{PanelSums, Start, Sums};
#[cfg(target_arch = "x86_64")]
use super::{amx, avx2, avx512};
use crate::activations::{PANEL_TOKENS, Panel, PanelStep};
use crate::dequantize::{BlockFormat, with_block_format};
use crate::isa::{Isa, Level};
use crate::matrix::Matrix;
use crate::matrix::packing::Packing;
use crate::simd::tiles::bytes::ByteTiles;
use crate::weight_type::WeightType;

type Tokens = unsafe fn(&[u8], &Panel, &mut [Sums; PANEL_TOKENS]);
type UnpackedTokens = unsafe fn(Option<&mut ByteTiles>, &[Scratch], &[PanelStep], &[PanelStep], Start, &mut PanelSums);
type Unpack = unsafe fn(&[u8], Range<usize>, &mut Scratch);

/// The int8 kernels of one quantised type on one instruction set.
///
/// Invariant, which every call below relies on: this CPU has the instruction set of the functions held, because
/// [`Kernels::of`] was handed the [`Isa`].
#[derive(Clone, Copy)]
pub(super) struct Kernels {
    tokens: Tokens,
    unpacking: Unpacking,
}

/// The kernels of many tokens where these are faster on weights unpacked before; the invariant is that of [`Kernels`].
#[derive(Clone, Copy)]
pub(super) struct Unpacking {
    block_steps: usize,
    unpack: Unpack,
    tokens: UnpackedTokens,
}

impl Kernels {
    /// Those of `weight_type`; `None` for float types.
    pub(super) fn of(isa: Isa, weight_type: WeightType) -> Option<Kernels> {
        with_block_format!(weight_type, F => Some(Self::of_format::<F>(isa)), else None)
    }

    fn of_format<F: BlockFormat>(isa: Isa) -> Kernels {
        macro_rules! kernels {
            ($isa:ident, $products:path, $scales:expr) => {{
                use $products as products;
                Kernels {
                    tokens: products::tokens::<Packed<F>>,
                    unpacking: Unpacking {
                        block_steps: F::BLOCK_STEPS,
                        unpack: $isa::unpack::<Packed<F>, Unpacked<F, $scales>>,
                        tokens: products::unpacked_tokens::<Unpacked<F, $scales>>,
                    },
                }
            }};
        }
        match isa.level() {
            Level::Scalar => kernels!(scalar, super::scalar, 1),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => kernels!(avx2, super::avx2::maddubs, 1),
            #[cfg(target_arch = "x86_64")]
            Level::AvxVnni => kernels!(avx2, super::avx2::vnni, 1),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 | Level::Avx512Bf16 => kernels!(avx512, super::avx512, FRACTIONS),
            #[cfg(target_arch = "x86_64")]
            Level::Amx if F::STEP_UNITS == 1 => Kernels {
                tokens: avx512::tokens::<Packed<F>>,
                unpacking: Unpacking {
                    block_steps: F::BLOCK_STEPS,
                    unpack: avx512::unpack::<Packed<F>, Unpacked<F, 1, true>>,
                    tokens: amx::unpacked_tokens::<Unpacked<F, 1, true>>,
                },
            },
            #[cfg(target_arch = "x86_64")]
            Level::Amx => kernels!(avx512, super::avx512, FRACTIONS),
        }
    }

    /// Adds the products of `tile` with each token of `panel` to the token's `sums`.
    pub(super) fn tokens(self, tile: &[u8], panel: &Panel, sums: &mut [Sums; PANEL_TOKENS]) {
        // SAFETY: the CPU has the instruction set, by the invariant.
        unsafe { (self.tokens)(tile, panel, sums) }
    }

    /// The kernels for many tokens.
    pub(super) fn unpacking(self) -> Unpacking {
        self.unpacking
    }
}

impl Unpacking {
    /// Steps of a block.
    pub(super) fn block_steps(self) -> usize {
        self.block_steps
    }

    /// Unpacks `steps` of `tile`, which start and end with a block.
    pub(super) fn unpack(self, tile: &[u8], steps: Range<usize>, scratch: &mut Scratch) {
        // SAFETY: the CPU has the instruction set, by the invariant.
        unsafe { (self.unpack)(tile, steps, scratch) }
    }

    /// Adds the products of one or two tiles, of which as many steps have been unpacked as `x` has, with each token of `x`
    /// to the tile's and token's sums, or to `start`. `next` is what the same stretch will be multiplied with then, `registers` are this
    /// thread's, where the instruction set has any.
    pub(super) fn tokens(
        self,
        registers: Option<&mut ByteTiles>,
        scratch: &[Scratch],
        x: &[PanelStep],
        next: &[PanelStep],
        start: Start,
        sums: &mut PanelSums,
    ) {
        // SAFETY: the CPU has the instruction set, by the invariant.
        unsafe { (self.tokens)(registers, scratch, x, next, start, sums) }
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
        macro_rules! of_isa {
            ($scalar:expr, $avx2:expr, $avx512:expr) => {
                match isa.level() {
                    Level::Scalar => $scalar,
                    #[cfg(target_arch = "x86_64")]
                    Level::Avx2 | Level::AvxVnni => $avx2,
                    #[cfg(target_arch = "x86_64")]
                    Level::Avx512 | Level::Avx512Bf16 | Level::Amx => $avx512,
                }
            };
        }
        let weights: Weights = match weight_type {
            WeightType::F32 => of_isa!(float::f32_scalar, float::f32_avx2, float::f32_avx512),
            WeightType::F16 => of_isa!(float::f16_scalar, float::f16_f16c, float::f16_f16c),
            WeightType::Bf16 => of_isa!(float::bf16_scalar, float::bf16_avx2, float::bf16_avx512),
            _ => with_block_format!(
                weight_type,
                F => of_isa!(
                    float::dequantised_scalar::<F>,
                    float::dequantised_avx2::<F>,
                    float::dequantised_avx512::<F>
                ),
                else unreachable!("float types are above")
            ),
        };
        let product: Product = of_isa!(float::product_scalar, float::product_avx2, float::product_avx512);
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
