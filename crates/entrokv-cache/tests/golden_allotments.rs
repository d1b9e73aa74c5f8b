//! How budgets are shared out, against the golden files: layers of PyramidKV, heads of Ada-KV, blocks of KV-Compress, stages of
//! RocketKV.

#![allow(clippy::unwrap_used)] // a file that does not read is a failed test

#[path = "golden/layer.rs"]
mod golden_layer;

use entrokv_cache::policies::RocketPlan;
use entrokv_cache::{Allotment, BlockPrices, GroupUnits, Pyramid, PyramidForm, cheapest_blocks, select_pages};
use golden_layer::{case, floats, golden, indices};
use serde_json::Value;

fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap()
}

fn count(value: &Value) -> usize {
    value.as_u64().unwrap() as usize
}

#[test]
fn pyramids_are_those_of_both_sources() {
    let file = golden("pyramid-kv");
    let pyramid =
        |point: &Value, form| Pyramid { window: count(&point["window"]), ..Pyramid::new(Pyramid::STEEPNESS, form) };
    let mut compared = 0;
    for point in list(&case(&file, "kvpress")["counts"]) {
        let counts = indices(&point["counts"]);
        let tokens = count(&point["tokens"]);
        let keep = tokens as f64 * (1.0 - point["evicted_fraction"].as_f64().unwrap());
        assert_eq!(keep.fract(), 0.0, "a whole budget");
        let series = pyramid(point, PyramidForm::Kvpress).series(counts.len(), tokens, keep as usize);
        assert_eq!(series, counts, "{tokens} tokens");
        compared += 1;
    }
    for point in list(&case(&file, "official")["counts"]) {
        let counts = indices(&point["counts"]);
        let series = pyramid(point, PyramidForm::Official).series(
            counts.len(),
            count(&point["tokens"]),
            count(&point["capacity"]),
        );
        assert_eq!(series, counts, "{point}");
        compared += 1;
    }
    assert_eq!(compared, 12);
}

/// Scores `[heads][tokens]` of the Ada-KV file.
fn ada_scores(file: &Value) -> Vec<Vec<f32>> {
    list(&file["scores"]).iter().map(floats).collect()
}

fn units(scores: &[Vec<f32>]) -> Vec<GroupUnits<'_>> {
    scores.iter().map(|scores| GroupUnits { scores, pinned: &[], least: 0 }).collect()
}

#[test]
fn a_floor_keeps_the_tokens_that_kvpress_does() {
    let file = golden("ada-kv");
    let scores = ada_scores(&file);
    for point in list(&case(&file, "floor")["kept"]) {
        let safeguard = point["alpha"].as_f64().unwrap();
        let counts = Allotment::AdaFloor { safeguard }.counts(&units(&scores), scores.len(), count(&point["count"]));
        assert_eq!(counts, indices(&point["counts"]), "{safeguard}");
        for ((scores, count), tokens) in scores.iter().zip(counts).zip(list(&point["tokens"])) {
            assert_eq!(select_pages(scores, count, &[]).as_slice(), indices(tokens));
        }
    }
}

/// The authors' rounding may miss the budget, and `floor(alpha * base)` is a whole number there: what is drawn is within a token of
/// theirs, and the sum is the budget's.
#[test]
fn an_interpolation_is_that_of_the_authors_but_for_the_rounding() {
    let file = golden("ada-kv");
    let scores = ada_scores(&file);
    let mut normalised = 0;
    for point in list(&case(&file, "interpolated")["kept"]) {
        let (base, toward) = (count(&point["base"]), point["alpha"].as_f64().unwrap());
        let counts = |toward: f64| {
            let allotment = match point["normalise"].as_bool().unwrap() {
                false => Allotment::AdaInterpolated { toward },
                true => Allotment::AdaNormalised { toward },
            };
            allotment.counts(&units(&scores), scores.len(), base)
        };
        normalised += usize::from(point["normalise"] == true);
        assert_eq!(counts(0.0), indices(&point["pooled_counts"]));
        let counts = counts(toward);
        assert_eq!(counts.iter().sum::<usize>(), base * scores.len());
        let whole = (toward * base as f64).fract();
        for (count, before) in counts.iter().zip(list(&point["before_rounding"])) {
            let exact = before.as_f64().unwrap() + whole;
            assert!((*count as f64 - exact).abs() < 1.0 + 1e-9, "{counts:?} for {point}");
        }
    }
    assert_eq!(normalised, 1);
}

#[test]
fn blocks_are_priced_and_freed_as_by_the_reference() {
    let file = golden("kv-compress");
    let mut compared = 0;
    for case in list(&file["cases"]).iter().filter(|case| case.get("prices").is_some()) {
        let block = count(&case["options"]["block"]);
        let metrics = if case.get("metric").is_some() { &case["metric"] } else { &case["metrics"] };
        let window = case["options"]["window"].as_u64().unwrap_or(0) as usize;
        let heads: Vec<BlockPrices> = list(metrics)
            .iter()
            .map(|metric| {
                let mut metric = floats(metric);
                let open = metric.len() - window;
                metric[open..].fill(f32::INFINITY);
                BlockPrices::of(&metric, block)
            })
            .collect();
        for (head, prices) in heads.iter().zip(list(&case["prices"])) {
            assert_eq!(head.prices(), floats(prices), "{}", case["name"]);
        }
        for point in list(&case["kept"]) {
            let freed = cheapest_blocks(&heads, count(&point["blocks"]));
            for ((head, freed), evicted) in heads.iter().zip(freed).zip(list(&point["evicted"])) {
                assert_eq!(head.slots(freed), indices(evicted), "{}, {} blocks", case["name"], point["blocks"]);
                compared += 1;
            }
        }
    }
    assert_eq!(compared, 2 * (4 * 5 + 4));
}

#[test]
fn stages_of_rocketkv_have_the_sizes_of_the_reference() {
    let file = golden("rocket-kv");
    for point in list(&case(&file, "parameters")["points"]) {
        let size = |key: &str| count(&point[key]);
        let plan = RocketPlan::new(size("length"), size("budget"), size("reserve"), size("head_dim"));
        assert_eq!(
            [plan.capacity, plan.prompt, plan.step_tokens, plan.chunk, plan.channels],
            ["capacity", "prompt", "k", "chunk", "channels"].map(size)
        );
        for (got, key) in [(plan.compression, "c"), (plan.split, "a"), (plan.step_compression, "c2")] {
            assert!((got - point[key].as_f64().unwrap()).abs() < 1e-6 * got, "{key}: {got}");
        }
    }
}
