//! What codes cost in the predictions of real models: the golden text scored with a coded cache and a 16-bit one.
//!
//! The default model is fetched (98 MB, once); the others are tested where `ENTROKV_MODELS` has them.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod support;

use entrokv::{Arithmetic, ModelOptions, PageKind};
use serde_json::Value;
use support::{fixtures, model_path, open, options, shared};

/// Short name of a model, and its name in the golden files.
const MODELS: [(&str, &str); 4] = [
    ("smollm2-135m", "smollm2-135m-instruct-q4_1"),
    ("gemma3-270m", "gemma3-270m-q4_k_m"),
    ("qwen2.5-0.5b", "qwen2.5-0.5b"),
    ("qwen2.5-1.5b", "qwen2.5-coder-1.5b"),
];

struct Case {
    kind: &'static str,
    /// Most that the mean negative log likelihood may rise, in nats; with exact activations, move.
    nll: f64,
    /// Most that the mean divergence from the 16-bit cache may be, in nats.
    kl: f64,
}

/// The bars of the format's specification, section 5, and of the issue that asked for it; 8-bit codes have none of their own
/// for the divergence.
const CASES: [Case; 6] = [
    Case { kind: "q8_0", nll: 0.01, kl: 0.001 },
    Case { kind: "tq4", nll: 0.01, kl: 0.006 },
    Case { kind: "tq3", nll: 0.03, kl: 0.025 },
    Case { kind: "tq2", nll: f64::INFINITY, kl: 0.12 },
    Case { kind: "kivi4", nll: 0.01, kl: 0.002 },
    Case { kind: "kivi2", nll: f64::INFINITY, kl: 0.08 },
];

/// The 1,024 tokens of the golden text, where they are at hand.
fn golden_tokens(golden: &str) -> Option<Vec<u32>> {
    let file = format!("nll-{golden}.json");
    let committed = fixtures().join("real-models").join(&file);
    let path = if committed.is_file() { committed } else { shared()?.join("golden").join(&file) };
    let score: Value = serde_json::from_str(&std::fs::read_to_string(path).ok()?).unwrap();
    Some(score["tokens"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect())
}

/// The likelihood of a text with the engine's defaults: it must not fall by more than the bar. That of qwen2.5-0.5b *rises* by
/// 0.01 to 0.03, in the reference of the format too, and by 8-bit activations every figure here is 0.005 uncertain.
#[test]
fn every_cache_type_predicts_as_well_as_16_bits() {
    let mut failures = Vec::new();
    for (name, golden) in MODELS {
        let (Some(path), Some(tokens)) = (model_path(name), golden_tokens(golden)) else { continue };
        let score = |kind: &str| {
            let page_kind: PageKind = kind.parse().unwrap();
            open(&path, &ModelOptions { page_kind, ..options() }).engine.score(&tokens, &mut |_| ()).unwrap()
        };
        let reference = score("f16");
        for Case { kind, nll, .. } in CASES {
            let coded = score(kind);
            let moved = coded.mean_nll() - reference.mean_nll();
            let (bytes, of) = (coded.bytes_held, reference.bytes_held);
            let line = format!("{name} {kind}: mean NLL {:.5} ({moved:+.5}), {bytes} of {of} bytes", coded.mean_nll());
            println!("{line}");
            if moved > nll {
                failures.push(line);
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// What codes alone do to the predictions: activations are exact here, since 8-bit ones answer *any* change of the cache, be
/// it from f16 to f32, with a divergence of 0.005 of their own.
#[test]
fn predictions_stay_as_close_as_the_bars_say() {
    let (name, golden) = MODELS[0];
    let (path, tokens) = (model_path(name).unwrap(), golden_tokens(golden).unwrap());
    for Case { kind, nll, kl } in CASES {
        let options = ModelOptions { page_kind: kind.parse().unwrap(), arithmetic: Arithmetic::F32, ..options() };
        let comparison = open(&path, &options).engine.compare(&tokens[..512], PageKind::F16, &mut |_| ()).unwrap();
        let moved = comparison.score.mean_nll() - comparison.reference.mean_nll();
        println!("{name} {kind}: mean NLL {moved:+.5}, mean KL {:.5}", comparison.mean_kl());
        assert!(comparison.mean_kl() <= kl, "{kind}: {}", comparison.mean_kl());
        assert!(moved.abs() <= nll, "{kind}: {moved:+}");
    }
}
