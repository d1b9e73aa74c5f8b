//! Online softmax: what one tile leaves of a row, and how tiles become one.
//!
//! A tile leaves the largest score `m`, `l = sum_j e^(s_j - m)` and `o = sum_j e^(s_j - m) v_j`. `l` is summed in 16 lanes
//! by position modulo 16 and the lanes in a fixed tree. Tiles are merged one after the other in ascending order:
//! `m' = max(m, m_t)`, `l' = l e^(m - m') + l_t e^(m_t - m')`, `o'` likewise (Milakov and Gimelshein 2018, algorithm 3).
//! A row with nothing seen yet has `l = 0`; any other has `l >= 1`, for the largest score adds 1 (or NaN).

use super::strip::Strip;
use crate::simd::{Kernel, LANES, Pairs, Simd, exp_nonpositive};

/// Which positions a row sees.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sight {
    pub(super) oldest: u64,
    pub(super) newest: u64,
}

impl Sight {
    /// The strips, as a range of indices, with a lane in sight; others between them do not exist.
    pub(super) fn strips(self, strips: &[Strip]) -> std::ops::Range<usize> {
        let start = strips.partition_point(|strip| strip.first + (LANES as u64) <= self.oldest);
        let end = strips.partition_point(|strip| strip.first <= self.newest);
        start..end.max(start)
    }
}

/// Sets the scores out of sight to minus infinity and returns the largest; `None` if nothing is in sight.
pub(super) struct Mask<'a> {
    /// `[strips.len(), 16]`.
    pub(super) scores: &'a mut [f32],
    pub(super) strips: &'a [Strip],
    pub(super) sight: Sight,
}

impl Kernel for Mask<'_> {
    type Output = Option<f32>;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Option<f32> {
        let out_of_sight = s.splat(f32::NEG_INFINITY);
        let mut largest = out_of_sight;
        let mut seen = 0;
        let (scores, _) = self.scores.as_chunks_mut::<LANES>();
        for (score, strip) in scores.iter_mut().zip(self.strips) {
            let visible = strip.visible(self.sight.oldest, self.sight.newest);
            seen |= visible;
            let mut v = s.load(score);
            if visible != u16::MAX {
                v = s.keep(v, visible, out_of_sight);
                s.store(score, v);
            }
            largest = s.max(largest, v);
        }
        (seen != 0).then(|| s.largest(largest))
    }
}

/// Replaces scores by `e^(score - largest)` and returns their sum.
pub(super) struct Exponentials<'a> {
    /// `[strips, 16]`.
    pub(super) scores: &'a mut [f32],
    pub(super) largest: f32,
}

impl Kernel for Exponentials<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let largest = s.splat(self.largest);
        let mut sum = s.splat(0.0);
        for score in self.scores.as_chunks_mut::<LANES>().0 {
            let e = exp_nonpositive(s, s.sub(s.load(score), largest));
            s.store(score, e);
            sum = s.add(sum, e);
        }
        s.sum(sum)
    }
}

/// As [`Exponentials`], and writes them rounded to bf16: what values are weighted with. The sum is that before rounding.
pub(super) struct RoundedExponentials<'a> {
    /// `[strips, 16]`.
    pub(super) scores: &'a mut [f32],
    /// `[strips, 8]` pairs.
    pub(super) weights: &'a mut [u32],
    pub(super) largest: f32,
}

impl Kernel for RoundedExponentials<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let largest = s.splat(self.largest);
        let mut sum = s.splat(0.0);
        // Two strips at a time, which one instruction rounds.
        let (scores, last) = self.scores.as_chunks_mut::<{ 2 * LANES }>();
        let (weights, last_weights) = self.weights.as_chunks_mut::<LANES>();
        for (scores, weights) in scores.iter_mut().zip(weights) {
            let scores = scores.as_mut_ptr();
            // SAFETY: 32 scores, room for 16 pairs.
            unsafe {
                let high = scores.add(LANES);
                let (e, f) = (rounded_exp(s, s.load_ptr(scores), largest), rounded_exp(s, s.load_ptr(high), largest));
                s.store_ptr(scores, e);
                s.store_ptr(high, f);
                sum = s.add(s.add(sum, e), f);
                if let Some(pairs) = s.pairs() {
                    pairs.store_ptr(weights.as_mut_ptr(), pairs.round_in_order(e, f));
                }
            }
        }
        if let ([score, ..], [weights, ..]) =
            (last.as_chunks_mut::<LANES>().0, last_weights.as_chunks_mut::<{ LANES / 2 }>().0)
        {
            let e = rounded_exp(s, s.load(score), largest);
            s.store(score, e);
            sum = s.add(sum, e);
            if let Some(pairs) = s.pairs() {
                // SAFETY: room for 16 bf16.
                unsafe { pairs.store_rounded_ptr(weights.as_mut_ptr().cast(), e) };
            }
        }
        s.sum(sum)
    }
}

/// As [`RoundedExponentials`] for strips whose values are elements, as [`Exponentials`] for others: their sums start from
/// exact exponentials.
pub(super) struct MixedExponentials<'a> {
    /// `[strips, 16]`.
    pub(super) scores: &'a mut [f32],
    /// `[strips, 8]` pairs.
    pub(super) weights: &'a mut [u32],
    pub(super) strips: &'a [Strip],
    pub(super) largest: f32,
}

impl Kernel for MixedExponentials<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let largest = s.splat(self.largest);
        let mut sum = s.splat(0.0);
        let weights = self.weights.as_chunks_mut::<{ LANES / 2 }>().0;
        let scores = self.scores.as_chunks_mut::<LANES>().0.iter_mut();
        for ((score, weights), strip) in scores.zip(weights).zip(self.strips) {
            let e = if strip.value_format.is_coded() {
                exp_nonpositive(s, s.sub(s.load(score), largest))
            } else {
                rounded_exp(s, s.load(score), largest)
            };
            s.store(score, e);
            sum = s.add(sum, e);
            if let Some(pairs) = s.pairs() {
                // SAFETY: room for 16 bf16.
                unsafe { pairs.store_rounded_ptr(weights.as_mut_ptr().cast(), e) };
            }
        }
        s.sum(sum)
    }
}

/// `e^(score - largest)` as exactly as a number needs that will be rounded to bf16.
#[inline(always)]
fn rounded_exp<S: Simd>(s: S, score: S::V, largest: S::V) -> S::V {
    let difference = s.sub(score, largest);
    match s.pairs() {
        Some(pairs) => pairs.exp2(s.mul(difference, s.splat(std::f32::consts::LOG2_E))),
        None => exp_nonpositive(s, difference),
    }
}

/// Scores of some rows become weights as [`Mask`] and [`Exponentials`] (or [`RoundedExponentials`]) make them, to the same
/// bits, where every row sees every lane of every strip: most of a prompt.
pub(super) struct WeighWhole<'a> {
    /// Rows of `row_len`, `stride` apart.
    pub(super) scores: &'a mut [f32],
    /// Rows of half as many pairs, half as far apart; empty if nothing is rounded.
    pub(super) weights: &'a mut [u32],
    pub(super) stride: usize,
    pub(super) row_len: usize,
    /// `[rows]`.
    pub(super) largest: &'a mut [f32],
    /// `[rows]`.
    pub(super) total: &'a mut [f32],
}

impl Kernel for WeighWhole<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut scores = self.scores.chunks_mut(self.stride);
        let mut weights = self.weights.chunks_mut(self.stride / 2);
        let (mut largest, mut total) = (self.largest, self.total);
        while !total.is_empty() {
            macro_rules! rows {
                ($m:literal) => {{
                    let strips: [_; $m] = std::array::from_fn(|_| {
                        let row = scores.next().unwrap_or_default();
                        row[..self.row_len].as_chunks_mut().0
                    });
                    let pairs: [_; $m] = std::array::from_fn(|_| {
                        let row = weights.next().map_or(&mut [][..], |row| &mut row[..self.row_len / 2]);
                        row.as_chunks_mut().0
                    });
                    let (largest_here, total_here);
                    (largest_here, largest) = largest.split_at_mut($m);
                    (total_here, total) = total.split_at_mut($m);
                    weigh_rows::<S, $m>(s, strips, pairs, (largest_here, total_here));
                }};
            }
            match total.len() {
                1 => rows!(1),
                2 => rows!(2),
                3 => rows!(3),
                _ => rows!(4),
            }
        }
    }
}

/// [`WeighWhole`] of `M` rows of as many strips, side by side so that none waits for another's sums. Rows of pairs may be empty.
#[inline(always)]
fn weigh_rows<S: Simd, const M: usize>(
    s: S,
    mut scores: [&mut [[f32; LANES]]; M],
    mut weights: [&mut [[u32; LANES / 2]]; M],
    (largest, total): (&mut [f32], &mut [f32]),
) {
    let num_strips = scores[0].len();
    let mut lanes = [s.splat(f32::NEG_INFINITY); M];
    for n in 0..num_strips {
        for (lanes, scores) in lanes.iter_mut().zip(&scores) {
            *lanes = s.max(*lanes, s.load(&scores[n]));
        }
    }
    for (lanes, largest) in lanes.iter_mut().zip(&mut *largest) {
        *largest = s.largest(*lanes);
        *lanes = s.splat(*largest);
    }
    let mut sums = [s.splat(0.0); M];
    match s.pairs().filter(|_| !weights[0].is_empty()) {
        None => {
            for n in 0..num_strips {
                for ((scores, largest), sum) in scores.iter_mut().zip(lanes).zip(&mut sums) {
                    let e = exp_nonpositive(s, s.sub(s.load(&scores[n]), largest));
                    s.store(&mut scores[n], e);
                    *sum = s.add(*sum, e);
                }
            }
        }
        Some(pairs) => {
            for n in 0..num_strips {
                let rows = scores.iter_mut().zip(&mut weights);
                for (((scores, weights), largest), sum) in rows.zip(lanes).zip(&mut sums) {
                    let e = rounded_exp(s, s.load(&scores[n]), largest);
                    s.store(&mut scores[n], e);
                    *sum = s.add(*sum, e);
                    // SAFETY: room for 16 bf16.
                    unsafe { pairs.store_rounded_ptr(weights[n].as_mut_ptr().cast(), e) };
                }
            }
        }
    }
    for (total, sum) in total.iter_mut().zip(sums) {
        *total = s.sum(sum);
    }
}

/// Replaces scores by the probabilities `e^(score - largest) / total`.
pub(super) struct Probabilities<'a> {
    pub(super) scores: &'a mut [f32],
    pub(super) largest: f32,
    pub(super) total: f32,
}

impl Kernel for Probabilities<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (largest, total) = (s.splat(self.largest), s.splat(self.total));
        let (whole, rest) = self.scores.as_chunks_mut::<LANES>();
        for score in whole {
            let p = s.div(exp_nonpositive(s, s.sub(s.load(score), largest)), total);
            s.store(score, p);
        }
        if !rest.is_empty() {
            let p = s.div(exp_nonpositive(s, s.sub(s.load_partial(rest), largest)), total);
            s.store_partial(rest, p);
        }
    }
}

/// What some tiles leave of some rows.
pub(super) struct Partial<'a> {
    /// `[rows]`: the largest score.
    pub(super) largest: &'a mut [f32],
    /// `[rows]`: the sum of exponentials, 0 where nothing was seen.
    pub(super) total: &'a mut [f32],
    /// `[rows, padded_dim]`: the weighted sum of values.
    pub(super) sums: &'a mut [f32],
    /// The same of values that are stored rotated, in the rotated space; empty if the list has none.
    pub(super) rotated: &'a mut [f32],
}

impl Partial<'_> {
    /// Those of some of the rows.
    pub(super) fn rows(&mut self, rows: &std::ops::Range<usize>) -> Partial<'_> {
        let num_rows = self.total.len();
        let padded_dim = self.sums.len() / num_rows;
        let place = rows.start * padded_dim..rows.end * padded_dim;
        Partial {
            largest: &mut self.largest[rows.clone()],
            total: &mut self.total[rows.clone()],
            rotated: self.rotated.get_mut(place.clone()).unwrap_or_default(),
            sums: &mut self.sums[place],
        }
    }
}

/// Merges the next tile's `tile` into `into`, row by row.
pub(super) struct Merge<'a, 'b, 'c> {
    pub(super) into: &'a mut Partial<'b>,
    pub(super) tile: &'a Partial<'c>,
}

impl Kernel for Merge<'_, '_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let num_rows = self.into.total.len();
        let padded_dim = self.into.sums.len() / num_rows;
        for first in (0..num_rows).step_by(LANES) {
            let rows = first..num_rows.min(first + LANES);
            // All exponentials at a time; those of rows that need none are anything.
            let mut factors = [[0.0; LANES]; 2];
            for (i, row) in rows.clone().enumerate() {
                let (m, tile_m) = (self.into.largest[row], self.tile.largest[row]);
                let largest = if m > tile_m { m } else { tile_m };
                (factors[0][i], factors[1][i]) = (m - largest, tile_m - largest);
            }
            for factors in &mut factors {
                let e = exp_nonpositive(s, s.load(factors));
                s.store(factors, e);
            }
            for (i, row) in rows.enumerate() {
                let place = row * padded_dim..(row + 1) * padded_dim;
                let plain = Some((&mut self.into.sums[place.clone()], &self.tile.sums[place.clone()]));
                let rotated = self.into.rotated.get_mut(place.clone()).zip(self.tile.rotated.get(place));
                let sums = plain.into_iter().chain(rotated);
                let (m, l) = (&mut self.into.largest[row], &mut self.into.total[row]);
                let (tile_m, tile_l) = (self.tile.largest[row], self.tile.total[row]);
                if tile_l == 0.0 {
                    continue;
                }
                if *l == 0.0 {
                    (*m, *l) = (tile_m, tile_l);
                    sums.for_each(|(into, tile)| into.copy_from_slice(tile));
                    continue;
                }
                let (own, other) = (factors[0][i], factors[1][i]);
                *m = if *m > tile_m { *m } else { tile_m };
                *l = *l * own + tile_l * other;
                let (own, other) = (s.splat(own), s.splat(other));
                for (into, tile) in sums {
                    for (into, tile) in into.as_chunks_mut::<LANES>().0.iter_mut().zip(tile.as_chunks::<LANES>().0) {
                        let v = s.add(s.mul(s.load(into), own), s.mul(s.load(tile), other));
                        s.store(into, v);
                    }
                }
            }
        }
    }
}

/// Writes `sums / total`, 0 where nothing was seen.
pub(super) struct Normalise<'a> {
    /// `[padded_dim]`.
    pub(super) sums: &'a [f32],
    pub(super) total: f32,
    /// `[head_dim]`.
    pub(super) out: &'a mut [f32],
}

impl Kernel for Normalise<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        if self.total == 0.0 {
            self.out.fill(0.0);
            return;
        }
        let total = s.splat(self.total);
        for (out, sums) in self.out.chunks_mut(LANES).zip(self.sums.as_chunks::<LANES>().0) {
            s.store_partial(out, s.div(s.load(sums), total));
        }
    }
}
