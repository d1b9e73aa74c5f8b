//! KNorm: keys of small norm attract attention.

use super::norm;
use crate::attention_rows::Taps;
use crate::policy::{EvictionPolicy, PolicyError, Schedule};
use crate::policy_options::OptionSet;
use crate::resident_tokens::{ResidentTokens, TokenTap};
use crate::shape::{CacheShape, KvGroup};
use crate::token_policy::{Axes, Options, TokenMethod, TokenScorer};

/// The policy `knorm` (Devoto et al. 2024): `score = -|k|`. Rotation does not change a norm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KNorm;

const OPTIONS: OptionSet<Options<KNorm>> = OptionSet {
    policy: KNorm::NAME,
    keys: &[Options::AXES],
    without: &[],
    presets: &[],
    default: || Options { method: KNorm, axes: Axes::default() },
};

impl KNorm {
    /// The policy's name on a command line.
    pub const NAME: &'static str = "knorm";

    pub(crate) fn parse(options: Option<&str>) -> Result<Box<dyn EvictionPolicy>, PolicyError> {
        OPTIONS.parse(options).map(|options| OPTIONS.policy(options))
    }
}

impl TokenMethod for KNorm {
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

impl TokenScorer for KNorm {
    fn score(&mut self, tokens: ResidentTokens<'_>, out: &mut Vec<f32>) {
        out.extend(tokens.keys().map(|key| -norm(key) as f32));
    }
}
