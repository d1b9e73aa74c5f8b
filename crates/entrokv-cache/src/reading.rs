//! What a step of decoding reads of the pages that a sequence holds.
//!
//! A policy may have a step read some pages and leave the others unread, for this step: nothing is freed by that, and what is not
//! read now may be read at the next one. Pages are judged by the ranges of their keys ([`KeyRanges`]), the newest one, which is
//! being filled, is always read.
//!
//! Invariants, each a test of that name:
//! * `a_bound_is_no_less_than_any_logit_of_its_page`.
//! * `the_newest_page_and_pages_without_ranges_are_read`, and no more pages than asked for unless these are more.

use crate::key_ranges::KeyRanges;
use crate::selection::select_pages;

/// What a step of decoding reads.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Reading {
    /// All that is held.
    #[default]
    All,
    /// Some pages of each KV group.
    Pages(PageReads),
}

/// How the pages of a KV group that a step reads are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageReads {
    /// Tokens read, as whole pages; those of the newest page count as a page's.
    pub tokens: usize,
    /// Layers before this one read all they hold.
    pub first_layer: usize,
    /// What a page counts.
    pub by: PageJudge,
}

/// What a page counts when a step chooses what to read, by the range of its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageJudge {
    /// The largest logit that a key in the range could have, `sum_i max(q_i m_i, q_i M_i)`, not scaled (Quest, Tang et al. 2024,
    /// algorithm 1).
    Bounds(BoundHeads),
    /// What attention gives it if all its keys were the corner of the range on the group's side, over so many channels, those in
    /// which the group's queries are largest (RocketKV, Behnam et al. 2025, hybrid sparse attention): of each head the softmax over the
    /// pages, summed over heads.
    Channels(usize),
}

/// How the bounds of query heads become one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BoundHeads {
    /// The largest: a page is read that any head may want.
    #[default]
    Max,
    /// Their sum.
    Sum,
}

impl BoundHeads {
    pub(crate) const WORDS: [(&str, Self); 2] = [("max", Self::Max), ("sum", Self::Sum)];
}

impl PageReads {
    /// Fewest pages that a step reads of a KV group (Quest's code).
    pub const LEAST_PAGES: usize = 3;

    /// Pages that a step reads of a KV group which holds as many.
    #[must_use]
    pub fn num_pages(&self, page_size: usize) -> usize {
        (self.tokens / page_size).max(Self::LEAST_PAGES)
    }

    /// A score for each page of `ranges`, of one KV group, for `queries` `[group_size, head_dim]` after RoPE whose dot products the
    /// model multiplies with `scale`.
    #[must_use]
    pub fn scores(&self, queries: &[f32], head_dim: usize, scale: f32, ranges: &KeyRanges) -> Vec<f32> {
        let num_pages = ranges.first_positions().len();
        let heads = match self.by {
            PageJudge::Bounds(heads) => heads,
            PageJudge::Channels(count) => return corner_attention(queries, head_dim, count, scale, ranges),
        };
        let of_page = |place: usize| {
            let (low, high) = ranges.at(place);
            let bounds = queries.chunks_exact(head_dim).map(|query| bound(query, low, high));
            match heads {
                BoundHeads::Max => bounds.fold(f32::NEG_INFINITY, f32::max),
                BoundHeads::Sum => bounds.sum(),
            }
        };
        (0..num_pages).map(of_page).collect()
    }

    /// Places, ascending, of the pages to be read of those that begin at `held` (ascending). `scores` are those of `ranges`; pages of
    /// which there are none are read.
    #[must_use]
    pub fn choose(&self, scores: &[f32], ranges: &KeyRanges, held: &[u32], page_size: usize) -> Vec<usize> {
        let num_pages = self.num_pages(page_size);
        if held.len() <= num_pages {
            return (0..held.len()).collect();
        }
        let mut known = ranges.first_positions().iter().zip(scores).peekable();
        let mut of_held = Vec::with_capacity(held.len());
        let mut pinned = vec![held.len() - 1];
        for (place, first) in held.iter().enumerate() {
            while known.next_if(|(known, _)| *known < first).is_some() {}
            let score = known.next_if(|(known, _)| *known == first).map(|(_, score)| *score);
            if score.is_none() && place + 1 < held.len() {
                pinned.push(place);
            }
            of_held.push(score.unwrap_or(f32::INFINITY));
        }
        select_pages(&of_held, num_pages.max(pinned.len()), &pinned).as_slice().to_vec()
    }
}

/// Partial sums that a bound is made of, so that it need not wait for itself; in fixed order.
const LANES: usize = 8;

/// `sum_i max(q_i m_i, q_i M_i)` (Tang et al. 2024, algorithm 1).
fn bound(query: &[f32], low: &[f32], high: &[f32]) -> f32 {
    let term = |q: f32, low: f32, high: f32| (q * low).max(q * high);
    let mut sums = [0.0_f32; LANES];
    let (queries, lows, highs) = (query.chunks_exact(LANES), low.chunks_exact(LANES), high.chunks_exact(LANES));
    let rest = queries.remainder().iter().zip(lows.remainder()).zip(highs.remainder());
    let rest: f32 = rest.map(|((q, low), high)| term(*q, *low, *high)).sum();
    for ((query, low), high) in queries.zip(lows).zip(highs) {
        for lane in 0..LANES {
            sums[lane] += term(query[lane], low[lane], high[lane]);
        }
    }
    sums.iter().sum::<f32>() + rest
}

/// The attention of [`PageJudge::Channels`], `[pages]`: logits over `count` channels, as much larger as the part of `sum |q_i|` that is
/// in them is smaller under a root, as in SparQ.
fn corner_attention(queries: &[f32], head_dim: usize, count: usize, scale: f32, ranges: &KeyRanges) -> Vec<f32> {
    let heads = || queries.chunks_exact(head_dim);
    let size = |channel: usize| heads().map(|query| query[channel].abs()).sum::<f32>();
    let sizes: Vec<f32> = (0..head_dim).map(size).collect();
    let mut channels: Vec<usize> = (0..head_dim).collect();
    channels.sort_by(|&a, &b| sizes[b].total_cmp(&sizes[a]).then(a.cmp(&b)));
    channels.truncate(count);
    channels.sort_unstable();
    let is_high: Vec<bool> = channels.iter().map(|&i| heads().map(|query| query[i]).sum::<f32>() > 0.0).collect();
    let num_pages = ranges.first_positions().len();
    let mut attention = vec![0.0_f64; num_pages];
    for query in heads() {
        let chosen: f32 = channels.iter().map(|&i| query[i].abs()).sum();
        let all: f32 = query.iter().map(|q| q.abs()).sum();
        // A query of zeros has all logits 0, whatever they are multiplied with.
        let part = if all > 0.0 { chosen / all } else { 1.0 };
        let factor = f64::from(scale) / f64::from(part).sqrt();
        let logit = |place: usize| {
            let (low, high) = ranges.at(place);
            let corner = |(&i, &is_high): (&usize, &bool)| query[i] * if is_high { high[i] } else { low[i] };
            f64::from(channels.iter().zip(&is_high).map(corner).sum::<f32>()) * factor
        };
        let logits: Vec<f64> = (0..num_pages).map(logit).collect();
        let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = logits.iter().map(|logit| (logit - largest).exp()).collect();
        let total: f64 = weights.iter().sum();
        attention.iter_mut().zip(weights).for_each(|(sum, weight)| *sum += weight / total);
    }
    attention.into_iter().map(|sum| sum as f32).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::key_ranges::key_range;

    const READS: PageReads = PageReads { tokens: 64, first_layer: 0, by: PageJudge::Bounds(BoundHeads::Max) };

    /// Pages of 16 tokens, beginning at `first`.
    fn ranges(first: &[u32]) -> KeyRanges {
        let mut ranges = KeyRanges::new(2);
        first.iter().for_each(|&first| ranges.push(first, &[0.0; 4]));
        ranges
    }

    proptest! {
        #[test]
        fn a_bound_is_no_less_than_any_logit_of_its_page(
            keys in prop::collection::vec(-4_i32..5, 19 * 6), query in prop::collection::vec(-4_i32..5, 19),
        ) {
            // Small whole numbers: every sum is exact.
            let keys: Vec<f32> = keys.into_iter().map(|k| k as f32).collect();
            let query: Vec<f32> = query.into_iter().map(|q| q as f32).collect();
            let range = key_range(&keys, 19);
            let (low, high) = range.split_at(19);
            let got = bound(&query, low, high);
            let naive: f32 = (0..19).map(|i| (query[i] * low[i]).max(query[i] * high[i])).sum();
            prop_assert_eq!(got, naive);
            for key in keys.chunks(19) {
                prop_assert!(key.iter().zip(&query).map(|(k, q)| k * q).sum::<f32>() <= got);
            }
        }
    }

    #[test]
    fn the_newest_page_and_pages_without_ranges_are_read() {
        let held: Vec<u32> = (0..7).map(|page| 16 * page).collect();
        // The newest has no range; the others are ordered 1, 0, 2 = 4, 3, 5.
        let known = ranges(&held[..6]);
        let scores = [5.0, 6.0, 4.0, 3.0, 4.0, f32::NAN];
        assert_eq!(READS.choose(&scores, &known, &held, 16), [0, 1, 2, 6]);
        // Even if it has one.
        assert_eq!(READS.choose(&[9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 0.0], &ranges(&held), &held, 16), [0, 1, 2, 6]);
        // Nothing is known of pages 2 and 4; pages that are gone have ranges still.
        let known = ranges(&[0, 16, 48, 80, 96, 112]);
        assert_eq!(READS.choose(&[1.0, 2.0, 3.0, 9.0, 0.0, 99.0], &known, &held, 16), [2, 4, 5, 6]);
        assert_eq!(READS.choose(&[], &ranges(&[]), &held, 16), [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(READS.choose(&[0.0; 4], &ranges(&held[..4]), &held[..4], 16), [0, 1, 2, 3]);
        // No fewer than three.
        let few = PageReads { tokens: 1, ..READS };
        assert_eq!(few.choose(&scores, &ranges(&held[..6]), &held, 16), [0, 1, 6]);
        assert_eq!(few.num_pages(1), 3);
    }
}
