//! Forks end to end on random-weight models: each goes on as if it were alone, to the bit, and pages are shared meanwhile.

#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use entrokv::gguf::Gguf;
use entrokv::store::TokenVectors;
use entrokv::{
    EndTokens, Engine, EvictionOptions, FinishReason, ForkError, Model, ModelOptions, Request, RowOrigin,
    SamplingOptions, SequenceId, SubmitError, deciding_later, parse_policy,
};
use support::{count, fixtures, options, random_tokens};

/// A budget and a policy in words.
type Cap = Option<(&'static str, &'static str)>;

fn open(model: &str, options: &ModelOptions) -> Engine {
    let gguf = Gguf::open(&fixtures().join("architectures").join(format!("{model}.gguf"))).unwrap();
    let options = ModelOptions { pool_bytes: Some(options.pool_bytes.unwrap_or(64 << 20)), ..options.clone() };
    Model::from_gguf(&gguf, &options, &mut |_| ()).unwrap().engine
}

fn cap_of(budget: &str, policy: &str) -> EvictionOptions {
    EvictionOptions { budget: budget.parse().unwrap(), policy: Arc::from(parse_policy(policy).unwrap()) }
}

/// `generate` tokens drawn with a seed after `len` random ones: choices that show every bit of a logit sooner or later.
fn request(seed: u64, len: usize, generate: usize, cap: Cap) -> Request {
    Request {
        sampling: SamplingOptions { temperature: 1.0, seed: Some(seed), ..SamplingOptions::default() },
        end_tokens: EndTokens::Ignore,
        eviction: cap.map(|(budget, policy)| cap_of(budget, policy)),
        ..Request::greedy(random_tokens(seed, len, 256), generate)
    }
}

/// Tokens of a sequence, and all that its cache holds.
fn state(engine: &Engine, id: SequenceId) -> (Vec<u32>, Vec<Vec<TokenVectors>>) {
    let layers = engine.shape().layers.len() as u32;
    let vectors = (0..layers).map(|layer| engine.token_vectors(id, layer).unwrap()).collect();
    (engine.tokens(id).unwrap().to_vec(), vectors)
}

fn run(engine: &mut Engine) {
    while engine.is_busy() {
        for output in engine.step().unwrap() {
            assert!(!matches!(output.finished, Some(FinishReason::Failed(_))), "{output:?}");
        }
    }
}

/// Pages of two kinds of codes, their tokens packed by score.
const TIERS: &str = "kvzip:chunk=64,tiers=tq4:3nats+tq3v2,pack=score";

/// Writes over keys where they lie.
const THINK: &str = "think:fraction=0.3,window=8,recent=40";

/// Caps of the turn before the fork, and of the turns after it.
const CAPS: [(Cap, [Cap; 3]); 9] = [
    (None, [None, Some(("96tok", "snapkv:window=4")), Some(("50%", "knorm:granularity=token"))]),
    (Some(("50%", "page-entro-kv:preset=serving")), [None, None, Some(("40%", "tova"))]),
    (
        Some(("60%", "h2o:granularity=token")),
        [Some(("40%", "knorm:granularity=token")), None, Some(("40%", "h2o:granularity=token,schedule=per_chunk:32"))],
    ),
    (
        Some(("50%", "streaming-llm:rerotate=true")),
        [Some(("40%", "streaming-llm:rerotate=true")), None, Some(("60%", "streaming-llm:rerotate=true"))],
    ),
    (Some(("50%", "kvzip:chunk=64")), [None, Some(("50%", "lagkv:lag=16")), Some(("30%", "kvzip:chunk=64"))]),
    (
        Some(("60%", "expected-attention")),
        [Some(("50%", "expected-attention")), None, Some(("40%", "expected-attention"))],
    ),
    (Some(("60%", "compactor:chunk=32")), [Some(("40%", "compactor:chunk=32")), Some(("50%", "h2o")), None]),
    (None, [None, Some(("100%", THINK)), None]),
    (Some(("30%", TIERS)), [None, None, None]),
];

#[test]
fn forks_go_on_as_if_alone() {
    for (model, kinds) in [
        ("llama-tied", &["f16"][..]),
        ("qwen3-tied", &["f16", "tq4", "q8_0/tq2", "kivi4"]),
        ("gemma3", &["f16", "tq4"]),
    ] {
        for kind in kinds {
            for (first_cap, caps) in CAPS {
                // Tiers are made of plain pages, and codes of heads of 32 elements; channels are cleared in plain pages alone.
                let is_tiered = first_cap.is_some_and(|(_, policy)| policy == TIERS);
                let clears = caps.iter().flatten().any(|(_, policy)| *policy == THINK);
                if (is_tiered || clears) && *kind != "f16" || is_tiered && model == "llama-tied" {
                    continue;
                }
                // With and without an open page, and constants of codes taken before the fork or after it.
                for first_len in [203, 192, 90] {
                    let what = format!("{model}, {kind}, {first_cap:?}, {first_len}");
                    let options = ModelOptions { page_kind: kind.parse().unwrap(), ..options() };
                    let first = request(1, first_len, if first_len == 192 { 0 } else { 9 }, first_cap);
                    let turns: Vec<Request> =
                        (2..).zip(caps).map(|(seed, cap)| request(seed, 20 * seed as usize, 60, cap)).collect();
                    let alone = turns.iter().map(|turn| {
                        let mut engine = open(model, &options);
                        let id = engine.submit(first.clone()).unwrap();
                        run(&mut engine);
                        engine.extend(id, turn.clone()).unwrap();
                        run(&mut engine);
                        state(&engine, id)
                    });

                    let mut engine = open(model, &ModelOptions { chunk_size: count(50), ..options.clone() });
                    let original = engine.submit(first.clone()).unwrap();
                    run(&mut engine);
                    let before = engine.pool().used_bytes();
                    let ids = [original, engine.fork(original).unwrap(), engine.fork(original).unwrap()];
                    let kind = engine.page_kind().written_as();
                    let open_pages = if engine.cache(original).unwrap().open_page().is_some() { 2 } else { 0 };
                    let groups = engine.shape().num_groups() as u64;
                    let copied = open_pages * groups * kind.page_bytes(engine.shape());
                    assert_eq!(engine.pool().used_bytes(), before + copied, "{what}");
                    assert_eq!(state(&engine, ids[0]), state(&engine, ids[2]), "{what}");
                    let held = ids.map(|id| engine.kv_report(id).unwrap().bytes_held);
                    assert!(held[0] == held[1] && held[1] == held[2], "{what}: {held:?}");
                    for (id, turn) in ids.iter().zip(&turns) {
                        engine.extend(*id, turn.clone()).unwrap();
                    }
                    run(&mut engine);
                    for ((number, id), alone) in ids.iter().enumerate().zip(alone) {
                        assert!(state(&engine, *id) == alone, "{what}: fork {number} is another");
                    }
                    // The first may go before the others.
                    ids.iter().for_each(|&id| engine.close(id));
                    assert_eq!(engine.pool().used_bytes(), 0, "{what}");
                }
            }
        }
    }
}

#[test]
fn an_interrupted_prompt_is_forked_where_it_was_read_to() {
    for kind in ["f16", "tq4"] {
        let interrupt = Arc::new(AtomicBool::new(false));
        let options = ModelOptions {
            page_kind: kind.parse().unwrap(),
            interrupt: Arc::clone(&interrupt),
            chunk_size: count(70),
            ..options()
        };
        let mut engine = open("gemma3", &options);
        let original = engine.submit(request(1, 250, 5, None)).unwrap();
        engine.step().unwrap();
        interrupt.store(true, Ordering::Relaxed);
        engine.step().unwrap_err();
        interrupt.store(false, Ordering::Relaxed);
        engine.cancel(original);
        // Its pages go on behind what has been computed; those of the fork do not.
        let fork = engine.fork(original).unwrap();
        assert_eq!(engine.cache(original).unwrap().logical_len(), 140);
        assert_eq!(engine.cache(fork).unwrap().logical_len(), 70);
        for id in [original, fork] {
            engine.extend(id, request(2, 30, 40, None)).unwrap();
        }
        run(&mut engine);
        assert!(state(&engine, original) == state(&engine, fork), "{kind}");
        engine.close(fork);
        engine.close(original);
        assert_eq!(engine.pool().used_bytes(), 0);
    }
}

#[test]
fn a_fork_of_a_fork_is_one() {
    let mut engine = open("llama-tied", &options());
    let first = engine.submit(request(1, 100, 3, None)).unwrap();
    run(&mut engine);
    let second = engine.fork(first).unwrap();
    engine.extend(second, request(2, 10, 3, None)).unwrap();
    run(&mut engine);
    engine.close(first);
    let third = engine.fork(second).unwrap();
    for id in [second, third] {
        engine.extend(id, request(3, 10, 30, None)).unwrap();
    }
    run(&mut engine);
    assert!(state(&engine, second) == state(&engine, third));
    engine.close(second);
    engine.close(third);
    assert_eq!(engine.pool().used_bytes(), 0);
}

/// Tokens that a fork shares move to pages of its own, and where there are none it fails and the others live.
#[test]
fn a_pool_without_room_fails_the_fork_alone() {
    let page = |engine: &Engine| engine.page_kind().page_bytes(engine.shape()) * engine.shape().num_groups() as u64;
    let pages = 10;
    let sizing = open("llama-tied", &options());
    let options = ModelOptions { pool_bytes: Some(pages * page(&sizing)), ..options() };
    let mut engine = open("llama-tied", &options);
    let original = engine.submit(request(1, 144, 0, None)).unwrap();
    run(&mut engine);
    let before = state(&engine, original);
    let fork = engine.fork(original).unwrap();
    engine.extend(fork, request(2, 12, 3, Some(("50%", "knorm:granularity=token")))).unwrap();
    while engine.is_busy() {
        engine.step().unwrap();
    }
    let reason = engine.finish(fork, &mut |_| ()).unwrap().finish_reason;
    assert!(matches!(&reason, FinishReason::Failed(why) if why.starts_with("the page pool has no room")), "{reason:?}");
    assert!(state(&engine, original) == before);
    engine.close(fork);
    engine.extend(original, request(3, 10, 3, None)).unwrap();
    run(&mut engine);
    engine.close(original);
    assert_eq!(engine.pool().used_bytes(), 0);
}

/// One reading and one pass serve every budget and every plan.
#[test]
fn forks_are_compressed_as_if_each_had_read_alone() {
    let alike = [
        (
            "kvzip:chunk=64,window=8",
            &["60%:", "30%:", "40%:allot=uniform", "40%:granularity=page,share=layer,allot=uniform"][..],
        ),
        ("kvzip:chunk=64,granularity=token", &["40%:", "30%:allot=uniform"]),
        ("kvzip:chunk=64,tiers=tq4", &["30%:tiers=tq4:3nats+tq3", "20%:tiers=tq3v2", "25%:allot=uniform,tiers=tq4"]),
        ("kvzip:chunk=64,pack=score,tiers=tq3", &["30%:tiers=tq4:3nats+tq3v2,pack=score", "15%:pack=score,tiers=tq3"]),
        ("page-entro-kv:preset=serving", &["40%:", "20%:allot=global"]),
        ("page-entro-kv:preset=serving,rows=probe,tiers=tq4", &["40%:tiers=tq4", "20%:allot=global,tiers=tq3v2"]),
        ("snapkv:window=8", &["40%:", "30%:granularity=page"]),
        ("h2o", &["40%:"]),
        ("expected-attention", &["30%:"]),
        ("compactor:chunk=32", &["50%:", "20%:"]),
        ("streaming-llm:rerotate=true", &["40%:", "20%:"]),
    ];
    let options = ModelOptions { probe: Some("What else?".into()), ..options() };
    let mut engine = open("qwen3-tied", &options);
    let after_answer = |text: &str| {
        let policy = parse_policy(text).unwrap();
        deciding_later(&*policy).unwrap().to_string()
    };
    for (first, decisions) in alike {
        let mut first = request(1, 260, 0, Some(("50%", first)));
        let leading = first.eviction.as_mut().unwrap();
        leading.policy = Arc::from(parse_policy(&after_answer(&leading.policy.to_string())).unwrap());
        let root = engine.submit(first.clone()).unwrap();
        run(&mut engine);
        let makes_pass = engine.make_pass(root).unwrap();
        assert_eq!(makes_pass, leading_pass(&first));
        run(&mut engine);
        assert!(!engine.make_pass(root).unwrap(), "one is enough");
        let whole = engine.kv_report(root).unwrap().bytes_held;
        for decision in decisions {
            let (budget, changed) = decision.split_once(':').unwrap();
            let leading = first.eviction.as_ref().unwrap().policy.to_string();
            let (name, items) = leading.split_once(':').unwrap();
            let keys: Vec<&str> = changed.split(',').filter_map(|item| Some(item.split_once('=')?.0)).collect();
            let kept = items.split(',').filter(|item| !keys.contains(&item.split('=').next().unwrap()));
            let items: Vec<&str> = kept.chain(changed.split(',').filter(|item| !item.is_empty())).collect();
            let policy = format!("{name}:{}", items.join(","));
            let fork = engine.fork(root).unwrap();
            engine.set_cap(fork, &cap_of(budget, &policy)).unwrap();
            assert!(engine.compress(fork).unwrap());
            run(&mut engine);
            let alone = policy.replace("schedule=after_answer", "schedule=once");
            let alone = Request { eviction: Some(cap_of(budget, &alone)), ..first.clone() };
            let alone = engine.submit(alone).unwrap();
            run(&mut engine);
            assert!(state(&engine, fork) == state(&engine, alone), "{policy} at {budget}");
            let held = [fork, alone].map(|id| engine.kv_report(id).unwrap().bytes_held);
            assert!(held[0] == held[1] && held[0] < whole, "{policy} at {budget}: {held:?} of {whole}");
            assert!(!engine.compress(fork).unwrap(), "it has been");
            let refused = engine.set_cap(fork, &cap_of(budget, &policy)).unwrap_err();
            assert_eq!(
                refused.to_string(),
                format!(
                    "sequence {fork} does not wait to be compressed: read it under a policy of schedule=after_answer"
                )
            );
            engine.close(fork);
            engine.close(alone);
        }
        engine.close(root);
        assert_eq!(engine.pool().used_bytes(), 0);
    }
}

/// Whether a pass or a probe is read for a request.
fn leading_pass(request: &Request) -> bool {
    let policy = &request.eviction.as_ref().unwrap().policy;
    policy.needs().reconstruction.is_some() || policy.rows() == RowOrigin::Probe
}

#[test]
fn another_cap_must_be_of_a_policy_that_was_shown_the_same() {
    let mut engine = open("qwen3-tied", &options());
    let late = "knorm:schedule=after_answer";
    let id = engine.submit(request(1, 200, 0, Some(("50%", late)))).unwrap();
    run(&mut engine);
    let before = state(&engine, id);
    let mut refused = |budget: &str, policy: &str| engine.set_cap(id, &cap_of(budget, policy)).unwrap_err().to_string();
    for policy in ["keydiff:schedule=after_answer", "knorm:schedule=once"] {
        let error = refused("50%", policy);
        assert!(
            error.ends_with("does not score as knorm:schedule=after_answer does, which has seen the text"),
            "{error}"
        );
    }
    let tiers = refused("50%", "knorm:schedule=after_answer,tiers=tq4");
    assert!(
        tiers.starts_with("tiers of codes need what the model's first queries say, and 200 tokens were read"),
        "{tiers}"
    );
    engine.close(id);
    // Codes of 8 bits need no constants, so none were noted.
    let id = engine.submit(request(1, 200, 0, Some(("50%", "knorm:tiers=q8_0,schedule=after_answer")))).unwrap();
    run(&mut engine);
    let other = cap_of("50%", "knorm:tiers=q8_0/tq4:0.5+tq3,schedule=after_answer");
    assert!(matches!(engine.set_cap(id, &other), Err(SubmitError::LateTiers { got: 200 })));
    engine.set_cap(id, &cap_of("50%", "knorm:tiers=q8_0/tq4,schedule=after_answer")).unwrap();
    engine.close(id);
    let id = engine.submit(request(1, 200, 0, Some(("50%", late)))).unwrap();
    run(&mut engine);
    let mut refused = |budget: &str, policy: &str| engine.set_cap(id, &cap_of(budget, policy)).unwrap_err().to_string();
    assert!(refused("1page", late).starts_with("a KV budget of 1page is 1 page(s)"));
    assert!(state(&engine, id) == before);
    engine.close(id);
    assert!(matches!(engine.set_cap(id, &cap_of("50%", late)), Err(SubmitError::Unknown(_))));
}

#[test]
fn what_cannot_be_forked_is_refused() {
    let mut engine = open("llama-tied", &options());
    let id = engine.submit(request(1, 100, 3, Some(("50%", "kvzip:chunk=64")))).unwrap();
    assert!(matches!(engine.fork(id), Err(ForkError::Busy(busy)) if busy == id));
    run(&mut engine);
    engine.close(id);
    assert!(matches!(engine.fork(id), Err(ForkError::Unknown(_))));
    assert_eq!(engine.pool().used_bytes(), 0);
}
