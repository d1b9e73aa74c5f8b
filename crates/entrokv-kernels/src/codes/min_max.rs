//! Codes between the smallest and the largest element of a group: KIVI's (Liu et al. 2024, section 3.1).
//!
//! `x = code * scale + minimum` with `scale = (max - min) / (2^bits - 1)`, both stored as f16; codes are the nearest to what is
//! stored, and a group of equals has scale 1. Keys are grouped **by channel along tokens**, since what is large in keys is large in
//! a channel of all tokens; values **by token along channels**. A group of keys is the 16 slots of a strip, so that strips are read
//! where they lie (the paper has 32 tokens or more); a group of values is 32 channels.
//!
//! A strip is `head_dim` *rows* of 16 elements in the order of a plain page, a channel's slots of keys `[head_dim, 16]`, a slot's
//! channels of values `[16, head_dim]`: one row is a group of keys, two are one of values. It is its *codes*, then the *scales* and
//! then the *minima* of its groups in ascending order. Two rows of codes of 4 bits share 16 bytes, or four of 2 bits, the first one
//! in the lowest bits.
//!
//! Products of a code and a scale have 15 significant bits, so that an element has one rounding, the same on every instruction set.

mod encode;
mod expand;
#[cfg(test)]
mod tests;

use half::f16;

pub(crate) use encode::EncodeMinMax;
pub(crate) use expand::ExpandStrip;

use super::BLOCK_LEN;
use super::packing::Part;
use crate::simd::LANES;

/// Where codes, scales and minima lie in a strip of one part.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MinMaxStrip {
    pub(crate) bits: usize,
    pub(crate) part: Part,
    pub(crate) head_dim: usize,
}

impl MinMaxStrip {
    /// Rows that share a scale and a minimum.
    #[inline]
    fn rows_per_group(&self) -> usize {
        match self.part {
            Part::Keys => 1,
            Part::Values => BLOCK_LEN / LANES,
        }
    }

    /// Rows that share 16 bytes of codes.
    #[inline]
    fn rows_per_plane(&self) -> usize {
        8 / self.bits
    }

    /// The largest code.
    #[inline]
    fn largest(&self) -> u8 {
        (1 << self.bits) - 1
    }

    /// Bytes of the scales of all groups, and of the minima.
    #[inline]
    fn number_bytes(&self) -> usize {
        self.head_dim / self.rows_per_group() * size_of::<f16>()
    }

    /// Bytes of the codes: where the scales start.
    #[inline]
    fn code_bytes(&self) -> usize {
        self.head_dim / self.rows_per_plane() * LANES
    }

    /// Bytes of a strip.
    #[inline]
    pub(crate) fn bytes(&self) -> usize {
        self.code_bytes() + 2 * self.number_bytes()
    }

    /// What element `lane` of row `row` stands for.
    fn element(&self, strip: &[u8], row: usize, lane: usize) -> f32 {
        let (codes, numbers) = strip.split_at(self.code_bytes());
        let (scales, minima) = numbers.split_at(self.number_bytes());
        let number = |bytes: &[u8]| f16::from_ne_bytes(bytes.as_chunks().0[row / self.rows_per_group()]).to_f32();
        let byte = codes[row / self.rows_per_plane() * LANES + lane];
        let code = byte >> (row % self.rows_per_plane() * self.bits) & self.largest();
        f32::from(code) * number(scales) + number(minima)
    }

    /// Writes what slot `slot` (of 16) stands for to `x`, `[head_dim]`.
    pub(crate) fn decode(&self, strip: &[u8], slot: usize, x: &mut [f32]) {
        for (dim, x) in x.iter_mut().enumerate() {
            *x = match self.part {
                Part::Keys => self.element(strip, dim, slot),
                Part::Values => self.element(strip, slot * (self.head_dim / LANES) + dim / LANES, dim % LANES),
            };
        }
    }
}
