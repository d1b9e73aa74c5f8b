//! StreamingLLM: the first tokens and the newest ones.

use crate::attention_rows::Taps;
use crate::policy::{EvictionPolicy, PolicyError, Rotation, Schedule};
use crate::policy_options::{OptionKey, OptionSet, spelling, word};
use crate::resident_tokens::{ResidentTokens, TokenTap};
use crate::shape::{CacheShape, KvGroup};
use crate::token_policy::{Axes, Options, TokenMethod, TokenScorer};

/// The policy `streaming-llm` (Xiao et al. 2023): `n_sink` first tokens and as many newest ones as the budget holds.
///
/// Keys keep the rotation of their positions, as in kvpress; with `rerotate=true` they are rotated by slot, as in the authors'
/// code.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamingLlm {
    /// `rerotate`: whether distances are those of the text or those in the cache.
    pub rotation: Rotation,
}

const ROTATIONS: [(&str, Rotation); 2] = [("false", Rotation::Position), ("true", Rotation::Slot)];

const OPTIONS: OptionSet<Options<StreamingLlm>> = OptionSet {
    policy: StreamingLlm::NAME,
    keys: &[
        &[OptionKey {
            key: "rerotate",
            expected: "true or false",
            read: |options, text| word(text, &ROTATIONS).map(|rotation| options.method.rotation = rotation),
            show: |options| spelling(options.method.rotation, &ROTATIONS),
        }],
        Options::AXES,
    ],
    // Scores are positions: within a page, between heads and layers there is nothing to choose.
    without: &["block", "allot", "share"],
    presets: &[],
    default: || Options { method: StreamingLlm::default(), axes: Axes::default() },
};

impl StreamingLlm {
    /// The policy's name on a command line.
    pub const NAME: &'static str = "streaming-llm";

    pub(crate) fn parse(options: Option<&str>) -> Result<Box<dyn EvictionPolicy>, PolicyError> {
        OPTIONS.parse(options).map(|options| OPTIONS.policy(options))
    }
}

impl TokenMethod for StreamingLlm {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn needs(&self, _schedule: Schedule) -> Taps {
        Taps::of_tokens(TokenTap::None)
    }

    fn rotation(&self) -> Rotation {
        self.rotation
    }

    fn scorer(&self, _shape: &CacheShape, _group: KvGroup) -> Box<dyn TokenScorer> {
        Box::new(*self)
    }
}

impl TokenScorer for StreamingLlm {
    fn score(&mut self, tokens: ResidentTokens<'_>, out: &mut Vec<f32>) {
        // The sinks are pinned. Exact up to 2^24 tokens, and in order beyond.
        out.extend(tokens.positions.iter().map(|&position| position as f32));
    }
}
