//! TOVA: what the newest token attends to stays.

use super::row_sums::RowSums;
use crate::attention_rows::{AttentionRows, RowTap, Taps};
use crate::policy::{EvictionPolicy, PolicyError, Schedule, Sharing};
use crate::policy_options::OptionSet;
use crate::resident_tokens::ResidentTokens;
use crate::shape::{CacheShape, KvGroup};
use crate::token_policy::{Axes, Options, TokenMethod, TokenScorer};

/// The policy `tova` (Oren et al. 2024): the newest query's attention, averaged over all heads of a layer, which keep the same
/// pages. No sinks are pinned: the paper finds that they stay by themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tova;

const OPTIONS: OptionSet<Options<Tova>> = OptionSet {
    policy: Tova::NAME,
    keys: &[Options::HEADS, Options::AXES],
    without: &[],
    presets: &[],
    default: || Options { method: Tova, axes: Axes { sinks: 0, sharing: Sharing::Layer, ..Axes::default() } },
};

impl Tova {
    /// The policy's name on a command line.
    pub const NAME: &'static str = "tova";

    pub(crate) fn parse(options: Option<&str>) -> Result<Box<dyn EvictionPolicy>, PolicyError> {
        OPTIONS.parse(options).map(|options| OPTIONS.policy(options))
    }
}

impl TokenMethod for Tova {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn needs(&self, schedule: Schedule) -> Taps {
        Taps { prompt: RowTap::Last, step_rows: schedule.goes_on(), ..Taps::default() }
    }

    fn scorer(&self, _shape: &CacheShape, _group: KvGroup) -> Box<dyn TokenScorer> {
        Box::new(TovaScorer { newest: RowSums::new() })
    }
}

#[derive(Clone)]
struct TovaScorer {
    newest: RowSums,
}

impl TokenScorer for TovaScorer {
    fn observe(&mut self, rows: AttentionRows<'_>) {
        // Each row takes the place of the one before.
        self.newest.add(rows, 0.0, 1.0);
    }

    fn score(&mut self, tokens: ResidentTokens<'_>, out: &mut Vec<f32>) {
        out.extend(self.newest.at(tokens.positions).map(|score| score as f32));
    }

    fn retain(&mut self, positions: &[u32]) {
        self.newest.retain(positions);
    }

    fn nan_rows(&self) -> u64 {
        self.newest.bad_rows()
    }

    fn state_bytes(&self) -> u64 {
        self.newest.bytes()
    }
}
