//! Choices made in two stages: a part of the budget by one score, the rest by another.

use crate::selection::select_pages;

/// The second score of a policy that chooses in two stages, of the same pages (or tokens) as its first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SecondStage<'a> {
    /// Part of the budget that the first score settles, from 0 to 1.
    pub share: f64,
    /// A score a page; higher stays longer, NaN loses to every number.
    pub scores: &'a [f32],
}

impl SecondStage<'_> {
    /// What stays whatever its second score, of `k` pages in all: `pinned`, and as many more of the best by the scores of the
    /// `first` stage as make `floor(share * k)`, or `safe` where that is more. Flags, not huge scores, which nothing could then
    /// be multiplied with.
    #[must_use]
    pub fn forced(&self, first: &[f32], k: usize, safe: usize, pinned: &[usize]) -> Vec<usize> {
        // No page is lost to how a fraction is stored.
        let settled = ((self.share * k as f64 + 1e-9) as usize).max(safe).min(k);
        let mut forced = pinned.to_vec();
        forced.extend(select_pages(first, settled, pinned).iter().filter(|page| !pinned.contains(page)));
        forced
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_stage_settles_its_share_and_pins_are_inside_it() {
        let first = [0.1, 0.9, 0.8, 0.7, 0.6, 0.0];
        let stage = |share| SecondStage { share, scores: &[] };
        let forced = |share, k, safe, pinned: &[usize]| {
            let mut forced = stage(share).forced(&first, k, safe, pinned);
            forced.sort_unstable();
            forced
        };
        assert_eq!(forced(0.5, 4, 0, &[]), [1, 2]);
        assert_eq!(forced(0.5, 4, 0, &[5]), [1, 5]);
        assert_eq!(forced(0.5, 4, 3, &[5]), [1, 2, 5], "what is safe is forced where it is more");
        assert_eq!(forced(0.0, 4, 0, &[0, 5]), [0, 5], "pins stay however little the first stage has");
        assert_eq!(forced(0.7, 10, 0, &[]), [0, 1, 2, 3, 4, 5], "0.7 of 10 is 7, and there are 6");
        assert_eq!(forced(1.0, 2, 9, &[]), [1, 2], "never more than may stay");
    }
}
