//! When pages go: while a prompt is read, many at once, or one by one.

#![allow(clippy::unwrap_used)]

mod support;

use std::collections::HashSet;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use entrokv::gguf::Gguf;
use entrokv::{
    EndTokens, EvictionOptions, FinishReason, LayerKind, Model, ModelOptions, PageKind, Request, parse_policy,
};
use support::dense::DenseDecoder;
use support::{exact, gguf, options, random_tokens};

fn open(gguf: &Gguf, options: &ModelOptions) -> Model {
    Model::from_gguf(gguf, options, &mut |_| ()).unwrap()
}

fn request(len: usize, generate: usize, budget: &str, policy: &str) -> Request {
    let policy = Arc::from(parse_policy(policy).unwrap());
    Request {
        end_tokens: EndTokens::Ignore,
        eviction: Some(EvictionOptions { budget: budget.parse().unwrap(), policy }),
        ..Request::greedy(random_tokens(11, len, 256), generate)
    }
}

/// Bytes of a page in every KV group of global layers.
fn page_row(model: &Model) -> u64 {
    PageKind::F16.page_bytes(model.engine.shape()) * model.engine.shape().num_global_groups() as u64
}

#[test]
fn per_chunk_never_holds_more_than_the_budget_and_a_chunk() {
    for name in ["llama-tied", "gemma3"] {
        let gguf = gguf(name);
        for policy in [
            "page-entro-kv:schedule=per_chunk:48",
            "h2o:schedule=per_chunk:48",
            "knorm:granularity=token,schedule=per_chunk:48",
        ] {
            for (budget, pages) in [("5pages", 5), ("20%", 5), ("80tok", 5)] {
                let mut model = open(&gguf, &options());
                let id = model.engine.submit(request(400, 40, budget, policy)).unwrap();
                let (budget_bytes, chunk) = (pages * page_row(&model), 48 / 16 * page_row(&model));
                let mut reading_peak = 0;
                while model.engine.is_busy() {
                    model.engine.step().unwrap();
                    let kv = model.engine.kv_report(id).unwrap();
                    match kv.bytes_budget {
                        // After the prompt the budget itself holds; while reading, the pool may lend a chunk more.
                        Some(limit) => assert!(kv.bytes_held <= limit && limit == budget_bytes, "{name}, {policy}"),
                        None => reading_peak = reading_peak.max(kv.bytes_held),
                    }
                    assert_eq!(model.engine.pool().used_bytes(), kv.bytes_held + kv.bytes_window);
                }
                assert!(reading_peak > 0 && reading_peak <= budget_bytes + chunk, "{name}, {policy}: {reading_peak}");
            }
        }
    }
}

/// Queries of a chunk see the chunk, and of what came before it what the evictions until then have left.
#[test]
fn a_chunk_sees_what_earlier_chunks_left() {
    for (name, granularity) in [("llama-tied", "page"), ("qwen3-untied", "token"), ("gemma3", "page")] {
        let gguf = gguf(name);
        let mut model = open(&gguf, &exact());
        let (prompt, chunk) = (240, 64);
        let policy = format!("snapkv:window=8,granularity={granularity},schedule=per_chunk:{chunk}");
        let id = model.engine.submit(request(prompt, 6, "4pages", &policy)).unwrap();
        let mut left: Vec<HashSet<(u32, u32, u32)>> = Vec::new();
        while model.engine.tokens(id).unwrap().len() == prompt {
            let outputs = model.engine.step().unwrap();
            assert!(
                outputs[0].computed == prompt || outputs[0].computed.is_multiple_of(chunk),
                "{}",
                outputs[0].computed
            );
            let cache = model.engine.cache(id).unwrap();
            let held = cache.shape().groups().flat_map(|group| {
                let positions = cache.table(group).iter().flat_map(|page| page.positions(16));
                positions.map(move |position| (group.layer, group.kv_head, position))
            });
            left.push(held.collect());
        }
        assert_eq!(left.len(), 4);
        model.engine.cancel(id);
        let tokens = model.engine.tokens(id).unwrap();
        let global = |layer: usize| model.config.layers[layer] == LayerKind::Global;
        let mask = |layer: usize, kv_head: usize, query: usize, key: usize| {
            let passed = query / chunk;
            let sees = |key: usize| left[passed - 1].contains(&(layer as u32, kv_head as u32, key as u32));
            !global(layer) || key / chunk == passed || sees(key)
        };
        let dense = DenseDecoder::new(&gguf, &model.config).logits(&tokens[..prompt], &mask);
        let row = &dense[prompt - 1];
        let best = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let ours = row[tokens[prompt] as usize];
        assert!(best - ours < 1e-3, "{name}: {} below the best", best - ours);
    }
}

#[test]
fn per_chunk_is_the_same_in_any_batch_chunk_and_number_of_threads() {
    let gguf = gguf("qwen3-tied");
    let policies =
        ["page-entro-kv:schedule=per_chunk:64", "h2o:schedule=per_chunk:40", "lagkv:lag=8,schedule=per_chunk:64"];
    let run = |options: &ModelOptions, policies: &[&str]| -> Vec<Vec<u32>> {
        let mut model = open(&gguf, options);
        let requests = policies.iter().map(|policy| request(300, 30, "96tok", policy));
        let ids: Vec<_> = requests.map(|request| model.engine.submit(request).unwrap()).collect();
        ids.iter().map(|id| model.engine.finish(*id, &mut |_| ()).unwrap().tokens).collect()
    };
    let together = run(&options(), &policies);
    for (policy, together) in policies.iter().zip(&together) {
        assert_eq!(&run(&options(), &[policy])[0], together, "{policy}");
    }
    for (chunk, threads) in [(1, 1), (17, 3), (300, 2)] {
        let size = |n| NonZeroUsize::new(n).unwrap();
        let options = ModelOptions { chunk_size: size(chunk), threads: size(threads), ..options() };
        assert_eq!(run(&options, &policies), together, "chunks of {chunk}, {threads} threads");
    }
}

/// A prompt no longer than a chunk is read as under any other schedule.
#[test]
fn a_single_chunk_is_a_whole_prompt() {
    let gguf = gguf("llama-tied");
    let mut answers = ["rolling", "per_chunk:512", "per_chunk"].map(|schedule| {
        let policy = format!("page-entro-kv:schedule={schedule}");
        open(&gguf, &options()).engine.generate(request(200, 40, "25%", &policy), |_| ()).unwrap().tokens
    });
    answers.sort();
    assert_eq!(answers[0], answers[2]);
}

#[test]
fn a_chunk_that_is_interrupted_while_a_policy_watches_cancels_its_sequence() {
    let gguf = gguf("llama-tied");
    let options = options();
    for (policy, goes_on) in [("page-entro-kv:schedule=per_chunk:64", false), ("knorm:schedule=per_chunk:64", true)] {
        let mut model = open(&gguf, &options);
        let id = model.engine.submit(request(200, 5, "4pages", policy)).unwrap();
        model.engine.step().unwrap();
        options.interrupt.store(true, Ordering::SeqCst);
        assert!(model.engine.step().is_err());
        options.interrupt.store(false, Ordering::SeqCst);
        let reason = model.engine.finish(id, &mut |_| ()).unwrap().finish_reason;
        assert_eq!(reason, if goes_on { FinishReason::Length } else { FinishReason::Cancelled }, "{policy}");
        model.engine.close(id);
        assert_eq!(model.engine.pool().used_bytes(), 0);
    }
}

/// `every:N` makes room for N tokens at once: what is held falls by so many pages, and grows back to the budget.
#[test]
fn every_frees_as_many_pages_as_it_says() {
    let gguf = gguf("llama-tied");
    for (schedule, pages) in [("rolling", 1), ("every:16", 1), ("every:48", 3), ("every:1000", 8)] {
        for granularity in ["page", "token"] {
            let mut model = open(&gguf, &options());
            let policy = format!("random:granularity={granularity},schedule={schedule}");
            let id = model.engine.submit(request(160, 200, "9pages", &policy)).unwrap();
            let mut held = Vec::new();
            while model.engine.is_busy() {
                model.engine.step().unwrap();
                let kv = model.engine.kv_report(id).unwrap();
                held.extend(kv.bytes_budget.map(|_| kv.bytes_held / page_row(&model)));
            }
            assert_eq!(held[0], 9, "{policy}");
            assert!(held.iter().all(|held| *held <= 9), "{policy}: {held:?}");
            // Before a page is opened so many go; one of 9 pages holds the sinks.
            assert_eq!(*held.iter().min().unwrap(), 9 - pages + 1, "{policy}");
            assert!(held.windows(2).all(|pair| pair[1] <= pair[0] + 1), "{policy}");
        }
    }
}
