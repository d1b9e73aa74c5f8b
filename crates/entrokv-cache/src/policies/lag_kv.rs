//! LagKV: tokens that stand out from those that follow them stay.

use crate::attention_rows::Taps;
use crate::policy::{EvictionPolicy, PolicyError, Schedule};
use crate::policy_options::{OptionKey, OptionSet, YES_NO, at_least, spelling, word};
use crate::resident_tokens::{ResidentTokens, TokenTap};
use crate::shape::{CacheShape, KvGroup};
use crate::token_policy::{Axes, Options, TokenMethod, TokenScorer};

/// The policy `lagkv` (Liang et al. 2025).
///
/// The tokens after the sinks are cut into blocks of `lag`. A block's keys are scaled, channel by channel, to the range of the
/// next block's; the standard deviation of a scaled key over its channels, and its softmax over the block, say how much it
/// stands out. The same for values, and the mean of both is the score. By default scores are compared within blocks only
/// (`rank / lag`); with `cross=yes` as they are. Sinks and the last block with what follows it count 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LagKv {
    /// `lag`: tokens of a block.
    pub lag: usize,
    /// `first`: tokens before the first block.
    pub first: usize,
    /// `cross`: whether scores of different blocks are compared as they are.
    pub cross_scoring: bool,
}

impl Default for LagKv {
    fn default() -> Self {
        Self { lag: 128, first: 4, cross_scoring: false }
    }
}

const OPTIONS: OptionSet<Options<LagKv>> = OptionSet {
    policy: LagKv::NAME,
    keys: &[
        &[
            OptionKey {
                key: "lag",
                expected: "a number of tokens, 2 or more",
                read: |options, text| at_least(text, 2).map(|lag| options.method.lag = lag),
                show: |options| options.method.lag.to_string(),
            },
            OptionKey {
                key: "first",
                expected: "a number of tokens, 0 or more",
                read: |options, text| text.parse().ok().map(|first| options.method.first = first),
                show: |options| options.method.first.to_string(),
            },
            OptionKey {
                key: "cross",
                expected: "no or yes",
                read: |options, text| word(text, &YES_NO).map(|cross| options.method.cross_scoring = cross),
                show: |options| spelling(options.method.cross_scoring, &YES_NO),
            },
        ],
        Options::AXES,
    ],
    without: &[],
    presets: &[],
    default: || Options { method: LagKv::default(), axes: Axes::default() },
};

impl LagKv {
    /// The policy's name on a command line.
    pub const NAME: &'static str = "lagkv";

    pub(crate) fn parse(options: Option<&str>) -> Result<Box<dyn EvictionPolicy>, PolicyError> {
        OPTIONS.parse(options).map(|options| OPTIONS.policy(options))
    }
}

impl TokenMethod for LagKv {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn needs(&self, _schedule: Schedule) -> Taps {
        Taps::of_tokens(TokenTap::KeysAndValues)
    }

    fn scorer(&self, _shape: &CacheShape, _group: KvGroup) -> Box<dyn TokenScorer> {
        Box::new(*self)
    }
}

impl TokenScorer for LagKv {
    fn score(&mut self, tokens: ResidentTokens<'_>, out: &mut Vec<f32>) {
        let (len, first) = (tokens.len(), self.first.min(tokens.len()));
        if len < first + 2 * self.lag {
            // Too few to compare: as good as sinks and the newest.
            out.extend((0..len).map(|token| if token < first { 1.0 } else { token as f32 / len as f32 }));
            return;
        }
        out.resize(first, 1.0);
        let keys: Vec<&[f32]> = tokens.keys().skip(first).collect();
        let values: Vec<&[f32]> = tokens.values().skip(first).collect();
        let num_blocks = (len - first) / self.lag;
        for block in 0..num_blocks - 1 {
            let this = block * self.lag..(block + 1) * self.lag;
            let next = this.end..this.end + self.lag;
            let of_keys = stand_out(&keys[this.clone()], &keys[next.clone()]);
            let of_values = stand_out(&values[this], &values[next]);
            let scores: Vec<f64> = of_keys.iter().zip(&of_values).map(|(k, v)| (k + v) / 2.0).collect();
            if self.cross_scoring {
                out.extend(scores.iter().map(|&score| score as f32));
            } else {
                let mut order: Vec<usize> = (0..self.lag).collect();
                order.sort_by(|&a, &b| scores[a].total_cmp(&scores[b]));
                let mut ranks = vec![0.0; self.lag];
                order.into_iter().enumerate().for_each(|(rank, token)| ranks[token] = rank as f32 / self.lag as f32);
                out.extend(ranks);
            }
        }
        out.resize(len, 1.0);
    }
}

/// The softmax over `rows` of each row's standard deviation over its channels, the channels scaled to their range in
/// `reference`.
fn stand_out(rows: &[&[f32]], reference: &[&[f32]]) -> Vec<f64> {
    let num_channels = rows[0].len();
    let ranges: Vec<(f64, f64)> = (0..num_channels)
        .map(|channel| {
            let column = reference.iter().map(|row| f64::from(row[channel]));
            column.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)))
        })
        .collect();
    let deviation = |row: &[f32]| {
        // A channel that does not vary says nothing of what stands out.
        let scaled = row.iter().zip(&ranges).map(
            |(&x, &(low, high))| {
                if high > low { (f64::from(x) - low) / (high - low) } else { 0.0 }
            },
        );
        let (sum, squares) = scaled.clone().fold((0.0, 0.0), |(sum, squares), x| (sum + x, squares + x * x));
        let count = num_channels as f64;
        ((squares - sum * sum / count).max(0.0) / (count - 1.0).max(1.0)).sqrt()
    };
    let deviations: Vec<f64> = rows.iter().map(|row| deviation(row)).collect();
    let largest = deviations.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let exponentials: Vec<f64> = deviations.iter().map(|x| (x - largest).exp()).collect();
    let total: f64 = exponentials.iter().sum();
    exponentials.into_iter().map(|x| x / total).collect()
}
