//! One block of queries against its tiles: the driver of the kernels, on one thread.

use std::ops::Range;

use super::aligned::Aligned;
use super::coded::{
    AddValues as AddCodedValues, CodedQueries, LoadQueries, MAX_DIRECT_ROWS, RotateBack, RowSums, ScoreStrips,
    UnpackStrips, Weights as IntegerWeights,
};
use super::product::{
    PAIR_STRIDE, SCORE_STRIDE, Start, Weights, add_values, columns_per_block, rows_per_block, scores,
};
use super::queries::Queries;
use super::softmax::{
    Exponentials, Mask, Merge, MixedExponentials, Normalise, Partial, Probabilities, RoundedExponentials, Sight,
    WeighWhole,
};
use super::strip::{Parts, Strip, StripBuffers, TileReader};
use super::work::{Block, Cut, Item, SpanWork, Sums, TapWork, kept_len, kept_tile_len};
use super::{AttentionParams, Segment, TILE};
use crate::codes::packing::Part;
use crate::codes::rotation::MAX_LEN;
use crate::disjoint::DisjointMut;
use crate::isa::Isa;
use crate::simd::integers::dispatch_integers;
use crate::simd::tiles::{self, Tiles};
use crate::simd::{Kernel, LANES, Pairs, Simd};

/// What all threads of a call read, and where they write.
pub(super) struct Call<'a> {
    pub(super) isa: Isa,
    pub(super) params: &'a AttentionParams,
    pub(super) spans: &'a [SpanWork<'a>],
    pub(super) blocks: &'a [Block],
    /// `[rows, num_heads * head_dim]`.
    pub(super) queries: &'a [f32],
    /// `[rows, num_heads * head_dim]`; a block writes its own rows' heads.
    pub(super) out: DisjointMut<'a, f32>,
    /// Results of the tiles of cut blocks; an item writes its own range.
    pub(super) kept: DisjointMut<'a, f32>,
    /// Largest score and total of every row, `[rows, num_heads, 2]`, empty if no span wants columns; as `out`.
    pub(super) statistics: DisjointMut<'a, f32>,
}

/// A thread's memory.
#[derive(Default)]
pub(super) struct Scratch {
    /// The block whose queries are loaded, if one of this call's is.
    pub(super) block: Option<usize>,
    pub(super) queries: Queries,
    pub(super) weights: WeightBuffers,
    pub(super) tile: Aligned<f32>,
    pub(super) merged: Aligned<f32>,
    pub(super) strips: StripBuffers,
    /// Strips of which a part is shown.
    pub(super) shown: Vec<Strip>,
    pub(super) coded: CodedScratch,
}

/// What is needed for lists with codes only.
#[derive(Default)]
pub(super) struct CodedScratch {
    pub(super) queries: CodedQueries,
    weights: IntegerWeights,
    /// A tile's keys as bytes.
    pub(super) keys: Vec<u8>,
    /// A tile's values as bytes.
    values: Vec<u8>,
}

/// Scores of a band of rows, which become the weights of the values.
#[derive(Default)]
pub(super) struct WeightBuffers {
    /// `[rows, SCORE_STRIDE]`.
    pub(super) exact: Aligned<f32>,
    /// `[rows, PAIR_STRIDE]`.
    rounded: Aligned<u32>,
}

/// Register blocks of a band: rows that go through scores, exponentials and values together. Few enough for their scores to
/// stay in the first-level cache, enough to share a panel of keys there.
const BAND_BLOCKS: usize = 2;

/// The bands of `num_rows` rows.
pub(super) fn bands<S: Simd>(num_rows: usize) -> impl Iterator<Item = Range<usize>> {
    let block = rows_per_block::<S>(num_rows);
    let band = if block > S::MAX_ROWS { block } else { BAND_BLOCKS * block };
    let mut start = 0;
    std::iter::from_fn(move || {
        let rows = start..num_rows.min(start + band);
        start = rows.end;
        (!rows.is_empty()).then_some(rows)
    })
}

/// This thread's tiles for bands out of `num_rows`, if the instruction set has them and these are more than registers take
/// at a time. A last band of fewer rows does without.
pub(super) fn tiles_for<S: Simd>(isa: Isa, num_rows: usize) -> Option<Tiles> {
    if S::SUMS_OF_TILES && num_rows > S::MAX_ROWS { Tiles::configure(isa, num_rows.min(tiles::ROWS)) } else { None }
}

/// The rows of a block: query after query, head after head.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    call: &'a Call<'a>,
    pub(super) block: &'a Block,
    pub(super) span: &'a SpanWork<'a>,
    pub(super) num_rows: usize,
    pub(super) group_size: usize,
    padded_dim: usize,
}

impl<'a> Rows<'a> {
    pub(super) fn new(call: &'a Call<'a>, block: &'a Block) -> Self {
        let padded_dim = call.params.head_dim.next_multiple_of(LANES);
        let (num_rows, group_size) = (block.num_rows(call.params), call.params.group_size());
        Rows { call, block, span: &call.spans[block.span], num_rows, group_size, padded_dim }
    }

    /// The row of the span that `row` of the block belongs to.
    fn query(&self, row: usize) -> usize {
        // A division less for a step of decoding.
        let query = if row < self.group_size { 0 } else { row / self.group_size };
        self.block.first_query + query
    }

    pub(super) fn sight(&self, row: usize) -> Sight {
        self.call.params.sight(self.span.first_position + self.query(row) as u64)
    }

    /// The elements of `row` in `[rows, num_heads * head_dim]`.
    fn elements(&self, row: usize) -> Range<usize> {
        let params = self.call.params;
        let head = self.block.kv_head * self.group_size + row % self.group_size;
        let start = ((self.span.first_row + self.query(row)) * params.num_heads + head) * params.head_dim;
        start..start + params.head_dim
    }

    /// The largest score and total of `row` in `[rows, num_heads, 2]`.
    pub(super) fn statistics(&self, row: usize) -> Range<usize> {
        let start = self.elements(row).start / self.call.params.head_dim * 2;
        start..start + 2
    }

    /// The block's queries, row after row.
    #[inline(always)]
    pub(super) fn load_queries<S: Simd>(&self, s: S, queries: &mut Queries, coded: &mut CodedScratch) {
        let rows = (0..self.num_rows).map(|row| &self.call.queries[self.elements(row)]);
        queries.load(s, self.call.params, rows.clone());
        let codes = self.block.key_codes;
        if !codes.is_empty() {
            let head_dim = self.call.params.head_dim;
            let constants = self.span.constants.get(self.block.kv_head).copied().flatten();
            let queries = queries.load_scaled(self.call.params, rows);
            let out = &mut coded.queries;
            dispatch_integers(self.call.isa, LoadQueries { queries, head_dim, codes, constants, out });
        }
    }

    /// Room for the results of `num_rows` rows in `memory` of [`kept_len`] elements.
    fn partial<'m>(&self, num_rows: usize, memory: &'m mut [f32]) -> Partial<'m> {
        let (largest, rest) = memory.split_at_mut(num_rows.next_multiple_of(LANES));
        let (total, rest) = rest.split_at_mut(num_rows.next_multiple_of(LANES));
        let (sums, rest) = rest.split_at_mut(num_rows * self.padded_dim);
        let rotated = match self.block.sums {
            Sums::Plain => 0,
            Sums::PlainAndRotated => sums.len(),
        };
        Partial {
            largest: &mut largest[..num_rows],
            total: &mut total[..num_rows],
            sums,
            rotated: &mut rest[..rotated],
        }
    }

    /// The tokens at the positions of `tiles`, counted within the list.
    fn tokens_of(&self, tiles: &Range<u64>) -> Range<usize> {
        let list = &self.span.segments[self.block.kv_head];
        list.tokens_before(tiles.start * TILE)..list.tokens_before(tiles.end * TILE)
    }

    /// Whether every row sees every token of the list.
    fn sees_all(&self) -> bool {
        let (newest, oldest) = (self.sight(0).newest, self.sight(self.num_rows - 1).oldest);
        let end = self.span.segments[self.block.kv_head].segments().last().map_or(0, Segment::end);
        oldest == 0 && end <= newest + 1
    }

    /// Lets the tapped rows hold minus infinity for the tokens of `tiles`, where no score will be.
    ///
    /// # Safety
    /// - Nobody else uses the scores of these tokens of the block's rows at a time.
    unsafe fn clear_tap(&self, tiles: &Range<u64>) {
        let TapWork::Rows { .. } = &self.span.tap else { return };
        // As a step of decoding does.
        if self.sees_all() {
            return;
        }
        let tokens = self.tokens_of(tiles);
        for (tap, place) in (0..self.num_rows).filter_map(|row| self.tapped(row)) {
            // SAFETY: as the caller promises.
            unsafe { tap.part(place.start + tokens.start..place.start + tokens.end) }.fill(f32::NEG_INFINITY);
        }
    }

    /// Where the scores of `row` go in the tap; `None` if the row is not tapped.
    fn tapped(&self, row: usize) -> Option<(&'a DisjointMut<'a, f32>, Range<usize>)> {
        let TapWork::Rows { from_row, out } = &self.span.tap else { return None };
        let tapped_row = self.query(row).checked_sub(*from_row)?;
        let num_tokens = self.span.segments[self.block.kv_head].num_tokens();
        let start = (tapped_row * self.group_size + row % self.group_size) * num_tokens;
        Some((&out[self.block.kv_head], start..start + num_tokens))
    }
}

/// Reads tiles from `first_tile` on as the queries of `blocks`, consecutive ones of one span and KV head, see them.
pub(super) fn reader<'a>(call: &'a Call<'a>, blocks: &'a [Block], parts: Parts, first_tile: u64) -> TileReader<'a> {
    let (first, last) = (Rows::new(call, &blocks[0]), Rows::new(call, &blocks[blocks.len() - 1]));
    let sight = Sight { oldest: first.sight(0).oldest, newest: last.sight(last.num_rows - 1).newest };
    let num_rows = blocks.iter().map(|block| block.num_rows(call.params)).sum();
    let (memory, list) = (first.span.memory, &first.span.segments[first.block.kv_head]);
    TileReader::new(call.params, (memory, list), parts, (num_rows, sight), first_tile)
}

/// Attends an item's queries to its tiles. A whole block is finished; of a cut one every tile's result is kept.
pub(super) struct Attend<'a> {
    pub(super) call: &'a Call<'a>,
    pub(super) item: &'a Item,
    pub(super) scratch: &'a mut Scratch,
}

impl Kernel for Attend<'_> {
    type Output = ();
    const USES_PAIRS: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Attend { call, item, scratch } = self;
        let rows = Rows::new(call, &call.blocks[item.block]);
        let tile_len = kept_tile_len(call.params, rows.block);
        let tiles = tiles_for::<S>(call.isa, rows.num_rows);
        if scratch.block.replace(item.block) != Some(item.block) {
            rows.load_queries(s, &mut scratch.queries, &mut scratch.coded);
        }
        let block = std::slice::from_ref(rows.block);
        let mut reader = reader(call, block, Parts::KeysAndValues, item.tiles.start);
        // SAFETY: the tokens of its tiles are the item's until it is finished.
        unsafe { rows.clear_tap(&item.tiles) };

        if let Some(kept) = &item.kept {
            // SAFETY: the ranges of items are disjoint.
            let kept = unsafe { call.kept.part(kept.clone()) };
            for (tile, kept) in item.tiles.clone().zip(kept.chunks_exact_mut(tile_len)) {
                let strips = reader.read(s, tile, &mut scratch.strips);
                let into = Destination::Kept(rows.partial(rows.num_rows, kept));
                attend_tile(
                    s,
                    rows,
                    tiles.as_ref(),
                    strips,
                    (&scratch.queries, &mut scratch.coded),
                    &mut scratch.weights,
                    into,
                );
            }
            return;
        }
        scratch.merged.reserve(tile_len);
        let mut merged = rows.partial(rows.num_rows, &mut scratch.merged);
        merged.total.fill(0.0);
        for tile in item.tiles.clone() {
            let strips = reader.read(s, tile, &mut scratch.strips);
            let into = Destination::Merged(&mut merged, &mut scratch.tile);
            attend_tile(
                s,
                rows,
                tiles.as_ref(),
                strips,
                (&scratch.queries, &mut scratch.coded),
                &mut scratch.weights,
                into,
            );
        }
        finish(s, rows, &merged);
    }
}

/// Merges the kept results of a cut block and finishes it.
pub(super) struct MergeKept<'a> {
    pub(super) call: &'a Call<'a>,
    /// All of whose items are finished.
    pub(super) cut: &'a Cut,
    pub(super) scratch: &'a mut Scratch,
}

impl Kernel for MergeKept<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let rows = Rows::new(self.call, &self.call.blocks[self.cut.block]);
        let tile_len = kept_tile_len(self.call.params, rows.block);
        self.scratch.merged.reserve(tile_len);
        let mut merged = rows.partial(rows.num_rows, &mut self.scratch.merged);
        merged.total.fill(0.0);
        // SAFETY: the items of this block are done, and one thread merges a block.
        let kept = unsafe { self.call.kept.part(self.cut.kept.clone()) };
        for tile in kept.chunks_exact_mut(tile_len) {
            let tile = &rows.partial(rows.num_rows, tile);
            s.vectorize(Merge { into: &mut merged, tile });
        }
        finish(s, rows, &merged);
    }
}

/// Writes a block's rows of the output, their probabilities where tapped, and their statistics.
fn finish<S: Simd>(s: S, rows: Rows<'_>, merged: &Partial<'_>) {
    let mut both: RowSums = [[0.0; LANES]; MAX_LEN / LANES];
    let tiles = &rows.block.tiles;
    for out_of_sight in [0..tiles.start, tiles.end..u64::MAX / TILE] {
        // SAFETY: a row belongs to one block, whose items are done.
        unsafe { rows.clear_tap(&out_of_sight) };
    }
    for (row, mut sums) in merged.sums.chunks_exact(rows.padded_dim).enumerate() {
        if let Some(rotated) = merged.rotated.chunks_exact(rows.padded_dim).nth(row) {
            s.vectorize(RotateBack { rotated, plain: sums, out: &mut both });
            sums = &both.as_flattened()[..rows.padded_dim];
        }
        let (largest, total) = (merged.largest[row], merged.total[row]);
        let elements = rows.elements(row);
        if matches!(rows.span.tap, TapWork::ColumnSums { .. }) {
            // SAFETY: as for the output.
            let statistics = unsafe { rows.call.statistics.part(rows.statistics(row)) };
            statistics.copy_from_slice(&[largest, total]);
        }
        // SAFETY: rows and heads belong to one block, which one thread finishes.
        let out = unsafe { rows.call.out.part(elements) };
        s.vectorize(Normalise { sums, total, out });
        if let Some((tap, place)) = rows.tapped(row) {
            // SAFETY: a tapped row belongs to one block, whose items are done.
            let scores = unsafe { tap.part(place) };
            if total == 0.0 {
                scores.fill(0.0);
            } else {
                s.vectorize(Probabilities { scores, largest, total });
            }
        }
    }
}

/// Some rows that go through the kernels together, and what they see of a tile.
#[derive(Clone, Default)]
pub(super) struct RegisterBlock {
    pub(super) rows: Range<usize>,
    /// The strips that some of its rows sees, as a range of indices.
    seen: Range<usize>,
    /// Whether every row sees every lane of every strip of the tile.
    pub(super) whole: bool,
}

/// The register blocks of `band`; the last ones may be empty.
#[inline(always)]
pub(super) fn register_blocks<S: Simd>(
    rows: Rows<'_>,
    band: &Range<usize>,
    strips: &[Strip],
) -> [RegisterBlock; BAND_BLOCKS] {
    let rows_per_block = rows_per_block::<S>(rows.num_rows);
    let mut blocks = [const { RegisterBlock { rows: 0..0, seen: 0..0, whole: false } }; BAND_BLOCKS];
    let (Some(first), Some(last)) = (strips.first(), strips.last()) else { return blocks };
    let resident = strips.iter().all(|strip| strip.resident == u16::MAX);
    let mut start = band.start;
    for block in &mut blocks {
        if start >= band.end {
            break;
        }
        block.rows = start..band.end.min(start + rows_per_block);
        start = block.rows.end;
        // Later rows see later positions.
        let (earliest, latest) = (rows.sight(block.rows.start), rows.sight(block.rows.end - 1));
        let all = latest.oldest <= first.first && earliest.newest >= last.first + (LANES as u64 - 1);
        block.whole = resident && all;
        block.seen =
            if all { 0..strips.len() } else { Sight { oldest: earliest.oldest, newest: latest.newest }.strips(strips) };
    }
    blocks
}

/// The queries of a block, and the bytes of a tile's coded keys if its rows share their unpacking.
#[derive(Clone, Copy)]
pub(super) struct ScoreOperands<'a> {
    isa: Isa,
    tiles: Option<&'a Tiles>,
    queries: &'a Queries,
    coded: &'a CodedQueries,
    /// `[strips, head_dim * 16]`.
    unpacked: Option<&'a [u8]>,
    head_dim: usize,
}

impl<'a> ScoreOperands<'a> {
    /// Unpacks what `rows` share of `strips`.
    pub(super) fn new(
        rows: Rows<'_>,
        tiles: Option<&'a Tiles>,
        strips: &[Strip],
        queries: &'a Queries,
        coded: &'a CodedQueries,
        keys: &'a mut Vec<u8>,
    ) -> Self {
        let (isa, head_dim) = (rows.call.isa, rows.call.params.head_dim);
        let shared = rows.num_rows > MAX_DIRECT_ROWS && strips.iter().any(|strip| strip.key_format.is_rotated());
        let unpacked = shared.then(|| unpack(isa, Part::Keys, head_dim, strips, keys));
        ScoreOperands { isa, tiles, queries, coded, unpacked, head_dim }
    }
}

/// The scores of a band of rows for all strips that some row of their register block sees; others stay what they were.
///
/// Row `first_row` goes to the first row of `out`.
#[inline(always)]
pub(super) fn score_band<S: Simd>(
    s: S,
    (blocks, first_row): (&[RegisterBlock], usize),
    strips: &[Strip],
    operands: ScoreOperands<'_>,
    out: &mut [f32],
) {
    let ScoreOperands { isa, tiles, queries, coded, unpacked, head_dim } = operands;
    // A panel of strips is read by all rows of the band while it is in the first-level cache.
    for panel in panels(strips, columns_per_block::<S>(blocks[0].rows.len())) {
        for RegisterBlock { rows, seen, .. } in blocks {
            let columns = panel.start.max(seen.start)..panel.end.min(seen.end);
            if columns.is_empty() {
                continue;
            }
            let out = &mut out[(rows.start - first_row) * SCORE_STRIDE + columns.start * LANES..];
            if strips[panel.start].key_format.is_coded() {
                let scores = ScoreStrips {
                    queries: coded,
                    first_row: rows.start,
                    num_rows: rows.len(),
                    head_dim,
                    strips: &strips[columns.clone()],
                    unpacked: unpacked.map(|bytes| &bytes[columns.start * head_dim * LANES..]),
                    out,
                };
                dispatch_integers(isa, scores);
                continue;
            }
            // SAFETY: strips fresh from the reader, with `head_dim` as here.
            unsafe { scores(s, tiles, queries.rows(rows.clone()), &strips[columns], out) };
        }
    }
}

/// Runs of strips whose keys have one format, as ranges of indices; of up to `max_len` strips, unless they are coded: their
/// kernel cuts runs itself.
fn panels(strips: &[Strip], max_len: usize) -> impl Iterator<Item = Range<usize>> {
    let mut start = 0;
    std::iter::from_fn(move || {
        let first = strips.get(start)?;
        let max_len = if first.key_format.is_coded() { strips.len() } else { max_len };
        let len = strips[start..].iter().take(max_len).take_while(|strip| strip.key_format == first.key_format).count();
        start += len;
        Some(start - len..start)
    })
}

/// Where the results of a tile go.
enum Destination<'a, 'm> {
    /// They are kept, to be merged by somebody else.
    Kept(Partial<'m>),
    /// They are merged with what tiles before have left, a band at a time, while they are in the first-level cache; beside the
    /// memory for a band's.
    Merged(&'a mut Partial<'m>, &'a mut Aligned<f32>),
}

/// One tile: scores, exponentials, weighted values, a band of rows at a time.
#[inline(always)]
fn attend_tile<S: Simd>(
    s: S,
    rows: Rows<'_>,
    tiles: Option<&Tiles>,
    strips: &[Strip],
    (queries, coded): (&Queries, &mut CodedScratch),
    buffers: &mut WeightBuffers,
    mut into: Destination<'_, '_>,
) {
    if strips.is_empty() {
        if let Destination::Kept(kept) = into {
            kept.total.fill(0.0);
        }
        return;
    }
    let CodedScratch { queries: coded_queries, weights: integer_weights, keys, values: unpacked } = coded;
    let operands = ScoreOperands::new(rows, tiles, strips, queries, coded_queries, keys);
    let head_dim = operands.head_dim;
    let num_coded_values = strips.iter().filter(|strip| strip.value_format.is_coded()).count();
    let has_coded_values = num_coded_values > 0;
    let unpacked = (rows.num_rows > MAX_DIRECT_ROWS && has_coded_values)
        .then(|| unpack(rows.call.isa, Part::Values, head_dim, strips, unpacked));
    let weighing = match num_coded_values {
        _ if !S::Pairs::EXIST => Weighing::Exact,
        0 => Weighing::Rounded,
        n if n == strips.len() => Weighing::Exact,
        _ => Weighing::ByStrip,
    };
    for band in bands::<S>(rows.num_rows) {
        buffers.exact.reserve(band.len() * SCORE_STRIDE);
        if S::Pairs::EXIST {
            buffers.rounded.reserve(band.len() * PAIR_STRIDE);
        }
        let (mut results, merged) = match &mut into {
            Destination::Kept(kept) => (kept.rows(&band), None),
            Destination::Merged(merged, memory) => {
                memory.reserve(kept_len(rows.call.params, rows.block, band.len()));
                (rows.partial(band.len(), memory), Some(merged.rows(&band)))
            }
        };
        results.total.fill(0.0);
        let blocks = register_blocks::<S>(rows, &band, strips);
        score_band(s, (&blocks, band.start), strips, operands, &mut buffers.exact);
        for RegisterBlock { rows: block, seen, whole } in blocks {
            let first = block.start.saturating_sub(band.start);
            let own = first..first + block.len();
            if whole && weighing != Weighing::ByStrip {
                let row_len = strips.len() * LANES;
                for row in block.clone() {
                    if let Some((tap, place)) = rows.tapped(row) {
                        let scores = &buffers.exact[(row - band.start) * SCORE_STRIDE..][..row_len];
                        copy_to_tap(scores, strips, tap, place.start);
                    }
                }
                let (largest, total) = (&mut results.largest[own.clone()], &mut results.total[own.clone()]);
                let scores = &mut buffers.exact[first * SCORE_STRIDE..];
                let weights = match weighing {
                    Weighing::Rounded => &mut buffers.rounded[first * PAIR_STRIDE..],
                    Weighing::Exact | Weighing::ByStrip => &mut [],
                };
                s.vectorize(WeighWhole { scores, weights, stride: SCORE_STRIDE, row_len, largest, total });
            } else {
                for row in block.clone() {
                    weigh(s, (rows, row), (row - band.start, weighing), (strips, seen.clone()), buffers, &mut results);
                }
            }
            let Partial { sums, rotated, .. } = results.rows(&own);
            rotated.fill(0.0);
            let (mut column, mut start) = (seen.start, Start::Zero);
            for run in strips[seen.clone()].chunk_by(|a, b| a.value_format == b.value_format) {
                if !run[0].value_format.is_coded() {
                    let weights = Weights {
                        exact: &buffers.exact[first * SCORE_STRIDE + column * LANES..],
                        rounded: buffers.rounded.get(first * PAIR_STRIDE + column * LANES / 2..).unwrap_or(&[]),
                    };
                    // SAFETY: strips fresh from the reader, which gives values their stride.
                    unsafe { add_values(s, operands.tiles, weights, run, (start, sums)) };
                    start = Start::Sums;
                }
                column += run.len();
            }
            if start == Start::Zero {
                sums.fill(0.0);
            }
            if has_coded_values && !block.is_empty() {
                let values = AddCodedValues {
                    exponentials: &buffers.exact[first * SCORE_STRIDE + seen.start * LANES..],
                    num_rows: block.len(),
                    head_dim,
                    unpacked: unpacked.map(|bytes| &bytes[seen.start * head_dim * LANES..]),
                    strips: &strips[seen],
                    weights: integer_weights,
                    sums,
                    rotated,
                };
                dispatch_integers(rows.call.isa, values);
            }
        }
        if let Some(mut merged) = merged {
            s.vectorize(Merge { into: &mut merged, tile: &results });
        }
    }
}

/// The bytes of one part of strips with codes, in `buffer`.
fn unpack<'b>(isa: Isa, part: Part, head_dim: usize, strips: &[Strip], buffer: &'b mut Vec<u8>) -> &'b [u8] {
    buffer.resize(strips.len() * head_dim * LANES, 0);
    dispatch_integers(isa, UnpackStrips { part, head_dim, strips, out: buffer });
    buffer
}

/// How scores become weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Weighing {
    /// All as f32.
    Exact,
    /// All rounded to bf16.
    Rounded,
    /// Rounded where the values are elements, as f32 where they are codes: those have the same bits on every instruction set.
    ByStrip,
}

/// Turns the scores of `row`, in row `place` of the buffers, into weights, and leaves its largest score and total. Strips
/// that its register block sees (`block_seen`) and it does not weigh nothing.
#[inline(always)]
fn weigh<S: Simd>(
    s: S,
    (rows, row): (Rows<'_>, usize),
    (place, weighing): (usize, Weighing),
    (strips, block_seen): (&[Strip], Range<usize>),
    buffers: &mut WeightBuffers,
    into: &mut Partial<'_>,
) {
    let sight = rows.sight(row);
    let seen = sight.strips(strips);
    let exact = &mut buffers.exact[place * SCORE_STRIDE..][..strips.len() * LANES];
    let scores = &mut exact[seen.start * LANES..seen.end * LANES];
    let strips_seen = &strips[seen.clone()];
    let largest = s.vectorize(Mask { scores, strips: strips_seen, sight });
    if let Some((tap, place)) = rows.tapped(row) {
        copy_to_tap(scores, strips_seen, tap, place.start);
    }
    let half = LANES / 2;
    let rounded = buffers.rounded.get_mut(place * PAIR_STRIDE..).and_then(|r| r.get_mut(..strips.len() * half));
    let rounded = rounded.unwrap_or(&mut []);
    if let Some(largest) = largest {
        into.largest[place] = largest;
        into.total[place] = match weighing {
            Weighing::Exact => s.vectorize(Exponentials { scores, largest }),
            Weighing::Rounded => {
                let weights = &mut rounded[seen.start * half..seen.end * half];
                s.vectorize(RoundedExponentials { scores, weights, largest })
            }
            Weighing::ByStrip => {
                let weights = &mut rounded[seen.start * half..seen.end * half];
                s.vectorize(MixedExponentials { scores, weights, strips: strips_seen, largest })
            }
        };
    } else {
        scores.fill(0.0);
        if S::Pairs::EXIST {
            rounded[seen.start * half..seen.end * half].fill(0);
        }
    }
    for unseen in [block_seen.start..seen.start, seen.end..block_seen.end] {
        exact[unseen.start * LANES..unseen.end * LANES].fill(0.0);
        if S::Pairs::EXIST {
            rounded[unseen.start * half..unseen.end * half].fill(0);
        }
    }
}

/// Copies masked scores of resident lanes to their tokens of a tapped row that starts at `row_start`.
fn copy_to_tap(scores: &[f32], strips: &[Strip], tap: &DisjointMut<'_, f32>, row_start: usize) {
    for (scores, strip) in scores.as_chunks::<LANES>().0.iter().zip(strips) {
        let start = row_start + strip.first_token;
        // SAFETY: this row and these tokens belong to one item.
        let tokens = unsafe { tap.part(start..start + strip.resident.count_ones() as usize) };
        match tokens.as_mut_array::<LANES>() {
            Some(tokens) => *tokens = *scores,
            None => {
                let resident = resident_lanes(scores, strip.resident);
                tokens.iter_mut().zip(resident).for_each(|(token, score)| *token = score);
            }
        }
    }
}

/// The resident lanes, in ascending order.
fn resident_lanes(lanes: &[f32; LANES], resident: u16) -> impl Iterator<Item = f32> {
    (0..LANES).filter(move |lane| resident >> lane & 1 == 1).map(|lane| lanes[lane])
}

/// Adds the probabilities of all rows of a span, in ascending order, to the column sums of a tile's tokens.
pub(super) struct SumColumns<'a> {
    pub(super) call: &'a Call<'a>,
    /// What [`finish`] wrote.
    pub(super) statistics: &'a [f32],
    pub(super) item: &'a ColumnItem,
    pub(super) scratch: &'a mut Scratch,
}

/// A tile of one KV head of a span with column sums or maxima.
#[derive(Clone, Debug)]
pub(super) struct ColumnItem {
    /// All blocks of the span and KV head, as a range of indices.
    pub(super) blocks: Range<usize>,
    pub(super) tile: u64,
}

impl Kernel for SumColumns<'_> {
    type Output = ();
    const USES_PAIRS: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let SumColumns { call, statistics, item, scratch } = self;
        let blocks = &call.blocks[item.blocks.clone()];
        let mut reader = reader(call, blocks, Parts::KeysOnly, item.tile);
        let strips = reader.read(s, item.tile, &mut scratch.strips);
        for block in blocks.iter().filter(|block| block.tiles.contains(&item.tile)) {
            let rows = Rows::new(call, block);
            let tiles = tiles_for::<S>(call.isa, rows.num_rows);
            scratch.block = None;
            rows.load_queries(s, &mut scratch.queries, &mut scratch.coded);
            let CodedScratch { queries: coded_queries, keys, .. } = &mut scratch.coded;
            let operands = ScoreOperands::new(rows, tiles.as_ref(), strips, &scratch.queries, coded_queries, keys);
            for band in bands::<S>(rows.num_rows) {
                let scores = &mut scratch.weights.exact;
                scores.reserve(band.len() * SCORE_STRIDE);
                let blocks = register_blocks::<S>(rows, &band, strips);
                score_band(s, (&blocks, band.start), strips, operands, scores);
                for (row, scores) in band.zip(scores.chunks_exact_mut(SCORE_STRIDE)) {
                    add_probabilities(s, (rows, row), statistics, strips, scores);
                }
            }
        }
    }
}

/// Adds one row's probabilities of one tile to the column sums.
fn add_probabilities<S: Simd>(
    s: S,
    (rows, row): (Rows<'_>, usize),
    statistics: &[f32],
    strips: &[Strip],
    scores: &mut [f32],
) {
    let TapWork::ColumnSums { out } = &rows.span.tap else { return };
    let [largest, total] = statistics[rows.statistics(row)] else { return };
    let sight = rows.sight(row);
    let seen = sight.strips(strips);
    let strips = &strips[seen.clone()];
    let scores = &mut scores[seen.start * LANES..seen.end * LANES];
    if s.vectorize(Mask { scores, strips, sight }).is_none() {
        return;
    }
    s.vectorize(Probabilities { scores, largest, total });
    let row_start = row % rows.group_size * rows.span.segments[rows.block.kv_head].num_tokens();
    for (p, strip) in scores.as_chunks::<LANES>().0.iter().zip(strips) {
        let start = row_start + strip.first_token;
        let place = start..start + strip.resident.count_ones() as usize;
        // SAFETY: the tokens of a tile belong to one item.
        let sums = unsafe { out[rows.block.kv_head].part(place) };
        match sums.as_mut_array::<LANES>() {
            Some(sums) => sums.iter_mut().zip(p).for_each(|(sum, p)| *sum += p),
            None => sums.iter_mut().zip(resident_lanes(p, strip.resident)).for_each(|(sum, p)| *sum += p),
        }
    }
}

/// The column items of a call: each tile of each KV head of each span with column sums, and with maxima each tile that has
/// some of its columns.
pub(super) fn column_items(call: &Call<'_>) -> Vec<ColumnItem> {
    let mut items = Vec::new();
    let mut start = 0;
    for blocks in call.blocks.chunk_by(|a, b| (a.span, a.kv_head) == (b.span, b.kv_head)) {
        let range = start..start + blocks.len();
        start = range.end;
        let first = blocks.iter().map(|block| block.tiles.start).min().unwrap_or(0);
        let end = blocks.iter().map(|block| block.tiles.end).max().unwrap_or(0);
        let tiles = match &call.spans[blocks[0].span].tap {
            TapWork::None | TapWork::Rows { .. } => continue,
            TapWork::ColumnSums { .. } => first..end,
            TapWork::ColumnMaxima(maxima) => {
                let columns = &maxima[blocks[0].kv_head].columns;
                first.max(columns.start / TILE)..end.min(columns.end.div_ceil(TILE))
            }
        };
        items.extend(tiles.map(|tile| ColumnItem { blocks: range.clone(), tile }));
    }
    items
}

const _: () = assert!(TILE as usize == SCORE_STRIDE && (TILE as usize).is_multiple_of(LANES));
