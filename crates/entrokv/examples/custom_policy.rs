//! An eviction policy of one's own, run on a model: `cargo run --release -p entrokv --example custom_policy [MODEL.gguf]`
//!
//! It prints what each KV head of the first layer holds under a budget of a fifth. Without a file, a seeded tiny model is built in
//! memory. `docs/adding-a-policy.md` says how a policy gets a name of its own on the command line.
#![allow(clippy::print_stdout, reason = "an example prints its figures")]

use std::error::Error;
use std::path::Path;
use std::sync::Arc;

use entrokv::tiny::{TinyArchitecture, TinyModel};
use entrokv::{EndTokens, EvictionOptions, Gguf, KvReport, Model, ModelOptions, Request};
use entrokv_cache::{
    Axes, CacheShape, KvGroup, ResidentTokens, Schedule, Taps, TokenMethod, TokenPolicy, TokenScorer, TokenTap,
};

/// Keeps the tokens that would add most to what attention puts out: those whose values are longest.
#[derive(Clone, Debug)]
struct LongValues;

impl TokenMethod for LongValues {
    fn name(&self) -> &str {
        "long-values"
    }

    /// No attention rows; keys and values of what is resident.
    fn needs(&self, _schedule: Schedule) -> Taps {
        Taps::of_tokens(TokenTap::KeysAndValues)
    }

    fn scorer(&self, _shape: &CacheShape, _group: KvGroup) -> Box<dyn TokenScorer> {
        Box::new(LongValues)
    }
}

impl TokenScorer for LongValues {
    /// `s(t) = |v(t)|`: a score a token, the higher the longer it stays.
    fn score(&mut self, tokens: ResidentTokens<'_>, out: &mut Vec<f32>) {
        out.extend(tokens.values().map(|value| value.iter().map(|x| x * x).sum::<f32>().sqrt()));
    }
}

/// What is held, and the pages of each KV head of the first layer.
pub(crate) type Held = (KvReport, Vec<Vec<u32>>);

/// Answers a prompt under a budget of a fifth.
pub(crate) fn run(model: &mut Model) -> Result<Held, Box<dyn Error>> {
    let prompt = (0..320).map(|i| (i * 7 + 3) % model.tokenizer.vocab_size() as u32).collect();
    let policy = Arc::new(TokenPolicy::new(LongValues, Axes::default()));
    let id = model.engine.submit(Request {
        end_tokens: EndTokens::Ignore,
        eviction: Some(EvictionOptions { budget: "20%".parse()?, policy }),
        ..Request::greedy(prompt, 40)
    })?;
    let kv = model.engine.finish(id, &mut |_| ())?.kv;
    let cache = model.engine.cache(id).ok_or("the sequence is open")?;
    let pages_of = |group| cache.table(group).iter().map(|page| page.index.0).collect();
    let pages = cache.shape().groups_of(0).map(pages_of).collect();
    model.engine.close(id);
    Ok((kv, pages))
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = ModelOptions::default();
    let mut model = match std::env::args().nth(1) {
        Some(path) => Model::open(Path::new(&path), &options, &mut |_| ())?,
        None => Model::from_gguf(
            &Gguf::from_bytes(TinyModel::new(TinyArchitecture::Llama).gguf()?)?,
            &options,
            &mut |_| (),
        )?,
    };
    let (kv, pages) = run(&mut model)?;
    println!("{} bytes held of a budget of {}", kv.bytes_held, kv.bytes_budget.unwrap_or(kv.bytes_full));
    println!("{} bytes would be the full cache; {} pages went", kv.bytes_full, kv.eviction.pages_evicted);
    for (kv_head, pages) in pages.iter().enumerate() {
        println!("layer 0, KV head {kv_head}: pages {pages:?}");
    }
    Ok(())
}
