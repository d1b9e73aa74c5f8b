//! RocketKV's first stage: SnapKV over a wide neighbourhood, and how much it may keep.

use super::pool_kind::PoolKind;
use super::snap_kv::SnapKv;
use crate::policy::{EvictionPolicy, PolicyError};
use crate::policy_options::OptionSet;
use crate::token_policy::Options;

/// The policy `rocketkv` (Behnam et al. 2025), stage 1: the attention of the last 32 queries and a group's heads, the largest within 63
/// tokens. [`RocketPlan`] says how many tokens the paper gives that stage.
///
/// Stage 2 reads less of what is kept at each step and frees none of it; it is no eviction and not here. The paper sums where
/// [`SnapKv`] takes means, which ranks alike.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RocketKv;

const OPTIONS: OptionSet<Options<SnapKv>> = OptionSet {
    policy: RocketKv::NAME,
    keys: &[SnapKv::KEYS, Options::HEADS, Options::AXES],
    without: SnapKv::WITHOUT,
    presets: &[],
    default: || Options { method: SnapKv { window: 32, kernel: 63, pool: PoolKind::Max }, axes: SnapKv::axes() },
};

impl RocketKv {
    /// The policy's name on a command line.
    pub const NAME: &'static str = "rocketkv";

    pub(crate) fn parse(options: Option<&str>) -> Result<Box<dyn EvictionPolicy>, PolicyError> {
        SnapKv::parse_as(&OPTIONS, options)
    }
}

/// How RocketKV splits the compression of a prompt between its stages (section 3 of the paper), for a head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RocketPlan {
    /// `c`: tokens of the sequence for each token read a step, at least 1.
    pub compression: f64,
    /// `a`: the part of `ln c` that stage 1 takes, `0.2 + 0.06 log2 c`, at most 0.8.
    pub split: f64,
    /// Tokens that stage 1 leaves room for, `floor(length / c^a)`.
    pub capacity: usize,
    /// Those of the prompt among them: the rest is for the answer.
    pub prompt: usize,
    /// Tokens that stage 2 reads a step.
    pub step_tokens: usize,
    /// What is left to stage 2, `capacity / budget`, at least 1.
    pub step_compression: f64,
    /// Tokens that stage 2 takes together.
    pub chunk: usize,
    /// Channels that stage 2 compares, of `head_dim`.
    pub channels: usize,
}

impl RocketPlan {
    /// The plan for sequences of up to `length` tokens, `budget` of them (1 or more) read a step, `reserve` of them the answer's, with
    /// heads of `head_dim`. The number of channels is rounded; the authors' accuracy runs truncate it.
    #[must_use]
    pub fn new(length: usize, budget: usize, reserve: usize, head_dim: usize) -> Self {
        let budget = budget.max(1);
        let compression = (length as f64 / budget as f64).max(1.0);
        let split = (0.2 + 0.06 * compression.log2()).min(0.8);
        let capacity = (length as f64 / compression.powf(split)) as usize;
        let step_compression = (capacity as f64 / budget as f64).max(1.0);
        let root = step_compression.sqrt().ceil();
        let chunk = if root <= step_compression { root } else { 1.0 };
        let channels = (head_dim as f64 * chunk / step_compression).round_ties_even() as usize;
        Self {
            compression,
            split,
            capacity,
            prompt: capacity.saturating_sub(reserve),
            step_tokens: budget / 2,
            step_compression,
            chunk: chunk as usize,
            channels: channels.clamp(1, head_dim.max(1)),
        }
    }
}
