//! Page decisions from given rows equal those of an independent float64 reference.
//!
//! `fixtures/synthetic.json`, `smollm2_135m.*` and `qwen25_05b.*` were written by that reference; each file carries the
//! rules R1-R10 it follows. The two models' JSON is cut to what is read here by `tools/golden/page_rows.py`.

#![allow(clippy::unwrap_used)] // a fixture that does not read is a failed test

use std::collections::BTreeMap;
use std::path::PathBuf;

use entrokv_cache::{
    AttentionRows, Certificates, FiniteContext, ObservedRow, Overlap, PageEntroKv, PageEntroKvOptions,
    PageEntroKvScorer, PageScorer, PageSpan, Pooling, RenyiOrder, ResidentTokens, RowSource, residual_entropy,
    select_pages,
};
use safetensors::SafeTensors;
use serde_json::Value;

/// Both sides are f64 but sum in different orders; six digits is what the spec asks for, twelve is what there is.
const FLOAT64_ORDER: f64 = 1e-12;
/// The rows were stored in f32 after the reference had used them in f64.
const STORED_F32: f64 = 2e-7;

fn fixture(name: &str) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn json(name: &str) -> Value {
    serde_json::from_slice(&fixture(name)).unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    // The reference writes a value that is not finite as a string or null.
    let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
    value.as_array().unwrap().iter().map(number).collect()
}

fn indices(value: &Value) -> Vec<usize> {
    value.as_array().unwrap().iter().map(|value| value.as_u64().unwrap() as usize).collect()
}

fn matrix(value: &Value) -> Vec<Vec<f64>> {
    value.as_array().unwrap().iter().map(numbers).collect()
}

fn assert_close(got: &[f64], expected: &[f64], relative: f64, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (index, (got, expected)) in got.iter().zip(expected).enumerate() {
        let error = (got - expected).abs();
        assert!(error <= relative * expected.abs() + 1e-15, "{what}[{index}]: got {got}, expected {expected}");
    }
}

fn spans(num_tokens: usize, page_size: usize) -> Vec<PageSpan> {
    let page = |first: usize| PageSpan { first_position: first as u32, len: page_size.min(num_tokens - first) as u32 };
    (0..num_tokens).step_by(page_size).map(page).collect()
}

/// Pins of a fixture in R10's order: page 0, then the pages of the last `recent` tokens from the newest.
fn pins(num_tokens: usize, page_size: usize, force_sink: bool, recent: usize) -> Vec<usize> {
    let num_pages = num_tokens.div_ceil(page_size);
    let oldest_recent = num_tokens.saturating_sub(recent) / page_size;
    let newest_first = (oldest_recent..num_pages).rev().filter(|_| recent > 0);
    (0..usize::from(force_sink)).chain(newest_first).collect()
}

/// A scorer that has read one prompt row a head, `[group_size, tokens]`.
fn scorer_of(options: PageEntroKvOptions, rows: &[f32], group_size: usize, page_size: usize) -> PageEntroKvScorer {
    let positions: Vec<u32> = (0..(rows.len() / group_size) as u32).collect();
    let mut scorer = PageEntroKv::new(options).unwrap().group_scorer(group_size, page_size);
    scorer.observe(AttentionRows { source: RowSource::Prompt, group_size, positions: &positions, rows });
    scorer.end_prompt();
    scorer
}

fn page_scores(scorer: &mut PageEntroKvScorer, num_tokens: usize, page_size: usize) -> Vec<f32> {
    let mut scores = Vec::new();
    scorer.score(&spans(num_tokens, page_size), ResidentTokens::default(), &mut scores);
    scores
}

fn widened(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(f64::from).collect()
}

#[test]
fn synthetic_cases_are_decided_as_the_reference_does() {
    let golden = json("synthetic.json");
    let cases = golden["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 20);
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let heads = matrix(&case["A"]);
        let (group_size, num_tokens) = (heads.len(), heads[0].len());
        let page_size = case["B"].as_u64().unwrap() as usize;
        let rows: Vec<f32> = heads.iter().flatten().map(|&mass| mass as f32).collect();
        let base = PageEntroKvOptions {
            tau: case["tau"].as_f64().unwrap(),
            sinks: case["n_sink"].as_u64().unwrap() as u32,
            ..PageEntroKvOptions::default()
        };

        let mut scorer = scorer_of(base.clone(), &rows, group_size, page_size);
        assert_close(scorer.entropies(), &numbers(&case["H2"]), STORED_F32, &format!("{name} H2"));
        assert_close(scorer.weights(), &numbers(&case["w"]), 1e-6, &format!("{name} w"));
        assert_close(scorer.token_scores(), &numbers(&case["pooled"]), 1e-6, &format!("{name} pooled"));
        assert_eq!(scorer.nan_rows(), case["nan_rows"].as_u64().unwrap(), "{name} nan_rows");
        let scores = page_scores(&mut scorer, num_tokens, page_size);
        assert_close(&widened(&scores), &numbers(&case["page_scores"]), 1e-6, &format!("{name} page scores"));

        let force_sink = case["force_sink"].as_bool().unwrap();
        let recent = case["recent"].as_u64().unwrap() as usize;
        let k_pages = case["k_pages"].as_u64().unwrap() as usize;
        let kept = select_pages(&scores, k_pages, &pins(num_tokens, page_size, force_sink, recent));
        assert_eq!(kept.as_slice(), indices(&case["pages"]), "{name} pages");
        let pages = spans(num_tokens, page_size);
        let retained: u32 = kept.iter().map(|index| pages[index].len).sum();
        assert_eq!(u64::from(retained), case["retained"].as_u64().unwrap(), "{name} retained");

        for (key, order) in [("H_half", 0.5), ("H_shannon", 1.0), ("H_min", f64::INFINITY)] {
            let options = PageEntroKvOptions { order: RenyiOrder::new(order).unwrap(), ..base.clone() };
            let scorer = scorer_of(options, &rows, group_size, page_size);
            assert_close(scorer.entropies(), &numbers(&case[key]), 1e-6, &format!("{name} {key}"));
        }
        let raw = scorer_of(PageEntroKvOptions { sinks: 0, ..base.clone() }, &rows, group_size, page_size);
        assert_close(raw.entropies(), &numbers(&case["H2_raw"]), 1e-6, &format!("{name} H2_raw"));
        let mean = scorer_of(PageEntroKvOptions { pooling: Pooling::Mean, ..base }, &rows, group_size, page_size);
        assert_close(mean.token_scores(), &numbers(&case["pooled_mean"]), 1e-6, &format!("{name} pooled_mean"));
    }
}

#[test]
fn entropies_of_every_order_equal_the_reference() {
    let golden = json("synthetic.json");
    let vectors = golden["entropies"].as_array().unwrap();
    assert_eq!(vectors.len(), 20);
    for vector in vectors {
        let alpha = vector["alpha"].as_f64().unwrap_or(f64::INFINITY);
        let order = RenyiOrder::new(alpha).unwrap();
        let entropy = residual_entropy(numbers(&vector["p"]).into_iter(), order);
        assert_close(&[entropy], &[vector["H"].as_f64().unwrap()], FLOAT64_ORDER, &format!("order {alpha}"));
    }
}

#[test]
fn overlaps_and_their_certificates_equal_the_reference() {
    let golden = json("synthetic.json");
    let groups = golden["replay"].as_array().unwrap();
    assert_eq!(groups.len(), 5);
    for (group, golden) in groups.iter().enumerate() {
        let sets: Vec<Vec<usize>> = golden["sets"].as_array().unwrap().iter().map(indices).collect();
        let overlap = Overlap::measure(&sets).unwrap();
        let certificates = Certificates::of(&overlap);
        let pairs = [
            ("uor", overlap.union_overhead_ratio()),
            ("J", overlap.mean_jaccard),
            ("Jmax", overlap.max_jaccard),
            ("bonf", certificates.bonferroni),
            ("lo", certificates.sandwich_lower),
            ("hi", certificates.sandwich_upper),
            ("ds", certificates.dawson_sankoff),
            ("lo_I", certificates.intersection_lower),
            ("hi_I", certificates.intersection_upper),
        ];
        for (key, got) in pairs {
            assert_close(&[got], &[golden[key].as_f64().unwrap()], FLOAT64_ORDER, &format!("group {group} {key}"));
        }
    }
}

#[test]
fn finite_context_terms_equal_the_reference() {
    let golden = json("synthetic.json");
    let rows = golden["theorem4"].as_array().unwrap();
    assert_eq!(rows.len(), 6);
    for row in rows {
        let context = FiniteContext {
            residual_tokens: row["N"].as_u64().unwrap(),
            tau: 0.5,
            epsilon: 0.05,
            eta: 2f64.ln(),
            sibling_deficits: vec![0.0; 7],
        };
        let what = format!("T = {}", row["T"]);
        assert_close(&[context.sibling_weight()], &[row["D"].as_f64().unwrap()], FLOAT64_ORDER, &what);
        assert_close(&[context.loss()], &[row["delta"].as_f64().unwrap()], FLOAT64_ORDER, &what);
    }
}

/// One variant of a real model's decisions, as named in its file.
struct Variant {
    section: &'static str,
    name: &'static str,
    rows: &'static str,
    options: PageEntroKvOptions,
    force_sink: bool,
    recent_tokens: usize,
}

fn variants() -> Vec<Variant> {
    let last = PageEntroKvOptions::default();
    let mean = PageEntroKvOptions { pooling: Pooling::Mean, ..last.clone() };
    let window = PageEntroKvOptions { row: ObservedRow::Window(32), ..last.clone() };
    let smoothed = PageEntroKvOptions { pool_width: 5, ..window.clone() };
    let variant = |section, name, rows, options: &PageEntroKvOptions, force_sink, recent_tokens| Variant {
        section,
        name,
        rows,
        options: options.clone(),
        force_sink,
        recent_tokens,
    };
    vec![
        variant("expect", "sink", "last_attn", &last, true, 0),
        variant("expect", "noforce", "last_attn", &last, false, 0),
        variant("expect", "sink_recent32", "last_attn", &last, true, 32),
        variant("expect", "mean_pool_sink", "last_attn", &mean, true, 0),
        variant("expect_win32", "sink_recent32", "win32_attn", &window, true, 32),
        variant("expect_win32", "avgpool5_sink_recent32", "win32_attn", &smoothed, true, 32),
    ]
}

/// A model's rows and decisions.
struct Model {
    golden: Value,
    rows: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
}

impl Model {
    fn load(name: &str) -> Self {
        let bytes = fixture(&format!("{name}.safetensors"));
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let read = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
            assert_eq!(view.dtype(), safetensors::Dtype::F32);
            let values = view.data().as_chunks().0.iter().copied().map(f32::from_le_bytes).collect();
            (name, (view.shape().to_vec(), values))
        };
        Self { golden: json(&format!("{name}.json")), rows: tensors.tensors().into_iter().map(read).collect() }
    }

    fn len(&self, key: &str) -> usize {
        self.golden[key].as_u64().unwrap() as usize
    }

    fn layers(&self) -> Vec<String> {
        self.golden["expect"].as_object().unwrap().keys().cloned().collect()
    }
}

#[test]
fn real_rows_are_decided_as_the_reference_does() {
    let mut decisions = 0;
    for name in ["smollm2_135m", "qwen25_05b"] {
        let model = Model::load(name);
        let (num_tokens, page_size) = (model.len("T"), model.len("B"));
        for layer in model.layers() {
            for variant in variants() {
                let expect = &model.golden[variant.section][&layer];
                let entropies = matrix(&expect["H2"]);
                let (num_groups, group_size) = (entropies.len(), entropies[0].len());
                let (shape, rows) = &model.rows[&format!("{}.{layer}", variant.rows)];
                assert_eq!(shape, &[num_groups * group_size, num_tokens]);
                for (group, rows) in rows.chunks_exact(group_size * num_tokens).enumerate() {
                    let what = format!("{name} layer {layer} group {group} {} {}", variant.section, variant.name);
                    let mut scorer = scorer_of(variant.options.clone(), rows, group_size, page_size);
                    assert_close(scorer.entropies(), &entropies[group], 1e-6, &what);
                    if variant.options.pooling == Pooling::Entropy {
                        assert_close(scorer.weights(), &matrix(&expect["w"])[group], 1e-6, &what);
                    }
                    let scores = page_scores(&mut scorer, num_tokens, page_size);
                    for rho in ["0.2", "0.5"] {
                        let k_pages = match rho {
                            "0.2" => num_tokens / 5 / page_size,
                            _ => num_tokens / 2 / page_size,
                        };
                        let pinned = pins(num_tokens, page_size, variant.force_sink, variant.recent_tokens);
                        let kept = select_pages(&scores, k_pages, &pinned);
                        let expected = indices(&expect["selected"][rho][variant.name][group]);
                        assert_eq!(kept.as_slice(), expected, "{what} at {rho}");
                        decisions += 1;
                    }
                }
            }
        }
    }
    // 3 layers of 3 groups and 3 of 2, 6 variants, 2 budgets.
    assert_eq!(decisions, (9 + 6) * 6 * 2);
}

#[test]
fn real_scores_equal_the_reference() {
    for name in ["smollm2_135m", "qwen25_05b"] {
        let model = Model::load(name);
        let (num_tokens, page_size) = (model.len("T"), model.len("B"));
        for layer in model.layers() {
            let expect = &model.golden["expect"][&layer];
            let group_size = matrix(&expect["w"])[0].len();
            let (_, rows) = &model.rows[&format!("last_attn.{layer}")];
            for (group, rows) in rows.chunks_exact(group_size * num_tokens).enumerate() {
                let what = format!("{name} layer {layer} group {group}");
                let mut scorer = scorer_of(PageEntroKvOptions::default(), rows, group_size, page_size);
                let num_pages = num_tokens.div_ceil(page_size);
                let pooled = &model.rows[&format!("pooled.{layer}")].1[group * num_tokens..][..num_tokens];
                assert_close(scorer.token_scores(), &widened(pooled), 1e-6, &what);
                let expected = &model.rows[&format!("page_scores.{layer}")].1[group * num_pages..][..num_pages];
                let scores = page_scores(&mut scorer, num_tokens, page_size);
                assert_close(&widened(&scores), &widened(expected), 1e-6, &what);

                let raw = PageEntroKvOptions { sinks: 0, ..PageEntroKvOptions::default() };
                let raw = scorer_of(raw, rows, group_size, page_size);
                assert_close(raw.entropies(), &matrix(&expect["H2_raw"])[group], 1e-6, &format!("{what} raw"));
                for (alpha, entropies) in expect["H_alpha"].as_object().unwrap() {
                    let order = alpha.parse().unwrap();
                    let options = PageEntroKvOptions { order, ..PageEntroKvOptions::default() };
                    let scorer = scorer_of(options, rows, group_size, page_size);
                    let what = format!("{what} order {alpha}");
                    assert_close(scorer.entropies(), &matrix(entropies)[group], 1e-6, &what);
                }
            }
            let expect = &model.golden["expect_win32"][&layer];
            let (_, rows) = &model.rows[&format!("win32_attn.{layer}")];
            for (group, rows) in rows.chunks_exact(group_size * num_tokens).enumerate() {
                for (key, pool_width) in [("page_scores", 1), ("page_scores_avgpool5", 5)] {
                    let options = PageEntroKvOptions { pool_width, ..PageEntroKvOptions::serving() };
                    let mut scorer = scorer_of(options, rows, group_size, page_size);
                    let scores = page_scores(&mut scorer, num_tokens, page_size);
                    let what = format!("{name} layer {layer} group {group} {key}");
                    assert_close(&widened(&scores), &matrix(&expect[key])[group], 1e-6, &what);
                }
            }
        }
    }
}
