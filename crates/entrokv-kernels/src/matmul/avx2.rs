//! The int8 kernels on AVX2: 16 rows are the lanes of two registers, taken one after the other.
//!
//! Differences from [`super::scalar`], none of which changes a bit:
//! 1. A lane's four products of a group are one instruction or two, integers being exact in any order: `maddubs_dots` and,
//!    where the CPU has AVX-VNNI, `vnni_dots`.
//! 2. Packed groups are unpacked in registers on their way from memory.
//!
//! The functions are safe: they may be *called* only where the CPU has the features, which is the caller's proof.

#![expect(clippy::needless_range_loop, reason = "counted loops over arrays of registers are unrolled for certain")]

mod maddubs_dots;
mod products;
mod vnni_dots;

use std::arch::x86_64::*;
use std::ops::Range;

pub(super) use products::{maddubs, vnni};

use super::Sums;
use super::layout::{Layout, ScaleLayout, Scratch, UNIT_SCALE_BYTES, blocks_of};
use crate::dequantize::{BlockFormat, Scales};
use crate::matrix::TILE_ROWS;
use crate::matrix::packing::{AFTER_NIBBLES, AFTER_PAIRS, GROUP_BYTES, Packing};

/// Rows of one register.
const LANES: usize = 8;

/// Bytes of a group that belong to one register.
const HALF_GROUP: usize = GROUP_BYTES / 2;

/// Tokens whose sums stay in registers.
const MAX_TOKENS: usize = 4;

/// Unpacks `steps` of a packed tile, whole blocks, into `To`'s layout.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn unpack<L: Layout, To: Layout>(tile: &[u8], steps: Range<usize>, scratch: &mut Scratch) {
    let mut to = scratch.steps_mut::<To>();
    for block in blocks_of::<L>(tile, steps) {
        let (scales, codes) = block.split_at(L::BLOCK_SCALE_BYTES);
        let sides = [BlockScales::load::<L>(scales, 0), BlockScales::load::<L>(scales, 1)];
        for ((step, codes), (values, groups)) in codes.chunks_exact(L::STEP_BYTES).enumerate().zip(&mut to) {
            for (side, block_scales) in sides.iter().enumerate() {
                for (g, to) in groups.iter_mut().enumerate() {
                    store(group::<L>(codes, g, side), to, side);
                }
                for half in 0..L::STEP_UNITS {
                    let (scale, min) = block_scales.unit::<L>(scales, step * L::STEP_UNITS + half, side);
                    store(_mm256_castps_si256(scale), &mut values[half], side);
                    if L::HAS_MIN {
                        store(_mm256_castps_si256(min), &mut values[To::MINS_AT + half], side);
                    }
                }
            }
        }
    }
}

/// What an integer sum starts from: the offset times the negated sum of the activations.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn start<L: Layout>(negated_sum: i32) -> __m256i {
    if L::HAS_MIN {
        return _mm256_setzero_si256();
    }
    let shift = _mm_cvtsi32_si128(L::Format::OFFSET.trailing_zeros() as i32);
    _mm256_sll_epi32(_mm256_set1_epi32(negated_sum), shift)
}

/// `sum + dot * (scale * x_scale) + min * x_min`, in the order of the promise.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn add_unit<L: Layout>(sum: __m256, dot: __m256i, scale: __m256, x_scale: f32, min: __m256, x_min: f32) -> __m256 {
    let scale = _mm256_mul_ps(scale, _mm256_set1_ps(x_scale));
    let sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, sum);
    if L::HAS_MIN { _mm256_fmadd_ps(min, _mm256_set1_ps(x_min), sum) } else { sum }
}

/// Side `side` of group `g` of a packed step.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn group<L: Layout>(packed: &[u8], g: usize, side: usize) -> __m256i {
    let at = side * HALF_GROUP;
    match L::STORED_BITS {
        2 => field(packed, at + g / 4 * GROUP_BYTES, 2 * (g % 4), 3, 0),
        3 => _mm256_or_si256(
            field(packed, at + g / 4 * GROUP_BYTES, 2 * (g % 4), 3, 0),
            field(packed, at + AFTER_PAIRS, g, 1, 2),
        ),
        4 => field(packed, at + g % 4 * GROUP_BYTES, 4 * (g / 4), 15, 0),
        5 => _mm256_or_si256(
            field(packed, at + g % 4 * GROUP_BYTES, 4 * (g / 4), 15, 0),
            field(packed, at + AFTER_NIBBLES, g, 1, 4),
        ),
        6 => _mm256_or_si256(
            field(packed, at + g % 4 * GROUP_BYTES, 4 * (g / 4), 15, 0),
            field(packed, at + AFTER_NIBBLES + g / 4 * GROUP_BYTES, 2 * (g % 4), 3, 4),
        ),
        _ => load_bytes(part(packed, at + g * GROUP_BYTES)),
    }
}

/// The bits `mask << from` of each of the 32 bytes at `at`, moved to `mask << to`.
///
/// There is no shift of bytes: bits that a shift of words carries over from the neighbour are masked away.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn field(packed: &[u8], at: usize, from: usize, mask: i8, to: usize) -> __m256i {
    let bytes = load_bytes(part(packed, at));
    // Counts are known when inlined, so that shifts become immediate ones.
    let moved = if from < to {
        _mm256_sll_epi16(bytes, _mm_cvtsi32_si128((to - from) as i32))
    } else {
        _mm256_srl_epi16(bytes, _mm_cvtsi32_si128((from - to) as i32))
    };
    _mm256_and_si256(moved, _mm256_set1_epi8(mask << to))
}

/// `d` and `m` of a packed block for the 8 rows of one side; zero where there are none.
#[derive(Clone, Copy)]
struct BlockScales {
    d: __m256,
    m: __m256,
}

impl BlockScales {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn load<L: Layout>(packed: &[u8], side: usize) -> Self {
        let half = |at: usize| _mm256_cvtph_ps(load_16(part(packed, at + 2 * LANES * side)));
        match L::SCALES {
            ScaleLayout::Float => Self { d: _mm256_setzero_ps(), m: _mm256_setzero_ps() },
            ScaleLayout::Packed(_) if L::HAS_MIN => Self { d: half(0), m: half(2 * TILE_ROWS) },
            ScaleLayout::Packed(_) => Self { d: half(0), m: _mm256_setzero_ps() },
        }
    }

    /// Scale and minimum of unit `unit`.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn unit<L: Layout>(&self, packed: &[u8], unit: usize, side: usize) -> (__m256, __m256) {
        let at = L::Format::UNITS_AT + unit * L::Format::UNIT_BYTES + LANES * side;
        match L::SCALES {
            ScaleLayout::Packed(Scales::Plain | Scales::WithMin) => (self.d, self.m),
            ScaleLayout::Packed(Scales::Sub) => (_mm256_mul_ps(self.d, signed(part(packed, at))), self.m),
            ScaleLayout::Packed(Scales::SubWithMin) => {
                let min = _mm256_mul_ps(self.m, signed(part(packed, at + TILE_ROWS)));
                (_mm256_mul_ps(self.d, signed(part(packed, at))), _mm256_xor_ps(min, _mm256_set1_ps(-0.0)))
            }
            ScaleLayout::Float => {
                let value = |unit: usize| {
                    _mm256_castsi256_ps(load_bytes(part(packed, unit * UNIT_SCALE_BYTES + HALF_GROUP * side)))
                };
                (value(unit), if L::HAS_MIN { value(L::BLOCK_UNITS + unit) } else { self.m })
            }
        }
    }
}

/// Small integers as f32; those without sign are below 64.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn signed(bytes: &[u8; LANES]) -> __m256 {
    let bytes = _mm_cvtsi64_si128(i64::from_le_bytes(*bytes));
    _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))
}

/// One side of unpacked values.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn value(values: &[u8; UNIT_SCALE_BYTES], side: usize) -> __m256 {
    _mm256_castsi256_ps(load_bytes(&values.as_chunks().0[side]))
}

/// The `N` elements at `at`.
#[inline(always)]
fn part<T, const N: usize>(elements: &[T], at: usize) -> &[T; N] {
    elements[at..at + N].first_chunk().expect("a slice of N elements")
}

/// The lanes of one side.
#[inline(always)]
fn side_of(sums: &Sums, side: usize) -> &[f32; LANES] {
    &sums.as_chunks().0[side]
}

#[inline(always)]
fn side_of_mut(sums: &mut Sums, side: usize) -> &mut [f32; LANES] {
    &mut sums.as_chunks_mut().0[side]
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load_bytes(bytes: &[u8; HALF_GROUP]) -> __m256i {
    // SAFETY: 32 readable bytes, no alignment asked for.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn store(value: __m256i, group: &mut [u8; GROUP_BYTES], side: usize) {
    let to: &mut [u8; HALF_GROUP] = &mut group.as_chunks_mut().0[side];
    // SAFETY: 32 writable bytes, no alignment asked for.
    unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), value) }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load_16(bytes: &[u8; 2 * LANES]) -> __m128i {
    // SAFETY: 16 readable bytes, no alignment asked for.
    unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load_f32(values: &[f32; LANES]) -> __m256 {
    // SAFETY: 8 readable f32, no alignment asked for.
    unsafe { _mm256_loadu_ps(values.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn store_f32(value: __m256, to: &mut [f32; LANES]) {
    // SAFETY: 8 writable f32, no alignment asked for.
    unsafe { _mm256_storeu_ps(to.as_mut_ptr(), value) }
}
