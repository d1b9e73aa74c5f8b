//! The order of codes and scales in one part, keys or values, of a coded page.
//!
//! A part is strip after strip of 16 slots; a strip is its *codes*, then its *scales*.
//!
//! Codes come in steps of 32 dimensions times 16 slots. Unpacked, a step is 8 *groups* of 64 bytes, what a 4-way byte dot
//! product reads as 16 lanes of 4:
//! - **Keys**: group `g`, byte `4 * lane + i` is dimension `4 g + i` of slot `lane`. Four dimensions meet four elements of
//!   the query, the score of a slot builds up in its lane.
//! - **Values**: group `g`, byte `4 * lane + i` is dimension `16 (g % 2) + lane` of slot `4 (g / 2) + i`. Four slots meet
//!   four weights, the sum of a dimension builds up in its lane; two groups in a row meet the same weights.
//!
//! Packed, groups share bytes in planes, so that they come in ascending order:
//!
//! | bits | planes of 64 bytes                                                                             |
//! |------|------------------------------------------------------------------------------------------------|
//! | 8    | 8: group `g`                                                                                     |
//! | 4    | 4: group `2 p` in bits 0-3, group `2 p + 1` in bits 4-7                                            |
//! | 3    | 2: the low two bits of group `4 p + j` in bits `2 j`, `2 j + 1`; 1: the high bit of group `g` in bit `g` |
//! | 2    | 2: group `4 p + j` in bits `2 j`, `2 j + 1`                                                      |
//!
//! Codes of 8 bits are stored as what the products of each part take: keys plus 128, values signed.
//!
//! Scales are f16, `[num_scales, 16]`: of each slot, block after block where blocks have their own.

use super::{BLOCK_LEN, Code};
use crate::simd::LANES;

/// Groups of a step.
pub(crate) const STEP_GROUPS: usize = 8;

/// Bytes of a group.
pub(crate) const GROUP_BYTES: usize = 64;

/// Where the plane of high bits starts in a step of 3-bit codes.
pub(crate) const AFTER_PAIRS: usize = 2 * GROUP_BYTES;

/// Which part of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Keys,
    Values,
}

/// Where a strip's codes and scales lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StripLayout {
    pub(crate) code: Code,
    pub(crate) head_dim: usize,
}

impl StripLayout {
    /// Bytes of a step's codes.
    #[inline]
    pub(crate) fn step_bytes(&self) -> usize {
        GROUP_BYTES * self.code.bits()
    }

    /// Bytes of a strip's codes: where its scales start.
    #[inline]
    pub(crate) fn code_bytes(&self) -> usize {
        self.head_dim / BLOCK_LEN * self.step_bytes()
    }

    /// Bytes of a strip.
    #[inline]
    pub(crate) fn bytes(&self) -> usize {
        self.code_bytes() + self.code.num_scales(self.head_dim) * LANES * size_of::<u16>()
    }

    /// Packs the codes `[head_dim, 16]` of 16 slots and their scales `[num_scales, 16]` (bits of f16) into a strip.
    pub(crate) fn pack(&self, part: Part, codes: &[[u8; LANES]], scales: &[[u16; LANES]], strip: &mut [u8]) {
        let (packed, packed_scales) = strip.split_at_mut(self.code_bytes());
        let steps = codes.chunks_exact(BLOCK_LEN).zip(packed.chunks_exact_mut(self.step_bytes()));
        for (codes, packed) in steps {
            let groups = groups(part, codes.as_array().expect("a step of 32 dimensions"));
            pack_groups(self.code.bits(), &groups, packed);
        }
        let scales = scales.as_flattened().iter().zip(packed_scales.as_chunks_mut().0);
        scales.for_each(|(scale, packed)| *packed = scale.to_ne_bytes());
    }

    /// The code of dimension `dim` of slot `slot` (of 16): the inverse of [`StripLayout::pack`].
    pub(crate) fn code_at(&self, part: Part, strip: &[u8], slot: usize, dim: usize) -> u8 {
        let step = &strip[dim / BLOCK_LEN * self.step_bytes()..][..self.step_bytes()];
        let dim = dim % BLOCK_LEN;
        let (g, at) = match part {
            Part::Keys => (dim / 4, 4 * slot + dim % 4),
            Part::Values => (slot / 4 * 2 + dim / LANES, dim % LANES * 4 + slot % 4),
        };
        let plane = |plane: usize| step[plane * GROUP_BYTES + at];
        match self.code.bits() {
            2 => plane(g / 4) >> (2 * (g % 4)) & 3,
            3 => plane(g / 4) >> (2 * (g % 4)) & 3 | (step[AFTER_PAIRS + at] >> g & 1) << 2,
            4 => plane(g / 2) >> (4 * (g % 2)) & 15,
            _ => plane(g),
        }
    }

    /// The scale `index` of slot `slot` (of 16).
    pub(crate) fn scale_at(&self, strip: &[u8], slot: usize, index: usize) -> half::f16 {
        let scales = strip[self.code_bytes()..].as_chunks().0;
        half::f16::from_ne_bytes(scales[index * LANES + slot])
    }
}

/// The groups of a step of codes `[32, 16]`.
#[inline(always)]
fn groups(part: Part, codes: &[[u8; LANES]; BLOCK_LEN]) -> [[u8; GROUP_BYTES]; STEP_GROUPS] {
    let mut groups = [[0; GROUP_BYTES]; STEP_GROUPS];
    for (g, group) in groups.iter_mut().enumerate() {
        let lanes = group.as_chunks_mut::<4>().0.iter_mut().enumerate();
        match part {
            Part::Keys => {
                let [a, b, c, d] = *codes[4 * g..].first_chunk().expect("four dimensions");
                lanes.for_each(|(lane, bytes)| *bytes = [a[lane], b[lane], c[lane], d[lane]]);
            }
            Part::Values => lanes.for_each(|(lane, bytes)| {
                let slots = codes[g % 2 * LANES + lane].as_chunks::<4>().0;
                *bytes = slots[g / 2];
            }),
        }
    }
    groups
}

/// Packs the groups of a step whose codes have `bits` bits.
#[inline(always)]
fn pack_groups(bits: usize, groups: &[[u8; GROUP_BYTES]; STEP_GROUPS], packed: &mut [u8]) {
    let (planes, _) = packed.as_chunks_mut::<GROUP_BYTES>();
    match bits {
        2 | 3 => {
            let (pairs, high) = planes.split_at_mut(2);
            for (plane, groups) in pairs.iter_mut().zip(groups.as_chunks::<4>().0) {
                let [a, b, c, d] = groups;
                *plane = std::array::from_fn(|i| a[i] & 3 | (b[i] & 3) << 2 | (c[i] & 3) << 4 | (d[i] & 3) << 6);
            }
            if let Some(high) = high.first_mut() {
                *high = [0; GROUP_BYTES];
                for (g, group) in groups.iter().enumerate() {
                    high.iter_mut().zip(group).for_each(|(bits, code)| *bits |= code >> 2 << g);
                }
            }
        }
        4 => {
            for (plane, [low, high]) in planes.iter_mut().zip(groups.as_chunks().0) {
                *plane = std::array::from_fn(|i| low[i] | high[i] << 4);
            }
        }
        _ => planes.copy_from_slice(groups),
    }
}
