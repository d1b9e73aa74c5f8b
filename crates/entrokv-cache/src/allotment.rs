//! How many units each KV group may keep, of what all groups may keep together.
//!
//! A unit is what a policy decides about: a page, or a token. The budget gives every group `keep` units on average; an
//! allotment shares them out among the heads of a layer, among layers, or among all groups, by their scores.
//!
//! Invariants, each a test of that name:
//!
//! * `no_allotment_gives_more_than_there_is`: the sum never exceeds `keep` units a group, and no group gets more than it has.
//! * `what_a_group_needs_is_always_allotted`, its pins among it, as long as that fits `keep`.
//! * `pooled_counts_are_those_of_the_pooled_choice`: a group's best units, so many as it is allotted, are the ones that a
//!   single choice over the pool would have kept.

use std::cmp::{Ordering, Reverse};
use std::fmt;
use std::str::FromStr;

use crate::block_prices::{BlockPrices, cheapest_blocks};
use crate::pyramid::{Pyramid, PyramidForm};
use crate::selection::{rank, select_pages};
use crate::streaming_heads::StreamingHeads;

/// How the units of a budget are shared out among KV groups.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Allotment {
    /// Every group keeps as many.
    #[default]
    Uniform,
    /// Every head of a layer keeps as many, lower layers more: an arithmetic series (PyramidKV, Cai et al. 2024).
    Pyramid(Pyramid),
    /// The best units of a layer stay, whichever heads they belong to, but `safeguard * keep` of each head first (Ada-KV, Feng
    /// et al. 2024, as kvpress has it).
    AdaFloor {
        /// Part of `keep` that is safe in each head, from 0 to 1.
        safeguard: f64,
    },
    /// Counts as without a safeguard, drawn towards `keep`: `(1 - toward) c_h + toward keep` (Ada-KV, algorithm 2; its authors'
    /// code rounds each alone, so that some of the budget may be lost or exceeded).
    AdaInterpolated {
        /// How far, from 0 to 1.
        toward: f64,
    },
    /// As [`AdaInterpolated`](Self::AdaInterpolated), and spelled like it, but the counts are those of scores scaled head by head with
    /// the part of a head's mass that its best `keep` units have (the normalisation of Ada-KV's code): heads whose attention is
    /// spread over many units do not win by it. What a head keeps is still its best by its own scores.
    AdaNormalised {
        /// How far, from 0 to 1.
        toward: f64,
    },
    /// The best units of all layers and heads stay.
    Global,
    /// The cheapest units of all layers and heads go, each unit a block of its own (KV-Compress, Rehg 2024): counts as
    /// [`Global`](Self::Global)'s but that of equals the lower group pays. What blocks of several tokens cost is in
    /// [`BlockPrices`].
    Prices,
    /// Heads are of two kinds: whoever has their gates takes the counts from [`StreamingHeads::counts`]. Without gates every group
    /// keeps as many.
    Heads(StreamingHeads),
}

/// The units of one KV group.
#[derive(Clone, Copy, Debug)]
pub struct GroupUnits<'a> {
    /// A score a unit; higher stays longer.
    pub scores: &'a [f32],
    /// Units that stay whatever their score, as indices without repeats.
    pub pinned: &'a [usize],
    /// Fewest units that the group can do with: its pins, and those it will have to make room for.
    pub least: usize,
}

impl GroupUnits<'_> {
    /// Units that the group keeps in any case, as far as it has them.
    fn forced(&self) -> usize {
        self.least.max(self.pinned.len()).min(self.scores.len())
    }
}

/// The pages that tokens decided about one by one would fill, the best tokens first: a score a page, and which are pinned.
///
/// To free a page the tokens of the last one must go, so a page counts what the best of its tokens counts: the price of a block in
/// KV-Compress (Rehg 2024). The `num_open` newest tokens are the open page, which stays.
pub fn pages_of_tokens(scores: &[f32], pinned: &[usize], num_open: usize, page_size: usize) -> (Vec<f32>, Vec<usize>) {
    let closed = scores.len() - num_open;
    let mut is_pinned = vec![false; scores.len()];
    pinned.iter().for_each(|&token| is_pinned[token] = true);
    let num_pinned = is_pinned[..closed].iter().filter(|pinned| **pinned).count();
    let mut others: Vec<f32> =
        (0..closed).filter(|&token| !is_pinned[token]).map(|token| rank(scores[token])).collect();
    others.sort_unstable_by(|a, b| b.total_cmp(a));
    // A page with a pinned token in it needs no score; the next one's best token is the first that is not in such a page.
    let num_pages = closed.div_ceil(page_size);
    let pinned_pages = num_pinned.div_ceil(page_size);
    let best = |page: usize| if page < pinned_pages { f32::INFINITY } else { others[page * page_size - num_pinned] };
    let mut pages: Vec<f32> = (0..num_pages).map(best).collect();
    let mut pinned: Vec<usize> = (0..pinned_pages).collect();
    if num_open > 0 {
        pinned.push(pages.len());
        pages.push(f32::INFINITY);
    }
    (pages, pinned)
}

impl Allotment {
    /// Its spellings, in words.
    pub(crate) const EXPECTED: &'static str = "uniform, global, prices, pyramid, pyramid:B or pyramid-official:B with B \
         above 1, ada-floor:A or ada-interpolated:A with A from 0 to 1";

    /// Units that each of `groups` may keep, `keep` on average; `heads_per_layer` groups in a row are one layer.
    ///
    /// # Panics
    /// If `groups` is no whole number of layers.
    #[must_use]
    pub fn counts(self, groups: &[GroupUnits<'_>], heads_per_layer: usize, keep: usize) -> Vec<usize> {
        assert!(groups.len().is_multiple_of(heads_per_layer), "{} groups in layers of {heads_per_layer}", groups.len());
        let layers = groups.chunks(heads_per_layer);
        let counts = match self {
            Self::Uniform | Self::Heads(_) => vec![keep; groups.len()],
            Self::Pyramid(pyramid) => {
                let longest = groups.iter().map(|group| group.scores.len()).max().unwrap_or(0);
                let pins = groups.iter().map(GroupUnits::forced).max().unwrap_or(0);
                let pyramid = Pyramid { window: pyramid.window.max(pins), ..pyramid };
                let layers = pyramid.layers(groups.len() / heads_per_layer, longest, keep);
                layers.into_iter().flat_map(|count| std::iter::repeat_n(count, heads_per_layer)).collect()
            }
            Self::AdaFloor { safeguard } => {
                layers.flat_map(|layer| pooled(layer, part(safeguard, keep), keep)).collect()
            }
            Self::AdaInterpolated { toward } => {
                layers.flat_map(|layer| interpolated(layer, &pooled(layer, 0, keep), toward, keep)).collect()
            }
            Self::AdaNormalised { toward } => {
                layers.flat_map(|layer| interpolated(layer, &normalised(layer, keep), toward, keep)).collect()
            }
            Self::Global => pooled(groups, 0, keep),
            Self::Prices => priced(groups, keep),
        };
        counts.into_iter().zip(groups).map(|(count, group)| count.min(group.scores.len())).collect()
    }
}

impl Allotment {
    /// Units of each group that are safe whatever the others' scores, where `keep` stay on average.
    #[must_use]
    pub fn safe_units(self, keep: usize) -> usize {
        match self {
            Self::AdaFloor { safeguard } => part(safeguard, keep),
            Self::Uniform
            | Self::Pyramid(_)
            | Self::AdaInterpolated { .. }
            | Self::AdaNormalised { .. }
            | Self::Global
            | Self::Prices
            | Self::Heads(_) => 0,
        }
    }
}

/// `floor(fraction * count)`, with no unit lost to how a fraction is stored.
fn part(fraction: f64, count: usize) -> usize {
    (fraction * count as f64 + 1e-9) as usize
}

/// How many units of each group are among the best `keep` a group of the pool: pins first, then the best `safe` of each group,
/// then by score, ties to the lower group and unit.
fn pooled(groups: &[GroupUnits<'_>], safe: usize, keep: usize) -> Vec<usize> {
    let mut units = Vec::new();
    for (index, group) in groups.iter().enumerate() {
        let mut is_pinned = vec![false; group.scores.len()];
        group.pinned.iter().for_each(|&unit| is_pinned[unit] = true);
        let mut own: Vec<usize> = (0..group.scores.len()).collect();
        own.sort_by(|&a, &b| {
            let order = rank(group.scores[b]).total_cmp(&rank(group.scores[a]));
            is_pinned[b].cmp(&is_pinned[a]).then(order)
        });
        let forced = safe.max(group.forced());
        units.extend(own.into_iter().enumerate().map(|(place, unit)| (place < forced, group.scores[unit], index)));
    }
    let total = keep * groups.len();
    // Stable: of a group's equals the one that its own choice would take first.
    units.sort_by(|a, b| Reverse(a.0).cmp(&Reverse(b.0)).then(rank(b.1).total_cmp(&rank(a.1))));
    let mut counts = vec![0; groups.len()];
    units.into_iter().take(total).for_each(|(_, _, group)| counts[group] += 1);
    counts
}

/// How many units each group has left once the cheapest of all have gone; what a group needs has no price.
fn priced(groups: &[GroupUnits<'_>], keep: usize) -> Vec<usize> {
    let prices: Vec<BlockPrices> = groups
        .iter()
        .map(|group| {
            let forced = group.forced().min(keep);
            // NaN stays what it is, below every number.
            let mut metrics: Vec<f32> =
                group.scores.iter().map(|&score| if score > f32::MAX { f32::MAX } else { score }).collect();
            for unit in &select_pages(group.scores, forced, group.pinned) {
                metrics[unit] = f32::INFINITY;
            }
            BlockPrices::of(&metrics, 1)
        })
        .collect();
    let held: usize = groups.iter().map(|group| group.scores.len()).sum();
    let freed = cheapest_blocks(&prices, held.saturating_sub(keep * groups.len()));
    groups.iter().zip(freed).map(|(group, freed)| group.scores.len() - freed).collect()
}

/// [`pooled`] counts of scores times the part of a group's mass that its best `keep` units have; what is pinned, which counts as
/// one of them, is left out of both.
fn normalised(groups: &[GroupUnits<'_>], keep: usize) -> Vec<usize> {
    let scale = |group: &GroupUnits<'_>| {
        let mut is_pinned = vec![false; group.scores.len()];
        group.pinned.iter().for_each(|&unit| is_pinned[unit] = true);
        let free = group.scores.iter().zip(is_pinned).filter(|(score, pinned)| !pinned && score.is_finite());
        let mut free: Vec<f32> = free.map(|(score, _)| *score).collect();
        free.sort_unstable_by(|a, b| b.total_cmp(a));
        let sum = |scores: &[f32]| scores.iter().copied().map(f64::from).sum::<f64>();
        let best = sum(&free[..keep.saturating_sub(group.pinned.len()).min(free.len())]);
        // Scores that are no masses are left as they are.
        let part = best / sum(&free);
        let part = if part.is_finite() && part > 0.0 { part } else { 1.0 };
        group.scores.iter().map(|&score| (f64::from(score) * part) as f32).collect::<Vec<f32>>()
    };
    let scaled: Vec<Vec<f32>> = groups.iter().map(scale).collect();
    let units: Vec<GroupUnits<'_>> =
        groups.iter().zip(&scaled).map(|(group, scores)| GroupUnits { scores, ..*group }).collect();
    pooled(&units, 0, keep)
}

/// `(1 - toward) c_h + toward keep` of the pooled counts `c_h`, but no fewer than are needed; rounded so that together they are
/// what there is: down, and one more for those with the largest remainders, ties to the lower group.
fn interpolated(groups: &[GroupUnits<'_>], pooled: &[usize], toward: f64, keep: usize) -> Vec<usize> {
    let draw = |count: usize| (1.0 - toward) * count as f64 + toward * keep as f64;
    let drawn: Vec<f64> = pooled.iter().copied().map(draw).collect();
    let least = |group: usize| groups[group].forced();
    // A whole number that floats have made a little less is that number.
    let mut counts: Vec<usize> =
        drawn.iter().enumerate().map(|(group, &count)| ((count + 1e-9) as usize).max(least(group))).collect();
    let total: usize = groups.iter().map(|group| group.scores.len()).sum::<usize>().min(keep * groups.len());
    let lacks = |counts: &[usize], group: usize| drawn[group] - counts[group] as f64;
    loop {
        let sum: usize = counts.iter().sum();
        let candidates = (0..groups.len()).filter(|&group| match sum.cmp(&total) {
            Ordering::Less => counts[group] < groups[group].scores.len(),
            Ordering::Equal => false,
            Ordering::Greater => counts[group] > least(group),
        });
        let by_lack = |a: &usize, b: &usize| lacks(&counts, *a).total_cmp(&lacks(&counts, *b));
        if sum < total {
            let Some(group) = candidates.max_by(|a, b| by_lack(a, b).then(b.cmp(a))) else { break };
            counts[group] += 1;
        } else {
            let Some(group) = candidates.min_by(|a, b| by_lack(a, b).then(b.cmp(a))) else { break };
            counts[group] -= 1;
        }
    }
    counts
}

impl fmt::Display for Allotment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uniform => f.write_str("uniform"),
            Self::Pyramid(pyramid) => {
                let official = if pyramid.form == PyramidForm::Official { "-official" } else { "" };
                write!(f, "pyramid{official}:{}", pyramid.steepness)
            }
            Self::AdaFloor { safeguard } => write!(f, "ada-floor:{safeguard}"),
            Self::AdaInterpolated { toward } | Self::AdaNormalised { toward } => write!(f, "ada-interpolated:{toward}"),
            Self::Global => f.write_str("global"),
            Self::Prices => f.write_str("prices"),
            Self::Heads(StreamingHeads { at_least }) => write!(f, "heads:{at_least}"),
        }
    }
}

impl FromStr for Allotment {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (word, number) = match text.split_once(':') {
            Some((word, number)) => (word, Some(number.parse::<f64>().map_err(|_| ())?)),
            None => (text, None),
        };
        let part = number.filter(|part| (0.0..=1.0).contains(part)).ok_or(());
        match (word, number) {
            ("uniform", None) => Ok(Self::Uniform),
            ("global", None) => Ok(Self::Global),
            ("prices", None) => Ok(Self::Prices),
            ("pyramid", None) => Ok(Self::Pyramid(Pyramid::new(Pyramid::STEEPNESS, PyramidForm::Kvpress))),
            ("pyramid" | "pyramid-official", Some(steepness)) if steepness > 1.0 && steepness.is_finite() => {
                let form = if word == "pyramid" { PyramidForm::Kvpress } else { PyramidForm::Official };
                Ok(Self::Pyramid(Pyramid::new(steepness, form)))
            }
            ("ada-floor", Some(_)) => Ok(Self::AdaFloor { safeguard: part? }),
            ("ada-interpolated", Some(_)) => Ok(Self::AdaInterpolated { toward: part? }),
            _ => Err(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The blocks of KV-Compress: of heads whose tokens have these metrics, the cheapest block first.
    #[test]
    fn a_page_of_tokens_costs_its_best_token() {
        let head = [0.3, 0.31, 0.32, 0.33, 0.6, 0.7, 0.95, 0.99];
        assert_eq!(pages_of_tokens(&head, &[], 0, 4), (vec![0.99, 0.33], vec![]));
        // Pinned tokens fill the first page, and the rest of it is not for sale either.
        assert_eq!(pages_of_tokens(&head, &[0], 0, 4), (vec![f32::INFINITY, 0.6], vec![0]));
        assert_eq!(pages_of_tokens(&head, &[0, 1, 2, 3, 4], 0, 4), (vec![f32::INFINITY; 2], vec![0, 1]));
        // The two newest lie in the open page.
        let (pages, pinned) = pages_of_tokens(&head[..6], &[4, 5], 2, 4);
        assert_eq!((pages, pinned), (vec![0.33, f32::INFINITY], vec![1]));
        assert_eq!(pages_of_tokens(&[f32::NAN, 0.1], &[], 0, 1).0[0], 0.1);
    }

    #[test]
    fn the_forms_of_ada_kv_differ_as_their_sources_do() {
        // Four heads whose pooled choice of 4 x 100 gives 250, 90, 40 and 20.
        let raw = [250, 90, 40, 20];
        let scores: Vec<Vec<f32>> =
            raw.iter().map(|&n| (0..400).map(|unit| if unit < n { 1.0 } else { 0.0 }).collect()).collect();
        let groups: Vec<GroupUnits<'_>> =
            scores.iter().map(|scores| GroupUnits { scores, pinned: &[], least: 0 }).collect();
        let counts = |allotment: Allotment| allotment.counts(&groups, 4, 100);
        assert_eq!(counts(Allotment::AdaFloor { safeguard: 0.2 }), raw);
        assert_eq!(counts(Allotment::AdaInterpolated { toward: 0.2 }), [220, 92, 52, 36]);
        assert_eq!(counts(Allotment::AdaFloor { safeguard: 1.0 }), [100; 4]);
        assert_eq!(counts(Allotment::AdaInterpolated { toward: 1.0 }), [100; 4]);
        assert_eq!(counts(Allotment::Uniform), [100; 4]);
        assert_eq!(counts(Allotment::Global), raw);
        assert_eq!(counts(Allotment::Prices), raw);
    }

    /// A head that spreads its mass over six units has as much as one that has two: the second wins what there is to share.
    #[test]
    fn spread_heads_do_not_win_by_it_once_normalised() {
        let spread = [0.21, 0.2, 0.2, 0.2, 0.19, 0.0];
        let sharp = [0.5, 0.18, 0.17, 0.1, 0.05, 0.0];
        let groups = [&spread, &sharp].map(|scores| GroupUnits { scores, pinned: &[], least: 0 });
        assert_eq!(Allotment::AdaInterpolated { toward: 0.0 }.counts(&groups, 2, 3), [5, 1]);
        // The best three have 0.61 of the first head's mass and 0.85 of the second's: 0.18 counts 0.153, 0.2 counts 0.122.
        assert_eq!(Allotment::AdaNormalised { toward: 0.0 }.counts(&groups, 2, 3), [3, 3]);
        // Scores that are no masses: nothing to go by.
        let norms = [[-1.0, -2.0, -3.0], [-1.5, -1.6, -1.7]];
        let groups = norms.each_ref().map(|scores| GroupUnits { scores, pinned: &[], least: 0 });
        let counts = |allotment: Allotment| allotment.counts(&groups, 2, 2);
        assert_eq!(counts(Allotment::AdaNormalised { toward: 0.0 }).iter().sum::<usize>(), 4);
        let pinned = [GroupUnits { scores: &[9.0, 1.0, 1.0], pinned: &[0], least: 1 }, groups[1]];
        assert_eq!(Allotment::AdaNormalised { toward: 1.0 }.counts(&pinned, 2, 2), [2, 2]);
    }

    #[test]
    fn a_safeguard_lifts_heads_that_would_starve_and_no_others() {
        let rich = [9.0, 8.0, 7.0, 6.0, 5.0, 4.0];
        let poor = [0.6, 0.5, 0.4, 0.3, 0.2, 0.1];
        let groups = [&rich, &poor].map(|scores| GroupUnits { scores, pinned: &[], least: 0 });
        let counts = |safeguard| Allotment::AdaFloor { safeguard }.counts(&groups, 2, 3);
        // trunc(0.2 * 3) = 0: no safeguard at all.
        assert_eq!(counts(0.2), [6, 0]);
        assert_eq!(counts(0.34), [5, 1]);
        // 0.7 * 10 is less than 7 as a float, and must not lose a unit.
        assert_eq!(part(0.7, 10), 7);
    }

    #[test]
    fn a_global_pool_moves_units_between_layers() {
        let scores = [[5.0, 1.0, 0.0], [4.0, 3.0, 2.0]];
        let groups = [
            GroupUnits { scores: &scores[0], pinned: &[2], least: 0 },
            GroupUnits { scores: &scores[1], pinned: &[], least: 0 },
        ];
        assert_eq!(Allotment::Global.counts(&groups, 1, 2), [2, 2]);
        // The pin of the first group, then 5, then 4.
        assert_eq!(Allotment::Global.counts(&groups[..1], 1, 1), [1]);
        let unpinned = groups.map(|group| GroupUnits { pinned: &[], ..group });
        assert_eq!(Allotment::Global.counts(&unpinned, 1, 2), [1, 3]);
        for (groups, expected) in [(groups, [2, 2]), (unpinned, [1, 3])] {
            assert_eq!(Allotment::Prices.counts(&groups, 1, 2), expected);
        }
        // Of equals the lower group keeps its unit in a pool, and pays for it where units have a price.
        let equals = [[1.0, 1.0], [1.0, 1.0]];
        let groups = [0, 1].map(|group: usize| GroupUnits { scores: &equals[group], pinned: &[], least: 0 });
        assert_eq!(Allotment::Global.counts(&groups, 1, 1), [2, 0]);
        assert_eq!(Allotment::Prices.counts(&groups, 1, 1), [0, 2]);
    }

    #[test]
    fn allotments_print_what_they_parse_from() {
        for text in [
            "uniform",
            "global",
            "pyramid:20",
            "pyramid:1.5",
            "pyramid-official:20",
            "prices",
            "ada-floor:0.2",
            "ada-interpolated:1",
        ] {
            assert_eq!(text.parse::<Allotment>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "ada-floor",
            "ada-floor:1.1",
            "pyramid:1",
            "pyramid:inf",
            "uniform:2",
            "ada-interpolated:NaN",
            "prices:4",
            "pyramid-official",
        ] {
            assert_eq!(text.parse::<Allotment>(), Err(()), "{text}");
        }
    }

    fn allotments() -> impl Strategy<Value = Allotment> {
        let part = 0.0..=1.0;
        prop_oneof![
            Just(Allotment::Uniform),
            (1.5..40.0, 0..4_usize, any::<bool>()).prop_map(|(steepness, window, official)| {
                let form = if official { PyramidForm::Official } else { PyramidForm::Kvpress };
                Allotment::Pyramid(Pyramid { window, ..Pyramid::new(steepness, form) })
            }),
            part.clone().prop_map(|safeguard| Allotment::AdaFloor { safeguard }),
            part.clone().prop_map(|toward| Allotment::AdaInterpolated { toward }),
            part.prop_map(|toward| Allotment::AdaNormalised { toward }),
            Just(Allotment::Global),
            Just(Allotment::Prices),
        ]
    }

    /// Scores with ties and NaN; as many units in every group of a layer.
    fn scores(num_groups: usize) -> impl Strategy<Value = Vec<Vec<f32>>> {
        let score = prop_oneof![8 => (0..5_u8).prop_map(f32::from), 1 => Just(f32::NAN)];
        prop::collection::vec(prop::collection::vec(score, 12), num_groups)
    }

    proptest! {
        #[test]
        fn no_allotment_gives_more_than_there_is(allotment in allotments(), scores in scores(6), keep in 0..14_usize) {
            let groups: Vec<GroupUnits<'_>> = scores.iter().map(|scores| GroupUnits { scores, pinned: &[], least: 0 }).collect();
            let counts = allotment.counts(&groups, 2, keep);
            prop_assert!(counts.iter().all(|&count| count <= 12));
            prop_assert!(counts.iter().sum::<usize>() <= 6 * keep, "{:?}", counts);
            prop_assert_eq!(counts.len(), 6);
        }

        #[test]
        fn what_a_group_needs_is_always_allotted(scores in scores(6), keep in 3..12_usize, safeguard in 0.0..=1.0) {
            let groups: Vec<GroupUnits<'_>> = scores.iter().map(|scores| GroupUnits { scores, pinned: &[0, 5], least: 3 }).collect();
            let pyramids = [PyramidForm::Kvpress, PyramidForm::Official]
                .map(|form| Allotment::Pyramid(Pyramid::new(1.0 + 20.0 * safeguard, form)));
            let toward = safeguard;
            let ada =
                [Allotment::AdaFloor { safeguard }, Allotment::AdaInterpolated { toward }, Allotment::AdaNormalised { toward }];
            for allotment in [Allotment::Uniform, Allotment::Global, Allotment::Prices].into_iter().chain(pyramids).chain(ada) {
                let counts = allotment.counts(&groups, 3, keep);
                prop_assert!(counts.iter().all(|&count| count >= 3), "{} {:?}", allotment, counts);
                prop_assert!(counts.iter().sum::<usize>() <= 6 * keep);
            }
        }

        /// What pages of tokens cost is what blocks of as many slots do.
        #[test]
        fn pages_of_tokens_have_the_prices_of_blocks(
            scores in prop::collection::vec(0.0_f32..1.0, 1..40), page_size in 1_usize..9,
        ) {
            let (mut pages, pinned) = pages_of_tokens(&scores, &[], 0, page_size);
            pages.reverse();
            let blocks = BlockPrices::of(&scores, page_size);
            prop_assert_eq!(pages.as_slice(), blocks.prices());
            prop_assert!(pinned.is_empty());
        }

        #[test]
        fn pooled_counts_are_those_of_the_pooled_choice(scores in scores(4), keep in 0..12_usize) {
            let groups: Vec<GroupUnits<'_>> = scores.iter().map(|scores| GroupUnits { scores, pinned: &[], least: 0 }).collect();
            let counts = Allotment::Global.counts(&groups, 2, keep);
            let flat: Vec<f32> = scores.concat();
            let chosen = select_pages(&flat, 4 * keep, &[]);
            let by_group: Vec<usize> =
                scores.iter().zip(&counts).enumerate().flat_map(|(group, (scores, &count))| {
                    select_pages(scores, count, &[]).iter().map(move |unit| 12 * group + unit).collect::<Vec<_>>()
                }).collect();
            prop_assert_eq!(chosen.as_slice(), by_group.as_slice());
        }
    }
}
