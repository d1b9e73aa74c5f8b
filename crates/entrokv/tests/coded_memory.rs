//! Codes and evicted pages give memory back: resident bytes after a long prompt. Alone in its process, whose memory it measures.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod support;

use std::sync::Arc;

use entrokv::{AUTO, EndTokens, EvictionOptions, KvReport, ModelOptions, Question, Request, parse_policy, recipe};
use support::{model_path, open, options};

const MIB: u64 = 1 << 20;

/// What the pool no longer counts, the process no longer holds.
#[test]
fn resident_memory_falls_with_the_bytes_of_the_pool() {
    codes_take_what_they_weigh();
    a_small_cache_gives_back_what_the_ledger_says();
}

fn codes_take_what_they_weigh() {
    let path = model_path("smollm2-135m").unwrap();
    let mut model = open(&path, &ModelOptions { page_kind: "tq4".parse().unwrap(), ..options() });
    let vocab = model.tokenizer.vocab_size() as u32;
    let turn = |model: &mut entrokv::Model, len: usize| {
        let prompt = support::random_tokens(1, len, vocab);
        let request = Request { end_tokens: EndTokens::Ignore, ..Request::greedy(prompt, 2) };
        let id = model.engine.submit(request).unwrap();
        let kv = model.engine.finish(id, &mut |_| ()).unwrap().kv;
        (id, kv, resident_bytes())
    };
    // Buffers of a whole chunk are there before the measurement begins.
    let (id, _, _) = turn(&mut model, 600);
    model.engine.close(id);
    let before = resident_bytes();
    let (id, kv, after) = turn(&mut model, 3000);
    // 188 pages of 90 groups: 66 MiB as they are written; 184 of each are codes of 1,088 bytes at the end.
    assert_eq!(kv.bytes_full, 188 * 90 * 4096);
    assert_eq!(kv.bytes_held, 90 * (4 * 4096 + 184 * 1088));
    let (Some(before), Some(after)) = (before, after) else { return };
    let grown = after.saturating_sub(before);
    println!("{} MiB held of {}, the process grew by {} MiB", kv.bytes_held / MIB, kv.bytes_full / MIB, grown / MIB);
    assert!(grown < kv.bytes_held + 8 * MIB, "the process grew by {grown} bytes, the pool holds {}", kv.bytes_held);
    model.engine.close(id);
    assert_eq!(model.engine.pool().used_bytes(), 0);
}

/// The recipe scores, encodes, packs and evicts: its buffers are not to stay where the pages were.
fn a_small_cache_gives_back_what_the_ledger_says() {
    let path = model_path("smollm2-135m").unwrap();
    let mut model = open(&path, &options());
    let vocab = model.tokenizer.vocab_size() as u32;
    let turn = |model: &mut entrokv::Model, budget: Option<&str>| {
        let eviction = budget.map(|budget| {
            let budget = budget.parse().unwrap();
            let policy = recipe(AUTO, budget, Question::Seen).unwrap();
            EvictionOptions { budget, policy: Arc::from(parse_policy(&policy).unwrap()) }
        });
        let prompt = support::random_tokens(1, 3000, vocab);
        let request = Request { end_tokens: EndTokens::Ignore, eviction, ..Request::greedy(prompt, 16) };
        let id = model.engine.submit(request).unwrap();
        let kv = model.engine.finish(id, &mut |_| ()).unwrap().kv;
        let resident = resident_bytes();
        model.engine.close(id);
        (ledger(&kv), resident)
    };
    turn(&mut model, Some("10%"));
    let (full, resident_full) = turn(&mut model, None);
    let (small, resident_small) = turn(&mut model, Some("10%"));
    let (Some(resident_full), Some(resident_small)) = (resident_full, resident_small) else { return };
    let (counted, fell) = (full - small, resident_full.saturating_sub(resident_small));
    println!("{} MiB less in the ledger, {} MiB less resident", counted / MIB, fell / MIB);
    assert!(fell.abs_diff(counted) * 20 < counted, "{fell} bytes less resident, {counted} less in the ledger");
}

/// Every byte the ledger counts.
fn ledger(kv: &KvReport) -> u64 {
    kv.bytes_held + kv.bytes_window + kv.bytes_metadata + kv.bytes_policy_state
}

fn resident_bytes() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    Some(statm.split_whitespace().nth(1)?.parse::<u64>().ok()? * 4096)
}
