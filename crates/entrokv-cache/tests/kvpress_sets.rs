//! The tokens that kvpress 0.5.4 keeps of one attention layer, and those that the same policies keep here of the same tensors, with
//! pages of one token (`tools/golden/policies/kvpress_fixtures.py`).

#![allow(clippy::unwrap_used)] // a file that does not read is a failed test

#[path = "golden/layer.rs"]
mod golden_layer;

use entrokv_cache::{
    Budget, BudgetError, CacheShape, EvictionPolicy, LayerKind, OpenPage, PageIndex, PageKind, Sharing, parse_policy,
    select_pages,
};
use golden_layer::{GoldenLayer, golden, indices};
use serde_json::Value;

/// Names of the fixture, and the policy of the same form: kvpress pins no sinks and no newest token but where it says so.
const POLICIES: [(&str, &str); 9] = [
    ("snap-kv", "snapkv:window=8"),
    ("streaming-llm", "streaming-llm"),
    ("k-norm", "knorm:sinks=0"),
    // Its last token is protected; the paper's may go.
    ("tova", "tova:recent=1"),
    ("key-diff", "keydiff:sinks=0"),
    ("expected-attention, covariance, value norm", "expected-attention:future=32"),
    ("expected-attention, covariance", "expected-attention:future=32,vnorm=no"),
    ("expected-attention, mean, value norm", "expected-attention:future=32,covariance=no"),
    ("expected-attention, mean", "expected-attention:future=32,covariance=no,vnorm=no"),
];

/// Tokens of each KV head that `policy` keeps of the layer, `count` of each, ascending.
fn kept(policy: &dyn EvictionPolicy, layer: &GoldenLayer, count: usize) -> Vec<Vec<usize>> {
    let mut scores = layer.scores(policy);
    if policy.sharing() == Sharing::Layer {
        let mean = |token: usize| scores.iter().map(|head| head[token]).sum::<f32>() / scores.len() as f32;
        let means: Vec<f32> = (0..layer.len).map(mean).collect();
        scores.fill(means);
    }
    let pages: Vec<PageIndex> = (0..layer.len as u32).map(PageIndex).collect();
    let pinned = policy.pins().pinned(&pages, 1, count, OpenPage::None);
    scores.iter().map(|scores| select_pages(scores, count, &pinned).as_slice().to_vec()).collect()
}

fn sets(tokens: &Value) -> Vec<Vec<usize>> {
    tokens.as_array().unwrap().iter().map(indices).collect()
}

fn find<'a>(list: &'a Value, key: &str, name: &str) -> &'a Value {
    list.as_array().unwrap().iter().find(|entry| entry[key] == name).unwrap()
}

#[test]
fn kept_sets_are_those_of_kvpress() {
    let (file, layer) = (golden("kvpress"), GoldenLayer::read());
    assert_eq!(file["kvpress"], "0.5.4");
    for (name, text) in POLICIES {
        let policy = parse_policy(text).unwrap();
        let points = find(&file["cases"], "policy", name)["kept"].as_array().unwrap();
        assert_eq!(points.len(), 3, "{name}");
        for point in points {
            let count = point["count"].as_u64().unwrap() as usize;
            assert_eq!(kept(&*policy, &layer, count), sets(&point["tokens"]), "{text}, {count} tokens");
        }
    }
}

/// The fraction kept where `evicted` goes, as a budget of a shape with the layer's heads and pages of one token.
fn budget_of(evicted: f64) -> (Budget, CacheShape) {
    let shape = CacheShape::new(vec![LayerKind::Global], 2, 3, 16, 1).unwrap();
    (format!("{:.0}%", 100.0 * (1.0 - evicted)).parse().unwrap(), shape)
}

/// kvpress keeps `floor(46 * 0.02) = 0` tokens, and a model then attends to nothing. Here a fraction is raised to the smallest budget
/// there is, and says so.
#[test]
fn a_fraction_that_would_keep_nothing_is_raised() {
    let file = golden("kvpress");
    let trap = find(&file["traps"], "trap", "truncation");
    assert_eq!(sets(&trap["tokens"]), [const { Vec::<usize>::new() }; 2]);
    let (budget, shape) = budget_of(trap["evicted_fraction"].as_f64().unwrap());
    let policy = parse_policy("knorm:sinks=0").unwrap();
    let resolved = budget.resolve(&shape, PageKind::F16, 46, &policy.pins()).unwrap();
    assert!(resolved.raised && resolved.pages_per_group == 1, "{resolved:?}");
}

/// kvpress gives each token of a window the same score and takes any 4 of the 8. Here the window is pinned: a fraction is raised to it,
/// and 4 tokens are refused.
#[test]
fn a_budget_below_the_window_is_raised_or_refused() {
    let (file, layer) = (golden("kvpress"), GoldenLayer::read());
    let trap = find(&file["traps"], "trap", "window above the budget");
    assert!(sets(&trap["tokens"]).iter().all(|head| head.len() == 4 && head.iter().all(|&token| token >= 38)));
    let (budget, shape) = budget_of(trap["evicted_fraction"].as_f64().unwrap());
    let policy = parse_policy("snapkv:window=8").unwrap();
    let resolved = budget.resolve(&shape, PageKind::F16, 46, &policy.pins()).unwrap();
    assert!(resolved.raised && resolved.pages_per_group == 8, "{resolved:?}");
    let refused = Budget::Tokens(4).check(&shape, PageKind::F16, &policy.pins());
    assert!(matches!(refused, Err(BudgetError::BelowPins { pages: 4, smallest_pages: 8, .. })), "{refused:?}");
    assert_eq!(kept(&*policy, &layer, 8), [(38..46).collect::<Vec<_>>(), (38..46).collect()]);
}

/// kvpress stores survivors by descending score, so that whatever looks at places afterwards (sinks, windows, pools) reads the wrong
/// tokens. Here they stay in order; the set is the same.
#[test]
fn survivors_stay_in_order() {
    let (file, layer) = (golden("kvpress"), GoldenLayer::read());
    let stored = sets(&find(&file["traps"], "trap", "order")["tokens"]);
    let policy = parse_policy("snapkv:window=8").unwrap();
    for (stored, ours) in stored.into_iter().zip(kept(&*policy, &layer, 23)) {
        assert!(!stored.is_sorted() && ours.is_sorted());
        let mut sorted = stored;
        sorted.sort_unstable();
        assert_eq!(ours, sorted);
    }
}

/// The paper of TOVA lets the newest token compete, which is the default here: of 23 tokens it loses its place to token 36.
#[test]
fn the_newest_token_may_go_as_in_the_paper_of_tova() {
    let (file, layer) = (golden("kvpress"), GoldenLayer::read());
    let theirs = sets(&find(&file["cases"], "policy", "tova")["kept"][1]["tokens"]);
    let ours = kept(&*parse_policy("tova").unwrap(), &layer, 23);
    for (ours, mut theirs) in ours.into_iter().zip(theirs) {
        assert_eq!(theirs.pop(), Some(45));
        theirs.push(36);
        theirs.sort_unstable();
        assert_eq!(ours, theirs);
    }
}
