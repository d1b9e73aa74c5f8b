//! The int8 kernels on AVX2: 16 rows are the lanes of two registers, taken one after the other.
//!
//! Differences from [`super::scalar`], none of which changes a bit:
//! 1. A lane's four products of a group are `vpmaddubsw`, unsigned times signed bytes to sums of two in 16 bits, then
//!    `vpmaddwd` with ones. Sums of two saturate at 32,767: with activations within 127, codes below 16 may be added up
//!    over 8 groups before they are widened, below 32 over 4, below 64 over 2 ([`narrow_groups`]).
//! 2. 8-bit codes are made signed again: `|code| * (x with the sign of code)` is at most 2 * 128 * 127 = 32,512. They
//!    need no correction for their offset then.
//! 3. [`one_token`] unpacks groups in registers on their way from memory and stores nothing.
//!
//! The functions are safe: they may be *called* only where the CPU has the features, which is the caller's proof.

use std::arch::x86_64::*;
use std::ops::Range;

use super::Sums;
use super::unpacked::Unpacked;
use crate::activations::{PANEL_TOKENS, Panel};
use crate::dequantize::{BlockFormat, Scales};
use crate::matrix::packing::{AFTER_NIBBLES, AFTER_PAIRS, GROUP_BYTES, Packing, STEP_GROUPS};
use crate::matrix::{TILE_ROWS, Tile};

/// Rows of one register.
const LANES: usize = 8;

/// Bytes of a group that belong to one register.
const HALF_GROUP: usize = GROUP_BYTES / 2;

/// Tokens whose sums stay in registers.
const MAX_TOKENS: usize = 4;

/// Groups of a unit.
const fn unit_groups<F: BlockFormat>() -> usize {
    STEP_GROUPS / F::STEP_UNITS
}

/// Groups whose sums of two products fit 16 bits together (point 1 above).
const fn narrow_groups<F: BlockFormat>() -> usize {
    let fit = match F::CODE_BITS {
        8 => 1,
        bits => 32_767 / (2 * 127 * ((1 << bits) - 1)),
    };
    if fit < unit_groups::<F>() { fit } else { unit_groups::<F>() }
}

/// All columns, one token.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn one_token<F: BlockFormat>(tile: Tile<'_>, panel: &Panel, sums: &mut Sums) {
    for side in 0..2 {
        let mut sum = load_f32(side_of(sums, side));
        let blocks = tile.codes.chunks_exact(F::BLOCK_CODE_BYTES).zip(tile.scales.chunks_exact(F::BLOCK_SCALE_BYTES));
        let x = panel.words.chunks_exact(F::BLOCK_STEPS).zip(panel.scales.chunks_exact(F::BLOCK_STEPS));
        let x_sums = offset_sums::<F>(panel).chunks_exact(F::BLOCK_STEPS * F::STEP_UNITS);
        let x_mins = min_sums::<F>(panel).chunks_exact(F::BLOCK_STEPS * F::STEP_UNITS);
        for ((((codes, scales), (words, x_scales)), x_sums), x_mins) in blocks.zip(x).zip(x_sums).zip(x_mins) {
            let block_scales = BlockScales::load::<F>(scales, side);
            for step in 0..F::BLOCK_STEPS {
                let codes = &codes[step * F::STEP_BYTES..][..F::STEP_BYTES];
                for half in 0..F::STEP_UNITS {
                    let unit = step * F::STEP_UNITS + half;
                    let mut dot = start::<F>(x_sums[unit]);
                    let first = half * unit_groups::<F>();
                    for first in (first..first + unit_groups::<F>()).step_by(narrow_groups::<F>()) {
                        let mut narrow = _mm256_setzero_si256();
                        let groups = first..first + narrow_groups::<F>();
                        for (g, &word) in groups.clone().zip(&words[step][groups]) {
                            let codes = Codes::of::<F>(group::<F>(codes, g, side));
                            narrow = _mm256_add_epi16(narrow, codes.pair_sums::<F>(word));
                        }
                        dot = widen(dot, narrow);
                    }
                    let (scale, min) = block_scales.unit::<F>(scales, unit, side);
                    sum = add_unit::<F>(sum, dot, scale, x_scales[step], min, x_mins[unit]);
                }
            }
        }
        store_f32(sum, side_of_mut(sums, side));
    }
}

/// Unpacks `steps`, whole blocks.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn unpack<F: BlockFormat>(tile: Tile<'_>, steps: Range<usize>, unpacked: &mut Unpacked) {
    let codes = &tile.codes[steps.start * F::STEP_BYTES..steps.end * F::STEP_BYTES];
    for (packed, groups) in codes.chunks_exact(F::STEP_BYTES).zip(unpacked.codes.chunks_exact_mut(STEP_GROUPS)) {
        for (g, to) in groups.iter_mut().enumerate() {
            for side in 0..2 {
                store(group::<F>(packed, g, side), to, side);
            }
        }
    }
    let blocks = steps.start / F::BLOCK_STEPS..steps.end / F::BLOCK_STEPS;
    let scales = &tile.scales[blocks.start * F::BLOCK_SCALE_BYTES..blocks.end * F::BLOCK_SCALE_BYTES];
    let block_units = F::BLOCK_STEPS * F::STEP_UNITS;
    let units = unpacked.scales.chunks_exact_mut(block_units).zip(unpacked.mins.chunks_exact_mut(block_units));
    for (packed, (scales, mins)) in scales.chunks_exact(F::BLOCK_SCALE_BYTES).zip(units) {
        for side in 0..2 {
            let block_scales = BlockScales::load::<F>(packed, side);
            for unit in 0..block_units {
                let (scale, min) = block_scales.unit::<F>(packed, unit, side);
                store_f32(scale, side_of_mut(&mut scales[unit], side));
                store_f32(min, side_of_mut(&mut mins[unit], side));
            }
        }
    }
}

/// `steps`, unpacked, with every token of the panel.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn tokens<F: BlockFormat>(
    unpacked: &Unpacked,
    steps: Range<usize>,
    panel: &Panel,
    sums: &mut [Sums; PANEL_TOKENS],
) {
    for first in (0..panel.num_tokens).step_by(MAX_TOKENS) {
        let steps = steps.clone();
        match panel.num_tokens - first {
            1 => num_tokens::<F, 1>(unpacked, steps, panel, first, sums),
            2 => num_tokens::<F, 2>(unpacked, steps, panel, first, sums),
            3 => num_tokens::<F, 3>(unpacked, steps, panel, first, sums),
            _ => num_tokens::<F, MAX_TOKENS>(unpacked, steps, panel, first, sums),
        }
    }
}

/// [`tokens`] for `T` tokens from `first` on: their sums and integer sums are registers.
#[target_feature(enable = "avx2,fma,f16c")]
fn num_tokens<F: BlockFormat, const T: usize>(
    unpacked: &Unpacked,
    steps: Range<usize>,
    panel: &Panel,
    first: usize,
    sums: &mut [Sums; PANEL_TOKENS],
) {
    let units = F::STEP_UNITS;
    for side in 0..2 {
        let mut token_sums = [_mm256_setzero_ps(); T];
        for (to, from) in token_sums.iter_mut().zip(&sums[first..]) {
            *to = load_f32(side_of(from, side));
        }
        let weights = unpacked
            .codes
            .chunks_exact(STEP_GROUPS)
            .zip(unpacked.scales.chunks_exact(units))
            .zip(unpacked.mins.chunks_exact(units));
        for (step, ((codes, scales), mins)) in steps.clone().zip(weights) {
            let at = step * panel.num_tokens + first;
            let (words, x_scales) = (&panel.words[at..at + T], &panel.scales[at..at + T]);
            let x_sums = &offset_sums::<F>(panel)[at * units..(at + T) * units];
            let x_mins = &min_sums::<F>(panel)[at * units..(at + T) * units];
            for half in 0..units {
                let mut dots = [_mm256_setzero_si256(); T];
                for (token, dot) in dots.iter_mut().enumerate() {
                    *dot = start::<F>(x_sums[token * units + half]);
                }
                let first = half * unit_groups::<F>();
                for first in (first..first + unit_groups::<F>()).step_by(narrow_groups::<F>()) {
                    let mut narrow = [_mm256_setzero_si256(); T];
                    for g in first..first + narrow_groups::<F>() {
                        let codes = Codes::of::<F>(load(&codes[g], side));
                        for (narrow, words) in narrow.iter_mut().zip(words) {
                            *narrow = _mm256_add_epi16(*narrow, codes.pair_sums::<F>(words[g]));
                        }
                    }
                    for (dot, narrow) in dots.iter_mut().zip(narrow) {
                        *dot = widen(*dot, narrow);
                    }
                }
                let scale = load_f32(side_of(&scales[half], side));
                let min = load_f32(side_of(&mins[half], side));
                for token in 0..T {
                    let x_min = x_mins[token * units + half];
                    token_sums[token] =
                        add_unit::<F>(token_sums[token], dots[token], scale, x_scales[token], min, x_min);
                }
            }
        }
        for (to, from) in sums[first..].iter_mut().zip(token_sums) {
            store_f32(from, side_of_mut(to, side));
        }
    }
}

/// Codes ready to be multiplied: themselves, or magnitudes and signs.
#[derive(Clone, Copy)]
struct Codes {
    unsigned: __m256i,
    signs: __m256i,
}

impl Codes {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn of<F: BlockFormat>(codes: __m256i) -> Self {
        if F::CODE_BITS < 8 {
            return Self { unsigned: codes, signs: codes };
        }
        let signed = _mm256_xor_si256(codes, _mm256_set1_epi8(i8::MIN));
        Self { unsigned: _mm256_abs_epi8(signed), signs: signed }
    }

    /// Sums of two products in 16 bits.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn pair_sums<F: BlockFormat>(self, word: i32) -> __m256i {
        let x = _mm256_set1_epi32(word);
        let x = if F::CODE_BITS < 8 { x } else { _mm256_sign_epi8(x, self.signs) };
        _mm256_maddubs_epi16(self.unsigned, x)
    }
}

/// Adds the 16-bit sums, two and two, to the 32-bit ones.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn widen(dot: __m256i, narrow: __m256i) -> __m256i {
    _mm256_add_epi32(dot, _mm256_madd_epi16(narrow, _mm256_set1_epi16(1)))
}

/// The sums of activations that belong to the units of the format's offset.
#[inline(always)]
fn offset_sums<F: BlockFormat>(panel: &Panel) -> &[i32] {
    match F::STEP_UNITS {
        1 => &panel.negated_sums,
        _ => &panel.negated_half_sums,
    }
}

/// The sums of activations that belong to the units of the format's minima.
#[inline(always)]
fn min_sums<F: BlockFormat>(panel: &Panel) -> &[f32] {
    match F::STEP_UNITS {
        1 => &panel.scaled_sums,
        _ => &panel.scaled_half_sums,
    }
}

/// What an integer sum starts from: the offset times the negated sum of the activations.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn start<F: BlockFormat>(negated_sum: i32) -> __m256i {
    // 8-bit codes are signed by the time they are multiplied.
    if F::HAS_MIN || F::CODE_BITS == 8 {
        return _mm256_setzero_si256();
    }
    let shift = _mm_cvtsi32_si128(F::OFFSET.trailing_zeros() as i32);
    _mm256_sll_epi32(_mm256_set1_epi32(negated_sum), shift)
}

/// `sum + dot * (scale * x_scale) + min * x_min`, in the order of the promise.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn add_unit<F: BlockFormat>(sum: __m256, dot: __m256i, scale: __m256, x_scale: f32, min: __m256, x_min: f32) -> __m256 {
    let scale = _mm256_mul_ps(scale, _mm256_set1_ps(x_scale));
    let sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, sum);
    if F::HAS_MIN { _mm256_fmadd_ps(min, _mm256_set1_ps(x_min), sum) } else { sum }
}

/// Side `side` of group `g` of a packed step.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn group<F: BlockFormat>(packed: &[u8], g: usize, side: usize) -> __m256i {
    let at = side * HALF_GROUP;
    match F::CODE_BITS {
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

/// `d` and `m` of a block for the 8 rows of one side.
struct BlockScales {
    d: __m256,
    m: __m256,
}

impl BlockScales {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn load<F: BlockFormat>(packed: &[u8], side: usize) -> Self {
        let at = 2 * LANES * side;
        let d = _mm256_cvtph_ps(load_16(part(packed, at)));
        let m =
            if F::HAS_MIN { _mm256_cvtph_ps(load_16(part(packed, 2 * TILE_ROWS + at))) } else { _mm256_setzero_ps() };
        Self { d, m }
    }

    /// Scale and minimum of unit `unit`.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn unit<F: BlockFormat>(&self, packed: &[u8], unit: usize, side: usize) -> (__m256, __m256) {
        let at = F::UNITS_AT + unit * F::UNIT_BYTES + LANES * side;
        match F::SCALES {
            Scales::Plain | Scales::WithMin => (self.d, self.m),
            Scales::Sub => (_mm256_mul_ps(self.d, signed(part(packed, at))), _mm256_setzero_ps()),
            Scales::SubWithMin => {
                let min = _mm256_mul_ps(self.m, signed(part(packed, at + TILE_ROWS)));
                (_mm256_mul_ps(self.d, signed(part(packed, at))), _mm256_xor_ps(min, _mm256_set1_ps(-0.0)))
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

/// The `N` bytes at `at`.
#[inline(always)]
fn part<const N: usize>(bytes: &[u8], at: usize) -> &[u8; N] {
    bytes[at..at + N].first_chunk().expect("a slice of N bytes")
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
fn load(group: &[u8; GROUP_BYTES], side: usize) -> __m256i {
    load_bytes(&group.as_chunks().0[side])
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
