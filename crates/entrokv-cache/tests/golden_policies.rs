//! Token scores against an independent numpy implementation of every policy (`tools/golden/policies`), with pages of one token.

#![allow(clippy::unwrap_used)] // a file that does not read is a failed test

use std::fs;
use std::path::Path;

use entrokv_cache::{
    AttentionRows, CacheShape, KvGroup, LayerKind, PageSpan, ResidentTokens, RowSource, RowTap, parse_policy,
    select_pages,
};
use serde_json::Value;

fn golden(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/policies").join(format!("{name}.json"));
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

fn floats(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

/// Scores `[KV heads][tokens]` that the policy `text` gives the golden tensors.
fn scores(text: &str) -> Vec<Vec<f32>> {
    let inputs = golden("inputs");
    let size = |key: &str| inputs["shape"][key].as_u64().unwrap() as usize;
    let (num_kv_heads, group_size, head_dim, len) = (size("kv_heads"), size("group"), size("head_dim"), size("tokens"));
    let shape = CacheShape::new(vec![LayerKind::Global], num_kv_heads, group_size, head_dim, 1).unwrap();
    let positions: Vec<u32> = (0..len as u32).collect();
    let pages: Vec<PageSpan> = positions.iter().map(|&first_position| PageSpan { first_position, len: 1 }).collect();
    let policy = parse_policy(text).unwrap();
    // `[query heads][tokens][tokens up to the query's]`, padded with what it does not see.
    let row = |head: usize, query: usize| {
        let mut row = floats(&inputs["rows"][head][query]);
        row.resize(len, 0.0);
        row
    };
    (0..num_kv_heads)
        .map(|kv_head| {
            let mut scorer = policy.scorer(&shape, KvGroup { layer: 0, kv_head: kv_head as u32 });
            let first = match policy.needs().prompt {
                RowTap::None => len,
                RowTap::Last => len - 1,
                RowTap::Window(window) => len - window,
                RowTap::Accumulated => 0,
            };
            let heads = kv_head * group_size..(kv_head + 1) * group_size;
            let rows: Vec<Vec<f32>> =
                (first..len).map(|query| heads.clone().flat_map(|head| row(head, query)).collect()).collect();
            let (source, rows) = match policy.needs().prompt {
                RowTap::Accumulated => {
                    let sums =
                        (0..group_size * len).map(|at| rows.iter().map(|row| f64::from(row[at])).sum::<f64>() as f32);
                    (RowSource::ColumnSums { num_rows: len }, sums.collect())
                }
                _ => (RowSource::Prompt, rows.concat()),
            };
            scorer.observe(AttentionRows { source, group_size, positions: &positions, rows: &rows });
            scorer.end_prompt();
            let vectors =
                |key: &str| -> Vec<f32> { inputs[key][kv_head].as_array().unwrap().iter().flat_map(floats).collect() };
            let (keys, values) = (vectors("k"), vectors("v"));
            let tokens = ResidentTokens { positions: &positions, keys: &keys, values: &values };
            let mut scores = Vec::new();
            scorer.score(&pages, tokens, &mut scores);
            scores
        })
        .collect()
}

/// What a golden file says of one set of options.
struct Case {
    /// `[KV heads][tokens]`, `None` for tokens that are protected.
    scores: Vec<Vec<Option<f32>>>,
    kept: Vec<Kept>,
}

struct Kept {
    /// Tokens that may stay.
    count: usize,
    /// Those that do, ascending, of each KV head.
    tokens: Vec<Vec<usize>>,
}

/// The case `case` of the file `name`.
fn case(name: &str, case: &str, scores_key: &str) -> Case {
    let file = golden(name);
    let case = file["cases"].as_array().unwrap().iter().find(|entry| entry["name"] == case).unwrap();
    let optional = |row: &Value| row.as_array().unwrap().iter().map(|x| x.as_f64().map(|x| x as f32)).collect();
    let scores = case[scores_key].as_array().unwrap().iter().map(optional).collect();
    let indices = |row: &Value| row.as_array().unwrap().iter().map(|x| x.as_u64().unwrap() as usize).collect();
    let kept = case["kept"].as_array().unwrap().iter().map(|entry| {
        let tokens = entry["tokens"].as_array().unwrap().iter().map(indices).collect();
        Kept { count: entry["count"].as_u64().unwrap() as usize, tokens }
    });
    Case { scores, kept: kept.collect() }
}

#[track_caller]
fn assert_close(got: &[Vec<f32>], expected: &[Vec<Option<f32>>], what: &str) {
    let mut compared = 0;
    for (got, expected) in got.iter().zip(expected) {
        assert_eq!(got.len(), expected.len(), "{what}");
        let largest = expected.iter().flatten().fold(0.0_f32, |largest, x| largest.max(x.abs()));
        for (token, (got, expected)) in got.iter().zip(expected).enumerate() {
            let Some(expected) = expected else { continue };
            assert!((got - expected).abs() <= 1e-5 * largest, "{what}, token {token}: {got} for {expected}");
            compared += 1;
        }
    }
    assert!(compared > 20, "{what}: {compared} scores compared");
}

#[test]
fn scores_and_kept_tokens_are_those_of_the_reference() {
    let cases = [
        ("k-norm", "paper", "knorm"),
        ("key-diff", "one shot", "keydiff"),
        ("lag-kv", "within its block", "lagkv:lag=12"),
        ("lag-kv", "cross scoring", "lagkv:lag=12,cross=yes"),
        ("cur", "product", "cur"),
        ("cur", "key", "cur:combine=key"),
        ("cur", "value", "cur:combine=value"),
        ("cur", "average", "cur:combine=average"),
        ("snap-kv", "reduce, then pool; average of 5", "snapkv:window=8"),
        ("snap-kv", "reduce, then pool; max of 5", "snapkv:window=8,pool=max"),
        ("snap-kv", "reduce, then pool; max of 7", "snapkv:window=8,pool=max,kernel=7"),
        ("snap-kv", "pool, then reduce; average of 5", "snapkv:window=8,heads=mean"),
        ("snap-kv", "pool, then reduce; max of 5", "snapkv:window=8,pool=max,heads=mean"),
        ("snap-kv", "pool, then reduce; max of 7", "snapkv:window=8,pool=max,kernel=7,heads=mean"),
        ("h2o", "average", "observed-attention"),
        ("h2o", "average", "observed-attention:heads=mean"),
    ];
    for (file, name, text) in cases {
        let got = scores(text);
        let Case { scores: expected, kept } = case(file, name, "scores");
        assert_close(&got, &expected, text);
        for Kept { count, tokens } in kept {
            for ((scores, expected), kept) in got.iter().zip(&expected).zip(tokens) {
                // Equals at the boundary: tokens go by age there, pages by their place.
                let mut ranked: Vec<f32> = scores.iter().zip(expected).filter_map(|(s, e)| e.map(|_| *s)).collect();
                ranked.sort_by(|a, b| b.total_cmp(a));
                let protected: Vec<usize> = (0..scores.len()).filter(|&token| expected[token].is_none()).collect();
                let free = count - protected.len().min(count);
                if free == 0 || free < ranked.len() && ranked[free - 1] == ranked[free] {
                    continue;
                }
                assert_eq!(select_pages(scores, count, &protected).as_slice(), kept, "{text}, {count} tokens");
            }
        }
    }
}

#[test]
fn sums_over_heads_are_means_times_their_number() {
    let expected = case("h2o", "sum, nothing recent", "scores").scores;
    let got: Vec<Vec<f32>> =
        scores("h2o").into_iter().map(|row| row.iter().map(|score| score * 3.0).collect()).collect();
    assert_close(&got, &expected, "h2o");
}

#[test]
fn query_heads_are_pooled_as_by_the_reference() {
    for policy in ["tova", "h2o", "snapkv"] {
        for heads in ["mean", "max", "entropy", "union"] {
            let window = if policy == "snapkv" { "window=8," } else { "" };
            let text = format!("{policy}:{window}heads={heads}");
            let Case { scores: expected, kept } = case("head-pooling", &format!("{policy}, {heads}"), "scores");
            let got = scores(&text);
            assert_close(&got, &expected, &text);
            for Kept { count, tokens } in kept {
                for (scores, tokens) in got.iter().zip(tokens) {
                    assert_eq!(select_pages(scores, count, &[]).as_slice(), tokens, "{text}, {count} tokens");
                }
            }
        }
    }
}

#[test]
fn heads_of_a_layer_have_the_mean_of_their_scores() {
    for (file, name, text, key) in
        [("tova", "paper", "tova", "scores"), ("paged-eviction", "prompt", "paged-eviction", "per_head")]
    {
        let got = scores(text);
        let expected = case(file, name, key).scores;
        if key == "per_head" {
            assert_close(&got, &expected, text);
            continue;
        }
        let mean: Vec<f32> = got[0].iter().zip(&got[1]).map(|(a, b)| (a + b) / 2.0).collect();
        assert_close(&[mean], &expected[..1], text);
    }
}
