//! Caches whose pages are planned in bytes: tiers of kinds, and tokens packed by score.

#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Arc;

use entrokv::gguf::Gguf;
use entrokv::{EndTokens, EvictionOptions, KvReport, Model, ModelOptions, PageKind, Request, SequenceId, parse_policy};
use entrokv_cache::KvGroup;
use support::{count, gguf, options, random_tokens};

fn open(gguf: &Gguf, options: &ModelOptions) -> Model {
    Model::from_gguf(gguf, options, &mut |_| ()).unwrap()
}

fn request(seed: u64, len: usize, generate: usize, budget: &str, policy: &str) -> Request {
    let policy = Arc::from(parse_policy(policy).unwrap());
    let eviction = Some(EvictionOptions { budget: budget.parse().unwrap(), policy });
    Request { end_tokens: EndTokens::Ignore, eviction, ..Request::greedy(random_tokens(seed, len, 256), generate) }
}

const POLICIES: [&str; 8] = [
    "kvzip:chunk=100,window=32,recent=32tok,pack=score,tiers=tq4:3nats+tq3v2",
    "kvzip:chunk=100,window=32,output=true,recent=32tok,pack=score,tiers=q8_0/tq4:3nats+tq3v2",
    "kvzip:chunk=100,view=chunk,window=16,recent=32tok,tiers=tq4:3nats+tq3",
    "kvzip:chunk=64,pack=score,tiers=q8_0:0.2+tq3/tq2,recent=32tok",
    "page-entro-kv:preset=serving,pack=score,tiers=tq4:2nats+tq2",
    "snapkv:pack=score,tiers=tq3",
    "snapkv:pack=score,tiers=kivi4",
    "knorm:tiers=f16:0.1+tq4,allot=global",
];

/// Steps until the answer is there; every step of it keeps to its budget.
fn run(model: &mut Model, id: SequenceId) -> (Vec<u32>, KvReport) {
    let mut capped_steps = 0;
    while model.engine.is_busy() {
        model.engine.step().unwrap();
        let kv = model.engine.kv_report(id).unwrap();
        if let Some(limit) = kv.bytes_budget {
            assert!(kv.bytes_held <= limit, "{} of {limit}", kv.bytes_held);
            capped_steps += 1;
        }
    }
    assert!(capped_steps > 0);
    (model.engine.tokens(id).unwrap().to_vec(), model.engine.kv_report(id).unwrap())
}

#[test]
fn tiers_meet_the_budget_and_never_pass_it() {
    for name in ["qwen3-untied", "gemma3"] {
        let gguf = gguf(name);
        for policy in POLICIES {
            for budget in ["30%", "20%", "8pages", "5pages", "200KiB"] {
                let mut model = open(&gguf, &options());
                let id = model.engine.submit(request(1, 507, 120, budget, policy)).unwrap();
                let mut at_end = None;
                while at_end.is_none() {
                    model.engine.step().unwrap();
                    at_end = model.engine.kv_report(id).filter(|kv| kv.bytes_budget.is_some());
                }
                let kv = at_end.unwrap();
                let limit = kv.bytes_budget.unwrap();
                assert!(kv.bytes_held <= limit, "{name} {policy} {budget}: {} of {limit}", kv.bytes_held);
                if kv.eviction.pages_evicted > 0 {
                    // Room for no further page: for policies of one pool to the page, else to one page a group.
                    let shape = model.engine.shape();
                    let page = PageKind::F16.page_bytes(shape);
                    let pools = if policy.starts_with("kvzip") || policy.contains("allot") {
                        1
                    } else {
                        shape.num_global_groups() as u64
                    };
                    assert!(
                        limit - kv.bytes_held < page * pools,
                        "{name} {policy} {budget}: {} of {limit}",
                        kv.bytes_held
                    );
                }
                let (tokens, kv) = run(&mut model, id);
                assert_eq!(tokens.len(), 627);
                assert_eq!(kv.budget_violations, 0);
                model.engine.close(id);
                assert_eq!(model.engine.pool().used_bytes(), 0);
            }
        }
    }
}

#[test]
fn pages_are_of_the_tiers_kinds() {
    let gguf = gguf("qwen3-untied");
    // Whether the first tier has rotated codes, the second, or both.
    for (policy, kinds) in [
        (POLICIES[0], ["tq4", "tq3v2"]),
        (POLICIES[1], ["q8_0/tq4", "tq3v2"]),
        ("kvzip:chunk=100,recent=32tok,pack=score,tiers=q8_0:1nats+q8_0/tq2", ["q8_0", "q8_0/tq2"]),
    ] {
        let mut model = open(&gguf, &options());
        let id = model.engine.submit(request(2, 512, 1, "20%", policy)).unwrap();
        run(&mut model, id);
        let cache = model.engine.cache(id).unwrap();
        let count_of = |kind: &str| {
            let kind = kind.parse().unwrap();
            cache.footprint().kinds.iter().find(|held| held.kind == kind).map_or(0, |held| held.pages)
        };
        let groups = cache.shape().num_global_groups() as u64;
        // The sinks of every group, none of the others plain but those of the answer, which has not begun a page here.
        assert!(count_of("q8_0") == groups || kinds.contains(&"q8_0"), "{policy}");
        assert_eq!(count_of("f16"), 0, "{policy}");
        assert!(kinds.iter().all(|kind| count_of(kind) > 0), "{policy}");
        for group in cache.shape().global_groups() {
            let table = cache.table(group);
            let first: Vec<u32> = table[0].positions(16).take(4).collect();
            assert_eq!(first, [0, 1, 2, 3], "the sinks stand first");
            // The pages of the sinks and of the 32 recent tokens come first, then the others, best first.
            let scores: Vec<f32> = table.iter().map_while(|page| page.settled()).collect();
            assert_eq!(scores[0], f32::INFINITY);
            assert!(scores[3..].is_sorted_by(|a, b| a >= b), "{policy}: {scores:?}");
            assert!(cache.is_packed(group));
        }
    }
}

/// Frames of the pages of every group, in order.
fn frames(model: &Model, id: SequenceId) -> Vec<(KvGroup, u64, PageKind)> {
    let cache = model.engine.cache(id).unwrap();
    let pages = cache.shape().groups().flat_map(|group| cache.table(group).iter().map(move |page| (group, page)));
    pages.map(|(group, page)| (group, page.range().start, page.kind)).collect()
}

#[test]
fn tightening_frees_pages_and_moves_none() {
    let gguf = gguf("qwen3-untied");
    let mut model = open(&gguf, &options());
    let id = model.engine.submit(request(3, 1280, 1, "20%", POLICIES[0])).unwrap();
    run(&mut model, id);
    let mut before = frames(&model, id);
    let mut held = model.engine.kv_report(id).unwrap().bytes_held;
    for (seed, budget) in [(4, "10%"), (5, "6%")] {
        model.engine.extend(id, request(seed, 1, 1, budget, POLICIES[0])).unwrap();
        let (_, kv) = run(&mut model, id);
        assert!(kv.bytes_held < held);
        let after = frames(&model, id);
        let plain = |frame: &&(KvGroup, u64, PageKind)| !frame.2.is_coded();
        // The page of the turn's tokens is new, all others are of the ones there were.
        assert!(after.iter().filter(|frame| !plain(frame)).all(|frame| before.contains(frame)));
        (before, held) = (after, kv.bytes_held);
    }
}

/// What an answer costs under a policy that keeps everything, in another order.
#[test]
fn packing_shows_in_no_logit_while_nothing_is_evicted() {
    for name in ["llama-tied", "qwen3-untied", "gemma3"] {
        let gguf = gguf(name);
        let mut model = open(&gguf, &options());
        let prompt = random_tokens(6, 333, 256);
        let answer = random_tokens(7, 40, 256);
        let policy = Arc::from(parse_policy("snapkv:pack=score,tiers=f16").unwrap());
        let eviction = EvictionOptions { budget: "100pages".parse().unwrap(), policy };
        let score = model.engine.score_answer(&prompt, &answer, &eviction, &mut |_| ()).unwrap();
        assert_eq!(score.kv.eviction.pages_evicted, 0);
        let worst = score.kl.iter().copied().fold(0.0, f64::max);
        assert!(worst < 1e-4, "{name}: {worst}");
    }
}

#[test]
fn chunks_threads_and_neighbours_never_show() {
    let gguf = gguf("qwen3-untied");
    let requests =
        || POLICIES.iter().enumerate().map(|(seed, policy)| request(seed as u64, 250 + 37 * seed, 70, "20%", policy));
    let alone: Vec<(Vec<u32>, u64)> = requests()
        .map(|request| {
            let mut model = open(&gguf, &ModelOptions { threads: count(1), ..options() });
            let id = model.engine.submit(request).unwrap();
            let (tokens, kv) = run(&mut model, id);
            (tokens, kv.bytes_held)
        })
        .collect();
    for (threads, chunk) in [(2, 512), (3, 61)] {
        let options = ModelOptions { threads: count(threads), chunk_size: count(chunk), ..options() };
        let mut model = open(&gguf, &options);
        let ids: Vec<SequenceId> = requests().map(|request| model.engine.submit(request).unwrap()).collect();
        while model.engine.is_busy() {
            model.engine.step().unwrap();
        }
        let together: Vec<(Vec<u32>, u64)> = ids
            .iter()
            .map(|&id| (model.engine.tokens(id).unwrap().to_vec(), model.engine.kv_report(id).unwrap().bytes_held))
            .collect();
        assert!(together == alone, "{threads} threads, chunks of {chunk}");
    }
}

#[test]
fn what_tiers_cannot_do_is_said() {
    let gguf = gguf("qwen3-untied");
    let refused = |cache_type: &str, policy: &str| {
        let page_kind = cache_type.parse().unwrap();
        let mut model = open(&gguf, &ModelOptions { page_kind, ..options() });
        model.engine.submit(request(8, 100, 1, "20%", policy)).unwrap_err().to_string()
    };
    assert_eq!(
        refused("tq4", "snapkv:tiers=tq4"),
        "tiers are made of plain pages, and this cache is of type tq4: leave the cache type to the tiers"
    );
    assert_eq!(
        refused("f16", "snapkv:tiers=bf16:1nats+tq4"),
        "a tier of bf16 cannot be made of pages written as f16: a plain tier is of the cache's own type"
    );
    assert_eq!(
        refused("f16", "snapkv:pack=score"),
        "pack=score is for caches of tiers: say tiers=KIND too, as in tiers=f16 or tiers=tq4:3nats+tq3v2"
    );
    for policy in ["streaming-llm:rerotate=true,tiers=tq4", "rocketkv:tiers=tq4,tokens=64"] {
        let why = "evicts by layer, by mark or by slot, or reads a part, and tiers plan pages of every KV head";
        assert_eq!(refused("f16", policy), format!("{policy} {why}"));
    }
    let mut model = open(&gguf, &options());
    let id = model.engine.submit(request(9, 300, 1, "20%", "snapkv:tiers=tq4")).unwrap();
    model.engine.finish(id, &mut |_| ()).unwrap();
    let error = model.engine.extend(id, request(10, 50, 1, "20%", "snapkv")).unwrap_err().to_string();
    assert_eq!(error, "the cache is stored in tiers, and snapkv has none: name some, as in tiers=tq4");
    let mut model = open(&gguf, &options());
    let id = model.engine.submit(Request { eviction: None, ..request(9, 100, 1, "20%", "snapkv") }).unwrap();
    model.engine.finish(id, &mut |_| ()).unwrap();
    let error = model.engine.extend(id, request(10, 50, 1, "20%", "snapkv:tiers=tq4")).unwrap_err().to_string();
    assert_eq!(
        error,
        "tiers of codes need what the model's first queries say, and 101 tokens were read without it: begin a new sequence"
    );
}

/// A conversation: nothing waits for the pass, and the turn after it sees the compressed cache.
#[test]
fn a_cache_is_compressed_after_the_answer() {
    let gguf = gguf("qwen3-untied");
    let policy = "kvzip:chunk=200,window=32,recent=32tok,pack=score,tiers=tq4:3nats+tq3v2,schedule=after_answer";
    // Steps so small that a pass takes several.
    let mut model = open(&gguf, &ModelOptions { chunk_size: count(50), ..options() });
    let plain =
        model.engine.generate(Request { eviction: None, ..request(11, 400, 60, "10%", policy) }, |_| ()).unwrap();
    let id = model.engine.submit(request(11, 400, 60, "10%", policy)).unwrap();
    assert!(model.engine.compress(id).is_err(), "it is still answering");
    let answer = model.engine.finish(id, &mut |step| assert_eq!(step.pass, None)).unwrap();
    assert_eq!(answer.tokens, plain.tokens);
    assert_eq!((answer.kv.bytes_held, answer.kv.bytes_budget), (plain.kv.bytes_held, None));
    // Broken off, it leaves the cache as it was.
    assert!(model.engine.compress(id).unwrap());
    model.engine.step().unwrap();
    model.engine.cancel(id);
    assert_eq!(model.engine.kv_report(id).unwrap().bytes_held, plain.kv.bytes_held);
    model.engine.extend(id, request(12, 100, 30, "10%", policy)).unwrap();
    model.engine.finish(id, &mut |_| ()).unwrap();
    assert!(model.engine.compress(id).unwrap());
    let mut passes = 0;
    let rested = model.engine.finish(id, &mut |step| passes += usize::from(step.pass.is_some())).unwrap();
    assert!(passes > 0);
    let limit = rested.kv.bytes_budget.unwrap();
    assert!(rested.kv.bytes_held <= limit && limit < plain.kv.bytes_held / 4, "{} of {limit}", rested.kv.bytes_held);
    assert!(!model.engine.compress(id).unwrap(), "once an answer");
    // A further turn: only what is new is repeated, and what was settled stays or goes.
    let before = frames(&model, id);
    model.engine.extend(id, request(13, 50, 40, "10%", policy)).unwrap();
    model.engine.finish(id, &mut |_| ()).unwrap();
    assert!(model.engine.compress(id).unwrap());
    let mut total = 0;
    let rested = model.engine.finish(id, &mut |step| total = step.pass.map_or(total, |pass| pass.total)).unwrap();
    assert_eq!(total, 50 + 40);
    assert!(rested.kv.bytes_held <= rested.kv.bytes_budget.unwrap());
    let after = frames(&model, id);
    assert!(before.iter().filter(|frame| frame.2.is_coded() && after.contains(frame)).count() > 0);
    model.engine.close(id);
    assert_eq!(model.engine.pool().used_bytes(), 0);
}

/// The rows of a probe are those that its questions would have at the prompt's end.
#[test]
fn a_probe_stands_for_the_questions_to_come() {
    let gguf = gguf("qwen3-untied");
    let questions = "\n\nWho? When? How many?";
    let options = |chunk| ModelOptions { probe: Some(questions.into()), chunk_size: count(chunk), ..options() };
    let policies = [
        "page-entro-kv:row=window:8,rows=probe",
        "snapkv:window=8,rows=probe",
        "page-entro-kv:row=accumulated,rows=probe,pack=score,tiers=tq4:1nats+tq3",
        "kvzip:window=8,rows=probe,recent=32tok,pack=score,tiers=tq4",
    ];
    for policy in policies {
        let mut expected = None;
        for chunk in [512, 7] {
            let mut model = open(&gguf, &options(chunk));
            let id = model.engine.submit(request(14, 301, 50, "20%", policy)).unwrap();
            let before = model.engine.pool().used_bytes();
            let (tokens, kv) = run(&mut model, id);
            assert_eq!(before, 0);
            assert!(model.engine.timing(id).unwrap().pass > std::time::Duration::ZERO, "{policy}");
            assert_eq!((model.engine.cache(id).unwrap().logical_len(), kv.budget_violations), (350, 0), "{policy}");
            let outcome = (tokens, kv.bytes_held);
            assert_eq!(*expected.get_or_insert(outcome.clone()), outcome, "{policy}, chunks of {chunk}");
            model.engine.close(id);
            assert_eq!(model.engine.pool().used_bytes(), 0);
        }
        // Other rows, other pages: what the prompt's own queries look at is something else.
        let mut model = open(&gguf, &options(512));
        let own = policy.replace(",rows=probe", "");
        let id = model.engine.submit(request(14, 301, 50, "20%", &own)).unwrap();
        let (tokens, kv) = run(&mut model, id);
        let positions = |model: &Model, id| -> Vec<u32> {
            let cache = model.engine.cache(id).unwrap();
            cache
                .shape()
                .global_groups()
                .flat_map(|group| cache.table(group))
                .flat_map(|page| page.positions(16))
                .collect()
        };
        let of_own = positions(&model, id);
        let probed = model.engine.submit(request(14, 301, 50, "20%", policy)).unwrap();
        run(&mut model, probed);
        assert_ne!(positions(&model, probed), of_own, "{policy}: {tokens:?} {}", kv.bytes_held);
    }
    let mut model = open(&gguf, &ModelOptions { context_len: Some(301), ..options(512) });
    let error = model.engine.submit(request(14, 301, 1, "20%", policies[0])).unwrap_err().to_string();
    assert!(
        error.starts_with("the probe of ") && error.ends_with("behind the prompt of 301; the context holds 301"),
        "{error}"
    );
}
