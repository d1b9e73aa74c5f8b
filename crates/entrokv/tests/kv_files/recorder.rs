//! A runner that keeps the bits of every logit it hands out.

use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};

use entrokv::gates::{Gates, GatesError};
use entrokv::gguf::Gguf;
use entrokv::load::decoder;
use entrokv::model::{AttentionSink, BatchSpan, Decoder, Logits, ModelRunner, RunError};
use entrokv::store::{KeyMoments, KeyPages, TokenVectors};
use entrokv::turned_sinks::TurnedPage;
use entrokv::{Engine, EngineOptions, ModelConfig, ModelId, ModelOptions, rope_factors};
use entrokv_cache::{GateTap, KvCache, PageMove, PagePlace};
use entrokv_kernels::codes::KeyConstants;

/// Rows of logits, in the order in which they were computed.
pub(crate) type Rows = Arc<Mutex<Vec<Vec<u32>>>>;

/// The CPU runner, watched.
struct Recorder {
    decoder: Decoder,
    rows: Rows,
}

/// An engine without a tokenizer, and the logits it computes. Its pool has room for a full context and more.
pub(crate) fn recorded(gguf: &Gguf, options: &ModelOptions) -> (Engine, Rows) {
    let config = ModelConfig::from_metadata(gguf.metadata(), rope_factors(gguf).as_deref()).unwrap();
    let shape = Arc::new(config.cache_shape(options.page_size).unwrap());
    let options = ModelOptions { pool_bytes: Some(options.pool_bytes.unwrap_or(64 << 20)), ..options.clone() };
    let decoder = decoder(gguf, &config, &options, &shape, &mut |_| ()).unwrap();
    let rows = Rows::default();
    let engine_options = EngineOptions {
        page_kind: options.page_kind,
        chunk_size: options.chunk_size,
        context_len: options.context_len,
        pool_bytes: options.pool_bytes.unwrap(),
        model_id: Some(ModelId::of(gguf)),
        repeat: entrokv::RepeatInstruction::default(),
        probe: Vec::new(),
    };
    let recorder = Recorder { decoder, rows: Arc::clone(&rows) };
    (Engine::new(Box::new(recorder), shape, None, engine_options), rows)
}

impl ModelRunner for Recorder {
    fn config(&self) -> &ModelConfig {
        self.decoder.config()
    }

    fn vocab_size(&self) -> usize {
        self.decoder.vocab_size()
    }

    fn forward(&mut self, batch: &[BatchSpan<'_>], sink: &mut dyn AttentionSink) -> Result<Logits, RunError> {
        let mut logits = self.decoder.forward(batch, sink)?;
        for span in 0..batch.len() {
            let bits = logits.rows(span).map(|row| row.iter().map(|logit| logit.to_bits()).collect());
            self.rows.lock().unwrap().extend(bits);
        }
        Ok(logits)
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
