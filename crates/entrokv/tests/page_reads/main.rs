//! Policies that have a step of decoding read some of the pages: which ones, how many, and that nothing else depends on it.

#![allow(clippy::unwrap_used)]

mod spy;
#[path = "../support/mod.rs"]
mod support;

use std::sync::Arc;

use entrokv::{
    EndTokens, EvictionOptions, Model, ModelOptions, PageKind, Request, StepReads, SubmitError, parse_policy,
};
use entrokv::{LayerKind, SequenceId};
use spy::{Seen, spied};
use support::{count, gguf, options, random_tokens};

fn open(name: &str, options: &ModelOptions) -> Model {
    Model::from_gguf(&gguf(name), options, &mut |_| ()).unwrap()
}

fn request(seed: u64, len: usize, generate: usize, policy: Option<&str>) -> Request {
    let eviction = policy.map(|policy| EvictionOptions {
        budget: "100%".parse().unwrap(),
        policy: Arc::from(parse_policy(policy).unwrap()),
    });
    Request { end_tokens: EndTokens::Ignore, eviction, ..Request::greedy(random_tokens(seed, len, 256), generate) }
}

const ARCHITECTURES: [&str; 3] = ["llama-tied", "qwen2-untied", "gemma3"];

#[test]
fn what_is_read_is_counted_and_nothing_is_freed() {
    for name in ARCHITECTURES {
        let mut model = open(name, &options());
        let is_global = |layer: usize| model.config.layers[layer] == LayerKind::Global;
        let shape = model.engine.shape().clone();
        let sparse = (1..shape.layers.len()).filter(|&layer| is_global(layer)).count() * shape.num_kv_heads;
        let id = model.engine.submit(request(3, 200, 60, Some("quest:tokens=64,dense=1"))).unwrap();
        let mut steps = 0;
        while model.engine.is_busy() {
            model.engine.step().unwrap();
            let kv = model.engine.kv_report(id).unwrap();
            let StepReads { pages_read, pages_held } = kv.step_reads.unwrap();
            assert_eq!((kv.bytes_held, kv.eviction.pages_evicted), (kv.bytes_full, 0), "{name}");
            if steps == 0 {
                assert_eq!((pages_read, pages_held), (0, 0), "{name}: the prompt is read densely");
            } else {
                let pages = shape.pages_for(200 + steps);
                assert_eq!(pages_held as usize, pages * shape.num_global_groups(), "{name}");
                assert_eq!((pages_held - pages_read) as usize, (pages - 4) * sparse, "{name}");
            }
            steps += 1;
        }
        assert_eq!(steps, 60, "{name}");
        // Two numbers a channel and page of a head, none of them of the open page.
        let kv = model.engine.kv_report(id).unwrap();
        let ranges = (259 / 16 * shape.num_global_groups() * 2 * shape.head_dim * 4) as u64;
        assert!(kv.bytes_policy_state >= ranges, "{name}: {} for {ranges}", kv.bytes_policy_state);
        model.engine.close(id);
        assert_eq!(model.engine.pool().used_bytes(), 0);
    }
}

/// Every step reads the newest page and those that a search over the stored keys, in f64, finds to be the best bounds.
#[test]
fn pages_read_are_those_in_which_the_largest_logit_could_be() {
    for name in ARCHITECTURES {
        let (mut engine, notes) = spied(&gguf(name), &options());
        let id = engine.submit(request(8, 120, 40, Some("quest:tokens=64,dense=1"))).unwrap();
        engine.finish(id, &mut |_| ()).unwrap();
        let shape = engine.shape().clone();
        let (d, group_len) = (shape.head_dim, shape.group_size * shape.head_dim);
        let mut compared = 0;
        for Seen { layer, queries, held, read } in notes.lock().unwrap().iter() {
            // Rows of the prompt, window layers and the first layer see everything.
            let is_answer = queries.len() == shape.num_kv_heads * group_len;
            if !is_answer || *layer == 0 || shape.layers[*layer] != LayerKind::Global {
                assert!(read.is_none(), "{name}, layer {layer}");
                continue;
            }
            let vectors = engine.token_vectors(id, *layer as u32).unwrap();
            let read = read.as_ref().unwrap();
            for (kv_head, (held, read)) in held.iter().zip(read).enumerate() {
                let bound = |first: u32| {
                    let keys = &vectors[kv_head].keys[first as usize * d..][..16 * d];
                    let of_head = |query: &[f32]| {
                        let term = |(i, q): (usize, &f32)| {
                            let products = keys.chunks(d).map(|key| f64::from(*q) * f64::from(key[i]));
                            products.fold(f64::NEG_INFINITY, f64::max)
                        };
                        query.iter().enumerate().map(term).sum::<f64>()
                    };
                    let heads = queries[kv_head * group_len..][..group_len].chunks(d).map(of_head);
                    heads.fold(f64::NEG_INFINITY, f64::max)
                };
                let (newest, older) = held.split_last().unwrap();
                assert_eq!((read.len(), read.last()), (4, Some(newest)), "{name}");
                let worst = read[..3].iter().map(|&first| bound(first)).fold(f64::INFINITY, f64::min);
                for first in older.iter().filter(|first| !read.contains(first)) {
                    // In f32 two near ones may trade places.
                    assert!(bound(*first) <= worst + 1e-4 * worst.abs().max(1.0), "{name}, layer {layer}: {first}");
                    compared += 1;
                }
            }
        }
        assert!(compared > 150, "{name}: {compared}");
    }
}

#[test]
fn a_budget_of_tokens_that_all_fit_changes_no_bit() {
    for name in ARCHITECTURES {
        let mut model = open(name, &options());
        let full = model.engine.generate(request(5, 150, 60, None), |_| ()).unwrap();
        for policy in ["quest", "quest:tokens=224,dense=0", "quest:tokens=1,dense=99"] {
            let read = model.engine.generate(request(5, 150, 60, Some(policy)), |_| ()).unwrap();
            assert_eq!(read.tokens, full.tokens, "{name}, {policy}");
        }
        let few = model.engine.generate(request(5, 150, 60, Some("quest:tokens=1,dense=0")), |_| ()).unwrap();
        assert_ne!(few.tokens, full.tokens, "{name}: three pages of fourteen are not the same");
    }
}

/// Several readers and others in one batch, whatever the chunks and threads, a further turn, and after an interrupted step.
#[test]
fn a_reader_is_the_same_alone_and_in_company() {
    for name in ARCHITECTURES {
        let requests = || {
            [
                request(1, 230, 70, Some("quest:tokens=48,dense=0")),
                request(2, 97, 70, None),
                request(3, 176, 70, Some("quest:tokens=96,dense=1,heads=sum")),
                request(4, 160, 70, Some("quest:tokens=1")),
            ]
        };
        let further = || request(9, 50, 30, Some("quest:tokens=64,dense=0"));
        let open = |chunk, threads| {
            open(name, &ModelOptions { chunk_size: count(chunk), threads: count(threads), ..options() })
        };
        let alone: Vec<[Vec<u32>; 2]> = requests()
            .into_iter()
            .map(|request| {
                let mut model = open(512, 1);
                let id = model.engine.submit(request).unwrap();
                let first = model.engine.finish(id, &mut |_| ()).unwrap().tokens;
                model.engine.extend(id, further()).unwrap();
                [first, model.engine.finish(id, &mut |_| ()).unwrap().tokens]
            })
            .collect();
        for (chunk, threads) in [(512, 2), (33, 3)] {
            let mut model = open(chunk, threads);
            let ids: Vec<SequenceId> =
                requests().into_iter().map(|request| model.engine.submit(request).unwrap()).collect();
            for (id, alone) in ids.iter().zip(&alone) {
                assert_eq!(model.engine.finish(*id, &mut |_| ()).unwrap().tokens, alone[0], "{name}, {chunk}");
            }
            ids.iter().for_each(|id| model.engine.extend(*id, further()).unwrap());
            for (id, alone) in ids.iter().zip(&alone) {
                assert_eq!(model.engine.finish(*id, &mut |_| ()).unwrap().tokens, alone[1], "{name}, {chunk}");
            }
        }
    }
}

#[test]
fn codes_are_read_in_part_too() {
    let kind: PageKind = "tq4".parse().unwrap();
    let mut model = open("qwen3-tied", &ModelOptions { page_kind: kind, ..options() });
    let id = model.engine.submit(request(6, 300, 60, Some("quest:tokens=64,dense=0"))).unwrap();
    let completion = model.engine.finish(id, &mut |_| ()).unwrap();
    let groups = model.engine.shape().num_global_groups() as u64;
    assert_eq!(completion.kv.step_reads, Some(StepReads { pages_read: 4 * groups, pages_held: 23 * groups }));
    assert!(completion.kv.bytes_held < completion.kv.bytes_full);
    model.engine.extend(id, request(7, 40, 20, Some("quest:tokens=64,dense=0"))).unwrap();
    let completion = model.engine.finish(id, &mut |_| ()).unwrap();
    assert_eq!(completion.kv.step_reads.unwrap().pages_read, 4 * groups);
}

#[test]
fn less_than_everything_is_refused_for_what_frees_nothing() {
    let mut model = open("llama-tied", &options());
    for budget in ["99%", "0.999999", "100000tok", "1TiB"] {
        let mut request = request(1, 100, 1, Some("quest"));
        request.eviction.as_mut().unwrap().budget = budget.parse().unwrap();
        let refused = model.engine.submit(request).unwrap_err();
        assert!(matches!(refused, SubmitError::Budget(_)), "{budget}");
        let message = refused.to_string();
        assert!(message.contains("the smallest budget is 100%"), "{message}");
    }
    assert_eq!(model.engine.pool().used_bytes(), 0);
}

/// Stage 1 evicts and stage 2 reads some of what stays; a budget is kept as ever, whatever the chunks and threads.
#[test]
fn rocketkv_reads_some_of_what_it_keeps() {
    for name in ARCHITECTURES {
        let two_stages = |policy: &str| {
            let mut request = request(4, 260, 70, Some(policy));
            request.eviction.as_mut().unwrap().budget = "50%".parse().unwrap();
            request
        };
        let mut answers: Vec<Vec<u32>> = Vec::new();
        for (chunk, threads) in [(512, 1), (37, 3)] {
            let mut model =
                open(name, &ModelOptions { chunk_size: count(chunk), threads: count(threads), ..options() });
            let request = two_stages("rocketkv:window=16,tokens=64,channels=8");
            let id = model.engine.submit(request).unwrap();
            let mut tokens = Vec::new();
            while model.engine.is_busy() {
                tokens.extend(model.engine.step().unwrap().into_iter().filter_map(|output| output.token));
                let kv = model.engine.kv_report(id).unwrap();
                assert!(kv.bytes_held <= kv.bytes_budget.unwrap_or(u64::MAX), "{name}");
                assert_eq!((kv.budget_violations, kv.eviction.nan_rows), (0, 0), "{name}");
            }
            let groups = model.engine.shape().num_global_groups() as u64;
            let reads = model.engine.kv_report(id).unwrap().step_reads.unwrap();
            // Half of 260 tokens is eight pages.
            assert_eq!((reads.pages_read, reads.pages_held), (4 * groups, 8 * groups), "{name}");
            answers.push(tokens);
        }
        assert_eq!(answers[0], answers[1], "{name}");
        let mut model = open(name, &options());
        let mut tokens = |policy| model.engine.generate(two_stages(policy), |_| ()).unwrap().tokens;
        // That model says one word over and over.
        if name != "gemma3" {
            assert_ne!(answers[0], tokens("rocketkv:window=16"), "{name}");
        }
        // What reads everything is stage 1 alone.
        assert_eq!(tokens("rocketkv:window=16,tokens=128"), tokens("rocketkv:window=16"), "{name}");
    }
}

/// The channels cleared are those that weigh least by the prompt's own queries and keys, in all tokens but the newest and those that
/// came later.
#[test]
fn think_clears_channels_of_what_is_held_and_frees_nothing() {
    for name in ARCHITECTURES {
        let (mut whole, notes) = spied(&gguf(name), &options());
        let (prompt, answer) = (150, 30);
        let undisturbed = whole.submit(request(2, prompt, answer, None)).unwrap();
        whole.finish(undisturbed, &mut |_| ()).unwrap();
        for (chunk, threads) in [(512, 1), (41, 3)] {
            let mut model =
                open(name, &ModelOptions { chunk_size: count(chunk), threads: count(threads), ..options() });
            let think = Some("think:fraction=0.3,window=20,recent=40");
            let id = model.engine.submit(request(2, prompt, answer, think)).unwrap();
            let completion = model.engine.finish(id, &mut |_| ()).unwrap();
            assert_eq!((completion.kv.bytes_held, completion.kv.bytes_budget), (completion.kv.bytes_full, None));
            let shape = model.engine.shape().clone();
            let (d, group_len) = (shape.head_dim, shape.group_size * shape.head_dim);
            for layer in (0..shape.layers.len()).filter(|&layer| shape.layers[layer] == LayerKind::Global) {
                let cleared = model.engine.token_vectors(id, layer as u32).unwrap();
                let before = whole.token_vectors(undisturbed, layer as u32).unwrap();
                let notes = notes.lock().unwrap();
                let seen = notes.iter().find(|seen| seen.layer == layer).unwrap();
                let queries: Vec<&[f32]> = seen.queries.chunks(shape.num_kv_heads * group_len).collect();
                assert_eq!(queries.len(), prompt, "{name}: the prompt in one piece");
                for kv_head in 0..shape.num_kv_heads {
                    let (cleared, before) = (&cleared[kv_head], &before[kv_head]);
                    let weight = |channel: usize| {
                        let square = |x: f32| f64::from(x).powi(2);
                        let heads = (0..shape.group_size).map(|head| kv_head * group_len + head * d + channel);
                        let asked = heads.map(|at| queries[prompt - 20..].iter().map(|q| square(q[at])).sum::<f64>());
                        asked.sum::<f64>() * (0..prompt).map(|t| square(before.keys[t * d + channel])).sum::<f64>()
                    };
                    let is_clear = |channel: usize, tokens: std::ops::Range<usize>| {
                        tokens.into_iter().all(|t| cleared.keys[t * d + channel] == 0.0)
                    };
                    let (gone, kept): (Vec<usize>, Vec<usize>) =
                        (0..d).partition(|&channel| is_clear(channel, 0..prompt - 40));
                    assert_eq!(gone.len(), (0.3 * d as f64) as usize, "{name}, layer {layer}");
                    let heaviest = gone.iter().map(|&channel| weight(channel)).fold(0.0, f64::max);
                    let lightest = kept.iter().map(|&channel| weight(channel)).fold(f64::INFINITY, f64::min);
                    assert!(heaviest <= lightest, "{name}, layer {layer}: {heaviest}, {lightest}");
                    assert!(
                        gone.iter().all(|&channel| !is_clear(channel, prompt - 40..prompt)),
                        "{name}, layer {layer}"
                    );
                    assert!(gone.iter().all(|&channel| !is_clear(channel, prompt..prompt + answer - 1)), "{name}");
                    // All else that the prompt left is as it was; values are never touched.
                    let same = |t: usize, channel: usize| cleared.keys[t * d + channel] == before.keys[t * d + channel];
                    assert!((0..prompt).all(|t| kept.iter().all(|&channel| same(t, channel))), "{name}");
                    assert_eq!(cleared.values[..prompt * d], before.values[..prompt * d], "{name}");
                }
            }
        }
    }
}

#[test]
fn keys_that_are_codes_cannot_be_cleared() {
    let kind: PageKind = "q8_0".parse().unwrap();
    let mut model = open("qwen3-tied", &ModelOptions { page_kind: kind, ..options() });
    let refused = model.engine.submit(request(1, 100, 1, Some("think"))).unwrap_err().to_string();
    assert_eq!(refused, "think clears channels of keys, which a q8_0 cache stores as codes: ask for plain keys");
}
