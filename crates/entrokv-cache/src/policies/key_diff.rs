//! KeyDiff: keys that differ from the others stay.

use super::norm;
use crate::attention_rows::Taps;
use crate::policy::{EvictionPolicy, PolicyError, Schedule};
use crate::policy_options::OptionSet;
use crate::resident_tokens::{ResidentTokens, TokenTap};
use crate::shape::{CacheShape, KvGroup};
use crate::token_policy::{Axes, Options, TokenMethod, TokenScorer};

/// The policy `keydiff` (Park et al. 2025): `score = -cos(k, mean of k / |k|)` over the resident keys, rotated ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeyDiff;

const OPTIONS: OptionSet<Options<KeyDiff>> = OptionSet {
    policy: KeyDiff::NAME,
    keys: &[Options::AXES],
    without: &[],
    presets: &[],
    default: || Options { method: KeyDiff, axes: Axes::default() },
};

/// Norms below this are taken for it: a key of zeros has no direction.
const LEAST_NORM: f64 = 1e-12;

impl KeyDiff {
    /// The policy's name on a command line.
    pub const NAME: &'static str = "keydiff";

    pub(crate) fn parse(options: Option<&str>) -> Result<Box<dyn EvictionPolicy>, PolicyError> {
        OPTIONS.parse(options).map(|options| OPTIONS.policy(options))
    }
}

impl TokenMethod for KeyDiff {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn needs(&self, _schedule: Schedule) -> Taps {
        Taps::of_tokens(TokenTap::Keys)
    }

    fn scorer(&self, _shape: &CacheShape, _group: KvGroup) -> Box<dyn TokenScorer> {
        Box::new(Self)
    }
}

impl TokenScorer for KeyDiff {
    fn score(&mut self, tokens: ResidentTokens<'_>, out: &mut Vec<f32>) {
        let mut anchor: Vec<f64> = Vec::new();
        for key in tokens.keys() {
            let norm = norm(key).max(LEAST_NORM);
            anchor.resize(key.len(), 0.0);
            anchor.iter_mut().zip(key).for_each(|(sum, &k)| *sum += f64::from(k) / norm);
        }
        // The mean's length does not change a cosine.
        let length = anchor.iter().map(|x| x * x).sum::<f64>().sqrt().max(LEAST_NORM);
        out.extend(tokens.keys().map(|key| {
            let dot: f64 = key.iter().zip(&anchor).map(|(&k, anchor)| f64::from(k) * anchor).sum();
            (-dot / (norm(key).max(LEAST_NORM) * length)) as f32
        }));
    }
}
