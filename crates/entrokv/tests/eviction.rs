//! Eviction end to end on random-weight models: exact budgets, freed bytes, the right tokens seen afterwards.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod support;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use entrokv::gguf::Gguf;
use entrokv::{
    EndTokens, EvictionOptions, FinishReason, LayerKind, Model, ModelOptions, PageKind, Request, SequenceId,
    SubmitError, parse_policy,
};
use entrokv_cache::KvGroup;
use support::dense::DenseDecoder;
use support::{count, exact, gguf, options, random_tokens};

fn open(gguf: &Gguf, options: &ModelOptions) -> Model {
    Model::from_gguf(gguf, options, &mut |_| ()).unwrap()
}

fn eviction(budget: &str, policy: &str) -> Option<EvictionOptions> {
    Some(EvictionOptions { budget: budget.parse().unwrap(), policy: Arc::from(parse_policy(policy).unwrap()) })
}

fn request(len: usize, generate: usize, budget: &str, policy: &str) -> Request {
    Request {
        end_tokens: EndTokens::Ignore,
        eviction: eviction(budget, policy),
        ..Request::greedy(random_tokens(11, len, 256), generate)
    }
}

/// Every policy and option that changes when or what is evicted.
const POLICIES: [&str; 26] = [
    "page-entro-kv",
    "page-entro-kv:preset=serving",
    "page-entro-kv:row=accumulated,pooling=max",
    "page-entro-kv:alpha=1,block=sum,pool_on=isolated",
    "page-entro-kv:alpha=inf,block=mean,row=window:8",
    "page-entro-kv:alpha=0.5,tau=2,sinks=20",
    "mean-pages",
    "random",
    "streaming-llm",
    "knorm:allot=global",
    "keydiff:allot=ada-floor:0.2",
    "lagkv:lag=16,allot=ada-interpolated:0.2",
    "cur:allot=pyramid:4",
    "paged-eviction",
    "snapkv:window=4,allot=global",
    "tova",
    "h2o:recent=1",
    "observed-attention:recent=1",
    "random:allot=global,sinks=20",
    "streaming-llm:sinks=0",
    "knorm:share=layer,allot=pyramid:3",
    "page-entro-kv:granularity=token,allot=global",
    "knorm:granularity=token,allot=ada-interpolated:0.2,schedule=every:33",
    "h2o:recent=20tok,granularity=token",
    "lagkv:lag=8,schedule=every:1000",
    "streaming-llm:rerotate=true,granularity=token",
];

#[test]
fn budget_holds_after_every_step() {
    for name in ["llama-tied", "gemma3"] {
        let gguf = gguf(name);
        for policy in POLICIES {
            for (page_size, budget) in
                [(16, "20%"), (1, "30%"), (7, "1/3"), (64, "50%"), (16, "64tok"), (16, "5pages"), (4, "0.25")]
            {
                let mut model = open(&gguf, &ModelOptions { page_size, ..options() });
                let id = model.engine.submit(request(190, 150, budget, policy)).unwrap();
                let what = format!("{name}, {policy}, pages of {page_size}, {budget}");
                let mut steps = 0;
                while model.engine.is_busy() {
                    model.engine.step().unwrap();
                    let kv = model.engine.kv_report(id).unwrap();
                    let Some(limit) = kv.bytes_budget else { continue };
                    assert!(
                        kv.bytes_held <= limit,
                        "{what}: {} held of {limit} after {} tokens",
                        kv.bytes_held,
                        kv.logical_tokens
                    );
                    let held: u64 = model.engine.pool().used_bytes();
                    assert_eq!(held, kv.bytes_held + kv.bytes_window, "{what}");
                    steps += 1;
                }
                assert_eq!(steps, 150, "{what}");
                let kv = model.engine.kv_report(id).unwrap();
                assert_eq!((kv.logical_tokens, kv.bytes_appended, kv.budget_violations), (340, 0, 0), "{what}");
                // Reading is not capped: the most is held at the prompt's end, before anything goes.
                let shape = model.engine.shape();
                let page = PageKind::F16.page_bytes(shape) * shape.num_global_groups() as u64;
                assert_eq!(kv.peak.held, shape.pages_for(190) as u64 * page, "{what}");
                assert!(
                    kv.peak.policy_state >= kv.bytes_policy_state && kv.peak.metadata >= kv.bytes_metadata,
                    "{what}"
                );
                assert!(kv.eviction.pages_evicted > 0, "{what}");
                assert_eq!(kv.eviction.uor, 1.0, "{what}");
            }
        }
    }
}

#[test]
fn the_prompt_ends_with_exactly_the_pages_of_the_budget() {
    let gguf = gguf("qwen3-tied");
    let mut model = open(&gguf, &options());
    // 20 % of 400 tokens is 80 tokens, 5 pages of 16 for each of the KV groups.
    let id = model.engine.submit(request(400, 1, "20%", "page-entro-kv")).unwrap();
    model.engine.finish(id, &mut |_| ()).unwrap();
    let kv = model.engine.kv_report(id).unwrap();
    let shape = model.engine.shape().clone();
    let groups = (shape.layers.len() * shape.num_kv_heads) as u64;
    assert_eq!(kv.bytes_held, 5 * groups * PageKind::F16.page_bytes(&shape));
    assert_eq!(kv.bytes_held, kv.bytes_budget.unwrap());
    assert_eq!(kv.bytes_full, 25 * groups * PageKind::F16.page_bytes(&shape));
    assert_eq!(kv.eviction.pages_evicted, 20 * groups);
}

#[test]
fn once_reports_what_it_appends() {
    let gguf = gguf("llama-tied");
    let mut model = open(&gguf, &options());
    let id = model.engine.submit(request(320, 100, "20%", "page-entro-kv:schedule=once")).unwrap();
    model.engine.finish(id, &mut |_| ()).unwrap();
    let kv = model.engine.kv_report(id).unwrap();
    let page = PageKind::F16.page_bytes(model.engine.shape()) * model.engine.shape().num_global_groups() as u64;
    // 99 tokens after the prompt's 20 whole pages open 7 more.
    assert_eq!(kv.bytes_appended, 7 * page);
    assert_eq!(kv.bytes_held, kv.bytes_budget.unwrap() + kv.bytes_appended);
}

#[test]
fn closing_returns_every_page() {
    let gguf = gguf("gemma3");
    let mut model = open(&gguf, &options());
    let ids: Vec<SequenceId> =
        [40, 200, 90].map(|len| model.engine.submit(request(len, 30, "40%", "page-entro-kv")).unwrap()).into();
    for _ in 0..6 {
        model.engine.step().unwrap();
    }
    model.engine.cancel(ids[1]);
    for id in &ids {
        model.engine.finish(*id, &mut |_| ()).unwrap();
    }
    assert!(model.engine.pool().used_bytes() > 0);
    ids.into_iter().for_each(|id| model.engine.close(id));
    assert_eq!(model.engine.pool().used_bytes(), 0);
}

#[test]
fn a_cancelled_answer_stops_within_a_step_and_says_so() {
    let gguf = gguf("llama-tied");
    let mut model = open(&gguf, &options());
    let id = model.engine.submit(request(50, 1000, "50%", "page-entro-kv")).unwrap();
    let other = model.engine.submit(request(60, 20, "50%", "page-entro-kv")).unwrap();
    for _ in 0..5 {
        model.engine.step().unwrap();
    }
    model.engine.cancel(id);
    let before = model.engine.tokens(id).unwrap().len();
    assert_eq!(model.engine.finish(other, &mut |_| ()).unwrap().tokens.len(), 20);
    let completion = model.engine.finish(id, &mut |_| ()).unwrap();
    assert_eq!(completion.finish_reason, FinishReason::Cancelled);
    assert_eq!(model.engine.tokens(id).unwrap().len(), before);
}

/// After eviction, what is generated is what a dense decoder gives that sees, in each (layer, KV head), the kept tokens
/// of the prompt and the tokens since.
#[test]
fn evicted_equals_masked() {
    for name in ["llama-tied", "qwen2-tied", "qwen3-untied", "gemma3"] {
        let gguf = gguf(name);
        let mut model = open(&gguf, &exact());
        let (prompt, answer) = (230, 12);
        let id = model.engine.submit(request(prompt, answer, "25%", "page-entro-kv:schedule=once")).unwrap();
        while model.engine.tokens(id).unwrap().len() == prompt {
            model.engine.step().unwrap();
        }
        let cache = model.engine.cache(id).unwrap();
        let mut kept: HashSet<(usize, usize, usize)> = HashSet::new();
        let mut evicted = 0;
        for layer in 0..model.config.layers.len() {
            for kv_head in 0..model.config.num_kv_heads {
                let group = KvGroup { layer: layer as u32, kv_head: kv_head as u32 };
                for page in cache.table(group) {
                    let first = page.first_position(16) as usize;
                    kept.extend((first..first + page.len as usize).map(|position| (layer, kv_head, position)));
                }
                if model.config.layers[layer] == LayerKind::Global {
                    evicted += prompt - cache.resident_tokens(group);
                }
            }
        }
        assert!(evicted > 0, "{name}");
        model.engine.finish(id, &mut |_| ()).unwrap();
        let tokens = model.engine.tokens(id).unwrap();
        let global = |layer: usize| model.config.layers[layer] == LayerKind::Global;
        let mask = |layer: usize, kv_head: usize, query: usize, key: usize| {
            query < prompt || key >= prompt || !global(layer) || kept.contains(&(layer, kv_head, key))
        };
        let dense = DenseDecoder::new(&gguf, &model.config).logits(&tokens[..tokens.len() - 1], &mask);
        for (position, row) in dense.iter().enumerate().skip(prompt - 1) {
            let ours = tokens[position + 1] as usize;
            let best = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            // The engine works in f32: its choice may differ only where the oracle has a near tie.
            assert!(best - row[ours] < 1e-3, "{name}: position {position}, {} below the best", best - row[ours]);
        }
    }
}

#[test]
fn an_interrupted_step_can_be_repeated() {
    let gguf = gguf("llama-tied");
    let options = options();
    let mut plain = request(90, 20, "50%", "page-entro-kv");
    plain.eviction = None;
    let undisturbed = open(&gguf, &options).engine.generate(plain.clone(), |_| ()).unwrap();
    let mut model = open(&gguf, &options);
    let id = model.engine.submit(plain).unwrap();
    for step in 0.. {
        options.interrupt.store(step % 2 == 0, Ordering::SeqCst);
        let outcome = model.engine.step();
        assert_eq!(outcome.is_err(), step % 2 == 0);
        if !model.engine.is_busy() {
            break;
        }
    }
    assert_eq!(model.engine.finish(id, &mut |_| ()).unwrap().tokens, undisturbed.tokens);
}

#[test]
fn a_watched_step_that_is_interrupted_cancels_its_sequence() {
    let gguf = gguf("llama-tied");
    let options = options();
    let mut model = open(&gguf, &options);
    let id = model.engine.submit(request(90, 20, "50%", "page-entro-kv")).unwrap();
    options.interrupt.store(true, Ordering::SeqCst);
    assert!(model.engine.step().is_err());
    options.interrupt.store(false, Ordering::SeqCst);
    assert_eq!(model.engine.finish(id, &mut |_| ()).unwrap().finish_reason, FinishReason::Cancelled);
    model.engine.close(id);
    assert_eq!(model.engine.pool().used_bytes(), 0);
}

#[test]
fn refused_requests_allocate_nothing() {
    let gguf = gguf("llama-tied");
    let mut model = open(&gguf, &options());
    let context = model.engine.context_len();
    let empty = Request::greedy(Vec::new(), 1);
    assert!(matches!(model.engine.submit(empty), Err(SubmitError::EmptyPrompt)));
    let long = Request::greedy(vec![1; context + 1], 1);
    let error = model.engine.submit(long).unwrap_err().to_string();
    assert_eq!(error, format!("the prompt has {} tokens, the context holds {context}", context + 1));
    // The sink page and the open page are the least a sequence can hold.
    for budget in ["16tok", "1pages", "100B"] {
        let refused = model.engine.submit(request(100, 1, budget, "page-entro-kv"));
        assert!(matches!(refused, Err(SubmitError::Budget(_))), "{budget}");
    }
    assert_eq!(model.engine.pool().used_bytes(), 0);
    assert!(!model.engine.is_busy());
}

#[test]
fn a_fraction_below_the_pins_is_raised_and_reported() {
    let gguf = gguf("llama-tied");
    let mut model = open(&gguf, &options());
    let completion = model.engine.generate(request(100, 40, "1%", "page-entro-kv"), |_| ()).unwrap();
    assert!(completion.kv.eviction.budget_raised);
    let page = PageKind::F16.page_bytes(model.engine.shape()) * model.engine.shape().num_global_groups() as u64;
    assert_eq!(completion.kv.bytes_budget, Some(2 * page));
    assert!(completion.kv.bytes_held <= 2 * page);
}

#[test]
fn an_exhausted_pool_makes_sequences_wait_and_fails_what_never_fits() {
    let gguf = gguf("llama-tied");
    let mut model = open(&gguf, &options());
    let page = PageKind::F16.page_bytes(model.engine.shape()) * model.engine.shape().num_global_groups() as u64;
    let pool_bytes = Some(12 * page);
    model = open(&gguf, &ModelOptions { pool_bytes, chunk_size: count(32), ..options() });
    let plain = |len| Request { end_tokens: EndTokens::Ignore, ..Request::greedy(random_tokens(3, len, 256), 8) };
    // 10 pages, then 6 more that do not fit beside them.
    let (first, second) = (model.engine.submit(plain(150)).unwrap(), model.engine.submit(plain(90)).unwrap());
    assert_eq!(model.engine.finish(first, &mut |_| ()).unwrap().finish_reason, FinishReason::Length);
    model.engine.close(first);
    assert_eq!(model.engine.finish(second, &mut |_| ()).unwrap().finish_reason, FinishReason::Length);
    model.engine.close(second);
    let completion = model.engine.generate(plain(400), |_| ()).unwrap();
    assert!(matches!(completion.finish_reason, FinishReason::Failed(_)), "{:?}", completion.finish_reason);
    assert_eq!(model.engine.pool().used_bytes(), 0);
}

#[test]
fn a_further_turn_keeps_the_cache_and_fixes_the_budget_anew() {
    let gguf = gguf("llama-tied");
    let mut model = open(&gguf, &options());
    let page = PageKind::F16.page_bytes(model.engine.shape()) * model.engine.shape().num_global_groups() as u64;
    let id = model.engine.submit(request(320, 20, "20%", "page-entro-kv:preset=serving")).unwrap();
    let first = model.engine.finish(id, &mut |_| ()).unwrap();
    assert_eq!(first.kv.bytes_budget, Some(4 * page));
    let next = Request { prompt: random_tokens(5, 60, 256), ..request(1, 20, "20%", "page-entro-kv:preset=serving") };
    model.engine.extend(id, next).unwrap();
    let second = model.engine.finish(id, &mut |_| ()).unwrap();
    // 320 + 20 + 60 tokens read when the second prompt ends: 80 of them may stay, 5 pages.
    assert_eq!(second.kv.bytes_budget, Some(5 * page));
    assert!(second.kv.bytes_held <= 5 * page);
    assert_eq!(second.kv.logical_tokens, 420);
    assert!(second.kv.eviction.pages_evicted > first.kv.eviction.pages_evicted);
    model.engine.close(id);
    assert_eq!(model.engine.pool().used_bytes(), 0);
}
