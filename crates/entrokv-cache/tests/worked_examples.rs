//! Figures worked out by hand from the papers and from other implementations, to the digit: what a budget comes to, what is pooled,
//! how layers, heads and blocks share, what stays.

#![allow(clippy::unwrap_used)] // what does not hold here is a failed test

use entrokv_cache::policies::RocketPlan;
use entrokv_cache::{
    Allotment, AttentionRows, BlockPrices, Budget, CacheShape, EvictionPolicy, GroupUnits, KvGroup, LayerKind,
    OpenPage, POLICIES, PageIndex, PageKind, PageSpan, Pins, Pyramid, PyramidForm, RecentPages, ResidentTokens,
    RowSource, cheapest_blocks, parse_policy, select_pages,
};

/// One KV group of one query head, keys of two elements, pages of one token.
fn shape() -> CacheShape {
    CacheShape::new(vec![LayerKind::Global], 1, 1, 2, 1).unwrap()
}

/// Token scores of `policy` when the last rows of a prompt are `rows` and its keys are `keys`.
fn scores(policy: &dyn EvictionPolicy, rows: &[f32], keys: &[f32], num_tokens: usize) -> Vec<f32> {
    let positions: Vec<u32> = (0..num_tokens as u32).collect();
    let pages: Vec<PageSpan> = positions.iter().map(|&first_position| PageSpan { first_position, len: 1 }).collect();
    let mut scorer = policy.scorer(&shape(), KvGroup { layer: 0, kv_head: 0 });
    scorer.observe(AttentionRows { source: RowSource::Prompt, group_size: 1, positions: &positions, rows });
    scorer.end_prompt();
    let mut scores = Vec::new();
    scorer.score(
        &pages,
        ResidentTokens { positions: &positions, keys, values: keys, ..ResidentTokens::default() },
        &mut scores,
    );
    scores
}

fn pinned(policy: &dyn EvictionPolicy, num_tokens: usize, keep: usize) -> Vec<usize> {
    let pages: Vec<PageIndex> = (0..num_tokens as u32).map(PageIndex).collect();
    policy.pins().pinned(&pages, 1, keep, OpenPage::None)
}

/// `trunc(S (1 - cr))` in floats loses a token where a tenth is kept of 10 or of 100; an exact fraction does not.
#[test]
fn a_fraction_of_a_prompt_loses_no_token_to_floats() {
    let cases =
        [(10, 0.9, "10%", 0, 1), (100, 0.9, "10%", 9, 10), (1000, 0.7, "30%", 300, 300), (4096, 0.9, "10%", 409, 409)];
    let pins = Pins { sink_tokens: 0, recent_pages: RecentPages::Count(0) };
    for (num_tokens, evicted, kept, in_floats, exact) in cases {
        assert_eq!((f64::from(num_tokens) * (1.0 - evicted)) as usize, in_floats, "{num_tokens}: the trap itself");
        let budget: Budget = kept.parse().unwrap();
        let resolved = budget.resolve(&shape(), PageKind::F16, num_tokens as usize, &pins).unwrap();
        assert_eq!((resolved.pages_per_group, resolved.raised), (exact, false), "{num_tokens}");
    }
}

/// Average pooling of six ones with a kernel of 5, what lies beyond the ends counting as nothing.
#[test]
fn six_ones_are_pooled_to_less_at_the_ends() {
    let row = [0.125, 0.125, 0.125, 0.125, 0.125, 0.125, 0.25];
    let got = scores(&*parse_policy("snapkv:window=1").unwrap(), &row, &[], 7);
    assert_eq!(got[..6], [0.6, 0.8, 1.0, 1.0, 0.8, 0.6].map(|part: f64| (0.125 * part) as f32));
}

/// PyramidKV as kvpress has it: 32 layers, a window of 64, a steepness of 20; first, second and last layer, and the sum.
#[test]
fn pyramids_of_kvpress() {
    let pyramid = Pyramid { window: 64, ..Pyramid::new(20.0, PyramidForm::Kvpress) };
    for (num_tokens, keep, [first, second, last], sum) in [
        (4096, 3072, [4032, 3970, 2112], 98_304),
        (4096, 2048, [3994, 3868, 102], 65_536),
        (4096, 1024, [1024, 1024, 1024], 32_768),
        (4096, 512, [512, 512, 512], 16_384),
        (16_384, 4096, [7987, 7736, 205], 131_072),
        (3900, 1950, [3802, 3683, 98], 62_400),
    ] {
        let layers = pyramid.series(32, num_tokens, keep);
        assert_eq!(([layers[0], layers[1], layers[31]], layers.iter().sum::<usize>()), ([first, second, last], sum));
        assert_eq!(pyramid.layers(32, num_tokens, keep), layers, "nothing to give back");
    }
}

/// PyramidKV as its authors have it: a capacity of 2,048 of 8,000 tokens and a window of 8 come to 16 more than 32 times 2,048.
#[test]
fn the_pyramid_of_its_authors() {
    let pyramid = Pyramid { window: 8, ..Pyramid::new(20.0, PyramidForm::Official) };
    let series = pyramid.series(32, 8000, 2048);
    assert_eq!((series[0], series[31], series.iter().sum::<usize>()), (3986, 111, 65_552));
    assert_eq!(pyramid.layers(32, 8000, 2048).iter().sum::<usize>(), 65_536);
}

#[test]
fn streaming_llm_keeps_sinks_and_the_newest() {
    let policy = parse_policy("streaming-llm").unwrap();
    let kept = select_pages(&scores(&*policy, &[], &[], 20), 10, &pinned(&*policy, 20, 10));
    assert_eq!(kept.as_slice(), [0, 1, 2, 3, 14, 15, 16, 17, 18, 19]);
}

/// RocketKV with heads of 128 and 128 tokens to be generated: 32,768 tokens at 512 a step, 131,072 at 256.
#[test]
fn plans_of_rocketkv() {
    let plan = RocketPlan::new(32_768, 512, 128, 128);
    assert_eq!((plan.compression, (plan.split * 100.0).round()), (64.0, 56.0));
    assert_eq!((plan.capacity, plan.prompt, plan.step_tokens), (3191, 3063, 256));
    assert_eq!(((plan.step_compression * 100.0).round(), plan.chunk, plan.channels), (623.0, 3, 62));
    assert_eq!((128.0 * plan.chunk as f64 / plan.step_compression) as usize, 61, "truncated");
    let plan = RocketPlan::new(131_072, 256, 128, 128);
    assert_eq!(((plan.split * 100.0).round(), plan.capacity, plan.prompt), (74.0, 1296, 1168));
    assert_eq!((plan.step_tokens, plan.chunk, plan.channels), (128, 3, 76));
}

/// KV-Compress: two heads in blocks of 4, one with two tokens in its last block.
#[test]
fn blocks_of_two_heads() {
    let heads = [
        BlockPrices::of(&[0.9, 0.1, 0.5, 0.05, 0.2, 0.8], 4),
        BlockPrices::of(&[0.3, 0.31, 0.32, 0.33, 0.6, 0.7, 0.95, 0.99], 4),
    ];
    assert_eq!((heads[0].prices(), heads[1].prices()), (&[0.1, 0.9][..], &[0.33, 0.99][..]));
    for (num_blocks, freed) in [(1, [1, 0]), (2, [1, 1]), (3, [2, 1])] {
        assert_eq!(cheapest_blocks(&heads, num_blocks), freed, "{num_blocks} blocks");
    }
    assert_eq!((heads[0].slots(1), heads[1].slots(1)), (vec![1, 3], vec![0, 1, 2, 3]));
    assert_eq!(heads[0].slots(2), [0, 1, 2, 3, 4, 5]);
}

/// Ada-KV: two heads of 6 tokens, half of which stay: `trunc(0.2 * 3) = 0`, so that a fifth is no safeguard at all.
#[test]
fn a_fifth_of_three_tokens_saves_none() {
    let scores = [[9.0, 8.0, 7.0, 6.0, 5.0, 4.0], [0.6, 0.5, 0.4, 0.3, 0.2, 0.1]];
    let groups = [0, 1].map(|head: usize| GroupUnits { scores: &scores[head], pinned: &[], least: 0 });
    assert_eq!(Allotment::AdaFloor { safeguard: 0.2 }.counts(&groups, 2, 3), [6, 0]);
    assert_eq!(Allotment::AdaFloor { safeguard: 0.34 }.counts(&groups, 2, 3), [5, 1]);
}

/// Ada-KV: pooled counts of 250, 90, 40 and 20 at a mean of 100. Its authors draw all a fifth of the way to the mean; kvpress lifts
/// those below 20, which nobody is.
#[test]
fn pooled_counts_are_drawn_or_floored() {
    let raw = [250, 90, 40, 20];
    let scores = raw.map(|count| (0..400).map(|unit| f32::from(u8::from(unit < count))).collect::<Vec<_>>());
    let groups: Vec<GroupUnits<'_>> =
        scores.iter().map(|scores| GroupUnits { scores, pinned: &[], least: 0 }).collect();
    assert_eq!(Allotment::AdaInterpolated { toward: 0.2 }.counts(&groups, 4, 100), [220, 92, 52, 36]);
    assert_eq!(Allotment::AdaFloor { safeguard: 0.2 }.counts(&groups, 4, 100), raw);
}

/// Under scores that are all alike, what a policy protects stays, and exactly as many tokens as may.
#[test]
fn protected_tokens_win_every_tie() {
    for policy in POLICIES.iter().map(|entry| entry.default_policy()) {
        let smallest = policy.pins().smallest_pages(1);
        let num_tokens = smallest + 40;
        for keep in [smallest, smallest + 7, num_tokens - 1] {
            let pinned = pinned(&*policy, num_tokens, keep);
            let kept = select_pages(&vec![0.5; num_tokens], keep, &pinned);
            assert_eq!(kept.len(), keep, "{policy}");
            assert!(pinned.iter().all(|&token| kept.contains(token)), "{policy}");
        }
    }
}

/// Tokens that trade places with all that belongs to them trade places in what is kept, where a score knows no neighbours.
#[test]
fn a_permutation_of_tokens_permutes_what_is_kept() {
    // Twelve tokens whose norms, directions and masses all differ; the last one, the window of SnapKV, stays where it is.
    let key = |token: usize| [(token as f32 * 1.7).sin() * (token + 1) as f32, (token as f32 * 0.9).cos() + 0.1];
    let masses: Vec<f32> = (0..12).map(|token| ((token * 5 % 12) + 1) as f32 / 78.0).collect();
    let order = [7, 2, 10, 0, 5, 9, 1, 4, 8, 3, 6, 11];
    for text in ["knorm:sinks=0", "keydiff:sinks=0", "snapkv:window=1,kernel=1"] {
        let policy = parse_policy(text).unwrap();
        let kept = |order: &[usize]| {
            let row: Vec<f32> = order.iter().map(|&token| masses[token]).collect();
            let keys: Vec<f32> = order.iter().flat_map(|&token| key(token)).collect();
            let kept = select_pages(&scores(&*policy, &row, &keys, 12), 5, &pinned(&*policy, 12, 5));
            let mut tokens: Vec<usize> = kept.iter().map(|place| order[place]).collect();
            tokens.sort_unstable();
            tokens
        };
        let in_order: Vec<usize> = (0..12).collect();
        assert_eq!(kept(&order), kept(&in_order), "{text}");
        assert_ne!(kept(&in_order), [7, 8, 9, 10, 11], "{text}: more than the newest");
    }
}
