//! Policies end to end on random-weight models: side by side, over any chunks, and what their axes do to real tables.

#![allow(clippy::unwrap_used)]

mod support;

use std::num::NonZeroUsize;
use std::sync::Arc;

use entrokv::gguf::Gguf;
use entrokv::{EndTokens, EvictionOptions, Model, ModelOptions, Request, SequenceId, parse_policy};
use entrokv_cache::KvGroup;
use support::{gguf, options, random_tokens};

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

/// First positions of the pages of every KV group of global layers.
fn tables(model: &Model, id: SequenceId) -> Vec<Vec<u32>> {
    let cache = model.engine.cache(id).unwrap();
    let table = |group: KvGroup| cache.table(group).iter().map(|page| page.index.0).collect();
    cache.shape().global_groups().map(table).collect()
}

/// The tokens generated and the pages held at the end.
type Outcome = (Vec<u32>, Vec<Vec<u32>>);

fn run(model: &mut Model, requests: Vec<Request>) -> Vec<Outcome> {
    let ids: Vec<SequenceId> = requests.into_iter().map(|request| model.engine.submit(request).unwrap()).collect();
    let mut tokens = vec![Vec::new(); ids.len()];
    while model.engine.is_busy() {
        for output in model.engine.step().unwrap() {
            let index = ids.iter().position(|id| *id == output.id).unwrap();
            tokens[index].extend(output.token);
        }
    }
    let outcomes = tokens.into_iter().zip(&ids).map(|(tokens, &id)| (tokens, tables(model, id))).collect();
    ids.into_iter().for_each(|id| model.engine.close(id));
    outcomes
}

/// Eight policies, eight budgets.
const EIGHT: [(&str, &str, usize); 8] = [
    ("page-entro-kv:preset=serving", "30%", 210),
    ("snapkv:window=8", "12pages", 150),
    ("streaming-llm", "64tok", 190),
    ("knorm:allot=global", "1/4", 170),
    ("tova", "40%", 120),
    ("h2o", "10pages", 230),
    ("lagkv:lag=16,allot=ada-floor:0.3", "96tok", 200),
    ("random:seed=3", "50%", 99),
];

fn eight() -> Vec<Request> {
    let requests = EIGHT.iter().zip(1..);
    requests.map(|(&(policy, budget, len), seed)| request(seed, len, 60, budget, policy)).collect()
}

#[test]
fn eight_policies_in_one_batch_are_each_as_alone() {
    for name in ["llama-tied", "gemma3"] {
        let gguf = gguf(name);
        let together = run(&mut open(&gguf, &options()), eight());
        for ((alone, together), (policy, ..)) in eight().into_iter().zip(&together).zip(EIGHT) {
            let alone = run(&mut open(&gguf, &options()), vec![alone]);
            assert_eq!(&alone[0], together, "{name}, {policy}");
        }
    }
}

#[test]
fn chunks_and_threads_never_show() {
    let gguf = gguf("qwen3-tied");
    let whole = run(&mut open(&gguf, &options()), eight());
    for (chunk, threads) in [(1, 1), (13, 2), (64, 3)] {
        let size = |n| NonZeroUsize::new(n).unwrap();
        let options = ModelOptions { chunk_size: size(chunk), threads: size(threads), ..options() };
        for ((got, expected), (policy, ..)) in run(&mut open(&gguf, &options), eight()).iter().zip(&whole).zip(EIGHT) {
            assert_eq!(got, expected, "{policy}, chunks of {chunk}, {threads} threads");
        }
    }
}

#[test]
fn an_allotment_moves_pages_between_groups_and_keeps_their_number() {
    let gguf = gguf("qwen3-untied");
    let mut model = open(&gguf, &options());
    for allotment in ["global", "ada-floor:0", "ada-interpolated:0.2", "pyramid:3"] {
        let policy = format!("random:allot={allotment}");
        let id = model.engine.submit(request(5, 400, 1, "30%", &policy)).unwrap();
        model.engine.finish(id, &mut |_| ()).unwrap();
        let kv = model.engine.kv_report(id).unwrap();
        let counts: Vec<usize> = tables(&model, id).iter().map(Vec::len).collect();
        // 30 % of 25 pages is 7 for each group.
        assert_eq!(counts.iter().sum::<usize>(), 7 * counts.len(), "{allotment}: {counts:?}");
        assert_eq!(Some(kv.bytes_held), kv.bytes_budget, "{allotment}");
        assert!(counts.iter().any(|count| *count != 7), "{allotment}: {counts:?}");
        assert!(counts.iter().all(|count| *count >= 2), "{allotment}: the sinks and the open page stay: {counts:?}");
        model.engine.close(id);
    }
}

#[test]
fn heads_of_a_layer_keep_the_same_pages_where_they_share() {
    let gguf = gguf("qwen3-untied");
    let mut model = open(&gguf, &options());
    let num_kv_heads = model.engine.shape().num_kv_heads;
    assert!(num_kv_heads > 1);
    for (policy, alike) in [("tova", true), ("paged-eviction", true), ("knorm:share=layer", true), ("knorm", false)] {
        let id = model.engine.submit(request(6, 400, 60, "20%", policy)).unwrap();
        model.engine.finish(id, &mut |_| ()).unwrap();
        let same = tables(&model, id).chunks(num_kv_heads).all(|layer| layer.iter().all(|table| *table == layer[0]));
        assert_eq!(same, alike, "{policy}");
        model.engine.close(id);
    }
}

#[test]
fn streaming_keeps_the_sinks_and_the_newest_pages() {
    let gguf = gguf("llama-tied");
    let mut model = open(&gguf, &options());
    // 200 + 120 tokens in pages of 16, six pages a group: the last of them is the open one.
    let id = model.engine.submit(request(7, 200, 121, "6pages", "streaming-llm")).unwrap();
    model.engine.finish(id, &mut |_| ()).unwrap();
    for table in tables(&model, id) {
        assert_eq!(table, [0, 15, 16, 17, 18, 19]);
    }
}

/// The scores are made of what the cache holds: the policy `knorm` keeps the pages that hold the smallest keys.
#[test]
fn knorm_keeps_the_pages_with_the_smallest_keys() {
    let gguf = gguf("llama-tied");
    let keep = 6;
    let mut model = open(&gguf, &options());
    let id = model.engine.submit(request(8, 320, 1, "6pages", "knorm:sinks=0")).unwrap();
    model.engine.finish(id, &mut |_| ()).unwrap();
    let kept = tables(&model, id);

    let mut model = open(&gguf, &options());
    let full = Request { eviction: None, ..request(8, 320, 1, "6pages", "knorm") };
    let id = model.engine.submit(full).unwrap();
    model.engine.finish(id, &mut |_| ()).unwrap();
    let cache = model.engine.cache(id).unwrap();
    let shape = cache.shape().clone();
    for (group, kept) in shape.global_groups().zip(kept) {
        let vectors = &model.engine.token_vectors(id, group.layer).unwrap()[group.kv_head as usize];
        let norms: Vec<f32> = vectors
            .keys
            .chunks_exact(shape.head_dim)
            .map(|key| key.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt() as f32)
            .collect();
        let mut pages: Vec<u32> = (0..20).collect();
        let smallest = |page: u32| norms[page as usize * 16..][..16].iter().copied().fold(f32::INFINITY, f32::min);
        pages.sort_by(|&a, &b| smallest(a).total_cmp(&smallest(b)).then(a.cmp(&b)));
        pages.truncate(keep);
        pages.sort_unstable();
        assert_eq!(kept, pages, "{group:?}");
    }
}

/// Policies of keys and values read codes, too: the second prompt finds the first one's pages encoded, and so does every decision
/// while decoding. The budget in bytes holds after every step.
#[test]
fn keys_and_values_are_read_from_codes() {
    let gguf = gguf("qwen3-untied");
    for kind in ["q8_0", "tq4", "tq3v2"] {
        for policy in ["knorm:allot=global", "keydiff", "lagkv:lag=16", "cur:allot=ada-floor:0.2", "paged-eviction"] {
            let options = ModelOptions { page_kind: kind.parse().unwrap(), ..options() };
            let mut model = open(&gguf, &options);
            let id = model.engine.submit(request(9, 300, 60, "14pages", policy)).unwrap();
            model.engine.finish(id, &mut |_| ()).unwrap();
            model.engine.extend(id, request(10, 90, 60, "12pages", policy)).unwrap();
            let mut capped_steps = 0;
            while model.engine.is_busy() {
                model.engine.step().unwrap();
                let kv = model.engine.kv_report(id).unwrap();
                if let Some(limit) = kv.bytes_budget {
                    assert!(kv.bytes_held <= limit, "{kind}, {policy}: {} of {limit}", kv.bytes_held);
                    capped_steps += 1;
                }
            }
            assert_eq!(capped_steps, 60, "{kind}, {policy}");
            assert!(model.engine.kv_report(id).unwrap().eviction.pages_evicted > 0);
            model.engine.close(id);
            assert_eq!(model.engine.pool().used_bytes(), 0);
        }
    }
}
