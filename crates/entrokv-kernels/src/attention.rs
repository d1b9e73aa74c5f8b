//! Attention of queries over a list of pages.
//!
//! A query at position `p` of head `h` attends to the keys of KV head `g = h / group_size` that are resident and visible,
//! `p - window < position <= p`:
//! `o = sum_j softmax_j(scale <q, k_j>) v_j` (Vaswani et al. 2017, equation 1), computed by an online softmax in f32
//! (Milakov and Gimelshein 2018) over **tiles of 384 absolute positions**.
//!
//! Invariants, each with a test that bears its name:
//! 1. *Same bits whoever computes.* A tile's largest score, sum of exponentials and weighted sum of values are computed in
//!    an order that depends on absolute positions only, and tiles are merged in ascending order. Threads, chunks of a
//!    prompt, the batch and the frames decide only who computes what, from where.
//! 2. *Evicted is masked.* A page that is not in the list gives the bits of a page that is, with its scores set to minus
//!    infinity: skipped elements would only have added zeros. A tile with nothing to see is no tile.
//! 3. *Taps change nothing.* The output has the same bits with and without them.
//!
//! Arithmetic: scores, exponentials and sums are f32. On the one instruction set with dot products of bf16, queries (times
//! the scale), keys, weights and values of plain pages are rounded to bf16 before they are multiplied, in a prompt and in a
//! decode step alike; the largest score, the exponentials' totals and the taps come from what was not rounded.
//!
//! Non-finite numbers: a NaN or plus-infinite score makes its row NaN. A non-finite *value* may also reach rows that do not
//! see its token but are computed beside it (0 times infinity is NaN).

mod aligned;
mod block;
mod coded;
mod maxima;
#[cfg(test)]
mod naive;
mod pack;
mod product;
mod queries;
mod segment_list;
mod softmax;
mod strip;
#[cfg(test)]
mod tests;
mod work;

pub use segment_list::{Segment, SegmentList};

use std::ops::Range;

use block::{Attend, Call, MergeKept, Scratch, SumColumns, column_items};
use maxima::{RaiseColumns, TotalRows};
use softmax::Sight;
use work::{Block, SpanWork, TapWork, Unfinished, Work};

use crate::codes::KeyConstants;
use crate::compute::Compute;
use crate::disjoint::DisjointMut;
use crate::page::PageLayout;
use crate::simd::dispatch;

/// Positions of a tile: many, for what is done once a row and tile weighs most where pages are evicted; few enough for a band
/// of rows' scores to stay in the first-level cache, and for short contexts to have tiles for several threads.
const TILE: u64 = 384;

/// What all spans of a call have in common.
#[derive(Clone, Copy, Debug)]
pub struct AttentionParams {
    /// Query heads.
    pub num_heads: usize,
    /// KV heads; query head `h` reads KV head `h / group_size`, `group_size = num_heads / num_kv_heads`.
    pub num_kv_heads: usize,
    /// Elements of a query, a key, a value.
    pub head_dim: usize,
    /// Token slots of a page.
    pub page_size: usize,
    /// What scores are multiplied by, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Sliding window: a query at `p` sees keys at `position > p - window`. `None`: all up to `p`.
    pub window: Option<u32>,
    /// How scores of plain keys are computed where attention is rounded to bf16.
    pub scores: ScoreArithmetic,
}

/// How scores of plain keys are computed on an instruction set that rounds attention to bf16; elsewhere they are f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ScoreArithmetic {
    /// From rounded queries and keys.
    #[default]
    Rounded,
    /// In f32, at half the speed: for keys with elements so large that rounding them would move the scores. Values and
    /// weights are rounded all the same.
    F32,
}

/// Consecutive rows of the batch that belong to one sequence.
#[derive(Debug)]
pub struct AttentionSpan<'a> {
    /// The first row in `q` and `out`.
    pub first_row: usize,
    /// Number of rows.
    pub num_rows: usize,
    /// Absolute position of the first row; row `i` is at `first_position + i`.
    pub first_position: u32,
    /// Where frames are, each filled as by `PageLayout::write_token` or `recode`.
    pub memory: &'a [u8],
    /// Per KV head, what is resident; as long as each head likes.
    pub segments: &'a [SegmentList],
    /// Per KV head, what rotated codes among the keys of its list are relative to; empty if there are none anywhere.
    pub constants: Vec<Option<&'a KeyConstants>>,
    /// What the caller wants to see of the attention.
    pub tap: Tap,
}

/// What a caller wants to see of a span's attention.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Tap {
    /// Nothing.
    #[default]
    None,
    /// The softmax probabilities of the span's rows from `from_row` on.
    Rows {
        /// The first tapped row, counted within the span.
        from_row: usize,
        /// Filled by the kernel: per KV head `[tapped rows, group_size, tokens in segment order]`, 0 for tokens the row
        /// does not see. What was in it is lost, its memory is used again.
        out: Vec<Vec<f32>>,
    },
    /// The sum of the softmax probabilities over the span's rows.
    ColumnSums {
        /// Per KV head `[group_size, tokens in segment order]`: every row is added to what is there, in ascending order, so
        /// that a prompt may come in any chunks.
        out: Vec<Vec<f32>>,
    },
    /// The largest softmax probability that any of the span's rows gives a token.
    ColumnMaxima(Maxima),
}

/// The largest of the span's softmax probabilities of some tokens, over rows, each query head for itself. Everything is per KV
/// head.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Maxima {
    /// Positions of the tokens, as segments have them.
    pub columns: Vec<Range<u32>>,
    /// The positions that the softmax runs over, as far as a row sees them; ranges ascend and do not overlap.
    pub among: Vec<Vec<Range<u32>>>,
    /// `[group_size, resident tokens of the columns in segment order]`, natural logarithms: what is there is raised, so that
    /// rows may come in any pieces; begin with minus infinity. NaN for a head with a row that is NaN.
    pub out: Vec<Vec<f32>>,
}

impl AttentionParams {
    /// Query heads that share a KV head.
    pub fn group_size(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    fn layout(&self, segment: &Segment) -> PageLayout {
        let Segment { keys, values, .. } = *segment;
        PageLayout { keys, values, page_size: self.page_size, head_dim: self.head_dim }
    }

    /// What a query at `position` sees.
    fn sight(&self, position: u64) -> Sight {
        let oldest = self.window.map_or(0, |window| (position + 1).saturating_sub(u64::from(window)));
        Sight { oldest, newest: position }
    }
}

/// Paged attention and the memory it works in, kept from call to call: decoding allocates nothing that grows.
#[derive(Default)]
pub struct PagedAttention {
    scratch: Vec<Scratch>,
    /// Results of the tiles of cut blocks.
    kept: Vec<f32>,
    /// Largest score and total of every row, for column sums and maxima.
    statistics: Vec<f32>,
}

/// Attention as [`PagedAttention::run`] computes it, in memory of its own.
pub fn paged_attention(
    compute: &Compute,
    params: &AttentionParams,
    spans: &mut [AttentionSpan<'_>],
    q: &[f32],
    out: &mut [f32],
) {
    PagedAttention::default().run(compute, params, spans, q, out);
}

impl PagedAttention {
    /// Attention of every span's rows: `q` and `out` are `[rows, num_heads * head_dim]`. Rows that see nothing become 0;
    /// rows of no span are left alone.
    ///
    /// # Panics
    /// If shapes contradict each other: head counts, lengths of `q` and `out`, rows outside them or in two spans, lists of pages
    /// of another shape, frames outside the memory, rotated keys without constants, column sums or maxima of another length
    /// than the tokens, a softmax over positions that do not ascend.
    pub fn run(
        &mut self,
        compute: &Compute,
        params: &AttentionParams,
        spans: &mut [AttentionSpan<'_>],
        q: &[f32],
        out: &mut [f32],
    ) {
        check(params, spans, q.len(), out.len());
        let threads = &compute.threads;
        let taps_columns =
            spans.iter().any(|span| matches!(span.tap, Tap::ColumnSums { .. } | Tap::ColumnMaxima { .. }));
        let spans: Vec<SpanWork<'_>> = spans.iter_mut().map(|span| SpanWork::new(params, span)).collect();
        let work = Work::new(params, &spans, threads.num_threads());

        let PagedAttention { scratch, kept, statistics } = self;
        if scratch.len() < threads.num_threads() {
            scratch.resize_with(threads.num_threads(), Scratch::default);
        }
        scratch.iter_mut().for_each(|scratch| scratch.block = None);
        let statistics = room(statistics, if taps_columns { q.len() / params.head_dim * 2 } else { 0 });
        {
            let call = Call {
                isa: compute.isa,
                params,
                spans: &spans,
                blocks: &work.blocks,
                queries: q,
                out: DisjointMut::new(out),
                kept: DisjointMut::new(room(kept, work.kept_len)),
                statistics: DisjointMut::new(statistics),
            };
            threads.for_each_with(scratch, work.items.len(), |scratch, index| {
                let item = &work.items[index];
                dispatch(compute.isa, Attend { call: &call, item, scratch });
                // Who finishes the last item of a cut block merges it, in the order of tiles: no second fork and join.
                if let Some(cut) = item.cut.map(|cut| &work.cut[cut])
                    && cut.finish_item() == Unfinished::None
                {
                    dispatch(compute.isa, MergeKept { call: &call, cut, scratch });
                }
            });
            let has_maxima = |block: &&Block| matches!(spans[block.span].tap, TapWork::ColumnMaxima(_));
            let blocks: Vec<&Block> = work.blocks.iter().filter(has_maxima).collect();
            threads.for_each_with(scratch, blocks.len(), |scratch, index| {
                dispatch(compute.isa, TotalRows { call: &call, block: blocks[index], scratch });
            });
        }
        if taps_columns {
            let call = Call {
                isa: compute.isa,
                params,
                spans: &spans,
                blocks: &work.blocks,
                queries: q,
                out: DisjointMut::new(&mut []),
                kept: DisjointMut::new(&mut []),
                statistics: DisjointMut::new(&mut []),
            };
            let items = column_items(&call);
            threads.for_each_with(scratch, items.len(), |scratch, index| {
                let item = &items[index];
                match spans[work.blocks[item.blocks.start].span].tap {
                    TapWork::ColumnMaxima(_) => {
                        dispatch(compute.isa, RaiseColumns { call: &call, statistics, item, scratch });
                    }
                    _ => dispatch(compute.isa, SumColumns { call: &call, statistics, item, scratch }),
                }
            });
        }
    }
}

impl std::fmt::Debug for PagedAttention {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PagedAttention").finish_non_exhaustive()
    }
}

/// `len` elements of `memory`, which grows if it must; they hold anything.
fn room(memory: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if memory.len() < len {
        memory.resize(len, 0.0);
    }
    &mut memory[..len]
}

/// Panics with what is wrong, so that the kernels' reads and writes are inside what they were given.
fn check(params: &AttentionParams, spans: &[AttentionSpan<'_>], q_len: usize, out_len: usize) {
    assert!(params.head_dim > 0 && params.page_size > 0 && params.num_kv_heads > 0, "a shape of 0 in {params:?}");
    assert!(
        params.num_heads > 0 && params.num_heads.is_multiple_of(params.num_kv_heads),
        "{} query heads cannot share {} KV heads",
        params.num_heads,
        params.num_kv_heads,
    );
    assert_eq!(q_len, out_len, "q and out must have one shape");
    let num_rows = q_len / (params.num_heads * params.head_dim);
    assert_eq!(num_rows * params.num_heads * params.head_dim, q_len, "q is not whole rows");
    let mut taken = vec![false; num_rows];
    for span in spans {
        let rows = taken.get_mut(span.first_row..).and_then(|rows| rows.get_mut(..span.num_rows));
        let rows = rows.expect("a span's rows must be rows of q");
        assert!(!rows.contains(&true), "rows of two spans");
        rows.fill(true);
        assert_eq!(span.segments.len(), params.num_kv_heads, "a span needs a list for each KV head");
        for (kv_head, list) in span.segments.iter().enumerate() {
            assert!(
                list.has_shape(params.page_size, params.head_dim),
                "a list of pages of another shape than {params:?}"
            );
            let constants = span.constants.get(kv_head).copied().flatten();
            assert!(
                !list.key_codes().rotated || constants.is_some_and(|c| c.head_dim() == params.head_dim),
                "rotated keys need constants of {} channels",
                params.head_dim
            );
        }
    }
}
