//! A given answer under a cap: the numbers are those of the same tokens scored another way.

#![allow(clippy::unwrap_used)]

mod support;

use std::collections::HashSet;
use std::sync::Arc;

use entrokv::gguf::Gguf;
use entrokv::{EvictionOptions, Model, ModelOptions, parse_policy};
use support::dense::DenseDecoder;
use support::{exact, fixtures, options, random_tokens};

fn open(options: &ModelOptions) -> (Gguf, Model) {
    let gguf = Gguf::open(&fixtures().join("architectures/llama-tied.gguf")).unwrap();
    let model = Model::from_gguf(&gguf, options, &mut |_| ()).unwrap();
    (gguf, model)
}

fn eviction(budget: &str, policy: &str) -> EvictionOptions {
    EvictionOptions { budget: budget.parse().unwrap(), policy: Arc::from(parse_policy(policy).unwrap()) }
}

#[test]
fn a_cap_that_caps_nothing_costs_nothing() {
    let (_, mut model) = open(&options());
    let tokens = random_tokens(3, 260, 256);
    let (prompt, answer) = tokens.split_at(200);
    let score = model.engine.score_answer(prompt, answer, &eviction("100%", "h2o"), &mut |_| ()).unwrap();
    assert_eq!(score.nll, score.full_nll);
    assert!(score.kl.iter().all(|kl| *kl == 0.0));
    let whole = model.engine.score(&tokens, &mut |_| ()).unwrap();
    assert_eq!(score.nll, whole.nll[199..], "the bits do not depend on how a text is read");
    assert_eq!(model.engine.pool().used_bytes(), 0);
}

/// With StreamingLLM it is known what is held: four sinks and the newest pages.
#[test]
fn a_capped_answer_is_scored_as_a_masked_one() {
    let (gguf, mut model) = open(&exact());
    let tokens = random_tokens(4, 130, 256);
    let (prompt, answer) = tokens.split_at(96);
    let policy = eviction("4pages", "streaming-llm:schedule=once");
    let score = model.engine.score_answer(prompt, answer, &policy, &mut |_| ()).unwrap();
    let kept: HashSet<usize> = (0..16).chain(48..96).collect();
    let mask = |_: usize, _: usize, query: usize, key: usize| query < 96 || key >= 96 || kept.contains(&key);
    let see_all = |_: usize, _: usize, _: usize, _: usize| true;
    let decoder = DenseDecoder::new(&gguf, &model.config);
    let ln_p = |rows: &[Vec<f64>], position: usize| -> Vec<f64> {
        let row = &rows[position];
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum = max + row.iter().map(|x| (x - max).exp()).sum::<f64>().ln();
        row.iter().map(|x| x - sum).collect()
    };
    let (masked, full) = (decoder.logits(&tokens[..129], &mask), decoder.logits(&tokens[..129], &see_all));
    for (index, position) in (95..129).enumerate() {
        let (masked, full) = (ln_p(&masked, position), ln_p(&full, position));
        let token = tokens[position + 1] as usize;
        assert!((score.nll[index] + masked[token]).abs() < 1e-3, "{index}");
        assert!((score.full_nll[index] + full[token]).abs() < 1e-3, "{index}");
        let kl: f64 = full.iter().zip(&masked).map(|(p, q)| p.exp() * (p - q)).sum();
        assert!((score.kl[index] - kl).abs() < 1e-3, "{index}: {} and {kl}", score.kl[index]);
    }
    assert!(score.kl.iter().any(|kl| *kl > 1e-4));
}

#[test]
fn what_cannot_be_scored_is_refused_and_nothing_stays_held() {
    let (_, mut model) = open(&options());
    let prompt = random_tokens(5, 50, 256);
    let mut refused = |prompt: &[u32], answer: &[u32], budget: &str| {
        let error = model.engine.score_answer(prompt, answer, &eviction(budget, "knorm"), &mut |_| ()).unwrap_err();
        assert_eq!(model.engine.pool().used_bytes(), 0);
        assert!(!model.engine.is_busy());
        error.to_string()
    };
    assert_eq!(refused(&prompt, &[], "50%"), "the answer has 0 tokens; at least 1 is needed");
    assert_eq!(refused(&[], &[1], "50%"), "the prompt has 0 tokens; at least 1 is needed");
    assert!(refused(&prompt, &[1, 100_000], "50%").starts_with("token id 100000 is outside the vocabulary of "));
    assert!(refused(&prompt, &vec![1; 1 << 20], "50%").starts_with("the text has 1048626 tokens, the context holds "));
    assert!(refused(&prompt, &[1], "1pages").contains("the smallest budget is 2pages"));
}
