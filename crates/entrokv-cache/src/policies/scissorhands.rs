//! Scissorhands: what keeps receiving its share of attention stays.

use super::head_mean::HeadMean;
use super::row_history::RowHistory;
use crate::attention_rows::{AttentionRows, RowTap, Taps};
use crate::pins::RecentPages;
use crate::policy::{EvictionPolicy, PolicyError, Schedule};
use crate::policy_options::{OptionKey, OptionSet, at_least, spelling, word};
use crate::resident_tokens::ResidentTokens;
use crate::shape::{CacheShape, KvGroup};
use crate::token_policy::{Axes, Options, TokenMethod, TokenScorer};

/// The policy `scissorhands` (Liu et al. 2023): a token goes by how many of the last `history` rows gave it less than an even share,
/// `A(t) < 1 / tokens seen`. The newest 10 tokens stay.
///
/// The paper has a query head a KV head; rows are the mean over a group's heads here. It drops half of its budget at a time, which is
/// a matter of the schedule and not of the score. The state is `history` bits a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scissorhands {
    /// `history`: rows that count.
    pub history: usize,
    /// `count`: what of them.
    pub count: ShareCount,
}

/// What is counted of the rows that saw a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShareCount {
    /// Minus the number of those that gave it less than a share: the paper's.
    Below,
    /// The part of them that gave it a share or more, so that new tokens are no better than old ones (the form of cold-compress).
    Rate,
}

const COUNTS: [(&str, ShareCount); 2] = [("below", ShareCount::Below), ("rate", ShareCount::Rate)];

impl Default for Scissorhands {
    fn default() -> Self {
        Self { history: 400, count: ShareCount::Below }
    }
}

/// Most rows that may count: each is a row of attention over the whole prompt.
const MAX_HISTORY: usize = 4096;

const OPTIONS: OptionSet<Options<Scissorhands>> = OptionSet {
    policy: Scissorhands::NAME,
    keys: &[
        &[
            OptionKey {
                key: "history",
                expected: "a number of rows from 1 to 4096",
                read: |options, text| {
                    let history = at_least(text, 1).filter(|history| *history <= MAX_HISTORY)?;
                    options.method.history = history;
                    Some(())
                },
                show: |options| options.method.history.to_string(),
            },
            OptionKey {
                key: "count",
                expected: "below or rate",
                read: |options, text| word(text, &COUNTS).map(|count| options.method.count = count),
                show: |options| spelling(options.method.count, &COUNTS),
            },
        ],
        Options::HEADS,
        Options::AXES,
    ],
    without: &[],
    presets: &[],
    default: || Options {
        method: Scissorhands::default(),
        axes: Axes { recent: RecentPages::Tokens(10), ..Axes::default() },
    },
};

impl Scissorhands {
    /// The policy's name on a command line.
    pub const NAME: &'static str = "scissorhands";

    pub(crate) fn parse(options: Option<&str>) -> Result<Box<dyn EvictionPolicy>, PolicyError> {
        OPTIONS.parse(options).map(|options| OPTIONS.policy(options))
    }
}

impl TokenMethod for Scissorhands {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn needs(&self, schedule: Schedule) -> Taps {
        let step_rows = schedule.goes_on();
        Taps { prompt: RowTap::Window(self.history), step_rows, ..Taps::default() }
    }

    fn scorer(&self, _shape: &CacheShape, _group: KvGroup) -> Box<dyn TokenScorer> {
        let history = RowHistory::new(self.history);
        Box::new(ScissorhandsScorer { count: self.count, history, mean: HeadMean::default() })
    }
}

#[derive(Clone)]
struct ScissorhandsScorer {
    count: ShareCount,
    /// Whether a row gave the token a share.
    history: RowHistory,
    mean: HeadMean,
}

impl TokenScorer for ScissorhandsScorer {
    fn observe(&mut self, rows: AttentionRows<'_>) {
        for row in 0..rows.num_rows() {
            let num_seen = rows.num_seen(row);
            if let Some(masses) = self.mean.of(rows, row) {
                let share = 1.0 / num_seen as f64;
                self.history.add(rows.positions, num_seen, |token| masses[token] >= share);
            }
        }
    }

    fn score(&mut self, tokens: ResidentTokens<'_>, out: &mut Vec<f32>) {
        let counts = self.history.at(tokens.positions);
        out.extend(counts.map(|(seen, at_least_a_share)| match self.count {
            ShareCount::Below => at_least_a_share as f32 - seen as f32,
            ShareCount::Rate => at_least_a_share as f32 / seen.max(1) as f32,
        }));
    }

    fn retain(&mut self, positions: &[u32]) {
        self.history.align(positions);
        self.history.shrink();
        self.mean.shrink();
    }

    fn nan_rows(&self) -> u64 {
        self.mean.bad_rows()
    }

    fn state_bytes(&self) -> u64 {
        size_of::<Self>() as u64 + self.history.bytes() + self.mean.bytes()
    }
}
