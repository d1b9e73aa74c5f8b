//! One block of queries against its tiles: the driver of the kernels, on one thread.

use std::ops::Range;

use super::aligned::Aligned;
use super::coded::{
    AddValues as AddCodedValues, CodedQueries, LoadQueries, MAX_DIRECT_ROWS, RotateBack, RowSums, ScoreStrips,
    UnpackStrips, Weights,
};
use super::product::{SCORE_STRIDE, add_values, columns_per_block, rows_per_block, scores};
use super::queries::Queries;
use super::softmax::{Exponentials, Mask, Merge, Normalise, Partial, Probabilities, Sight};
use super::strip::{List, Parts, Strip, StripBuffers, TileReader};
use super::work::{Block, Item, SpanWork, Sums, TapWork, kept_tile_len};
use super::{AttentionParams, TILE};
use crate::codes::packing::Part;
use crate::codes::rotation::MAX_LEN;
use crate::disjoint::DisjointMut;
use crate::isa::Isa;
use crate::simd::integers::dispatch_integers;
use crate::simd::{Kernel, LANES, Simd};

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
    /// Largest score and total of every row, `[rows, num_heads, 2]`, empty if no span wants column sums; as `out`.
    pub(super) statistics: DisjointMut<'a, f32>,
}

/// A thread's memory.
#[derive(Default)]
pub(super) struct Scratch {
    queries: Queries,
    scores: Aligned,
    tile: Aligned,
    merged: Aligned,
    strips: StripBuffers,
    coded: CodedScratch,
}

/// What is needed for lists with codes only.
#[derive(Default)]
struct CodedScratch {
    queries: CodedQueries,
    weights: Weights,
    /// A run of strips' keys as bytes.
    keys: Vec<u8>,
    /// A tile's values as bytes.
    values: Vec<u8>,
}

/// The rows of a block: query after query, head after head.
#[derive(Clone, Copy)]
struct Rows<'a> {
    call: &'a Call<'a>,
    block: &'a Block,
    span: &'a SpanWork<'a>,
    num_rows: usize,
    padded_dim: usize,
}

impl<'a> Rows<'a> {
    fn new(call: &'a Call<'a>, block: &'a Block) -> Self {
        let padded_dim = call.params.head_dim.next_multiple_of(LANES);
        Rows { call, block, span: &call.spans[block.span], num_rows: block.num_rows(call.params), padded_dim }
    }

    /// The row of the span that `row` of the block belongs to.
    fn query(&self, row: usize) -> usize {
        self.block.first_query + row / self.call.params.group_size()
    }

    fn sight(&self, row: usize) -> Sight {
        self.call.params.sight(self.span.first_position + self.query(row) as u64)
    }

    /// The elements of `row` in `[rows, num_heads * head_dim]`.
    fn elements(&self, row: usize) -> Range<usize> {
        let params = self.call.params;
        let head = self.block.kv_head * params.group_size() + row % params.group_size();
        let start = ((self.span.first_row + self.query(row)) * params.num_heads + head) * params.head_dim;
        start..start + params.head_dim
    }

    /// The largest score and total of `row` in `[rows, num_heads, 2]`.
    fn statistics(&self, row: usize) -> Range<usize> {
        let start = self.elements(row).start / self.call.params.head_dim * 2;
        start..start + 2
    }

    /// The block's queries, row after row.
    fn load_queries(&self, queries: &mut Queries, coded: &mut CodedScratch) {
        let rows = (0..self.num_rows).map(|row| &self.call.queries[self.elements(row)]);
        queries.load(self.call.params, rows);
        let codes = self.block.key_codes;
        if !codes.is_empty() {
            let head_dim = self.call.params.head_dim;
            let constants = self.span.constants.get(self.block.kv_head).copied().flatten();
            let queries = &queries.scaled[..self.num_rows * head_dim];
            let out = &mut coded.queries;
            dispatch_integers(self.call.isa, LoadQueries { queries, head_dim, codes, constants, out });
        }
    }

    /// Room for the block's results in `memory` of [`kept_tile_len`] elements.
    fn partial<'m>(&self, memory: &'m mut [f32]) -> Partial<'m> {
        let (largest, rest) = memory.split_at_mut(self.num_rows.next_multiple_of(LANES));
        let (total, rest) = rest.split_at_mut(self.num_rows.next_multiple_of(LANES));
        let (sums, rest) = rest.split_at_mut(self.num_rows * self.padded_dim);
        let rotated = match self.block.sums {
            Sums::Plain => 0,
            Sums::PlainAndRotated => sums.len(),
        };
        Partial {
            largest: &mut largest[..self.num_rows],
            total: &mut total[..self.num_rows],
            sums,
            rotated: &mut rest[..rotated],
        }
    }

    /// Where the scores of `row` go in the tap, and the number of tokens there; `None` if the row is not tapped.
    fn tapped(&self, row: usize) -> Option<(&'a DisjointMut<'a, f32>, Range<usize>)> {
        let TapWork::Rows { from_row, out } = &self.span.tap else { return None };
        let tapped_row = self.query(row).checked_sub(*from_row)?;
        let group_size = self.call.params.group_size();
        let num_tokens = self.span.num_tokens[self.block.kv_head];
        let start = (tapped_row * group_size + row % group_size) * num_tokens;
        Some((&out[self.block.kv_head], start..start + num_tokens))
    }
}

/// Reads the `tiles` that the queries of `blocks`, consecutive ones of one span and KV head, see.
fn reader<'a>(call: &'a Call<'a>, blocks: &'a [Block], parts: Parts, tiles: Range<u64>) -> TileReader<'a> {
    let (first, last) = (Rows::new(call, &blocks[0]), Rows::new(call, &blocks[blocks.len() - 1]));
    let sight = Sight { oldest: first.sight(0).oldest, newest: last.sight(last.num_rows - 1).newest };
    let num_rows = blocks.iter().map(|block| block.num_rows(call.params)).sum();
    let kv_head = first.block.kv_head;
    let first_tokens = first.span.first_tokens.get(kv_head).map_or(&[][..], Vec::as_slice);
    let list = List { segments: &first.span.segments[kv_head], first_tokens };
    TileReader::new(call.params, list, parts, (num_rows, sight), tiles)
}

/// Attends an item's queries to its tiles. A whole block is finished; of a cut one every tile's result is kept.
pub(super) struct Attend<'a> {
    pub(super) call: &'a Call<'a>,
    pub(super) item: &'a Item,
    pub(super) scratch: &'a mut Scratch,
}

impl Kernel for Attend<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Attend { call, item, scratch } = self;
        let rows = Rows::new(call, &call.blocks[item.block]);
        let tile_len = kept_tile_len(call.params, rows.block);
        rows.load_queries(&mut scratch.queries, &mut scratch.coded);
        scratch.scores.reserve(rows.num_rows * SCORE_STRIDE);
        let block = std::slice::from_ref(rows.block);
        let mut reader = reader(call, block, Parts::KeysAndValues, item.tiles.clone());

        if let Some(kept) = &item.kept {
            // SAFETY: the ranges of items are disjoint.
            let kept = unsafe { call.kept.part(kept.clone()) };
            for (tile, kept) in item.tiles.clone().zip(kept.chunks_exact_mut(tile_len)) {
                let strips = reader.read(s, tile, &mut scratch.strips);
                let into = &mut rows.partial(kept);
                attend_tile(s, rows, strips, (&scratch.queries, &mut scratch.coded), &mut scratch.scores, into);
            }
            return;
        }
        scratch.tile.reserve(tile_len);
        scratch.merged.reserve(tile_len);
        let mut merged = rows.partial(&mut scratch.merged);
        merged.total.fill(0.0);
        for tile in item.tiles.clone() {
            let strips = reader.read(s, tile, &mut scratch.strips);
            let into = &mut rows.partial(&mut scratch.tile);
            attend_tile(s, rows, strips, (&scratch.queries, &mut scratch.coded), &mut scratch.scores, into);
            s.vectorize(Merge { into: &mut merged, tile: into });
        }
        finish(s, rows, &merged);
    }
}

/// Merges the kept results of a cut block and finishes it.
pub(super) struct MergeKept<'a> {
    pub(super) call: &'a Call<'a>,
    pub(super) block: usize,
    pub(super) kept: Range<usize>,
    pub(super) scratch: &'a mut Scratch,
}

impl Kernel for MergeKept<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let rows = Rows::new(self.call, &self.call.blocks[self.block]);
        let tile_len = kept_tile_len(self.call.params, rows.block);
        self.scratch.merged.reserve(tile_len);
        let mut merged = rows.partial(&mut self.scratch.merged);
        merged.total.fill(0.0);
        // SAFETY: the items of this block are done, and one thread merges a block.
        let kept = unsafe { self.call.kept.part(self.kept) };
        for tile in kept.chunks_exact_mut(tile_len) {
            let tile = &rows.partial(tile);
            s.vectorize(Merge { into: &mut merged, tile });
        }
        finish(s, rows, &merged);
    }
}

/// Writes a block's rows of the output, their probabilities where tapped, and their statistics.
fn finish<S: Simd>(s: S, rows: Rows<'_>, merged: &Partial<'_>) {
    let mut both: RowSums = [[0.0; LANES]; MAX_LEN / LANES];
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

/// The scores of all rows and strips that some row of their register block sees; others stay what they were.
fn score_tile<S: Simd>(
    s: S,
    rows: Rows<'_>,
    strips: &[Strip],
    (queries, coded): (&Queries, &mut CodedScratch),
    out: &mut [f32],
) {
    let d = rows.call.params.head_dim;
    let rows_per_block = rows_per_block::<S>(rows.num_rows);
    // A panel of strips is read by all rows while it is in the first-level cache.
    for panel in panels(strips, columns_per_block::<S>(rows_per_block)) {
        let CodedScratch { queries: coded_queries, keys: unpacked, .. } = &mut *coded;
        let format = strips[panel.start].key_format;
        let unpacked = (rows.num_rows > MAX_DIRECT_ROWS && format.is_rotated())
            .then(|| unpack(rows.call.isa, Part::Keys, d, &strips[panel.clone()], unpacked));
        for first in (0..rows.num_rows).step_by(rows_per_block) {
            let num_rows = rows_per_block.min(rows.num_rows - first);
            let seen = block_sight(rows, first, num_rows, strips);
            let columns = panel.start.max(seen.start)..panel.end.min(seen.end);
            if columns.is_empty() {
                continue;
            }
            let out = &mut out[first * SCORE_STRIDE + columns.start * LANES..];
            if format.is_coded() {
                let scores = ScoreStrips {
                    queries: coded_queries,
                    first_row: first,
                    num_rows,
                    head_dim: d,
                    strips: &strips[columns.clone()],
                    unpacked: unpacked.map(|bytes| &bytes[(columns.start - panel.start) * d * LANES..]),
                    out,
                };
                dispatch_integers(rows.call.isa, scores);
                continue;
            }
            let queries = &queries.scaled[first * d..(first + num_rows) * d];
            // SAFETY: strips fresh from the reader, with `head_dim` as here.
            unsafe { scores(s, queries, d, &strips[columns], out) };
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

/// The strips that some of `num_rows` rows from `first` on sees: later rows see later positions.
fn block_sight(rows: Rows<'_>, first: usize, num_rows: usize, strips: &[Strip]) -> Range<usize> {
    let seen = Sight { oldest: rows.sight(first).oldest, newest: rows.sight(first + num_rows - 1).newest };
    seen.strips(strips)
}

/// One tile: scores, exponentials, weighted values.
fn attend_tile<S: Simd>(
    s: S,
    rows: Rows<'_>,
    strips: &[Strip],
    (queries, coded): (&Queries, &mut CodedScratch),
    weights: &mut [f32],
    into: &mut Partial<'_>,
) {
    into.total.fill(0.0);
    if strips.is_empty() {
        return;
    }
    score_tile(s, rows, strips, (queries, coded), weights);
    let head_dim = rows.call.params.head_dim;
    let has_coded_values = strips.iter().any(|strip| strip.value_format.is_coded());
    let CodedScratch { weights: integer_weights, values: unpacked, .. } = coded;
    let unpacked = (rows.num_rows > MAX_DIRECT_ROWS && has_coded_values)
        .then(|| unpack(rows.call.isa, Part::Values, head_dim, strips, unpacked));

    let rows_per_block = rows_per_block::<S>(rows.num_rows);
    for first in (0..rows.num_rows).step_by(rows_per_block) {
        let num_rows = rows_per_block.min(rows.num_rows - first);
        let block_seen = block_sight(rows, first, num_rows, strips);
        for row in first..first + num_rows {
            let sight = rows.sight(row);
            let seen = sight.strips(strips);
            let weights = &mut weights[row * SCORE_STRIDE..][..strips.len() * LANES];
            let scores = &mut weights[seen.start * LANES..seen.end * LANES];
            let largest = s.vectorize(Mask { scores, strips: &strips[seen.clone()], sight });
            if let Some((tap, place)) = rows.tapped(row) {
                copy_to_tap(scores, &strips[seen.clone()], tap, place.start);
            }
            if let Some(largest) = largest {
                into.largest[row] = largest;
                into.total[row] = s.vectorize(Exponentials { scores, largest });
            } else {
                scores.fill(0.0);
            }
            // What the row does not see but its register block does.
            weights[block_seen.start * LANES..seen.start * LANES].fill(0.0);
            weights[seen.end * LANES..block_seen.end * LANES].fill(0.0);
        }
        let sums = &mut into.sums[first * rows.padded_dim..(first + num_rows) * rows.padded_dim];
        sums.fill(0.0);
        if let Some(rotated) = into.rotated.get_mut(first * rows.padded_dim..(first + num_rows) * rows.padded_dim) {
            rotated.fill(0.0);
        }
        let strips = &strips[block_seen.clone()];
        let mut column = first * SCORE_STRIDE + block_seen.start * LANES;
        for run in strips.chunk_by(|a, b| a.value_format == b.value_format) {
            if !run[0].value_format.is_coded() {
                // SAFETY: strips fresh from the reader, which gives values their stride.
                unsafe { add_values(s, &weights[column..], run, sums) };
            }
            column += run.len() * LANES;
        }
        if has_coded_values {
            let rows_of_sums = first * rows.padded_dim..(first + num_rows) * rows.padded_dim;
            let rotated = into.rotated.get_mut(rows_of_sums).unwrap_or_default();
            let values = AddCodedValues {
                exponentials: &weights[first * SCORE_STRIDE + block_seen.start * LANES..],
                num_rows,
                head_dim,
                strips,
                unpacked: unpacked.map(|bytes| &bytes[block_seen.start * head_dim * LANES..]),
                weights: integer_weights,
                sums,
                rotated,
            };
            dispatch_integers(rows.call.isa, values);
        }
    }
}

/// The bytes of one part of strips with codes, in `buffer`.
fn unpack<'b>(isa: Isa, part: Part, head_dim: usize, strips: &[Strip], buffer: &'b mut Vec<u8>) -> &'b [u8] {
    buffer.resize(strips.len() * head_dim * LANES, 0);
    dispatch_integers(isa, UnpackStrips { part, head_dim, strips, out: buffer });
    buffer
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

/// A tile of one KV head of a span with column sums.
#[derive(Clone, Debug)]
pub(super) struct ColumnItem {
    /// All blocks of the span and KV head, as a range of indices.
    pub(super) blocks: Range<usize>,
    pub(super) tile: u64,
}

impl Kernel for SumColumns<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let SumColumns { call, statistics, item, scratch } = self;
        let blocks = &call.blocks[item.blocks.clone()];
        let mut reader = reader(call, blocks, Parts::KeysOnly, item.tile..item.tile + 1);
        let strips = reader.read(s, item.tile, &mut scratch.strips);
        for block in blocks.iter().filter(|block| block.tiles.contains(&item.tile)) {
            let rows = Rows::new(call, block);
            rows.load_queries(&mut scratch.queries, &mut scratch.coded);
            scratch.scores.reserve(rows.num_rows * SCORE_STRIDE);
            score_tile(s, rows, strips, (&scratch.queries, &mut scratch.coded), &mut scratch.scores);
            for (row, scores) in scratch.scores.chunks_exact_mut(SCORE_STRIDE).take(rows.num_rows).enumerate() {
                add_probabilities(s, (rows, row), statistics, strips, scores);
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
    let group_size = rows.call.params.group_size();
    let row_start = row % group_size * rows.span.num_tokens[rows.block.kv_head];
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

/// The column items of a call: each tile of each KV head of each span with column sums.
pub(super) fn column_items(call: &Call<'_>) -> Vec<ColumnItem> {
    let mut items = Vec::new();
    let mut start = 0;
    for blocks in call.blocks.chunk_by(|a, b| (a.span, a.kv_head) == (b.span, b.kv_head)) {
        let range = start..start + blocks.len();
        start = range.end;
        if !matches!(call.spans[blocks[0].span].tap, TapWork::ColumnSums { .. }) {
            continue;
        }
        let first = blocks.iter().map(|block| block.tiles.start).min().unwrap_or(0);
        let end = blocks.iter().map(|block| block.tiles.end).max().unwrap_or(0);
        items.extend((first..end).map(|tile| ColumnItem { blocks: range.clone(), tile }));
    }
    items
}

const _: () = assert!(TILE as usize == SCORE_STRIDE && (TILE as usize).is_multiple_of(LANES));
