//! Codes give memory back: resident bytes of a long prompt. Alone in its process, whose memory it measures.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod support;

use entrokv::{EndTokens, ModelOptions, Request};
use support::{model_path, open, options};

/// What the pool no longer counts, the process no longer holds.
#[test]
fn resident_memory_falls_with_the_bytes_of_the_pool() {
    const MIB: u64 = 1 << 20;
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

fn resident_bytes() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    Some(statm.split_whitespace().nth(1)?.parse::<u64>().ok()? * 4096)
}
