//! The decoder: one forward pass over a batch of tokens, driven by a [`ModelConfig`] and not by a file per model.
//!
//! Invariants:
//! * The logits of a token depend on its sequence alone: same bits whatever else is in the batch, however the prompt was
//!   cut into chunks and however many threads run (every kernel keeps that promise; this file adds nothing that breaks it).
//! * Keys are cached after RoPE at the token's absolute position, so evicting pages never moves anything.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use entrokv_cache::{GateTap, KvCache, KvGroup, LayerKind, PageMove, PagePlace};
use entrokv_kernels::activation::{add, gelu_tanh_mul, scale, silu_mul};
use entrokv_kernels::activations::{Activations, Arithmetic};
use entrokv_kernels::attention::{AttentionParams, AttentionSpan, PagedAttention, ScoreArithmetic, SegmentList, Tap};
use entrokv_kernels::codes::KeyConstants;
use entrokv_kernels::compute::Compute;
use entrokv_kernels::matmul::{matmul, matmul_each};
use entrokv_kernels::norm::RmsNorm;
use entrokv_kernels::rope::{RopeAngles, rope};
use entrokv_kernels::threads::Threads;

use crate::config::{FeedForward, ModelConfig};
use crate::gates::{GateInput, Gates, GatesError};
use crate::output_norms::output_norms;
use crate::segments::CacheView;
use crate::store::{KeyMoments, KeyPages, NewTokens, Store, TokenVectors};
use crate::turned_sinks::TurnedPage;
use crate::weights::{LayerWeights, Projection, Weights};

/// What a batch wants to know of one sequence's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitsWanted {
    /// Nothing: a prompt chunk that is not the last.
    None,
    /// The last row's logits: the next token is to be sampled.
    Last,
    /// Every row's logits: scoring a text.
    All,
}

/// One sequence's consecutive tokens in a batch. Its cache has already grown to hold them.
#[derive(Clone, Copy)]
pub struct BatchSpan<'a> {
    /// Token ids, at least one.
    pub tokens: &'a [u32],
    /// Absolute position of the first of them.
    pub first_position: u32,
    /// Block tables of the sequence, the new tokens' slots included.
    pub cache: CacheView<'a>,
    /// What its coded keys were centred on and scaled by, in the order of
    /// [`CacheShape::groups`](entrokv_cache::CacheShape::groups); empty where no key is coded.
    pub constants: &'a [Option<KeyConstants>],
    /// Which rows' logits to return.
    pub logits: LogitsWanted,
}

/// Receives queries and attention rows while a forward pass runs.
pub trait AttentionSink {
    /// What of its input in `layer` to show of `span` (its index in the batch).
    fn input_tap(&self, _span: usize, _layer: usize) -> GateInput {
        GateInput::None
    }
    /// Shows the inputs of `span` in `layer` that [`AttentionSink::input_tap`] asked for: `[rows, embedding_len]`.
    fn inputs(&mut self, _span: usize, _layer: usize, _inputs: &[f32], _compute: &Compute) {}
    /// Shows the queries of `span` in `layer` before RoPE, `[rows, num_heads, head_dim]`, and its keys, `[rows, num_kv_heads,
    /// head_dim]`; what is written into the queries is what attention goes on with.
    fn unrotated(&mut self, _span: usize, _layer: usize, _queries: &mut [f32], _keys: &[f32]) {}
    /// Shows the queries of `span` in `layer`, after RoPE: `[rows, num_heads, head_dim]`; what is written into them is what
    /// attention goes on with.
    fn queries(&mut self, _span: usize, _layer: usize, _queries: &mut [f32]) {}
    /// Shows them with the keys of the same rows, `[rows, num_kv_heads, head_dim]`, and with what to reckon by.
    fn queries_and_keys(&mut self, _span: usize, _layer: usize, _queries: &[f32], _keys: &[f32], _compute: &Compute) {}
    /// Shows the queries of `span` in `layer` before RoPE, after the model's norm of queries, with what to sum them by.
    fn unrotated_queries(&mut self, _span: usize, _layer: usize, _queries: &[f32], _compute: &Compute) {}
    /// What attention reads of `span` in `layer` instead of `held`, a list a KV head, for its `queries` `[rows, num_heads, head_dim]`
    /// after RoPE; nothing where it reads all that is held.
    fn reads(
        &mut self,
        _span: usize,
        _layer: usize,
        _queries: &[f32],
        _held: &[SegmentList],
        _threads: &Threads,
    ) -> Option<Vec<SegmentList>> {
        None
    }
    /// What to record of `span` (its index in the batch) in `layer`; `resident[h]` counts the tokens that KV head `h`
    /// reads.
    fn tap(&mut self, span: usize, layer: usize, resident: &[usize]) -> Tap;
    /// Hands the filled tap back, with threads that have nothing else to do; called only where [`AttentionSink::tap`] asked
    /// for one.
    fn observe(&mut self, span: usize, layer: usize, tap: Tap, threads: &Threads);
}

/// A sink that asks for nothing.
pub struct NoTaps;

impl AttentionSink for NoTaps {
    fn tap(&mut self, _span: usize, _layer: usize, _resident: &[usize]) -> Tap {
        Tap::None
    }
    fn observe(&mut self, _span: usize, _layer: usize, _tap: Tap, _threads: &Threads) {}
}

/// Logits of the rows that asked for them, in batch order.
#[derive(Debug, Default)]
pub struct Logits {
    rows: Vec<f32>,
    vocab_size: usize,
    spans: Vec<Range<usize>>,
}

impl Logits {
    /// Rows of `span` in order, each `[vocab_size]`.
    pub fn rows(&mut self, span: usize) -> impl Iterator<Item = &mut [f32]> {
        let Range { start, end } = self.spans[span];
        self.rows[start * self.vocab_size..end * self.vocab_size].chunks_exact_mut(self.vocab_size)
    }

    /// The last row of `span`, if it asked for any.
    pub fn last(&mut self, span: usize) -> Option<&mut [f32]> {
        self.rows(span).last()
    }
}

/// Why a forward pass returned nothing.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum RunError {
    /// The interrupt flag was raised; the pass can be repeated as if it had not begun.
    #[error("interrupted")]
    Interrupted,
    /// A token id the embedding table does not have.
    #[error("token id {got} is outside the vocabulary of {limit}")]
    TokenOutOfRange {
        /// The id.
        got: u32,
        /// Size of the vocabulary.
        limit: usize,
    },
}

/// Runs a model: the seam behind which another device would stand.
pub trait ModelRunner {
    /// Geometry and constants.
    fn config(&self) -> &ModelConfig;
    /// Tokens of the vocabulary: ids run from 0 to one less, and a row of logits has this many.
    fn vocab_size(&self) -> usize;
    /// One pass over the batch: writes keys and values into the spans' slots and returns the logits asked for.
    ///
    /// # Errors
    /// [`RunError::Interrupted`] when the flag given at construction was raised: nothing but the spans' own slots has
    /// been written, so the same call may be made again.
    fn forward(&mut self, batch: &[BatchSpan<'_>], sink: &mut dyn AttentionSink) -> Result<Logits, RunError>;
    /// Keys and values that `cache` holds of each KV group of `layer`; `constants` are those of all its groups, or none.
    fn token_vectors(&self, cache: &KvCache, layer: u32, constants: &[Option<KeyConstants>]) -> Vec<TokenVectors>;
    /// What values add to the output of `layer`, of each of its KV heads: the mean over a group's heads of `|W_O^T v|_1`, a number
    /// a token; attention's bias and what follows it are left out.
    fn output_norms(&self, layer: u32, vectors: &[TokenVectors]) -> Vec<Vec<f32>>;
    /// Moments of the keys in full plain pages, for each of several KV groups.
    fn key_moments(&self, groups: &[Vec<PagePlace>]) -> Vec<KeyMoments>;
    /// Ranges of the keys in full pages of several KV groups, for each `[pages, 2, head_dim]`: smallest, then largest elements.
    fn key_ranges(&self, groups: &[KeyPages<'_>]) -> Vec<Vec<f32>>;
    /// Encodes pages of one KV group from their old places into their new ones; `constants` are its own.
    fn recode(&mut self, moves: &[PageMove], constants: Option<&KeyConstants>);
    /// Moves tokens of one KV group together: that at place `kept[i]` of those in the pages `from`, counting through them, to place
    /// `i` of those in `to`. All pages are plain, full, and of one kind.
    fn compact(&mut self, from: &[PagePlace], to: &[PagePlace], kept: &[u32]);
    /// The gates `tap` of this model, read from `file`.
    ///
    /// # Errors
    /// [`GatesError`]: the file is missing, or is of another model.
    fn load_gates(&self, tap: GateTap, file: Option<&Path>) -> Result<Gates, GatesError>;
    /// Writes the keys of pages of global layers, rotated further.
    fn turn_keys(&mut self, pages: &[TurnedPage]);
    /// Writes `keys` `[tokens, head_dim]` over those of the first tokens of a plain page; values stay to the bit.
    fn write_keys(&mut self, page: &PagePlace, keys: &[f32]);
    /// Appends the bytes of a page to `out`, its slots from `len` on being zeros.
    fn page_bytes(&self, page: &PagePlace, len: usize, out: &mut Vec<u8>);
    /// Makes `bytes` those of a page, which is as long.
    fn set_page_bytes(&mut self, page: &PagePlace, bytes: &[u8]);
    /// Copies pages into frames of their own.
    fn copy_pages(&mut self, moves: &[PageMove]) {
        let mut bytes = Vec::new();
        for page in moves {
            bytes.clear();
            self.page_bytes(&page.from, page.len as usize, &mut bytes);
            self.set_page_bytes(&page.to, &bytes);
        }
    }
    /// Gives whole OS pages of the byte store back; `ranges` hold no live frame.
    fn reclaim(&mut self, ranges: &[Range<u64>]);
}

/// The CPU runner: weights, kernels and the bytes behind the pages.
pub struct Decoder {
    config: ModelConfig,
    weights: Weights,
    compute: Compute,
    store: Store,
    interrupt: Arc<AtomicBool>,
    scratch: Scratch,
}

/// Buffers kept between passes so that decoding allocates nothing that grows with the model.
struct Scratch {
    /// The residual stream, without what the last block has put out.
    x: Vec<f32>,
    /// What the last block has put out: it is added on the way into the next one.
    projected: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    attended: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    input: Activations,
    attention: PagedAttention,
}

impl Decoder {
    /// A runner over `weights`, its pages in `store`; it stops between layers once `interrupt` is set.
    pub fn new(
        config: ModelConfig,
        weights: Weights,
        compute: Compute,
        store: Store,
        arithmetic: Arithmetic,
        interrupt: Arc<AtomicBool>,
    ) -> Self {
        let scratch = Scratch {
            x: Vec::new(),
            projected: Vec::new(),
            q: Vec::new(),
            k: Vec::new(),
            v: Vec::new(),
            attended: Vec::new(),
            gate: Vec::new(),
            up: Vec::new(),
            input: Activations::for_weights(arithmetic, weights.types()),
            attention: PagedAttention::default(),
        };
        Self { config, weights, compute, store, interrupt, scratch }
    }

    /// `out = projection(x)` with its bias, for every row of the activations already loaded and for each pair, all in one
    /// fork and join.
    fn project<const N: usize>(compute: &Compute, input: &Activations, pairs: [(&Projection, &mut Vec<f32>); N]) {
        let rows = input.num_tokens();
        let mut pairs = pairs.map(|(projection, out)| {
            out.resize(rows * projection.matrix.rows(), 0.0);
            (projection, out)
        });
        matmul_each(compute, input, pairs.each_mut().map(|(projection, out)| (&projection.matrix, out.as_mut_slice())));
        for (projection, out) in pairs {
            let Some(bias) = &projection.bias else { continue };
            for row in out.chunks_exact_mut(bias.len()) {
                row.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
            }
        }
    }

    fn attention_block(
        &mut self,
        index: usize,
        batch: &[BatchSpan<'_>],
        angles: &RopeAngles,
        sink: &mut dyn AttentionSink,
    ) {
        let Self { config, weights, compute, store, scratch, .. } = self;
        let layer: &LayerWeights = &weights.layers[index];
        let Scratch { x, projected, q, k, v, attended, input, attention, .. } = scratch;
        let norm = |weight| RmsNorm { weight, eps: config.rms_epsilon };
        norm(&layer.attention_norm).load_sum(compute, x, projected, input);
        for (number, rows) in rows_of(batch) {
            let inputs = &x[rows.start * config.embedding_len..rows.end * config.embedding_len];
            match sink.input_tap(number, index) {
                GateInput::None => {}
                GateInput::Residual => sink.inputs(number, index, inputs, compute),
                GateInput::Normed => {
                    // The bits that were loaded, which the activations may keep rounded alone.
                    let mut inputs = inputs.to_vec();
                    norm(&layer.attention_norm).in_place(compute, &mut inputs);
                    sink.inputs(number, index, &inputs, compute);
                }
            }
        }
        compute.threads.read_ahead(&[layer.output.matrix.bytes()]);
        Self::project(compute, input, [(&layer.q, &mut *q), (&layer.k, &mut *k), (&layer.v, &mut *v)]);
        if let Some(weight) = &layer.q_norm {
            norm(weight).in_place(compute, q);
        }
        if let Some(weight) = &layer.k_norm {
            norm(weight).in_place(compute, k);
        }
        let (width, kv_width) = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim);
        for (number, rows) in rows_of(batch) {
            let queries = &mut q[rows.start * width..rows.end * width];
            sink.unrotated(number, index, queries, &k[rows.start * kv_width..rows.end * kv_width]);
            sink.unrotated_queries(number, index, &q[rows.start * width..rows.end * width], compute);
        }
        rope(compute, q, config.head_dim, angles, config.rope.layout);
        rope(compute, k, config.head_dim, angles, config.rope.layout);

        let mut row = 0;
        for span in batch {
            let rows = row * kv_width..(row + span.tokens.len()) * kv_width;
            let tokens = NewTokens { first_position: span.first_position, k: &k[rows.clone()], v: &v[rows] };
            store.write(compute, span.cache.cache(), index as u32, tokens);
            row += span.tokens.len();
        }

        let params = AttentionParams {
            num_heads: config.num_heads,
            num_kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
            page_size: store.page_size(),
            scale: config.attention_scale,
            window: match config.layers[index] {
                LayerKind::Global => None,
                LayerKind::Window(window) => Some(window),
            },
            // Where keys have a bias it makes some of their elements large (up to 145 in qwen2.5-0.5b): rounding those to bf16
            // would move page scores by a sixth.
            scores: match layer.k.bias {
                Some(_) => ScoreArithmetic::F32,
                None => ScoreArithmetic::Rounded,
            },
        };
        let mut chosen = Vec::with_capacity(batch.len());
        for (number, rows) in rows_of(batch) {
            let queries = &mut q[rows.start * width..rows.end * width];
            sink.queries(number, index, queries);
            sink.queries_and_keys(number, index, queries, &k[rows.start * kv_width..rows.end * kv_width], compute);
            chosen.push(sink.reads(number, index, queries, batch[number].cache.segments(index), &compute.threads));
        }
        let mut first_row = 0;
        let mut spans = Vec::with_capacity(batch.len());
        for (number, (span, chosen)) in batch.iter().zip(&chosen).enumerate() {
            let group = |kv_head| span.cache.cache().shape().group_index(KvGroup { layer: index as u32, kv_head });
            let constants = |kv_head| span.constants.get(group(kv_head))?.as_ref();
            let segments = chosen.as_deref().unwrap_or(span.cache.segments(index));
            let resident: Vec<usize> = segments.iter().map(SegmentList::num_tokens).collect();
            spans.push(AttentionSpan {
                first_row,
                num_rows: span.tokens.len(),
                first_position: span.first_position,
                memory: store.memory(),
                segments,
                constants: (0..config.num_kv_heads as u32).map(constants).collect(),
                tap: sink.tap(number, index, &resident),
            });
            first_row += span.tokens.len();
        }
        attended.resize(q.len(), 0.0);
        attention.run(compute, &params, &mut spans, q, attended);
        for (number, span) in spans.into_iter().enumerate() {
            if !matches!(span.tap, Tap::None) {
                sink.observe(number, index, span.tap, &compute.threads);
            }
        }

        input.load(compute, attended, config.num_heads * config.head_dim);
        compute.threads.read_ahead(&[layer.gate.matrix.bytes(), layer.up.matrix.bytes()]);
        Self::project(compute, input, [(&layer.output, &mut *projected)]);
        if let Some(weight) = &layer.post_attention_norm {
            norm(weight).in_place(compute, projected);
        }
    }

    fn feed_forward_block(&mut self, index: usize) {
        let Self { config, weights, compute, scratch, .. } = self;
        let layer = &weights.layers[index];
        let Scratch { x, projected, gate, up, input, .. } = scratch;
        let norm = |weight| RmsNorm { weight, eps: config.rms_epsilon };
        norm(&layer.ffn_norm).load_sum(compute, x, projected, input);
        compute.threads.read_ahead(&[layer.down.matrix.bytes()]);
        Self::project(compute, input, [(&layer.gate, &mut *gate), (&layer.up, &mut *up)]);
        match config.feed_forward {
            FeedForward::SwiGlu => silu_mul(compute, gate, up),
            FeedForward::GeGlu => gelu_tanh_mul(compute, gate, up),
        }
        input.load(compute, gate, config.ffn_len);
        match weights.layers.get(index + 1) {
            Some(next) => compute.threads.read_ahead(&[&next.q, &next.k, &next.v].map(|w| w.matrix.bytes())),
            None => compute.threads.read_ahead(&[weights.output.as_ref().unwrap_or(&weights.embedding).bytes()]),
        }
        Self::project(compute, input, [(&layer.down, &mut *projected)]);
        if let Some(weight) = &layer.post_ffn_norm {
            norm(weight).in_place(compute, projected);
        }
    }

    fn embed(&mut self, batch: &[BatchSpan<'_>]) -> Result<(), RunError> {
        let width = self.config.embedding_len;
        let limit = self.weights.embedding.rows();
        let tokens: Vec<u32> = batch.iter().flat_map(|span| span.tokens).copied().collect();
        if let Some(&got) = tokens.iter().find(|&&token| token as usize >= limit) {
            return Err(RunError::TokenOutOfRange { got, limit });
        }
        self.scratch.x.resize(tokens.len() * width, 0.0);
        // No block has put out anything yet.
        self.scratch.projected.clear();
        self.scratch.projected.resize(tokens.len() * width, 0.0);
        for (row, &token) in self.scratch.x.chunks_exact_mut(width).zip(&tokens) {
            self.weights.embedding.dequantize_row(token as usize, row);
        }
        if self.config.embedding_scale != 1.0 {
            scale(&self.compute, &mut self.scratch.x, self.config.embedding_scale);
        }
        Ok(())
    }

    fn logits(&mut self, batch: &[BatchSpan<'_>]) -> Logits {
        let Self { config, weights, compute, scratch, .. } = self;
        let width = config.embedding_len;
        let Scratch { x, projected, input, .. } = scratch;
        let (mut wanted, mut spans, mut row) = (Vec::new(), Vec::with_capacity(batch.len()), 0);
        for span in batch {
            let end = row + span.tokens.len();
            let start = match span.logits {
                LogitsWanted::None => end,
                LogitsWanted::Last => end - 1,
                LogitsWanted::All => row,
            };
            let first = wanted.len() / width;
            let elements = start * width..end * width;
            add(compute, &mut x[elements.clone()], &projected[elements.clone()]);
            wanted.extend_from_slice(&x[elements]);
            spans.push(first..wanted.len() / width);
            row = end;
        }
        let output = weights.output.as_ref().unwrap_or(&weights.embedding);
        let vocab_size = output.rows();
        let mut rows = vec![0.0; wanted.len() / width * vocab_size];
        if !wanted.is_empty() {
            RmsNorm { weight: &weights.output_norm, eps: config.rms_epsilon }.in_place(compute, &mut wanted);
            input.load(compute, &wanted, width);
            matmul(compute, output, input, &mut rows);
        }
        Logits { rows, vocab_size, spans }
    }
}

/// Every span of a batch, by its index, and its rows among those of all.
fn rows_of(batch: &[BatchSpan<'_>]) -> impl Iterator<Item = (usize, Range<usize>)> {
    let mut end = 0;
    batch.iter().enumerate().map(move |(number, span)| {
        let first = end;
        end += span.tokens.len();
        (number, first..end)
    })
}

impl ModelRunner for Decoder {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn vocab_size(&self) -> usize {
        self.weights.embedding.rows()
    }

    fn forward(&mut self, batch: &[BatchSpan<'_>], sink: &mut dyn AttentionSink) -> Result<Logits, RunError> {
        self.embed(batch)?;
        let positions: Vec<u32> =
            batch.iter().flat_map(|span| (0..span.tokens.len() as u32).map(|i| span.first_position + i)).collect();
        let global = RopeAngles::new(&positions, &self.config.rope.global);
        let window = self.config.rope.window.as_deref().map(|frequencies| RopeAngles::new(&positions, frequencies));
        for index in 0..self.config.layers.len() {
            if self.interrupt.load(Ordering::Relaxed) {
                return Err(RunError::Interrupted);
            }
            let angles = match self.config.layers[index] {
                LayerKind::Global => &global,
                LayerKind::Window(_) => window.as_ref().unwrap_or(&global),
            };
            self.attention_block(index, batch, angles, sink);
            self.feed_forward_block(index);
        }
        Ok(self.logits(batch))
    }

    fn token_vectors(&self, cache: &KvCache, layer: u32, constants: &[Option<KeyConstants>]) -> Vec<TokenVectors> {
        self.store.token_vectors(&self.compute, cache, layer, constants)
    }

    fn output_norms(&self, layer: u32, vectors: &[TokenVectors]) -> Vec<Vec<f32>> {
        let values: Vec<&[f32]> = vectors.iter().map(|vectors| vectors.values.as_slice()).collect();
        let group_size = self.config.num_heads / self.config.num_kv_heads;
        let output = &self.weights.layers[layer as usize].output.matrix;
        output_norms(&self.compute, output, group_size, self.config.head_dim, &values)
    }

    fn key_moments(&self, groups: &[Vec<PagePlace>]) -> Vec<KeyMoments> {
        self.store.key_moments(&self.compute, groups)
    }

    fn key_ranges(&self, groups: &[KeyPages<'_>]) -> Vec<Vec<f32>> {
        self.store.key_ranges(&self.compute, groups)
    }

    fn recode(&mut self, moves: &[PageMove], constants: Option<&KeyConstants>) {
        self.store.recode(&self.compute, moves, constants);
    }

    fn compact(&mut self, from: &[PagePlace], to: &[PagePlace], kept: &[u32]) {
        self.store.compact(&self.compute, from, to, kept);
    }

    fn load_gates(&self, tap: GateTap, file: Option<&Path>) -> Result<Gates, GatesError> {
        Gates::load(tap, file, &self.config, &self.compute)
    }

    fn turn_keys(&mut self, pages: &[TurnedPage]) {
        let Self { config, compute, store, .. } = self;
        for page in pages {
            let angles = RopeAngles::new(&page.by, &config.rope.global);
            let mut keys = page.keys.clone();
            rope(compute, &mut keys, config.head_dim, &angles, config.rope.layout);
            store.write_keys(&page.place, &keys);
        }
    }

    fn write_keys(&mut self, page: &PagePlace, keys: &[f32]) {
        self.store.write_keys(page, keys);
    }

    fn page_bytes(&self, page: &PagePlace, len: usize, out: &mut Vec<u8>) {
        self.store.page_bytes(page, len, out);
    }

    fn set_page_bytes(&mut self, page: &PagePlace, bytes: &[u8]) {
        self.store.set_page_bytes(page, bytes);
    }

    fn reclaim(&mut self, ranges: &[Range<u64>]) {
        self.store.reclaim(ranges);
    }
}
