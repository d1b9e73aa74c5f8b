//! Attention of queries over a list of pages.
//!
//! A query at position `p` of head `h` attends to the keys of KV head `g = h / group_size` that are resident and visible,
//! `p - window < position <= p`:
//! `o = sum_j softmax_j(scale <q, k_j>) v_j` (Vaswani et al. 2017, equation 1), computed by an online softmax in f32
//! (Milakov and Gimelshein 2018) over **tiles of 256 absolute positions**.
//!
//! Invariants, each with a test that bears its name:
//! 1. *Same bits whoever computes.* A tile's largest score, sum of exponentials and weighted sum of values are computed in
//!    an order that depends on absolute positions only, and tiles are merged in ascending order. Threads, chunks of a
//!    prompt, the batch and the frames decide only who computes what, from where.
//! 2. *Evicted is masked.* A page that is not in the list gives the bits of a page that is, with its scores set to minus
//!    infinity: skipped elements would only have added zeros. A tile with nothing to see is no tile.
//! 3. *Taps change nothing.* The output has the same bits with and without them.
//!
//! Non-finite numbers: a NaN or plus-infinite score makes its row NaN. A non-finite *value* may also reach rows that do not
//! see its token but are computed beside it (0 times infinity is NaN).

use crate::compute::Compute;
use crate::page::{PageFormat, PageLayout};

mod naive;

/// Filled slots of one page of one KV head.
#[derive(Clone, Copy, Debug)]
pub struct Segment<'a> {
    /// The page's format; one list may mix formats.
    pub format: PageFormat,
    /// The whole frame, as `PageLayout::write_token` filled it.
    pub frame: &'a [u8],
    /// Absolute position of slot 0; slot `i` holds the token at `position + i`.
    pub position: u32,
    /// Number of filled slots.
    pub len: u32,
}

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
    /// Per KV head, what is resident, in ascending position; as long as each head likes.
    pub segments: Vec<Vec<Segment<'a>>>,
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
        /// does not see. What was in it is lost, its allocations are used again.
        out: Vec<Vec<f32>>,
    },
    /// The sum of the softmax probabilities over the span's rows.
    ColumnSums {
        /// Per KV head `[group_size, tokens in segment order]`: every row is added to what is there, in ascending order, so
        /// that a prompt may come in any chunks.
        out: Vec<Vec<f32>>,
    },
}

impl AttentionParams {
    /// Query heads that share a KV head.
    pub fn group_size(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    fn layout(&self, format: PageFormat) -> PageLayout {
        PageLayout { format, page_size: self.page_size, head_dim: self.head_dim }
    }
}

/// Attention of every span's rows: `q` and `out` are `[rows, num_heads * head_dim]`. Rows that see nothing become 0; rows
/// of no span are left alone.
///
/// # Panics
/// If shapes contradict each other: head counts, lengths of `q` and `out`, a frame's bytes, segments that are out of order
/// or overlap, accumulators of [`Tap::ColumnSums`] of another length than the tokens.
pub fn paged_attention(
    _compute: &Compute,
    params: &AttentionParams,
    spans: &mut [AttentionSpan<'_>],
    q: &[f32],
    out: &mut [f32],
) {
    naive::attention(params, spans, q, out);
}
