//! Policies that score in two stages or over a whole layer, against an independent numpy implementation (`tools/golden/policies`).

#![allow(clippy::unwrap_used)] // a file that does not read is a failed test

#[path = "golden/layer.rs"]
mod golden_layer;

use std::sync::Arc;

use entrokv_cache::policies::{Compactor, CriticalKv, ExpectedAttention};
use entrokv_cache::{Allotment, Axes, GroupUnits, ResidentTokens, TokenPolicy, TokenScorer, select_pages};
use golden_layer::{GoldenLayer, case, floats, golden, indices};
use serde_json::Value;

/// Compares scores `[heads][tokens]` where there is an expected one, to 1e-5 of the largest.
#[track_caller]
fn assert_close(got: &[Vec<f32>], expected: &Value, what: &str) {
    let mut compared = 0;
    for (got, expected) in got.iter().zip(expected.as_array().unwrap()) {
        let expected: Vec<Option<f64>> = expected.as_array().unwrap().iter().map(Value::as_f64).collect();
        assert_eq!(got.len(), expected.len(), "{what}");
        let largest = expected.iter().flatten().fold(0.0_f64, |largest, x| largest.max(x.abs()));
        for (token, (got, expected)) in got.iter().zip(expected).enumerate() {
            let Some(expected) = expected else { continue };
            assert!(
                (f64::from(*got) - expected).abs() <= 1e-5 * largest,
                "{what}, token {token}: {got} for {expected}"
            );
            compared += 1;
        }
    }
    assert!(compared > 20, "{what}: {compared} scores compared");
}

/// The stages as the allotment gives each head its count: uniform, and shared out within the layer.
#[test]
fn critical_kv_keeps_what_the_reference_keeps() {
    let inner = ExpectedAttention { future: 32, value_norm: false, ..ExpectedAttention::default() };
    let policy = TokenPolicy::new(CriticalKv { inner: Arc::new(inner), ..CriticalKv::default() }, Axes::default());
    let scored = GoldenLayer::read().scored(&policy, 1);
    let (file, pinned) = (golden("critical-kv"), [0, 1, 2, 3]);
    let second: Vec<Vec<f32>> =
        scored.iter().map(|(scorer, _)| scorer.second_stage().unwrap().scores.to_vec()).collect();
    assert_close(&second, &case(&file, "uniform")["scores"], "critical-kv");
    let units: Vec<GroupUnits<'_>> =
        scored.iter().map(|(_, scores)| GroupUnits { scores, pinned: &pinned, least: 4 }).collect();
    for (name, allotment) in [("uniform", Allotment::Uniform), ("adaptive", Allotment::AdaFloor { safeguard: 0.2 })] {
        for entry in case(&file, name)["kept"].as_array().unwrap() {
            let count = entry["count"].as_u64().unwrap() as usize;
            let counts = allotment.counts(&units, 2, count);
            for (head, ((scorer, first), k)) in scored.iter().zip(counts).enumerate() {
                let stage = scorer.second_stage().unwrap();
                let mut forced = stage.forced(first, k, allotment.safe_units(count), &pinned);
                let kept = select_pages(stage.scores, k, &forced);
                forced.sort_unstable();
                assert_eq!(forced, indices(&entry["forced"][head]), "{name}, {count} tokens, head {head}");
                assert_eq!(kept.as_slice(), indices(&entry["tokens"][head]), "{name}, {count} tokens, head {head}");
            }
        }
    }
}

/// Leverage and attention that looks both ways, each centred and scaled over both heads, with the fixture's sketch.
#[test]
fn compactor_scores_and_keeps_as_the_reference() {
    let (layer, file) = (GoldenLayer::read(), golden("compactor"));
    let frequencies = layer.frequencies();
    let positions: Vec<u32> = (0..layer.len as u32).collect();
    for (name, chunk, scale) in [
        ("whole chunks, logits unscaled", 17, 1.0),
        ("ragged last chunk, logits unscaled", 16, 1.0),
        ("ragged last chunk, logits over sqrt(d)", 16, 0.25),
    ] {
        let two_way: Vec<Vec<f32>> = (0..layer.num_kv_heads).map(|head| two_way(&layer, head, chunk, scale)).collect();
        let vectors = ["k", "v"].map(|key| [layer.vectors(key, 0), layer.vectors(key, 1)]);
        let tokens = |head: usize| ResidentTokens {
            positions: &positions,
            keys: &vectors[0][head],
            values: &vectors[1][head],
            form: layer.form(&frequencies),
            two_way: &two_way[head],
            ..ResidentTokens::default()
        };
        let sketch = |head: usize| file["sketch"][head].as_array().unwrap().iter().flat_map(floats).map(f64::from);
        let mut scorers: Vec<Box<dyn TokenScorer>> = (0..layer.num_kv_heads)
            .map(|head| Compactor { sketch: 8, ..Compactor::default() }.scorer_through(sketch(head).collect()))
            .collect();
        let mut layer_sums = vec![0.0; 6];
        for (head, scorer) in scorers.iter_mut().enumerate() {
            let mut own = Vec::new();
            scorer.measure(tokens(head), &mut own);
            layer_sums.iter_mut().zip(own).for_each(|(sum, own)| *sum += own);
        }
        let score = |(head, scorer): (usize, &mut Box<dyn TokenScorer>)| {
            let mut scores = Vec::new();
            scorer.score(ResidentTokens { layer_sums: &layer_sums, ..tokens(head) }, &mut scores);
            scores
        };
        let got: Vec<Vec<f32>> = scorers.iter_mut().enumerate().map(score).collect();
        let case = case(&file, name);
        assert_close(&got, &case["scores"], name);
        let protected: Vec<usize> = (0..8).chain(layer.len - 4..layer.len).collect();
        for entry in case["kept"].as_array().unwrap() {
            let count = entry["count"].as_u64().unwrap() as usize;
            for (head, scores) in got.iter().enumerate() {
                let kept = select_pages(scores, count, &protected);
                assert_eq!(kept.as_slice(), indices(&entry["tokens"][head]), "{name}, {count} tokens, head {head}");
            }
        }
    }
}

/// Column sums of attention without a mask inside blocks of `chunk` tokens from the ninth to the fifth before the end, the mean over
/// the heads that read `kv_head`; NaN outside.
fn two_way(layer: &GoldenLayer, kv_head: usize, chunk: usize, scale: f64) -> Vec<f32> {
    let keys = layer.vectors("k", kv_head);
    let keys: Vec<&[f32]> = keys.chunks(layer.head_dim).collect();
    let (first, end) = (8, layer.len - 4);
    let mut sums = vec![f64::NAN; layer.len];
    sums[first..end].fill(0.0);
    for head in kv_head * layer.group_size..(kv_head + 1) * layer.group_size {
        let queries = layer.vectors("q", head);
        let queries: Vec<&[f32]> = queries.chunks(layer.head_dim).collect();
        for start in (first..end).step_by(chunk) {
            let block = start..(start + chunk).min(end);
            for query in &queries[block.clone()] {
                let logit = |key: &&[f32]| {
                    query.iter().zip(*key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>() * scale
                };
                let weights: Vec<f64> = keys[block.clone()].iter().map(|key| logit(key).exp()).collect();
                let total = weights.iter().sum::<f64>() * layer.group_size as f64;
                sums[block.clone()].iter_mut().zip(weights).for_each(|(sum, weight)| *sum += weight / total);
            }
        }
    }
    sums.into_iter().map(|sum| sum as f32).collect()
}
