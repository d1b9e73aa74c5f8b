//! The options of Page-EntroKV, their presets, and their spelling on a command line.
//!
//! Invariant: the canonical text of any options, read back, gives the same options.

use std::fmt;

use crate::attention_rows::RowTap;
use crate::entropy::RenyiOrder;
use crate::pins::RecentPages;
use crate::policy::{PolicyError, Schedule};

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
    /// `schedule`: when pages are evicted.
    pub schedule: Schedule,
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
            schedule: Schedule::Rolling,
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

/// One option: its key, its values in words, how a value is read and how it is shown.
struct OptionKey {
    key: &'static str,
    expected: &'static str,
    read: fn(&mut PageEntroKvOptions, &str) -> Option<()>,
    show: fn(&PageEntroKvOptions) -> String,
}

const PRESET_KEY: &str = "preset";
const PRESET_VALUES: &str = "paper or serving";

/// The options in canonical order.
const OPTION_KEYS: [OptionKey; 11] = [
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
        read: |options, text| word(text, &BLOCKS).map(|block| options.block = block),
        show: |options| spelling(options.block, &BLOCKS),
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
        expected: "a number of pages, 0 or more, or quarter",
        read: |options, text| {
            options.recent = match text {
                "quarter" => RecentPages::Quarter,
                number => RecentPages::Count(number.parse().ok()?),
            };
            Some(())
        },
        show: |options| match options.recent {
            RecentPages::Count(num_pages) => num_pages.to_string(),
            RecentPages::Quarter => "quarter".to_owned(),
        },
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
        key: "schedule",
        expected: "once or rolling",
        read: |options, text| text.parse().ok().map(|schedule| options.schedule = schedule),
        show: |options| options.schedule.to_string(),
    },
];

const POOLINGS: [(&str, Pooling); 3] = [("entropy", Pooling::Entropy), ("mean", Pooling::Mean), ("max", Pooling::Max)];
const POOLED_ROWS: [(&str, PoolOn); 2] = [("raw", PoolOn::Raw), ("isolated", PoolOn::Isolated)];
const BLOCKS: [(&str, BlockProjection); 3] =
    [("max", BlockProjection::Max), ("sum", BlockProjection::Sum), ("mean", BlockProjection::Mean)];

/// The value a word stands for.
fn word<T: Copy>(text: &str, words: &[(&str, T)]) -> Option<T> {
    words.iter().find(|(word, _)| *word == text).map(|(_, value)| *value)
}

/// The word that stands for a value.
fn spelling<T: Copy + PartialEq>(value: T, words: &[(&str, T)]) -> String {
    let word = words.iter().find(|(_, candidate)| *candidate == value);
    word.map(|(word, _)| (*word).to_owned()).expect("every value has a word")
}

fn observed_row(text: &str) -> Option<ObservedRow> {
    match text {
        "last" => Some(ObservedRow::Last),
        "accumulated" => Some(ObservedRow::Accumulated),
        _ => text.strip_prefix("window:")?.parse().ok().filter(|num_rows| *num_rows > 0).map(ObservedRow::Window),
    }
}

/// The options of one named policy: a start to depart from, and the keys that may be set.
#[derive(Clone, Debug)]
pub(crate) struct OptionSet {
    /// Name of the policy.
    pub(crate) policy: &'static str,
    /// Keys that have no meaning for it.
    pub(crate) without: &'static [&'static str],
    /// How heads are pooled whatever the preset, or `None` when `pooling` is free.
    pub(crate) pooling: Option<Pooling>,
}

impl OptionSet {
    /// Options read from `key=value` items parted by commas; `None` is none given.
    pub(crate) fn parse(&self, text: Option<&str>) -> Result<PageEntroKvOptions, PolicyError> {
        let mut items = Vec::new();
        for item in text.into_iter().flat_map(|text| text.split(',')) {
            let (key, value) = item.split_once('=').ok_or_else(|| PolicyError::NotAnOption {
                policy: self.policy,
                got: item.trim().to_owned(),
                known: self.known(),
            })?;
            items.push((key.trim(), value.trim()));
        }

        let mut options = PageEntroKvOptions::default();
        let mut seen = Vec::new();
        // The preset first, so that the order on the line does not matter.
        items.sort_by_key(|(key, _)| *key != PRESET_KEY);
        for (key, value) in items {
            if key == PRESET_KEY {
                options = match value {
                    "paper" => PageEntroKvOptions::paper(),
                    "serving" => PageEntroKvOptions::serving(),
                    _ => return Err(self.bad_value(PRESET_KEY, PRESET_VALUES, value)),
                };
                self.note(PRESET_KEY, &mut seen)?;
                continue;
            }
            let option = self.keys().find(|option| option.key == key).ok_or_else(|| PolicyError::UnknownOption {
                policy: self.policy,
                got: key.to_owned(),
                known: self.known(),
            })?;
            (option.read)(&mut options, value).ok_or_else(|| self.bad_value(option.key, option.expected, value))?;
            self.note(option.key, &mut seen)?;
        }
        options.pooling = self.pooling.unwrap_or(options.pooling);
        Ok(options)
    }

    /// Refuses options whose values are out of range.
    pub(crate) fn check(&self, options: &PageEntroKvOptions) -> Result<(), PolicyError> {
        // A value is in range when its own text reads back as it.
        for option in self.keys() {
            let text = (option.show)(options);
            let mut read = PageEntroKvOptions::default();
            if (option.read)(&mut read, &text).is_none() {
                return Err(self.bad_value(option.key, option.expected, &text));
            }
        }
        Ok(())
    }

    /// Writes the policy's name and the options that depart from its default, in canonical order.
    pub(crate) fn write(&self, options: &PageEntroKvOptions, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.policy)?;
        let default = PageEntroKvOptions::default();
        let mut separator = ':';
        for option in self.keys() {
            let value = (option.show)(options);
            if value != (option.show)(&default) {
                write!(f, "{separator}{}={value}", option.key)?;
                separator = ',';
            }
        }
        Ok(())
    }

    fn keys(&self) -> impl Iterator<Item = &'static OptionKey> + use<> {
        let without = self.without;
        OPTION_KEYS.iter().filter(move |option| !without.contains(&option.key))
    }

    fn known(&self) -> String {
        let preset = format!("{PRESET_KEY} ({PRESET_VALUES})");
        let others = self.keys().map(|option| format!("{} ({})", option.key, option.expected));
        std::iter::once(preset).chain(others).collect::<Vec<_>>().join(", ")
    }

    fn bad_value(&self, key: &'static str, expected: &'static str, got: &str) -> PolicyError {
        PolicyError::BadValue { policy: self.policy, key, expected, got: got.to_owned() }
    }

    fn note(&self, key: &'static str, seen: &mut Vec<&'static str>) -> Result<(), PolicyError> {
        if seen.contains(&key) {
            return Err(PolicyError::Repeated { policy: self.policy, key });
        }
        seen.push(key);
        Ok(())
    }
}
