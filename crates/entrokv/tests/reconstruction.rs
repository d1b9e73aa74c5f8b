//! The pass that repeats a prompt: what it says, and that it leaves nothing behind.

#![allow(clippy::unwrap_used)]

mod support;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use entrokv::gguf::Gguf;
use entrokv::model::RunError;
use entrokv::{
    EndTokens, EvictionOptions, EvictionPolicy, FinishReason, Model, ModelOptions, PageKind, Pins, RepeatInstruction,
    Request, SequenceId, parse_policy,
};
use entrokv_cache::{
    AttentionRows, CacheShape, KvGroup, PageScorer, PageSpan, PassView, RecentPages, Reconstruction, ResidentTokens,
    RowSource, Schedule, Taps,
};
use support::dense::DenseDecoder;
use support::{count, exact, gguf, options, random_tokens};

fn open(gguf: &Gguf, options: &ModelOptions) -> Model {
    Model::from_gguf(gguf, options, &mut |_| ()).unwrap()
}

fn request(prompt: Vec<u32>, generate: usize, budget: &str, policy: Arc<dyn EvictionPolicy>) -> Request {
    let eviction = Some(EvictionOptions { budget: budget.parse().unwrap(), policy });
    Request { end_tokens: EndTokens::Ignore, eviction, ..Request::greedy(prompt, generate) }
}

fn kv_zip(seed: u64, len: usize, generate: usize, budget: &str, options: &str) -> Request {
    let policy = Arc::from(parse_policy(&format!("kvzip{options}")).unwrap());
    request(random_tokens(seed, len, 256), generate, budget, policy)
}

/// What a pass showed of a KV group: positions, and masses `[group_size, positions]`.
type Shown = (KvGroup, Vec<u32>, Vec<f32>);

/// A policy that writes down what passes say, and lets everything stay that its budget allows.
#[derive(Clone, Debug)]
struct Recorder {
    chunk: usize,
    shown: Arc<Mutex<Vec<Shown>>>,
}

impl Recorder {
    fn new(chunk: usize) -> Self {
        Self { chunk, shown: Arc::default() }
    }

    fn take(&self) -> Vec<Shown> {
        std::mem::take(&mut self.shown.lock().unwrap())
    }
}

impl fmt::Display for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("recorder")
    }
}

impl EvictionPolicy for Recorder {
    fn name(&self) -> &str {
        "recorder"
    }
    fn needs(&self) -> Taps {
        Taps { reconstruction: Some(Reconstruction { chunk: self.chunk, view: PassView::Text }), ..Taps::default() }
    }
    fn schedule(&self) -> Schedule {
        Schedule::Once
    }
    fn pins(&self) -> Pins {
        Pins { sink_tokens: 4, recent_pages: RecentPages::Count(0) }
    }
    fn scorer(&self, _shape: &CacheShape, group: KvGroup) -> Box<dyn PageScorer> {
        Box::new(RecorderScorer { recorder: self.clone(), group })
    }
}

#[derive(Clone)]
struct RecorderScorer {
    recorder: Recorder,
    group: KvGroup,
}

impl PageScorer for RecorderScorer {
    fn observe(&mut self, rows: AttentionRows<'_>) {
        assert_eq!(rows.source, RowSource::Reconstruction);
        self.recorder.shown.lock().unwrap().push((self.group, rows.positions.to_vec(), rows.rows.to_vec()));
    }
    fn end_prompt(&mut self) {}
    fn score(&mut self, pages: &[PageSpan], _tokens: ResidentTokens<'_>, out: &mut Vec<f32>) {
        out.clear();
        out.resize(pages.len(), 1.0);
    }
    fn retain(&mut self, _pages: &[PageSpan]) {}
    fn nan_rows(&self) -> u64 {
        0
    }
    fn state_bytes(&self) -> u64 {
        0
    }
    fn uor_per_head(&self, _pages: &[PageSpan], _k_pages: usize) -> f64 {
        1.0
    }
}

#[test]
fn masses_are_those_of_a_dense_decoder() {
    for name in ["llama-tied", "qwen2-tied", "qwen3-untied", "gemma3"] {
        let gguf = gguf(name);
        let mut model = open(&gguf, &exact());
        let config = model.config.clone();
        let instruction = RepeatInstruction::new(&model.tokenizer, model.chat_template.as_ref()).unwrap();
        let prompt = random_tokens(1, 150, 256);
        let recorder = Recorder::new(64);
        let policy = Arc::new(recorder.clone());
        model.engine.generate(request(prompt.clone(), 1, "100pages", policy), |_| ()).unwrap();
        let shown = recorder.take();

        let dense = DenseDecoder::new(&gguf, &config);
        let groups: Vec<KvGroup> = model.engine.shape().global_groups().collect();
        assert_eq!(shown.len(), 3 * groups.len(), "{name}: three chunks");
        for (chunk, shown) in [0..64, 64..128, 128..150].into_iter().zip(shown.chunks(groups.len())) {
            let (ask, words) = match chunk.start {
                0 => (&instruction.from_start, &[][..]),
                start => (&instruction.from_words, &prompt[start - 8..start]),
            };
            let tokens = [&prompt[..], ask, words, &instruction.answer, &prompt[chunk.clone()]].concat();
            let expected = dense.reconstruction(&tokens, prompt.len(), chunk.clone(), 4);
            for ((group, positions, masses), expected_group) in shown.iter().zip(&groups) {
                assert_eq!(group, expected_group);
                assert_eq!(*positions, chunk.clone().map(|position| position as u32).collect::<Vec<_>>());
                let expected = &expected[group.layer as usize][group.kv_head as usize];
                for (at, expected) in expected.iter().enumerate() {
                    let heads = masses.iter().skip(at).step_by(chunk.len());
                    let got = f64::from(heads.fold(0.0, |a: f32, b| a.max(*b)));
                    assert!(
                        (got - expected).abs() <= 1e-3 * expected,
                        "{name}, {group:?}, token {}: {got} for {expected}",
                        chunk.start + at
                    );
                }
            }
        }
    }
}

/// Tokens generated, and the pages held of every KV group.
type Outcome = (Vec<u32>, Vec<Vec<u32>>);

fn outcome(model: &mut Model, id: SequenceId) -> Outcome {
    let tokens = model.engine.finish(id, &mut |_| ()).unwrap().tokens;
    let cache = model.engine.cache(id).unwrap();
    let table = |group: KvGroup| cache.table(group).iter().map(|page| page.index.0).collect();
    let tables = cache.shape().global_groups().map(table).collect();
    model.engine.close(id);
    (tokens, tables)
}

fn alone(model: &mut Model, request: Request) -> Outcome {
    let id = model.engine.submit(request).unwrap();
    outcome(model, id)
}

fn three() -> [Request; 3] {
    [
        kv_zip(1, 210, 40, "30%", ":chunk=50"),
        kv_zip(2, 150, 60, "10pages", ":chunk=64,allot=uniform"),
        Request { eviction: None, ..kv_zip(3, 120, 50, "50%", "") },
    ]
}

#[test]
fn chunks_threads_and_neighbours_never_show() {
    for name in ["qwen3-tied", "gemma3"] {
        let gguf = gguf(name);
        let alone = three().map(|request| alone(&mut open(&gguf, &options()), request));
        assert!(alone[0].1.iter().any(|table| table.len() != alone[0].1[0].len()) || name == "gemma3");
        for (chunk, threads) in [(512, 2), (1, 1), (13, 2), (64, 3)] {
            let options = ModelOptions { chunk_size: count(chunk), threads: count(threads), ..options() };
            let mut model = open(&gguf, &options);
            let ids = three().map(|request| model.engine.submit(request).unwrap());
            for (id, alone) in ids.into_iter().zip(&alone) {
                assert_eq!(&outcome(&mut model, id), alone, "{name}, {id}, chunks of {chunk}, {threads} threads");
            }
            assert_eq!(model.engine.pool().used_bytes(), 0);
        }
    }
}

/// Most tokens that ask for a chunk.
fn longest_instruction(model: &Model) -> usize {
    let asked = RepeatInstruction::new(&model.tokenizer, model.chat_template.as_ref()).unwrap();
    asked.from_start.len().max(asked.from_words.len() + 8) + asked.answer.len()
}

/// Steps until a pass is under way and has come further than `done`.
fn step_into_pass(model: &mut Model, done: usize) {
    loop {
        let outputs = model.engine.step().unwrap();
        if outputs.iter().any(|output| output.pass.is_some_and(|pass| pass.done > done)) {
            return;
        }
    }
}

#[test]
fn a_pass_holds_one_chunk_more_than_the_prompt() {
    let gguf = gguf("gemma3");
    let options = ModelOptions { chunk_size: count(37), ..options() };
    let mut model = open(&gguf, &options);
    // More pages than there are: everything stays, but the pass is made.
    let id = model.engine.submit(kv_zip(4, 300, 2, "100pages", ":chunk=64")).unwrap();
    let longest = 64 + longest_instruction(&model);
    let shape = model.engine.shape().clone();
    let page_bytes = PageKind::F16.page_bytes(&shape) * shape.num_groups() as u64;
    let (mut before, mut most, mut seen) = (0, 0, Vec::new());
    loop {
        let outputs = model.engine.step().unwrap();
        let used = model.engine.pool().used_bytes();
        match outputs[0].pass {
            Some(pass) => {
                assert_eq!((outputs[0].computed, pass.total), (300, 300));
                seen.push(pass.done);
                most = most.max(used);
            }
            None if outputs[0].token.is_some() => break,
            None => {}
        }
        if outputs[0].computed == 300 && seen.len() == 1 {
            before = used;
        }
    }
    assert!(seen.is_sorted() && seen[0] == 0 && seen.len() > 10, "{seen:?}");
    assert!(most > before, "a pass takes pages");
    assert!(most <= before + longest.div_ceil(shape.page_size) as u64 * page_bytes, "{most} after {before}");
    assert_eq!(model.engine.pool().used_bytes(), before, "the prompt's end opens no page");
    assert!(model.engine.timing(id).unwrap().pass > Duration::ZERO);
}

#[test]
fn a_pass_leaves_no_token_behind() {
    for name in ["llama-tied", "gemma3"] {
        let gguf = gguf(name);
        let (first, second) = (random_tokens(5, 203, 256), random_tokens(6, 20, 256));
        let whole = Request::greedy([&first[..], &second].concat(), 30);
        let whole = Request { end_tokens: EndTokens::Ignore, ..whole };
        let expected = alone(&mut open(&gguf, &options()), whole);

        let options = ModelOptions { chunk_size: count(50), ..options() };
        let mut model = open(&gguf, &options);
        let id = model.engine.submit(Request { prompt: first, ..kv_zip(5, 1, 5, "30%", ":chunk=80") }).unwrap();
        step_into_pass(&mut model, 90);
        let during = model.engine.pool().used_bytes();
        model.engine.cancel(id);
        assert!(model.engine.pool().used_bytes() < during);
        assert_eq!(model.engine.cache(id).unwrap().logical_len(), 203);
        // It goes on as if there had been no pass.
        let second = Request { end_tokens: EndTokens::Ignore, ..Request::greedy(second, 30) };
        model.engine.extend(id, second).unwrap();
        assert_eq!(outcome(&mut model, id), expected, "{name}");
        assert_eq!(model.engine.pool().used_bytes(), 0);
    }
}

#[test]
fn an_interrupted_pass_goes_on() {
    let gguf = gguf("qwen3-tied");
    let request = || kv_zip(7, 180, 20, "40%", ":chunk=60");
    let expected = alone(&mut open(&gguf, &options()), request());
    let interrupt = Arc::new(AtomicBool::new(false));
    let options = ModelOptions { chunk_size: count(20), interrupt: Arc::clone(&interrupt), ..options() };
    let mut model = open(&gguf, &options);
    let id = model.engine.submit(request()).unwrap();
    step_into_pass(&mut model, 10);
    let (over, stopped) = (AtomicBool::new(false), AtomicBool::new(false));
    // Once in any case, however late the thread that goes on interrupting is begun.
    interrupt.store(true, Ordering::Relaxed);
    std::thread::scope(|scope| {
        // Anywhere in a step, also between two layers of it.
        scope.spawn(|| {
            for i in 0u32.. {
                if over.load(Ordering::Relaxed) {
                    break;
                }
                interrupt.store(true, Ordering::Relaxed);
                std::thread::sleep(Duration::from_micros(u64::from(i * 37 % 400)));
            }
        });
        let mut interruptions = 0;
        while interruptions < 40 {
            match model.engine.step() {
                Ok(outputs) if outputs[0].pass.is_none() => break,
                Ok(_) => {}
                Err(error) => {
                    assert_eq!(error, RunError::Interrupted);
                    stopped.store(true, Ordering::Relaxed);
                    interruptions += 1;
                    interrupt.store(false, Ordering::Relaxed);
                }
            }
        }
        over.store(true, Ordering::Relaxed);
    });
    assert!(stopped.load(Ordering::Relaxed));
    interrupt.store(false, Ordering::Relaxed);
    let tokens = model.engine.finish(id, &mut |_| ()).unwrap();
    assert_eq!(tokens.finish_reason, FinishReason::Length);
    assert_eq!(outcome(&mut model, id), expected);
}

#[test]
fn a_further_turn_repeats_what_is_new_over_any_cache_type() {
    let gguf = gguf("qwen3-untied");
    for kind in ["f16", "q8_0", "tq4", "tq3v2"] {
        let options = ModelOptions { page_kind: kind.parse().unwrap(), ..options() };
        let mut model = open(&gguf, &options);
        let recorder = Recorder::new(100);
        let policy: Arc<dyn EvictionPolicy> = Arc::new(recorder.clone());
        let id = model.engine.submit(request(random_tokens(8, 230, 256), 11, "12pages", policy.clone())).unwrap();
        model.engine.finish(id, &mut |_| ()).unwrap();
        let columns = |shown: &[Shown]| -> Vec<u32> {
            let group = shown[0].0;
            shown.iter().filter(|shown| shown.0 == group).flat_map(|shown| shown.1.clone()).collect()
        };
        let shown = recorder.take();
        assert_eq!(columns(&shown), (0..230).collect::<Vec<_>>(), "{kind}");
        assert!(shown.iter().all(|(_, positions, masses)| {
            let sound = masses.iter().all(|mass| (0.0..=1.001).contains(mass));
            sound && masses.len() == positions.len() * model.engine.shape().group_size
        }));
        model.engine.extend(id, request(random_tokens(9, 60, 256), 5, "12pages", policy)).unwrap();
        model.engine.finish(id, &mut |_| ()).unwrap();
        // The answer's tokens have not been repeated before.
        assert_eq!(columns(&recorder.take()), (230..301).collect::<Vec<_>>(), "{kind}");
        model.engine.close(id);
    }
}

#[test]
fn budgets_hold_over_turns_and_cache_types_and_scores_live_on() {
    let gguf = gguf("qwen3-untied");
    for kind in ["f16", "q8_0", "tq3v2"] {
        let options = ModelOptions { page_kind: kind.parse().unwrap(), ..options() };
        let mut model = open(&gguf, &options);
        let id = model.engine.submit(kv_zip(10, 300, 40, "14pages", ":chunk=128")).unwrap();
        let mut capped_steps = 0;
        for turn in 0..2 {
            while model.engine.is_busy() {
                model.engine.step().unwrap();
                let kv = model.engine.kv_report(id).unwrap();
                if let Some(limit) = kv.bytes_budget {
                    assert!(kv.bytes_held <= limit, "{kind}: {} of {limit}", kv.bytes_held);
                    capped_steps += 1;
                }
            }
            let cache = model.engine.cache(id).unwrap();
            for group in cache.shape().global_groups() {
                assert_eq!(cache.table(group)[0].index.0, 0, "{kind}: the sinks stay");
            }
            if turn == 0 {
                model.engine.extend(id, kv_zip(11, 90, 40, "12pages", ":chunk=128")).unwrap();
            }
        }
        assert_eq!(capped_steps, 80, "{kind}");
        model.engine.close(id);
        assert_eq!(model.engine.pool().used_bytes(), 0);
    }
}

#[test]
fn where_nothing_may_be_evicted_nothing_is_repeated() {
    let gguf = gguf("llama-tied");
    let mut model = open(&gguf, &options());
    let plain = alone(&mut model, Request { eviction: None, ..kv_zip(12, 100, 20, "100%", "") });
    let id = model.engine.submit(kv_zip(12, 100, 20, "100%", "")).unwrap();
    model.engine.finish(id, &mut |_| ()).unwrap();
    assert_eq!(model.engine.timing(id).unwrap().pass, Duration::ZERO);
    assert_eq!(outcome(&mut model, id), plain);
}

#[test]
fn a_prompt_that_leaves_no_room_to_repeat_it_is_refused() {
    let gguf = gguf("llama-tied");
    let longest = longest_instruction(&open(&gguf, &options()));
    let context_len = 300 + longest + 16;
    let mut model = open(&gguf, &ModelOptions { context_len: Some(context_len), ..options() });
    let refused = model.engine.submit(kv_zip(13, 300, 5, "20%", "")).unwrap_err().to_string();
    let needed = 128 + longest;
    let expected = format!(
        "the policy repeats the prompt of 300 tokens behind itself, {needed} at a time; the context holds {context_len}"
    );
    assert_eq!(refused, expected);
    assert_eq!(model.engine.pool().used_bytes(), 0);
    let id = model.engine.submit(kv_zip(13, 300, 5, "20%", ":chunk=16")).unwrap();
    assert_eq!(model.engine.finish(id, &mut |_| ()).unwrap().finish_reason, FinishReason::Length);
}
