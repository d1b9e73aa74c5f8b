//! Caches stored as codes, end to end on random-weight models: what is encoded when, bytes to the last one, equal bits,
//! budgets over codes.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod support;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use entrokv::gguf::Gguf;
use entrokv::{
    Encoding, EndTokens, EvictionOptions, FinishReason, LayerKind, Model, ModelOptions, PageKind, Request, SequenceId,
    parse_policy,
};
use entrokv_cache::KvCache;
use support::{count, gguf, options, random_tokens};

/// Models whose heads are 32 wide; the last has window layers.
const MODELS: [&str; 3] = ["qwen3-tied", "qwen3-untied", "gemma3"];

/// One of each encoding, alike and mixed.
const KINDS: [&str; 12] = [
    "bf16",
    "q8_0",
    "tq4",
    "tq3",
    "tq2",
    "kivi4",
    "kivi4/kivi2",
    "q8_0/kivi4",
    "kivi2/tq2",
    "tq3v2",
    "f32/tq4",
    "q8_0/f16",
];

fn coded(kind: &str) -> ModelOptions {
    ModelOptions { page_kind: kind.parse().unwrap(), ..options() }
}

fn open(gguf: &Gguf, options: &ModelOptions) -> Model {
    Model::from_gguf(gguf, options, &mut |_| ()).unwrap()
}

fn request(seed: u64, len: usize, generate: usize, budget: Option<(&str, &str)>) -> Request {
    Request {
        end_tokens: EndTokens::Ignore,
        eviction: budget.map(|(budget, policy)| EvictionOptions {
            budget: budget.parse().unwrap(),
            policy: Arc::from(parse_policy(policy).unwrap()),
        }),
        ..Request::greedy(random_tokens(seed, len, 256), generate)
    }
}

/// Page indices of each group of a global layer that are stored as codes; all groups must agree.
fn coded_pages(cache: &KvCache, kind: PageKind) -> Vec<u32> {
    let shape = cache.shape();
    let mut all: Vec<Vec<u32>> = Vec::new();
    for group in shape.groups() {
        let table = cache.table(group);
        let coded = table.iter().filter(|page| page.kind == kind).map(|page| page.index.0).collect();
        match shape.layers[group.layer as usize] {
            LayerKind::Global => all.push(coded),
            LayerKind::Window(_) => assert!(table.iter().all(|page| page.kind == kind.written_as())),
        }
    }
    assert!(all.windows(2).all(|pair| pair[0] == pair[1]), "{all:?}");
    all.swap_remove(0)
}

/// Steps `id` until its prompt has been read.
fn read_prompt(model: &mut Model, id: SequenceId, len: usize) {
    while model.engine.tokens(id).unwrap().len() == len {
        model.engine.step().unwrap();
    }
}

#[test]
fn what_has_left_the_window_is_codes_at_the_prompts_end_and_while_decoding() {
    for name in MODELS {
        let gguf = gguf(name);
        for kind_name in ["q8_0", "tq4", "tq3v2", "f32/tq4", "kivi4/kivi2"] {
            let kind: PageKind = kind_name.parse().unwrap();
            let mut model = open(&gguf, &coded(kind_name));
            let (groups, shape) = (model.engine.shape().num_global_groups() as u64, Arc::clone(model.engine.shape()));
            let id = model.engine.submit(request(1, 250, 100, None)).unwrap();
            read_prompt(&mut model, id, 250);
            // Positions before 218 lie outside the last 32; 208 is the end of page 12; page 0 holds the sinks.
            let what = format!("{name}, {kind_name}");
            assert_eq!(coded_pages(model.engine.cache(id).unwrap(), kind), (1..13).collect::<Vec<_>>(), "{what}");
            let bytes = |written: u64, stored: u64| {
                groups * (written * kind.written_as().page_bytes(&shape) + stored * kind.page_bytes(&shape))
            };
            let kv = model.engine.kv_report(id).unwrap();
            assert_eq!(kv.bytes_held, bytes(4, 12), "{what}");
            assert_eq!(kv.bytes_full, bytes(16, 0), "{what}");
            assert_eq!(model.engine.pool().used_bytes(), kv.bytes_held + kv.bytes_window, "{what}");
            let stored = kv.kinds.iter().find(|held| held.kind == kind).unwrap();
            assert_eq!((stored.pages, stored.bytes), (12 * groups, bytes(0, 12)), "{what}");
            while model.engine.is_busy() {
                model.engine.step().unwrap();
                let cache = model.engine.cache(id).unwrap();
                let outside = (cache.logical_len() - 32) / 16;
                assert_eq!(coded_pages(cache, kind), (1..outside as u32).collect::<Vec<_>>(), "{what}");
            }
            model.engine.close(id);
            assert_eq!(model.engine.pool().used_bytes(), 0, "{what}");
            assert_eq!(model.engine.pool().free_bytes(), model.engine.pool().capacity_bytes(), "{what}");
        }
    }
}

#[test]
fn rotated_keys_wait_for_128_positions_and_others_do_not() {
    let gguf = gguf("qwen3-tied");
    let beside_tables = |model: &Model, id| {
        let tables = model.engine.cache(id).unwrap().footprint().metadata_bytes;
        model.engine.kv_report(id).unwrap().bytes_metadata - tables
    };
    // What attention reads of the tables is as much whatever the pages are.
    let mut plain = open(&gguf, &coded("f16"));
    let id = plain.engine.submit(request(2, 40, 200, None)).unwrap();
    while plain.engine.is_busy() {
        plain.engine.step().unwrap();
    }
    let segments = beside_tables(&plain, id);
    let rotated = [("tq4", 16 + 128 + 32), ("tq2", 16 + 128 + 32), ("tq3/kivi4", 16 + 128 + 32)];
    for (kind_name, first) in rotated.into_iter().chain([("q8_0", 64), ("f16/tq3", 64), ("kivi4", 64)]) {
        let kind: PageKind = kind_name.parse().unwrap();
        let mut model = open(&gguf, &coded(kind_name));
        let id = model.engine.submit(request(2, 40, 200, None)).unwrap();
        while model.engine.is_busy() {
            model.engine.step().unwrap();
            let cache = model.engine.cache(id).unwrap();
            let len = cache.logical_len();
            let expected = if len < first { 0 } else { (len - 32) / 16 - 1 };
            assert_eq!(coded_pages(cache, kind).len(), expected, "{kind_name} at {len}");
        }
        // Two times 32 channels of 4 bytes for each group.
        let constants = if kind.needs_constants() { model.engine.shape().num_groups() as u64 * 256 } else { 0 };
        assert_eq!(beside_tables(&model, id) - segments, constants, "{kind_name}");
    }
}

/// The most is held while the first KV group's codes stand beside its pages, all others being plain still.
#[test]
fn the_peak_counts_codes_beside_what_they_replace() {
    let gguf = gguf("qwen3-tied");
    for kind_name in ["q8_0", "tq4"] {
        let kind: PageKind = kind_name.parse().unwrap();
        let mut model = open(&gguf, &coded(kind_name));
        let kv = model.engine.generate(request(2, 300, 1, None), |_| ()).unwrap().kv;
        let shape = model.engine.shape();
        let (groups, plain) = (shape.num_global_groups() as u64, kind.written_as().page_bytes(shape));
        // 300 tokens on 19 pages, of which the sinks' and those of the newest 32 are no codes.
        assert_eq!(kv.bytes_held, groups * (4 * plain + 15 * kind.page_bytes(shape)), "{kind_name}");
        assert_eq!(kv.peak.held, groups * 19 * plain + 15 * kind.page_bytes(shape), "{kind_name}");
    }
}

/// Bits of everything a scored text gives.
fn score_bits(gguf: &Gguf, options: &ModelOptions) -> Vec<u64> {
    let score = open(gguf, options).engine.score(&random_tokens(7, 300, 256), &mut |_| ()).unwrap();
    let logits = score.last_logits.iter().map(|x| u64::from(x.to_bits()));
    score.nll.iter().map(|x| x.to_bits()).chain(logits).collect()
}

#[test]
fn any_chunk_size_and_thread_count_give_the_same_bits() {
    for name in MODELS {
        let gguf = gguf(name);
        for kind in KINDS {
            let usual = score_bits(&gguf, &coded(kind));
            for (chunk, threads) in [(1, 2), (7, 1), (64, 3)] {
                let other = ModelOptions { chunk_size: count(chunk), threads: count(threads), ..coded(kind) };
                assert!(score_bits(&gguf, &other) == usual, "{name}, {kind}, chunks of {chunk}, {threads} threads");
            }
        }
    }
}

#[test]
fn generating_is_the_same_in_any_chunks_alone_and_in_company() {
    for name in MODELS {
        let gguf = gguf(name);
        for kind in ["q8_0", "tq4", "tq3v2", "kivi4"] {
            let requests = || {
                let policy = "page-entro-kv:preset=serving";
                [
                    request(1, 230, 60, None),
                    request(2, 177, 60, Some(("30%", policy))),
                    request(3, 100, 120, None),
                    request(4, 200, 60, Some(("50%", policy))),
                ]
            };
            let options = |chunk| ModelOptions { chunk_size: count(chunk), ..coded(kind) };
            let alone: Vec<Vec<u32>> = requests()
                .into_iter()
                .map(|request| open(&gguf, &options(512)).engine.generate(request, |_| ()).unwrap().tokens)
                .collect();
            for chunk in [1, 48, 512] {
                let mut model = open(&gguf, &options(chunk));
                let ids: Vec<_> = requests().into_iter().map(|request| model.engine.submit(request).unwrap()).collect();
                for (id, alone) in ids.into_iter().zip(&alone) {
                    let together = model.engine.finish(id, &mut |_| ()).unwrap();
                    assert_eq!(&together.tokens, alone, "{name}, {kind}, chunks of {chunk}");
                    model.engine.close(id);
                }
                assert_eq!(model.engine.pool().used_bytes(), 0);
            }
        }
    }
}

/// Reading a text and generating it see the same codes at the same positions.
#[test]
fn a_scored_text_is_read_as_decoding_reads_it() {
    for name in MODELS {
        let gguf = gguf(name);
        for kind in ["q8_0", "tq3v2", "tq4", "kivi2"] {
            for page_size in [16, 64] {
                let mut model = open(&gguf, &ModelOptions { page_size, ..coded(kind) });
                let id = model.engine.submit(request(9, 1, 260, None)).unwrap();
                model.engine.finish(id, &mut |_| ()).unwrap();
                let tokens = model.engine.tokens(id).unwrap().to_vec();
                model.engine.close(id);
                // What was chosen greedily is the most likely token at every position of the same text.
                for end in [100, 178, 200, 260] {
                    let score = model.engine.score(&tokens[..end], &mut |_| ()).unwrap();
                    let best = score.last_logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    let ours = score.last_logits[tokens[end] as usize];
                    assert_eq!(ours.to_bits(), best.to_bits(), "{name}, {kind}, pages of {page_size}, {end} tokens");
                }
            }
        }
    }
}

#[test]
fn budget_holds_after_every_step() {
    for name in ["qwen3-tied", "gemma3"] {
        let gguf = gguf(name);
        for kind in ["q8_0", "tq4", "tq3v2", "f16/tq2", "kivi4/kivi2"] {
            for policy in ["page-entro-kv", "page-entro-kv:preset=serving", "mean-pages"] {
                for (page_size, budget, prompt) in [
                    (16, "20%", 300),
                    (16, "70%", 190),
                    (16, "60%", 120),
                    (32, "1/3", 300),
                    (16, "112tok", 250),
                    (16, "5pages", 250),
                    (16, "90KiB", 300),
                    (16, "90KiB", 60),
                ] {
                    let mut model = open(&gguf, &ModelOptions { page_size, ..coded(kind) });
                    let id = model.engine.submit(request(11, prompt, 200, Some((budget, policy)))).unwrap();
                    let what = format!("{name}, {kind}, {policy}, pages of {page_size}, {budget} of {prompt}");
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
                        assert_eq!(model.engine.pool().used_bytes(), kv.bytes_held + kv.bytes_window, "{what}");
                        steps += 1;
                    }
                    assert_eq!(steps, 200, "{what}");
                    model.engine.close(id);
                    assert_eq!(model.engine.pool().used_bytes(), 0, "{what}");
                }
            }
        }
    }
}

#[test]
fn the_same_bytes_hold_more_pages_as_codes() {
    let gguf = gguf("qwen3-tied");
    let pages = |kind: &str| {
        let mut model = open(&gguf, &coded(kind));
        let groups = model.engine.shape().num_global_groups() as u64;
        // 12 pages of 16-bit floats for each group.
        let bytes = 12 * groups * PageKind::F16.page_bytes(model.engine.shape());
        let id = model.engine.submit(request(5, 600, 1, Some((&format!("{bytes}B"), "page-entro-kv")))).unwrap();
        model.engine.finish(id, &mut |_| ()).unwrap();
        let kv = model.engine.kv_report(id).unwrap();
        assert!(kv.bytes_held <= bytes && kv.bytes_budget.unwrap() <= bytes, "{kind}: {kv:?}");
        kv.kinds.iter().map(|held| held.pages).sum::<u64>() / groups
    };
    // f16 pages of 2,048 bytes: one for the sinks and up to three that are recent. As codes, 576 (4 bits) and 384 bytes
    // (3 and 2 bits), the other 8 make room for 28 and 42, of which 600 tokens have 34; for 23 of 704 bytes (KIVI's 4).
    assert_eq!(["f16", "tq4", "tq3v2", "kivi4"].map(pages), [12, 4 + 28, 4 + 34, 4 + 23]);
}

#[test]
fn a_further_turn_reads_codes_and_adds_to_them() {
    let gguf = gguf("qwen3-untied");
    for kind_name in ["q8_0", "tq4", "tq3v2", "kivi4"] {
        let kind: PageKind = kind_name.parse().unwrap();
        let answers = [1, 37, 512].map(|chunk| {
            let mut model = open(&gguf, &ModelOptions { chunk_size: count(chunk), ..coded(kind_name) });
            let id = model.engine.submit(request(1, 200, 20, None)).unwrap();
            let first = model.engine.finish(id, &mut |_| ()).unwrap();
            let constants_then = first.kv.bytes_metadata;
            model.engine.extend(id, request(6, 90, 30, None)).unwrap();
            let second = model.engine.finish(id, &mut |_| ()).unwrap();
            // 339 of 340 tokens have been computed: positions before 307 lie outside the window.
            assert_eq!(coded_pages(model.engine.cache(id).unwrap(), kind), (1..19).collect::<Vec<_>>());
            assert!(second.kv.bytes_metadata < 2 * constants_then);
            model.engine.close(id);
            assert_eq!(model.engine.pool().used_bytes(), 0);
            [first.tokens, second.tokens]
        });
        assert!(answers.iter().all(|answer| *answer == answers[0]), "{kind_name}");
    }
}

#[test]
fn an_interrupted_step_can_be_repeated() {
    let gguf = gguf("qwen3-tied");
    let options = coded("tq4");
    let undisturbed = open(&gguf, &options).engine.generate(request(3, 200, 60, None), |_| ()).unwrap();
    // Chunks of 30, so that queries are being summed when the interrupts come.
    let mut model = open(&gguf, &ModelOptions { chunk_size: count(30), ..options.clone() });
    let id = model.engine.submit(request(3, 200, 60, None)).unwrap();
    for step in 0.. {
        options.interrupt.store(step % 2 == 0, Ordering::SeqCst);
        assert_eq!(model.engine.step().is_err(), step % 2 == 0);
        if !model.engine.is_busy() {
            break;
        }
    }
    assert_eq!(model.engine.finish(id, &mut |_| ()).unwrap().tokens, undisturbed.tokens);
}

#[test]
fn fewer_bits_cost_more() {
    for name in MODELS {
        let gguf = gguf(name);
        let tokens = random_tokens(21, 400, 256);
        let compare =
            |kind: &str| open(&gguf, &coded(kind)).engine.compare(&tokens, PageKind::F16, &mut |_| ()).unwrap();
        let of = |kind: &str| {
            let comparison = compare(kind);
            assert_eq!(comparison.kl.len(), tokens.len());
            assert_eq!(comparison.score.nll.len(), tokens.len() - 1);
            comparison.mean_kl()
        };
        assert_eq!(of("f16"), 0.0, "{name}");
        let kl = ["q8_0", "tq4", "tq3", "tq2"].map(of);
        // Random weights amplify every rounding: real models are a hundred times calmer (`real_models.rs`).
        assert!(kl[0] > 0.0 && kl.is_sorted(), "{name}: {kl:?}");
        assert!(kl[0] < 5e-3 && kl[1] < 0.1 && kl[3] < 1.0, "{name}: {kl:?}");
        let kl = ["kivi4", "kivi2"].map(of);
        assert!(kl[0] > 0.0 && kl.is_sorted() && kl[0] < 0.1 && kl[1] < 1.0, "{name}: {kl:?}");
        let reference = compare("tq2").reference;
        assert_eq!(reference, open(&gguf, &coded("f16")).engine.score(&tokens, &mut |_| ()).unwrap(), "{name}");
    }
}

#[test]
fn a_pool_without_room_for_codes_leaves_pages_plain_and_fails_only_what_is_capped() {
    let gguf = gguf("qwen3-tied");
    let shape = Arc::clone(open(&gguf, &options()).engine.shape());
    let page = PageKind::F16.page_bytes(&shape) * shape.num_global_groups() as u64;
    // 20 pages for each group as they are written, and nothing beside them.
    let full = ModelOptions { pool_bytes: Some(20 * page), ..coded("tq4") };
    let tq4 = PageKind::of(Encoding::Tq4);
    let mut model = open(&gguf, &full);
    let id = model.engine.submit(request(1, 320, 1, None)).unwrap();
    assert_eq!(model.engine.finish(id, &mut |_| ()).unwrap().finish_reason, FinishReason::Length);
    assert!(coded_pages(model.engine.cache(id).unwrap(), tq4).is_empty());
    model.engine.close(id);
    // A budget of those 20 pages counts on most of them being codes, and cannot be kept.
    let completion = model.engine.generate(request(1, 320, 1, Some(("20pages", "page-entro-kv"))), |_| ()).unwrap();
    assert!(matches!(completion.finish_reason, FinishReason::Failed(_)), "{:?}", completion.finish_reason);
    // One of 18 pages makes the room itself, since what goes goes first.
    let completion = model.engine.generate(request(1, 320, 1, Some(("90%", "page-entro-kv"))), |_| ()).unwrap();
    assert_eq!(completion.finish_reason, FinishReason::Length);
    assert!(completion.kv.bytes_held <= completion.kv.bytes_budget.unwrap());
    assert_eq!(model.engine.pool().used_bytes(), 0);
}

#[test]
fn geometries_that_codes_cannot_have_are_refused_in_one_line() {
    let refused = |name: &str, options: &ModelOptions| {
        Model::from_gguf(&gguf(name), options, &mut |_| ()).err().unwrap().to_string()
    };
    assert_eq!(
        refused("llama-tied", &coded("tq4")),
        "cache type tq4 needs a head dimension that is a multiple of 32 and at most 512, got 16"
    );
    assert_eq!(
        refused("llama-tied", &coded("f16/kivi2")),
        "cache type f16/kivi2 needs a head dimension that is a multiple of 32 and at most 512, got 16"
    );
    assert_eq!(
        refused("qwen3-tied", &ModelOptions { page_size: 24, ..coded("kivi4") }),
        "cache type kivi4 needs pages of a multiple of 16 tokens, got 24"
    );
    assert_eq!(
        refused("qwen3-tied", &ModelOptions { page_size: 20, ..coded("f16/q8_0") }),
        "cache type f16/q8_0 needs pages of a multiple of 16 tokens, got 20"
    );
    let mut model = open(&gguf("llama-tied"), &options());
    let error = model.engine.compare(&[1, 2, 3], PageKind::of(Encoding::Tq4), &mut |_| ()).unwrap_err();
    assert!(error.to_string().ends_with("got 16"), "{error}");
}
