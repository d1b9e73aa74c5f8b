//! KV files, end to end on random-weight models and, where it is at hand, on a real one.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

#[path = "../support/mod.rs"]
mod support;

mod going_on;
mod recorder;
mod refused;

use std::sync::Arc;

use entrokv::kv_file::Notes;
use entrokv::{EndTokens, Engine, EvictionOptions, Request, SamplingOptions, SequenceId, parse_policy};
use support::{gguf, random_tokens};

/// A random-weight model by the name of its fixture.
/// A budget and a policy in words.
type Cap = Option<(&'static str, &'static str)>;

fn eviction(cap: Cap) -> Option<EvictionOptions> {
    cap.map(|(budget, policy)| EvictionOptions {
        budget: budget.parse().unwrap(),
        policy: Arc::from(parse_policy(policy).unwrap()),
    })
}

/// `generate` tokens drawn with a seed after `len` random ones: choices that show every bit of a logit sooner or later.
fn request(seed: u64, len: usize, generate: usize, cap: Cap) -> Request {
    Request {
        sampling: SamplingOptions { temperature: 1.0, seed: Some(seed), ..SamplingOptions::default() },
        end_tokens: EndTokens::Ignore,
        eviction: eviction(cap),
        ..Request::greedy(random_tokens(seed, len, 256), generate)
    }
}

/// The file of a sequence.
fn saved(engine: &Engine, id: SequenceId) -> Vec<u8> {
    let mut file = Vec::new();
    let bytes = engine.save_sequence(id, &Notes::new(), &mut file).unwrap();
    assert_eq!(bytes, file.len() as u64);
    file
}
