//! Expected attention: what queries to come would attend to stays, if they are like the queries so far.

use super::norm;
use crate::attention_form::AttentionForm;
use crate::attention_rows::Taps;
use crate::policy::{EvictionPolicy, PolicyError, Schedule};
use crate::policy_options::{OptionKey, OptionSet, YES_NO, at_least, spelling, word};
use crate::query_moments::QueryTap;
use crate::resident_tokens::{ResidentTokens, TokenTap};
use crate::shape::{CacheShape, KvGroup};
use crate::token_policy::{Axes, Options, TokenMethod, TokenScorer};

/// The policy `expected-attention` (Devoto et al. 2025).
///
/// Queries before RoPE are taken for Gaussian, with the mean `mu` and the covariance `C` (divided by their number) of those read
/// so far. At the `future` positions to come they turn; with `R` the mean of these rotations and `s` the scale of logits a key
/// expects `exp(s k.R mu + s^2 k.R C R^T k / 2)`, normalised over the tokens. The score is the mean over a group's heads, plus
/// `epsilon`, times the norm of the value. Queries of the first `first` tokens are left out, and these tokens count as the best.
/// While decoding, moments go on with the queries of generated tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpectedAttention {
    /// `future`: positions to come.
    pub future: usize,
    /// `first`: tokens left out.
    pub first: usize,
    /// `covariance`: whether the second term counts.
    pub covariance: bool,
    /// `vnorm`: whether the norm of the value does.
    pub value_norm: bool,
    /// `epsilon`: added to what is expected, so that a value's norm tells where nothing is.
    pub epsilon: f64,
}

impl Default for ExpectedAttention {
    fn default() -> Self {
        Self { future: 512, first: 4, covariance: true, value_norm: true, epsilon: 0.0 }
    }
}

const OPTIONS: OptionSet<Options<ExpectedAttention>> = OptionSet {
    policy: ExpectedAttention::NAME,
    keys: &[
        &[
            OptionKey {
                key: "future",
                expected: "a number of positions from 1 to 65536",
                read: |options, text| {
                    let future = at_least(text, 1).filter(|future| *future <= MOST_FUTURE)?;
                    options.method.future = future;
                    Some(())
                },
                show: |options| options.method.future.to_string(),
            },
            OptionKey {
                key: "first",
                expected: "a number of tokens, 0 or more",
                read: |options, text| text.parse().ok().map(|first| options.method.first = first),
                show: |options| options.method.first.to_string(),
            },
            OptionKey {
                key: "covariance",
                expected: "no or yes",
                read: |options, text| word(text, &YES_NO).map(|covariance| options.method.covariance = covariance),
                show: |options| spelling(options.method.covariance, &YES_NO),
            },
            OptionKey {
                key: "vnorm",
                expected: "no or yes",
                read: |options, text| word(text, &YES_NO).map(|value_norm| options.method.value_norm = value_norm),
                show: |options| spelling(options.method.value_norm, &YES_NO),
            },
            OptionKey {
                key: "epsilon",
                expected: "a number from 0 to 1",
                read: |options, text| {
                    let epsilon = text.parse().ok().filter(|epsilon| (0.0..=1.0).contains(epsilon))?;
                    options.method.epsilon = epsilon;
                    Some(())
                },
                show: |options| options.method.epsilon.to_string(),
            },
        ],
        Options::AXES,
    ],
    without: &[],
    presets: &[],
    default: || Options { method: ExpectedAttention::default(), axes: Axes::default() },
};

/// Rotations that are summed one by one, for each pair and decision.
const MOST_FUTURE: usize = 65_536;

impl ExpectedAttention {
    /// The policy's name on a command line.
    pub const NAME: &'static str = "expected-attention";

    pub(crate) fn parse(options: Option<&str>) -> Result<Box<dyn EvictionPolicy>, PolicyError> {
        OPTIONS.parse(options).map(|options| OPTIONS.policy(options))
    }
}

impl TokenMethod for ExpectedAttention {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn needs(&self, _schedule: Schedule) -> Taps {
        let tokens = if self.value_norm { TokenTap::KeysAndValues } else { TokenTap::Keys };
        Taps { queries: QueryTap::Moments { first: self.first }, ..Taps::of_tokens(tokens) }
    }

    fn scorer(&self, _shape: &CacheShape, _group: KvGroup) -> Box<dyn TokenScorer> {
        Box::new(*self)
    }
}

impl TokenScorer for ExpectedAttention {
    fn score(&mut self, tokens: ResidentTokens<'_>, out: &mut Vec<f32>) {
        let Some(newest) = tokens.positions.last() else { return };
        let head_dim = tokens.keys.len() / tokens.len();
        let turn = MeanRotation::new(&tokens.form, u64::from(*newest) + 1, self.future);
        let start = tokens.positions.partition_point(|position| (*position as usize) < self.first);
        let panels = Panels::new(&tokens.keys[start * head_dim..], head_dim);
        let mut expected = vec![0.0; tokens.len() - start];
        let scale = f64::from(tokens.form.scale);
        for (sum, products) in tokens.queries.heads(head_dim) {
            let queries = Gaussian::new(tokens.queries.count, sum, products, self.covariance).turned(&turn);
            let mut logits = panels.logits(&queries.linear(scale), &queries.quadratic(scale));
            logits.truncate(expected.len());
            softmax(&mut logits);
            expected.iter_mut().zip(&logits).for_each(|(sum, mass)| *sum += mass);
        }
        let num_heads = tokens.queries.heads(head_dim).count().max(1) as f64;
        let values = tokens.values().skip(start).map(|value| if self.value_norm { norm(value) } else { 1.0 });
        let values = values.chain(std::iter::repeat(1.0));
        let scores: Vec<f32> = expected
            .iter()
            .zip(values)
            .map(|(mass, value)| ((mass / num_heads + self.epsilon) * value) as f32)
            .collect();
        let best = scores.iter().copied().fold(0.0, f32::max);
        out.resize(start, best);
        out.extend(scores);
    }
}

/// Mean and, if wanted, covariance of queries.
struct Gaussian {
    mean: Vec<f64>,
    /// `[head_dim, head_dim]`; empty where it does not count.
    covariance: Vec<f64>,
}

impl Gaussian {
    fn new(count: usize, sum: &[f64], products: &[f64], covariance: bool) -> Self {
        let count = count.max(1) as f64;
        let mean: Vec<f64> = sum.iter().map(|sum| sum / count).collect();
        let head_dim = mean.len();
        let mut square = vec![0.0; if covariance { head_dim * head_dim } else { 0 }];
        if covariance {
            let mut products = products.iter();
            for i in 0..head_dim {
                for (j, product) in (0..=i).zip(products.by_ref()) {
                    let spread = product / count - mean[i] * mean[j];
                    (square[i * head_dim + j], square[j * head_dim + i]) = (spread, spread);
                }
            }
        }
        Self { mean, covariance: square }
    }

    /// As `turn` makes them: `R mu` and `R C R^T`.
    fn turned(mut self, turn: &MeanRotation) -> Self {
        let head_dim = self.mean.len();
        turn.apply(&mut self.mean, 0, 1);
        if !self.covariance.is_empty() {
            (0..head_dim).for_each(|column| turn.apply(&mut self.covariance, column, head_dim));
            (0..head_dim).for_each(|row| turn.apply(&mut self.covariance, row * head_dim, 1));
        }
        self
    }

    /// What an element of a key adds to a logit by itself, `[head_dim]`.
    fn linear(&self, scale: f64) -> Vec<f32> {
        self.mean.iter().map(|mean| (scale * mean) as f32).collect()
    }

    /// What pairs of elements add, as a lower triangle row by row: those below the diagonal stand for two.
    fn quadratic(&self, scale: f64) -> Vec<f32> {
        let head_dim = self.mean.len();
        let rows = self.covariance.chunks_exact(head_dim.max(1)).enumerate();
        rows.flat_map(|(i, row)| {
            let twice = move |j: usize| if j < i { 1.0 } else { 0.5 };
            (0..=i).map(move |j| (scale * scale * row[j] * twice(j)) as f32)
        })
        .collect()
    }
}

/// The mean of RoPE's rotations at positions to come: of each pair of channels the mean cosine and sine.
struct MeanRotation(Vec<((usize, usize), (f64, f64))>);

impl MeanRotation {
    fn new(form: &AttentionForm<'_>, first: u64, count: usize) -> Self {
        let mean = |frequency: f64| {
            let angles = (0..count as u64).map(|step| (first + step) as f64 * frequency);
            let (sin, cos) = angles.fold((0.0, 0.0), |(sin, cos), angle| (sin + angle.sin(), cos + angle.cos()));
            (cos / count as f64, sin / count as f64)
        };
        Self(form.pairs().zip(form.frequencies.iter().map(|&frequency| mean(frequency))).collect())
    }

    /// Turns the vector whose element `i` is `x[first + i * step]`.
    fn apply(&self, x: &mut [f64], first: usize, step: usize) {
        for &((a, b), (cos, sin)) in &self.0 {
            let (a, b) = (first + a * step, first + b * step);
            (x[a], x[b]) = (cos * x[a] - sin * x[b], sin * x[a] + cos * x[b]);
        }
    }
}

/// Tokens that are reckoned with side by side.
const PANEL: usize = 8;

/// Keys of eight tokens at a time, channel by channel, so that a token's sums run in the order of its channels and eight of them
/// at once.
struct Panels {
    /// `[panels, head_dim]`; tokens beyond the last are zeros.
    channels: Vec<[f32; PANEL]>,
    head_dim: usize,
}

impl Panels {
    fn new(keys: &[f32], head_dim: usize) -> Self {
        let mut channels = vec![[0.0; PANEL]; keys.len().div_ceil(PANEL * head_dim) * head_dim];
        for (panel, keys) in channels.chunks_exact_mut(head_dim).zip(keys.chunks(PANEL * head_dim)) {
            for (lane, key) in keys.chunks_exact(head_dim).enumerate() {
                panel.iter_mut().zip(key).for_each(|(channel, k)| channel[lane] = *k);
            }
        }
        Self { channels, head_dim }
    }

    /// `sum_i k_i (linear_i + sum_(j <= i) quadratic_ij k_j)` of every token, whole panels, in f32 (as the definition has it).
    fn logits(&self, linear: &[f32], quadratic: &[f32]) -> Vec<f64> {
        let mut logits = Vec::with_capacity(self.channels.len() / self.head_dim.max(1) * PANEL);
        for panel in self.channels.chunks_exact(self.head_dim) {
            let mut totals = [0.0_f32; PANEL];
            let mut rest = quadratic;
            for (i, (k, &linear)) in panel.iter().zip(linear).enumerate() {
                let (row, after) = rest.split_at((i + 1).min(rest.len()));
                rest = after;
                let mut inner = [linear; PANEL];
                for (factor, other) in row.iter().zip(panel) {
                    inner.iter_mut().zip(other).for_each(|(sum, k)| *sum += factor * k);
                }
                totals.iter_mut().zip(&inner).zip(k).for_each(|((total, inner), k)| *total += inner * k);
            }
            logits.extend(totals.map(f64::from));
        }
        logits
    }
}

/// Softmax in place over the entries that are finite; the others become NaN, which is the lowest of scores.
fn softmax(logits: &mut [f64]) {
    let most = logits.iter().copied().filter(|logit| logit.is_finite()).fold(f64::NEG_INFINITY, f64::max);
    let mut total = 0.0;
    for logit in logits.iter_mut() {
        *logit = if logit.is_finite() { (*logit - most).exp() } else { f64::NAN };
        total += if logit.is_nan() { 0.0 } else { *logit };
    }
    logits.iter_mut().for_each(|mass| *mass /= total);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention_form::RotaryPairs;

    /// A mean of rotations is no rotation, and leaves channels alone that do not turn.
    #[test]
    fn rotations_to_come_are_averaged_pair_by_pair() {
        for (pairs, (a, b)) in [(RotaryPairs::Halves, (0, 2)), (RotaryPairs::Neighbours, (0, 1))] {
            let form = AttentionForm { frequencies: &[std::f64::consts::FRAC_PI_2, 0.0], pairs, scale: 1.0 };
            let mut x = vec![0.0; 5];
            (x[a], x[4]) = (1.0, 7.0);
            // Positions 4 and 5: no turn, and a quarter.
            MeanRotation::new(&form, 4, 2).apply(&mut x, 0, 1);
            let mut expected = vec![0.0; 5];
            (expected[a], expected[b], expected[4]) = (0.5, 0.5, 7.0);
            assert!(x.iter().zip(&expected).all(|(x, y)| (x - y).abs() < 1e-12), "{x:?}");
        }
    }

    #[test]
    fn logits_are_those_of_the_definition() {
        let (head_dim, num_tokens) = (6, 19);
        let noise = |i: usize| ((i * 7919 + 13) % 101) as f64 / 50.0 - 1.0;
        let keys: Vec<f32> = (0..num_tokens * head_dim).map(|i| noise(i) as f32).collect();
        let mean: Vec<f64> = (0..head_dim).map(|i| noise(1000 + i)).collect();
        let covariance: Vec<f64> = (0..head_dim * head_dim)
            .map(|i| noise(i / head_dim + i % head_dim + i / head_dim * (i % head_dim)))
            .collect();
        let queries = Gaussian { mean: mean.clone(), covariance: covariance.clone() };
        let got = Panels::new(&keys, head_dim).logits(&queries.linear(0.5), &queries.quadratic(0.5));
        for (key, got) in keys.chunks(head_dim).zip(got) {
            let k = |i: usize| f64::from(key[i]);
            let linear: f64 = (0..head_dim).map(|i| 0.5 * k(i) * mean[i]).sum();
            let pairs = (0..head_dim).flat_map(|i| (0..head_dim).map(move |j| (i, j)));
            let quadratic: f64 = pairs.map(|(i, j)| 0.125 * k(i) * covariance[i * head_dim + j] * k(j)).sum();
            assert!((got - linear - quadratic).abs() < 1e-5, "{got} for {}", linear + quadratic);
        }
    }
}
