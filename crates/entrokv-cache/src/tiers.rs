//! Tiers: which kind each page of a compressed cache is of, so that its bytes meet a budget.
//!
//! One threshold decides about all pages that are planned together: what lies below it goes, what lies well above it is stored
//! in the first tier, the rest in the second.
//!
//! Invariants, each a test of that name:
//!
//! * `a_plan_never_passes_its_room`, unless what is pinned alone does.
//! * `a_plan_leaves_no_room_for_another_page`: not for one more, and not for one more in the first tier.
//! * `better_pages_are_of_better_kinds`.
//! * `tiers_print_what_they_parse_from`.

use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;

use crate::page_kind::PageKind;
use crate::selection::rank;

/// Kinds of the pages that stay: `tq4`, or `tq4:3nats+tq3v2`, or `f16:0.03+tq3`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tiers {
    /// Kind of the best pages.
    pub top: PageKind,
    /// Of the others; `None` where all are alike.
    pub rest: Option<LowerTier>,
}

/// The second tier.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LowerTier {
    /// Which pages are above it.
    pub above: AboveTier,
    /// Its kind.
    pub kind: PageKind,
}

/// Which of the pages that stay are of the first tier.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AboveTier {
    /// Those whose score is at least `e^nats` times that of the last page that stays. For scores that are masses.
    Nats(f32),
    /// The best of them, this part, rounded down.
    Share(f64),
}

/// A page that is to be given a kind, or freed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TierPage {
    /// Higher stays longer; infinity stays in any case, and NaN counts as the lowest.
    pub score: f32,
    /// The kind it has to keep, if it is settled.
    pub kind: Option<PageKind>,
}

impl Tiers {
    /// What `tiers` may be, in words.
    pub(crate) const EXPECTED: &'static str =
        "none, a cache type, or two of them as in tq4:3nats+tq3v2 or f16:0.03+tq3";

    /// Reads what an option says: `none`, or tiers.
    pub(crate) fn read(text: &str) -> Option<Option<Self>> {
        if text == "none" { Some(None) } else { text.parse().ok().map(Some) }
    }

    /// What [`Tiers::read`] reads.
    pub(crate) fn show(tiers: Option<Self>) -> String {
        tiers.map_or_else(|| "none".to_owned(), |tiers| tiers.to_string())
    }

    /// Pages of one kind.
    #[must_use]
    pub const fn of(kind: PageKind) -> Self {
        Self { top: kind, rest: None }
    }

    /// The kinds there are.
    pub fn kinds(&self) -> impl Iterator<Item = PageKind> {
        std::iter::once(self.top).chain(self.rest.map(|rest| rest.kind))
    }

    /// The first kind that is coded: that of pages which are stored before anything is known about them.
    #[must_use]
    pub fn coded(&self) -> Option<PageKind> {
        self.kinds().find(|kind| kind.is_coded())
    }

    /// A kind for each of `pages`, or `None` for one that is freed, so that together they weigh no more than `room`, pages of a
    /// kind weighing `bytes` each.
    ///
    /// Pages are ranked by score, ties to the earlier one. The most of the best are kept for which there is room once those
    /// far enough above the last of them are of the first tier; what is left then lifts the next best ones into it.
    pub fn plan(&self, pages: &[TierPage], bytes: impl Fn(PageKind) -> u64, room: u64) -> Vec<Option<PageKind>> {
        let mut order: Vec<usize> = (0..pages.len()).collect();
        order.sort_by(|&a, &b| rank(pages[b].score).total_cmp(&rank(pages[a].score)));
        let ranked: Vec<TierPage> = order.iter().map(|&page| pages[page]).collect();
        let pinned = ranked.partition_point(|page| page.score == f32::INFINITY);
        let low = self.rest.map_or(self.top, |rest| rest.kind);
        let kind =
            |place: usize, num_top: usize| ranked[place].kind.unwrap_or(if place < num_top { self.top } else { low });
        let weight = |kept: usize, num_top: usize| (0..kept).map(|place| bytes(kind(place, num_top))).sum::<u64>();
        // More pages lower the threshold, so that no fewer are of the first tier: weights ascend.
        let fits = |kept: usize| weight(kept, self.num_top(&ranked[..kept])) <= room;
        let kept = last_that(pinned..ranked.len(), fits);
        let first_top = self.num_top(&ranked[..kept]);
        let num_top = last_that(first_top..kept, |num_top| weight(kept, num_top) <= room);
        let mut plan = vec![None; pages.len()];
        for place in 0..kept {
            plan[order[place]] = Some(kind(place, num_top));
        }
        plan
    }

    /// How many of `ranked`, all of which stay, are of the first tier.
    fn num_top(&self, ranked: &[TierPage]) -> usize {
        let Some(LowerTier { above, .. }) = self.rest else { return ranked.len() };
        match above {
            AboveTier::Share(share) => (share * ranked.len() as f64 + 1e-9) as usize,
            AboveTier::Nats(nats) => {
                let last = ranked.last().map_or(0.0, |page| rank(page.score).max(0.0));
                let least = f64::from(last) * f64::from(nats).exp();
                ranked.partition_point(|page| {
                    page.score == f32::INFINITY || f64::from(rank(page.score)) >= least && least > 0.0
                })
            }
        }
    }
}

/// The last of `from..=to` for which `holds` is true, which it is up to some number and no further; `from` if it never is.
fn last_that(range: std::ops::Range<usize>, holds: impl Fn(usize) -> bool) -> usize {
    let (mut good, mut bad) = (range.start, range.end + 1);
    while good + 1 < bad {
        let middle = good.midpoint(bad);
        match holds(middle) {
            true => good = middle,
            false => bad = middle,
        }
    }
    good
}

impl fmt::Display for Tiers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.top)?;
        match self.rest {
            None => Ok(()),
            Some(LowerTier { above: AboveTier::Nats(nats), kind }) => write!(f, ":{nats}nats+{kind}"),
            Some(LowerTier { above: AboveTier::Share(share), kind }) => write!(f, ":{share}+{kind}"),
        }
    }
}

impl FromStr for Tiers {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let kind = |text: &str| text.parse::<PageKind>().map_err(|_| ());
        let Some((top, rest)) = text.split_once(':') else { return Ok(Self::of(kind(text)?)) };
        let (above, low) = rest.split_once('+').ok_or(())?;
        let above = match above.strip_suffix("nats") {
            Some(nats) => nats.parse().ok().filter(|nats: &f32| *nats >= 0.0 && nats.is_finite()).map(AboveTier::Nats),
            None => above.parse().ok().filter(|share: &f64| (0.0..=1.0).contains(share)).map(AboveTier::Share),
        };
        let tiers = Self { top: kind(top)?, rest: Some(LowerTier { above: above.ok_or(())?, kind: kind(low)? }) };
        // A second tier that weighs more would turn the order round.
        let weight = |kind: PageKind| (kind.keys as u8, kind.values as u8);
        let ((top_keys, top_values), (low_keys, low_values)) = (weight(tiers.top), weight(kind(low)?));
        let is_lighter =
            top_keys.cmp(&low_keys) != Ordering::Greater && top_values.cmp(&low_values) != Ordering::Greater;
        if is_lighter { Ok(tiers) } else { Err(()) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::encoding::Encoding;

    const TQ4: PageKind = PageKind::of(Encoding::Tq4);
    const TQ3: PageKind = PageKind::of(Encoding::Tq3);

    fn weight(kind: PageKind) -> u64 {
        match kind {
            PageKind::F16 => 16,
            TQ4 => 5,
            _ => 3,
        }
    }

    fn plan(tiers: &str, scores: &[f32], room: u64) -> String {
        let pages: Vec<TierPage> = scores.iter().map(|&score| TierPage { score, kind: None }).collect();
        let plan = tiers.parse::<Tiers>().unwrap().plan(&pages, weight, room);
        let letter = |kind: &Option<PageKind>| match *kind {
            None => '.',
            Some(PageKind::F16) => 'f',
            Some(TQ4) => '4',
            Some(_) => '3',
        };
        plan.iter().map(letter).collect()
    }

    #[test]
    fn pages_far_above_the_threshold_are_of_the_first_tier() {
        // Three nats are a factor of 20.1.
        let scores = [0.5, 0.001, 0.1, 0.02, f32::INFINITY, 0.03];
        assert_eq!(plan("tq4:3nats+tq3", &scores, 100), "444444");
        // All stay: the threshold is .001, and .02 is 20 times that, .03 more.
        assert_eq!(plan("tq4:3nats+tq3", &scores, 3 + 3 + 4 * 5), "434344");
        // The last page does not fit; of those that stay only the pinned one and .5 are 3 nats above .02.
        assert_eq!(plan("tq4:3nats+tq3", &scores, 2 * 5 + 3 * 3), "4.3343");
        // Not enough for another page, enough to lift one.
        assert_eq!(plan("tq4:3nats+tq3", &scores, 2 * 5 + 3 * 3 + 2), "4.4343");
        assert_eq!(plan("tq4", &scores, 14), "4...4.");
        assert_eq!(plan("f16:0.25+tq3", &scores, 16 + 9), "3.3.f3");
        assert_eq!(plan("tq4:3nats+tq3", &[0.0, f32::NAN, -1.0], 3), "3..");
        assert_eq!(plan("tq4", &[], 3), "");
    }

    #[test]
    fn what_is_settled_keeps_its_kind() {
        let tiers: Tiers = "tq4:3nats+tq3".parse().unwrap();
        let pages = [(0.5, Some(TQ3)), (0.4, None), (0.001, Some(TQ4))].map(|(score, kind)| TierPage { score, kind });
        assert_eq!(tiers.plan(&pages, weight, 13), [Some(TQ3), Some(TQ4), Some(TQ4)]);
        assert_eq!(tiers.plan(&pages, weight, 12), [Some(TQ3), Some(TQ4), None]);
    }

    #[test]
    fn tiers_print_what_they_parse_from() {
        for text in ["f16", "tq4", "tq3v2", "tq4:3nats+tq3v2", "tq4:2.5nats+tq3", "f16:0.03+tq3", "q8_0:1+q8_0/tq4"] {
            assert_eq!(text.parse::<Tiers>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "tq5",
            "tq4:tq3",
            "tq4:3+tq3",
            "tq4:-1nats+tq3",
            "tq4:NaNnats+tq3",
            "tq3:3nats+tq4",
            "tq4:3nats+",
            "tq4+tq3",
        ] {
            assert_eq!(text.parse::<Tiers>(), Err(()), "{text}");
        }
    }

    fn tiers() -> impl Strategy<Value = Tiers> {
        prop_oneof![
            Just("tq4"),
            Just("tq4:3nats+tq3"),
            Just("tq4:0nats+tq3"),
            Just("f16:0.2+tq4"),
            Just("f16:1nats+tq3"),
            Just("tq4:0+tq3"),
        ]
        .prop_map(|text| text.parse().unwrap())
    }

    fn pages() -> impl Strategy<Value = Vec<TierPage>> {
        let score = prop_oneof![9 => (0..40_u8).prop_map(|x| f32::from(x) / 8.0), 1 => Just(f32::NAN)];
        let kind = prop_oneof![6 => Just(None), 1 => Just(Some(TQ3)), 1 => Just(Some(TQ4))];
        prop::collection::vec((score, kind).prop_map(|(score, kind)| TierPage { score, kind }), 0..40)
    }

    fn total(plan: &[Option<PageKind>]) -> u64 {
        plan.iter().flatten().map(|&kind| weight(kind)).sum()
    }

    proptest! {
        #[test]
        fn a_plan_never_passes_its_room(tiers in tiers(), pages in pages(), room in 0..300_u64) {
            prop_assert!(total(&tiers.plan(&pages, weight, room)) <= room);
        }

        #[test]
        fn a_plan_leaves_no_room_for_another_page(tiers in tiers(), pages in pages(), room in 0..300_u64) {
            let pages: Vec<TierPage> = pages.into_iter().map(|page| TierPage { kind: None, ..page }).collect();
            let plan = tiers.plan(&pages, weight, room);
            let left = room - total(&plan);
            let low = tiers.rest.map_or(tiers.top, |rest| rest.kind);
            if plan.contains(&Some(low)) && low != tiers.top {
                prop_assert!(left < weight(tiers.top) - weight(low));
            }
            if let (true, None) = (plan.contains(&None), tiers.rest) {
                prop_assert!(left < weight(low));
            }
        }

        #[test]
        fn better_pages_are_of_better_kinds(tiers in tiers(), pages in pages(), room in 0..300_u64) {
            let pages: Vec<TierPage> = pages.into_iter().map(|page| TierPage { kind: None, ..page }).collect();
            let plan = tiers.plan(&pages, weight, room);
            for (a, kind_a) in pages.iter().zip(&plan) {
                for (b, kind_b) in pages.iter().zip(&plan) {
                    if rank(a.score) > rank(b.score) {
                        prop_assert!(kind_a.map_or(0, weight) >= kind_b.map_or(0, weight));
                    }
                }
            }
        }
    }
}
