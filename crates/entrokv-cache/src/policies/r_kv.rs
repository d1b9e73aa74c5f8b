//! R-KV: what the last queries attend to stays, unless other keys say the same.

use std::num::NonZeroU32;

use super::norm;
use super::pool_kind::{ODD_KERNEL, PoolKind, odd_kernel};
use crate::attention_rows::{AttentionRows, RowTap, Taps, is_row};
use crate::pins::RecentPages;
use crate::policy::{EvictionPolicy, PolicyError, Schedule};
use crate::policy_options::{OptionKey, OptionSet, at_least};
use crate::resident_tokens::{ResidentTokens, TokenTap};
use crate::shape::{CacheShape, KvGroup};
use crate::token_policy::{Axes, Options, TokenMethod, TokenScorer};
use crate::token_table::TokenTable;

/// The policy `r-kv` (Cai et al. 2025): `lambda` times importance less `1 - lambda` times redundancy.
///
/// Importance: the attention of the last `window` queries over the tokens before those queries' own, the mean over the queries, the
/// largest within `kernel` tokens. Redundancy: the softmax over tokens of a key's mean cosine with the others, where each key
/// overlooks the newest one it is similar to (a cosine above `threshold`), so that of a crowd the newest stays. The newest `window`
/// tokens stay in any case.
///
/// The authors take the largest *logit* of a group's heads and then a softmax over the tokens before the window. Here it is the
/// largest *attention* of the heads, renormalised to those tokens, as logits are not shown to policies: the same where a group has one
/// query head, and otherwise each head counts by how sure it is. Like theirs this makes room every 128 tokens. Their code also
/// clears the entry of the first token where a key has none similar, by accident, which is not done here.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RKv {
    /// `window`: queries observed, and newest tokens kept.
    pub window: usize,
    /// `kernel`: tokens whose largest importance counts for each, odd.
    pub kernel: usize,
    /// `threshold`: the cosine above which keys are similar.
    pub threshold: f64,
    /// `lambda`: part of importance in the score.
    pub lambda: f64,
}

impl Default for RKv {
    fn default() -> Self {
        Self { window: 8, kernel: 7, threshold: 0.5, lambda: 0.1 }
    }
}

const OPTIONS: OptionSet<Options<RKv>> = OptionSet {
    policy: RKv::NAME,
    keys: &[
        &[
            OptionKey {
                key: "window",
                expected: "a number of queries, 1 or more",
                read: |options, text| at_least(text, 1).map(|window| options.method.window = window),
                show: |options| options.method.window.to_string(),
            },
            OptionKey {
                key: "kernel",
                expected: ODD_KERNEL,
                read: |options, text| odd_kernel(text).map(|kernel| options.method.kernel = kernel),
                show: |options| options.method.kernel.to_string(),
            },
            OptionKey {
                key: "threshold",
                expected: "a cosine from 0 to 1",
                read: |options, text| unit_interval(text).map(|threshold| options.method.threshold = threshold),
                show: |options| options.method.threshold.to_string(),
            },
            OptionKey {
                key: "lambda",
                expected: "a part from 0 to 1",
                read: |options, text| unit_interval(text).map(|lambda| options.method.lambda = lambda),
                show: |options| options.method.lambda.to_string(),
            },
        ],
        Options::HEADS,
        Options::AXES,
    ],
    // The newest pages are those of the window.
    without: &["recent"],
    presets: &[],
    default: || Options {
        method: RKv::default(),
        axes: Axes { sinks: 0, schedule: Schedule::Every(EVERY), ..Axes::default() },
    },
};

/// Tokens between two decisions.
const EVERY: NonZeroU32 = NonZeroU32::new(128).expect("128 is not 0");

fn unit_interval(text: &str) -> Option<f64> {
    text.parse().ok().filter(|part| (0.0..=1.0).contains(part))
}

impl RKv {
    /// The policy's name on a command line.
    pub const NAME: &'static str = "r-kv";

    pub(crate) fn parse(options: Option<&str>) -> Result<Box<dyn EvictionPolicy>, PolicyError> {
        let mut options = OPTIONS.parse(options)?;
        options.axes.recent = RecentPages::Tokens(options.method.window);
        Ok(OPTIONS.policy(options))
    }
}

impl TokenMethod for RKv {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn needs(&self, schedule: Schedule) -> Taps {
        let step_rows = schedule.goes_on();
        Taps { prompt: RowTap::Window(self.window), step_rows, tokens: TokenTap::Keys, ..Taps::default() }
    }

    fn scorer(&self, _shape: &CacheShape, _group: KvGroup) -> Box<dyn TokenScorer> {
        Box::new(RKvScorer { options: *self, rows: TokenTable::new(self.window), num_rows: 0, bad_rows: 0 })
    }
}

#[derive(Clone)]
struct RKvScorer {
    options: RKv,
    /// The largest attention of the heads, of the last `window` rows: a column each, by their number modulo `window`.
    rows: TokenTable,
    /// Rows so far.
    num_rows: usize,
    bad_rows: u64,
}

impl RKvScorer {
    /// The importance of the tokens at `positions`, those before the window, `[positions]`.
    fn importance(&self, positions: &[u32]) -> Vec<f64> {
        let mut importance = vec![0.0; positions.len()];
        let num_held = self.num_rows.min(self.options.window);
        for row in 0..num_held {
            let masses: Vec<f64> = self.rows.at(row, positions).collect();
            let total: f64 = masses.iter().sum();
            if total > 0.0 {
                importance.iter_mut().zip(masses).for_each(|(sum, mass)| *sum += mass / total / num_held as f64);
            }
        }
        PoolKind::Max.along(positions, &importance, self.options.kernel)
    }
}

impl TokenScorer for RKvScorer {
    fn observe(&mut self, rows: AttentionRows<'_>) {
        self.rows.align(rows.positions);
        for row in 0..rows.num_rows() {
            let heads: Vec<&[f32]> = (0..rows.group_size).map(|head| rows.head(row, head)).collect();
            let good: Vec<&[f32]> = heads.into_iter().filter(|masses| is_row(masses)).collect();
            self.bad_rows += (rows.group_size - good.len()) as u64;
            if good.is_empty() {
                continue;
            }
            let largest = self.rows.column_mut(self.num_rows % self.options.window);
            largest.fill(0.0);
            for masses in good {
                largest.iter_mut().zip(masses).for_each(|(largest, &mass)| *largest = largest.max(f64::from(mass)));
            }
            self.num_rows += 1;
        }
    }

    fn score(&mut self, tokens: ResidentTokens<'_>, out: &mut Vec<f32>) {
        let lambda = self.options.lambda;
        let num_before = tokens.len().saturating_sub(self.options.window);
        let importance = self.importance(&tokens.positions[..num_before]);
        let redundancy = redundancy(&tokens, self.options.threshold);
        let pairs = importance.iter().zip(&redundancy);
        out.extend(pairs.map(|(importance, redundancy)| (lambda * importance - (1.0 - lambda) * redundancy) as f32));
        // The window's own stay; whoever pins nothing finds them among the best.
        let best = out.iter().copied().fold(0.0, f32::max);
        out.resize(tokens.len(), best);
    }

    fn retain(&mut self, positions: &[u32]) {
        self.rows.align(positions);
        self.rows.shrink();
    }

    fn nan_rows(&self) -> u64 {
        self.bad_rows
    }

    fn state_bytes(&self) -> u64 {
        (size_of::<Self>() + self.rows.bytes()) as u64
    }
}

/// Softmax over all tokens of the mean cosine of a key with the others, each of which overlooks the newest key it is similar to.
/// `[tokens]`; NaN for a key that is not finite, which nothing is similar to.
///
/// The sum of cosines with all keys is one product with the sum of their directions, so that only the newest similar key has to be
/// searched for, from the newest back; the cosines are never all formed.
fn redundancy(tokens: &ResidentTokens<'_>, threshold: f64) -> Vec<f64> {
    let directions: Vec<Option<Vec<f64>>> = tokens
        .keys()
        .map(|key| {
            let length = norm(key);
            length.is_finite().then(|| key.iter().map(|&k| f64::from(k) / length.max(f64::MIN_POSITIVE)).collect())
        })
        .collect();
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let mut total: Vec<f64> = Vec::new();
    for direction in directions.iter().flatten() {
        total.resize(direction.len(), 0.0);
        total.iter_mut().zip(direction).for_each(|(sum, x)| *sum += x);
    }
    let with_others = |direction: &Vec<f64>| dot(direction, &total) - dot(direction, direction);
    let mut sums: Vec<f64> =
        directions.iter().map(|direction| direction.as_ref().map_or(f64::NAN, with_others)).collect();
    for (token, direction) in directions.iter().enumerate() {
        let Some(direction) = direction else { continue };
        let similar =
            directions.iter().enumerate().rev().filter(|(other, _)| *other != token).find_map(|(other, key)| {
                let cosine = dot(direction, key.as_ref()?);
                (cosine > threshold).then_some((other, cosine))
            });
        if let Some((newest, cosine)) = similar {
            sums[newest] -= cosine;
        }
    }
    let mean = |sum: f64| sum / directions.len() as f64;
    let largest = sums.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let exponentials: Vec<f64> = sums.iter().map(|&sum| (mean(sum) - mean(largest)).exp()).collect();
    let of_all: f64 = exponentials.iter().filter(|x| !x.is_nan()).sum();
    exponentials.into_iter().map(|x| x / of_all).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_keys_that_say_the_same_the_newest_is_least_redundant() {
        let keys = [1.0, 0.0, 0.0, 1.0, 2.0, 0.0, 3.0, 0.0];
        let tokens = ResidentTokens { positions: &[0, 1, 2, 3], keys: &keys, ..ResidentTokens::default() };
        let got = redundancy(&tokens, 0.5);
        // Tokens 0 and 2 overlook 3, which overlooks 2: cosine sums 2, 0, 1 and 0.
        let e: Vec<f64> = [2.0, 0.0, 1.0, 0.0].map(|sum: f64| (sum / 4.0).exp()).to_vec();
        let total: f64 = e.iter().sum();
        for (got, expected) in got.iter().zip(e) {
            assert!((got - expected / total).abs() < 1e-15, "{got} for {}", expected / total);
        }
    }

    #[test]
    fn keys_that_are_no_numbers_lose_and_keys_of_zeros_are_like_none() {
        let keys = [1.0, 0.0, f32::NAN, 0.0, 0.0, 0.0, f32::INFINITY, 1.0];
        let tokens = ResidentTokens { positions: &[0, 1, 2, 3], keys: &keys, ..ResidentTokens::default() };
        let got = redundancy(&tokens, 0.5);
        assert!(got[1].is_nan() && got[3].is_nan());
        assert_eq!((got[0], got[2]), (0.5, 0.5));
        assert_eq!(redundancy(&ResidentTokens::default(), 0.5), []);
    }
}
