//! Copies of a strip's keys and values in pairs of bf16, for strips that cannot or should not be read where they are.

use super::strip::Strip;
use crate::page::PageFormat;
use crate::simd::{Kernel, LANES, Pairs, Simd};

/// Bytes of 16 pairs, which f16 take too.
const PAIR_BYTES: usize = 4 * LANES;

/// Copies a strip's keys to pairs `[head_dim / 2, 16]`; the second element of an odd last pair is 0.
pub(super) struct PackKeys<'a> {
    pub(super) strip: &'a Strip,
    pub(super) head_dim: usize,
    /// `[head_dim.div_ceil(2), 16]`.
    pub(super) to: &'a mut [u32],
}

impl Strip {
    /// Element `i` of the 16 keys.
    ///
    /// A function and not a closure: only what is always inlined is compiled with the instruction set's features.
    ///
    /// # Safety
    /// - The strip's keys can be read, and `i < head_dim`.
    #[inline(always)]
    unsafe fn key_elements<S: Simd>(&self, s: S, i: usize) -> S::V {
        let (keys, place, pair) = (self.keys, i.wrapping_mul(LANES), (i / 2).wrapping_mul(LANES));
        // SAFETY: the caller's promise.
        unsafe {
            match self.key_format {
                PageFormat::F32 => s.load_ptr(keys.cast::<f32>().add(place)),
                PageFormat::F16 => s.load_f16_ptr(keys.cast::<u16>().add(place)),
                PageFormat::Bf16 if i.is_multiple_of(2) => s.load_bf16_first_ptr(keys.cast::<u32>().add(pair)),
                PageFormat::Bf16 => s.load_bf16_second_ptr(keys.cast::<u32>().add(pair)),
                coded => unreachable!("{coded:?} has no elements"),
            }
        }
    }
}

impl Kernel for PackKeys<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Some(pairs) = s.pairs() else { return };
        assert_eq!(self.to.len(), self.head_dim.div_ceil(2) * LANES);
        for (i, to) in self.to.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            // Memory is the limit: ask for what the next tile will copy.
            s.prefetch(self.strip.ahead_of_keys.wrapping_add(i * PAIR_BYTES));
            // SAFETY: the strip's keys can be read (see `TileReader::read`), `2 i < head_dim`; room for 16 pairs.
            unsafe {
                let first = self.strip.key_elements(s, 2 * i);
                let second =
                    if 2 * i + 1 < self.head_dim { self.strip.key_elements(s, 2 * i + 1) } else { s.splat(0.0) };
                pairs.store_ptr(to.as_mut_ptr(), pairs.round(first, second));
            }
        }
    }
}

/// Copies a strip's values to pairs `[8, value_stride]`; those of lanes that are not resident are 0.
pub(super) struct PackValues<'a> {
    pub(super) strip: &'a Strip,
    /// `[8, value_stride]`.
    pub(super) to: &'a mut [u32],
}

impl Strip {
    /// 16 elements of the value of `lane` from `column` on.
    ///
    /// # Safety
    /// - The strip's values can be read, and `column + 16 <= value_stride`.
    #[inline(always)]
    unsafe fn value_elements<S: Simd>(&self, s: S, lane: usize, column: usize) -> S::V {
        let Strip { values, value_stride, value_format, .. } = *self;
        let place = lane.wrapping_mul(value_stride).wrapping_add(column);
        let pair = (lane / 2).wrapping_mul(value_stride).wrapping_add(column);
        // SAFETY: the caller's promise.
        unsafe {
            match value_format {
                PageFormat::F32 => s.load_ptr(values.cast::<f32>().add(place)),
                PageFormat::F16 => s.load_f16_ptr(values.cast::<u16>().add(place)),
                PageFormat::Bf16 if lane.is_multiple_of(2) => s.load_bf16_first_ptr(values.cast::<u32>().add(pair)),
                PageFormat::Bf16 => s.load_bf16_second_ptr(values.cast::<u32>().add(pair)),
                coded => unreachable!("{coded:?} has no elements"),
            }
        }
    }
}

impl Kernel for PackValues<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Some(pairs) = s.pairs() else { return };
        let stride = self.strip.value_stride;
        assert!(self.to.len() == LANES / 2 * stride && stride.is_multiple_of(LANES));
        for (pair, to) in self.to.chunks_exact_mut(stride).enumerate() {
            let (first, second) = (2 * pair, 2 * pair + 1);
            let resident = self.strip.resident >> first & 0b11;
            for (n, to) in to.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                let column = n * LANES;
                s.prefetch(self.strip.ahead_of_values.wrapping_add((pair * stride + column) * PAIR_BYTES / LANES));
                // SAFETY: the strip's values can be read (see `TileReader::read`); room for 16 pairs.
                unsafe {
                    let a = if resident & 1 == 0 { s.splat(0.0) } else { self.strip.value_elements(s, first, column) };
                    let b = if resident & 2 == 0 { s.splat(0.0) } else { self.strip.value_elements(s, second, column) };
                    pairs.store_ptr(to.as_mut_ptr(), pairs.round(a, b));
                }
            }
        }
    }
}
