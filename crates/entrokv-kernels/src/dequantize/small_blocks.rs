//! Blocks of 32 columns with one scale: `Q4_0 Q4_1 Q5_0 Q5_1 Q8_0`.
//!
//! In the 4-bit codes, byte `i` holds column `i` in its low half and column `i + 16` in its high half. The fifth bit of
//! column `i` is bit `i` of a little-endian 32-bit word.

use super::block_format::{BlockFormat, BlockScales, Scales};
use crate::weight_type::WeightType;

/// [`WeightType::Q4_0`]: `d`, 16 bytes of codes.
pub(crate) enum Q4Plain {}
/// [`WeightType::Q4_1`]: `d`, `m`, 16 bytes of codes.
pub(crate) enum Q4WithMin {}
/// [`WeightType::Q5_0`]: `d`, 4 bytes of fifth bits, 16 bytes of codes.
pub(crate) enum Q5Plain {}
/// [`WeightType::Q5_1`]: `d`, `m`, 4 bytes of fifth bits, 16 bytes of codes.
pub(crate) enum Q5WithMin {}
/// [`WeightType::Q8_0`]: `d`, 32 signed bytes. Codes are these plus 128, so that all types have unsigned codes.
pub(crate) enum Q8Plain {}

impl BlockFormat for Q4Plain {
    const TYPE: WeightType = WeightType::Q4_0;
    const UNIT_LEN: usize = 32;
    const CODE_BITS: u32 = 4;
    const SCALES: Scales = Scales::Plain;

    fn codes(block: &[u8], codes: &mut [u8]) {
        nibbles(&block[2..18], codes);
    }

    fn scales(block: &[u8]) -> BlockScales {
        BlockScales { d: f16_bits(block, 0), ..BlockScales::default() }
    }
}

impl BlockFormat for Q4WithMin {
    const TYPE: WeightType = WeightType::Q4_1;
    const UNIT_LEN: usize = 32;
    const CODE_BITS: u32 = 4;
    const SCALES: Scales = Scales::WithMin;

    fn codes(block: &[u8], codes: &mut [u8]) {
        nibbles(&block[4..20], codes);
    }

    fn scales(block: &[u8]) -> BlockScales {
        BlockScales { d: f16_bits(block, 0), m: f16_bits(block, 2), ..BlockScales::default() }
    }
}

impl BlockFormat for Q5Plain {
    const TYPE: WeightType = WeightType::Q5_0;
    const UNIT_LEN: usize = 32;
    const CODE_BITS: u32 = 5;
    const SCALES: Scales = Scales::Plain;

    fn codes(block: &[u8], codes: &mut [u8]) {
        nibbles(&block[6..22], codes);
        add_fifth_bits(&block[2..6], codes);
    }

    fn scales(block: &[u8]) -> BlockScales {
        BlockScales { d: f16_bits(block, 0), ..BlockScales::default() }
    }
}

impl BlockFormat for Q5WithMin {
    const TYPE: WeightType = WeightType::Q5_1;
    const UNIT_LEN: usize = 32;
    const CODE_BITS: u32 = 5;
    const SCALES: Scales = Scales::WithMin;

    fn codes(block: &[u8], codes: &mut [u8]) {
        nibbles(&block[8..24], codes);
        add_fifth_bits(&block[4..8], codes);
    }

    fn scales(block: &[u8]) -> BlockScales {
        BlockScales { d: f16_bits(block, 0), m: f16_bits(block, 2), ..BlockScales::default() }
    }
}

impl BlockFormat for Q8Plain {
    const TYPE: WeightType = WeightType::Q8_0;
    const UNIT_LEN: usize = 32;
    const CODE_BITS: u32 = 8;
    const SCALES: Scales = Scales::Plain;

    fn codes(block: &[u8], codes: &mut [u8]) {
        for (code, &byte) in codes.iter_mut().zip(&block[2..34]) {
            *code = byte ^ 0x80;
        }
    }

    fn scales(block: &[u8]) -> BlockScales {
        BlockScales { d: f16_bits(block, 0), ..BlockScales::default() }
    }
}

/// The little-endian 16 bits at `offset`.
pub(super) fn f16_bits(block: &[u8], offset: usize) -> u16 {
    u16::from_le_bytes([block[offset], block[offset + 1]])
}

/// Low halves of `bytes`, then high halves.
pub(super) fn nibbles(bytes: &[u8], codes: &mut [u8]) {
    let (low, high) = codes.split_at_mut(bytes.len());
    for ((low, high), &byte) in low.iter_mut().zip(high).zip(bytes) {
        *low = byte & 15;
        *high = byte >> 4;
    }
}

fn add_fifth_bits(bytes: &[u8], codes: &mut [u8]) {
    let bits = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    for (i, code) in codes.iter_mut().enumerate() {
        *code |= u8::from(bits >> i & 1 == 1) << 4;
    }
}
