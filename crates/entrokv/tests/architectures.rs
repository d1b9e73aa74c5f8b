//! Every architecture against an independent float64 decoder and against llama.cpp, on random-weight files.
//!
//! Files, answers and tolerances are made by `tools/golden/architectures.py`. The tolerances are measured there: what the
//! oracle itself is off by under the same roundings, doubled; every plausible misreading of an architecture exceeds them.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod support;

use entrokv::gguf::Gguf;
use entrokv::{Arithmetic, ModelOptions, PageKind};
use serde_json::Value;
use support::{Bench, fixtures, nll, options};

struct Difference {
    max_nll: f64,
    max_logit: f64,
    mean_nll: f64,
    common_top20: usize,
}

fn compare(name: &str, fixture: &Value, options: &ModelOptions) -> Difference {
    let gguf = Gguf::open(&fixtures().join("architectures").join(name)).unwrap();
    let tokens: Vec<u32> = fixture["tokens"].as_array().unwrap().iter().map(|t| t.as_u64().unwrap() as u32).collect();
    let rows = Bench::new(&gguf, options).feed(&tokens, 100);
    let reference = &fixture["reference"];
    let floats =
        |key: &str| -> Vec<f64> { reference[key].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect() };
    let ours: Vec<f64> = rows.iter().zip(&tokens[1..]).map(|(row, &next)| nll(row, next)).collect();
    let theirs = floats("nll");
    assert_eq!(ours.len(), theirs.len());
    let largest = |pairs: &mut dyn Iterator<Item = f64>| pairs.fold(0.0, f64::max);
    let last = rows.last().unwrap();
    let mut order: Vec<usize> = (0..last.len()).collect();
    order.sort_by(|&a, &b| last[b].total_cmp(&last[a]));
    let top: Vec<usize> =
        reference["top20_last"].as_array().unwrap().iter().map(|pair| pair[0].as_u64().unwrap() as usize).collect();
    Difference {
        max_nll: largest(&mut ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs())),
        max_logit: largest(&mut last.iter().zip(&floats("logits_last")).map(|(&a, b)| (f64::from(a) - b).abs())),
        mean_nll: (ours.iter().sum::<f64>() - theirs.iter().sum::<f64>()).abs() / ours.len() as f64,
        common_top20: order[..20].iter().filter(|i| top.contains(i)).count(),
    }
}

fn check(roundings: &str, options: &ModelOptions) {
    let mut failures = Vec::new();
    let mut names: Vec<_> = std::fs::read_dir(fixtures().join("architectures"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".gguf"))
        .collect();
    names.sort();
    assert_eq!(names.len(), 10, "{names:?}");
    for name in names {
        let json =
            std::fs::read_to_string(fixtures().join("architectures").join(name.replace(".gguf", ".json"))).unwrap();
        let fixture: Value = serde_json::from_str(&json).unwrap();
        let got = compare(&name, &fixture, options);
        let limit = |key: &str| fixture["tolerance"][roundings][key].as_f64().unwrap();
        let peer = fixture["peer"]["mean_nll"].as_f64().unwrap() - fixture["reference"]["mean_nll"].as_f64().unwrap();
        println!(
            "{name:<26} {roundings:<28} mean {:.2e} (peer {:.2e}), worst {:.2e}, last logits {:.2e}, top 20: {}",
            got.mean_nll,
            peer.abs(),
            got.max_nll,
            got.max_logit,
            got.common_top20
        );
        let within = got.max_nll <= limit("max_nll")
            && got.max_logit <= limit("max_logit_last")
            && got.mean_nll <= limit("mean_nll")
            && got.common_top20 >= 17;
        if !within {
            failures.push(format!("{name}: {:?}", fixture["tolerance"][roundings]));
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn exact_arithmetic_matches_the_float64_oracle() {
    check("f32", &support::exact());
}

#[test]
fn an_f16_cache_costs_what_the_oracle_says() {
    check("f16_cache", &ModelOptions { page_kind: PageKind::F16, arithmetic: Arithmetic::F32, ..options() });
}

#[test]
fn int8_activations_cost_what_the_oracle_says() {
    check("f16_cache_int8_activations", &options());
}
