//! The largest softmax probability that each of some tokens gets from any row of a span.
//!
//! The softmax may run over a part of what the rows see, so its totals are not those of attention: one pass over the keys of
//! that part leaves each row's largest score `m` and total `l`, a second one over the tokens asked for takes the maximum of
//! `s - (m + ln l)`, the logarithm of the probability. Nothing is kept for a row and a token: a tile's maxima are all there
//! is. A maximum has one value in whatever order it is taken, so neither threads nor pieces of a span can show.

use std::ops::Range;

use super::block::{Call, CodedScratch, ColumnItem, RegisterBlock, Rows, ScoreOperands, Scratch};
use super::block::{bands, reader, register_blocks, score_band, tiles_for};
use super::product::SCORE_STRIDE;
use super::softmax::{Exponentials, Mask, Merge, Partial, WeighWhole};
use super::strip::{Parts, Strip};
use super::work::{Block, TapWork};
use super::{Maxima, SegmentList, TILE};
use crate::disjoint::DisjointMut;
use crate::simd::{Kernel, LANES, Simd};

/// Where the maxima of one KV head of a span come from, and go.
pub(super) struct MaximaWork<'a> {
    /// Positions whose maxima are taken.
    pub(super) columns: Range<u64>,
    /// Positions that the softmax runs over, ascending and apart.
    among: Vec<Range<u64>>,
    /// Number of tokens before `columns`.
    first_column: usize,
    /// Number of tokens in `columns`.
    num_columns: usize,
    /// `[group_size, num_columns]`.
    out: DisjointMut<'a, f32>,
}

impl<'a> MaximaWork<'a> {
    /// Takes `maxima` apart for the lists of `segments`, one a KV head.
    pub(super) fn each(maxima: &'a mut Maxima, segments: &[SegmentList], group_size: usize) -> Vec<Self> {
        let Maxima { columns, among, out } = maxima;
        let lens = [columns.len(), among.len(), out.len()];
        assert_eq!(lens, [segments.len(); 3], "maxima need columns, a softmax and room for each KV head");
        let heads = segments.iter().zip(columns).zip(among).zip(out);
        heads.map(|(((list, columns), among), out)| Self::new(list, columns, among, out, group_size)).collect()
    }

    fn new(
        list: &SegmentList,
        columns: &Range<u32>,
        among: &[Range<u32>],
        out: &'a mut [f32],
        group_size: usize,
    ) -> Self {
        let wide = |range: &Range<u32>| u64::from(range.start)..u64::from(range.end);
        let columns = wide(columns);
        let among: Vec<_> = among.iter().map(wide).filter(|range| !range.is_empty()).collect();
        assert!(among.is_sorted_by(|a, b| a.end <= b.start), "the positions of a softmax must ascend");
        let first_column = list.tokens_before(columns.start);
        let num_columns = list.tokens_before(columns.end).saturating_sub(first_column);
        assert_eq!(
            out.len(),
            num_columns * group_size,
            "column maxima must be [group_size, tokens of the columns] for each KV head"
        );
        MaximaWork { columns, among, first_column, num_columns, out: DisjointMut::new(out) }
    }
}

/// Whether a tile has a position of `range`.
fn overlaps(tile: u64, range: &Range<u64>) -> bool {
    range.start < (tile + 1) * TILE && tile * TILE < range.end
}

/// The strips with a resident lane at a position of `ranges`, without the other lanes.
fn restrict(strips: &[Strip], ranges: &[Range<u64>], out: &mut Vec<Strip>) {
    out.clear();
    out.extend(strips.iter().filter_map(|strip| {
        let shown = ranges.iter().fold(0, |lanes, range| match range.is_empty() {
            true => lanes,
            false => lanes | strip.visible(range.start, range.end - 1),
        });
        let skipped = strip.resident & !(u16::MAX << shown.trailing_zeros().min(15));
        let first_token = strip.first_token + skipped.count_ones() as usize;
        (shown != 0).then_some(Strip { resident: shown, first_token, ..*strip })
    }));
}

/// Leaves each row's largest score and total over the positions that the softmax of its span's maxima runs over.
pub(super) struct TotalRows<'a> {
    pub(super) call: &'a Call<'a>,
    /// Of a span with maxima.
    pub(super) block: &'a Block,
    pub(super) scratch: &'a mut Scratch,
}

impl Kernel for TotalRows<'_> {
    type Output = ();
    const USES_PAIRS: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let TotalRows { call, block, scratch } = self;
        let rows = Rows::new(call, block);
        let TapWork::ColumnMaxima(heads) = &rows.span.tap else { return };
        let maxima = &heads[block.kv_head];
        let tiles = tiles_for::<S>(call.isa, rows.num_rows);
        rows.load_queries(s, &mut scratch.queries, &mut scratch.coded);
        let mut reader = reader(call, std::slice::from_ref(block), Parts::KeysOnly, block.tiles.start);
        let len = 2 * rows.num_rows.next_multiple_of(LANES);
        scratch.tile.reserve(len);
        scratch.merged.reserve(len);
        let mut merged = totals(&mut scratch.merged, rows.num_rows);
        merged.total.fill(0.0);
        for tile in block.tiles.clone().filter(|tile| maxima.among.iter().any(|range| overlaps(*tile, range))) {
            let strips = reader.read(s, tile, &mut scratch.strips);
            restrict(strips, &maxima.among, &mut scratch.shown);
            let strips = scratch.shown.as_slice();
            let into = totals(&mut scratch.tile, rows.num_rows);
            into.total.fill(0.0);
            let CodedScratch { queries: coded, keys, .. } = &mut scratch.coded;
            let operands = ScoreOperands::new(rows, tiles.as_ref(), strips, &scratch.queries, coded, keys);
            for band in bands::<S>(rows.num_rows) {
                let scores = &mut scratch.weights.exact;
                scores.reserve(band.len() * SCORE_STRIDE);
                let blocks = register_blocks::<S>(rows, &band, strips);
                score_band(s, (&blocks, band.start), strips, operands, scores);
                for RegisterBlock { rows: block, whole, .. } in blocks {
                    let scores = &mut scores[block.start.saturating_sub(band.start) * SCORE_STRIDE..];
                    if whole {
                        let (largest, total) = (&mut into.largest[block.clone()], &mut into.total[block]);
                        let row_len = strips.len() * LANES;
                        let weights = &mut [];
                        s.vectorize(WeighWhole { scores, weights, stride: SCORE_STRIDE, row_len, largest, total });
                        continue;
                    }
                    for (row, scores) in block.zip(scores.chunks_exact_mut(SCORE_STRIDE)) {
                        let sight = rows.sight(row);
                        let seen = sight.strips(strips);
                        let scores = &mut scores[seen.start * LANES..seen.end * LANES];
                        let strips = &strips[seen];
                        if let Some(largest) = s.vectorize(Mask { scores, strips, sight }) {
                            into.largest[row] = largest;
                            into.total[row] = s.vectorize(Exponentials { scores, largest });
                        }
                    }
                }
            }
            s.vectorize(Merge { into: &mut merged, tile: &into });
        }
        for (row, (largest, total)) in merged.largest.iter().zip(&*merged.total).enumerate() {
            // SAFETY: rows and heads belong to one block, and one thread totals a block.
            let statistics = unsafe { call.statistics.part(rows.statistics(row)) };
            statistics.copy_from_slice(&[*largest, *total]);
        }
    }
}

/// Room in `memory` for largest scores and totals, and for no sums.
fn totals(memory: &mut [f32], num_rows: usize) -> Partial<'_> {
    let (largest, total) = memory.split_at_mut(num_rows.next_multiple_of(LANES));
    Partial { largest: &mut largest[..num_rows], total: &mut total[..num_rows], sums: &mut [], rotated: &mut [] }
}

/// Raises the maxima of a tile's tokens to the logarithms of the probabilities that all rows of a span give them.
pub(super) struct RaiseColumns<'a> {
    pub(super) call: &'a Call<'a>,
    /// What [`TotalRows`] wrote.
    pub(super) statistics: &'a [f32],
    /// Of a span with maxima.
    pub(super) item: &'a ColumnItem,
    pub(super) scratch: &'a mut Scratch,
}

impl Kernel for RaiseColumns<'_> {
    type Output = ();
    const USES_PAIRS: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let RaiseColumns { call, statistics, item, scratch } = self;
        let blocks = &call.blocks[item.blocks.clone()];
        let first = Rows::new(call, &blocks[0]);
        let group_size = first.group_size;
        let TapWork::ColumnMaxima(heads) = &first.span.tap else { return };
        let maxima = &heads[first.block.kv_head];
        let mut reader = reader(call, blocks, Parts::KeysOnly, item.tile);
        let strips = reader.read(s, item.tile, &mut scratch.strips);
        restrict(strips, std::slice::from_ref(&maxima.columns), &mut scratch.shown);
        let strips = scratch.shown.as_slice();
        scratch.tile.reserve(group_size * SCORE_STRIDE);
        let largest_here = &mut scratch.tile[..group_size * SCORE_STRIDE];
        largest_here.fill(f32::NEG_INFINITY);
        for block in blocks.iter().filter(|block| block.tiles.contains(&item.tile)) {
            let rows = Rows::new(call, block);
            let tiles = tiles_for::<S>(call.isa, rows.num_rows);
            rows.load_queries(s, &mut scratch.queries, &mut scratch.coded);
            let CodedScratch { queries: coded, keys, .. } = &mut scratch.coded;
            let operands = ScoreOperands::new(rows, tiles.as_ref(), strips, &scratch.queries, coded, keys);
            for band in bands::<S>(rows.num_rows) {
                let scores = &mut scratch.weights.exact;
                scores.reserve(band.len() * SCORE_STRIDE);
                let blocks = register_blocks::<S>(rows, &band, strips);
                score_band(s, (&blocks, band.start), strips, operands, scores);
                for (row, scores) in band.zip(scores.chunks_exact_mut(SCORE_STRIDE)) {
                    let [largest, total] = statistics[rows.statistics(row)] else { continue };
                    let sight = rows.sight(row);
                    let seen = sight.strips(strips);
                    let place = seen.start * LANES..seen.end * LANES;
                    let (scores, strips) = (&mut scores[place.clone()], &strips[seen]);
                    if total == 0.0 || s.vectorize(Mask { scores, strips, sight }).is_none() {
                        continue;
                    }
                    let total = (f64::from(largest) + f64::from(total).ln()) as f32;
                    let maxima = &mut largest_here[row % group_size * SCORE_STRIDE..][place];
                    s.vectorize(Raise { maxima, scores, total });
                }
            }
        }
        for (head, here) in largest_here.chunks_exact(SCORE_STRIDE).enumerate() {
            for (here, strip) in here.as_chunks::<LANES>().0.iter().zip(strips) {
                let start = head * maxima.num_columns + strip.first_token - maxima.first_column;
                let place = start..start + strip.resident.count_ones() as usize;
                // SAFETY: the tokens of a tile belong to one item.
                let maxima = unsafe { maxima.out.part(place) };
                let lanes = (0..LANES).filter(|lane| strip.resident >> lane & 1 == 1).map(|lane| here[lane]);
                for (maximum, here) in maxima.iter_mut().zip(lanes) {
                    // What is NaN stays so, as below.
                    *maximum = if here > *maximum || here.is_nan() { here } else { *maximum };
                }
            }
        }
    }
}

/// `maxima = max(maxima, scores - total)`; NaN for good once the total is, so that a row that is none cannot go unseen.
struct Raise<'a> {
    /// `[strips, 16]`.
    maxima: &'a mut [f32],
    /// `[strips, 16]`.
    scores: &'a [f32],
    /// The logarithm of the row's total.
    total: f32,
}

impl Kernel for Raise<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        if self.total.is_nan() {
            return self.maxima.fill(f32::NAN);
        }
        let total = s.splat(self.total);
        let maxima = self.maxima.as_chunks_mut::<LANES>().0;
        for (maximum, score) in maxima.iter_mut().zip(self.scores.as_chunks::<LANES>().0) {
            let v = s.max(s.sub(s.load(score), total), s.load(maximum));
            s.store(maximum, v);
        }
    }
}
