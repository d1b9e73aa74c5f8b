//! FastGen: each head keeps the cheapest class of tokens that recovers its attention.

use super::head_mean::HeadMean;
use super::token_part::TokenPart;
use crate::allotment::Allotment;
use crate::attention_rows::{AttentionRows, RowSource, RowTap, Taps};
use crate::policy::{EvictionPolicy, PolicyError, Schedule};
use crate::policy_options::{OptionKey, OptionSet, at_least};
use crate::resident_tokens::ResidentTokens;
use crate::shape::{CacheShape, KvGroup};
use crate::token_policy::{Axes, Options, TokenMethod, TokenScorer};
use crate::token_table::TokenTable;

/// The policy `fastgen` (Ge et al. 2024): at a prompt's end each KV head gets the cheapest class that recovers `recovery` of the
/// attention of the last `window` rows, and goes by it while decoding.
///
/// The classes, each with the ones before it: special tokens; punctuation; the `frequent` tokens of highest mean attention received
/// among the others; the `local` newest before each query; all. A token counts 2 and more where its class never lets it go, 1 and more
/// where it is frequent or where all are kept, and less than 1 outside its head's class, by the mean attention received each time. So
/// a page is kept as long as any of its tokens is in the class, and with one pool for all heads, the default, heads whose class is
/// small leave their room to the others. How much there is says the budget; the paper lets the classes say it.
///
/// A policy is shown positions and not token ids, so whoever builds one for a sequence says where its `special` and `punctuation`
/// tokens are; as long as nobody does, those classes are empty but for the `first` tokens, which are special. Generated tokens are
/// neither. The paper recovers over all rows of the prompt, which would have to be held to know what is local to them: the last 256
/// are taken for them, and a fraction of local tokens is one of those a row sees. Rows are the mean over a group's heads, which the
/// paper leaves open.
#[derive(Clone, Debug, PartialEq)]
pub struct FastGen {
    /// `recovery`: part of the attention that a class must recover.
    pub recovery: f64,
    /// `local`: newest tokens before each query.
    pub local: TokenPart,
    /// `frequent`: tokens of highest mean attention received.
    pub frequent: TokenPart,
    /// `first`: first tokens, special ones.
    pub first: u32,
    /// `special`: positions of special tokens, ascending.
    pub special: Vec<u32>,
    /// `punctuation`: positions of punctuation, ascending.
    pub punctuation: Vec<u32>,
    /// `window`: rows observed.
    pub window: usize,
}

impl Default for FastGen {
    fn default() -> Self {
        Self {
            recovery: 0.9,
            local: TokenPart::Fraction(0.3),
            frequent: TokenPart::Fraction(0.3),
            first: 4,
            special: Vec::new(),
            punctuation: Vec::new(),
            window: 256,
        }
    }
}

const OPTIONS: OptionSet<Options<FastGen>> = OptionSet {
    policy: FastGen::NAME,
    keys: &[
        &[
            OptionKey {
                key: "recovery",
                expected: "a part from 0 to 1",
                read: |options, text| {
                    let recovery = text.parse().ok().filter(|part| (0.0..=1.0).contains(part))?;
                    options.method.recovery = recovery;
                    Some(())
                },
                show: |options| options.method.recovery.to_string(),
            },
            OptionKey {
                key: "local",
                expected: TokenPart::EXPECTED,
                read: |options, text| text.parse().ok().map(|local| options.method.local = local),
                show: |options| options.method.local.to_string(),
            },
            OptionKey {
                key: "frequent",
                expected: TokenPart::EXPECTED,
                read: |options, text| text.parse().ok().map(|frequent| options.method.frequent = frequent),
                show: |options| options.method.frequent.to_string(),
            },
            OptionKey {
                key: "first",
                expected: "a number of tokens, 0 or more",
                read: |options, text| text.parse().ok().map(|first| options.method.first = first),
                show: |options| options.method.first.to_string(),
            },
            OptionKey {
                key: "special",
                expected: POSITIONS,
                read: |options, text| positions(text).map(|special| options.method.special = special),
                show: |options| positions_text(&options.method.special),
            },
            OptionKey {
                key: "punctuation",
                expected: POSITIONS,
                read: |options, text| positions(text).map(|punctuation| options.method.punctuation = punctuation),
                show: |options| positions_text(&options.method.punctuation),
            },
            OptionKey {
                key: "window",
                expected: "a number of rows, 1 or more",
                read: |options, text| at_least(text, 1).map(|window| options.method.window = window),
                show: |options| options.method.window.to_string(),
            },
        ],
        Options::HEADS,
        Options::AXES,
    ],
    without: &[],
    presets: &[],
    default: || Options { method: FastGen::default(), axes: Axes { allotment: Allotment::Global, ..Axes::default() } },
};

const POSITIONS: &str = "ascending positions parted by +, or none";

fn positions(text: &str) -> Option<Vec<u32>> {
    if text == "none" {
        return Some(Vec::new());
    }
    let positions: Vec<u32> = text.split('+').map(|position| position.parse().ok()).collect::<Option<_>>()?;
    positions.is_sorted_by(|a, b| a < b).then_some(positions)
}

fn positions_text(positions: &[u32]) -> String {
    if positions.is_empty() {
        return "none".to_owned();
    }
    positions.iter().map(u32::to_string).collect::<Vec<_>>().join("+")
}

impl FastGen {
    /// The policy's name on a command line.
    pub const NAME: &'static str = "fastgen";

    pub(crate) fn parse(options: Option<&str>) -> Result<Box<dyn EvictionPolicy>, PolicyError> {
        OPTIONS.parse(options).map(|options| OPTIONS.policy(options))
    }

    /// The cheapest class a token is in whatever its attention, if it is in any.
    fn given_class(&self, position: u32) -> Option<Class> {
        if position < self.first || self.special.binary_search(&position).is_ok() {
            Some(Class::Special)
        } else {
            self.punctuation.binary_search(&position).is_ok().then_some(Class::Punctuation)
        }
    }

    /// Whether a token at `position` is local to a query at `query`.
    fn is_local(&self, position: u32, query: u32) -> bool {
        ((query - position) as usize) < self.local.of(query as usize + 1)
    }

    /// Which of the tokens at `positions` are frequent: most attended to, of equals the older, of those given no class.
    fn frequent(&self, positions: &[u32], attention: &[f64]) -> Vec<bool> {
        let mut others: Vec<usize> =
            (0..positions.len()).filter(|&token| self.given_class(positions[token]).is_none()).collect();
        others.sort_by(|&a, &b| attention[b].total_cmp(&attention[a]));
        let mut is_frequent = vec![false; positions.len()];
        others.into_iter().take(self.frequent.of(positions.len())).for_each(|token| is_frequent[token] = true);
        is_frequent
    }
}

/// What a head keeps: each class holds those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Class {
    Special,
    Punctuation,
    Frequent,
    Local,
    All,
}

impl TokenMethod for FastGen {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn needs(&self, schedule: Schedule) -> Taps {
        let step_rows = schedule.goes_on();
        Taps { prompt: RowTap::Window(self.window), step_rows, ..Taps::default() }
    }

    fn scorer(&self, _shape: &CacheShape, _group: KvGroup) -> Box<dyn TokenScorer> {
        Box::new(FastGenScorer {
            options: self.clone(),
            table: TokenTable::new(3),
            class: Class::All,
            num_rows: 0,
            reading: false,
            mean: HeadMean::default(),
        })
    }
}

/// Columns of the table: attention received from all rows, from those the token is local to, and rows that saw it.
const RECEIVED: usize = 0;
const NEARBY: usize = 1;
const SEEN: usize = 2;

#[derive(Clone)]
struct FastGenScorer {
    options: FastGen,
    table: TokenTable,
    /// The head's, as of the last prompt's end.
    class: Class,
    /// Rows of the prompt being read.
    num_rows: usize,
    reading: bool,
    mean: HeadMean,
}

impl FastGenScorer {
    /// The mean attention received, of all tokens known.
    fn attention(&self) -> Vec<f64> {
        let pairs = self.table.column(RECEIVED).iter().zip(self.table.column(SEEN));
        pairs.map(|(received, seen)| received / seen.max(1.0)).collect()
    }

    /// The cheapest class that recovers enough.
    fn judged(&self) -> Class {
        let positions = self.table.positions();
        let is_frequent = self.options.frequent(positions, &self.attention());
        // What each class adds to the ones before it.
        let mut adds = [0.0; 4];
        for (token, &position) in positions.iter().enumerate() {
            let (received, nearby) = (self.table.column(RECEIVED)[token], self.table.column(NEARBY)[token]);
            match self.options.given_class(position) {
                Some(class) => adds[class as usize] += received,
                None if is_frequent[token] => adds[Class::Frequent as usize] += received,
                None => adds[Class::Local as usize] += nearby,
            }
        }
        let wanted = self.options.recovery * self.num_rows as f64;
        let mut recovered = 0.0;
        for (class, added) in [Class::Special, Class::Punctuation, Class::Frequent, Class::Local].into_iter().zip(adds)
        {
            recovered += added;
            if recovered >= wanted {
                return class;
            }
        }
        Class::All
    }
}

impl TokenScorer for FastGenScorer {
    fn observe(&mut self, rows: AttentionRows<'_>) {
        if rows.source != RowSource::Step && !std::mem::replace(&mut self.reading, true) {
            self.table.clear();
            self.num_rows = 0;
        }
        self.table.align(rows.positions);
        for row in 0..rows.num_rows() {
            let num_seen = rows.num_seen(row);
            let Some(masses) = self.mean.of(rows, row) else { continue };
            let seen = &rows.positions[..num_seen];
            let query = seen[num_seen - 1];
            self.num_rows += 1;
            self.table.column_mut(RECEIVED).iter_mut().zip(masses).for_each(|(sum, mass)| *sum += mass);
            self.table.column_mut(SEEN)[..num_seen].iter_mut().for_each(|rows| *rows += 1.0);
            let first_local = seen.partition_point(|&position| !self.options.is_local(position, query));
            let nearby = &mut self.table.column_mut(NEARBY)[first_local..num_seen];
            nearby.iter_mut().zip(&masses[first_local..]).for_each(|(sum, mass)| *sum += mass);
        }
    }

    fn end_prompt(&mut self) {
        if std::mem::take(&mut self.reading) {
            self.class = self.judged();
        }
    }

    fn score(&mut self, tokens: ResidentTokens<'_>, out: &mut Vec<f32>) {
        let received = self.table.at(RECEIVED, tokens.positions);
        let seen = self.table.at(SEEN, tokens.positions);
        let attention: Vec<f64> = received.zip(seen).map(|(received, seen)| received / seen.max(1.0)).collect();
        let is_frequent = self.options.frequent(tokens.positions, &attention);
        let newest = tokens.positions.last().copied().unwrap_or(0);
        out.extend(tokens.positions.iter().enumerate().map(|(token, &position)| {
            let given = self.options.given_class(position).is_some_and(|class| class <= self.class);
            let local = self.class == Class::Local && self.options.is_local(position, newest);
            let tier = if given || local {
                2.0
            } else if self.class == Class::All || self.class >= Class::Frequent && is_frequent[token] {
                1.0
            } else {
                0.0
            };
            // Below 1, so that no token leaves its tier.
            (tier + attention[token].min(0.999)) as f32
        }));
    }

    fn retain(&mut self, positions: &[u32]) {
        self.table.align(positions);
        self.table.shrink();
        self.mean.shrink();
    }

    fn nan_rows(&self) -> u64 {
        self.mean.bad_rows()
    }

    fn state_bytes(&self) -> u64 {
        let lists = (self.options.special.capacity() + self.options.punctuation.capacity()) * size_of::<u32>();
        (size_of::<Self>() + self.table.bytes() + lists) as u64 + self.mean.bytes()
    }
}
