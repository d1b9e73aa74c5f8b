//! The int8 kernels on AVX-512 with VNNI: 16 rows are the lanes of one register.
//!
//! Differences from [`super::scalar`], none of which changes a bit:
//! 1. A lane's four products of a group are one `vpdpbusd`, unsigned codes with signed activations; integers are exact in
//!    any order.
//! 2. The offset's share is what the integer sums start from.
//! 3. Packed groups are unpacked in registers on their way from memory.
//!
//! The functions are safe: they may be *called* only where the CPU has the features, which is the caller's proof.

use std::arch::x86_64::*;
use std::ops::Range;

use super::Sums;
use super::layout::{Layout, ScaleLayout, Scratch, UNIT_SCALE_BYTES, blocks_of};
use crate::activations::{PANEL_TOKENS, Panel};
use crate::dequantize::{BlockFormat, Scales};
use crate::matrix::TILE_ROWS;
use crate::matrix::packing::{AFTER_NIBBLES, AFTER_PAIRS, GROUP_BYTES, Packing};

/// Adds the products of steps `steps` of every token in `panel` to the token's sums; `tile` starts at the first of them.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn tokens<L: Layout>(tile: &[u8], steps: Range<usize>, panel: &Panel, sums: &mut [Sums; PANEL_TOKENS]) {
    match panel.num_tokens {
        1 => num_tokens::<L, 1>(tile, steps, panel, sums),
        2 => num_tokens::<L, 2>(tile, steps, panel, sums),
        3 => num_tokens::<L, 3>(tile, steps, panel, sums),
        4 => num_tokens::<L, 4>(tile, steps, panel, sums),
        5 => num_tokens::<L, 5>(tile, steps, panel, sums),
        6 => num_tokens::<L, 6>(tile, steps, panel, sums),
        7 => num_tokens::<L, 7>(tile, steps, panel, sums),
        _ => num_tokens::<L, 8>(tile, steps, panel, sums),
    }
}

/// [`tokens`] with their number known: the sums and integer sums of `T` tokens are registers.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn num_tokens<L: Layout, const T: usize>(
    tile: &[u8],
    steps: Range<usize>,
    panel: &Panel,
    sums: &mut [Sums; PANEL_TOKENS],
) {
    let mut token_sums = [_mm512_setzero_ps(); T];
    for (to, from) in token_sums.iter_mut().zip(sums.iter()) {
        *to = load_f32(from);
    }
    let (from, to, units) = (steps.start * T, steps.end * T, L::STEP_UNITS);
    let x = panel.words[from..to]
        .chunks_exact(L::BLOCK_STEPS * T)
        .zip(panel.scales[from..to].chunks_exact(L::BLOCK_STEPS * T));
    let x_sums = offset_sums::<L>(panel)[from * units..to * units].chunks_exact(L::BLOCK_UNITS * T);
    let x_mins = min_sums::<L>(panel)[from * units..to * units].chunks_exact(L::BLOCK_UNITS * T);
    for (((words, x_scales), (x_sums, x_mins)), block) in
        x.zip(x_sums.zip(x_mins)).zip(tile.chunks_exact(L::BLOCK_BYTES))
    {
        let (scales, codes) = block.split_at(L::BLOCK_SCALE_BYTES);
        let block_scales = BlockScales::load::<L>(scales);
        for step in 0..L::BLOCK_STEPS {
            let codes = &codes[step * L::STEP_BYTES..][..L::STEP_BYTES];
            let (words, x_scales) = (&words[step * T..][..T], &x_scales[step * T..][..T]);
            let (x_sums, x_mins) = (&x_sums[step * T * units..][..T * units], &x_mins[step * T * units..][..T * units]);
            for half in 0..units {
                let mut dots = [_mm512_setzero_si512(); T];
                for (token, dot) in dots.iter_mut().enumerate() {
                    *dot = start::<L>(x_sums[token * units + half]);
                }
                for g in half * L::UNIT_GROUPS..(half + 1) * L::UNIT_GROUPS {
                    let codes = group::<L>(codes, g);
                    for (dot, words) in dots.iter_mut().zip(words) {
                        *dot = _mm512_dpbusd_epi32(*dot, codes, _mm512_set1_epi32(words[g]));
                    }
                }
                let (scale, min) = block_scales.unit::<L>(scales, step * units + half);
                for token in 0..T {
                    let x_min = x_mins[token * units + half];
                    token_sums[token] =
                        add_unit::<L>(token_sums[token], dots[token], scale, x_scales[token], min, x_min);
                }
            }
        }
    }
    for (to, from) in sums.iter_mut().zip(token_sums) {
        store_f32(from, to);
    }
}

/// Unpacks `steps` of a packed tile, whole blocks.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn unpack<L: Layout>(tile: &[u8], steps: Range<usize>, scratch: &mut Scratch) {
    let mut to = scratch.steps_mut::<L>();
    for block in blocks_of::<L>(tile, steps) {
        let (scales, codes) = block.split_at(L::BLOCK_SCALE_BYTES);
        let block_scales = BlockScales::load::<L>(scales);
        for ((step, codes), (values, groups)) in codes.chunks_exact(L::STEP_BYTES).enumerate().zip(&mut to) {
            for (g, to) in groups.iter_mut().enumerate() {
                store(group::<L>(codes, g), to);
            }
            for half in 0..L::STEP_UNITS {
                let (scale, min) = block_scales.unit::<L>(scales, step * L::STEP_UNITS + half);
                store(_mm512_castps_si512(scale), &mut values[half]);
                if L::HAS_MIN {
                    store(_mm512_castps_si512(min), &mut values[L::STEP_UNITS + half]);
                }
            }
        }
    }
}

/// The sums of activations that belong to the units of the format's offset.
#[inline(always)]
fn offset_sums<L: Layout>(panel: &Panel) -> &[i32] {
    match L::STEP_UNITS {
        1 => &panel.negated_sums,
        _ => &panel.negated_half_sums,
    }
}

/// The sums of activations that belong to the units of the format's minima.
#[inline(always)]
fn min_sums<L: Layout>(panel: &Panel) -> &[f32] {
    match L::STEP_UNITS {
        1 => &panel.scaled_sums,
        _ => &panel.scaled_half_sums,
    }
}

/// What an integer sum starts from: the offset times the negated sum of the activations.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn start<L: Layout>(negated_sum: i32) -> __m512i {
    if L::HAS_MIN {
        return _mm512_setzero_si512();
    }
    _mm512_sll_epi32(_mm512_set1_epi32(negated_sum), shift_count(L::Format::OFFSET.trailing_zeros() as usize))
}

/// `sum + dot * (scale * x_scale) + min * x_min`, in the order of the promise.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn add_unit<L: Layout>(sum: __m512, dot: __m512i, scale: __m512, x_scale: f32, min: __m512, x_min: f32) -> __m512 {
    let scale = _mm512_mul_ps(scale, _mm512_set1_ps(x_scale));
    let sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, sum);
    if L::HAS_MIN { _mm512_fmadd_ps(min, _mm512_set1_ps(x_min), sum) } else { sum }
}

/// Group `g` of a packed step.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn group<L: Layout>(packed: &[u8], g: usize) -> __m512i {
    match L::STORED_BITS {
        2 => field(packed, g / 4 * GROUP_BYTES, 2 * (g % 4), 3, 0),
        3 => {
            _mm512_or_si512(field(packed, g / 4 * GROUP_BYTES, 2 * (g % 4), 3, 0), field(packed, AFTER_PAIRS, g, 1, 2))
        }
        4 => field(packed, g % 4 * GROUP_BYTES, 4 * (g / 4), 15, 0),
        5 => _mm512_or_si512(
            field(packed, g % 4 * GROUP_BYTES, 4 * (g / 4), 15, 0),
            field(packed, AFTER_NIBBLES, g, 1, 4),
        ),
        6 => _mm512_or_si512(
            field(packed, g % 4 * GROUP_BYTES, 4 * (g / 4), 15, 0),
            field(packed, AFTER_NIBBLES + g / 4 * GROUP_BYTES, 2 * (g % 4), 3, 4),
        ),
        _ => load(part(packed, g * GROUP_BYTES)),
    }
}

/// The bits `mask << from` of each of the 64 bytes at `at`, moved to `mask << to`.
///
/// There is no shift of bytes: bits that a shift of words carries over from the neighbour are masked away.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn field(packed: &[u8], at: usize, from: usize, mask: i8, to: usize) -> __m512i {
    let bytes = load(part(packed, at));
    let moved = if from < to {
        _mm512_sll_epi16(bytes, shift_count(to - from))
    } else {
        _mm512_srl_epi16(bytes, shift_count(from - to))
    };
    _mm512_and_si512(moved, _mm512_set1_epi8(mask << to))
}

/// A shift count; known when inlined, so that shifts become immediate ones.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn shift_count(count: usize) -> __m128i {
    _mm_cvtsi32_si128(count as i32)
}

/// `d` and `m` of a packed block for the 16 rows; zero where there are none.
struct BlockScales {
    d: __m512,
    m: __m512,
}

impl BlockScales {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn load<L: Layout>(packed: &[u8]) -> Self {
        let half = |at: usize| _mm512_cvtph_ps(load_halves(part(packed, at)));
        match L::SCALES {
            ScaleLayout::Float => Self { d: _mm512_setzero_ps(), m: _mm512_setzero_ps() },
            ScaleLayout::Packed(_) if L::HAS_MIN => Self { d: half(0), m: half(2 * TILE_ROWS) },
            ScaleLayout::Packed(_) => Self { d: half(0), m: _mm512_setzero_ps() },
        }
    }

    /// Scale and minimum of unit `unit`.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn unit<L: Layout>(&self, packed: &[u8], unit: usize) -> (__m512, __m512) {
        let at = L::Format::UNITS_AT + unit * L::Format::UNIT_BYTES;
        match L::SCALES {
            ScaleLayout::Packed(Scales::Plain | Scales::WithMin) => (self.d, self.m),
            ScaleLayout::Packed(Scales::Sub) => (_mm512_mul_ps(self.d, signed(part(packed, at))), self.m),
            ScaleLayout::Packed(Scales::SubWithMin) => {
                let min = _mm512_mul_ps(self.m, signed(part(packed, at + TILE_ROWS)));
                (_mm512_mul_ps(self.d, signed(part(packed, at))), _mm512_xor_ps(min, _mm512_set1_ps(-0.0)))
            }
            ScaleLayout::Float => {
                let value = |unit: usize| _mm512_castsi512_ps(load(part(packed, unit * UNIT_SCALE_BYTES)));
                (value(unit), if L::HAS_MIN { value(L::BLOCK_UNITS + unit) } else { self.m })
            }
        }
    }
}

/// Small integers as f32; those without sign are below 64.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn signed(bytes: &[u8; 16]) -> __m512 {
    // SAFETY: 16 readable bytes, no alignment asked for.
    let bytes = unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) };
    _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))
}

/// The `N` bytes at `at`.
#[inline(always)]
fn part<const N: usize>(bytes: &[u8], at: usize) -> &[u8; N] {
    bytes[at..at + N].first_chunk().expect("a slice of N bytes")
}

#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn load(bytes: &[u8; GROUP_BYTES]) -> __m512i {
    // SAFETY: 64 readable bytes, no alignment asked for.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn store(value: __m512i, to: &mut [u8; GROUP_BYTES]) {
    // SAFETY: 64 writable bytes, no alignment asked for.
    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), value) }
}

#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn load_halves(bytes: &[u8; 2 * TILE_ROWS]) -> __m256i {
    // SAFETY: 32 readable bytes, no alignment asked for.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn load_f32(values: &Sums) -> __m512 {
    // SAFETY: 16 readable f32, no alignment asked for.
    unsafe { _mm512_loadu_ps(values.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn store_f32(value: __m512, to: &mut Sums) {
    // SAFETY: 16 writable f32, no alignment asked for.
    unsafe { _mm512_storeu_ps(to.as_mut_ptr(), value) }
}
