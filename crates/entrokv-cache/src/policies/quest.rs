//! Quest: a step reads the pages whose keys could answer its query.

use super::all_alike::AllAlike;
use crate::attention_rows::Taps;
use crate::policy::{EvictionPolicy, LeastBudget, PolicyError, Schedule};
use crate::policy_options::{OptionKey, OptionSet, at_least, spelling, word};
use crate::reading::{BoundHeads, PageJudge, PageReads, Reading};
use crate::shape::{CacheShape, KvGroup};
use crate::token_policy::{Axes, Options, TokenMethod, TokenScorer};

/// The policy `quest` (Tang et al. 2024, algorithm 1): a step of decoding reads those pages of each KV group in which the largest
/// logit could be, as far as the smallest and largest elements of their keys say. It frees nothing, and a prompt is read densely.
///
/// Defaults are those of the authors' code: 1,024 tokens, the first two layers read all they hold. The newest page is always read
/// and counts, as in their kernels. Where several query heads share a KV head the paper is silent: its largest bound counts, so that
/// a page is read once for all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quest {
    /// `tokens`: tokens read a step, as whole pages, three at least.
    pub tokens: usize,
    /// `dense`: first layers that read all they hold.
    pub dense: usize,
    /// `heads`: how the heads of a group become one score.
    pub heads: BoundHeads,
}

impl Default for Quest {
    fn default() -> Self {
        Self { tokens: 1024, dense: 2, heads: BoundHeads::Max }
    }
}

const OPTIONS: OptionSet<Options<Quest>> = OptionSet {
    policy: Quest::NAME,
    keys: &[&[
        OptionKey {
            key: "tokens",
            expected: "a number of tokens, 1 or more",
            read: |options, text| at_least(text, 1).map(|tokens| options.method.tokens = tokens),
            show: |options| options.method.tokens.to_string(),
        },
        OptionKey {
            key: "dense",
            expected: "a number of layers, 0 or more",
            read: |options, text| at_least(text, 0).map(|dense| options.method.dense = dense),
            show: |options| options.method.dense.to_string(),
        },
        OptionKey {
            key: "heads",
            expected: "max or sum",
            read: |options, text| word(text, &BoundHeads::WORDS).map(|heads| options.method.heads = heads),
            show: |options| spelling(options.method.heads, &BoundHeads::WORDS),
        },
    ]],
    without: &[],
    presets: &[],
    // Nothing goes, so nothing need be pinned.
    default: || Options { method: Quest::default(), axes: Axes { sinks: 0, ..Axes::default() } },
};

impl Quest {
    /// The policy's name on a command line.
    pub const NAME: &'static str = "quest";

    pub(crate) fn parse(options: Option<&str>) -> Result<Box<dyn EvictionPolicy>, PolicyError> {
        OPTIONS.parse(options).map(|options| OPTIONS.policy(options))
    }
}

impl TokenMethod for Quest {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn needs(&self, _schedule: Schedule) -> Taps {
        Taps::default()
    }

    fn least_budget(&self) -> LeastBudget {
        LeastBudget::Everything
    }

    fn reading(&self) -> Reading {
        Reading::Pages(PageReads { tokens: self.tokens, first_layer: self.dense, by: PageJudge::Bounds(self.heads) })
    }

    fn scorer(&self, _shape: &CacheShape, _group: KvGroup) -> Box<dyn TokenScorer> {
        Box::new(AllAlike)
    }
}
