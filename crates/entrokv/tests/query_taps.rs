//! Policies that are shown queries: the right ones, the same however the engine works, and nothing where nobody asks.

#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Arc;

use entrokv::gguf::Gguf;
use entrokv::model::{AttentionSink, BatchSpan, LogitsWanted, ModelRunner};
use entrokv::segments::SegmentLists;
use entrokv::{EndTokens, EvictionOptions, Model, ModelOptions, Request, SequenceId, parse_policy};
use entrokv_cache::{LayerKind, moments_len};
use entrokv_kernels::attention::Tap;
use entrokv_kernels::compute::Compute;
use entrokv_kernels::rope::{RopeAngles, rope};
use entrokv_kernels::threads::Threads;
use support::{Bench, bits, count, gguf, model_path, options, random_tokens};

const ARCHITECTURES: [&str; 5] = ["llama-rope-factors", "qwen2-tied", "qwen3-untied", "gemma3", "gemma3-rope-linear"];

/// Policies that are shown more than rows.
const POLICIES: [&str; 6] = [
    "compactor:chunk=32",
    "compactor:parts=non-causal,logits=scaled,allot=global",
    "expected-attention",
    "expected-attention:future=40,allot=ada-floor:0.2,epsilon=0.01",
    "critical-kv:recent=1",
    "critical-kv:inner=expected-attention,allot=ada-floor:0.2,recent=1",
];

fn open(gguf: &Gguf, options: &ModelOptions) -> Model {
    Model::from_gguf(gguf, options, &mut |_| ()).unwrap()
}

fn request(seed: u64, len: usize, generate: usize, policy: &str) -> Request {
    Request {
        end_tokens: EndTokens::Ignore,
        eviction: Some(EvictionOptions {
            budget: "30%".parse().unwrap(),
            policy: Arc::from(parse_policy(policy).unwrap()),
        }),
        ..Request::greedy(random_tokens(seed, len, 256), generate)
    }
}

/// The tokens generated and the pages each KV group holds at the end.
type Outcome = (Vec<u32>, Vec<Vec<u32>>);

fn outcome(model: &mut Model, id: SequenceId) -> Outcome {
    let tokens = model.engine.finish(id, &mut |_| ()).unwrap().tokens;
    let cache = model.engine.cache(id).unwrap();
    let table = |group| cache.table(group).iter().map(|page| page.index.0).collect();
    (tokens, cache.shape().global_groups().map(table).collect())
}

fn alone(gguf: &Gguf, options: &ModelOptions, request: Request) -> Outcome {
    let mut model = open(gguf, options);
    let id = model.engine.submit(request).unwrap();
    outcome(&mut model, id)
}

/// Queries of every layer before RoPE and after it.
#[derive(Default)]
struct Capture {
    before: Vec<Vec<f32>>,
    after: Vec<Vec<f32>>,
}

impl AttentionSink for Capture {
    fn unrotated_queries(&mut self, _span: usize, _layer: usize, queries: &[f32], _compute: &Compute) {
        self.before.push(queries.to_vec());
    }
    fn queries(&mut self, _span: usize, _layer: usize, queries: &mut [f32]) {
        self.after.push(queries.to_vec());
    }
    fn tap(&mut self, _span: usize, _layer: usize, _resident: &[usize]) -> Tap {
        Tap::None
    }
    fn observe(&mut self, _span: usize, _layer: usize, _tap: Tap, _threads: &Threads) {}
}

#[test]
fn queries_before_rope_are_what_rope_makes_queries_of() {
    for name in ARCHITECTURES {
        let gguf = gguf(name);
        let mut bench = Bench::new(&gguf, &options());
        let tokens = random_tokens(3, 40, 256);
        bench.cache.grow(&mut bench.pool, tokens.len()).unwrap();
        let mut capture = Capture::default();
        let mut segments = SegmentLists::new(&bench.shape);
        let span = BatchSpan {
            tokens: &tokens,
            first_position: 0,
            cache: segments.follow(&bench.cache),
            constants: &[],
            logits: LogitsWanted::None,
        };
        bench.runner.forward(&[span], &mut capture).unwrap();
        let positions: Vec<u32> = (0..tokens.len() as u32).collect();
        let config = &bench.config;
        assert_eq!(capture.before.len(), config.layers.len());
        for (layer, (mut turned, after)) in capture.before.into_iter().zip(&capture.after).enumerate() {
            let frequencies = match config.layers[layer] {
                LayerKind::Global => &config.rope.global,
                LayerKind::Window(_) => config.rope.window.as_ref().unwrap_or(&config.rope.global),
            };
            assert_ne!(&turned, after, "{name}, layer {layer}");
            let angles = RopeAngles::new(&positions, frequencies);
            let compute = Compute::new(options().isa, count(1));
            rope(&compute, &mut turned, config.head_dim, &angles, config.rope.layout);
            assert!(bits(&[turned]) == bits(std::slice::from_ref(after)), "{name}, layer {layer}");
        }
    }
}

#[test]
fn chunks_and_threads_never_show() {
    for name in ARCHITECTURES {
        let gguf = gguf(name);
        for (policy, seed) in POLICIES.into_iter().zip(1..) {
            let request = || request(seed, 210, 50, policy);
            let whole = alone(&gguf, &options(), request());
            for (chunk, threads) in [(1, 1), (13, 2), (64, 3)] {
                let options = ModelOptions { chunk_size: count(chunk), threads: count(threads), ..options() };
                let what = format!("{name}, {policy}, chunks of {chunk}, {threads} threads");
                assert_eq!(alone(&gguf, &options, request()), whole, "{what}");
            }
        }
    }
}

#[test]
fn sequences_in_a_batch_are_each_as_alone() {
    for name in ARCHITECTURES {
        let gguf = gguf(name);
        let requests = || {
            POLICIES
                .into_iter()
                .chain(["snapkv"])
                .zip(1..)
                .map(|(policy, seed)| request(seed, 150 + 20 * seed as usize, 40, policy))
        };
        let mut model = open(&gguf, &ModelOptions { chunk_size: count(96), ..options() });
        let ids: Vec<SequenceId> = requests().map(|request| model.engine.submit(request).unwrap()).collect();
        for (id, request) in ids.into_iter().zip(requests()) {
            assert_eq!(outcome(&mut model, id), alone(&gguf, &options(), request), "{name}");
        }
    }
}

#[test]
fn a_real_model_keeps_the_same_pages_over_any_chunks_and_in_company() {
    let Some(path) = model_path("smollm2-135m") else { return };
    let gguf = Gguf::open(&path).unwrap();
    for policy in POLICIES {
        let request = || request(9, 200, 20, policy);
        let whole = alone(&gguf, &options(), request());
        let mut model = open(&gguf, &ModelOptions { chunk_size: count(70), ..options() });
        let ids = [request(), self::request(10, 90, 20, "knorm")].map(|request| model.engine.submit(request).unwrap());
        assert_eq!(outcome(&mut model, ids[0]), whole, "{policy}");
    }
}

/// Moments go on where the last turn ended, so that a short further prompt does not stand for the whole text. Window rows and blocks
/// that look both ways are of the prompt they were read in.
#[test]
fn a_further_turn_decides_as_if_all_had_been_one_prompt() {
    let gguf = gguf("qwen3-untied");
    for policy in POLICIES.into_iter().filter(|policy| policy.contains("expected-attention")) {
        let mut model = open(&gguf, &options());
        let first = request(4, 200, 1, policy);
        let eviction =
            first.eviction.clone().map(|options| EvictionOptions { budget: "100%".parse().unwrap(), ..options });
        let id = model.engine.submit(Request { eviction, ..first }).unwrap();
        let (answer, _) = outcome(&mut model, id);
        let second = request(5, 3, 1, policy);
        model.engine.extend(id, second.clone()).unwrap();
        let (_, held) = outcome(&mut model, id);
        let prompt = [random_tokens(4, 200, 256), answer, second.prompt.clone()].concat();
        assert_eq!(alone(&gguf, &options(), Request { prompt, ..second }).1, held, "{policy}");
    }
}

#[test]
fn nothing_is_kept_for_policies_that_do_not_ask() {
    let gguf = gguf("gemma3");
    let state = |policy: &str| {
        let mut model = open(&gguf, &options());
        let id = model.engine.submit(request(6, 200, 1, policy)).unwrap();
        model.engine.finish(id, &mut |_| ()).unwrap();
        model.engine.kv_report(id).unwrap().bytes_policy_state
    };
    let model = open(&gguf, &options());
    let config = &model.config;
    let num_global = config.layers.iter().filter(|layer| **layer == LayerKind::Global).count();
    let moments = (num_global * config.num_heads * moments_len(config.head_dim) * size_of::<f64>()) as u64;
    let (with, without) = (state("expected-attention"), state("knorm"));
    assert!(with >= without + moments, "{with}, {without}, {moments}");
    assert!(without < moments, "{without} of {moments}");
}
