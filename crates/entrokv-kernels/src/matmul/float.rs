//! Products in f32: of float weights, and of dequantised ones where the exact path is asked for.
//!
//! Plain Rust, compiled once per instruction set: fixed arrays of 16 lanes that the compiler turns into vectors.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
use std::ops::Range;

use super::layout::{Packed, STRETCH_STEPS, Scratch, Unpacked};
use super::{Sums, scalar};
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};
use crate::dequantize::BlockFormat;
use crate::matrix::packing::{Packing, STEP_COLS, STEP_GROUPS};
use crate::matrix::{Matrix, TILE_ROWS};

/// Columns of a stretch of f32 weights (16 KiB of them): a multiple of every block and of [`PART_COLS`].
pub(super) const FLOAT_COLS: usize = 256;

/// Tokens that share one pass over the weights.
pub(super) const FLOAT_TOKENS: usize = 4;

/// Columns of a partial sum: these keep the rounding error of long rows down, and give a single token independent
/// chains of additions.
const PART_COLS: usize = 32;

const _: () = assert!(FLOAT_COLS <= STRETCH_STEPS * STEP_COLS && FLOAT_COLS.is_multiple_of(PART_COLS));

/// Up to [`FLOAT_COLS`] columns of 16 rows as f32.
#[repr(C, align(64))]
pub(super) struct FloatTile([[f32; TILE_ROWS]; FLOAT_COLS]);

impl FloatTile {
    pub(super) fn zeroed() -> Self {
        Self([[0.0; TILE_ROWS]; FLOAT_COLS])
    }
}

/// Defines a kernel for every instruction set from its plain Rust.
macro_rules! compiled_per_isa {
    ($(#[$doc:meta])* [$scalar:ident, $avx2:ident, $avx512:ident] $(<$f:ident>)?
        ($($arg:ident: $ty:ty),*) $body:path, $($unpack:ident)?) => {
        $(#[$doc])*
        pub(super) fn $scalar$(<$f: BlockFormat>)?($($arg: $ty),*) {
            $body($($arg,)* $(scalar::$unpack::<Packed<$f>, Unpacked<$f, 1>>)?);
        }

        $(#[$doc])*
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c")]
        pub(super) fn $avx2$(<$f: BlockFormat>)?($($arg: $ty),*) {
            $body($($arg,)* $(|tile, steps, scratch: &mut Scratch| avx2::$unpack::<Packed<$f>, Unpacked<$f, 1>>(tile, steps, scratch))?);
        }

        $(#[$doc])*
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
        pub(super) fn $avx512$(<$f: BlockFormat>)?($($arg: $ty),*) {
            $body($($arg,)* $(|tile, steps, scratch: &mut Scratch| avx512::$unpack::<Packed<$f>, Unpacked<$f, 1>>(tile, steps, scratch))?);
        }
    };
}

compiled_per_isa! {
    /// Reads columns `cols` of a tile of F32.
    [f32_scalar, f32_avx2, f32_avx512]
    (w: &Matrix, tile: usize, cols: Range<usize>, weights: &mut FloatTile) f32_weights,
}

compiled_per_isa! {
    /// Widens columns `cols` of a tile of BF16.
    [bf16_scalar, bf16_avx2, bf16_avx512]
    (w: &Matrix, tile: usize, cols: Range<usize>, weights: &mut FloatTile) bf16_weights,
}

compiled_per_isa! {
    /// Dequantises columns `cols` of a tile.
    [dequantised_scalar, dequantised_avx2, dequantised_avx512]<F>
    (w: &Matrix, tile: usize, cols: Range<usize>, weights: &mut FloatTile) dequantised::<F>, unpack
}

compiled_per_isa! {
    /// Multiplies a stretch with up to [`FLOAT_TOKENS`] tokens.
    [product_scalar, product_avx2, product_avx512]
    (weights: &FloatTile, x: &[f32], cols: usize, stretch: Range<usize>, sums: &mut [Sums; FLOAT_TOKENS]) product,
}

#[inline(always)]
fn f32_weights(w: &Matrix, tile: usize, cols: Range<usize>, weights: &mut FloatTile) {
    convert(w.tile(tile), cols, weights, f32::from_le_bytes);
}

#[inline(always)]
fn bf16_weights(w: &Matrix, tile: usize, cols: Range<usize>, weights: &mut FloatTile) {
    convert(w.tile(tile), cols, weights, |bytes| f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16));
}

/// Converts elements of `N` bytes.
#[inline(always)]
fn convert<const N: usize>(tile: &[u8], cols: Range<usize>, weights: &mut FloatTile, value: impl Fn([u8; N]) -> f32) {
    let (elements, _) = tile[cols.start * TILE_ROWS * N..cols.end * TILE_ROWS * N].as_chunks::<N>();
    for (weight, &element) in weights.0.as_flattened_mut().iter_mut().zip(elements) {
        *weight = value(element);
    }
}

/// Widens columns `cols` of a tile of F16.
pub(super) fn f16_scalar(w: &Matrix, tile: usize, cols: Range<usize>, weights: &mut FloatTile) {
    convert(w.tile(tile), cols, weights, |bytes| half::f16::from_le_bytes(bytes).to_f32());
}

/// [`f16_scalar`] with the CPU's conversion, which is exact as well.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
pub(super) fn f16_f16c(w: &Matrix, tile: usize, cols: Range<usize>, weights: &mut FloatTile) {
    let tile = w.tile(tile);
    let (elements, _) = tile[cols.start * TILE_ROWS * 2..cols.end * TILE_ROWS * 2].as_chunks::<16>();
    let (weights, _) = weights.0.as_flattened_mut().as_chunks_mut::<8>();
    for (weights, elements) in weights.iter_mut().zip(elements) {
        // SAFETY: 16 readable bytes and 8 writable f32, no alignment asked for.
        unsafe {
            let wide = _mm256_cvtph_ps(_mm_loadu_si128(elements.as_ptr().cast()));
            _mm256_storeu_ps(weights.as_mut_ptr(), wide);
        }
    }
}

#[inline(always)]
fn dequantised<F: BlockFormat>(
    w: &Matrix,
    tile: usize,
    cols: Range<usize>,
    weights: &mut FloatTile,
    unpack: impl Fn(&[u8], Range<usize>, &mut Scratch),
) {
    let mut scratch = Scratch::zeroed();
    unpack(w.tile(tile), cols.start / STEP_COLS..cols.end / STEP_COLS, &mut scratch);
    let units = F::STEP_UNITS;
    let steps = scratch.steps::<Unpacked<F, 1>>().zip(weights.0.chunks_exact_mut(STEP_COLS));
    for ((scales, codes), weights) in steps.take(cols.len() / STEP_COLS) {
        for (group, weights) in weights.chunks_exact_mut(4).enumerate() {
            let unit = group * units / STEP_GROUPS;
            let value = |unit: usize, lane: usize| f32::from_le_bytes(scales[unit].as_chunks().0[lane]);
            for (i, weights) in weights.iter_mut().enumerate() {
                for (lane, weight) in weights.iter_mut().enumerate() {
                    let code = codes[group][lane * 4 + i];
                    // The two roundings of `UnitScales::value`.
                    *weight = if F::HAS_MIN {
                        value(unit, lane) * f32::from(code) + value(units + unit, lane)
                    } else {
                        value(unit, lane) * f32::from(i16::from(code) - i16::from(F::OFFSET))
                    };
                }
            }
        }
    }
}

#[inline(always)]
fn product(weights: &FloatTile, x: &[f32], cols: usize, stretch: Range<usize>, sums: &mut [Sums; FLOAT_TOKENS]) {
    let row = |token: usize| &x[token * cols..][stretch.clone()];
    match x.len() / cols {
        1 => product_of([row(0)], weights, sums),
        2 => product_of([row(0), row(1)], weights, sums),
        3 => product_of([row(0), row(1), row(2)], weights, sums),
        _ => product_of([row(0), row(1), row(2), row(3)], weights, sums),
    }
}

#[inline(always)]
fn product_of<const T: usize>(x: [&[f32]; T], weights: &FloatTile, sums: &mut [Sums; FLOAT_TOKENS]) {
    for (part, weights) in weights.0[..x[0].len()].chunks(PART_COLS).enumerate() {
        let mut parts = [[0.0; TILE_ROWS]; T];
        let x: [&[f32]; T] = std::array::from_fn(|token| &x[token][part * PART_COLS..][..weights.len()]);
        for (col, weights) in weights.iter().enumerate() {
            for token in 0..T {
                let x = x[token][col];
                for lane in 0..TILE_ROWS {
                    parts[token][lane] = weights[lane].mul_add(x, parts[token][lane]);
                }
            }
        }
        for token in 0..T {
            for lane in 0..TILE_ROWS {
                sums[token][lane] += parts[token][lane];
            }
        }
    }
}
