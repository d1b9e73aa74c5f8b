//! The two layouts that a kernel reads weights in: packed, as in memory, and unpacked, as in the first-level cache.
//!
//! They are one scheme with other constants, so that a kernel is written once: an unpacked step has its codes in a plane
//! of bytes, and scales that are f32.

use std::marker::PhantomData;

use crate::dequantize::{BlockFormat, Scales};
use crate::matrix::packing::{GROUP_BYTES, Packing, STEP_GROUPS};
use crate::matrix::{TILE_ROWS, Tile};

/// Where a kernel finds codes and scales, and what they mean.
///
/// Codes come in steps of [`Self::STEP_BYTES`], scales in blocks of [`Self::BLOCK_SCALE_BYTES`] for
/// [`Self::BLOCK_STEPS`] steps.
pub(super) trait Layout {
    /// The type whose codes these are.
    type Format: BlockFormat;
    /// Bits that a code takes, which say in what planes: [`crate::matrix::packing`].
    const STORED_BITS: u32;
    /// How scales are spelled.
    const SCALES: ScaleLayout;
    /// Steps of a block.
    const BLOCK_STEPS: usize;
    /// Bytes of a block's scales.
    const BLOCK_SCALE_BYTES: usize;
    /// Bytes of a step's codes.
    const STEP_BYTES: usize = GROUP_BYTES * Self::STORED_BITS as usize;
    /// Units of a step.
    const STEP_UNITS: usize = Self::Format::STEP_UNITS;
    /// Units of a block.
    const BLOCK_UNITS: usize = Self::STEP_UNITS * Self::BLOCK_STEPS;
    /// Groups of a unit.
    const UNIT_GROUPS: usize = STEP_GROUPS / Self::STEP_UNITS;
    /// Whether units have minima.
    const HAS_MIN: bool = Self::Format::HAS_MIN;
}

/// How a layout spells scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScaleLayout {
    /// As [`crate::matrix::packing`] says.
    Packed(Scales),
    /// Per unit of the block 16 f32 scales, then per unit, where there are minima, 16 f32 minima.
    Float,
}

/// A tile as [`crate::matrix::packing`] packs it.
pub(super) struct Packed<F>(PhantomData<F>);

impl<F: BlockFormat> Layout for Packed<F> {
    type Format = F;
    const STORED_BITS: u32 = F::CODE_BITS;
    const SCALES: ScaleLayout = ScaleLayout::Packed(F::SCALES);
    const BLOCK_STEPS: usize = F::BLOCK_STEPS;
    const BLOCK_SCALE_BYTES: usize = F::BLOCK_SCALE_BYTES;
}

/// A stretch of a tile in [`Scratch`].
pub(super) struct Unpacked<F>(PhantomData<F>);

impl<F: BlockFormat> Layout for Unpacked<F> {
    type Format = F;
    const STORED_BITS: u32 = 8;
    const SCALES: ScaleLayout = ScaleLayout::Float;
    const BLOCK_STEPS: usize = 1;
    const BLOCK_SCALE_BYTES: usize = UNIT_SCALE_BYTES * F::STEP_UNITS * if F::HAS_MIN { 2 } else { 1 };
}

/// Bytes of the f32 scales of one unit of 16 rows.
pub(super) const UNIT_SCALE_BYTES: usize = 4 * TILE_ROWS;

/// Steps of a stretch: 1,024 columns, whose codes and scales (20 to 32 KiB) stay in the nearest caches while the tokens go
/// over them. A multiple of the steps of every block.
pub(super) const STRETCH_STEPS: usize = 32;

/// Room for a stretch of a tile, unpacked.
#[repr(C, align(64))]
pub(super) struct Scratch {
    /// Groups of codes, eight a step.
    pub(super) codes: [[u8; GROUP_BYTES]; STRETCH_STEPS * STEP_GROUPS],
    /// Scales as [`ScaleLayout::Float`] has them.
    pub(super) scales: [[u8; UNIT_SCALE_BYTES]; STRETCH_STEPS * 4],
}

impl Scratch {
    pub(super) fn zeroed() -> Self {
        Self {
            codes: [[0; GROUP_BYTES]; STRETCH_STEPS * STEP_GROUPS],
            scales: [[0; UNIT_SCALE_BYTES]; STRETCH_STEPS * 4],
        }
    }

    /// What has been unpacked, in the layout [`Unpacked`].
    pub(super) fn tile(&self) -> Tile<'_> {
        Tile { codes: self.codes.as_flattened(), scales: self.scales.as_flattened() }
    }
}
