//! Random eviction: what any other policy must beat.

use crate::attention_rows::Taps;
use crate::policy::{EvictionPolicy, PolicyError, Schedule};
use crate::policy_options::{OptionKey, OptionSet};
use crate::resident_tokens::{ResidentTokens, TokenTap};
use crate::shape::{CacheShape, KvGroup};
use crate::token_policy::{Axes, Options, TokenMethod, TokenScorer};

/// The policy `random`: a score that hangs on the seed, the KV group and the position, so that runs repeat.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Random {
    /// `seed`: another seed gives other pages.
    pub seed: u64,
}

const OPTIONS: OptionSet<Options<Random>> = OptionSet {
    policy: Random::NAME,
    keys: &[
        &[OptionKey {
            key: "seed",
            expected: "an integer of 0 or more",
            read: |options, text| text.parse().ok().map(|seed| options.method.seed = seed),
            show: |options| options.method.seed.to_string(),
        }],
        Options::AXES,
    ],
    without: &[],
    presets: &[],
    default: || Options { method: Random::default(), axes: Axes::default() },
};

impl Random {
    /// The policy's name on a command line.
    pub const NAME: &'static str = "random";

    pub(crate) fn parse(options: Option<&str>) -> Result<Box<dyn EvictionPolicy>, PolicyError> {
        OPTIONS.parse(options).map(|options| OPTIONS.policy(options))
    }
}

impl TokenMethod for Random {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn needs(&self, _schedule: Schedule) -> Taps {
        Taps::of_tokens(TokenTap::None)
    }

    fn scorer(&self, shape: &CacheShape, group: KvGroup) -> Box<dyn TokenScorer> {
        let group = shape.group_index(group) as u64;
        Box::new(RandomScorer { seed: mixed(self.seed).wrapping_add(group) })
    }
}

#[derive(Clone)]
struct RandomScorer {
    /// The group's own.
    seed: u64,
}

impl TokenScorer for RandomScorer {
    fn score(&mut self, tokens: ResidentTokens<'_>, out: &mut Vec<f32>) {
        let seed = mixed(self.seed);
        // 24 bits: all that f32 tells apart in 0..1.
        out.extend(
            tokens
                .positions
                .iter()
                .map(|&position| (mixed(seed.wrapping_add(u64::from(position))) >> 40) as f32 / (1 << 24) as f32),
        );
    }
}

/// The output function of SplitMix64 (Steele, Lea and Flood 2014).
fn mixed(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}
