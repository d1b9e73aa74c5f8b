//! The options of Page-EntroKV, their presets, and their spelling on a command line.
//!
//! Invariant: the canonical text of any options, read back, gives the same options.

use crate::allotment::Allotment;
use crate::attention_rows::RowTap;
use crate::entropy::RenyiOrder;
use crate::pins::RecentPages;
use crate::policy::{Granularity, Packing, RowOrigin, Schedule};
use crate::policy_options::{OptionKey, Preset, spelling, word};
use crate::tiers::Tiers;

/// Widest average pool taken as an option, in tokens.
const MAX_POOL_WIDTH: usize = 255;

/// Every choice Page-EntroKV leaves open. The default is the paper's, evicting while decoding too.
#[derive(Clone, Debug, PartialEq)]
pub struct PageEntroKvOptions {
    /// `sinks`: the first so many positions are left out of the entropy, and their pages are pinned.
    pub sinks: u32,
    /// `alpha`: order of the Rényi entropy.
    pub order: RenyiOrder,
    /// `tau`: temperature of the head weights, above 0; infinity weighs all heads alike.
    pub tau: f64,
    /// `pooling`: how the heads of a group become one score a token.
    pub pooling: Pooling,
    /// `row`: the prompt rows read.
    pub row: ObservedRow,
    /// `pool_on`: which rows are pooled.
    pub pool_on: PoolOn,
    /// `block`: how the tokens of a page become one score.
    pub block: BlockProjection,
    /// `pool`: width in tokens of the average taken along positions before the projection; odd, 1 takes none.
    pub pool_width: usize,
    /// `recent`: the newest pages, pinned.
    pub recent: RecentPages,
    /// `decay`: `g` of the rolling score, from 0 (only the newest row counts) to 1 (decoded rows do not count).
    pub decay: f64,
    /// `allot`: how the budget is shared out among layers and heads.
    pub allotment: Allotment,
    /// `granularity`: whether pages are evicted or tokens.
    pub granularity: Granularity,
    /// `schedule`: when pages are evicted.
    pub schedule: Schedule,
    /// `rows`: whose attention rows are read where those of a prompt are.
    pub rows: RowOrigin,
    /// `pack`: in which order tokens that stay are stored.
    pub packing: Packing,
    /// `tiers`: the kinds of the pages that stay.
    pub tiers: Option<Tiers>,
}

/// How the heads of a group become one score a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// `s(t) = sum_h w_h A_h(t)`, weights by entropy.
    Entropy,
    /// `s(t) = sum_h A_h(t) / r`.
    Mean,
    /// `s(t) = max_h A_h(t)`.
    Max,
}

/// The prompt rows a score is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObservedRow {
    /// The last query's row.
    Last,
    /// The mean of the last so many queries' rows, at least 1.
    Window(usize),
    /// The mean of every query's row.
    Accumulated,
}

impl ObservedRow {
    /// What attention must hand over for it.
    #[must_use]
    pub fn tap(self) -> RowTap {
        match self {
            Self::Last => RowTap::Last,
            Self::Window(num_rows) => RowTap::Window(num_rows),
            Self::Accumulated => RowTap::Accumulated,
        }
    }
}

/// Which rows are pooled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolOn {
    /// The rows as attention gives them, the sinks' mass included.
    Raw,
    /// Sink-isolated rows: 0 on the sinks, renormalised off them.
    Isolated,
}

/// How the tokens of a page become one score.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockProjection {
    /// The largest score.
    Max,
    /// The sum of the scores.
    Sum,
    /// The mean over the page's filled slots.
    Mean,
}

impl BlockProjection {
    /// Spellings.
    pub(crate) const WORDS: [(&str, Self); 3] = [("max", Self::Max), ("sum", Self::Sum), ("mean", Self::Mean)];

    /// The score of a page of tokens with these scores; the lowest of all where there are none.
    pub(crate) fn of(self, scores: &[f32]) -> f32 {
        let sum = scores.iter().map(|&score| f64::from(score)).sum::<f64>();
        match self {
            _ if scores.is_empty() => f32::NEG_INFINITY,
            Self::Max => scores.iter().copied().fold(f32::NEG_INFINITY, f32::max),
            Self::Sum => sum as f32,
            Self::Mean => (sum / scores.len() as f64) as f32,
        }
    }
}

impl Default for PageEntroKvOptions {
    fn default() -> Self {
        Self {
            sinks: 4,
            order: RenyiOrder::COLLISION,
            tau: 0.5,
            pooling: Pooling::Entropy,
            row: ObservedRow::Last,
            pool_on: PoolOn::Raw,
            block: BlockProjection::Max,
            pool_width: 1,
            recent: RecentPages::Count(0),
            decay: 0.98,
            allotment: Allotment::Uniform,
            granularity: Granularity::Page,
            schedule: Schedule::Rolling,
            rows: RowOrigin::Prompt,
            packing: Packing::Position,
            tiers: None,
        }
    }
}

impl PageEntroKvOptions {
    /// `preset=paper`: the paper's method, evicting once at the prompt's end.
    #[must_use]
    pub fn paper() -> Self {
        Self { schedule: Schedule::Once, ..Self::default() }
    }

    /// `preset=serving`: the mean of the last 32 rows, an average pool of 5, a quarter of the pages recent, rolling.
    #[must_use]
    pub fn serving() -> Self {
        Self { row: ObservedRow::Window(32), pool_width: 5, recent: RecentPages::Quarter, ..Self::default() }
    }
}

/// What `preset` may be.
pub(crate) const PRESETS: &[Preset<PageEntroKvOptions>] =
    &[("paper", PageEntroKvOptions::paper), ("serving", PageEntroKvOptions::serving)];

/// The options in canonical order.
pub(crate) const OPTION_KEYS: &[OptionKey<PageEntroKvOptions>] = &[
    OptionKey {
        key: "sinks",
        expected: "a number of tokens, 0 or more",
        read: |options, text| text.parse().ok().map(|sinks| options.sinks = sinks),
        show: |options| options.sinks.to_string(),
    },
    OptionKey {
        key: "alpha",
        expected: "an order from 0 to inf",
        read: |options, text| text.parse().ok().map(|order| options.order = order),
        show: |options| options.order.to_string(),
    },
    OptionKey {
        key: "tau",
        expected: "a temperature above 0, or inf",
        read: |options, text| text.parse().ok().filter(|tau| *tau > 0.0).map(|tau| options.tau = tau),
        show: |options| options.tau.to_string(),
    },
    OptionKey {
        key: "pooling",
        expected: "entropy, mean or max",
        read: |options, text| word(text, &POOLINGS).map(|pooling| options.pooling = pooling),
        show: |options| spelling(options.pooling, &POOLINGS),
    },
    OptionKey {
        key: "row",
        expected: "last, accumulated or window:N with N of 1 or more",
        read: |options, text| observed_row(text).map(|row| options.row = row),
        show: |options| match options.row {
            ObservedRow::Last => "last".to_owned(),
            ObservedRow::Accumulated => "accumulated".to_owned(),
            ObservedRow::Window(num_rows) => format!("window:{num_rows}"),
        },
    },
    OptionKey {
        key: "pool_on",
        expected: "raw or isolated",
        read: |options, text| word(text, &POOLED_ROWS).map(|pool_on| options.pool_on = pool_on),
        show: |options| spelling(options.pool_on, &POOLED_ROWS),
    },
    OptionKey {
        key: "block",
        expected: "max, sum or mean",
        read: |options, text| word(text, &BlockProjection::WORDS).map(|block| options.block = block),
        show: |options| spelling(options.block, &BlockProjection::WORDS),
    },
    OptionKey {
        key: "pool",
        expected: "an odd number of tokens from 1 to 255",
        read: |options, text| {
            let width = text.parse().ok().filter(|width| width % 2 == 1 && *width <= MAX_POOL_WIDTH)?;
            options.pool_width = width;
            Some(())
        },
        show: |options| options.pool_width.to_string(),
    },
    OptionKey {
        key: "recent",
        expected: RecentPages::EXPECTED,
        read: |options, text| text.parse().ok().map(|recent| options.recent = recent),
        show: |options| options.recent.to_string(),
    },
    OptionKey {
        key: "decay",
        expected: "a factor from 0 to 1",
        read: |options, text| {
            let decay = text.parse().ok().filter(|decay| (0.0..=1.0).contains(decay))?;
            options.decay = decay;
            Some(())
        },
        show: |options| options.decay.to_string(),
    },
    OptionKey {
        key: "allot",
        expected: Allotment::EXPECTED,
        read: |options, text| text.parse().ok().map(|allotment| options.allotment = allotment),
        show: |options| options.allotment.to_string(),
    },
    OptionKey {
        key: "granularity",
        expected: "page or token",
        read: |options, text| word(text, &Granularity::WORDS).map(|of| options.granularity = of),
        show: |options| spelling(options.granularity, &Granularity::WORDS),
    },
    OptionKey {
        key: "schedule",
        expected: Schedule::EXPECTED,
        read: |options, text| text.parse().ok().map(|schedule| options.schedule = schedule),
        show: |options| options.schedule.to_string(),
    },
    OptionKey {
        key: "pack",
        expected: "position or score",
        read: |options, text| word(text, &Packing::WORDS).map(|packing| options.packing = packing),
        show: |options| spelling(options.packing, &Packing::WORDS),
    },
    OptionKey {
        key: "rows",
        expected: "prompt or probe",
        read: |options, text| word(text, &RowOrigin::WORDS).map(|rows| options.rows = rows),
        show: |options| spelling(options.rows, &RowOrigin::WORDS),
    },
    OptionKey {
        key: "tiers",
        expected: Tiers::EXPECTED,
        read: |options, text| Tiers::read(text).map(|tiers| options.tiers = tiers),
        show: |options| Tiers::show(options.tiers),
    },
];

const POOLINGS: [(&str, Pooling); 3] = [("entropy", Pooling::Entropy), ("mean", Pooling::Mean), ("max", Pooling::Max)];
const POOLED_ROWS: [(&str, PoolOn); 2] = [("raw", PoolOn::Raw), ("isolated", PoolOn::Isolated)];

fn observed_row(text: &str) -> Option<ObservedRow> {
    match text {
        "last" => Some(ObservedRow::Last),
        "accumulated" => Some(ObservedRow::Accumulated),
        _ => text.strip_prefix("window:")?.parse().ok().filter(|num_rows| *num_rows > 0).map(ObservedRow::Window),
    }
}
