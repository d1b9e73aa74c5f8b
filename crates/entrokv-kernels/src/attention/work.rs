//! How a call is cut into pieces that threads can claim.
//!
//! A **block** is some consecutive queries of a span with all heads of one KV head: what shares every load of a key or
//! value. A block whose tiles are much more than a thread's share (decoding: one query, thousands of keys) is cut into
//! **items** of some tiles each, whose results per tile are kept and merged by whoever finishes the last one, in the order in
//! which a single item would have merged them: the cut never shows in the bits.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::coded::KeyCodes;
use super::maxima::MaximaWork;
use super::{AttentionParams, AttentionSpan, SegmentList, TILE, Tap};
use crate::codes::KeyConstants;
use crate::disjoint::DisjointMut;
use crate::simd::LANES;

/// Rows (queries times heads) of a block: enough to make up for the copy of a tile, few enough for everything a thread
/// touches (queries, sums, the tile) to stay in 1 MiB of second-level cache.
fn max_block_rows(head_dim: usize) -> usize {
    (24_576 / head_dim).clamp(96, 384)
}

/// Items per thread that a call is cut into if it has fewer blocks: the more, the less a late thread is waited for.
///
/// Results of a cut block's tiles are kept, a few kilobytes for the one query of a step of decoding, a hundred for a
/// block of a prompt, which is cut less.
fn items_per_thread(spans: &[SpanWork<'_>]) -> usize {
    if spans.iter().all(|span| span.num_rows == 1) { 12 } else { 6 }
}

/// A span, taken apart into what is read and what is written.
pub(super) struct SpanWork<'a> {
    pub(super) first_row: usize,
    pub(super) num_rows: usize,
    pub(super) first_position: u64,
    pub(super) memory: &'a [u8],
    /// Per KV head.
    pub(super) segments: &'a [SegmentList],
    /// Per KV head, or empty.
    pub(super) constants: &'a [Option<&'a KeyConstants>],
    pub(super) tap: TapWork<'a>,
}

/// Where a span's tap goes, per KV head.
pub(super) enum TapWork<'a> {
    None,
    Rows {
        from_row: usize,
        out: Vec<DisjointMut<'a, f32>>,
    },
    ColumnSums {
        out: Vec<DisjointMut<'a, f32>>,
    },
    /// Per KV head.
    ColumnMaxima(Vec<MaximaWork<'a>>),
}

impl<'a> SpanWork<'a> {
    /// Takes `span` apart and sizes its tap.
    pub(super) fn new(params: &AttentionParams, span: &'a mut AttentionSpan<'_>) -> Self {
        let AttentionSpan { first_row, num_rows, first_position, memory, segments, constants, tap } = span;
        let num_tokens = segments.iter().map(SegmentList::num_tokens);
        let tap = match tap {
            Tap::None => TapWork::None,
            Tap::Rows { from_row, out } => {
                let num_tapped = num_rows.saturating_sub(*from_row) * params.group_size();
                out.resize_with(params.num_kv_heads, Vec::new);
                // Whoever attends a block fills its rows: what they hold here is nobody's business.
                for (out, num_tokens) in out.iter_mut().zip(num_tokens) {
                    out.resize(num_tapped * num_tokens, 0.0);
                }
                TapWork::Rows { from_row: *from_row, out: out.iter_mut().map(|out| DisjointMut::new(out)).collect() }
            }
            Tap::ColumnSums { out } => {
                let sizes = num_tokens.map(|n| n * params.group_size());
                assert!(
                    out.iter().map(Vec::len).eq(sizes),
                    "column sums must be [group_size, tokens] for each KV head"
                );
                TapWork::ColumnSums { out: out.iter_mut().map(|out| DisjointMut::new(out)).collect() }
            }
            Tap::ColumnMaxima(maxima) => TapWork::ColumnMaxima(MaximaWork::each(maxima, segments, params.group_size())),
        };
        SpanWork {
            first_row: *first_row,
            num_rows: *num_rows,
            first_position: u64::from(*first_position),
            memory,
            segments,
            constants,
            tap,
        }
    }
}

/// Consecutive queries of one span and the heads of one KV head.
#[derive(Clone, Debug)]
pub(super) struct Block {
    pub(super) span: usize,
    pub(super) kv_head: usize,
    /// Within the span.
    pub(super) first_query: usize,
    pub(super) num_queries: usize,
    /// The tiles that may hold something its queries see.
    pub(super) tiles: Range<u64>,
    /// What the list's values ask the sums to be.
    pub(super) sums: Sums,
    /// What the list's keys ask the queries to be.
    pub(super) key_codes: KeyCodes,
}

/// Which weighted sums of values a block keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sums {
    /// One: no value of the list is stored rotated.
    Plain,
    /// Those of rotated values apart.
    PlainAndRotated,
}

impl Block {
    pub(super) fn num_rows(&self, params: &AttentionParams) -> usize {
        self.num_queries * params.group_size()
    }
}

/// Some tiles of a block: what a thread claims.
#[derive(Clone, Debug)]
pub(super) struct Item {
    pub(super) block: usize,
    pub(super) tiles: Range<u64>,
    /// Where each tile's result is kept, if the block is cut.
    pub(super) kept: Option<Range<usize>>,
    /// Which of the cut blocks it belongs to, if its block is cut.
    pub(super) cut: Option<usize>,
}

/// A block cut into items.
#[derive(Debug)]
pub(super) struct Cut {
    pub(super) block: usize,
    /// The place of the results of all its tiles.
    pub(super) kept: Range<usize>,
    /// Number of items that are not finished.
    unfinished: AtomicUsize,
}

/// What is left of a cut block when one of its items is finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unfinished {
    /// Items that another thread will finish.
    Some,
    /// Nothing: all results are there to be read.
    None,
}

impl Cut {
    /// Counts an item as finished. What the items' threads wrote before is seen by the one that is told `None`.
    pub(super) fn finish_item(&self) -> Unfinished {
        match self.unfinished.fetch_sub(1, Ordering::AcqRel) {
            1 => Unfinished::None,
            _ => Unfinished::Some,
        }
    }
}

/// All pieces of a call.
pub(super) struct Work {
    pub(super) blocks: Vec<Block>,
    /// Those with most to do first.
    pub(super) items: Vec<Item>,
    /// The blocks that are cut.
    pub(super) cut: Vec<Cut>,
    /// Elements of all kept results.
    pub(super) kept_len: usize,
}

impl Work {
    /// Cuts the spans for `num_threads` threads.
    pub(super) fn new(params: &AttentionParams, spans: &[SpanWork<'_>], num_threads: usize) -> Work {
        let r = params.group_size();
        let queries_per_block = (max_block_rows(params.head_dim) / r).max(1);
        let mut blocks = Vec::new();
        for (index, span) in spans.iter().enumerate() {
            for (kv_head, list) in span.segments.iter().enumerate() {
                let key_codes = list.key_codes();
                let sums = if list.has_rotated_values() { Sums::PlainAndRotated } else { Sums::Plain };
                for first_query in (0..span.num_rows).step_by(queries_per_block) {
                    let num_queries = queries_per_block.min(span.num_rows - first_query);
                    let position = span.first_position + first_query as u64;
                    let tiles = visible_tiles(params, list, position..position + num_queries as u64);
                    blocks.push(Block { span: index, kv_head, first_query, num_queries, tiles, sums, key_codes });
                }
            }
        }
        let cost = |block: &Block, num_tiles: u64| num_tiles as usize * block.num_rows(params);
        let total: usize = blocks.iter().map(|block| cost(block, tiles_of(&block.tiles))).sum();
        let share = if num_threads == 1 { total } else { total.div_ceil(items_per_thread(spans) * num_threads) };
        let mut work = Work { blocks: Vec::new(), items: Vec::new(), cut: Vec::new(), kept_len: 0 };
        for (index, block) in blocks.iter().enumerate() {
            let num_tiles = tiles_of(&block.tiles);
            let num_items = (cost(block, num_tiles).div_ceil(share.max(1)) as u64).clamp(1, num_tiles.max(1));
            if num_items == 1 {
                work.items.push(Item { block: index, tiles: block.tiles.clone(), kept: None, cut: None });
                continue;
            }
            let first_kept = work.kept_len;
            let tile_len = kept_tile_len(params, block);
            for i in 0..num_items {
                let tiles =
                    block.tiles.start + num_tiles * i / num_items..block.tiles.start + num_tiles * (i + 1) / num_items;
                let kept = work.kept_len..work.kept_len + tiles_of(&tiles) as usize * tile_len;
                work.kept_len = kept.end;
                work.items.push(Item { block: index, tiles, kept: Some(kept), cut: Some(work.cut.len()) });
            }
            let unfinished = AtomicUsize::new(num_items as usize);
            work.cut.push(Cut { block: index, kept: first_kept..work.kept_len, unfinished });
        }
        // Pieces of cut blocks are alike, and stay where they are: a thread reads on where it has asked memory for more.
        let order =
            |item: &Item| if item.cut.is_some() { share } else { cost(&blocks[item.block], tiles_of(&item.tiles)) };
        work.items.sort_by_key(|item| std::cmp::Reverse(order(item)));
        work.blocks = blocks;
        work
    }
}

/// Elements that the result of one tile of a block takes: largest scores, totals, sums, rotated sums.
pub(super) fn kept_tile_len(params: &AttentionParams, block: &Block) -> usize {
    kept_len(params, block, block.num_rows(params))
}

/// Elements that results of `num_rows` rows of a block take.
pub(super) fn kept_len(params: &AttentionParams, block: &Block, num_rows: usize) -> usize {
    let sums = num_rows * params.head_dim.next_multiple_of(LANES);
    2 * num_rows.next_multiple_of(LANES)
        + match block.sums {
            Sums::Plain => sums,
            Sums::PlainAndRotated => 2 * sums,
        }
}

fn tiles_of(tiles: &Range<u64>) -> u64 {
    tiles.end - tiles.start
}

/// Tiles with positions that both the queries at `positions` can see and the list reaches.
fn visible_tiles(params: &AttentionParams, list: &SegmentList, positions: Range<u64>) -> Range<u64> {
    let (Some(first), Some(last)) = (list.segments().first(), list.segments().last()) else { return 0..0 };
    let start = params.sight(positions.start).oldest.max(u64::from(first.position)) / TILE;
    let end = positions.end.min(last.end()).div_ceil(TILE);
    start..end.max(start)
}
