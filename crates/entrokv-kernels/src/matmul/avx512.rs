//! The int8 kernels on AVX-512 with VNNI: 16 rows are the lanes of one register.
//!
//! Differences from [`super::scalar`], none of which changes a bit:
//! 1. A lane's four products of a group are one `vpdpbusd`, unsigned codes with signed activations; integers are exact in
//!    any order.
//! 2. The offset's share is what the integer sums start from.
//! 3. Packed groups are unpacked in registers on their way from memory.
//!
//! 4. Many tokens: `vpdpbusd`, multiplications and fused ones share two of the four vector units of a Zen 4, `vscalefps`,
//!    conversions and additions run on the other two. So `i` is scaled by the exponent of the activations' scale, for
//!    nothing, and that meets the scale of the weights times the fraction of the activations' one, of which the stretch
//!    has all eight: one operation beside the dot products, in place of two. All of these products are exact.
//!
//! The functions are safe: they may be *called* only where the CPU has the features, which is the caller's proof.

#![expect(clippy::needless_range_loop, reason = "counted loops over arrays of registers are unrolled for certain")]

use std::arch::x86_64::*;
use std::ops::Range;

use super::layout::{FRACTIONS, Layout, ScaleLayout, Scratch, UNIT_SCALE_BYTES, blocks_of, fetch_ahead};
use super::{PanelSums, Start, Sums};
use crate::activations::{PANEL_TOKENS, Panel, PanelStep, WIDE_PANEL_TOKENS};
use crate::dequantize::{BlockFormat, Scales};
use crate::matrix::TILE_ROWS;
use crate::matrix::packing::{AFTER_NIBBLES, AFTER_PAIRS, GROUP_BYTES, Packing};
use crate::simd::tiles::bytes::ByteTiles;

/// Adds the products of `tile` with every token in `panel` to the token's sums.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn tokens<L: Layout>(tile: &[u8], panel: &Panel, sums: &mut [Sums; PANEL_TOKENS]) {
    match panel.num_tokens {
        1 => num_tokens::<L, 1>(tile, panel, sums),
        2 => num_tokens::<L, 2>(tile, panel, sums),
        3 => num_tokens::<L, 3>(tile, panel, sums),
        4 => num_tokens::<L, 4>(tile, panel, sums),
        5 => num_tokens::<L, 5>(tile, panel, sums),
        6 => num_tokens::<L, 6>(tile, panel, sums),
        7 => num_tokens::<L, 7>(tile, panel, sums),
        _ => num_tokens::<L, 8>(tile, panel, sums),
    }
}

/// [`tokens`] with their number known: the sums and integer sums of `T` tokens are registers.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn num_tokens<L: Layout, const T: usize>(tile: &[u8], panel: &Panel, sums: &mut [Sums; PANEL_TOKENS]) {
    let mut token_sums = [_mm512_setzero_ps(); T];
    for (to, from) in token_sums.iter_mut().zip(sums.iter()) {
        *to = load_f32(from);
    }
    let units = L::STEP_UNITS;
    let x = panel.words.chunks_exact(L::BLOCK_STEPS * T).zip(panel.scales.chunks_exact(L::BLOCK_STEPS * T));
    let x_sums = offset_sums::<L>(panel).chunks_exact(L::BLOCK_UNITS * T);
    let x_mins = min_sums::<L>(panel).chunks_exact(L::BLOCK_UNITS * T);
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
                    *dot = offset_start::<L>(x_sums[token * units + half]);
                }
                for g in half * L::UNIT_GROUPS..(half + 1) * L::UNIT_GROUPS {
                    fetch_ahead::<L>(block, step, g);
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

/// Unpacks `steps` of a packed tile, whole blocks, into `To`'s layout.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn unpack<L: Layout, To: Layout>(tile: &[u8], steps: Range<usize>, scratch: &mut Scratch) {
    let mut to = scratch.steps_mut::<To>();
    for block in blocks_of::<L>(tile, steps) {
        let (scales, codes) = block.split_at(L::BLOCK_SCALE_BYTES);
        let block_scales = BlockScales::load::<L>(scales);
        for ((step, codes), (values, groups)) in codes.chunks_exact(L::STEP_BYTES).enumerate().zip(&mut to) {
            for (g, to) in groups.iter_mut().enumerate() {
                let codes = group::<L>(codes, g);
                let offset = if To::IS_SIGNED { L::Format::OFFSET } else { 0 };
                store(_mm512_sub_epi8(codes, _mm512_set1_epi8(offset as i8)), to);
            }
            for half in 0..L::STEP_UNITS {
                let (scale, min) = block_scales.unit::<L>(scales, step * L::STEP_UNITS + half);
                for (fraction, to) in values[half * To::UNIT_SCALES..][..To::UNIT_SCALES].iter_mut().enumerate() {
                    // Exact: a scale has at most 19 significant bits, a fraction 4.
                    let scale = _mm512_mul_ps(scale, _mm512_set1_ps(1.0 + fraction as f32 / FRACTIONS as f32));
                    store(_mm512_castps_si512(scale), to);
                }
                if L::HAS_MIN {
                    store(_mm512_castps_si512(min), &mut values[To::MINS_AT + half]);
                }
            }
        }
    }
}

/// Adds the products of one or two tiles, of which as many steps have been unpacked as `x` has, with each token of `x` to
/// the tile's and token's sums, or to `start`. `next` is fetched meanwhile.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn unpacked_tokens<L: Layout>(
    _registers: Option<&mut ByteTiles>,
    scratch: &[Scratch],
    x: &[PanelStep],
    next: &[PanelStep],
    start: Start,
    sums: &mut PanelSums,
) {
    match scratch {
        [a, b] => {
            panel_part::<L, 2, 0>([a, b], x, next, start, sums);
            panel_part::<L, 2, 1>([a, b], x, next, start, sums);
            panel_part::<L, 2, 2>([a, b], x, next, start, sums);
            panel_part::<L, 2, 3>([a, b], x, next, start, sums);
        }
        [a, ..] => {
            panel_part::<L, 1, 0>([a], x, next, start, sums);
            panel_part::<L, 1, 1>([a], x, next, start, sums);
            panel_part::<L, 1, 2>([a], x, next, start, sums);
            panel_part::<L, 1, 3>([a], x, next, start, sums);
        }
        [] => {}
    }
}

/// Tokens of a part of a panel: their sums and integer sums with two tiles are registers.
const PART_TOKENS: usize = 4;

const _: () = assert!(4 * PART_TOKENS == WIDE_PANEL_TOKENS);

/// [`unpacked_tokens`] for part `PART` of the panel and `S` tiles, which share the activations that are fetched.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn panel_part<L: Layout, const S: usize, const PART: usize>(
    scratch: [&Scratch; S],
    x: &[PanelStep],
    next: &[PanelStep],
    start: Start,
    sums: &mut PanelSums,
) {
    let first = PART * PART_TOKENS;
    let mut token_sums = [[_mm512_setzero_ps(); PART_TOKENS]; S];
    if start == Start::Sums {
        for side in 0..S {
            for token in 0..PART_TOKENS {
                token_sums[side][token] = load_f32(&sums[side][first + token]);
            }
        }
    }
    for (step, (x, next)) in x.iter().zip(next).enumerate() {
        prefetch_part::<L, PART>(next);
        let lines = scratch.map(|scratch| scratch.step::<L>(step));
        for half in 0..L::STEP_UNITS {
            let mut dots = [[_mm512_setzero_si512(); PART_TOKENS]; S];
            for token in 0..PART_TOKENS {
                let dot = offset_start::<L>(match L::STEP_UNITS {
                    1 => x.negated_sums[first + token],
                    _ => x.negated_half_sums[first + token][half],
                });
                for side in 0..S {
                    dots[side][token] = dot;
                }
            }
            for g in half * L::UNIT_GROUPS..(half + 1) * L::UNIT_GROUPS {
                let mut codes = [_mm512_setzero_si512(); S];
                for side in 0..S {
                    codes[side] = load(&lines[side].1[g]);
                }
                for token in 0..PART_TOKENS {
                    let word = _mm512_set1_epi32(x.words[first + token][g]);
                    for side in 0..S {
                        dots[side][token] = _mm512_dpbusd_epi32(dots[side][token], codes[side], word);
                    }
                }
            }
            for token in 0..PART_TOKENS {
                let exponent = _mm512_set1_ps(x.exponents[first + token]);
                let fraction = x.fractions[first + token].eighths();
                for side in 0..S {
                    let values = lines[side].0;
                    let scales: &[[u8; GROUP_BYTES]; FRACTIONS] = part(values, half * FRACTIONS);
                    let scale = _mm512_castsi512_ps(load(&scales[fraction]));
                    let dot = _mm512_scalef_ps(_mm512_cvtepi32_ps(dots[side][token]), exponent);
                    let mut sum = _mm512_fmadd_ps(dot, scale, token_sums[side][token]);
                    if L::HAS_MIN {
                        let min = _mm512_castsi512_ps(load(&values[L::MINS_AT + half]));
                        let x_min = _mm512_set1_ps(match L::STEP_UNITS {
                            1 => x.scaled_sums[first + token],
                            _ => x.scaled_half_sums[first + token][half],
                        });
                        sum = _mm512_fmadd_ps(min, x_min, sum);
                    }
                    token_sums[side][token] = sum;
                }
            }
        }
    }
    for side in 0..S {
        for token in 0..PART_TOKENS {
            store_f32(token_sums[side][token], &mut sums[side][first + token]);
        }
    }
}

/// Fetches what [`panel_part`] reads of a step, or as much of what all parts read, into the first-level cache.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn prefetch_part<L: Layout, const PART: usize>(x: &PanelStep) {
    let start = std::ptr::from_ref(x).cast::<i8>();
    // Half sums are last.
    let lines = if L::STEP_UNITS == 1 { 3 } else { 4 };
    for line in 0..lines {
        _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(64 * (PART * lines + line)));
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
fn offset_start<L: Layout>(negated_sum: i32) -> __m512i {
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

/// The `N` elements at `at`.
#[inline(always)]
fn part<T, const N: usize>(elements: &[T], at: usize) -> &[T; N] {
    elements[at..at + N].first_chunk().expect("a slice of N elements")
}

#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn load(bytes: &[u8; GROUP_BYTES]) -> __m512i {
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
pub(super) fn load_f32(values: &Sums) -> __m512 {
    // SAFETY: 16 readable f32, no alignment asked for.
    unsafe { _mm512_loadu_ps(values.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn store_f32(value: __m512, to: &mut Sums) {
    // SAFETY: 16 writable f32, no alignment asked for.
    unsafe { _mm512_storeu_ps(to.as_mut_ptr(), value) }
}
