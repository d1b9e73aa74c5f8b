//! CurDKV: tokens with much of their neighbourhood's energy in keys and values stay.

use crate::attention_rows::Taps;
use crate::policy::{EvictionPolicy, PolicyError, Schedule};
use crate::policy_options::{OptionKey, OptionSet, at_least, spelling, word};
use crate::resident_tokens::{ResidentTokens, TokenTap};
use crate::shape::{CacheShape, KvGroup};
use crate::token_policy::{Axes, Options, TokenMethod, TokenScorer};

/// The policy `cur` (CurDKV, Sengupta et al. 2025): leverage taken for the share of `|k|^2` and of `|v|^2` in windows of
/// `window` tokens, combined, and normalised over the sequence. The first `first` tokens count 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cur {
    /// `window`: tokens that share 1.
    pub window: usize,
    /// `first`: tokens that count 1.
    pub first: usize,
    /// `combine`: how keys and values come together.
    pub combine: CurCombine,
}

/// How shares of keys and values come together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CurCombine {
    /// Their product.
    Product,
    /// That of the keys alone.
    Key,
    /// That of the values alone.
    Value,
    /// Their mean.
    Average,
}

const COMBINES: [(&str, CurCombine); 4] = [
    ("product", CurCombine::Product),
    ("key", CurCombine::Key),
    ("value", CurCombine::Value),
    ("average", CurCombine::Average),
];

impl Default for Cur {
    fn default() -> Self {
        Self { window: 16, first: 4, combine: CurCombine::Product }
    }
}

const OPTIONS: OptionSet<Options<Cur>> = OptionSet {
    policy: Cur::NAME,
    keys: &[
        &[
            OptionKey {
                key: "window",
                expected: "a number of tokens, 1 or more",
                read: |options, text| at_least(text, 1).map(|window| options.method.window = window),
                show: |options| options.method.window.to_string(),
            },
            OptionKey {
                key: "first",
                expected: "a number of tokens, 0 or more",
                read: |options, text| text.parse().ok().map(|first| options.method.first = first),
                show: |options| options.method.first.to_string(),
            },
            OptionKey {
                key: "combine",
                expected: "product, key, value or average",
                read: |options, text| word(text, &COMBINES).map(|combine| options.method.combine = combine),
                show: |options| spelling(options.method.combine, &COMBINES),
            },
        ],
        Options::AXES,
    ],
    without: &[],
    presets: &[],
    default: || Options { method: Cur::default(), axes: Axes::default() },
};

impl Cur {
    /// The policy's name on a command line.
    pub const NAME: &'static str = "cur";

    pub(crate) fn parse(options: Option<&str>) -> Result<Box<dyn EvictionPolicy>, PolicyError> {
        OPTIONS.parse(options).map(|options| OPTIONS.policy(options))
    }
}

impl TokenMethod for Cur {
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

impl TokenScorer for Cur {
    fn score(&mut self, tokens: ResidentTokens<'_>, out: &mut Vec<f32>) {
        let of_keys = shares(tokens.keys(), self.window);
        let of_values = shares(tokens.values(), self.window);
        let pairs = of_keys.iter().zip(&of_values);
        let scores: Vec<f64> = match self.combine {
            CurCombine::Product => pairs.map(|(k, v)| k * v).collect(),
            CurCombine::Key => of_keys,
            CurCombine::Value => of_values,
            CurCombine::Average => pairs.map(|(k, v)| (k + v) / 2.0).collect(),
        };
        let total = scores.iter().sum::<f64>();
        let normalised = scores.iter().map(|score| if total > 0.0 { (score / total) as f32 } else { 0.0 });
        out.extend(normalised.enumerate().map(|(token, score)| if token < self.first { 1.0 } else { score }));
    }
}

/// `|x|^2` over its sum in windows of consecutive rows; 0 in a window of zeros.
fn shares<'a>(rows: impl Iterator<Item = &'a [f32]>, window: usize) -> Vec<f64> {
    let mut energies: Vec<f64> = rows.map(|row| row.iter().map(|&x| f64::from(x) * f64::from(x)).sum()).collect();
    for window in energies.chunks_mut(window) {
        let total: f64 = window.iter().sum();
        window.iter_mut().for_each(|energy| *energy = if total > 0.0 { *energy / total } else { 0.0 });
    }
    energies
}
