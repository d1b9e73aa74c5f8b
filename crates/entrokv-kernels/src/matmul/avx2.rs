//! The int8 kernels on AVX2: 16 rows are the lanes of two registers, taken one after the other.
//!
//! Differences from [`super::scalar`], none of which changes a bit:
//! 1. A lane's four products of a group are `vpmaddubsw`, unsigned times signed bytes to sums of two in 16 bits, then
//!    `vpmaddwd` with ones. Sums of two saturate at 32,767: with activations within 127, codes below 16 may be added up
//!    over 8 groups before they are widened, below 32 over 4, below 64 over 2 ([`narrow_groups`]).
//! 2. 8-bit codes are made signed again: `|code| * (x with the sign of code)` is at most 2 * 128 * 127 = 32,512. They
//!    need no correction for their offset then.
//! 3. Packed groups are unpacked in registers on their way from memory.
//!
//! The functions are safe: they may be *called* only where the CPU has the features, which is the caller's proof.

#![expect(clippy::needless_range_loop, reason = "counted loops over arrays of registers are unrolled for certain")]

use std::arch::x86_64::*;
use std::ops::Range;

use super::layout::{Layout, ScaleLayout, Scratch, UNIT_SCALE_BYTES, blocks_of};
use super::{PanelSums, Sums};
use crate::activations::{PANEL_TOKENS, Panel, PanelStep};
use crate::dequantize::{BlockFormat, Scales};
use crate::matrix::TILE_ROWS;
use crate::matrix::packing::{AFTER_NIBBLES, AFTER_PAIRS, GROUP_BYTES, Packing, STEP_GROUPS};

/// Rows of one register.
const LANES: usize = 8;

/// Bytes of a group that belong to one register.
const HALF_GROUP: usize = GROUP_BYTES / 2;

/// Tokens whose sums stay in registers.
const MAX_TOKENS: usize = 4;

/// Groups whose sums of two products fit 16 bits together (point 1 above).
const fn narrow_groups<L: Layout>() -> usize {
    let fit = match L::Format::CODE_BITS {
        8 => 1,
        bits => 32_767 / (2 * 127 * ((1 << bits) - 1)),
    };
    if fit < L::UNIT_GROUPS { fit } else { L::UNIT_GROUPS }
}

/// Adds the products of `tile` with every token in `panel` to the token's sums.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn tokens<L: Layout>(tile: &[u8], panel: &Panel, sums: &mut [Sums; PANEL_TOKENS]) {
    for first in (0..panel.num_tokens).step_by(MAX_TOKENS) {
        match panel.num_tokens - first {
            1 => num_tokens::<L, 1, 2>(tile, panel, first, sums),
            2 => num_tokens::<L, 2, 1>(tile, panel, first, sums),
            3 => num_tokens::<L, 3, 1>(tile, panel, first, sums),
            _ => num_tokens::<L, MAX_TOKENS, 1>(tile, panel, first, sums),
        }
    }
}

/// [`tokens`] for `T` tokens from `first` on, `S` sides of the tile at a time: their sums and integer sums are registers.
#[target_feature(enable = "avx2,fma,f16c")]
fn num_tokens<L: Layout, const T: usize, const S: usize>(
    tile: &[u8],
    panel: &Panel,
    first: usize,
    sums: &mut [Sums; PANEL_TOKENS],
) {
    for first_side in (0..2).step_by(S) {
        let mut token_sums = [[_mm256_setzero_ps(); T]; S];
        for (side, token_sums) in token_sums.iter_mut().enumerate() {
            for (to, from) in token_sums.iter_mut().zip(&sums[first..]) {
                *to = load_f32(side_of(from, first_side + side));
            }
        }
        for (index, block) in tile.chunks_exact(L::BLOCK_BYTES).enumerate() {
            let (scales, codes) = block.split_at(L::BLOCK_SCALE_BYTES);
            let mut block_scales = [BlockScales::load::<L>(scales, first_side); S];
            if S == 2 {
                block_scales[S - 1] = BlockScales::load::<L>(scales, 1);
            }
            for step in 0..L::BLOCK_STEPS {
                let codes = &codes[step * L::STEP_BYTES..][..L::STEP_BYTES];
                let at = (index * L::BLOCK_STEPS + step) * panel.num_tokens + first;
                let (words, x_scales): (_, &[_; T]) = (part(&panel.words, at), part(&panel.scales, at));
                for half in 0..L::STEP_UNITS {
                    let x_sums = std::array::from_fn(|token| match L::STEP_UNITS {
                        1 => panel.negated_sums[at + token],
                        _ => panel.negated_half_sums[2 * (at + token) + half],
                    });
                    let dots = unit_dots::<L, T, S>(codes, half, first_side, words, x_sums);
                    for (side, token_sums) in token_sums.iter_mut().enumerate() {
                        let unit = step * L::STEP_UNITS + half;
                        let (scale, min) = block_scales[side].unit::<L>(scales, unit, first_side + side);
                        for (token, sum) in token_sums.iter_mut().enumerate() {
                            let x_min = match L::STEP_UNITS {
                                1 => panel.scaled_sums[at + token],
                                _ => panel.scaled_half_sums[2 * (at + token) + half],
                            };
                            *sum = add_unit::<L>(*sum, dots[side][token], scale, x_scales[token], min, x_min);
                        }
                    }
                }
            }
        }
        for (side, token_sums) in token_sums.into_iter().enumerate() {
            for (to, from) in sums[first..].iter_mut().zip(token_sums) {
                store_f32(from, side_of_mut(to, first_side + side));
            }
        }
    }
}

/// Integer sums of unit `half` of a step, less the offset's share: `S` sides of a tile from `first_side` on, `T` tokens.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn unit_dots<L: Layout, const T: usize, const S: usize>(
    codes: &[u8],
    half: usize,
    first_side: usize,
    words: &[[i32; STEP_GROUPS]; T],
    x_sums: [i32; T],
) -> [[__m256i; T]; S] {
    let mut dots = [[_mm256_setzero_si256(); T]; S];
    for token in 0..T {
        let start = start::<L>(x_sums[token]);
        for side in 0..S {
            dots[side][token] = start;
        }
    }
    for first in (half * L::UNIT_GROUPS..(half + 1) * L::UNIT_GROUPS).step_by(narrow_groups::<L>()) {
        let mut narrow = [[_mm256_setzero_si256(); T]; S];
        for g in first..first + narrow_groups::<L>() {
            for side in 0..S {
                let codes = Codes::of::<L>(group::<L>(codes, g, first_side + side));
                for token in 0..T {
                    narrow[side][token] = _mm256_add_epi16(narrow[side][token], codes.pair_sums::<L>(words[token][g]));
                }
            }
        }
        for side in 0..S {
            for token in 0..T {
                dots[side][token] = widen(dots[side][token], narrow[side][token]);
            }
        }
    }
    dots
}

/// Adds the products of tiles, of which as many steps have been unpacked as `x` has, with each token of `x` to the tile's
/// and token's sums.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn unpacked_tokens<L: Layout>(
    scratch: &[Scratch],
    x: &[PanelStep],
    _next: &[PanelStep],
    sums: &mut PanelSums,
) {
    for (scratch, sums) in scratch.iter().zip(sums) {
        for side in 0..2 {
            half_panel::<L, 0>(scratch, side, x, sums);
            half_panel::<L, MAX_TOKENS>(scratch, side, x, sums);
        }
    }
}

/// [`unpacked_tokens`] for one side of one tile and the half of the panel that starts with token `FIRST`.
#[target_feature(enable = "avx2,fma,f16c")]
fn half_panel<L: Layout, const FIRST: usize>(
    scratch: &Scratch,
    side: usize,
    x: &[PanelStep],
    sums: &mut [Sums; PANEL_TOKENS],
) {
    let mut token_sums = [_mm256_setzero_ps(); MAX_TOKENS];
    for token in 0..MAX_TOKENS {
        token_sums[token] = load_f32(side_of(&sums[FIRST + token], side));
    }
    for (step, x) in x.iter().enumerate() {
        let (values, codes) = scratch.step::<L>(step);
        for half in 0..L::STEP_UNITS {
            let x_sums = std::array::from_fn(|token| match L::STEP_UNITS {
                1 => x.negated_sums[FIRST + token],
                _ => x.negated_half_sums[FIRST + token][half],
            });
            let words = part(&x.words, FIRST);
            let [dots] = unit_dots::<L, MAX_TOKENS, 1>(codes.as_flattened(), half, side, words, x_sums);
            let value = |index: usize| _mm256_castsi256_ps(load_bytes(&values[index].as_chunks().0[side]));
            let scale = value(half);
            let min = if L::HAS_MIN { value(L::MINS_AT + half) } else { _mm256_setzero_ps() };
            for token in 0..MAX_TOKENS {
                let x_min = match L::STEP_UNITS {
                    1 => x.scaled_sums[FIRST + token],
                    _ => x.scaled_half_sums[FIRST + token][half],
                };
                token_sums[token] =
                    add_unit::<L>(token_sums[token], dots[token], scale, x.scales[FIRST + token], min, x_min);
            }
        }
    }
    for token in 0..MAX_TOKENS {
        store_f32(token_sums[token], side_of_mut(&mut sums[FIRST + token], side));
    }
}

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

/// Codes ready to be multiplied: themselves, or magnitudes and signs.
#[derive(Clone, Copy)]
struct Codes {
    unsigned: __m256i,
    signs: __m256i,
}

impl Codes {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn of<L: Layout>(codes: __m256i) -> Self {
        if L::Format::CODE_BITS < 8 {
            return Self { unsigned: codes, signs: codes };
        }
        let signed = _mm256_xor_si256(codes, _mm256_set1_epi8(i8::MIN));
        Self { unsigned: _mm256_abs_epi8(signed), signs: signed }
    }

    /// Sums of two products in 16 bits.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn pair_sums<L: Layout>(self, word: i32) -> __m256i {
        let x = _mm256_set1_epi32(word);
        let x = if L::Format::CODE_BITS < 8 { x } else { _mm256_sign_epi8(x, self.signs) };
        _mm256_maddubs_epi16(self.unsigned, x)
    }
}

/// Adds the 16-bit sums, two and two, to the 32-bit ones.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn widen(dot: __m256i, narrow: __m256i) -> __m256i {
    _mm256_add_epi32(dot, _mm256_madd_epi16(narrow, _mm256_set1_epi16(1)))
}

/// What an integer sum starts from: the offset times the negated sum of the activations.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn start<L: Layout>(negated_sum: i32) -> __m256i {
    // 8-bit codes are signed by the time they are multiplied.
    if L::HAS_MIN || L::Format::CODE_BITS == 8 {
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
