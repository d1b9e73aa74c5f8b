//! The int8 kernels on AVX-512 with VNNI: 16 rows are the lanes of one register.
//!
//! Differences from [`super::scalar`], none of which changes a bit:
//! 1. A lane's four products of a group are one `vpdpbusd`, unsigned codes with signed activations; integers are exact in
//!    any order.
//! 2. The offset's share is what the integer sums start from.
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

/// Groups of a unit.
const fn unit_groups<F: BlockFormat>() -> usize {
    STEP_GROUPS / F::STEP_UNITS
}

/// All columns, one token.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn one_token<F: BlockFormat>(tile: Tile<'_>, panel: &Panel, sums: &mut Sums) {
    let mut sum = load_f32(sums);
    let blocks = tile.codes.chunks_exact(F::BLOCK_CODE_BYTES).zip(tile.scales.chunks_exact(F::BLOCK_SCALE_BYTES));
    let x = panel.words.chunks_exact(F::BLOCK_STEPS).zip(panel.scales.chunks_exact(F::BLOCK_STEPS));
    let x_sums = offset_sums::<F>(panel).chunks_exact(F::BLOCK_STEPS * F::STEP_UNITS);
    let x_mins = min_sums::<F>(panel).chunks_exact(F::BLOCK_STEPS * F::STEP_UNITS);
    for ((((codes, scales), (words, x_scales)), x_sums), x_mins) in blocks.zip(x).zip(x_sums).zip(x_mins) {
        let block_scales = BlockScales::load::<F>(scales);
        for step in 0..F::BLOCK_STEPS {
            let codes = &codes[step * F::STEP_BYTES..][..F::STEP_BYTES];
            for half in 0..F::STEP_UNITS {
                let unit = step * F::STEP_UNITS + half;
                let mut dot = start::<F>(x_sums[unit]);
                let groups = half * unit_groups::<F>()..(half + 1) * unit_groups::<F>();
                for (g, &word) in groups.clone().zip(&words[step][groups]) {
                    dot = _mm512_dpbusd_epi32(dot, group::<F>(codes, g), _mm512_set1_epi32(word));
                }
                let (scale, min) = block_scales.unit::<F>(scales, unit);
                sum = add_unit::<F>(sum, dot, scale, x_scales[step], min, x_mins[unit]);
            }
        }
    }
    store_f32(sum, sums);
}

/// Unpacks `steps`, whole blocks.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn unpack<F: BlockFormat>(tile: Tile<'_>, steps: Range<usize>, unpacked: &mut Unpacked) {
    let codes = &tile.codes[steps.start * F::STEP_BYTES..steps.end * F::STEP_BYTES];
    for (packed, groups) in codes.chunks_exact(F::STEP_BYTES).zip(unpacked.codes.chunks_exact_mut(STEP_GROUPS)) {
        for (g, to) in groups.iter_mut().enumerate() {
            store(group::<F>(packed, g), to);
        }
    }
    let blocks = steps.start / F::BLOCK_STEPS..steps.end / F::BLOCK_STEPS;
    let scales = &tile.scales[blocks.start * F::BLOCK_SCALE_BYTES..blocks.end * F::BLOCK_SCALE_BYTES];
    let block_units = F::BLOCK_STEPS * F::STEP_UNITS;
    let units = unpacked.scales.chunks_exact_mut(block_units).zip(unpacked.mins.chunks_exact_mut(block_units));
    for (packed, (scales, mins)) in scales.chunks_exact(F::BLOCK_SCALE_BYTES).zip(units) {
        let block_scales = BlockScales::load::<F>(packed);
        for unit in 0..block_units {
            let (scale, min) = block_scales.unit::<F>(packed, unit);
            store_f32(scale, &mut scales[unit]);
            store_f32(min, &mut mins[unit]);
        }
    }
}

/// `steps`, unpacked, with every token of the panel.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn tokens<F: BlockFormat>(
    unpacked: &Unpacked,
    steps: Range<usize>,
    panel: &Panel,
    sums: &mut [Sums; PANEL_TOKENS],
) {
    match panel.num_tokens {
        1 => num_tokens::<F, 1>(unpacked, steps, panel, sums),
        2 => num_tokens::<F, 2>(unpacked, steps, panel, sums),
        3 => num_tokens::<F, 3>(unpacked, steps, panel, sums),
        4 => num_tokens::<F, 4>(unpacked, steps, panel, sums),
        5 => num_tokens::<F, 5>(unpacked, steps, panel, sums),
        6 => num_tokens::<F, 6>(unpacked, steps, panel, sums),
        7 => num_tokens::<F, 7>(unpacked, steps, panel, sums),
        _ => num_tokens::<F, 8>(unpacked, steps, panel, sums),
    }
}

/// [`tokens`] with their number known: sums and integer sums of `T` tokens are registers.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn num_tokens<F: BlockFormat, const T: usize>(
    unpacked: &Unpacked,
    steps: Range<usize>,
    panel: &Panel,
    sums: &mut [Sums; PANEL_TOKENS],
) {
    let mut token_sums = [_mm512_setzero_ps(); T];
    for (to, from) in token_sums.iter_mut().zip(sums.iter()) {
        *to = load_f32(from);
    }
    let (from, to) = (steps.start * T, steps.end * T);
    let units = F::STEP_UNITS;
    let weights = unpacked
        .codes
        .chunks_exact(STEP_GROUPS)
        .zip(unpacked.scales.chunks_exact(units))
        .zip(unpacked.mins.chunks_exact(units));
    let x = panel.words[from..to].chunks_exact(T).zip(panel.scales[from..to].chunks_exact(T));
    let x_sums = offset_sums::<F>(panel)[from * units..to * units].chunks_exact(T * units);
    let x_mins = min_sums::<F>(panel)[from * units..to * units].chunks_exact(T * units);
    for (((words, x_scales), (x_sums, x_mins)), ((codes, scales), mins)) in x.zip(x_sums.zip(x_mins)).zip(weights) {
        for half in 0..units {
            let mut dots = [_mm512_setzero_si512(); T];
            for (token, dot) in dots.iter_mut().enumerate() {
                *dot = start::<F>(x_sums[token * units + half]);
            }
            for g in half * unit_groups::<F>()..(half + 1) * unit_groups::<F>() {
                let codes = load(&codes[g]);
                for (dot, words) in dots.iter_mut().zip(words) {
                    *dot = _mm512_dpbusd_epi32(*dot, codes, _mm512_set1_epi32(words[g]));
                }
            }
            let (scale, min) = (load_f32(&scales[half]), load_f32(&mins[half]));
            for token in 0..T {
                let x_min = x_mins[token * units + half];
                token_sums[token] = add_unit::<F>(token_sums[token], dots[token], scale, x_scales[token], min, x_min);
            }
        }
    }
    for (to, from) in sums.iter_mut().zip(token_sums) {
        store_f32(from, to);
    }
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
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn start<F: BlockFormat>(negated_sum: i32) -> __m512i {
    if F::HAS_MIN {
        return _mm512_setzero_si512();
    }
    _mm512_sll_epi32(_mm512_set1_epi32(negated_sum), shift_count(F::OFFSET.trailing_zeros() as usize))
}

/// `sum + dot * (scale * x_scale) + min * x_min`, in the order of the promise.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn add_unit<F: BlockFormat>(sum: __m512, dot: __m512i, scale: __m512, x_scale: f32, min: __m512, x_min: f32) -> __m512 {
    let scale = _mm512_mul_ps(scale, _mm512_set1_ps(x_scale));
    let sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, sum);
    if F::HAS_MIN { _mm512_fmadd_ps(min, _mm512_set1_ps(x_min), sum) } else { sum }
}

/// Group `g` of a packed step.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn group<F: BlockFormat>(packed: &[u8], g: usize) -> __m512i {
    match F::CODE_BITS {
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

/// `d` and `m` of a block for the 16 rows.
struct BlockScales {
    d: __m512,
    m: __m512,
}

impl BlockScales {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn load<F: BlockFormat>(packed: &[u8]) -> Self {
        let d = _mm512_cvtph_ps(load_halves(part(packed, 0)));
        let m =
            if F::HAS_MIN { _mm512_cvtph_ps(load_halves(part(packed, 2 * TILE_ROWS))) } else { _mm512_setzero_ps() };
        Self { d, m }
    }

    /// Scale and minimum of unit `unit`.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn unit<F: BlockFormat>(&self, packed: &[u8], unit: usize) -> (__m512, __m512) {
        let at = F::UNITS_AT + unit * F::UNIT_BYTES;
        match F::SCALES {
            Scales::Plain | Scales::WithMin => (self.d, self.m),
            Scales::Sub => (_mm512_mul_ps(self.d, signed(part(packed, at))), _mm512_setzero_ps()),
            Scales::SubWithMin => {
                let min = _mm512_mul_ps(self.m, signed(part(packed, at + TILE_ROWS)));
                (_mm512_mul_ps(self.d, signed(part(packed, at))), _mm512_xor_ps(min, _mm512_set1_ps(-0.0)))
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
