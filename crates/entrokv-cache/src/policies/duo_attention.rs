//! DuoAttention: some heads look far back and keep everything, the others stream.

use std::path::{Path, PathBuf};

use crate::allotment::Allotment;
use crate::attention_rows::Taps;
use crate::gate_tap::GateTap;
use crate::pins::RecentPages;
use crate::policy::{EvictionPolicy, PolicyError, Schedule};
use crate::policy_options::{OptionKey, OptionSet, file, file_text};
use crate::resident_tokens::ResidentTokens;
use crate::shape::{CacheShape, KvGroup};
use crate::streaming_heads::StreamingHeads;
use crate::token_policy::{Axes, Options, TokenMethod, TokenScorer};

/// The policy `duo-attention` (Xiao et al. 2024): heads of large gates keep every token, those of small ones `sinks` first and
/// `recent` newest tokens. Gates come from a table or are estimated from the prompt.
///
/// The budget says how many heads stream: as many as must, smallest gates first, while prompts end and before every page that is
/// opened; a head that has begun to stream goes on. `streaming` makes a part of them stream whatever the budget. The authors
/// stream while a prompt is read, too; here it is read densely.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DuoAttention {
    /// `table`: the file of the gates; estimated where there is none.
    pub table: Option<PathBuf>,
    /// `streaming`: part of the heads that stream whatever the budget.
    pub heads: StreamingHeads,
}

const OPTIONS: OptionSet<Options<DuoAttention>> = OptionSet {
    policy: DuoAttention::NAME,
    keys: &[
        &[
            OptionKey {
                key: "table",
                expected: "a file",
                read: |options, text| file(text).map(|table| options.method.table = Some(table)),
                show: |options| file_text(options.method.table.as_deref()),
            },
            OptionKey {
                key: "streaming",
                expected: "a part of the heads from 0 to 1",
                read: |options, text| {
                    let part = text.parse().ok().filter(|part| (0.0..=1.0).contains(part))?;
                    options.method.heads = StreamingHeads { at_least: part };
                    Some(())
                },
                show: |options| options.method.heads.at_least.to_string(),
            },
        ],
        Options::AXES,
    ],
    // Heads are of two kinds, and which tokens a head keeps is settled by their positions.
    without: &["block", "allot", "share"],
    presets: &[],
    default: || Options {
        method: DuoAttention::default(),
        axes: Axes { sinks: 128, recent: RecentPages::Tokens(256), ..Axes::default() },
    },
};

impl DuoAttention {
    /// The policy's name on a command line.
    pub const NAME: &'static str = "duo-attention";

    pub(crate) fn parse(options: Option<&str>) -> Result<Box<dyn EvictionPolicy>, PolicyError> {
        let mut options = OPTIONS.parse(options)?;
        options.axes.allotment = Allotment::Heads(options.method.heads);
        Ok(OPTIONS.policy(options))
    }
}

impl TokenMethod for DuoAttention {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn needs(&self, _schedule: Schedule) -> Taps {
        Taps::of_gate(if self.table.is_some() { GateTap::HeadTable } else { GateTap::HeadEstimate })
    }

    fn file(&self) -> Option<&Path> {
        self.table.as_deref()
    }

    fn scorer(&self, _shape: &CacheShape, _group: KvGroup) -> Box<dyn TokenScorer> {
        Box::new(NewestFirst)
    }
}

#[derive(Clone)]
struct NewestFirst;

impl TokenScorer for NewestFirst {
    fn score(&mut self, tokens: ResidentTokens<'_>, out: &mut Vec<f32>) {
        // Exact up to 2^24 tokens, and in order beyond.
        out.extend(tokens.positions.iter().map(|&position| position as f32));
    }
}
