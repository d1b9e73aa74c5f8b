//! Eviction of single tokens end to end: the right ones stay, whole pages are freed, and what moved is read as if it had not.

#![allow(clippy::unwrap_used)]

mod support;

use std::collections::HashSet;
use std::num::NonZeroUsize;
use std::sync::Arc;

use entrokv::gguf::Gguf;
use entrokv::{EndTokens, EvictionOptions, LayerKind, Model, ModelOptions, Request, SequenceId, parse_policy};
use entrokv_cache::KvGroup;
use support::dense::DenseDecoder;
use support::{exact, gguf, options, random_tokens};

fn open(gguf: &Gguf, options: &ModelOptions) -> Model {
    Model::from_gguf(gguf, options, &mut |_| ()).unwrap()
}

fn request(seed: u64, len: usize, generate: usize, budget: &str, policy: &str) -> Request {
    let policy = Arc::from(parse_policy(policy).unwrap());
    Request {
        end_tokens: EndTokens::Ignore,
        eviction: Some(EvictionOptions { budget: budget.parse().unwrap(), policy }),
        ..Request::greedy(random_tokens(seed, len, 256), generate)
    }
}

/// Positions that every KV group of global layers holds.
fn positions(model: &Model, id: SequenceId) -> Vec<Vec<u32>> {
    let cache = model.engine.cache(id).unwrap();
    let page_size = cache.shape().page_size;
    let of = |group: KvGroup| cache.table(group).iter().flat_map(|page| page.positions(page_size)).collect();
    cache.shape().global_groups().map(of).collect()
}

/// `knorm` keeps the tokens with the smallest keys, and what it holds of them are the bytes of the full cache.
#[test]
fn the_best_tokens_stay_and_are_what_they_were() {
    let gguf = gguf("llama-tied");
    for (len, page_size) in [(320, 16), (325, 16), (203, 7), (100, 1)] {
        let options = ModelOptions { page_size, ..options() };
        let keep = 6;
        let mut model = open(&gguf, &options);
        let policy = "knorm:granularity=token,schedule=once";
        let id = model.engine.submit(request(8, len, 1, &format!("{keep}pages"), policy)).unwrap();
        model.engine.finish(id, &mut |_| ()).unwrap();
        let (kept, kv) = (positions(&model, id), model.engine.kv_report(id).unwrap());
        assert_eq!(Some(kv.bytes_held), kv.bytes_budget);
        assert_eq!(model.engine.pool().used_bytes(), kv.bytes_held + kv.bytes_window);

        let mut full_model = open(&gguf, &options);
        let full = Request { eviction: None, ..request(8, len, 1, "9pages", policy) };
        let full_id = full_model.engine.submit(full).unwrap();
        full_model.engine.finish(full_id, &mut |_| ()).unwrap();
        let shape = full_model.engine.shape().clone();
        let (open, head_dim) = (len % page_size, shape.head_dim);
        for (group, kept) in shape.global_groups().zip(kept) {
            let of = |model: &Model, id| {
                model.engine.token_vectors(id, group.layer).unwrap()[group.kv_head as usize].clone()
            };
            let (ours, full) = (of(&model, id), of(&full_model, full_id));
            let norm = |token: usize| {
                let key = &full.keys[token * head_dim..][..head_dim];
                key.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt() as f32
            };
            let num_kept = (keep - usize::from(open > 0)) * page_size + open;
            // The four sinks stay, and the tokens of the open page; then by norm, of equals the newer.
            let stays = |token: usize| token < 4 || token >= len - open;
            let mut expected: Vec<usize> = (0..len).filter(|&token| !stays(token)).collect();
            expected.sort_by(|&a, &b| norm(a).total_cmp(&norm(b)).then(b.cmp(&a)));
            expected.truncate(num_kept - 4 - open);
            expected.extend((0..len).filter(|&token| stays(token)));
            expected.sort_unstable();
            let kept: Vec<usize> = kept.into_iter().map(|position| position as usize).collect();
            assert_eq!(kept, expected, "{group:?}, {len} tokens in pages of {page_size}");
            for (place, &token) in kept.iter().enumerate() {
                let row = |vectors: &[f32], at: usize| vectors[at * head_dim..][..head_dim].to_vec();
                assert_eq!(row(&ours.keys, place), row(&full.keys, token), "{group:?}, key of {token}");
                assert_eq!(row(&ours.values, place), row(&full.values, token), "{group:?}, value of {token}");
            }
        }
    }
}

/// What is generated is what a dense decoder gives that sees, in each (layer, KV head), the tokens that were kept.
#[test]
fn evicted_tokens_equal_masked_ones() {
    for name in ["llama-tied", "qwen2-tied", "qwen3-untied", "gemma3"] {
        for policy in ["page-entro-kv", "snapkv:window=8,allot=ada-floor:0.2", "random:allot=global"] {
            let comma = if policy.contains(':') { ',' } else { ':' };
            let policy = format!("{policy}{comma}granularity=token,schedule=once");
            let gguf = gguf(name);
            let mut model = open(&gguf, &exact());
            let (prompt, answer) = (230, 8);
            let id = model.engine.submit(request(11, prompt, answer, "25%", &policy)).unwrap();
            while model.engine.tokens(id).unwrap().len() == prompt {
                model.engine.step().unwrap();
            }
            let cache = model.engine.cache(id).unwrap();
            let mut kept: HashSet<(usize, usize, usize)> = HashSet::new();
            for group in cache.shape().groups() {
                let positions = cache.table(group).iter().flat_map(|page| page.positions(16));
                let (layer, kv_head) = (group.layer as usize, group.kv_head as usize);
                kept.extend(positions.map(|position| (layer, kv_head, position as usize)));
            }
            let moved = cache.shape().global_groups().any(|g| cache.table(g).iter().any(|page| page.is_compacted()));
            assert!(moved, "{name}, {policy}");
            model.engine.finish(id, &mut |_| ()).unwrap();
            let tokens = model.engine.tokens(id).unwrap();
            let global = |layer: usize| model.config.layers[layer] == LayerKind::Global;
            let mask = |layer: usize, kv_head: usize, query: usize, key: usize| {
                query < prompt || key >= prompt || !global(layer) || kept.contains(&(layer, kv_head, key))
            };
            let dense = DenseDecoder::new(&gguf, &model.config).logits(&tokens[..tokens.len() - 1], &mask);
            for (position, row) in dense.iter().enumerate().skip(prompt - 1) {
                let best = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let ours = row[tokens[position + 1] as usize];
                assert!(best - ours < 1e-3, "{name}, {policy}: position {position}, {} below the best", best - ours);
            }
        }
    }
}

/// Policies of every kind over tokens, their budgets and prompts.
const OVER_TOKENS: [(&str, &str, usize); 8] = [
    ("page-entro-kv:preset=serving,granularity=token", "30%", 210),
    ("snapkv:window=8,granularity=token", "12pages", 150),
    ("streaming-llm:granularity=token", "64tok", 190),
    ("knorm:allot=global,granularity=token", "1/4", 170),
    ("tova:granularity=token", "40%", 120),
    ("h2o:granularity=token", "10pages", 230),
    ("lagkv:lag=16,allot=ada-floor:0.3,granularity=token,schedule=every:40", "96tok", 200),
    ("random:seed=3,allot=pyramid:4,granularity=token,schedule=per_chunk:32", "50%", 99),
];

fn requests() -> Vec<Request> {
    let requests = OVER_TOKENS.iter().zip(1..);
    requests.map(|(&(policy, budget, len), seed)| request(seed, len, 60, budget, policy)).collect()
}

/// The tokens generated, and the positions held at the end.
type Outcome = (Vec<u32>, Vec<Vec<u32>>);

fn run(model: &mut Model, requests: Vec<Request>) -> Vec<Outcome> {
    let ids: Vec<SequenceId> = requests.into_iter().map(|request| model.engine.submit(request).unwrap()).collect();
    let mut tokens = vec![Vec::new(); ids.len()];
    while model.engine.is_busy() {
        for output in model.engine.step().unwrap() {
            let index = ids.iter().position(|id| *id == output.id).unwrap();
            tokens[index].extend(output.token);
        }
        for id in &ids {
            let kv = model.engine.kv_report(*id).unwrap();
            assert!(kv.bytes_budget.is_none_or(|limit| kv.bytes_held <= limit), "{kv:?}");
        }
    }
    let outcomes = tokens.into_iter().zip(&ids).map(|(tokens, &id)| (tokens, positions(model, id))).collect();
    ids.into_iter().for_each(|id| model.engine.close(id));
    assert_eq!(model.engine.pool().used_bytes(), 0);
    outcomes
}

#[test]
fn batches_chunks_and_threads_never_show() {
    for name in ["qwen3-tied", "gemma3"] {
        let gguf = gguf(name);
        let together = run(&mut open(&gguf, &options()), requests());
        for ((alone, together), (policy, ..)) in requests().into_iter().zip(&together).zip(OVER_TOKENS) {
            assert_eq!(&run(&mut open(&gguf, &options()), vec![alone])[0], together, "{name}, {policy}");
        }
        for (chunk, threads) in [(1, 1), (13, 2), (64, 3)] {
            let size = |n| NonZeroUsize::new(n).unwrap();
            let options = ModelOptions { chunk_size: size(chunk), threads: size(threads), ..options() };
            let got = run(&mut open(&gguf, &options), requests());
            for ((got, expected), (policy, ..)) in got.iter().zip(&together).zip(OVER_TOKENS) {
                assert_eq!(got, expected, "{name}, {policy}, chunks of {chunk}, {threads} threads");
            }
        }
    }
}

/// StreamingLLM to the token: the sinks and the newest, which at page granularity bring their neighbours along.
#[test]
fn streaming_keeps_four_sinks_and_the_newest_tokens() {
    let gguf = gguf("llama-tied");
    let mut model = open(&gguf, &options());
    let id = model.engine.submit(request(7, 203, 1, "64tok", "streaming-llm:granularity=token")).unwrap();
    model.engine.finish(id, &mut |_| ()).unwrap();
    // 4 pages: one of them is open with 11 of 16 tokens, so 59 tokens are held.
    let expected: Vec<u32> = (0..4).chain(203 - 55..203).collect();
    assert!(positions(&model, id).iter().all(|held| *held == expected));
}

/// A cache of codes evicts tokens before its pages are encoded and pages after that; the budget in bytes holds throughout, over
/// turns with other policies too.
#[test]
fn codes_do_not_move_and_budgets_hold() {
    let gguf = gguf("qwen3-untied");
    for kind in ["q8_0", "tq4", "tq3v2", "bf16", "f32"] {
        for policy in ["knorm:allot=global,granularity=token", "snapkv:window=8,granularity=token", "h2o:recent=1"] {
            let options = ModelOptions { page_kind: kind.parse().unwrap(), ..options() };
            let mut model = open(&gguf, &options);
            let first = "page-entro-kv:granularity=token";
            let id = model.engine.submit(request(9, 300, 60, "14pages", first)).unwrap();
            let mut capped_steps = 0;
            for turn in 0..2 {
                if turn == 1 {
                    model.engine.extend(id, request(10, 90, 60, "12pages", policy)).unwrap();
                }
                while model.engine.is_busy() {
                    model.engine.step().unwrap();
                    let kv = model.engine.kv_report(id).unwrap();
                    if let Some(limit) = kv.bytes_budget {
                        assert!(kv.bytes_held <= limit, "{kind}, {policy}: {} of {limit}", kv.bytes_held);
                        capped_steps += 1;
                    }
                }
                assert!(positions(&model, id).iter().all(|held| held.is_sorted_by(|a, b| a < b)), "{kind}, {policy}");
            }
            assert_eq!(capped_steps, 120, "{kind}, {policy}");
            model.engine.close(id);
            assert_eq!(model.engine.pool().used_bytes(), 0);
        }
    }
}
