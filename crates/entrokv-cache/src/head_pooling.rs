//! How the query heads of a KV group become one score a token.

use std::cmp::Ordering;

use crate::selection::rank;

/// How scores that each query head gives on its own become those of their KV group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HeadPooling {
    /// As the method has it: heads are not scored apart.
    #[default]
    Own,
    /// `s(t) = sum_h s_h(t) / r`.
    Mean,
    /// `s(t) = max_h s_h(t)`.
    Max,
    /// `s(t) = sum_h w_h s_h(t)`, weights by the collision entropy of the prompt rows as in
    /// [`PageEntroKv`](crate::PageEntroKv), the first four positions apart.
    Entropy,
    /// The heads choose by turns, each its best token left: a token counts the best of its ranks among each head's tokens, and of
    /// equal ranks the one with the higher mean score comes first. Scores are then minus the place in that order, from 0.
    Union,
}

impl HeadPooling {
    /// Spellings.
    pub(crate) const WORDS: [(&str, Self); 5] = [
        ("own", Self::Own),
        ("mean", Self::Mean),
        ("max", Self::Max),
        ("entropy", Self::Entropy),
        ("union", Self::Union),
    ];

    /// Writes the pooled scores of `heads` (`[heads][tokens]`, as many of each) into `out`; `weights` are those of the heads, which
    /// sum to 1 and count under [`Entropy`](Self::Entropy) alone.
    pub(crate) fn pool(self, heads: &[Vec<f32>], weights: &[f64], out: &mut Vec<f32>) {
        let num_tokens = heads.first().map_or(0, Vec::len);
        let alike = 1.0 / heads.len().max(1) as f64;
        let weighted = |token: usize, weight: &dyn Fn(usize) -> f64| -> f64 {
            heads.iter().enumerate().map(|(head, scores)| weight(head) * f64::from(scores[token])).sum()
        };
        let mean = |token: usize| weighted(token, &|_| alike);
        match self {
            Self::Own | Self::Mean => out.extend((0..num_tokens).map(|token| mean(token) as f32)),
            Self::Entropy => out.extend((0..num_tokens).map(|token| weighted(token, &|head| weights[head]) as f32)),
            Self::Max => {
                let largest = |token: usize| heads.iter().map(|scores| scores[token]).fold(f32::NEG_INFINITY, f32::max);
                out.extend((0..num_tokens).map(largest));
            }
            Self::Union => {
                let means: Vec<f32> = (0..num_tokens).map(|token| mean(token) as f32).collect();
                let best = best_ranks(heads, num_tokens);
                let order = |&a: &usize, &b: &usize| best[a].cmp(&best[b]).then(higher_first(&means, a, b));
                out.extend(places(num_tokens, order).into_iter().map(|place| -(place as f32)));
            }
        }
    }
}

/// The best rank of each token among the tokens of any head, from 0.
fn best_ranks(heads: &[Vec<f32>], num_tokens: usize) -> Vec<usize> {
    let mut best = vec![usize::MAX; num_tokens];
    for scores in heads {
        for (best, place) in best.iter_mut().zip(places(num_tokens, |&a, &b| higher_first(scores, a, b))) {
            *best = place.min(*best);
        }
    }
    best
}

/// The place of each token in an order, from 0; equals share the first of their places.
fn places(num_tokens: usize, order: impl Fn(&usize, &usize) -> Ordering) -> Vec<usize> {
    let mut tokens: Vec<usize> = (0..num_tokens).collect();
    tokens.sort_by(&order);
    let mut places = vec![0; num_tokens];
    for (place, pair) in tokens.windows(2).enumerate() {
        places[pair[1]] = if order(&pair[0], &pair[1]).is_eq() { places[pair[0]] } else { place + 1 };
    }
    places
}

/// The order of scores, the larger first and NaN last.
fn higher_first(scores: &[f32], a: usize, b: usize) -> Ordering {
    rank(scores[b]).total_cmp(&rank(scores[a]))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::selection::select_pages;

    fn pool(pooling: HeadPooling, heads: &[Vec<f32>]) -> Vec<f32> {
        let mut out = Vec::new();
        pooling.pool(heads, &[0.75, 0.25], &mut out);
        out
    }

    #[test]
    fn heads_are_pooled_as_their_names_say() {
        let heads = [vec![0.5, 0.25, 0.0, 0.25], vec![0.0, 0.25, 0.75, 0.0]];
        assert_eq!(pool(HeadPooling::Mean, &heads), [0.25, 0.25, 0.375, 0.125]);
        assert_eq!(pool(HeadPooling::Max, &heads), [0.5, 0.25, 0.75, 0.25]);
        assert_eq!(pool(HeadPooling::Entropy, &heads), [0.375, 0.25, 0.1875, 0.1875]);
        // Token 2 and token 0 are a head's first; then 1, second for both, and 3, second for one: 1 has the higher mean.
        assert_eq!(pool(HeadPooling::Union, &heads), [-1.0, -2.0, 0.0, -3.0]);
        assert_eq!(pool(HeadPooling::Union, &[vec![1.0; 3], vec![1.0; 3]]), [0.0; 3], "equals stay equal");
        assert_eq!(pool(HeadPooling::Union, &[vec![f32::NAN, 0.5], vec![f32::NAN, 0.5]]), [-1.0, 0.0]);
        assert_eq!(pool(HeadPooling::Max, &[]), []);
    }

    proptest! {
        /// Whatever number of tokens may stay, they are the ones that the heads would have picked by turns: in each round every
        /// head names its next best, and of those named the higher mean goes first.
        #[test]
        fn a_union_is_filled_by_the_heads_by_turns(
            heads in prop::collection::vec(prop::collection::vec(0.0_f32..1.0, 14), 1..5), keep in 0..15_usize,
        ) {
            let mean = |token: usize| heads.iter().map(|scores| f64::from(scores[token])).sum::<f64>();
            let ranked: Vec<Vec<usize>> = heads.iter().map(|scores| {
                let mut tokens: Vec<usize> = (0..14).collect();
                tokens.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
                tokens
            }).collect();
            let mut picked: Vec<usize> = Vec::new();
            for round in 0..14 {
                let mut named: Vec<usize> = ranked.iter().map(|tokens| tokens[round]).collect();
                named.sort_by(|&a, &b| mean(b).total_cmp(&mean(a)));
                named.dedup();
                named.retain(|token| !picked.contains(token));
                picked.extend(named);
            }
            picked.truncate(keep);
            picked.sort_unstable();
            let mut scores = Vec::new();
            HeadPooling::Union.pool(&heads, &[], &mut scores);
            let kept = select_pages(&scores, keep, &[]);
            prop_assert_eq!(kept.as_slice(), picked);
        }
    }
}
