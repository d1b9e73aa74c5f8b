//! Token scores against an independent numpy implementation of every policy (`tools/golden/policies`), with pages of one token.

#![allow(clippy::unwrap_used)] // a file that does not read is a failed test

#[path = "golden/layer.rs"]
mod golden_layer;

use entrokv_cache::{
    AttentionRows, CacheShape, GroupUnits, LayerKind, PageSpan, ResidentTokens, RowSource, StreamingHeads,
    parse_policy, select_pages,
};
use golden_layer::{GoldenLayer, floats, golden, indices};
use serde_json::Value;

/// Scores `[KV heads][tokens]` that the policy `text` gives the golden tensors.
fn scores(text: &str) -> Vec<Vec<f32>> {
    scores_with_gates(text, &[])
}

/// The same, where each KV head's gate has said `gates` of the tokens.
fn scores_with_gates(text: &str, gates: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let mut layer = GoldenLayer::read();
    layer.gates = gates.to_vec();
    layer.scores(&*parse_policy(text).unwrap())
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
    let case = golden_layer::case(&file, case);
    let optional = |row: &Value| row.as_array().unwrap().iter().map(|x| x.as_f64().map(|x| x as f32)).collect();
    let scores = case[scores_key].as_array().unwrap().iter().map(optional).collect();
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

/// Tokens kept by `got` are those of the reference, except where equals stand on both sides of the cut: they go by age there, and
/// pages by their place.
#[track_caller]
fn assert_kept(got: &[Vec<f32>], expected: &[Vec<Option<f32>>], kept: Vec<Kept>, what: &str) {
    let mut compared = 0;
    for Kept { count, tokens } in kept {
        for ((scores, expected), kept) in got.iter().zip(expected).zip(tokens) {
            let mut ranked: Vec<f32> = scores.iter().zip(expected).filter_map(|(s, e)| e.map(|_| *s)).collect();
            ranked.sort_by(|a, b| b.total_cmp(a));
            let protected: Vec<usize> = (0..scores.len()).filter(|&token| expected[token].is_none()).collect();
            let free = count - protected.len().min(count);
            if free == 0 || free < ranked.len() && ranked[free - 1] == ranked[free] {
                continue;
            }
            assert_eq!(select_pages(scores, count, &protected).as_slice(), kept, "{what}, {count} tokens");
            compared += 1;
        }
    }
    assert!(compared > 0, "{what}: no cut is clear");
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
        ("r-kv", "rows, lambda 0.1", "r-kv"),
        ("r-kv", "rows, lambda 0.07", "r-kv:lambda=0.07"),
        ("h2o", "average", "observed-attention"),
        ("h2o", "average", "observed-attention:heads=mean"),
        ("expected-attention", "mean and covariance, value norm", "expected-attention:future=32"),
        (
            "expected-attention",
            "mean and covariance, value norm, epsilon 0.02",
            "expected-attention:future=32,epsilon=0.02",
        ),
        ("expected-attention", "mean and covariance", "expected-attention:future=32,vnorm=no"),
        ("expected-attention", "mean only, value norm", "expected-attention:future=32,covariance=no"),
        ("expected-attention", "mean only", "expected-attention:future=32,covariance=no,vnorm=no"),
    ];
    for (file, name, text) in cases {
        let got = scores(text);
        let Case { scores: expected, kept } = case(file, name, "scores");
        assert_close(&got, &expected, text);
        assert_kept(&got, &expected, kept, text);
    }
}

#[test]
fn sums_over_heads_are_means_times_their_number() {
    let expected = case("h2o", "sum, nothing recent", "scores").scores;
    let got: Vec<Vec<f32>> =
        scores("h2o").into_iter().map(|row| row.iter().map(|score| score * 3.0).collect()).collect();
    assert_close(&got, &expected, "h2o");
}

/// What pools a neighbourhood of 9 there pools one of 63 by default; the reference sums where means are taken.
#[test]
fn the_first_stage_of_rocketkv_ranks_as_its_reference() {
    let Case { scores: expected, kept } = case("rocket-kv", "stage 1", "scores");
    let got = scores("rocketkv:window=8,kernel=9");
    let sums: Vec<Vec<f32>> = got.iter().map(|row| row.iter().map(|score| score * 24.0).collect()).collect();
    assert_close(&sums, &expected, "rocketkv");
    assert_kept(&got, &expected, kept, "rocketkv");
}

/// Counts are whole numbers; those that are equal are kept by age there, so that there is no clear cut to compare.
#[test]
fn shares_of_attention_are_counted_as_by_the_reference() {
    for (name, text) in
        [("count below", "scissorhands:history=16"), ("rate at or above", "scissorhands:history=16,count=rate")]
    {
        let expected = case("scissorhands", name, "scores").scores;
        let got = scores(text);
        assert_close(&got, &expected, text);
        for (got, expected) in got.iter().zip(&expected) {
            let same = got.iter().zip(expected).filter_map(|(got, expected)| expected.map(|expected| *got == expected));
            assert!(same.into_iter().all(|same| same), "{text}");
        }
    }
}

#[test]
fn squares_of_attention_are_summed_as_by_the_reference() {
    let file = golden("kv-compress");
    for (name, text) in [
        ("power 2, buffer 0, max of 7", "kv-compress:window=8"),
        ("power 2, buffer 0, max of 1", "kv-compress:window=8,kernel=1"),
        ("power 1, buffer 0, max of 1", "kv-compress:window=8,kernel=1,power=1"),
        ("power 2, buffer 4, max of 7", "kv-compress:window=8,buffer=4"),
    ] {
        let metric = &golden_layer::case(&file, name)["metric"];
        let optional = |row: &Value| golden_layer::floats(row).into_iter().map(Some).collect();
        let expected: Vec<Vec<Option<f32>>> = metric.as_array().unwrap().iter().map(optional).collect();
        assert_close(&scores(text), &expected, text);
    }
}

/// The class a head is given shows in its scores: what is 1 or more is in it, and the rest of a score is the attention received.
#[test]
fn classes_of_fastgen_are_those_of_the_reference() {
    let file = golden("fastgen");
    let case = golden_layer::case(&file, "recovery");
    let mut chosen = Vec::new();
    for (point, threshold) in [0.25, 0.5, 0.7, 0.9, 0.95].into_iter().enumerate() {
        let text = format!(
            "fastgen:window=46,recovery={threshold},local=13tok,frequent=13tok,first=2,special=2+3,\
             punctuation=9+17+18+26+33+40"
        );
        for (got, head) in scores(&text).into_iter().zip(case["heads"].as_array().unwrap()) {
            let expected = &head["chosen"][point];
            assert_eq!(expected["threshold"], threshold);
            let class = expected["class"].as_u64().unwrap() as usize;
            let kept: Vec<usize> = (0..got.len()).filter(|&token| got[token] >= 1.0).collect();
            assert_eq!(kept, indices(&head["kept_by_class"][class]), "{text}");
            for (score, attention) in got.iter().zip(golden_layer::floats(&head["frequency"])) {
                assert!((score.fract() - attention).abs() < 1e-6, "{score} for {attention}");
            }
            chosen.push(class);
        }
    }
    chosen.sort_unstable();
    chosen.dedup();
    assert_eq!(chosen, [0, 2, 3, 4], "classes that the fixture reaches");
}

#[test]
fn pages_are_pooled_as_by_the_reference() {
    let layer = GoldenLayer::read();
    let file = golden("pooled-pages");
    for (name, text) in [
        ("mean of a page, last row", "mean-pages:block=mean"),
        ("max of a page, last row", "mean-pages"),
        ("mean of a page, last 8 rows", "mean-pages:row=window:8,block=mean"),
        ("max of a page, last 8 rows", "mean-pages:row=window:8"),
    ] {
        let got = layer.page_scores(&*parse_policy(text).unwrap(), 8);
        let case = golden_layer::case(&file, name);
        let mut compared = 0;
        for (head, (got, expected)) in got.iter().zip(case["scores"].as_array().unwrap()).enumerate() {
            for (got, expected) in got.iter().zip(golden_layer::floats(expected)) {
                assert!((got - expected).abs() <= 1e-6 * expected.abs(), "{text}: {got} for {expected}");
                compared += 1;
            }
            for point in case["kept"].as_array().unwrap() {
                let count = point["pages"].as_u64().unwrap() as usize;
                assert_eq!(select_pages(got, count, &[]).as_slice(), indices(&point["kept"][head]), "{text}");
            }
        }
        assert_eq!(compared, 12);
    }
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
            assert_kept(&got, &expected, kept, &text);
        }
    }
}

/// The rows of a reconstruction, given, of two layers; the largest of them over queries and heads; what stays of all layers and
/// heads together.
#[test]
fn reconstruction_scores_and_what_stays_of_all_heads_are_those_of_the_reference() {
    let file = golden("kvzip");
    let rows: Vec<Vec<Vec<Vec<f32>>>> = file["rows"]
        .as_array()
        .unwrap()
        .iter()
        .map(|layer| {
            let head = |head: &Value| head.as_array().unwrap().iter().map(floats).collect();
            layer.as_array().unwrap().iter().map(head).collect()
        })
        .collect();
    let case = file["cases"].as_array().unwrap().iter().find(|case| case["name"] == "kvzip").unwrap();
    let sinks = case["options"]["sinks"].as_u64().unwrap() as usize;
    let num_kv_heads = case["scores"][0].as_array().unwrap().len();
    let (num_layers, group_size, len) = (rows.len(), rows[0].len() / num_kv_heads, rows[0][0][0].len());
    let shape = CacheShape::new(vec![LayerKind::Global; num_layers], num_kv_heads, group_size, 8, 1).unwrap();
    let policy = parse_policy("kvzip").unwrap();
    assert_eq!(policy.pins().sink_tokens, sinks);
    let positions: Vec<u32> = (0..len as u32).collect();
    let pages: Vec<PageSpan> = positions.iter().map(|&first_position| PageSpan { first_position, len: 1 }).collect();
    let mut scores = Vec::new();
    for group in shape.groups() {
        let heads = group.kv_head as usize * group_size..(group.kv_head as usize + 1) * group_size;
        let of_group = &rows[group.layer as usize][heads];
        let mut scorer = policy.scorer(&shape, group);
        // Queries one after the other, the text in two chunks.
        for columns in [0..len / 2, len / 2..len] {
            for query in 0..of_group[0].len() {
                let masses: Vec<f32> = of_group.iter().flat_map(|head| head[query][columns.clone()].to_vec()).collect();
                let (source, positions) = (RowSource::Reconstruction, &positions[columns.clone()]);
                scorer.observe(AttentionRows { source, group_size, positions, rows: &masses });
            }
        }
        scorer.end_prompt();
        let tokens = ResidentTokens { positions: &positions, ..ResidentTokens::default() };
        let mut of_group = Vec::new();
        scorer.score(&pages, tokens, &mut of_group);
        scores.push(of_group);
    }
    let optional = |row: &Value| row.as_array().unwrap().iter().map(|x| x.as_f64().map(|x| x as f32)).collect();
    let expected: Vec<Vec<Option<f32>>> =
        case["scores"].as_array().unwrap().iter().flat_map(|layer| layer.as_array().unwrap()).map(optional).collect();
    assert_close(&scores, &expected, "kvzip");

    let pinned: Vec<usize> = (0..sinks).collect();
    let units: Vec<GroupUnits<'_>> =
        scores.iter().map(|scores| GroupUnits { scores, pinned: &pinned, least: sinks }).collect();
    let total = scores.len() * len;
    for kept in case["kept"].as_array().unwrap() {
        let evicted = (kept["evicted_fraction"].as_f64().unwrap() * total as f64) as usize;
        assert!((total - evicted).is_multiple_of(scores.len()), "a budget is alike for all groups");
        let counts = policy.allotment().counts(&units, num_kv_heads, (total - evicted) / scores.len());
        let expected: Vec<Vec<usize>> = kept["global"]
            .as_array()
            .unwrap()
            .iter()
            .flat_map(|layer| layer.as_array().unwrap())
            .map(|head| head.as_array().unwrap().iter().map(|x| x.as_u64().unwrap() as usize).collect())
            .collect();
        for ((scores, count), expected) in scores.iter().zip(counts).zip(expected) {
            assert_eq!(select_pages(scores, count, &pinned).as_slice(), expected, "{evicted} of {total} evicted");
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

/// The gates themselves are checked where they are computed, in the engine; here what is made of their scores.
#[test]
fn tokens_below_a_threshold_go_when_they_have_left_the_window() {
    let file = golden("kvzap");
    for case in file["cases"].as_array().unwrap() {
        let gates: Vec<Vec<f32>> = case["scores"].as_array().unwrap().iter().map(floats).collect();
        assert_eq!(scores_with_gates("kvzap:gates=x", &gates), gates);
        for cut in case["by_threshold"].as_array().unwrap() {
            let text = format!("kvzap:gates=x,window=8,tau={}", cut["threshold"]);
            for (scores, kept) in scores_with_gates(&text, &gates).iter().zip(cut["tokens"].as_array().unwrap()) {
                let held: Vec<u64> =
                    (0..scores.len() as u64).filter(|&t| scores[t as usize] > f32::NEG_INFINITY).collect();
                assert_eq!(&serde_json::json!(held), kept, "{text}");
            }
        }
    }
}

#[test]
fn fast_kvzip_keeps_the_sinks_and_the_window_and_then_what_its_gate_says() {
    let Case { scores: expected, kept } = case("fast-kvzip", "gate", "scores");
    // The file says nothing of tokens that are protected.
    let gates: Vec<Vec<f32>> =
        expected.iter().map(|row| row.iter().map(|score| score.unwrap_or(0.0)).collect()).collect();
    let got = scores_with_gates("fast-kvzip:gates=x,window=6", &gates);
    let mut checked = 0;
    for Kept { count, tokens } in kept.iter().filter(|kept| kept.count >= 10) {
        for (scores, kept) in got.iter().zip(tokens) {
            assert_eq!(select_pages(scores, *count, &[0, 1, 2, 3]).as_slice(), kept, "{count} tokens");
            checked += 1;
        }
    }
    assert!(checked >= 4, "{checked}");
}

#[test]
fn dms_gives_up_what_is_marked_when_the_window_has_passed() {
    let (inputs, file) = (golden("inputs"), golden("dms"));
    let case = &file["cases"][0];
    let group_size = GoldenLayer::read().group_size;
    // The gate: the last channel of the group's first query head, before RoPE.
    let queries = |kv_head: usize| inputs["q_pre"][kv_head * group_size].as_array().unwrap();
    let gate = |kv_head| queries(kv_head).iter().map(|query| *floats(query).last().unwrap()).collect();
    let gates: Vec<Vec<f32>> = (0..GoldenLayer::read().num_kv_heads).map(gate).collect();
    let logits: Vec<Vec<f32>> = case["logits"].as_array().unwrap().iter().map(floats).collect();
    for (gate, logit) in gates.iter().flatten().zip(logits.iter().flatten()) {
        assert!((100.0 * gate - 5.0 - logit).abs() <= 1e-5 * logit.abs().max(1.0), "{gate}: {logit}");
    }
    let mut compared = 0;
    for step in case["kept"].as_array().unwrap() {
        let (len, window) = (step["tokens"].as_u64().unwrap() as usize, step["window"].as_u64().unwrap());
        if window == 0 {
            continue; // refused here: a token would go before it was attended to
        }
        let mut layer = GoldenLayer::read();
        layer.len = len;
        layer.gates = gates.iter().map(|gates| gates[..len].to_vec()).collect();
        let scores = layer.scores(&*parse_policy(&format!("dms:window={window}")).unwrap());
        for (scores, held) in scores.iter().zip(step["held"].as_array().unwrap()) {
            let kept: Vec<usize> = (0..len).filter(|&token| scores[token] > f32::NEG_INFINITY).collect();
            assert_eq!(kept, indices(held), "{len} tokens, window of {window}");
            compared += 1;
        }
    }
    assert!(compared >= 16, "{compared}");
}

#[test]
fn heads_of_the_smallest_gates_stream() {
    let case = golden("duo-attention")["cases"][0].clone();
    let option = |key: &str| case["options"][key].as_u64().unwrap() as usize;
    let table: Vec<f32> = case["table"].as_array().unwrap().iter().flat_map(floats).collect();
    let num_heads = case["table"][0].as_array().unwrap().len();
    for kept in case["kept"].as_array().unwrap() {
        let heads = StreamingHeads { at_least: kept["head_fraction"].as_f64().unwrap() };
        // Pages of one token.
        let counts = heads.counts(&table, option("tokens"), option("sinks") + option("recent"), usize::MAX);
        assert_eq!(counts.iter().sum::<usize>() as u64, kept["held_tokens"].as_u64().unwrap());
        let streaming: Vec<[usize; 2]> = (0..counts.len())
            .filter(|&head| counts[head] < option("tokens"))
            .map(|head| [head / num_heads, head % num_heads])
            .collect();
        assert_eq!(serde_json::json!(streaming), kept["streaming"]);
    }
}
