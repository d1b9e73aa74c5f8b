//! A hard cap over a long answer: bytes held and resident memory. Alone in its process, whose memory it measures.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod support;

use std::sync::Arc;

use entrokv::{EndTokens, EvictionOptions, PageKind, Request, parse_policy};
use support::{model_path, open, options};

/// Bytes held never pass the budget in 4,096 steps, and resident memory does not grow with them.
#[test]
fn rolling_memory_is_flat_over_4096_tokens() {
    let path = model_path("smollm2-135m").unwrap();
    let mut model = open(&path, &options());
    let vocab = model.tokenizer.vocab_size() as u32;
    let request = Request {
        end_tokens: EndTokens::Ignore,
        eviction: Some(EvictionOptions {
            budget: "20%".parse().unwrap(),
            policy: Arc::from(parse_policy("page-entro-kv:preset=serving").unwrap()),
        }),
        ..Request::greedy(support::random_tokens(1, 1000, vocab), 4096)
    };
    let id = model.engine.submit(request).unwrap();
    let mut resident = Vec::new();
    let mut steps = 0;
    while model.engine.is_busy() {
        model.engine.step().unwrap();
        let kv = model.engine.kv_report(id).unwrap();
        let Some(limit) = kv.bytes_budget else { continue };
        assert!(kv.bytes_held <= limit, "{} of {limit} after {} tokens", kv.bytes_held, kv.logical_tokens);
        // 20 % of 1,000 tokens is 12 whole pages for each of 90 groups.
        assert_eq!(limit, 12 * 90 * PageKind::F16.page_bytes(model.engine.shape()));
        steps += 1;
        if steps % 512 == 0 {
            resident.extend(resident_bytes());
        }
    }
    assert_eq!(steps, 4096);
    println!("resident MiB every 512 tokens: {:?}", resident.iter().map(|bytes| bytes >> 20).collect::<Vec<_>>());
    if let (Some(first), Some(last)) = (resident.first(), resident.last()) {
        assert!(*last < first + (4 << 20), "grew from {first} to {last}");
    }
}

fn resident_bytes() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    Some(statm.split_whitespace().nth(1)?.parse::<u64>().ok()? * 4096)
}
