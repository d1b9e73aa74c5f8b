//! Same tokens, same bits: whatever the chunks, the threads, the batch, the frames' places and a budget nothing exceeds.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod support;

use std::sync::Arc;

use entrokv::gguf::Gguf;
use entrokv::{EndTokens, EvictionOptions, Isa, Model, ModelOptions, PageKind, Request, parse_policy};
use support::{Bench, bits, count, gguf, options, random_tokens, vector_isas};

const ARCHITECTURES: [&str; 4] = ["llama-tied", "qwen2-untied", "qwen3-tied", "gemma3"];

fn logits(gguf: &Gguf, options: &ModelOptions, chunk: usize) -> Vec<Vec<u32>> {
    let tokens = random_tokens(7, 300, 256);
    bits(&Bench::new(gguf, options).feed(&tokens, chunk))
}

#[test]
fn any_chunk_size_gives_the_same_bits() {
    for name in ARCHITECTURES {
        let gguf = gguf(name);
        for isa in vector_isas() {
            let of = ModelOptions { isa, ..options() };
            let whole = logits(&gguf, &of, 300);
            for chunk in [1, 7, 64, 256] {
                assert!(logits(&gguf, &of, chunk) == whole, "{name}, {isa}, chunks of {chunk}");
            }
        }
    }
}

#[test]
fn any_thread_count_gives_the_same_bits() {
    for name in ARCHITECTURES {
        let gguf = gguf(name);
        for isa in vector_isas() {
            let of = |threads| ModelOptions { isa, threads: count(threads), ..options() };
            let one = logits(&gguf, &of(1), 50);
            for threads in [2, 3, 5] {
                assert!(logits(&gguf, &of(threads), 50) == one, "{name}, {isa}, {threads}");
            }
        }
    }
}

#[test]
fn any_page_size_gives_the_same_bits() {
    for name in ARCHITECTURES {
        let gguf = gguf(name);
        let usual = logits(&gguf, &options(), 50);
        for page_size in [1, 5, 16, 17, 64, 256] {
            assert!(
                logits(&gguf, &ModelOptions { page_size, ..options() }, 50) == usual,
                "{name}, pages of {page_size}"
            );
        }
    }
}

/// The portable path rounds products before it adds them, where the vector paths fuse; it is close, not equal. Nor is the
/// one that rounds attention's operands to bf16.
#[test]
fn any_vector_instruction_set_gives_the_same_bits() {
    for name in ARCHITECTURES {
        let gguf = gguf(name);
        let best = logits(&gguf, &ModelOptions { isa: Isa::detect().in_f32(), ..options() }, 50);
        for isa in vector_isas().filter(|isa| *isa == isa.in_f32()) {
            assert!(logits(&gguf, &ModelOptions { isa, ..options() }, 50) == best, "{name}, {}", isa.name());
        }
    }
}

#[test]
fn the_places_of_frames_do_not_matter() {
    let gguf = gguf("llama-tied");
    let tokens = random_tokens(7, 300, 256);
    let fresh = bits(&Bench::new(&gguf, &options()).feed(&tokens, 50));
    let mut bench = Bench::new(&gguf, &options());
    // Scatter holes over the pool so that the sequence's frames come in another order than its pages.
    let bytes = PageKind::F16.page_bytes(&bench.shape);
    let mut frames: Vec<_> = (0..200).map(|_| bench.pool.allocate(bytes).unwrap()).collect();
    let mut kept = Vec::new();
    while let Some(frame) = frames.pop() {
        if frames.len() % 3 == 0 { kept.push(frame) } else { bench.pool.release(frame) }
    }
    assert!(bits(&bench.feed(&tokens, 50)) == fresh);
    kept.into_iter().for_each(|frame| bench.pool.release(frame));
}

fn request(seed: u64, len: usize, budget: Option<&str>) -> Request {
    let policy = "page-entro-kv:preset=serving";
    Request {
        end_tokens: EndTokens::Ignore,
        eviction: budget.map(|text| EvictionOptions {
            budget: text.parse().unwrap(),
            policy: Arc::from(parse_policy(policy).unwrap()),
        }),
        ..Request::greedy(random_tokens(seed, len, 256), 60)
    }
}

#[test]
fn a_sequence_is_the_same_alone_and_in_company() {
    for (name, isa) in ARCHITECTURES.into_iter().flat_map(|name| vector_isas().map(move |isa| (name, isa))) {
        let gguf = gguf(name);
        let open = |chunk| {
            let options = ModelOptions { isa, chunk_size: count(chunk), ..options() };
            Model::from_gguf(&gguf, &options, &mut |_| ()).unwrap()
        };
        let requests =
            || [request(1, 130, None), request(2, 77, Some("20%")), request(3, 200, Some("30%")), request(4, 16, None)];
        let alone: Vec<Vec<u32>> =
            requests().into_iter().map(|request| open(64).engine.generate(request, |_| ()).unwrap().tokens).collect();
        for chunk in [1, 48, 512] {
            let mut model = open(chunk);
            let ids: Vec<_> = requests().into_iter().map(|request| model.engine.submit(request).unwrap()).collect();
            for (id, alone) in ids.into_iter().zip(&alone) {
                let together = model.engine.finish(id, &mut |_| ()).unwrap();
                assert_eq!(&together.tokens, alone, "{name}, {isa}, chunks of {chunk}");
                model.engine.close(id);
            }
            assert_eq!(model.engine.pool().used_bytes(), 0);
        }
    }
}

#[test]
fn a_budget_that_everything_fits_changes_no_bit() {
    for name in ARCHITECTURES {
        let gguf = gguf(name);
        let mut model = Model::from_gguf(&gguf, &options(), &mut |_| ()).unwrap();
        let full = model.engine.generate(request(5, 150, None), |_| ()).unwrap();
        for budget in ["100%", "250%", "100000tok", "1GiB"] {
            let capped = model.engine.generate(request(5, 150, Some(budget)), |_| ()).unwrap();
            assert_eq!(capped.tokens, full.tokens, "{name} at {budget}");
            assert_eq!(capped.kv.bytes_held, full.kv.bytes_held, "{name} at {budget}");
            assert_eq!(capped.kv.eviction.pages_evicted, 0, "{name} at {budget}");
        }
    }
}
