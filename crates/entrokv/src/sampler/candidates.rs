//! The tokens still in the running for one draw, and the cuts that narrow them.
//!
//! Invariant: every step is a function of the set of (id, logit) pairs alone. Candidates are in ascending id until a
//! cut ranks them, and ranked by descending logit, then ascending id, from then on; that order is total, so neither a
//! partial selection nor an unstable sort can leave its mark on sums or draws.

use std::cmp::Ordering;

/// Logits that are looked at together: 16 comparisons of 16 lanes.
pub(super) const BLOCK: usize = 256;

/// The largest of `logits`, which are not NaN; minus infinity of none.
pub(super) fn largest(logits: &[f32]) -> f32 {
    // Lanes of their own, so that the compiler may use vectors: one running maximum would be a chain of dependent steps.
    let (whole, rest) = logits.as_chunks::<16>();
    let mut lanes = [f32::NEG_INFINITY; 16];
    for logits in whole {
        lanes = std::array::from_fn(|i| if logits[i] > lanes[i] { logits[i] } else { lanes[i] });
    }
    lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a })
}

/// A token and its logit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Candidate {
    pub(super) id: u32,
    /// Finite, and never negative zero, so that bitwise order is numeric order.
    pub(super) logit: f32,
}

impl Candidate {
    /// Adding zero turns -0 into +0.
    fn new(id: u32, logit: f32) -> Self {
        Self { id, logit: logit + 0.0 }
    }

    /// Likelier first, of equals the lower id.
    fn rank(&self, other: &Self) -> Ordering {
        other.logit.total_cmp(&self.logit).then(self.id.cmp(&other.id))
    }
}

/// A reusable list of candidates; no cut leaves it empty.
#[derive(Debug, Clone, Default)]
pub(super) struct Candidates {
    list: Vec<Candidate>,
}

impl Candidates {
    /// Takes every token whose logit is above minus infinity.
    pub(super) fn load(&mut self, logits: &[f32]) {
        self.list.clear();
        let allowed = (0u32..).zip(logits).filter(|(_, logit)| **logit > f32::NEG_INFINITY);
        self.list.extend(allowed.map(|(id, &logit)| Candidate::new(id, logit)));
    }

    /// [`Self::load`], then [`Self::keep_top_k`], without a list of the whole vocabulary.
    ///
    /// Of the blocks' largest logits the `k`-th largest is a floor: as many blocks hold a logit that is not below it, so
    /// none of the `k` likeliest is. What is not below it is usually little more than `k` tokens.
    pub(super) fn load_top_k(&mut self, logits: &[f32], k: usize) {
        self.list.clear();
        let largest: Vec<f32> = logits.chunks(BLOCK).map(largest).collect();
        let floor = match k.max(1) {
            k if k <= largest.len() => *largest.clone().select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1,
            _ => f32::NEG_INFINITY,
        };
        for ((block, largest), number) in logits.chunks(BLOCK).zip(largest).zip(0u32..) {
            if largest >= floor {
                let above = |logit: f32| logit >= floor && logit > f32::NEG_INFINITY;
                let candidates = (number * BLOCK as u32..).zip(block).filter(|(_, logit)| above(**logit));
                self.list.extend(candidates.map(|(id, &logit)| Candidate::new(id, logit)));
            }
        }
        self.keep_top_k(k);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Keeps the `k` likeliest; O(n + k log k).
    pub(super) fn keep_top_k(&mut self, k: usize) {
        let k = k.max(1);
        if k < self.list.len() {
            self.list.select_nth_unstable_by(k - 1, Candidate::rank);
            self.list.truncate(k);
        }
        self.list.sort_unstable_by(Candidate::rank);
    }

    /// Keeps the fewest likeliest whose probabilities at temperature 1 sum to `mass`, at least one.
    ///
    /// Ranks block by block, each four times the last, and stops where the mass is reached: O(n) for the peaked
    /// distributions of language models, O(n log n) at worst.
    pub(super) fn keep_top_p(&mut self, mass: f32) {
        let max = self.max_logit();
        let weight = |candidate: &Candidate| relative_weight(candidate.logit, max, 1.0);
        let target = f64::from(mass) * self.list.iter().map(weight).sum::<f64>();
        let (mut ranked, mut block, mut sum) = (0, 64, 0.0);
        while ranked < self.list.len() {
            let rest = &mut self.list[ranked..];
            let block_len = block.min(rest.len());
            if block_len < rest.len() {
                rest.select_nth_unstable_by(block_len - 1, Candidate::rank);
            }
            rest[..block_len].sort_unstable_by(Candidate::rank);
            for (offset, candidate) in rest[..block_len].iter().enumerate() {
                sum += weight(candidate);
                if sum >= target {
                    self.list.truncate(ranked + offset + 1);
                    return;
                }
            }
            ranked += block_len;
            block *= 4;
        }
    }

    /// Keeps those at least `ratio` times as likely as the likeliest.
    pub(super) fn keep_min_p(&mut self, ratio: f32) {
        let threshold = f64::from(self.max_logit()) + f64::from(ratio).ln();
        self.list.retain(|candidate| f64::from(candidate.logit) >= threshold);
    }

    /// Draws one token by its probability at `temperature`; `uniform` in [0, 1) decides.
    pub(super) fn draw(&self, temperature: f32, uniform: f64) -> u32 {
        let max = self.max_logit();
        let weight = |candidate: &Candidate| relative_weight(candidate.logit, max, temperature);
        let mut left = uniform * self.list.iter().map(weight).sum::<f64>();
        let mut drawn = None;
        for candidate in &self.list {
            let weight = weight(candidate);
            if weight > 0.0 {
                drawn = Some(candidate.id);
                if left < weight {
                    break;
                }
                left -= weight;
            }
        }
        // Rounding can leave a trace of `left` after the last weight; then the last possible token is drawn.
        drawn.expect("the likeliest candidate weighs 1")
    }

    fn max_logit(&self) -> f32 {
        self.list.iter().map(|candidate| candidate.logit).fold(f32::NEG_INFINITY, f32::max)
    }

    #[cfg(test)]
    pub(super) fn list(&self) -> &[Candidate] {
        &self.list
    }
}

/// Probability relative to the likeliest token's, at `temperature` above 0.
fn relative_weight(logit: f32, max: f32, temperature: f32) -> f64 {
    ((f64::from(logit) - f64::from(max)) / f64::from(temperature)).exp()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn loaded(logits: &[f32]) -> Candidates {
        let mut candidates = Candidates::default();
        candidates.load(logits);
        candidates
    }

    fn ids(candidates: &Candidates) -> Vec<u32> {
        candidates.list().iter().map(|candidate| candidate.id).collect()
    }

    /// Every token by rank, sorted in full.
    fn ranked(logits: &[f32]) -> Vec<u32> {
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        order.sort_by(|a, b| logits[*b as usize].partial_cmp(&logits[*a as usize]).unwrap().then(a.cmp(b)));
        order
    }

    fn probabilities(logits: &[f32]) -> Vec<f64> {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weights: Vec<f64> = logits.iter().map(|logit| (f64::from(*logit) - f64::from(max)).exp()).collect();
        let sum: f64 = weights.iter().sum();
        weights.iter().map(|weight| weight / sum).collect()
    }

    #[test]
    fn top_k_breaks_ties_by_the_lower_id_and_zeros_of_either_sign_are_equal() {
        let mut candidates = loaded(&[0.0, 1.0, -0.0, 1.0, 0.0]);
        candidates.keep_top_k(4);
        assert_eq!(ids(&candidates), [1, 3, 0, 2]);
    }

    #[test]
    fn a_wholly_banned_vocabulary_leaves_no_candidate() {
        let mut candidates = Candidates::default();
        candidates.load_top_k(&[f32::NEG_INFINITY; 3 * BLOCK], 2);
        assert!(candidates.is_empty());
    }

    #[test]
    fn cuts_by_hand() {
        // Probabilities 1/2, 1/4, 1/8, 1/8.
        let logits = [8f32.ln(), 4f32.ln() + 1e-6, 2f32.ln() + 1e-6, 2f32.ln()].map(|x| x - 3.0);
        struct Case {
            cut: fn(&mut Candidates),
            kept: &'static [u32],
        }
        let cases = [
            Case { cut: |c| c.keep_top_p(0.0), kept: &[0] },
            Case { cut: |c| c.keep_top_p(0.49), kept: &[0] },
            Case { cut: |c| c.keep_top_p(0.51), kept: &[0, 1] },
            Case { cut: |c| c.keep_top_p(0.76), kept: &[0, 1, 2] },
            Case { cut: |c| c.keep_top_p(0.88), kept: &[0, 1, 2, 3] },
            Case { cut: |c| c.keep_min_p(1.0), kept: &[0] },
            Case { cut: |c| c.keep_min_p(0.5), kept: &[0, 1] },
            Case { cut: |c| c.keep_min_p(0.51), kept: &[0] },
            Case { cut: |c| c.keep_min_p(0.2), kept: &[0, 1, 2, 3] },
            Case { cut: |c| c.keep_top_k(1), kept: &[0] },
            Case { cut: |c| c.keep_top_k(9), kept: &[0, 1, 2, 3] },
        ];
        for (number, case) in cases.iter().enumerate() {
            let mut candidates = loaded(&logits);
            (case.cut)(&mut candidates);
            assert_eq!(ids(&candidates), case.kept, "case {number}");
        }
    }

    #[test]
    fn a_draw_at_the_edges_of_the_unit_interval_stays_in_the_list() {
        let mut candidates = loaded(&[0.0, f32::NEG_INFINITY, -2000.0, 0.0, -3000.0]);
        let just_under_one = 1.0 - f64::EPSILON / 2.0;
        assert_eq!((candidates.draw(1.0, 0.0), candidates.draw(1.0, just_under_one)), (0, 3));
        assert_eq!((candidates.draw(1.0, 0.49), candidates.draw(1.0, 0.51)), (0, 3));
        candidates.keep_top_k(1);
        assert_eq!(candidates.draw(f32::MAX, just_under_one), 0);
        assert_eq!(candidates.draw(f32::MIN_POSITIVE, just_under_one), 0);
    }

    /// Logits with many ties (few distinct values) and over many sizes of block.
    fn logits() -> impl Strategy<Value = Vec<f32>> {
        prop_oneof![
            prop::collection::vec((-40i8..40).prop_map(|x| f32::from(x) / 4.0), 1..600),
            prop::collection::vec(-12f32..12.0, 1..600),
        ]
    }

    proptest! {
        #[test]
        fn top_k_equals_a_full_sort(logits in logits(), k in 1usize..700) {
            let mut candidates = loaded(&logits);
            candidates.keep_top_k(k);
            prop_assert_eq!(ids(&candidates), &ranked(&logits)[..k.min(logits.len())]);
        }

        #[test]
        fn loading_the_top_k_equals_loading_all_and_keeping_them(
            mut logits in prop::collection::vec((-40i8..40).prop_map(|x| f32::from(x) / 4.0), 1..3000),
            banned in prop::collection::vec(any::<prop::sample::Index>(), 0..100),
            k in 1usize..30,
        ) {
            banned.iter().for_each(|at| *at.get_mut(&mut logits) = f32::NEG_INFINITY);
            let mut want = loaded(&logits);
            want.keep_top_k(k);
            let mut got = Candidates::default();
            got.load_top_k(&logits, k);
            prop_assert_eq!(got.list(), want.list());
        }

        #[test]
        fn top_p_keeps_the_shortest_ranked_prefix_that_reaches_the_mass(logits in logits(), mass in 0f32..1.0) {
            let mut candidates = loaded(&logits);
            candidates.keep_top_p(mass);
            let (kept, order) = (ids(&candidates), ranked(&logits));
            prop_assert_eq!(&kept[..], &order[..kept.len()]);
            let p = probabilities(&logits);
            let sum = |ids: &[u32]| ids.iter().map(|id| p[*id as usize]).sum::<f64>();
            // Sums in f64 over at most 600 terms of the unit interval.
            let slack = 1e-12;
            prop_assert!(sum(&kept) >= f64::from(mass) - slack, "too few: {} < {mass}", sum(&kept));
            let without_last = sum(&kept[..kept.len() - 1]);
            prop_assert!(kept.len() == 1 || without_last < f64::from(mass) + slack, "too many: {without_last}");
        }

        #[test]
        fn min_p_cuts_exactly_at_the_ratio(logits in logits(), ratio in 0.001f32..=1.0) {
            let mut candidates = loaded(&logits);
            candidates.keep_min_p(ratio);
            let p = probabilities(&logits);
            let largest = p.iter().copied().fold(0.0, f64::max);
            for (id, p) in (0u32..).zip(&p) {
                let (kept, relative) = (ids(&candidates).contains(&id), p / largest);
                // Within rounding of the ratio either answer is right.
                if (relative / f64::from(ratio) - 1.0).abs() > 1e-9 {
                    prop_assert_eq!(kept, relative > f64::from(ratio), "token {}: {} of {}", id, relative, ratio);
                }
            }
        }
    }
}
