//! RocketKV: SnapKV over a wide neighbourhood, how much it may keep, and what a step reads of that.

use super::pool_kind::PoolKind;
use super::snap_kv::SnapKv;
use crate::policy::{EvictionPolicy, Granularity, PolicyError};
use crate::policy_options::{OptionKey, OptionSet, at_least};
use crate::reading::{PageJudge, PageReads, Reading};
use crate::token_policy::Options;

/// The policy `rocketkv` (Behnam et al. 2025). Stage 1 evicts: the attention of the last 32 queries and a group's heads, the largest
/// within 63 tokens. The paper sums where [`SnapKv`] takes means, which ranks alike.
///
/// Stage 2, with `tokens=N`, has a step read so many tokens of what is kept and frees none of it ([`PageJudge::Channels`]). The paper
/// takes tokens together by few and chooses among them singly; here a page is what is judged and read, in `channels` channels.
/// What a step does not read has no attention from it for stage 1. [`RocketPlan`] says what the paper would have both stages keep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RocketKv;

const OPTIONS: OptionSet<Options<SnapKv>> = OptionSet {
    policy: RocketKv::NAME,
    keys: &[SnapKv::KEYS, Options::HEADS, Options::AXES, RocketKv::KEYS],
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

    /// Stage 2, read after the axes.
    const KEYS: &'static [OptionKey<Options<SnapKv>>] = &[
        OptionKey {
            key: "tokens",
            expected: "all, or a number of tokens, 1 or more, with granularity=page",
            read: |options, text| {
                options.axes.reading = match text {
                    "all" => Reading::All,
                    // Pages of tokens that have moved together have no range for long.
                    _ if options.axes.granularity == Granularity::Token => return None,
                    _ => {
                        let by = PageJudge::Channels(Self::CHANNELS);
                        Reading::Pages(PageReads { tokens: at_least(text, 1)?, first_layer: 0, by })
                    }
                };
                Some(())
            },
            show: |options| match options.axes.reading {
                Reading::All => "all".to_owned(),
                Reading::Pages(reads) => reads.tokens.to_string(),
            },
        },
        OptionKey {
            key: "channels",
            expected: "a number of channels, 1 or more, with tokens=N",
            read: |options, text| match (at_least(text, 1)?, &mut options.axes.reading) {
                (channels, Reading::Pages(reads)) => {
                    reads.by = PageJudge::Channels(channels);
                    Some(())
                }
                (_, Reading::All) => None,
            },
            show: |options| match options.axes.reading {
                Reading::Pages(PageReads { by: PageJudge::Channels(channels), .. }) => channels.to_string(),
                Reading::Pages(_) | Reading::All => Self::CHANNELS.to_string(),
            },
        },
    ];

    /// Channels compared unless it is said otherwise: half of a small head, a quarter of a large one.
    const CHANNELS: usize = 32;
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
