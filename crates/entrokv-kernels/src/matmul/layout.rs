//! The two layouts that a kernel reads weights in: packed, as in memory, and unpacked, as in the first-level cache.
//!
//! They are one scheme with other constants, so that a kernel is written once: an unpacked step has its codes in a plane
//! of bytes, and scales that are f32.

use std::marker::PhantomData;
use std::ops::Range;

use crate::activations::Fraction;
use crate::dequantize::{BlockFormat, Scales};
use crate::matrix::packing::{GROUP_BYTES, Packing, STEP_GROUPS};
use crate::matrix::{CACHE_LINE, TILE_ROWS};

/// Where a kernel finds codes and scales, and what they mean.
///
/// Weights come in blocks of [`Self::BLOCK_BYTES`]: [`Self::BLOCK_SCALE_BYTES`] of scales, then [`Self::BLOCK_STEPS`]
/// steps of codes.
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
    /// Bytes of a block.
    const BLOCK_BYTES: usize = Self::BLOCK_SCALE_BYTES + Self::STEP_BYTES * Self::BLOCK_STEPS;
    /// Bytes of a step's codes.
    const STEP_BYTES: usize = GROUP_BYTES * Self::STORED_BITS as usize;
    /// Units of a step.
    const STEP_UNITS: usize = Self::Format::STEP_UNITS;
    /// Units of a block.
    const BLOCK_UNITS: usize = Self::STEP_UNITS * Self::BLOCK_STEPS;
    /// Groups of a unit.
    const UNIT_GROUPS: usize = STEP_GROUPS / Self::STEP_UNITS;
    /// Whether codes are kept less the format's offset, as signed bytes.
    const IS_SIGNED: bool = false;
    /// Whether units have minima.
    const HAS_MIN: bool = Self::Format::HAS_MIN;
    /// Scales kept of each unit: its own, or this and its products with the fractions a scale of activations can have.
    const UNIT_SCALES: usize = 1;
    /// Where a step's minima come among its values.
    const MINS_AT: usize = Self::UNIT_SCALES * Self::STEP_UNITS;
    /// Scales and minima of a step.
    const STEP_VALUES: usize = Self::MINS_AT + if Self::HAS_MIN { Self::STEP_UNITS } else { 0 };
}

/// How a layout spells scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScaleLayout {
    /// As [`crate::matrix::packing`] says.
    Packed(Scales),
    /// Per unit of the block 16 f32 scales, then per unit, where there are minima, 16 f32 minima.
    Float,
}

/// The blocks of `tile` that hold `steps`, which start and end with a block.
pub(super) fn blocks_of<L: Layout>(tile: &[u8], steps: Range<usize>) -> impl Iterator<Item = &[u8]> {
    let (start, end) = (steps.start / L::BLOCK_STEPS, steps.end / L::BLOCK_STEPS);
    tile[start * L::BLOCK_BYTES..end * L::BLOCK_BYTES].chunks_exact(L::BLOCK_BYTES)
}

/// How far ahead of what is read a kernel of few tokens asks memory for more. Tiles lie one after the other, so what comes is
/// known; but the hardware looks ahead by a page at most, and a core that waits can hold the work of three or four steps.
const AHEAD_BYTES: usize = 8 * 1024;

/// Asks for what lies [`AHEAD_BYTES`] behind the part of `block` that belongs to one group of a step, whatever it is.
///
/// Called at every group, so that requests are spread evenly over the products: a core has few in flight at a time, and what it
/// reads from its caches waits behind them. With all lines of a block asked for in one go an Intel Xeon reads at 22 GB/s, with
/// those of a step at 27, spread at 30, which is what it reads without any products.
#[inline(always)]
pub(super) fn fetch_ahead<L: Layout>(block: &[u8], step: usize, group: usize) {
    let step_bytes = L::BLOCK_BYTES.div_ceil(L::BLOCK_STEPS);
    let num_lines = step_bytes.div_ceil(CACHE_LINE);
    let lines = num_lines * group / STEP_GROUPS..num_lines * (group + 1) / STEP_GROUPS;
    let first = block.as_ptr().wrapping_add(AHEAD_BYTES + step * step_bytes + lines.start * CACHE_LINE);
    // Two lines at most; a loop would keep the caller's from being unrolled.
    if !lines.is_empty() {
        fetch_line(first);
    }
    if lines.len() > 1 {
        fetch_line(first.wrapping_add(CACHE_LINE));
    }
}

/// Asks for the line with `p`, at this place in the code, into the second-level cache.
#[inline(always)]
fn fetch_line(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, which never faults. The intrinsic would do, but compilers gather several of them in one place.
    unsafe {
        std::arch::asm!("prefetcht1 [{}]", in(reg) p, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
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

/// A stretch of a tile in [`Scratch`], with so many scales of each unit, 1 or [`FRACTIONS`], and codes with or without offset.
pub(super) struct Unpacked<F, const SCALES: usize, const SIGNED: bool = false>(PhantomData<F>);

impl<F: BlockFormat, const SCALES: usize, const SIGNED: bool> Layout for Unpacked<F, SCALES, SIGNED> {
    type Format = F;
    const STORED_BITS: u32 = 8;
    const SCALES: ScaleLayout = ScaleLayout::Float;
    const BLOCK_STEPS: usize = 1;
    const IS_SIGNED: bool = SIGNED;
    const UNIT_SCALES: usize = SCALES;
    const BLOCK_SCALE_BYTES: usize = UNIT_SCALE_BYTES * Self::STEP_VALUES;
}

/// Bytes of the f32 scales of one unit of 16 rows.
pub(super) const UNIT_SCALE_BYTES: usize = 4 * TILE_ROWS;

/// Fractions that a scale of activations can have: 0, 1/8, .. 7/8.
pub(super) const FRACTIONS: usize = Fraction::ALL.len();

/// Tiles that meet the same activations together.
pub(super) const PAIR: usize = 2;

/// Steps of a stretch at most: what is unpacked of them stays in the first-level cache while the tokens go over it.
pub(super) const STRETCH_STEPS: usize = 12;

/// Values of a step at most: scales of two units with every fraction, and their minima.
const MAX_STEP_VALUES: usize = 2 * FRACTIONS + 2;

/// Room for a stretch of a tile in the layout [`Unpacked`]: step by step cache lines of f32 scales and of codes.
#[repr(C, align(64))]
pub(super) struct Scratch([[u8; GROUP_BYTES]; STRETCH_STEPS * (MAX_STEP_VALUES + STEP_GROUPS)]);

const _: () = assert!(UNIT_SCALE_BYTES == GROUP_BYTES);

impl Scratch {
    pub(super) const fn zeroed() -> Self {
        Self([[0; GROUP_BYTES]; STRETCH_STEPS * (MAX_STEP_VALUES + STEP_GROUPS)])
    }

    /// Steps of each stretch but the last, of `num_steps` cut evenly: whole blocks of `block_steps`.
    pub(super) fn stretch_steps(num_steps: usize, block_steps: usize) -> usize {
        let num_stretches = num_steps.div_ceil(STRETCH_STEPS / block_steps * block_steps);
        num_steps.div_ceil(num_stretches).next_multiple_of(block_steps)
    }

    /// Values (scales per unit, then minima per unit) and groups of codes of step `step`.
    #[inline(always)]
    pub(super) fn step<L: Layout>(
        &self,
        step: usize,
    ) -> (&[[u8; UNIT_SCALE_BYTES]], &[[u8; GROUP_BYTES]; STEP_GROUPS]) {
        let lines = &self.0[step * (L::STEP_VALUES + STEP_GROUPS)..][..L::STEP_VALUES + STEP_GROUPS];
        let (values, groups) = lines.split_at(L::STEP_VALUES);
        (values, groups.first_chunk().expect("what is left of the step"))
    }

    /// Bytes of a step.
    pub(super) const fn step_bytes<L: Layout>() -> usize {
        (L::STEP_VALUES + STEP_GROUPS) * GROUP_BYTES
    }

    /// Its bytes, step after step.
    pub(super) fn bytes(&self) -> &[u8] {
        self.0.as_flattened()
    }

    /// Values (scales per unit, then minima per unit) and groups of codes, step by step.
    pub(super) fn steps<L: Layout>(&self) -> impl Iterator<Item = (&[[u8; UNIT_SCALE_BYTES]], &[[u8; GROUP_BYTES]])> {
        self.0.chunks_exact(L::STEP_VALUES + STEP_GROUPS).map(|step| step.split_at(L::STEP_VALUES))
    }

    /// [`Self::steps`], to be written.
    pub(super) fn steps_mut<L: Layout>(
        &mut self,
    ) -> impl Iterator<Item = (&mut [[u8; UNIT_SCALE_BYTES]], &mut [[u8; GROUP_BYTES]])> {
        self.0.chunks_exact_mut(L::STEP_VALUES + STEP_GROUPS).map(|step| step.split_at_mut(L::STEP_VALUES))
    }
}
