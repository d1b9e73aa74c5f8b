//! Rounding 8 tokens at a time on AVX-512: what [`Rounded`] does, operation by operation, the tokens being the lanes.

#![expect(clippy::needless_range_loop, reason = "counted loops over arrays of registers are unrolled for certain")]

use std::arch::x86_64::*;

use super::PanelStep;
use crate::activations::WIDE_PANEL_TOKENS;
use crate::activations::rounded::{FRACTION_SHIFT, Fraction, INFINITE, Rounded, ZERO};
use crate::matrix::packing::STEP_COLS;

/// Tokens rounded at a time.
const TOKENS: usize = 8;

/// Rounds the rows of `x` [at most 16 tokens, cols] into `steps`; tokens that are not there become zeros.
#[target_feature(enable = "avx2,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn round(x: &[f32], steps: &mut [PanelStep]) {
    let mut rows: [&[[f32; STEP_COLS]]; WIDE_PANEL_TOKENS] = [&[]; WIDE_PANEL_TOKENS];
    for (row, x) in rows.iter_mut().zip(x.chunks_exact(steps.len() * STEP_COLS)) {
        *row = x.as_chunks().0;
    }
    for (index, step) in steps.iter_mut().enumerate() {
        for (part, rows) in rows.as_chunks::<TOKENS>().0.iter().enumerate() {
            // No `map`: a closure would be a function of its own without the instruction set.
            let mut x = [&[0.0; STEP_COLS]; TOKENS];
            for token in 0..TOKENS {
                if let Some(columns) = rows[token].get(index) {
                    x[token] = columns;
                }
            }
            if !round_part(x, step, part) {
                for (token, x) in x.into_iter().enumerate() {
                    step.put(part * TOKENS + token, Rounded::of_avx2(x));
                }
            }
        }
    }
}

/// Rounds part `part` of the tokens of a step; `false` if some token has an infinity or a NaN, for which nothing is done.
#[inline]
#[target_feature(enable = "avx2,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn round_part(x: [&[f32; STEP_COLS]; TOKENS], step: &mut PanelStep, part: usize) -> bool {
    let mut parts = [[_mm512_setzero_ps(); 2]; TOKENS];
    let mut maxima = [_mm256_setzero_si256(); TOKENS];
    for token in 0..TOKENS {
        let [a, b] = load(x[token]);
        parts[token] = [a, b];
        let magnitude = _mm512_set1_epi32(i32::MAX);
        let a = _mm512_and_si512(_mm512_castps_si512(a), magnitude);
        let b = _mm512_and_si512(_mm512_castps_si512(b), magnitude);
        let max = _mm512_max_epu32(a, b);
        maxima[token] = _mm256_max_epu32(_mm512_castsi512_si256(max), _mm512_extracti64x4_epi64::<1>(max));
    }
    let max = lane_maxima(maxima);
    if _mm256_cmpge_epu32_mask(max, _mm256_set1_epi32(INFINITE.to_bits().cast_signed())) != 0 {
        return false;
    }

    let exact = _mm256_castps_si256(_mm256_div_ps(_mm256_castsi256_ps(max), _mm256_set1_ps(127.0)));
    let below = _mm256_set1_epi32((1 << FRACTION_SHIFT) - 1);
    let present = _mm256_cmpge_epu32_mask(max, _mm256_set1_epi32(ZERO.to_bits().cast_signed()));
    let bits = _mm256_maskz_andnot_epi32(present, below, _mm256_add_epi32(exact, below));
    let scale = _mm256_castsi256_ps(bits);
    let inverse = _mm256_maskz_div_ps(present, _mm256_set1_ps(1.0), scale);
    let exponent = _mm256_cvtepi32_ps(_mm256_srli_epi32::<23>(bits));
    let fraction = _mm256_and_si256(_mm256_srli_epi32::<{ FRACTION_SHIFT as i32 }>(bits), _mm256_set1_epi32(7));
    let fraction = _mm_cvtsi128_si64(_mm256_cvtepi32_epi8(fraction)).to_le_bytes();
    *part_of(&mut step.scales, part) = f32_lanes(scale);
    *part_of(&mut step.exponents, part) = f32_lanes(_mm256_sub_ps(exponent, _mm256_set1_ps(127.0)));
    let fractions = part_of(&mut step.fractions, part);
    for token in 0..TOKENS {
        fractions[token] = Fraction::ALL[usize::from(fraction[token] & 7)];
    }

    let inverses = f32_lanes(inverse);
    // Of a 4 x 4 matrix of words in order of rows, its words in order of columns.
    let transpose = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    let mut sums = [_mm512_setzero_si512(); TOKENS / 2];
    for (pair, words) in part_of(&mut step.words, part).as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let mut packed = [_mm512_setzero_si512(); 2];
        for side in 0..2 {
            let token = 2 * pair + side;
            let inverse = _mm512_set1_ps(inverses[token]);
            // Conversion rounds halves to even: nobody changes the rounding mode in Rust.
            let a = _mm512_cvtps_epi32(_mm512_mul_ps(parts[token][0], inverse));
            let b = _mm512_cvtps_epi32(_mm512_mul_ps(parts[token][1], inverse));
            packed[side] = _mm512_packs_epi32(a, b);
        }
        // Packing works on 128-bit lanes: lane `i` has words `i` of the halves a and b of both tokens, one after the other.
        let codes = _mm512_permutexvar_epi32(transpose, _mm512_packs_epi16(packed[0], packed[1]));
        *words = i32_lanes(codes);
        // Sums of four codes; a half of a token is a 128-bit lane.
        sums[pair] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), codes);
    }
    // Sums of 128-bit lanes: lane `i`, word `j` is that of lane `i` of pair `j`.
    let low = _mm512_add_epi32(_mm512_unpacklo_epi32(sums[0], sums[1]), _mm512_unpackhi_epi32(sums[0], sums[1]));
    let high = _mm512_add_epi32(_mm512_unpacklo_epi32(sums[2], sums[3]), _mm512_unpackhi_epi32(sums[2], sums[3]));
    let sums = _mm512_add_epi32(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
    let half_sums = _mm512_permutexvar_epi32(transpose, sums);
    let twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    let scale_twice = _mm512_permutexvar_ps(twice, _mm512_castps256_ps512(scale));
    *part_of(&mut step.negated_half_sums, part) = i32_lanes(_mm512_sub_epi32(_mm512_setzero_si512(), half_sums));
    *part_of(&mut step.scaled_half_sums, part) = f32_pairs(_mm512_mul_ps(scale_twice, _mm512_cvtepi32_ps(half_sums)));
    // The low words of neighbours added up.
    let sums = _mm512_cvtepi64_epi32(_mm512_add_epi32(half_sums, _mm512_srli_epi64::<32>(half_sums)));
    *part_of(&mut step.negated_sums, part) = i32_lanes_8(_mm256_sub_epi32(_mm256_setzero_si256(), sums));
    *part_of(&mut step.scaled_sums, part) = f32_lanes(_mm256_mul_ps(scale, _mm256_cvtepi32_ps(sums)));
    true
}

/// Part `part` of what a step has of its tokens.
#[inline(always)]
fn part_of<T>(of_tokens: &mut [T; WIDE_PANEL_TOKENS], part: usize) -> &mut [T; TOKENS] {
    &mut of_tokens.as_chunks_mut().0[part]
}

/// Lane `i` is the largest lane of `vectors[i]`.
#[inline]
#[target_feature(enable = "avx2,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn lane_maxima(vectors: [__m256i; 8]) -> __m256i {
    let mut pairs = [_mm256_setzero_si256(); 4];
    for (pair, [a, b]) in pairs.iter_mut().zip(vectors.as_chunks::<2>().0) {
        *pair = _mm256_max_epu32(_mm256_unpacklo_epi32(*a, *b), _mm256_unpackhi_epi32(*a, *b));
    }
    let low = _mm256_max_epu32(_mm256_unpacklo_epi64(pairs[0], pairs[1]), _mm256_unpackhi_epi64(pairs[0], pairs[1]));
    let high = _mm256_max_epu32(_mm256_unpacklo_epi64(pairs[2], pairs[3]), _mm256_unpackhi_epi64(pairs[2], pairs[3]));
    _mm256_max_epu32(_mm256_permute2x128_si256::<0x20>(low, high), _mm256_permute2x128_si256::<0x31>(low, high))
}

#[inline]
#[target_feature(enable = "avx2,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn load(x: &[f32; STEP_COLS]) -> [__m512; 2] {
    // SAFETY: 32 readable f32, no alignment asked for.
    unsafe { [_mm512_loadu_ps(x.as_ptr()), _mm512_loadu_ps(x.as_ptr().add(16))] }
}

/// The lanes in order.
#[inline]
#[target_feature(enable = "avx2,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn f32_lanes(vector: __m256) -> [f32; 8] {
    // SAFETY: of one size, and all bits are values of both.
    unsafe { std::mem::transmute(vector) }
}

/// The lanes in order, two and two.
#[inline]
#[target_feature(enable = "avx2,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn f32_pairs(vector: __m512) -> [[f32; 2]; 8] {
    // SAFETY: as above.
    unsafe { std::mem::transmute(vector) }
}

/// The lanes in order.
#[inline]
#[target_feature(enable = "avx2,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn i32_lanes_8(vector: __m256i) -> [i32; 8] {
    // SAFETY: as above.
    unsafe { std::mem::transmute(vector) }
}

/// The lanes in order, `N` and `N`.
#[inline]
#[target_feature(enable = "avx2,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn i32_lanes<const N: usize, const M: usize>(vector: __m512i) -> [[i32; N]; M] {
    const { assert!(N * M == 16) };
    let mut lanes = [[0; N]; M];
    // SAFETY: 16 writable i32 (line above), no alignment asked for.
    unsafe { _mm512_storeu_si512(lanes.as_mut_ptr().cast(), vector) };
    lanes
}
