//! The int8 kernel of many tokens on AMX: a tile is 16 rows of weights, or 16 tokens, by the 32 columns of a step.
//!
//! Integer sums come from tiles, through the first-level cache, since there is no other way out of a tile; scales and minima are
//! vectors of AVX-512. Neither changes a bit of what [`super::scalar`] computes:
//! 1. Codes are unpacked less the format's offset, so that products are of signed bytes; integers are exact in any order.
//! 2. `i` meets the scale of the activations first, and the product that of the weights: both are exact.
//!
//! A store of a tile keeps the core from everything else. What is left to save is the stores, of which a step of two units would need
//! twice as many, for tiles of half the depth: formats with such steps stay with [`super::avx512`].

#![expect(clippy::needless_range_loop, reason = "counted loops over arrays of registers are unrolled for certain")]

use std::arch::x86_64::*;
use std::mem::offset_of;

use super::avx512::{load, load_f32, store_f32};
use super::layout::{Layout, PAIR, Scratch};
use super::{PanelSums, Start, Sums};
use crate::activations::{PanelStep, WIDE_PANEL_TOKENS};
use crate::matrix::TILE_ROWS;
use crate::simd::tiles::bytes::{ByteTiles, MAX_STEPS, StepDots};

const _: () = assert!(WIDE_PANEL_TOKENS == 16 && TILE_ROWS == 16 && PAIR == 2 && offset_of!(PanelStep, words) == 0);

/// Adds the products of one or two tiles, of which as many steps have been unpacked as `x` has, with each token of `x` to
/// the tile's and token's sums, or to `start`. `next` is fetched meanwhile.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn unpacked_tokens<L: Layout>(
    registers: Option<&mut ByteTiles>,
    scratch: &[Scratch],
    x: &[PanelStep],
    next: &[PanelStep],
    start: Start,
    sums: &mut PanelSums,
) {
    assert!(L::IS_SIGNED && L::STEP_UNITS == 1, "signed codes of whole steps");
    let registers = registers.expect("configured where there are any");
    for (batch, x) in x.chunks(MAX_STEPS).enumerate() {
        let first_step = batch * MAX_STEPS;
        let mut weights = [std::ptr::null(); PAIR];
        for (weights, scratch) in weights.iter_mut().zip(scratch) {
            // All of the batch's steps are there.
            scratch.step::<L>(first_step + x.len() - 1);
            *weights = scratch.step::<L>(first_step).1.as_ptr().cast();
        }
        let weights = (&weights[..scratch.len()], Scratch::step_bytes::<L>());
        let words = (x.as_ptr().cast::<u8>(), size_of::<PanelStep>());
        // SAFETY: `x` and each `scratch` have as many steps (line above), words [16 tokens, 8] first and codes [8, 16 rows, 4].
        let dots = unsafe { registers.dots(words, weights, x.len()) };
        let start = if batch == 0 { start } else { Start::Sums };
        for (side, scratch) in scratch.iter().enumerate() {
            let next = next.get(first_step..).unwrap_or_default();
            add_dots::<L>(side, (scratch, first_step), x, next, dots, start, &mut sums[side]);
        }
    }
}

/// Adds what the steps' `dots` of weights `side`, which are `scratch` from `first_step` on, are worth to each token's sums.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn add_dots<L: Layout>(
    side: usize,
    (scratch, first_step): (&Scratch, usize),
    x: &[PanelStep],
    next: &[PanelStep],
    dots: &[StepDots],
    start: Start,
    sums: &mut [Sums; WIDE_PANEL_TOKENS],
) {
    let mut token_sums = [_mm512_setzero_ps(); WIDE_PANEL_TOKENS];
    if start == Start::Sums {
        for token in 0..WIDE_PANEL_TOKENS {
            token_sums[token] = load_f32(&sums[token]);
        }
    }
    for (index, (x, dots)) in x.iter().zip(dots).enumerate() {
        if let Some(next) = next.get(index) {
            prefetch_side(next, side);
        }
        let (values, _) = scratch.step::<L>(first_step + index);
        let scale = _mm512_castsi512_ps(load(&values[0]));
        for token in 0..WIDE_PANEL_TOKENS {
            let dot = _mm512_cvtepi32_ps(load_dots(&dots.0[side][token]));
            let dot = _mm512_mul_ps(dot, _mm512_set1_ps(x.scales[token]));
            token_sums[token] = _mm512_fmadd_ps(dot, scale, token_sums[token]);
            if L::HAS_MIN {
                let min = _mm512_castsi512_ps(load(&values[L::MINS_AT]));
                token_sums[token] = _mm512_fmadd_ps(min, _mm512_set1_ps(x.scaled_sums[token]), token_sums[token]);
            }
        }
    }
    for token in 0..WIDE_PANEL_TOKENS {
        store_f32(token_sums[token], &mut sums[token]);
    }
}

/// Fetches half of what the kernel reads of a step into the first-level cache.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn prefetch_side(x: &PanelStep, side: usize) {
    /// Where the lines are, half of them for a side.
    const LINES: [[usize; 5]; PAIR] =
        [[0, 64, 128, 192, 256], [320, 384, 448, offset_of!(PanelStep, scales), offset_of!(PanelStep, scaled_sums)]];
    let start = std::ptr::from_ref(x).cast::<i8>();
    for line in LINES[side] {
        _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(line));
    }
}

#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn load_dots(dots: &[i32; TILE_ROWS]) -> __m512i {
    // SAFETY: 16 readable i32, no alignment asked for.
    unsafe { _mm512_loadu_si512(dots.as_ptr().cast()) }
}
