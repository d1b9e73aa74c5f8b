//! Which pages stay: a total order (higher score, then lower page), pinned pages first.
//!
//! Invariants:
//! 1. `select_pages` and `select_tokens` keep exactly `min(k, number there is)`.
//! 2. The same scores and pins give the same pages: ties break by the lower page, NaN scores lose to every number.
//! 3. `pages_to_evict` never names a pinned page.

use std::cmp::Ordering;

/// Indices into a list of pages, ascending and without repeats.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageSet(Vec<usize>);

impl PageSet {
    /// The set of the given indices, in any order, repeats allowed.
    #[must_use]
    pub fn new(mut indices: Vec<usize>) -> Self {
        indices.sort_unstable();
        indices.dedup();
        Self(indices)
    }

    /// The indices, ascending.
    #[must_use]
    pub fn as_slice(&self) -> &[usize] {
        &self.0
    }

    /// Number of pages in the set.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the set holds no page.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether page `index` is in the set.
    #[must_use]
    pub fn contains(&self, index: usize) -> bool {
        self.0.binary_search(&index).is_ok()
    }

    /// The indices, ascending.
    pub fn iter(&self) -> std::iter::Copied<std::slice::Iter<'_, usize>> {
        self.0.iter().copied()
    }
}

impl<'a> IntoIterator for &'a PageSet {
    type Item = usize;
    type IntoIter = std::iter::Copied<std::slice::Iter<'a, usize>>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// The `k` pages to keep out of `scores.len()`: rule R10 of the golden files.
///
/// Pinned pages come first, in the order given, until `k` is reached; the rest by the largest score, ties to the
/// smaller index. Repeats in `pinned` and indices that name no page are skipped. NaN scores lose to every number.
#[must_use]
pub fn select_pages(scores: &[f32], k: usize, pinned: &[usize]) -> PageSet {
    select(scores, k, pinned, better_first)
}

/// As [`select_pages`] for single tokens, ascending by position: of equal scores the more recent token stays.
#[must_use]
pub fn select_tokens(scores: &[f32], k: usize, pinned: &[usize]) -> PageSet {
    select(scores, k, pinned, |scores, a, b| rank(scores[b]).total_cmp(&rank(scores[a])).then(b.cmp(&a)))
}

fn select(scores: &[f32], k: usize, pinned: &[usize], order: impl Fn(&[f32], usize, usize) -> Ordering) -> PageSet {
    let k = k.min(scores.len());
    let mut is_pinned = vec![false; scores.len()];
    let mut kept = Vec::with_capacity(k);
    for &index in pinned {
        if kept.len() == k {
            break;
        }
        if index < scores.len() && !is_pinned[index] {
            is_pinned[index] = true;
            kept.push(index);
        }
    }
    let mut others: Vec<usize> = (0..scores.len()).filter(|&index| !is_pinned[index]).collect();
    let wanted = k - kept.len();
    if wanted > 0 && wanted < others.len() {
        others.select_nth_unstable_by(wanted - 1, |&a, &b| order(scores, a, b));
    }
    kept.extend_from_slice(&others[..wanted]);
    PageSet::new(kept)
}

/// The pages to give up, in the order to give them up, so that at most `keep` of `scores.len()` are held.
///
/// Unpinned pages only, the last of the total order first: the lowest score, ties to the higher index. Fewer than
/// asked for when the pins alone exceed `keep`.
#[must_use]
pub fn pages_to_evict(scores: &[f32], pinned: &[usize], keep: usize) -> Vec<usize> {
    let surplus = scores.len().saturating_sub(keep);
    if surplus == 0 {
        return Vec::new();
    }
    let mut is_pinned = vec![false; scores.len()];
    for &index in pinned {
        if let Some(pin) = is_pinned.get_mut(index) {
            *pin = true;
        }
    }
    let mut free: Vec<usize> = (0..scores.len()).filter(|&index| !is_pinned[index]).collect();
    free.sort_unstable_by(|&a, &b| better_first(scores, b, a));
    free.truncate(surplus);
    free
}

/// The total order of pages: the larger score first, then the smaller index.
fn better_first(scores: &[f32], a: usize, b: usize) -> Ordering {
    rank(scores[b]).total_cmp(&rank(scores[a])).then(a.cmp(&b))
}

/// A score as `total_cmp` should see it: both zeros alike, and NaN of either sign below minus infinity.
pub(crate) fn rank(score: f32) -> f32 {
    if score.is_nan() { f32::NAN.copysign(-1.0) } else { score + 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_come_first_then_the_largest_scores_then_the_lower_page() {
        struct Case {
            name: &'static str,
            scores: &'static [f32],
            k: usize,
            pinned: &'static [usize],
            kept: &'static [usize],
        }
        const NAN: f32 = f32::NAN;
        const LOW: f32 = f32::NEG_INFINITY;
        let cases = [
            Case { name: "largest", scores: &[0.1, 0.4, 0.2, 0.3], k: 2, pinned: &[], kept: &[1, 3] },
            Case { name: "ties to the lower page", scores: &[0.5, 0.5, 0.5, 0.5], k: 2, pinned: &[], kept: &[0, 1] },
            Case { name: "both zeros tie", scores: &[-0.0, 0.0, 0.0], k: 1, pinned: &[], kept: &[0] },
            Case { name: "pins inside the budget", scores: &[0.1, 0.9, 0.8, 0.2], k: 2, pinned: &[0], kept: &[0, 1] },
            Case { name: "forcing stops at k", scores: &[0.1, 0.9, 0.8, 0.2], k: 2, pinned: &[0, 3, 2], kept: &[0, 3] },
            Case { name: "a pin counts once", scores: &[0.1, 0.9, 0.8], k: 2, pinned: &[0, 0], kept: &[0, 1] },
            Case { name: "a pin of no page", scores: &[0.1, 0.9, 0.8], k: 2, pinned: &[7], kept: &[1, 2] },
            Case { name: "NaN loses to -inf", scores: &[NAN, LOW, -NAN], k: 1, pinned: &[], kept: &[1] },
            Case { name: "NaNs tie", scores: &[-NAN, NAN], k: 1, pinned: &[], kept: &[0] },
            Case { name: "more than there are", scores: &[0.1, 0.2], k: 9, pinned: &[1], kept: &[0, 1] },
            Case { name: "none", scores: &[0.1, 0.2], k: 0, pinned: &[1], kept: &[] },
            Case { name: "no pages", scores: &[], k: 3, pinned: &[0], kept: &[] },
        ];
        for case in cases {
            assert_eq!(select_pages(case.scores, case.k, case.pinned).as_slice(), case.kept, "{}", case.name);
        }
    }

    #[test]
    fn eviction_takes_the_lowest_unpinned_page_and_of_equals_the_higher() {
        let scores = [0.0, 0.3, 0.1, 0.1, 0.0];
        assert_eq!(pages_to_evict(&scores, &[0, 4], 4), [3]);
        assert_eq!(pages_to_evict(&scores, &[0, 4], 2), [3, 2, 1]);
        assert_eq!(pages_to_evict(&scores, &[0, 4], 0), [3, 2, 1], "pins are never given up");
        assert_eq!(pages_to_evict(&scores, &[], 4), [4]);
        assert!(pages_to_evict(&scores, &[], 5).is_empty());
    }

    #[test]
    fn of_tokens_with_equal_scores_the_more_recent_stay() {
        assert_eq!(select_tokens(&[0.5; 5], 2, &[]).as_slice(), [3, 4]);
        assert_eq!(select_tokens(&[0.5; 5], 3, &[0]).as_slice(), [0, 3, 4]);
        assert_eq!(select_tokens(&[0.1, 0.9, f32::NAN, 0.9, 0.9], 2, &[]).as_slice(), [3, 4]);
        assert_eq!(select_tokens(&[f32::NAN, f32::NEG_INFINITY, f32::NAN], 2, &[]).as_slice(), [1, 2]);
        assert_eq!(select_tokens(&[0.1, 0.2], 9, &[0]).as_slice(), [0, 1]);
    }

    #[test]
    fn evicting_and_selecting_agree() {
        let scores = [0.2, 0.1, f32::NAN, 0.1, 0.7, 0.2, 0.0];
        let pinned = [0, 6];
        for keep in pinned.len()..=scores.len() {
            let evicted = pages_to_evict(&scores, &pinned, keep);
            let kept = PageSet::new((0..scores.len()).filter(|index| !evicted.contains(index)).collect());
            assert_eq!(kept, select_pages(&scores, keep, &pinned), "keep {keep}");
        }
    }
}
