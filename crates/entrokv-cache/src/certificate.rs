//! What similarities prove about a union without forming it, and what entropies prove about a page's survival.
//!
//! With `r` sets of `k` elements, `J` their mean Jaccard similarity and `f(J) = 2J / (1 + J)`, the share of a set that a
//! pair of similarity `J` has in common; `f` is increasing and concave, so the mean of `f` is at most `f` of the mean.
//! Every bound is on the union overhead ratio `|U| / k`, and needs sets of one size but for [`ragged_union_bounds`].

use crate::overlap::{Overlap, intersection_len};

/// The share of a set that a pair of similarity `jaccard` has in common.
fn shared(jaccard: f64) -> f64 {
    2.0 * jaccard / (1.0 + jaccard)
}

/// Bonferroni's lower bound as the paper has it: `max(1, r - r (r - 1) J)`.
#[must_use]
pub fn bonferroni(num_sets: usize, mean_jaccard: f64) -> f64 {
    let r = num_sets as f64;
    (r - r * (r - 1.0) * mean_jaccard).max(1.0)
}

/// Bonferroni's lower bound without the step `f(J) <= 2J`: `max(1, r - r (r - 1) J / (1 + J))`.
#[must_use]
pub fn tight_bonferroni(num_sets: usize, mean_jaccard: f64) -> f64 {
    bonferroni(num_sets, shared(mean_jaccard) / 2.0)
}

/// The sandwich's lower bound, by Cauchy-Schwarz on multiplicities: `r / (1 + (r - 1) f(J))`.
#[must_use]
pub fn sandwich_lower(num_sets: usize, mean_jaccard: f64) -> f64 {
    let r = num_sets as f64;
    r / (1.0 + (r - 1.0) * shared(mean_jaccard))
}

/// The sandwich's upper bound, from the most similar pair: `min(r, r - f(J_max))`; the identity for two sets.
#[must_use]
pub fn sandwich_upper(num_sets: usize, max_jaccard: f64) -> f64 {
    num_sets as f64 - shared(max_jaccard)
}

/// Dawson and Sankoff's lower bound, the best from `S1 = r` and `S2 = r (r - 1) f(J) / 2` alone:
/// `2 S1 / (m + 1) - 2 S2 / (m (m + 1))` with `m = 1 + floor(2 S2 / S1)`. Never below the others.
#[must_use]
pub fn dawson_sankoff(num_sets: usize, mean_jaccard: f64) -> f64 {
    let r = num_sets as f64;
    let pairs = r * (r - 1.0) / 2.0 * shared(mean_jaccard);
    // The bound is continuous where m steps, so a rounded quotient does no harm.
    let m = 1.0 + (2.0 * pairs / r).floor();
    2.0 * r / (m + 1.0) - 2.0 * pairs / (m * (m + 1.0))
}

/// Lower bound from the mean intersection `I` over `k`: `r / (1 + (r - 1) I)`.
#[must_use]
pub fn intersection_lower(num_sets: usize, mean_intersection: f64) -> f64 {
    let r = num_sets as f64;
    r / (1.0 + (r - 1.0) * mean_intersection)
}

/// Upper bound from the mean intersection `I` over `k`: `r - (r - 1) I`.
///
/// Hunter's bound `|U| <= sum |S| - sum over a tree of intersections`, averaged over all spanning trees; tight when sets
/// are disjoint and when they are equal.
#[must_use]
pub fn intersection_upper(num_sets: usize, mean_intersection: f64) -> f64 {
    let r = num_sets as f64;
    r - (r - 1.0) * mean_intersection
}

/// Largest mean Jaccard similarity at which [`bonferroni`] certifies a ratio of `factor`: `(r - x) / (r (r - 1))`.
#[must_use]
pub fn bonferroni_threshold(num_sets: usize, factor: f64) -> f64 {
    let r = num_sets as f64;
    (r - factor) / (r * (r - 1.0))
}

/// Largest mean Jaccard similarity at which [`tight_bonferroni`] certifies a ratio of `factor`.
#[must_use]
pub fn tight_bonferroni_threshold(num_sets: usize, factor: f64) -> f64 {
    let half_shared = bonferroni_threshold(num_sets, factor);
    half_shared / (1.0 - half_shared)
}

/// Largest mean Jaccard similarity at which [`sandwich_lower`] certifies a ratio of `factor`: `y / (2 - y)` with
/// `y = (r - x) / (x (r - 1))`.
#[must_use]
pub fn sandwich_threshold(num_sets: usize, factor: f64) -> f64 {
    let r = num_sets as f64;
    let share = (r - factor) / (factor * (r - 1.0));
    share / (2.0 - share)
}

/// Every certificate of one group's union overhead ratio.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Certificates {
    /// [`bonferroni`].
    pub bonferroni: f64,
    /// [`tight_bonferroni`].
    pub tight_bonferroni: f64,
    /// [`sandwich_lower`].
    pub sandwich_lower: f64,
    /// [`sandwich_upper`].
    pub sandwich_upper: f64,
    /// [`dawson_sankoff`].
    pub dawson_sankoff: f64,
    /// [`intersection_lower`].
    pub intersection_lower: f64,
    /// [`intersection_upper`].
    pub intersection_upper: f64,
}

impl Certificates {
    /// The certificates of a measured overlap.
    #[must_use]
    pub fn of(overlap: &Overlap) -> Self {
        let num_sets = overlap.num_sets;
        Self {
            bonferroni: bonferroni(num_sets, overlap.mean_jaccard),
            tight_bonferroni: tight_bonferroni(num_sets, overlap.mean_jaccard),
            sandwich_lower: sandwich_lower(num_sets, overlap.mean_jaccard),
            sandwich_upper: sandwich_upper(num_sets, overlap.max_jaccard),
            dawson_sankoff: dawson_sankoff(num_sets, overlap.mean_jaccard),
            intersection_lower: intersection_lower(num_sets, overlap.mean_intersection),
            intersection_upper: intersection_upper(num_sets, overlap.mean_intersection),
        }
    }

    /// The largest lower bound.
    #[must_use]
    pub fn lower(&self) -> f64 {
        let bounds = [self.tight_bonferroni, self.sandwich_lower, self.dawson_sankoff, self.intersection_lower];
        bounds.into_iter().fold(self.bonferroni, f64::max)
    }

    /// The smallest upper bound.
    #[must_use]
    pub fn upper(&self) -> f64 {
        self.sandwich_upper.min(self.intersection_upper)
    }
}

/// Bounds on the size of a union of sets of any size, each strictly ascending, in elements: `(lower, upper)` with
/// `(sum |S|)^2 / sum_ij |S_i ∩ S_j| <= |U| <= sum |S| - (heaviest spanning tree of intersections)`.
#[must_use]
pub fn ragged_union_bounds<T: Ord>(sets: &[impl AsRef<[T]>]) -> (usize, usize) {
    let sizes: Vec<usize> = sets.iter().map(|set| set.as_ref().len()).collect();
    let total: usize = sizes.iter().sum();
    if total == 0 {
        return (0, 0);
    }
    let shared = |a: usize, b: usize| intersection_len(sets[a].as_ref(), sets[b].as_ref());
    let pairs: usize = (0..sets.len()).map(|a| (0..a).map(|b| shared(a, b)).sum::<usize>()).sum();
    let second_moment = (total + 2 * pairs) as u128;
    let lower = (total as u128 * total as u128).div_ceil(second_moment) as usize;

    // Prim's algorithm: `best[set]` is the heaviest edge from the tree to a set outside it.
    let mut best: Vec<Option<usize>> = (0..sets.len()).map(|set| Some(shared(0, set))).collect();
    best[0] = None;
    let mut tree = 0;
    while let Some((weight, next)) = best.iter().enumerate().filter_map(|(set, edge)| edge.map(|w| (w, set))).max() {
        tree += weight;
        best[next] = None;
        for (set, edge) in best.iter_mut().enumerate() {
            *edge = edge.map(|weight| weight.max(shared(next, set)));
        }
    }
    (lower, total - tree)
}

/// Theorem 4 with its finite-context terms: one retrieval head among siblings that know nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct FiniteContext {
    /// `N`: tokens off the sinks.
    pub residual_tokens: u64,
    /// `tau`: temperature of the head weights.
    pub tau: f64,
    /// `epsilon`: the retrieval head puts at least `1 - epsilon` on the needle.
    pub epsilon: f64,
    /// `eta`: the retrieval head's entropy is at most this, in nats.
    pub eta: f64,
    /// `c_j` of each sibling: its entropy is at least `ln N - c_j`; 0 is exactly uniform.
    pub sibling_deficits: Vec<f64>,
}

impl FiniteContext {
    /// `D = sum_j e^(c_j / tau) N^(-1 / tau)`: what the siblings weigh against a head without entropy.
    #[must_use]
    pub fn sibling_weight(&self) -> f64 {
        let uniform = (self.residual_tokens as f64).powf(-1.0 / self.tau);
        self.sibling_deficits.iter().map(|deficit| (deficit / self.tau).exp() * uniform).sum()
    }

    /// `Delta = (1 - epsilon) e^(eta / tau) D`: the most that pooling takes from the needle's mass.
    #[must_use]
    pub fn loss(&self) -> f64 {
        (1.0 - self.epsilon) * (self.eta / self.tau).exp() * self.sibling_weight()
    }

    /// The needle's pooled mass is at least this: `(1 - epsilon) / (1 + e^(eta / tau) D)`, which is at least
    /// `(1 - epsilon) - Delta`.
    #[must_use]
    pub fn pooled_mass(&self) -> f64 {
        (1.0 - self.epsilon) / (1.0 + (self.eta / self.tau).exp() * self.sibling_weight())
    }

    /// What the arithmetic mean is sure to leave of the needle's mass: `(1 - epsilon) / r`.
    #[must_use]
    pub fn mean_mass(&self) -> f64 {
        (1.0 - self.epsilon) / (self.sibling_deficits.len() + 1) as f64
    }
}

/// A token whose pooled score exceeds this keeps its page under block-max, when `k_pages` pages are kept, `num_pinned` of
/// them whatever their score: `1 / (k_pages - num_pinned + 1)`.
///
/// Otherwise that many pages and its own would each hold a token of at least its score, a total mass above 1. With no
/// room beside the pins nothing is sure, and the threshold is infinite.
#[must_use]
pub fn survival_threshold(k_pages: usize, num_pinned: usize) -> f64 {
    let free = k_pages.saturating_sub(num_pinned);
    if free == 0 { f64::INFINITY } else { 1.0 / (free + 1) as f64 }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::overlap::union_len;

    /// Bounds and ratios are a few f64 operations from integers.
    const ROUNDING: f64 = 1e-12;

    #[test]
    fn table_2_thresholds_are_exact() {
        let close = |got: f64, expected: f64| assert!((got - expected).abs() < 1e-15, "{got} is not {expected}");
        close(bonferroni_threshold(4, 2.0), 1.0 / 6.0);
        close(bonferroni_threshold(8, 2.0), 3.0 / 28.0);
        close(sandwich_threshold(4, 2.0), 1.0 / 5.0);
        close(sandwich_threshold(8, 2.0), 3.0 / 11.0);
        for r in 2..40 {
            close(sandwich_threshold(r, 2.0), (r - 2) as f64 / (3 * r - 2) as f64);
        }
        // At r = 3 the sandwich certifies less than Bonferroni, and the tight form more than either.
        close(sandwich_threshold(3, 2.0), 1.0 / 7.0);
        close(bonferroni_threshold(3, 2.0), 1.0 / 6.0);
        close(tight_bonferroni_threshold(3, 2.0), 1.0 / 5.0);
        let printed = [(6, 0.1333, 0.2500), (7, 0.1190, 0.2632), (8, 0.1071, 0.2727)];
        for (r, bonferroni, sandwich) in printed {
            assert!((bonferroni_threshold(r, 2.0) - bonferroni).abs() < 5e-5, "r = {r}");
            assert!((sandwich_threshold(r, 2.0) - sandwich).abs() < 5e-5, "r = {r}");
        }
        for r in 3..12 {
            for factor in [1.5, 2.0, 2.5] {
                close(bonferroni(r, bonferroni_threshold(r, factor)), factor);
                let tight = tight_bonferroni(r, tight_bonferroni_threshold(r, factor));
                assert!((tight - factor).abs() < ROUNDING);
                assert!((sandwich_lower(r, sandwich_threshold(r, factor)) - factor).abs() < ROUNDING);
            }
        }
    }

    #[test]
    fn table_10_digits_follow_from_theorem_4() {
        struct Row {
            tokens: u64,
            sibling_weight: &'static str,
            loss: &'static str,
        }
        let row = |tokens, sibling_weight, loss| Row { tokens, sibling_weight, loss };
        // Exact values to five digits. The paper prints 9.92e-8, 6.20e-9 and 4.08e-10 by dividing rounded cells by 4, and
        // a last loss of 1.63e-9, which lacks the factor 0.95.
        let rows = [
            row(4096, "4.1805e-7", "1.5886e-6"),
            row(8192, "1.0441e-7", "3.9676e-7"),
            row(16384, "2.6090e-8", "9.9141e-8"),
            row(32768, "6.5208e-9", "2.4779e-8"),
            row(65536, "1.6300e-9", "6.1941e-9"),
            row(131_072, "4.0748e-10", "1.5484e-9"),
        ];
        for row in rows {
            let context = FiniteContext {
                residual_tokens: row.tokens - 4,
                tau: 0.5,
                epsilon: 0.05,
                eta: 2f64.ln(),
                sibling_deficits: vec![0.0; 7],
            };
            assert_eq!(format!("{:.4e}", context.sibling_weight()), row.sibling_weight, "D at {}", row.tokens);
            assert_eq!(format!("{:.4e}", context.loss()), row.loss, "Delta at {}", row.tokens);
            let pooled = context.pooled_mass();
            assert!(pooled >= 0.95 - context.loss() && pooled <= 0.95);
            assert_eq!(format!("{:.5} {:.2}", context.mean_mass(), pooled / context.mean_mass()), "0.11875 8.00");
        }
    }

    #[test]
    fn theorem_4_degrades_as_siblings_peak() {
        // r = 6, T = 2048: the linear bound of the theorem, which the quotient never undercuts.
        for (deficit, printed) in [(4.0, "0.936"), (5.0, "0.850"), (6.0, "0.210")] {
            let context = FiniteContext {
                residual_tokens: 2044,
                tau: 0.5,
                epsilon: 0.05,
                eta: 2f64.ln(),
                sibling_deficits: vec![deficit; 5],
            };
            assert_eq!(format!("{:.3}", 0.95 - context.loss()), printed);
            assert!(context.pooled_mass() >= 0.95 - context.loss());
        }
    }

    #[test]
    fn bounds_are_tight_where_they_should_be() {
        let consensus = Overlap::measure(&vec![vec![1, 2, 3]; 6]).unwrap();
        let certificates = Certificates::of(&consensus);
        assert_eq!((certificates.lower(), certificates.upper()), (1.0, 1.0));
        assert_eq!(certificates.sandwich_upper, 5.0, "the paper's upper bound is not tight at consensus");
        let disjoint: Vec<Vec<u32>> = (0..6).map(|set| vec![2 * set, 2 * set + 1]).collect();
        let certificates = Certificates::of(&Overlap::measure(&disjoint).unwrap());
        assert_eq!((certificates.lower(), certificates.upper()), (6.0, 6.0));
        let nested = [vec![0], (0..20).collect::<Vec<u32>>()];
        assert_eq!(ragged_union_bounds(&nested), (20, 20));
        let none: [Vec<u32>; 0] = [];
        assert_eq!(ragged_union_bounds(&none), (0, 0));
    }

    #[test]
    fn nothing_is_sure_without_room_beside_the_pins() {
        assert_eq!(survival_threshold(1, 1), f64::INFINITY);
        assert_eq!(survival_threshold(0, 0), f64::INFINITY);
        assert_eq!(survival_threshold(1, 0), 0.5);
        assert_eq!(survival_threshold(8, 1), 0.125);
    }

    /// `num_sets` sets of `len` out of `0..range`, some of them near copies of the first so that overlaps vary.
    fn equal_sets() -> impl Strategy<Value = Vec<Vec<u32>>> {
        (2usize..9, 1usize..13, 0u32..40, any::<u64>()).prop_map(|(num_sets, len, extra, seed)| {
            let range = len as u32 + extra;
            let mut state = seed;
            let mut next = |limit: u32| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                ((state >> 33) % u64::from(limit)) as u32
            };
            (0..num_sets)
                .map(|_| {
                    // The skew of one draw's limit makes low elements common to many sets.
                    let mut set = Vec::new();
                    while set.len() < len {
                        let limit = next(range) + 1;
                        let element = next(limit);
                        if !set.contains(&element) {
                            set.push(element);
                        }
                    }
                    set.sort_unstable();
                    set
                })
                .collect()
        })
    }

    proptest! {
        /// Property 7: every certificate holds against the union itself.
        #[test]
        fn certificates_hold(sets in equal_sets()) {
            let overlap = Overlap::measure(&sets).unwrap();
            let certificates = Certificates::of(&overlap);
            let ratio = overlap.union_overhead_ratio();
            let lower = [
                certificates.bonferroni,
                certificates.tight_bonferroni,
                certificates.sandwich_lower,
                certificates.dawson_sankoff,
                certificates.intersection_lower,
            ];
            for (index, bound) in lower.into_iter().enumerate() {
                prop_assert!(bound <= ratio + ROUNDING, "lower bound {} is {} over {}", index, bound, ratio);
            }
            for bound in [certificates.sandwich_upper, certificates.intersection_upper] {
                prop_assert!(bound >= ratio - ROUNDING, "upper bound {} under {}", bound, ratio);
            }
            prop_assert!(certificates.dawson_sankoff >= certificates.tight_bonferroni.max(certificates.sandwich_lower) - ROUNDING);
            prop_assert!(certificates.tight_bonferroni >= certificates.bonferroni - ROUNDING);
            let (least, most) = ragged_union_bounds(&sets);
            prop_assert!((least..=most).contains(&overlap.union_len));
        }

        #[test]
        fn ragged_bounds_hold(sets in prop::collection::vec(prop::collection::btree_set(0u32..30, 0..15), 1..8)) {
            let sets: Vec<Vec<u32>> = sets.into_iter().map(|set| set.into_iter().collect()).collect();
            let (least, most) = ragged_union_bounds(&sets);
            let union = union_len(&sets);
            prop_assert!((least..=most).contains(&union), "{} not in {}..={}", union, least, most);
        }

        /// Proposition 4: `ceil(|U| / B) <= |P(U)| <= min(|U|, n)`.
        #[test]
        fn page_unions_are_bounded(sets in prop::collection::vec(prop::collection::btree_set(0u32..100, 1..20), 1..6), page_size in 1u32..20) {
            let sets: Vec<Vec<u32>> = sets.into_iter().map(|set| set.into_iter().collect()).collect();
            let union = union_len(&sets);
            let touched = crate::overlap::page_union_ratio(&sets, 1, page_size);
            let num_pages = 100u32.div_ceil(page_size) as usize;
            prop_assert!(touched >= union.div_ceil(page_size as usize) as f64);
            prop_assert!(touched <= union.min(num_pages) as f64);
        }
    }
}
