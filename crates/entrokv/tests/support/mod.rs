//! What several integration tests need: opening models with chosen numerics.

#![allow(clippy::unwrap_used, dead_code, missing_docs, unreachable_pub)]

pub mod dense;
pub mod watched;

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;

use entrokv::gguf::Gguf;
use entrokv::load::decoder;
use entrokv::model::{BatchSpan, Decoder, LogitsWanted, ModelRunner, NoTaps};
use entrokv::segments::SegmentLists;
use entrokv::{Arithmetic, CacheShape, Isa, Model, ModelConfig, ModelOptions, PageKind, rope_factors};
use entrokv_cache::{KvCache, PagePool};

/// Options that round nothing but the weights.
pub fn exact() -> ModelOptions {
    ModelOptions { arithmetic: Arithmetic::F32, page_kind: PageKind::F32, ..options() }
}

/// The engine's defaults on two threads.
pub fn options() -> ModelOptions {
    ModelOptions { threads: count(2), ..ModelOptions::default() }
}

pub fn count(n: usize) -> NonZeroUsize {
    NonZeroUsize::new(n).unwrap()
}

pub fn every_isa() -> Vec<Isa> {
    Isa::available()
}

/// Those whose speed is meant for whole texts: all but the portable one.
pub fn vector_isas() -> impl Iterator<Item = Isa> {
    every_isa().into_iter().filter(|&isa| isa != Isa::SCALAR)
}

/// A runner with a pool and one sequence's cache, without an engine around them.
pub struct Bench {
    pub config: ModelConfig,
    pub runner: Decoder,
    pub pool: PagePool,
    pub cache: KvCache,
    pub shape: Arc<CacheShape>,
}

impl Bench {
    pub fn new(gguf: &Gguf, options: &ModelOptions) -> Self {
        let config = ModelConfig::from_metadata(gguf.metadata(), rope_factors(gguf).as_deref()).unwrap();
        let shape = Arc::new(config.cache_shape(options.page_size).unwrap());
        let bytes = 64 << 20;
        let options = ModelOptions { pool_bytes: Some(bytes), ..options.clone() };
        let runner = decoder(gguf, &config, &options, &shape, &mut |_| ()).unwrap();
        let cache = KvCache::new(Arc::clone(&shape), options.page_kind);
        Self { config, runner, pool: PagePool::new(bytes), cache, shape }
    }

    /// Logits of every row of `tokens`, which follow what was fed before, in chunks of `chunk`.
    pub fn feed(&mut self, tokens: &[u32], chunk: usize) -> Vec<Vec<f32>> {
        self.advance(tokens, chunk, LogitsWanted::All)
    }

    /// Reads `tokens` for the sake of the cache alone.
    pub fn skip(&mut self, tokens: &[u32], chunk: usize) {
        self.advance(tokens, chunk, LogitsWanted::None);
    }

    fn advance(&mut self, tokens: &[u32], chunk: usize, logits: LogitsWanted) -> Vec<Vec<f32>> {
        let mut rows = Vec::new();
        for part in tokens.chunks(chunk) {
            let first_position = self.cache.logical_len() as u32;
            self.cache.grow(&mut self.pool, part.len()).unwrap();
            let mut segments = SegmentLists::new(&self.shape);
            let cache = segments.follow(&self.cache);
            let span = BatchSpan { tokens: part, first_position, cache, constants: &[], logits };
            let mut logits = self.runner.forward(&[span], &mut NoTaps).unwrap();
            rows.extend(logits.rows(0).map(|row| row.to_vec()));
            self.cache.slide_windows(&mut self.pool);
        }
        rows
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        let cache = std::mem::replace(&mut self.cache, KvCache::new(Arc::clone(&self.shape), PageKind::F16));
        cache.release(&mut self.pool);
    }
}

/// Bits of a matrix of logits, for comparisons that mean equality.
pub fn bits(rows: &[Vec<f32>]) -> Vec<Vec<u32>> {
    rows.iter().map(|row| row.iter().map(|x| x.to_bits()).collect()).collect()
}

/// The small model of an architecture.
pub fn gguf(name: &str) -> Gguf {
    Gguf::open(&fixtures().join("architectures").join(format!("{name}.gguf"))).unwrap()
}

pub fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

/// The common reading, where it lies beside the repository or where `ENTROKV_SHARED` says.
pub fn shared() -> Option<PathBuf> {
    let default = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared");
    let dir = std::env::var_os("ENTROKV_SHARED").map_or(default, PathBuf::from);
    dir.is_dir().then_some(dir)
}

/// A model by name: the default one is fetched, the others are used where `ENTROKV_MODELS` has them.
pub fn model_path(name: &str) -> Option<PathBuf> {
    let at_hand = std::env::var_os("ENTROKV_MODELS").map(|dir| PathBuf::from(dir).join(format!("{name}.gguf")));
    if let Some(path) = at_hand.filter(|path| path.is_file()) {
        return Some(path);
    }
    if name == entrokv::pull::DEFAULT_MODEL {
        let cache = std::env::var_os("ENTROKV_CACHE").map(PathBuf::from);
        let cache = cache.unwrap_or_else(|| entrokv::pull::default_cache_dir().unwrap());
        return Some(entrokv::pull::default_model(&cache).unwrap());
    }
    eprintln!("{name} is not at hand (ENTROKV_MODELS); skipped");
    None
}

pub fn open(path: &std::path::Path, options: &ModelOptions) -> Model {
    Model::open(path, options, &mut |_| ()).unwrap()
}

/// Seeded token ids below `vocab`.
pub fn random_tokens(seed: u64, len: usize, vocab: u32) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 33) % u64::from(vocab)) as u32
        })
        .collect()
}

/// `-ln p(next)` of logits in f64.
pub fn nll(logits: &[f32], next: u32) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| f64::from(x - max).exp()).sum();
    sum.ln() + f64::from(max) - f64::from(logits[next as usize])
}
