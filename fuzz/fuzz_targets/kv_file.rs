//! Any bytes are either refused with one line, and nothing has changed, or a sequence that can be gone on with.
//!
//! From this folder's parent:
//! ```text
//! cargo run --release --manifest-path fuzz/Cargo.toml --example seeds
//! cargo +nightly fuzz run kv_file -- -max_total_time=600 -max_len=65536 -malloc_limit_mb=64 -rss_limit_mb=1024
//! ```
//! Every input is tried as it is, and with its checksum made right, or no mutation would come past that.
#![no_main]

use std::cell::RefCell;

use entrokv::tiny::{TinyArchitecture, TinyModel};
use entrokv::{Engine, Gguf, Identity, LoadOptions, Model, ModelOptions, Request};
use libfuzzer_sys::fuzz_target;
use twox_hash::XxHash3_128;

const CHECKSUM_BYTES: usize = 16;

thread_local! {
    static ENGINES: RefCell<Vec<Engine>> = RefCell::new(["f16", "tq4"].map(engine).into());
}

fuzz_target!(|bytes: &[u8]| {
    let mut sealed = bytes[..bytes.len().saturating_sub(CHECKSUM_BYTES)].to_vec();
    sealed.extend(XxHash3_128::oneshot(&sealed).to_be_bytes());
    ENGINES.with_borrow_mut(|engines| {
        for engine in engines {
            load(engine, bytes);
            load(engine, &sealed);
        }
    });
});

/// Loads, goes on for a few tokens, and closes: the pool is empty after that in any case.
fn load(engine: &mut Engine, mut bytes: &[u8]) {
    match engine.load_sequence(&mut bytes, &LoadOptions::default()) {
        Err(error) => assert!(!error.to_string().contains('\n'), "more than one line: {error}"),
        Ok(loaded) => {
            let request = Request { eviction: loaded.eviction, ..Request::greedy(vec![1, 2, 3], 20) };
            if engine.extend(loaded.id, request).is_ok() {
                let _ = engine.finish(loaded.id, &mut |_| ());
            }
            engine.close(loaded.id);
        }
    }
    assert_eq!(engine.pool().used_bytes(), 0);
}

/// The same model as the seeds are of.
fn engine(cache_type: &str) -> Engine {
    let model = TinyModel { num_layers: 1, ..TinyModel::new(TinyArchitecture::Qwen3) };
    let gguf = Gguf::from_bytes(model.gguf().expect("a tiny model")).expect("a model file");
    let page_kind = cache_type.parse().expect("a cache type");
    let (threads, identity) = (std::num::NonZeroUsize::MIN, Identity::Hashed);
    let options = ModelOptions { page_kind, threads, identity, pool_bytes: Some(4 << 20), ..ModelOptions::default() };
    Model::from_gguf(&gguf, &options, &mut |_| ()).expect("an engine").engine
}
