//! An engine whose runner is watched as it runs.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use entrokv::gates::{Gates, GatesError};
use entrokv::gguf::Gguf;
use entrokv::load::decoder;
use entrokv::model::{AttentionSink, BatchSpan, Decoder, Logits, ModelRunner, RunError};
use entrokv::store::{KeyMoments, KeyPages, TokenVectors};
use entrokv::turned_sinks::TurnedPage;
use entrokv::{Engine, EngineOptions, ModelConfig, ModelId, ModelOptions, RepeatInstruction, rope_factors};
use entrokv_cache::{GateTap, KvCache, PageMove, PagePlace};
use entrokv_kernels::codes::KeyConstants;

/// What stands around a forward pass.
pub trait Watch: Send {
    fn forward(
        &mut self,
        decoder: &mut Decoder,
        batch: &[BatchSpan<'_>],
        sink: &mut dyn AttentionSink,
    ) -> Result<Logits, RunError>;
}

/// An engine without a tokenizer over the CPU runner, with `watch` around each of its forward passes. Its pool has room for a
/// full context and more.
pub fn watched(gguf: &Gguf, options: &ModelOptions, watch: impl Watch + 'static) -> Engine {
    let config = ModelConfig::from_metadata(gguf.metadata(), rope_factors(gguf).as_deref()).unwrap();
    let shape = Arc::new(config.cache_shape(options.page_size).unwrap());
    let pool_bytes = options.pool_bytes.unwrap_or(64 << 20);
    let options = ModelOptions { pool_bytes: Some(pool_bytes), ..options.clone() };
    let decoder = decoder(gguf, &config, &options, &shape, &mut |_| ()).unwrap();
    let engine_options = EngineOptions {
        page_kind: options.page_kind,
        chunk_size: options.chunk_size,
        context_len: options.context_len,
        pool_bytes,
        model_id: Some(ModelId::of(gguf)),
        repeat: RepeatInstruction::default(),
        probe: Vec::new(),
    };
    Engine::new(Box::new(Watched { decoder, watch }), shape, None, engine_options)
}

/// The CPU runner, watched.
struct Watched<W> {
    decoder: Decoder,
    watch: W,
}

impl<W: Watch> ModelRunner for Watched<W> {
    fn config(&self) -> &ModelConfig {
        self.decoder.config()
    }

    fn vocab_size(&self) -> usize {
        self.decoder.vocab_size()
    }

    fn forward(&mut self, batch: &[BatchSpan<'_>], sink: &mut dyn AttentionSink) -> Result<Logits, RunError> {
        self.watch.forward(&mut self.decoder, batch, sink)
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
