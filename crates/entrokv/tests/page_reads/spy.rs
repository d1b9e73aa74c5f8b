//! A runner that notes what its policy had attention read.

use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};

use entrokv::gates::{GateInput, Gates, GatesError};
use entrokv::gguf::Gguf;
use entrokv::load::decoder;
use entrokv::model::{AttentionSink, BatchSpan, Decoder, Logits, ModelRunner, RunError};
use entrokv::store::{KeyMoments, KeyPages, TokenVectors};
use entrokv::turned_sinks::TurnedPage;
use entrokv::{Engine, EngineOptions, ModelConfig, ModelOptions, rope_factors};
use entrokv_cache::{GateTap, KvCache, PageMove, PagePlace};
use entrokv_kernels::attention::{SegmentList, Tap};
use entrokv_kernels::codes::KeyConstants;
use entrokv_kernels::compute::Compute;
use entrokv_kernels::threads::Threads;

/// What attention read in a layer for one token, by the first positions of pages.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) layer: usize,
    /// `[num_heads, head_dim]`, after RoPE.
    pub(crate) queries: Vec<f32>,
    /// Of each KV head.
    pub(crate) held: Vec<Vec<u32>>,
    /// Nothing where all that is held was read.
    pub(crate) read: Option<Vec<Vec<u32>>>,
}

/// Everything seen, in the order of layers and steps.
pub(crate) type Notes = Arc<Mutex<Vec<Seen>>>;

/// An engine without a tokenizer, and what it reads.
pub(crate) fn spied(gguf: &Gguf, options: &ModelOptions) -> (Engine, Notes) {
    let config = ModelConfig::from_metadata(gguf.metadata(), rope_factors(gguf).as_deref()).unwrap();
    let shape = Arc::new(config.cache_shape(options.page_size).unwrap());
    let options = ModelOptions { pool_bytes: Some(64 << 20), ..options.clone() };
    let decoder = decoder(gguf, &config, &options, &shape, &mut |_| ()).unwrap();
    let notes = Notes::default();
    let engine_options = EngineOptions {
        page_kind: options.page_kind,
        chunk_size: options.chunk_size,
        context_len: options.context_len,
        pool_bytes: options.pool_bytes.unwrap(),
        model_id: None,
        repeat: entrokv::RepeatInstruction::default(),
        probe: Vec::new(),
    };
    let spy = Spy { decoder, notes: Arc::clone(&notes) };
    (Engine::new(Box::new(spy), shape, None, engine_options), notes)
}

/// The CPU runner, watched.
struct Spy {
    decoder: Decoder,
    notes: Notes,
}

/// The sink of a pass, watched.
struct SpySink<'a> {
    inner: &'a mut dyn AttentionSink,
    notes: &'a Notes,
}

fn first_positions(lists: &[SegmentList]) -> Vec<Vec<u32>> {
    lists.iter().map(|list| list.segments().iter().map(|segment| segment.position).collect()).collect()
}

impl AttentionSink for SpySink<'_> {
    fn input_tap(&self, span: usize, layer: usize) -> GateInput {
        self.inner.input_tap(span, layer)
    }

    fn inputs(&mut self, span: usize, layer: usize, inputs: &[f32], compute: &Compute) {
        self.inner.inputs(span, layer, inputs, compute);
    }

    fn unrotated(&mut self, span: usize, layer: usize, queries: &mut [f32], keys: &[f32]) {
        self.inner.unrotated(span, layer, queries, keys);
    }

    fn queries(&mut self, span: usize, layer: usize, queries: &mut [f32]) {
        self.inner.queries(span, layer, queries);
    }

    fn queries_and_keys(&mut self, span: usize, layer: usize, queries: &[f32], keys: &[f32], compute: &Compute) {
        self.inner.queries_and_keys(span, layer, queries, keys, compute);
    }

    fn unrotated_queries(&mut self, span: usize, layer: usize, queries: &[f32], compute: &Compute) {
        self.inner.unrotated_queries(span, layer, queries, compute);
    }

    fn reads(
        &mut self,
        span: usize,
        layer: usize,
        queries: &[f32],
        held: &[SegmentList],
        threads: &Threads,
    ) -> Option<Vec<SegmentList>> {
        let lists = self.inner.reads(span, layer, queries, held, threads);
        let read = lists.as_deref().map(first_positions);
        let seen = Seen { layer, queries: queries.to_vec(), held: first_positions(held), read };
        self.notes.lock().unwrap().push(seen);
        lists
    }

    fn tap(&mut self, span: usize, layer: usize, resident: &[usize]) -> Tap {
        self.inner.tap(span, layer, resident)
    }

    fn observe(&mut self, span: usize, layer: usize, tap: Tap, threads: &Threads) {
        self.inner.observe(span, layer, tap, threads);
    }
}

impl ModelRunner for Spy {
    fn config(&self) -> &ModelConfig {
        self.decoder.config()
    }

    fn vocab_size(&self) -> usize {
        self.decoder.vocab_size()
    }

    fn forward(&mut self, batch: &[BatchSpan<'_>], sink: &mut dyn AttentionSink) -> Result<Logits, RunError> {
        self.decoder.forward(batch, &mut SpySink { inner: sink, notes: &self.notes })
    }

    fn token_vectors(&self, cache: &KvCache, layer: u32, constants: &[Option<KeyConstants>]) -> Vec<TokenVectors> {
        self.decoder.token_vectors(cache, layer, constants)
    }

    fn output_norms(&self, layer: u32, vectors: &[TokenVectors]) -> Vec<Vec<f32>> {
        self.decoder.output_norms(layer, vectors)
    }

    fn load_gates(&self, tap: GateTap, file: Option<&Path>) -> Result<Gates, GatesError> {
        self.decoder.load_gates(tap, file)
    }

    fn turn_keys(&mut self, pages: &[TurnedPage]) {
        self.decoder.turn_keys(pages);
    }

    fn key_moments(&self, groups: &[Vec<PagePlace>]) -> Vec<KeyMoments> {
        self.decoder.key_moments(groups)
    }

    fn key_ranges(&self, groups: &[KeyPages<'_>]) -> Vec<Vec<f32>> {
        self.decoder.key_ranges(groups)
    }

    fn recode(&mut self, moves: &[PageMove], constants: Option<&KeyConstants>) {
        self.decoder.recode(moves, constants);
    }

    fn compact(&mut self, from: &[PagePlace], to: &[PagePlace], kept: &[u32]) {
        self.decoder.compact(from, to, kept);
    }

    fn write_keys(&mut self, page: &PagePlace, keys: &[f32]) {
        self.decoder.write_keys(page, keys);
    }

    fn page_bytes(&self, page: &PagePlace, len: usize, out: &mut Vec<u8>) {
        self.decoder.page_bytes(page, len, out);
    }

    fn set_page_bytes(&mut self, page: &PagePlace, bytes: &[u8]) {
        self.decoder.set_page_bytes(page, bytes);
    }

    fn reclaim(&mut self, ranges: &[Range<u64>]) {
        self.decoder.reclaim(ranges);
    }
}
