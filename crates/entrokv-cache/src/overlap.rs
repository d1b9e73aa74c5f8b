//! How much the heads of a group agree: unions, Jaccard similarities, and the ratios made of them.
//!
//! Elements are tokens or pages alike; a set is a strictly ascending slice.

use std::cmp::Ordering;

use thiserror::Error;

/// Agreement of `r` sets of `k` elements each: what the heads of one KV group chose.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Overlap {
    /// `r`, the number of sets.
    pub num_sets: usize,
    /// `k`, the size of every set.
    pub set_len: usize,
    /// Size of the union of all sets.
    pub union_len: usize,
    /// Mean of the Jaccard similarity over unordered pairs; 0 for a single set.
    pub mean_jaccard: f64,
    /// Largest Jaccard similarity of a pair; 0 for a single set.
    pub max_jaccard: f64,
    /// Mean over unordered pairs of intersection size over `k`; 0 for a single set.
    pub mean_intersection: f64,
}

impl Overlap {
    /// Measures sets of equal size.
    ///
    /// # Errors
    /// [`OverlapError`] when there is no set, a set is empty or not strictly ascending, or sizes differ: certificates
    /// from mean similarities do not hold for ragged sets (1 page inside 20 would give a ratio of 1 under a bound of
    /// 1.8); see [`ragged_union_bounds`](crate::certificate::ragged_union_bounds).
    pub fn measure<T: Ord>(sets: &[impl AsRef<[T]>]) -> Result<Self, OverlapError> {
        let sets: Vec<&[T]> = sets.iter().map(AsRef::as_ref).collect();
        let set_len = sets.first().ok_or(OverlapError::NoSets)?.len();
        for (set, elements) in sets.iter().enumerate() {
            if elements.is_empty() {
                return Err(OverlapError::EmptySet { set });
            }
            if elements.len() != set_len {
                return Err(OverlapError::Ragged { set, got: elements.len(), first: set_len });
            }
            if !elements.is_sorted_by(|a, b| a < b) {
                return Err(OverlapError::NotAscending { set });
            }
        }
        let mut sum_jaccard = 0.0;
        let mut max_jaccard: f64 = 0.0;
        let mut sum_intersection = 0;
        for (index, a) in sets.iter().enumerate() {
            for b in &sets[index + 1..] {
                sum_intersection += intersection_len(a, b);
                sum_jaccard += jaccard(a, b);
                max_jaccard = max_jaccard.max(jaccard(a, b));
            }
        }
        let num_pairs = (sets.len() * (sets.len() - 1) / 2).max(1) as f64;
        Ok(Self {
            num_sets: sets.len(),
            set_len,
            union_len: union_len(&sets),
            mean_jaccard: sum_jaccard / num_pairs,
            max_jaccard,
            mean_intersection: sum_intersection as f64 / (num_pairs * set_len as f64),
        })
    }

    /// Union overhead ratio `|U| / k`, from 1 (consensus) to `r` (disjoint).
    #[must_use]
    pub fn union_overhead_ratio(&self) -> f64 {
        self.union_len as f64 / self.set_len as f64
    }

    /// Disagreement `D = 1 - mean Jaccard`.
    #[must_use]
    pub fn disagreement(&self) -> f64 {
        1.0 - self.mean_jaccard
    }
}

/// Number of elements two strictly ascending sets share.
#[must_use]
pub fn intersection_len<T: Ord>(a: &[T], b: &[T]) -> usize {
    let (mut a, mut b) = (a.iter().peekable(), b.iter().peekable());
    let mut shared = 0;
    while let (Some(x), Some(y)) = (a.peek(), b.peek()) {
        match x.cmp(y) {
            Ordering::Less => _ = a.next(),
            Ordering::Greater => _ = b.next(),
            Ordering::Equal => {
                shared += 1;
                a.next();
                b.next();
            }
        }
    }
    shared
}

/// Number of elements in any of the sets.
#[must_use]
pub fn union_len<T: Ord>(sets: &[impl AsRef<[T]>]) -> usize {
    let mut union: Vec<&T> = sets.iter().flat_map(|set| set.as_ref()).collect();
    union.sort_unstable();
    union.dedup();
    union.len()
}

/// Jaccard similarity of two strictly ascending sets, intersection over union; 1 for two empty sets.
#[must_use]
pub fn jaccard<T: Ord>(a: &[T], b: &[T]) -> f64 {
    let shared = intersection_len(a, b);
    let union = a.len() + b.len() - shared;
    if union == 0 { 1.0 } else { shared as f64 / union as f64 }
}

/// Page-union ratio (proposition 4): pages touched by any head's chosen tokens over the pages `k` tokens need,
/// `|P(U)| / ceil(k / B)`. Pages are touched whole, so choosing tokens head by head fragments.
///
/// `k` and `page_size` are in tokens; a `k` of 0 is taken as 1.
///
/// # Panics
/// When `page_size` is 0.
#[must_use]
pub fn page_union_ratio(token_sets: &[impl AsRef<[u32]>], k: usize, page_size: u32) -> f64 {
    let pages: Vec<Vec<u32>> =
        token_sets.iter().map(|set| set.as_ref().iter().map(|token| token / page_size).collect()).collect();
    union_len(&pages) as f64 / k.max(1).div_ceil(page_size as usize) as f64
}

/// Why an agreement cannot be measured.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum OverlapError {
    /// There is nothing to measure.
    #[error("no sets to compare")]
    NoSets,
    /// A set without elements.
    #[error("set {set} is empty")]
    EmptySet {
        /// Index of the set.
        set: usize,
    },
    /// Sets of different size.
    #[error("set {set} has {got} elements where set 0 has {first}: overlap is measured on sets of one size")]
    Ragged {
        /// Index of the set.
        set: usize,
        /// Its size.
        got: usize,
        /// The size of the first.
        first: usize,
    },
    /// A set out of order or with repeats.
    #[error("set {set} is not strictly ascending")]
    NotAscending {
        /// Index of the set.
        set: usize,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_heads_obey_the_identity_exactly() {
        // UOR = 2 / (1 + J) for two sets of one size; every pair of subsets of 0..8.
        let mut pairs = 0;
        for a in 1_u32..256 {
            for b in (1_u32..256).filter(|b| b.count_ones() == a.count_ones() && a.count_ones() <= 4) {
                let elements = |bits: u32| (0..8_u32).filter(|bit| bits >> bit & 1 == 1).collect::<Vec<_>>();
                let overlap = Overlap::measure(&[elements(a), elements(b)]).unwrap();
                let (shared, union) = ((a & b).count_ones(), (a | b).count_ones());
                assert_eq!(overlap.union_len as u32, union);
                assert_eq!(overlap.mean_jaccard, f64::from(shared) / f64::from(union));
                let identity = 2.0 / (2.0 - overlap.disagreement());
                assert!((overlap.union_overhead_ratio() - identity).abs() < 1e-15, "{a:b} {b:b}");
                pairs += 1;
            }
        }
        assert_eq!(pairs, 8 * 8 + 28 * 28 + 56 * 56 + 70 * 70);
    }

    #[test]
    fn sets_that_cannot_be_compared_are_refused() {
        let none: [Vec<u32>; 0] = [];
        let nested = [vec![3], (0..20).collect::<Vec<u32>>()];
        let cases = [
            (Overlap::measure(&none), "no sets to compare"),
            (Overlap::measure::<u32>(&[vec![], vec![]]), "set 0 is empty"),
            (
                Overlap::measure(&nested),
                "set 1 has 20 elements where set 0 has 1: overlap is measured on sets of one size",
            ),
            (Overlap::measure(&[vec![1, 2], vec![2, 2]]), "set 1 is not strictly ascending"),
        ];
        for (got, message) in cases {
            assert_eq!(got.unwrap_err().to_string(), message);
        }
    }

    #[test]
    fn pages_are_touched_whole() {
        let sets = [vec![0, 15, 16], vec![17, 40, 160]];
        assert_eq!(page_union_ratio(&sets, 3, 16), 4.0);
        assert_eq!(page_union_ratio(&sets, 32, 16), 2.0);
        assert_eq!(page_union_ratio(&sets, 33, 16), 4.0 / 3.0);
        let none: [Vec<u32>; 0] = [];
        assert_eq!(page_union_ratio(&none, 0, 16), 0.0);
    }

    #[test]
    fn a_single_set_is_its_own_union() {
        let overlap = Overlap::measure(&[vec![2, 5, 9]]).unwrap();
        assert_eq!(overlap.union_overhead_ratio(), 1.0);
        assert_eq!(jaccard::<u32>(&[], &[]), 1.0);
    }
}
