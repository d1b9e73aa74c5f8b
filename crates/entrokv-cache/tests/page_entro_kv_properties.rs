//! Properties of Page-EntroKV: those of the method, and those an engine relies on.

#![allow(clippy::unwrap_used)] // what does not parse here is a failed test

use std::collections::BTreeMap;

use entrokv_cache::certificate::survival_threshold;
use entrokv_cache::{
    AttentionRows, BlockProjection, FiniteContext, ObservedRow, PageEntroKv, PageEntroKvOptions, PageEntroKvScorer,
    PageScorer, PageSpan, PoolOn, Pooling, RecentPages, RenyiOrder, ResidentTokens, RowSource, Schedule, head_weights,
    parse_policy, residual_entropy, select_pages,
};
use proptest::prelude::*;

/// Sums of a few thousand f64 terms in different orders.
const SUM_ORDER: f64 = 1e-10;
/// Rows are f32 and sum to 1 no better than that.
const F32_ROW: f64 = 1e-5;

const PAGE_SIZE: usize = 4;

/// Peaked and flat rows alike: softmax of logits of a random spread, in f32.
fn softmax_row(num_tokens: usize) -> impl Strategy<Value = Vec<f32>> {
    (prop::collection::vec(0.0f64..1.0, num_tokens), 0.0f64..20.0).prop_map(|(logits, spread)| {
        let masses: Vec<f64> = logits.iter().map(|logit| (logit * spread).exp()).collect();
        let sum: f64 = masses.iter().sum();
        masses.iter().map(|mass| (mass / sum) as f32).collect()
    })
}

/// The rows of a group's heads over `num_tokens` tokens.
fn heads(group_sizes: std::ops::Range<usize>, tokens: std::ops::Range<usize>) -> impl Strategy<Value = Vec<Vec<f32>>> {
    (group_sizes, tokens)
        .prop_flat_map(|(group_size, num_tokens)| prop::collection::vec(softmax_row(num_tokens), group_size))
}

fn options() -> impl Strategy<Value = PageEntroKvOptions> {
    let order = prop_oneof![Just(0.5), Just(1.0), Just(2.0), Just(f64::INFINITY), 0.0f64..20.0];
    let tau = prop_oneof![Just(f64::INFINITY), 1e-3f64..10.0];
    let pooling = prop_oneof![Just(Pooling::Entropy), Just(Pooling::Mean), Just(Pooling::Max)];
    let row = prop_oneof![
        Just(ObservedRow::Last),
        Just(ObservedRow::Accumulated),
        (1usize..2000).prop_map(ObservedRow::Window)
    ];
    let pool_on = prop_oneof![Just(PoolOn::Raw), Just(PoolOn::Isolated)];
    let block = prop_oneof![Just(BlockProjection::Max), Just(BlockProjection::Sum), Just(BlockProjection::Mean)];
    let recent = prop_oneof![Just(RecentPages::Quarter), (0usize..9).prop_map(RecentPages::Count)];
    let schedule = prop_oneof![Just(Schedule::Once), Just(Schedule::Rolling)];
    let numbers = (0u32..9, order, tau, 0usize..4, 0.0f64..=1.0);
    (numbers, pooling, row, pool_on, block, recent, schedule).prop_map(
        |((sinks, order, tau, reach, decay), pooling, row, pool_on, block, recent, schedule)| PageEntroKvOptions {
            sinks,
            order: RenyiOrder::new(order).unwrap(),
            tau,
            pooling,
            row,
            pool_on,
            block,
            pool_width: 2 * reach + 1,
            recent,
            decay,
            schedule,
            ..PageEntroKvOptions::default()
        },
    )
}

fn scorer(options: &PageEntroKvOptions, group_size: usize) -> PageEntroKvScorer {
    PageEntroKv::new(options.clone()).unwrap().group_scorer(group_size, PAGE_SIZE)
}

fn observe(scorer: &mut PageEntroKvScorer, source: RowSource, heads: &[Vec<f32>], positions: &[u32]) {
    let rows = heads.concat();
    scorer.observe(AttentionRows { source, group_size: heads.len(), positions, rows: &rows });
}

/// A scorer at the end of a prompt whose last row is given.
fn scored(options: &PageEntroKvOptions, heads: &[Vec<f32>]) -> PageEntroKvScorer {
    let mut scorer = scorer(options, heads.len());
    let positions: Vec<u32> = (0..heads[0].len() as u32).collect();
    observe(&mut scorer, RowSource::Prompt, heads, &positions);
    scorer.end_prompt();
    scorer
}

fn spans(num_tokens: usize) -> Vec<PageSpan> {
    let span = |first: usize| PageSpan { first_position: first as u32, len: PAGE_SIZE.min(num_tokens - first) as u32 };
    (0..num_tokens).step_by(PAGE_SIZE).map(span).collect()
}

fn page_scores(scorer: &mut PageEntroKvScorer, pages: &[PageSpan]) -> Vec<f32> {
    let mut scores = Vec::new();
    scorer.score(pages, ResidentTokens::default(), &mut scores);
    scores
}

fn close(a: f64, b: f64, tolerance: f64) -> bool {
    (a - b).abs() <= tolerance
}

proptest! {
    /// Property 1: entropies lie in `[0, ln N]`, do not grow with the order, and need one pass.
    #[test]
    fn entropy_is_bounded_and_falls_with_the_order(row in softmax_row(60)) {
        let residual = || row.iter().map(|&mass| f64::from(mass));
        let orders = [0.0, 0.5, 0.999, 1.0, 1.001, 1.5, 2.0, 3.0, 10.0, 999.0, f64::INFINITY];
        let entropies: Vec<f64> =
            orders.iter().map(|&order| residual_entropy(residual(), RenyiOrder::new(order).unwrap())).collect();
        for pair in entropies.windows(2) {
            prop_assert!(pair[0] >= pair[1] - SUM_ORDER, "{:?}", entropies);
        }
        prop_assert!(entropies[0] <= 60f64.ln() + SUM_ORDER && entropies[orders.len() - 1] >= -SUM_ORDER);
        let mass: f64 = residual().sum();
        let two_pass = -residual().map(|a| (a / mass).powi(2)).sum::<f64>().ln();
        prop_assert!(close(residual_entropy(residual(), RenyiOrder::COLLISION), two_pass, 1e-6));
    }

    /// Property 2: weights sum to 1, follow their heads, and do not care where off the sinks a mass is.
    #[test]
    fn weights_follow_heads_and_ignore_token_order(heads in heads(2..9, 5..60), turn in 0usize..60) {
        let options = PageEntroKvOptions::default();
        let weights = scored(&options, &heads).weights().to_vec();
        prop_assert!(close(weights.iter().sum(), 1.0, SUM_ORDER));

        let mut turned = heads.clone();
        turned.rotate_left(1);
        let mut expected = weights.clone();
        expected.rotate_left(1);
        for (got, expected) in scored(&options, &turned).weights().iter().zip(&expected) {
            prop_assert!(close(*got, *expected, SUM_ORDER));
        }

        let shuffled: Vec<Vec<f32>> = heads.iter().map(|row| {
            let mut row = row.clone();
            let others = row.len() - 4;
            row[4..].rotate_left(turn % others);
            row[..4].reverse();
            row
        }).collect();
        for (got, expected) in scored(&options, &shuffled).weights().iter().zip(&weights) {
            prop_assert!(close(*got, *expected, SUM_ORDER));
        }
    }

    /// Property 3: mass moved to a sink changes no weight.
    #[test]
    fn sink_mass_leaves_weights_alone(heads in heads(2..9, 8..60), head in 0usize..9, share in 0.0f32..0.9) {
        let options = PageEntroKvOptions::default();
        let before = scored(&options, &heads);
        let mut heads = heads;
        let head = head % heads.len();
        heads[head].iter_mut().for_each(|mass| *mass *= 1.0 - share);
        heads[head][0] += share;
        let after = scored(&options, &heads);
        for (a, b) in before.weights().iter().zip(after.weights()) {
            prop_assert!(close(*a, *b, F32_ROW), "{} became {}", a, b);
        }
    }

    /// Property 4: the pooled score is a distribution.
    #[test]
    fn pooled_scores_sum_to_one(heads in heads(1..9, 5..200), isolated in any::<bool>(), mean in any::<bool>()) {
        let options = PageEntroKvOptions {
            pool_on: if isolated { PoolOn::Isolated } else { PoolOn::Raw },
            pooling: if mean { Pooling::Mean } else { Pooling::Entropy },
            ..PageEntroKvOptions::default()
        };
        let scorer = scored(&options, &heads);
        prop_assert!(close(scorer.token_scores().iter().sum(), 1.0, F32_ROW));
        if isolated {
            prop_assert!(scorer.token_scores()[..4].iter().all(|&score| score == 0.0));
        }
    }

    /// Properties 5 and 6: exactly `min(k, n)` pages are kept, one set a group, and heads alone would hold 1 to r times.
    #[test]
    fn a_group_keeps_exactly_its_pages(
        heads in heads(1..9, 1..120), options in options(), k_pages in 1usize..40, pins in prop::collection::vec(0usize..40, 0..5),
    ) {
        let num_tokens = heads[0].len();
        let pages = spans(num_tokens);
        let mut scorer = scored(&options, &heads);
        let scores = page_scores(&mut scorer, &pages);
        prop_assert_eq!(scores.len(), pages.len());
        prop_assert!(scores.iter().all(|score| score.is_finite() && *score >= 0.0));
        let kept = select_pages(&scores, k_pages, &pins);
        prop_assert_eq!(kept.len(), k_pages.min(pages.len()));
        prop_assert!(kept.as_slice().is_sorted_by(|a, b| a < b));
        let retained: usize = kept.iter().map(|index| pages[index].len as usize).sum();
        let missing = PAGE_SIZE * pages.len() - num_tokens;
        let short = if kept.contains(pages.len() - 1) { missing } else { 0 };
        prop_assert_eq!(retained, kept.len() * PAGE_SIZE - short);

        let uor = scorer.uor_per_head(&pages, k_pages);
        let most = (pages.len() as f64 / k_pages.min(pages.len()) as f64).min(heads.len() as f64);
        prop_assert!((1.0..=most).contains(&uor), "{} of {}", uor, most);
        prop_assert!(heads.len() > 1 || uor == 1.0);
    }

    /// Property 8: the largest weight falls with the temperature, from one-hot to the mean.
    #[test]
    fn temperature_flattens_weights(entropies in prop::collection::vec(0.0f64..8.0, 1..9)) {
        let largest = |tau: f64| head_weights(&entropies, tau).into_iter().fold(0.0, f64::max);
        let taus = [1e-9, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 50.0, f64::INFINITY];
        for pair in taus.windows(2) {
            prop_assert!(largest(pair[0]) >= largest(pair[1]) - SUM_ORDER);
        }
        prop_assert!(close(largest(f64::INFINITY), 1.0 / entropies.len() as f64, SUM_ORDER));
        let mut sorted = entropies.clone();
        sorted.sort_by(f64::total_cmp);
        if sorted.len() == 1 || sorted[1] - sorted[0] > 1e-6 {
            prop_assert!(close(largest(1e-9), 1.0, SUM_ORDER));
        }
    }

    /// Property 9, the survival theorem: a score above `1 / (free pages + 1)` keeps its page, whatever the others.
    #[test]
    fn enough_mass_survives(
        heads in heads(1..9, 8..120), needle in 4usize..120, mass in 0.0f32..1.0, k_pages in 1usize..12, force_sink in any::<bool>(),
    ) {
        let needle = 4 + (needle - 4) % (heads[0].len() - 4);
        let mut heads = heads;
        for row in &mut heads {
            row.iter_mut().for_each(|other| *other *= 1.0 - mass);
            row[needle] += mass;
        }
        let mut scorer = scored(&PageEntroKvOptions::default(), &heads);
        let pages = spans(heads[0].len());
        let pinned: &[usize] = if force_sink { &[0] } else { &[] };
        let scores = page_scores(&mut scorer, &pages);
        let kept = select_pages(&scores, k_pages, pinned);
        let total: f64 = scorer.token_scores().iter().sum();
        if scorer.token_scores()[needle] / total > survival_threshold(k_pages, pinned.len()) + 1e-6 {
            prop_assert!(kept.contains(needle / PAGE_SIZE));
        }
    }

    /// Theorem 4 on the scorer itself: uniform siblings, one head on the needle.
    #[test]
    fn one_head_that_knows_outweighs_siblings_that_do_not(group_size in 2usize..9, num_tokens in 64usize..4000, epsilon in 0.001f64..0.3) {
        let residual_tokens = num_tokens - 4;
        let uniform = vec![1.0 / num_tokens as f32; num_tokens];
        let mut heads = vec![uniform; group_size];
        let needle = num_tokens / 2;
        heads[group_size - 1] = vec![0.0; num_tokens];
        heads[group_size - 1][needle] = (1.0 - epsilon) as f32;
        heads[group_size - 1][0] = epsilon as f32;
        let scorer = scored(&PageEntroKvOptions::default(), &heads);
        let context = FiniteContext {
            residual_tokens: residual_tokens as u64,
            tau: 0.5,
            epsilon,
            eta: 0.0,
            sibling_deficits: vec![0.0; group_size - 1],
        };
        prop_assert!(scorer.token_scores()[needle] >= context.pooled_mass() - 1e-6);
        prop_assert!(scorer.token_scores()[needle] >= 1.0 - epsilon - context.loss() - 1e-6);
    }

    /// Property 11: rows with entries that are no mass are dropped and counted, and nothing that comes out is NaN.
    #[test]
    fn bad_rows_are_counted_and_go_no_further(
        heads in heads(1..6, 1..40), options in options(),
        bad in prop::collection::vec((0usize..6, 0usize..40, prop_oneof![Just(f32::NAN), Just(f32::INFINITY), Just(-1.0)]), 0..4),
        steps in 0usize..3,
    ) {
        let mut heads = heads;
        let num_tokens = heads[0].len();
        for (head, token, value) in bad {
            let head = head % heads.len();
            heads[head][token % num_tokens] = value;
        }
        let num_bad = heads.iter().filter(|row| row.iter().any(|mass| !mass.is_finite() || *mass < 0.0)).count();
        let mut scorer = scored(&options, &heads);
        let positions: Vec<u32> = (0..num_tokens as u32).collect();
        for _ in 0..steps {
            observe(&mut scorer, RowSource::Step, &heads, &positions);
        }
        prop_assert_eq!(scorer.nan_rows(), (num_bad * (1 + steps)) as u64);
        prop_assert!(scorer.weights().iter().chain(scorer.entropies()).chain(scorer.token_scores()).all(|x| x.is_finite()));
        let scores = page_scores(&mut scorer, &spans(num_tokens));
        prop_assert!(scores.iter().all(|score| !score.is_nan()));
        if num_bad == heads.len() {
            prop_assert!(scores.iter().all(|score| *score == 0.0));
        }
    }

    /// Scores have the same bits however the prompt was cut.
    #[test]
    fn pieces_of_a_prompt_do_not_show(
        num_tokens in 1usize..40, group_size in 1usize..5, options in options(), cuts in prop::collection::vec(0usize..40, 0..6), seed in any::<u64>(),
        bad in prop::option::of((0usize..40, 0usize..5)),
    ) {
        // Causal rows of every query: row i has mass on tokens 0..=i.
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u64 << 24) as f32
        };
        let mut rows: Vec<Vec<Vec<f32>>> = (0..num_tokens).map(|query| {
            (0..group_size).map(|_| {
                (0..num_tokens).map(|token| if token <= query { next() + 1e-3 } else { 0.0 }).collect()
            }).collect()
        }).collect();
        if let Some((query, head)) = bad {
            rows[query % num_tokens][head % group_size][0] = f32::NAN;
        }
        let first = match options.row {
            ObservedRow::Window(num_rows) => num_tokens.saturating_sub(num_rows),
            ObservedRow::Last | ObservedRow::Accumulated => 0,
        };

        let read = |cuts: &[usize]| {
            let mut ends: Vec<usize> = cuts.iter().map(|cut| cut % num_tokens).chain([num_tokens]).collect();
            ends.sort_unstable();
            let mut scorer = scorer(&options, group_size);
            let mut start = 0;
            for end in ends {
                let tapped = start.max(first)..end;
                if tapped.is_empty() {
                    start = end;
                    continue;
                }
                let positions: Vec<u32> = (0..end as u32).collect();
                let piece: Vec<f32> =
                    rows[tapped].iter().flatten().flat_map(|row| row[..end].iter().copied()).collect();
                scorer.observe(AttentionRows { source: RowSource::Prompt, group_size, positions: &positions, rows: &piece });
                start = end;
            }
            scorer.end_prompt();
            scorer
        };
        let (mut whole, mut cut) = (read(&[]), read(&cuts));
        let bits = |values: &[f64]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        prop_assert_eq!(bits(whole.weights()), bits(cut.weights()));
        prop_assert_eq!(bits(whole.token_scores()), bits(cut.token_scores()));
        prop_assert_eq!(whole.nan_rows(), cut.nan_rows());
        let pages = spans(num_tokens);
        prop_assert_eq!(page_scores(&mut whole, &pages), page_scores(&mut cut, &pages));
        prop_assert_eq!(whole.uor_per_head(&pages, 3).to_bits(), cut.uor_per_head(&pages, 3).to_bits());
    }

    /// Rolling scores follow the formula of the spec, token by token, through evictions.
    #[test]
    fn rolling_scores_follow_their_formula(heads in heads(1..5, 6..30), options in options(), steps in prop::collection::vec((any::<u64>(), any::<bool>()), 0..30)) {
        let group_size = heads.len();
        let mut scorer = scored(&options, &heads);
        let weights = scorer.weights().to_vec();
        let mut expected: BTreeMap<u32, f64> = scorer.positions().iter().copied().zip(scorer.token_scores().iter().copied()).collect();
        let mut positions: Vec<u32> = (0..heads[0].len() as u32).collect();
        for (next_position, (seed, evict)) in (positions.len() as u32..).zip(steps) {
            if evict && positions.len() > 8 {
                let victim = 4 + seed as usize % (positions.len() - 4);
                positions.remove(victim);
            }
            positions.push(next_position);
            let mut state = seed;
            let rows: Vec<Vec<f32>> = (0..group_size).map(|_| positions.iter().map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 40) as f32 / (1u64 << 24) as f32
            }).collect()).collect();
            observe(&mut scorer, RowSource::Step, &rows, &positions);

            let sinks = positions.iter().filter(|&&position| position < options.sinks).count();
            expected = positions.iter().enumerate().map(|(token, position)| {
                let seen: Vec<f64> = rows.iter().map(|row| {
                    let mass = f64::from(row[token]);
                    match options.pool_on {
                        PoolOn::Raw => mass,
                        PoolOn::Isolated if token < sinks => 0.0,
                        PoolOn::Isolated => mass / row[sinks..].iter().copied().map(f64::from).sum::<f64>(),
                    }
                }).collect();
                let pooled = match options.pooling {
                    Pooling::Max => seen.into_iter().fold(0.0, f64::max),
                    Pooling::Entropy | Pooling::Mean => seen.iter().zip(&weights).map(|(mass, weight)| mass * weight).sum(),
                };
                let before = expected.get(position).copied().unwrap_or(0.0);
                (*position, options.decay * before + (1.0 - options.decay) * pooled)
            }).collect();
        }
        prop_assert_eq!(scorer.positions(), expected.keys().copied().collect::<Vec<_>>());
        for (got, expected) in scorer.token_scores().iter().zip(expected.values()) {
            prop_assert!(close(*got, *expected, SUM_ORDER), "got {} expected {}", got, expected);
        }
    }

    /// A page's score is its tokens' scores pooled along positions and projected, gaps counting 0.
    #[test]
    fn page_scores_follow_their_formula(heads in heads(1..4, 1..40), options in options(), evicted in prop::collection::btree_set(0u32..10, 0..6)) {
        // A second turn over what an eviction left: rows with gaps.
        let page_of = |position: u32| position / PAGE_SIZE as u32;
        let positions: Vec<u32> = (0..200).filter(|&position| !evicted.contains(&page_of(position))).take(heads[0].len()).collect();
        let mut scorer = scorer(&options, heads.len());
        observe(&mut scorer, RowSource::Prompt, &heads, &positions);
        scorer.end_prompt();
        let score: BTreeMap<i64, f64> =
            positions.iter().map(|&position| i64::from(position)).zip(scorer.token_scores().iter().copied()).collect();
        let reach = (options.pool_width / 2) as i64;
        let pooled = |position: i64| {
            (position - reach..=position + reach).map(|near| score.get(&near).copied().unwrap_or(0.0)).sum::<f64>() / options.pool_width as f64
        };
        let mut firsts: Vec<u32> = positions.iter().map(|&position| page_of(position) * PAGE_SIZE as u32).collect();
        firsts.dedup();
        let pages: Vec<PageSpan> = firsts.iter().map(|&first_position| {
            let len = positions.iter().filter(|&&position| page_of(position) == page_of(first_position)).count() as u32;
            PageSpan { first_position, len }
        }).collect();
        for (page, got) in pages.iter().zip(page_scores(&mut scorer, &pages)) {
            let first = i64::from(page.first_position);
            let tokens: Vec<f64> = (first..first + i64::from(page.len)).map(pooled).collect();
            let expected = match options.block {
                BlockProjection::Max => tokens.iter().copied().fold(0.0, f64::max),
                BlockProjection::Sum => tokens.iter().sum(),
                BlockProjection::Mean => tokens.iter().sum::<f64>() / tokens.len() as f64,
            };
            prop_assert!(close(f64::from(got), expected, 1e-6), "{:?}: got {} expected {}", page, got, expected);
        }
    }

    /// The canonical text of any options reads back as them.
    #[test]
    fn canonical_texts_read_back(options in options()) {
        let policy = PageEntroKv::new(options).unwrap();
        let text = policy.to_string();
        let items = text.split_once(':').map(|(_, items)| items);
        prop_assert_eq!(&PageEntroKv::parse(items).unwrap(), &policy);
        prop_assert_eq!(format!("{:?}", parse_policy(&text).unwrap()), format!("{policy:?}"));
    }
}

/// Theorem 2: raw entropies cannot tell a sink head from a retrieval head, isolated ones can.
#[test]
fn a_sink_head_weighs_least_once_isolated() {
    let num_tokens = 840;
    let mut sink = vec![0.1 / 836.0; num_tokens];
    sink[..4].copy_from_slice(&[0.9, 0.0, 0.0, 0.0]);
    let mut retrieval = sink.clone();
    retrieval.swap(0, 500);
    let heads = [sink, retrieval];
    let raw = scored(&PageEntroKvOptions { sinks: 0, ..PageEntroKvOptions::default() }, &heads);
    assert!(close(raw.entropies()[0], 0.21, 0.005), "{:?}", raw.entropies());
    assert!(close(raw.weights()[0], 0.5, SUM_ORDER));
    let isolated = scored(&PageEntroKvOptions::default(), &heads);
    assert!(close(isolated.entropies()[0], 836f64.ln(), 1e-6));
    assert!(isolated.weights()[0] < 1e-5, "{:?}", isolated.weights());
}

/// Ten thousand tokens decoded over a fixed number of resident ones reserve nothing more.
#[test]
fn rolling_state_is_flat() {
    let options = PageEntroKvOptions::serving();
    let num_resident = 64_u32;
    let heads = vec![vec![1.0 / 64.0; 64]; 3];
    let mut scorer = scored(&options, &heads);
    let mut reserved = 0;
    for step in 0..10_000 {
        let positions: Vec<u32> = (0..4).chain(step + 5..step + 1 + num_resident).collect();
        let rows = vec![vec![1.0 / 64.0; positions.len()]; 3];
        observe(&mut scorer, RowSource::Step, &rows, &positions);
        if step == 0 {
            reserved = scorer.state_bytes();
        }
    }
    assert_eq!(scorer.state_bytes(), reserved);
    assert!(reserved < 64 * 3 * 16, "{reserved} bytes for 64 tokens");
}

/// The next turn is scored anew, from its own rows over what is resident.
#[test]
fn a_new_turn_replaces_the_scores_of_the_last() {
    let options = PageEntroKvOptions::default();
    let mut scorer = scored(&options, &[vec![0.125; 8], vec![0.125; 8]]);
    let first: Vec<f64> = scorer.token_scores().to_vec();
    scorer.end_prompt();
    assert_eq!(scorer.token_scores(), first, "no rows, no change");
    let positions = [0, 1, 2, 3, 8, 9];
    let rows = [vec![0.0, 0.0, 0.0, 0.0, 0.25, 0.75], vec![0.5, 0.5, 0.0, 0.0, 0.0, 0.0]];
    observe(&mut scorer, RowSource::Prompt, &rows, &positions);
    scorer.end_prompt();
    assert_eq!(scorer.positions(), positions);
    // N = 2: H = (-ln 10/16, ln 2), and weights go with e^(-2H).
    let (a, b) = ((10.0f64 / 16.0).powi(2), 0.25);
    assert!(close(scorer.weights()[0], a / (a + b), SUM_ORDER));
    assert!(close(scorer.token_scores()[5], 0.75 * a / (a + b), SUM_ORDER));
    let pages = [PageSpan { first_position: 0, len: 4 }, PageSpan { first_position: 8, len: 2 }];
    let expected = [0.5 * b / (a + b), 0.75 * a / (a + b)].map(|score| score as f32);
    assert_eq!(page_scores(&mut scorer, &pages), expected);
    assert_eq!(scorer.uor_per_head(&pages, 1), 2.0, "each head has a page of its own");
    assert_eq!(scorer.uor_per_head(&pages, 2), 1.0);
}

/// Column sums give what the rows they sum give.
#[test]
fn column_sums_stand_for_their_rows() {
    let options = PageEntroKvOptions { row: ObservedRow::Accumulated, ..PageEntroKvOptions::default() };
    let queries: Vec<Vec<f32>> =
        vec![vec![1.0, 0.0, 0.0, 0.0, 0.0], vec![0.5, 0.5, 0.0, 0.0, 0.0], vec![0.0, 0.0, 0.25, 0.25, 0.5]];
    let positions = [0, 1, 2, 3, 4];
    let mut by_rows = scorer(&options, 1);
    let rows = queries.concat();
    by_rows.observe(AttentionRows { source: RowSource::Prompt, group_size: 1, positions: &positions, rows: &rows });
    let mut by_sums = scorer(&options, 1);
    let sums: Vec<f32> = (0..5).map(|token| queries.iter().map(|row| row[token]).sum()).collect();
    observe(&mut by_sums, RowSource::ColumnSums { num_rows: 3 }, &[sums], &positions);
    by_rows.end_prompt();
    by_sums.end_prompt();
    assert_eq!(by_rows.token_scores(), by_sums.token_scores());
    assert_eq!(by_rows.token_scores()[0], 0.5);
}
