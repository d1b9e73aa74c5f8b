//! Products in f32: of float weights, and of dequantised ones where the exact path is asked for.
//!
//! Plain Rust, compiled once per instruction set: fixed arrays of 16 lanes that the compiler turns into vectors.

use std::ops::Range;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::unpacked::{UNPACKED_STEPS, Unpacked};
use super::{Sums, scalar};
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};
use crate::dequantize::BlockFormat;
use crate::matrix::packing::{Packing, STEP_COLS, STEP_GROUPS};
use crate::matrix::{Matrix, TILE_ROWS, Tile};

/// Columns of a stretch of f32 weights (16 KiB of them): a multiple of every block and of [`PART_COLS`].
pub(super) const FLOAT_COLS: usize = 256;

/// Tokens that share one pass over the weights.
pub(super) const FLOAT_TOKENS: usize = 4;

/// Columns of a partial sum: these keep the rounding error of long rows down, and give a single token independent
/// chains of additions.
const PART_COLS: usize = 32;

const _: () = assert!(FLOAT_COLS <= UNPACKED_STEPS * STEP_COLS && FLOAT_COLS.is_multiple_of(PART_COLS));

/// Up to [`FLOAT_COLS`] columns of 16 rows as f32.
#[repr(C, align(64))]
pub(super) struct FloatTile([[f32; TILE_ROWS]; FLOAT_COLS]);

impl FloatTile {
    pub(super) fn zeroed() -> Self {
        Self([[0.0; TILE_ROWS]; FLOAT_COLS])
    }
}

pub(super) fn weights_f32(w: &Matrix, tile: usize, cols: Range<usize>, weights: &mut FloatTile) {
    let weights = weights.0[..cols.len()].as_flattened_mut();
    let (elements, _) = elements(w.tile(tile), 4, cols).as_chunks::<4>();
    for (weight, &element) in weights.iter_mut().zip(elements) {
        *weight = f32::from_le_bytes(element);
    }
}

pub(super) fn weights_f16(w: &Matrix, tile: usize, cols: Range<usize>, weights: &mut FloatTile) {
    for (weights, elements) in weights.0.iter_mut().zip(elements(w.tile(tile), 2, cols).chunks_exact(2 * TILE_ROWS)) {
        let (elements, _) = elements.as_chunks::<2>();
        let halves: [f16; TILE_ROWS] = std::array::from_fn(|lane| f16::from_le_bytes(elements[lane]));
        halves.convert_to_f32_slice(weights);
    }
}

pub(super) fn weights_bf16(w: &Matrix, tile: usize, cols: Range<usize>, weights: &mut FloatTile) {
    let weights = weights.0[..cols.len()].as_flattened_mut();
    let (elements, _) = elements(w.tile(tile), 2, cols).as_chunks::<2>();
    for (weight, &element) in weights.iter_mut().zip(elements) {
        *weight = bf16::from_le_bytes(element).to_f32();
    }
}

/// The elements of columns `cols`, `width` bytes each.
fn elements(tile: Tile<'_>, width: usize, cols: Range<usize>) -> &[u8] {
    &tile.codes[cols.start * TILE_ROWS * width..cols.end * TILE_ROWS * width]
}

/// Defines a kernel for every instruction set from its plain Rust.
macro_rules! compiled_per_isa {
    ($(#[$doc:meta])* [$scalar:ident, $avx2:ident, $avx512:ident] $(<$f:ident>)?
        ($($arg:ident: $ty:ty),*) $body:path, $($unpack:ident)?) => {
        $(#[$doc])*
        pub(super) fn $scalar$(<$f: BlockFormat>)?($($arg: $ty),*) {
            $body($($arg,)* $(scalar::$unpack::<$f>)?);
        }

        $(#[$doc])*
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c")]
        pub(super) fn $avx2$(<$f: BlockFormat>)?($($arg: $ty),*) {
            $body($($arg,)* $(|tile, steps, unpacked: &mut Unpacked| avx2::$unpack::<$f>(tile, steps, unpacked))?);
        }

        $(#[$doc])*
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
        pub(super) fn $avx512$(<$f: BlockFormat>)?($($arg: $ty),*) {
            $body($($arg,)* $(|tile, steps, unpacked: &mut Unpacked| avx512::$unpack::<$f>(tile, steps, unpacked))?);
        }
    };
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
fn dequantised<F: BlockFormat>(
    w: &Matrix,
    tile: usize,
    cols: Range<usize>,
    weights: &mut FloatTile,
    unpack: impl Fn(Tile<'_>, Range<usize>, &mut Unpacked),
) {
    let mut unpacked = Unpacked::zeroed();
    unpack(w.tile(tile), cols.start / STEP_COLS..cols.end / STEP_COLS, &mut unpacked);
    let num_steps = cols.len() / STEP_COLS;
    for step in 0..num_steps {
        for group in 0..STEP_GROUPS {
            let unit = step * F::STEP_UNITS + group * F::STEP_UNITS / STEP_GROUPS;
            let (codes, scales, mins) =
                (&unpacked.codes[step * STEP_GROUPS + group], &unpacked.scales[unit], &unpacked.mins[unit]);
            for i in 0..4 {
                let weights = &mut weights.0[step * STEP_COLS + group * 4 + i];
                for lane in 0..TILE_ROWS {
                    let code = codes[lane * 4 + i];
                    // The two roundings of `UnitScales::value`.
                    weights[lane] = if F::HAS_MIN {
                        scales[lane] * f32::from(code) + mins[lane]
                    } else {
                        scales[lane] * f32::from(i16::from(code) - i16::from(F::OFFSET))
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
