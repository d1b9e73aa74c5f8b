//! The order of the bytes in a packed tile.
//!
//! A tile of a quantised type is block after block of its type, 16 rows each: the block's *scales*, then its *codes*. A
//! product reads it from the first byte to the last, one stream, as the CPU's prefetcher likes it: with all scales of a
//! tile behind all its codes, a core of a Zen 4 read rows of 576 columns at 12 GB/s, in place of the 34 it reads now.
//!
//! **Codes** come in steps of [`STEP_COLS`] = 32 columns. Unpacked, a step is 8 *groups* of 64 bytes: group `g` holds
//! columns `4 g .. 4 g + 4` of row 0, the same of row 1, .. of row 15, which is what a 4-way byte dot product wants: the
//! sum of row `r` builds up in 32-bit lane `r`. Packed, groups share bytes in *planes* that need one shift and one mask
//! to take apart:
//!
//! | plane   | bytes | byte `i` of it holds                                                                      |
//! |---------|-------|-------------------------------------------------------------------------------------------|
//! | bytes   | 8 x 64| of part `g`: byte `i` of group `g`                                                          |
//! | nibbles | 4 x 64| of part `p`: byte `i` of group `p` in bits 0-3, of group `p + 4` in bits 4-7                |
//! | pairs   | 2 x 64| of part `p`: byte `i` of group `4 p + j` in bits `2 j`, `2 j + 1`                            |
//! | bits    | 1 x 64| byte `i` of group `g` in bit `g`                                                           |
//!
//! | bits of a code | planes                            | bytes a weight  |
//! |----------------|-----------------------------------|-----------------|
//! | 2              | pairs                             | 1/4             |
//! | 3              | pairs (low), bits (high)          | 3/8             |
//! | 4              | nibbles                           | 1/2             |
//! | 5              | nibbles (low), bits (high)        | 5/8             |
//! | 6              | nibbles (low), pairs (high)       | 3/4             |
//! | 8              | bytes                             | 1               |
//!
//! **Scales** of a block are `d` of rows 0-15 as f16, `m` of rows 0-15 as f16 where there are minima, then
//! per unit, where units have scales of their own, 16 bytes of them and, with minima, 16 bytes of these.
//!
//! The bytes a weight takes are those of the file but for small scales of less than 8 bits: `Q4_K` 148 / 144, `Q5_K`
//! 180 / 176, `Q3_K` 114 / 110, `Q2_K` 100 / 84; padding adds less than 64 bytes a tile. Float types keep their elements:
//! column 0 of rows 0-15, column 1 of rows 0-15, ..

use super::TILE_ROWS;
use crate::dequantize::{BlockFormat, BlockScales, Scales};

/// Columns of a step, those that share one scale of the activations.
pub(crate) const STEP_COLS: usize = 32;

/// Groups of a step.
pub(crate) const STEP_GROUPS: usize = 8;

/// Bytes of an unpacked group: 4 columns of 16 rows.
pub(crate) const GROUP_BYTES: usize = 4 * TILE_ROWS;

/// Where the pair or bit plane that follows a nibble plane starts in a step.
pub(crate) const AFTER_NIBBLES: usize = 4 * GROUP_BYTES;

/// Where the bit plane that follows a pair plane starts in a step.
pub(crate) const AFTER_PAIRS: usize = 2 * GROUP_BYTES;

/// The sizes that a format's tiles have.
pub(crate) trait Packing: BlockFormat {
    /// Steps of a block.
    const BLOCK_STEPS: usize = Self::BLOCK_LEN / STEP_COLS;
    /// Units of a step: 1 or 2.
    const STEP_UNITS: usize = STEP_COLS / Self::UNIT_LEN;
    /// Packed bytes of a step's codes.
    const STEP_BYTES: usize = GROUP_BYTES * Self::CODE_BITS as usize;
    /// Packed bytes of a block's codes.
    const BLOCK_CODE_BYTES: usize = Self::STEP_BYTES * Self::BLOCK_STEPS;
    /// Where the small scales of a block's units start in its scales.
    const UNITS_AT: usize = if Self::HAS_MIN { 4 * TILE_ROWS } else { 2 * TILE_ROWS };
    /// Bytes of the small scales of one unit.
    const UNIT_BYTES: usize = match Self::SCALES {
        Scales::Plain | Scales::WithMin => 0,
        Scales::Sub => TILE_ROWS,
        Scales::SubWithMin => 2 * TILE_ROWS,
    };
    /// Bytes of a block's scales.
    const BLOCK_SCALE_BYTES: usize = Self::UNITS_AT + Self::UNIT_BYTES * (Self::BLOCK_LEN / Self::UNIT_LEN);
    /// Bytes of a block, scales and codes.
    const BLOCK_PACKED_BYTES: usize = Self::BLOCK_SCALE_BYTES + Self::BLOCK_CODE_BYTES;
}

impl<F: BlockFormat> Packing for F {}

/// Packs one row, a whole number of blocks, as lane `lane` of a tile.
pub(super) fn put_row<F: BlockFormat>(lane: usize, row: &[u8], tile: &mut [u8]) {
    let mut unpacked = [0; 256];
    for (block, packed) in row.chunks_exact(F::BLOCK_BYTES).zip(tile.chunks_exact_mut(F::BLOCK_PACKED_BYTES)) {
        let (scales, codes) = packed.split_at_mut(F::BLOCK_SCALE_BYTES);
        F::codes(block, &mut unpacked[..F::BLOCK_LEN]);
        let (steps, _) = unpacked.as_chunks::<STEP_COLS>();
        for (step, codes) in steps.iter().zip(codes.chunks_exact_mut(F::STEP_BYTES)) {
            put_codes::<F>(lane, step, codes);
        }
        put_scales::<F>(lane, &F::scales(block), scales);
    }
}

/// Packs one row of elements of `width` bytes as lane `lane` of a tile.
pub(super) fn put_float_row(lane: usize, width: usize, row: &[u8], tile: &mut [u8]) {
    for (element, packed) in row.chunks_exact(width).zip(tile.chunks_exact_mut(TILE_ROWS * width)) {
        packed[lane * width..][..width].copy_from_slice(element);
    }
}

/// Writes lane `lane` of `tile` as f32.
pub(super) fn dequantize_lane<F: BlockFormat>(tile: &[u8], lane: usize, out: &mut [f32]) {
    for (packed, out) in tile.chunks_exact(F::BLOCK_PACKED_BYTES).zip(out.chunks_exact_mut(F::BLOCK_LEN)) {
        let (scales, codes) = packed.split_at(F::BLOCK_SCALE_BYTES);
        let scales = scales_of::<F>(lane, scales);
        let steps = codes.chunks_exact(F::STEP_BYTES).zip(out.chunks_exact_mut(STEP_COLS));
        for (step, (codes, out)) in steps.enumerate() {
            let codes = codes_of::<F>(lane, codes);
            let units = codes.chunks_exact(F::UNIT_LEN).zip(out.chunks_exact_mut(F::UNIT_LEN));
            for (unit, (codes, out)) in units.enumerate() {
                let unit = scales.unit::<F>(step * F::STEP_UNITS + unit);
                for (out, &code) in out.iter_mut().zip(codes) {
                    *out = unit.value::<F>(code);
                }
            }
        }
    }
}

/// Packs a step of one row as lane `lane`; the lane's bits in `packed` are zero before.
fn put_codes<F: BlockFormat>(lane: usize, codes: &[u8; STEP_COLS], packed: &mut [u8]) {
    let nibble = |i: usize| (codes[i] & 15) | (codes[i + 16] & 15) << 4;
    let pairs = |i: usize, shift: u32| {
        let part = i / 4 * 16 + i % 4;
        (0..4).fold(0, |byte, j| byte | (codes[part + 4 * j] >> shift & 3) << (2 * j))
    };
    let bits = |i: usize, shift: u32| (0..STEP_GROUPS).fold(0, |byte, g| byte | (codes[4 * g + i] >> shift & 1) << g);
    // `part` indexes 64-byte parts, `i` the four bytes of this lane in one.
    let mut put = |at: usize, num_parts: usize, byte: &dyn Fn(usize) -> u8| {
        for part in 0..num_parts {
            for i in 0..4 {
                packed[at + part * GROUP_BYTES + lane * 4 + i] = byte(part * 4 + i);
            }
        }
    };
    match F::CODE_BITS {
        2 => put(0, 2, &|i| pairs(i, 0)),
        3 => {
            put(0, 2, &|i| pairs(i, 0));
            put(AFTER_PAIRS, 1, &|i| bits(i, 2));
        }
        4 => put(0, 4, &nibble),
        5 => {
            put(0, 4, &nibble);
            put(AFTER_NIBBLES, 1, &|i| bits(i, 4));
        }
        6 => {
            put(0, 4, &nibble);
            put(AFTER_NIBBLES, 2, &|i| pairs(i, 4));
        }
        _ => put(0, 8, &|i| codes[i]),
    }
}

/// The codes of lane `lane` in a packed step: the inverse of [`put_codes`].
fn codes_of<F: BlockFormat>(lane: usize, packed: &[u8]) -> [u8; STEP_COLS] {
    let byte = |at: usize, part: usize, i: usize| packed[at + part * GROUP_BYTES + lane * 4 + i];
    let nibble = |g: usize, i: usize| byte(0, g % 4, i) >> (4 * (g / 4)) & 15;
    let pair = |at: usize, g: usize, i: usize| byte(at, g / 4, i) >> (2 * (g % 4)) & 3;
    let bit = |at: usize, g: usize, i: usize| byte(at, 0, i) >> g & 1;
    std::array::from_fn(|col| {
        let (g, i) = (col / 4, col % 4);
        match F::CODE_BITS {
            2 => pair(0, g, i),
            3 => pair(0, g, i) | bit(AFTER_PAIRS, g, i) << 2,
            4 => nibble(g, i),
            5 => nibble(g, i) | bit(AFTER_NIBBLES, g, i) << 4,
            6 => nibble(g, i) | pair(AFTER_NIBBLES, g, i) << 4,
            _ => byte(0, g, i),
        }
    })
}

/// Packs the scales of a block of one row as lane `lane`.
fn put_scales<F: BlockFormat>(lane: usize, scales: &BlockScales, packed: &mut [u8]) {
    packed[2 * lane..][..2].copy_from_slice(&scales.d.to_le_bytes());
    if F::HAS_MIN {
        packed[2 * TILE_ROWS + 2 * lane..][..2].copy_from_slice(&scales.m.to_le_bytes());
    }
    if F::UNIT_BYTES > 0 {
        for (unit, packed) in packed[F::UNITS_AT..].chunks_exact_mut(F::UNIT_BYTES).enumerate() {
            packed[lane] = scales.sub[unit].cast_unsigned();
            if F::HAS_MIN {
                packed[TILE_ROWS + lane] = scales.sub_min[unit];
            }
        }
    }
}

/// The scales of lane `lane`: the inverse of [`put_scales`].
pub(crate) fn scales_of<F: BlockFormat>(lane: usize, packed: &[u8]) -> BlockScales {
    let bits = |at: usize| u16::from_le_bytes([packed[at], packed[at + 1]]);
    let m = if F::HAS_MIN { bits(2 * TILE_ROWS + 2 * lane) } else { 0 };
    let mut scales = BlockScales { d: bits(2 * lane), m, ..BlockScales::default() };
    if F::UNIT_BYTES > 0 {
        for (unit, packed) in packed[F::UNITS_AT..].chunks_exact(F::UNIT_BYTES).enumerate() {
            scales.sub[unit] = packed[lane].cast_signed();
            if F::HAS_MIN {
                scales.sub_min[unit] = packed[TILE_ROWS + lane];
            }
        }
    }
    scales
}
