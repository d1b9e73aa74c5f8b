//! Blocks of 256 columns whose units' scales are small integers: `Q2_K Q3_K Q4_K Q5_K Q6_K`.

use super::block_format::{BlockFormat, BlockScales, Scales};
use super::small_blocks::{f16_bits, nibbles};
use crate::weight_type::WeightType;

/// [`WeightType::Q2K`]: 16 bytes of scale (low half) and minimum (high half), 64 bytes of codes, `d`, `m`.
pub(crate) enum Q2K {}
/// [`WeightType::Q3K`]: 32 bytes of third bits, 64 bytes of low codes, 12 bytes of scales, `d`.
pub(crate) enum Q3K {}
/// [`WeightType::Q4K`]: `d`, `m`, 12 bytes of scales and minima, 128 bytes of codes.
pub(crate) enum Q4K {}
/// [`WeightType::Q5K`]: `d`, `m`, 12 bytes of scales and minima, 32 bytes of fifth bits, 128 bytes of codes.
pub(crate) enum Q5K {}
/// [`WeightType::Q6K`]: 128 bytes of low codes, 64 bytes of high bits, 16 signed bytes of scales, `d`.
pub(crate) enum Q6K {}

impl BlockFormat for Q2K {
    const TYPE: WeightType = WeightType::Q2K;
    const UNIT_LEN: usize = 16;
    const CODE_BITS: u32 = 2;
    const SCALES: Scales = Scales::SubWithMin;

    fn codes(block: &[u8], codes: &mut [u8]) {
        pairs_of_bits(&block[16..80], codes);
    }

    fn scales(block: &[u8]) -> BlockScales {
        let mut scales = BlockScales { d: f16_bits(block, 80), m: f16_bits(block, 82), ..BlockScales::default() };
        for (i, &byte) in block[..16].iter().enumerate() {
            scales.sub[i] = (byte & 15).cast_signed();
            scales.sub_min[i] = byte >> 4;
        }
        scales
    }
}

impl BlockFormat for Q3K {
    const TYPE: WeightType = WeightType::Q3K;
    const UNIT_LEN: usize = 16;
    const CODE_BITS: u32 = 3;
    const SCALES: Scales = Scales::Sub;

    fn codes(block: &[u8], codes: &mut [u8]) {
        pairs_of_bits(&block[32..96], codes);
        // The format subtracts 4 where the third bit is *clear*: code 4 + low where set, which is an offset of 4.
        add_bits(&block[..32], 2, codes);
    }

    fn scales(block: &[u8]) -> BlockScales {
        let packed = &block[96..108];
        let mut scales = BlockScales { d: f16_bits(block, 108), ..BlockScales::default() };
        for (i, sub) in scales.sub.iter_mut().enumerate() {
            let low = packed[i % 8] >> (4 * (i / 8)) & 15;
            let high = packed[8 + i % 4] >> (2 * (i / 4)) & 3;
            *sub = (low | high << 4).cast_signed() - 32;
        }
        scales
    }
}

impl BlockFormat for Q4K {
    const TYPE: WeightType = WeightType::Q4K;
    const UNIT_LEN: usize = 32;
    const CODE_BITS: u32 = 4;
    const SCALES: Scales = Scales::SubWithMin;

    fn codes(block: &[u8], codes: &mut [u8]) {
        for (bytes, codes) in block[16..144].chunks_exact(32).zip(codes.chunks_exact_mut(64)) {
            nibbles(bytes, codes);
        }
    }

    fn scales(block: &[u8]) -> BlockScales {
        six_bit_scales(block)
    }
}

impl BlockFormat for Q5K {
    const TYPE: WeightType = WeightType::Q5K;
    const UNIT_LEN: usize = 32;
    const CODE_BITS: u32 = 5;
    const SCALES: Scales = Scales::SubWithMin;

    fn codes(block: &[u8], codes: &mut [u8]) {
        for (bytes, codes) in block[48..176].chunks_exact(32).zip(codes.chunks_exact_mut(64)) {
            nibbles(bytes, codes);
        }
        add_bits(&block[16..48], 4, codes);
    }

    fn scales(block: &[u8]) -> BlockScales {
        six_bit_scales(block)
    }
}

impl BlockFormat for Q6K {
    const TYPE: WeightType = WeightType::Q6K;
    const UNIT_LEN: usize = 16;
    const CODE_BITS: u32 = 6;
    const SCALES: Scales = Scales::Sub;

    fn codes(block: &[u8], codes: &mut [u8]) {
        for (bytes, codes) in block[..128].chunks_exact(64).zip(codes.chunks_exact_mut(128)) {
            nibbles(bytes, codes);
        }
        for (bytes, codes) in block[128..192].chunks_exact(32).zip(codes.chunks_exact_mut(128)) {
            for (quarter, codes) in codes.chunks_exact_mut(32).enumerate() {
                for (code, &byte) in codes.iter_mut().zip(bytes) {
                    *code |= (byte >> (2 * quarter) & 3) << 4;
                }
            }
        }
    }

    fn scales(block: &[u8]) -> BlockScales {
        let mut scales = BlockScales { d: f16_bits(block, 208), ..BlockScales::default() };
        for (sub, &byte) in scales.sub.iter_mut().zip(&block[192..208]) {
            *sub = byte.cast_signed();
        }
        scales
    }
}

/// Two bits a code: 32 bytes hold 128 columns, 32 of them at each of the four shifts.
fn pairs_of_bits(bytes: &[u8], codes: &mut [u8]) {
    for (bytes, codes) in bytes.chunks_exact(32).zip(codes.chunks_exact_mut(128)) {
        for (quarter, codes) in codes.chunks_exact_mut(32).enumerate() {
            for (code, &byte) in codes.iter_mut().zip(bytes) {
                *code = byte >> (2 * quarter) & 3;
            }
        }
    }
}

/// One bit a code: bit `n` of byte `i` belongs to column `32 n + i` and becomes bit `to` of its code.
fn add_bits(bytes: &[u8], to: u32, codes: &mut [u8]) {
    for (n, codes) in codes.chunks_exact_mut(32).enumerate() {
        for (code, &byte) in codes.iter_mut().zip(bytes) {
            *code |= (byte >> n & 1) << to;
        }
    }
}

/// The 6-bit scales and minima of `Q4_K` and `Q5_K`, 8 of each in 12 bytes: the first four of each whole in bytes 0..4
/// and 4..8, the low halves of the others in bytes 8..12, their upper two bits on top of the first ones.
fn six_bit_scales(block: &[u8]) -> BlockScales {
    let packed = &block[4..16];
    let mut scales = BlockScales { d: f16_bits(block, 0), m: f16_bits(block, 2), ..BlockScales::default() };
    for i in 0..4 {
        let (scale, min, rest) = (packed[i], packed[4 + i], packed[8 + i]);
        scales.sub[i] = (scale & 63).cast_signed();
        scales.sub_min[i] = min & 63;
        scales.sub[4 + i] = (rest & 15 | scale >> 2 & 48).cast_signed();
        scales.sub_min[4 + i] = rest >> 4 | min >> 2 & 48;
    }
    scales
}
