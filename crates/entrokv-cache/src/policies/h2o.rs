//! H2O and its average: what was attended to most so far stays.

use super::row_sums::RowSums;
use crate::attention_rows::{AttentionRows, RowSource, RowTap, Taps};
use crate::pins::RecentPages;
use crate::policy::{EvictionPolicy, PolicyError, Schedule};
use crate::policy_options::OptionSet;
use crate::resident_tokens::ResidentTokens;
use crate::shape::{CacheShape, KvGroup};
use crate::token_policy::{Axes, Options, TokenMethod, TokenScorer};

/// The policy `h2o` (Zhang et al. 2023): attention a token has received from all queries so far, the heads of a group
/// averaged. Half of the budget is for the newest pages, which have had no time to be attended to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct H2o;

/// The policy `observed-attention`: as [`H2o`], but the mean over the queries that could see the token (kvpress's form), which
/// takes the first tokens' advantage away.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ObservedAttention;

fn axes() -> Axes {
    Axes { recent: RecentPages::Half, ..Axes::default() }
}

const H2O_OPTIONS: OptionSet<Options<H2o>> = OptionSet {
    policy: H2o::NAME,
    keys: &[Options::HEADS, Options::AXES],
    without: &[],
    presets: &[],
    default: || Options { method: H2o, axes: axes() },
};

const OBSERVED_OPTIONS: OptionSet<Options<ObservedAttention>> = OptionSet {
    policy: ObservedAttention::NAME,
    keys: &[Options::HEADS, Options::AXES],
    without: &[],
    presets: &[],
    default: || Options { method: ObservedAttention, axes: axes() },
};

impl H2o {
    /// The policy's name on a command line.
    pub const NAME: &'static str = "h2o";

    pub(crate) fn parse(options: Option<&str>) -> Result<Box<dyn EvictionPolicy>, PolicyError> {
        H2O_OPTIONS.parse(options).map(|options| H2O_OPTIONS.policy(options))
    }
}

impl ObservedAttention {
    /// The policy's name on a command line.
    pub const NAME: &'static str = "observed-attention";

    pub(crate) fn parse(options: Option<&str>) -> Result<Box<dyn EvictionPolicy>, PolicyError> {
        OBSERVED_OPTIONS.parse(options).map(|options| OBSERVED_OPTIONS.policy(options))
    }
}

fn needs(schedule: Schedule) -> Taps {
    Taps { prompt: RowTap::Accumulated, step_rows: schedule.goes_on(), ..Taps::default() }
}

impl TokenMethod for H2o {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn needs(&self, schedule: Schedule) -> Taps {
        needs(schedule)
    }

    fn scorer(&self, _shape: &CacheShape, _group: KvGroup) -> Box<dyn TokenScorer> {
        Box::new(Received { sums: RowSums::new(), count: Count::Sum })
    }
}

impl TokenMethod for ObservedAttention {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn needs(&self, schedule: Schedule) -> Taps {
        needs(schedule)
    }

    fn scorer(&self, _shape: &CacheShape, _group: KvGroup) -> Box<dyn TokenScorer> {
        Box::new(Received { sums: RowSums::new(), count: Count::Mean })
    }
}

/// Attention received.
#[derive(Clone)]
struct Received {
    sums: RowSums,
    count: Count,
}

/// Whether what a token received is divided by the number of queries that could see it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Count {
    Sum,
    Mean,
}

impl TokenScorer for Received {
    fn observe(&mut self, rows: AttentionRows<'_>) {
        debug_assert_ne!(rows.source, RowSource::Prompt, "column sums were asked for");
        self.sums.add(rows, 1.0, 1.0);
    }

    fn score(&mut self, tokens: ResidentTokens<'_>, out: &mut Vec<f32>) {
        let end = tokens.positions.last().map_or(0, |&newest| u64::from(newest) + 1);
        let received = self.sums.at(tokens.positions).zip(tokens.positions);
        out.extend(received.map(|(sum, &position)| match self.count {
            Count::Sum => sum as f32,
            Count::Mean => (sum / (end - u64::from(position)) as f64) as f32,
        }));
    }

    fn retain(&mut self, positions: &[u32]) {
        self.sums.retain(positions);
    }

    fn nan_rows(&self) -> u64 {
        self.sums.bad_rows()
    }

    fn state_bytes(&self) -> u64 {
        self.sums.bytes()
    }
}
