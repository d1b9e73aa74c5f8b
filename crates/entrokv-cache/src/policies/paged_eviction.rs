//! PagedEviction: whole pages with large values and small keys stay.

use super::norm;
use crate::attention_rows::Taps;
use crate::page_entro_kv::BlockProjection;
use crate::pins::RecentPages;
use crate::policy::{EvictionPolicy, PolicyError, Schedule, Sharing};
use crate::policy_options::OptionSet;
use crate::resident_tokens::{ResidentTokens, TokenTap};
use crate::shape::{CacheShape, KvGroup};
use crate::token_policy::{Axes, Options, TokenMethod, TokenScorer};

/// The policy `paged-eviction` (Chitty-Venkata et al. 2025): `score = |v| / |k|`, averaged over the heads of a layer and over a
/// page; the first and the last page stay. While decoding one page goes for each that is filled.
///
/// The paper's direction: the public code keeps large keys in one of its modes. A prompt's tokens are not chosen one by one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PagedEviction;

const OPTIONS: OptionSet<Options<PagedEviction>> = OptionSet {
    policy: PagedEviction::NAME,
    keys: &[Options::AXES],
    without: &[],
    presets: &[],
    default: || Options {
        method: PagedEviction,
        axes: Axes {
            sinks: 1,
            recent: RecentPages::Count(1),
            block: BlockProjection::Mean,
            sharing: Sharing::Layer,
            ..Axes::default()
        },
    },
};

/// A key of zeros counts as one so short.
const LEAST_NORM: f64 = 1e-12;

impl PagedEviction {
    /// The policy's name on a command line.
    pub const NAME: &'static str = "paged-eviction";

    pub(crate) fn parse(options: Option<&str>) -> Result<Box<dyn EvictionPolicy>, PolicyError> {
        OPTIONS.parse(options).map(|options| OPTIONS.policy(options))
    }
}

impl TokenMethod for PagedEviction {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn needs(&self, _schedule: Schedule) -> Taps {
        Taps::of_tokens(TokenTap::KeysAndValues)
    }

    fn scorer(&self, _shape: &CacheShape, _group: KvGroup) -> Box<dyn TokenScorer> {
        Box::new(Self)
    }
}

impl TokenScorer for PagedEviction {
    fn score(&mut self, tokens: ResidentTokens<'_>, out: &mut Vec<f32>) {
        let pairs = tokens.keys().zip(tokens.values());
        out.extend(pairs.map(|(key, value)| (norm(value) / norm(key).max(LEAST_NORM)) as f32));
    }
}
