//! Compactor: keys that span the space of keys stay, and those that others attend to in either direction.

use std::ops::Range;

use super::norm;
use crate::attention_form::AttentionForm;
use crate::attention_rows::Taps;
use crate::policy::{EvictionPolicy, PolicyError, Schedule};
use crate::policy_options::{OptionKey, OptionSet, at_least, spelling, word};
use crate::resident_tokens::{ResidentTokens, TokenTap};
use crate::shape::{CacheShape, KvGroup};
use crate::token_policy::{Axes, Options, TokenMethod, TokenScorer};
use crate::two_way_tap::{LogitScale, TwoWayTap};

/// The policy `compactor` (Chari and Van Durme 2025), blind to what will be asked: `blend` times the leverage of a key before RoPE,
/// plus the attention it receives inside blocks of `chunk` tokens without a causal mask, times the norm of its value and averaged
/// with its neighbours'. Each is centred and scaled over the tokens of a layer. The first 8 tokens and the last 4 are left out and
/// count as the best.
///
/// Leverage is that of keys seen through a random sketch of `sketch` directions, drawn from `seed`. Two things that kvpress does
/// are not done: a last block that is not full is shorter (there it is padded with keys whose logit is about 0, and with
/// queries that attend to all alike), and the sketch is the same at every run. As there, logits are not divided by `sqrt(d)` unless
/// `logits=scaled`. Blocks are those of the prompt; a token generated later is reckoned with its leverage alone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Compactor {
    /// `parts`: what counts.
    pub parts: CompactorParts,
    /// `blend`: what leverage counts against attention.
    pub blend: f64,
    /// `chunk`: tokens of a block.
    pub chunk: usize,
    /// `sketch`: directions that keys are seen through.
    pub sketch: usize,
    /// `logits`: what a dot product is multiplied with.
    pub logits: LogitScale,
    /// `seed`: of the sketch.
    pub seed: u64,
}

/// What counts in a score.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompactorParts {
    /// Leverage and attention.
    Both,
    /// Leverage alone.
    Leverage,
    /// Attention alone.
    NonCausal,
}

const PARTS: [(&str, CompactorParts); 3] =
    [("both", CompactorParts::Both), ("leverage", CompactorParts::Leverage), ("non-causal", CompactorParts::NonCausal)];

const LOGITS: [(&str, LogitScale); 2] = [("unscaled", LogitScale::Unscaled), ("scaled", LogitScale::Scaled)];

/// Tokens left out at either end.
const FIRST: usize = 8;
const LAST: usize = 4;

/// What is added to the diagonal first; ten times as much where that is not enough.
const DAMPING: f64 = 1e-2;
const TRIES: usize = 5;

impl Default for Compactor {
    fn default() -> Self {
        let (parts, logits) = (CompactorParts::Both, LogitScale::Unscaled);
        Self { parts, blend: 0.35, chunk: 256, sketch: 48, logits, seed: 0 }
    }
}

const OPTIONS: OptionSet<Options<Compactor>> = OptionSet {
    policy: Compactor::NAME,
    keys: &[
        &[
            OptionKey {
                key: "parts",
                expected: "both, leverage or non-causal",
                read: |options, text| word(text, &PARTS).map(|parts| options.method.parts = parts),
                show: |options| spelling(options.method.parts, &PARTS),
            },
            OptionKey {
                key: "blend",
                expected: "a factor from 0 to 100",
                read: |options, text| {
                    options.method.blend = text.parse().ok().filter(|blend| (0.0..=100.0).contains(blend))?;
                    Some(())
                },
                show: |options| options.method.blend.to_string(),
            },
            OptionKey {
                key: "chunk",
                expected: "a number of tokens from 2 to 4096",
                read: |options, text| {
                    options.method.chunk = at_least(text, 2).filter(|chunk| *chunk <= 4096)?;
                    Some(())
                },
                show: |options| options.method.chunk.to_string(),
            },
            OptionKey {
                key: "sketch",
                expected: "a number of directions from 1 to 256",
                read: |options, text| {
                    options.method.sketch = at_least(text, 1).filter(|sketch| *sketch <= 256)?;
                    Some(())
                },
                show: |options| options.method.sketch.to_string(),
            },
            OptionKey {
                key: "logits",
                expected: "unscaled or scaled",
                read: |options, text| word(text, &LOGITS).map(|logits| options.method.logits = logits),
                show: |options| spelling(options.method.logits, &LOGITS),
            },
            OptionKey {
                key: "seed",
                expected: "a number, 0 or more",
                read: |options, text| text.parse().ok().map(|seed| options.method.seed = seed),
                show: |options| options.method.seed.to_string(),
            },
        ],
        Options::AXES,
    ],
    without: &[],
    presets: &[],
    default: || Options { method: Compactor::default(), axes: Axes { sinks: 8, ..Axes::default() } },
};

impl Compactor {
    /// The policy's name on a command line.
    pub const NAME: &'static str = "compactor";

    pub(crate) fn parse(options: Option<&str>) -> Result<Box<dyn EvictionPolicy>, PolicyError> {
        OPTIONS.parse(options).map(|options| OPTIONS.policy(options))
    }

    /// A scorer that sees keys through `sketch` `[head_dim, directions]`.
    #[must_use]
    pub fn scorer_through(self, sketch: Vec<f64>) -> Box<dyn TokenScorer> {
        Box::new(CompactorScorer { options: self, sketch, leverage: Vec::new(), attention: Vec::new() })
    }
}

impl TokenMethod for Compactor {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn needs(&self, _schedule: Schedule) -> Taps {
        let two_way = TwoWayTap::Sums { chunk: self.chunk, first: FIRST, last: LAST, scale: self.logits };
        match self.parts {
            CompactorParts::Leverage => Taps::of_tokens(TokenTap::Keys),
            CompactorParts::Both | CompactorParts::NonCausal => {
                Taps { two_way, ..Taps::of_tokens(TokenTap::KeysAndValues) }
            }
        }
    }

    fn scorer(&self, shape: &CacheShape, group: KvGroup) -> Box<dyn TokenScorer> {
        let stream = self.seed.wrapping_mul(0x1_0000_0001).wrapping_add(shape.group_index(group) as u64);
        self.scorer_through(gaussian(stream, shape.head_dim * self.sketch, (self.sketch as f64).sqrt().recip()))
    }
}

#[derive(Clone)]
struct CompactorScorer {
    options: Compactor,
    /// `[head_dim, directions]`.
    sketch: Vec<f64>,
    /// Of the tokens last measured, without those left out; empty where it does not count.
    leverage: Vec<Option<f64>>,
    /// The same; `None` for tokens that no block held.
    attention: Vec<Option<f64>>,
}

impl TokenScorer for CompactorScorer {
    fn measure(&mut self, tokens: ResidentTokens<'_>, sums: &mut Vec<f64>) {
        let inner = inner(&tokens);
        self.leverage.clear();
        self.attention.clear();
        if self.options.parts != CompactorParts::NonCausal {
            let positions = tokens.positions[inner.clone()].iter();
            let keys = tokens.keys().skip(inner.start).zip(positions);
            let keys: Vec<Vec<f64>> = keys.map(|(key, &position)| rotated_back(&tokens.form, key, position)).collect();
            self.leverage = leverage(&keys, &self.sketch, self.options.sketch);
        }
        if self.options.parts != CompactorParts::Leverage {
            let received = tokens.two_way[inner.clone()].iter().zip(tokens.values().skip(inner.start));
            let weighed = received.map(|(sum, value)| (!sum.is_nan()).then(|| f64::from(*sum) * norm(value)));
            self.attention = mean_of_three(&weighed.collect::<Vec<_>>());
        }
        sums.extend(Spread::of(&self.leverage).sums());
        sums.extend(Spread::of(&self.attention).sums());
    }

    fn score(&mut self, tokens: ResidentTokens<'_>, out: &mut Vec<f32>) {
        let inner = inner(&tokens);
        let [leverage, attention] = [0, 3].map(|at| Spread::read(&tokens.layer_sums[at..at + 3]));
        let z = |parts: &[Option<f64>], token: usize, spread: &Spread| {
            parts.get(token).copied().flatten().map_or(0.0, |x| spread.z(x))
        };
        let score = |token: usize| {
            let leverage = z(&self.leverage, token, &leverage);
            (self.options.blend * leverage + z(&self.attention, token, &attention)) as f32
        };
        let scores: Vec<f32> = (0..inner.len()).map(score).collect();
        let best = scores.iter().copied().fold(0.0, f32::max);
        out.resize(inner.start, best);
        out.extend(scores);
        out.resize(tokens.len(), best);
    }

    fn retain(&mut self, _positions: &[u32]) {
        // Made anew at the next decision.
        (self.leverage, self.attention) = (Vec::new(), Vec::new());
    }

    fn state_bytes(&self) -> u64 {
        let parts = (self.leverage.capacity() + self.attention.capacity()) * size_of::<Option<f64>>();
        (size_of::<Self>() + parts + self.sketch.capacity() * size_of::<f64>()) as u64
    }
}

/// The tokens that are scored: all but those left out at either end.
fn inner(tokens: &ResidentTokens<'_>) -> Range<usize> {
    let start = tokens.positions.partition_point(|position| (*position as usize) < FIRST);
    start..tokens.len().saturating_sub(LAST).max(start)
}

/// A key at `position` as it was before RoPE.
fn rotated_back(form: &AttentionForm<'_>, key: &[f32], position: u32) -> Vec<f64> {
    let mut key: Vec<f64> = key.iter().copied().map(f64::from).collect();
    for ((a, b), frequency) in form.pairs().zip(form.frequencies) {
        let (sin, cos) = (f64::from(position) * frequency).sin_cos();
        (key[a], key[b]) = (cos * key[a] + sin * key[b], cos * key[b] - sin * key[a]);
    }
    key
}

/// `x^T (X^T X + damping)^-1 x` of every centred key seen through the sketch; NaN for a key that is no number, which no other key
/// is told of.
fn leverage(keys: &[Vec<f64>], sketch: &[f64], directions: usize) -> Vec<Option<f64>> {
    let is_number = |key: &[f64]| key.iter().all(|x| x.is_finite());
    let head_dim = sketch.len() / directions;
    let numbers = || keys.iter().filter(|key| is_number(key));
    let count = numbers().count().max(1) as f64;
    let mut mean = vec![0.0; head_dim];
    numbers().for_each(|key| mean.iter_mut().zip(key).for_each(|(mean, x)| *mean += x / count));
    let seen = |key: &Vec<f64>| {
        let mut x = vec![0.0; directions];
        for ((k, mean), row) in key.iter().zip(&mean).zip(sketch.chunks_exact(directions)) {
            x.iter_mut().zip(row).for_each(|(x, factor)| *x += (k - mean) * factor);
        }
        x
    };
    let rows: Vec<Option<Vec<f64>>> = keys.iter().map(|key| is_number(key).then(|| seen(key))).collect();
    let mut gram = vec![0.0; directions * directions];
    for row in rows.iter().flatten() {
        for (x, sums) in row.iter().zip(gram.chunks_exact_mut(directions)) {
            sums.iter_mut().zip(row).for_each(|(sum, y)| *sum += x * y);
        }
    }
    let damped = (0..TRIES as i32).find_map(|times| cholesky(&gram, directions, DAMPING * 10_f64.powi(times)));
    let of_row = |row: &Option<Vec<f64>>| match (row, &damped) {
        (Some(row), Some(factor)) => {
            // x^T (L L^T)^-1 x is the square of L^-1 x.
            let mut solved: Vec<f64> = Vec::with_capacity(directions);
            for (i, x) in row.iter().enumerate() {
                let known: f64 = solved.iter().zip(&factor[i * directions..]).map(|(y, l)| y * l).sum();
                solved.push((x - known) / factor[i * directions + i]);
            }
            Some(solved.iter().map(|y| y * y).sum())
        }
        _ => Some(f64::NAN),
    };
    rows.iter().map(of_row).collect()
}

/// The lower factor of `gram + damping I`, `[n, n]`; `None` where it is not positive.
fn cholesky(gram: &[f64], n: usize, damping: f64) -> Option<Vec<f64>> {
    let mut factor = vec![0.0; n * n];
    for i in 0..n {
        for j in 0..=i {
            let known: f64 = (0..j).map(|k| factor[i * n + k] * factor[j * n + k]).sum();
            let left = gram[i * n + j] - known + if i == j { damping } else { 0.0 };
            factor[i * n + j] = if i == j { (left > 0.0).then(|| left.sqrt())? } else { left / factor[j * n + j] };
        }
    }
    Some(factor)
}

/// The mean of each entry and its neighbours, what is beyond the ends or was not taken counting 0.
fn mean_of_three(x: &[Option<f64>]) -> Vec<Option<f64>> {
    let at = |index: Option<usize>| index.and_then(|index| x.get(index).copied().flatten()).unwrap_or(0.0);
    let mean = |(index, own): (usize, &Option<f64>)| {
        own.map(|own| (at(index.checked_sub(1)) + own + at(index.checked_add(1))) / 3.0)
    };
    x.iter().enumerate().map(mean).collect()
}

/// Number, sum and sum of squares of what is a number, to be added up over the heads of a layer.
#[derive(Clone)]
struct Spread {
    count: f64,
    sum: f64,
    squares: f64,
}

impl Spread {
    fn of(parts: &[Option<f64>]) -> Self {
        let mut spread = Self { count: 0.0, sum: 0.0, squares: 0.0 };
        for x in parts.iter().flatten().filter(|x| x.is_finite()) {
            spread.count += 1.0;
            spread.sum += x;
            spread.squares += x * x;
        }
        spread
    }

    fn sums(&self) -> [f64; 3] {
        [self.count, self.sum, self.squares]
    }

    fn read(sums: &[f64]) -> Self {
        Self { count: sums[0], sum: sums[1], squares: sums[2] }
    }

    /// `x` less the mean, over the deviation (of a sample); 0 where all are alike.
    fn z(&self, x: f64) -> f64 {
        let mean = self.sum / self.count;
        let variance = (self.squares - self.sum * mean) / (self.count - 1.0);
        // What is left of equals is rounding.
        if variance > 1e-12 * (self.squares / self.count) { (x - mean) / variance.sqrt() } else { x * 0.0 }
    }
}

/// Gaussian numbers of deviation `scale`: a stream of hashes (SplitMix64), two of them a number (Box and Muller 1958).
fn gaussian(seed: u64, count: usize, scale: f64) -> Vec<f64> {
    let mut state = seed;
    let mut uniform = || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((x ^ (x >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    };
    let number = |_| {
        let (radius, angle) = (1.0 - uniform(), uniform());
        scale * (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos()
    };
    (0..count).map(number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sketch_is_gaussian_and_the_same_at_every_run() {
        let sketch = gaussian(7, 20_000, 0.5);
        let mean = sketch.iter().sum::<f64>() / 20_000.0;
        let variance = sketch.iter().map(|x| x * x).sum::<f64>() / 20_000.0;
        assert!(mean.abs() < 0.02 && (variance - 0.25).abs() < 0.01, "{mean}, {variance}");
        assert_eq!(gaussian(7, 20_000, 0.5), sketch);
        assert_ne!(gaussian(8, 20_000, 0.5), sketch);
    }

    #[test]
    fn a_factor_is_that_of_what_was_damped_and_of_nothing_else() {
        let gram = [4.0, 2.0, 2.0, 3.0];
        let l = cholesky(&gram, 2, 1.0).unwrap();
        assert!((l[0] * l[0] - 5.0).abs() < 1e-12 && (l[2] * l[0] - 2.0).abs() < 1e-12);
        assert!((l[2] * l[2] + l[3] * l[3] - 4.0).abs() < 1e-12);
        assert_eq!(cholesky(&[-4.0], 1, 1.0), None);
        assert_eq!(cholesky(&[f64::NAN], 1, 1.0), None);
    }
}
