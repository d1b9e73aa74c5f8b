//! Policies that score tokens: a method, and the axes on which any method can be varied.
//!
//! A method gives every resident token of a KV group a score. All else is alike for every method: what is pinned, how tokens
//! become pages, how a budget is shared out, when pages go.
//!
//! A method of one's own is a [`TokenMethod`] and its [`TokenScorer`]; [`TokenPolicy::new`] makes a policy of it.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use dyn_clone::{DynClone, clone_trait_object};

use crate::allotment::Allotment;
use crate::attention_rows::{AttentionRows, PageSpan, Taps};
use crate::head_pooling::HeadPooling;
use crate::headwise_scorer::HeadwiseScorer;
use crate::key_channels::KeyChannels;
use crate::page_entro_kv::BlockProjection;
use crate::pins::{Pins, RecentPages};
use crate::policy::{
    EvictionPolicy, Granularity, LeastBudget, Packing, PageScorer, Release, Rotation, RowOrigin, Schedule, Sharing,
};
use crate::policy_options::{OptionKey, spelling, word};
use crate::reading::Reading;
use crate::resident_tokens::ResidentTokens;
use crate::second_stage::SecondStage;
use crate::shape::{CacheShape, KvGroup};
use crate::tiers::Tiers;

/// How tokens are scored.
pub trait TokenMethod: fmt::Debug + Send + Sync {
    /// The policy's name on a command line.
    fn name(&self) -> &str;

    /// What its scorers are shown; nothing else is computed. Rows of decoded tokens are only worth asking for if pages go
    /// while decoding.
    fn needs(&self, schedule: Schedule) -> Taps;

    /// What it gives up beside what the budget has no room for: a page goes as marked when all its tokens have a score of minus
    /// infinity.
    fn release(&self) -> Release {
        Release::OverBudget
    }

    /// The smallest budget it can keep.
    fn least_budget(&self) -> LeastBudget {
        LeastBudget::Pins
    }

    /// What a step of decoding reads of what is held.
    fn reading(&self) -> Reading {
        Reading::All
    }

    /// What it clears in keys when a prompt has been read.
    fn key_channels(&self) -> Option<KeyChannels> {
        None
    }

    /// The file its gate is computed with.
    fn file(&self) -> Option<&Path> {
        None
    }

    /// What the rotation of keys says once tokens between them are gone.
    fn rotation(&self) -> Rotation {
        Rotation::Position
    }

    /// A fresh scorer of one KV group.
    fn scorer(&self, shape: &CacheShape, group: KvGroup) -> Box<dyn TokenScorer>;
}

/// Scores the tokens of one KV group of one sequence; a higher score stays longer.
pub trait TokenScorer: DynClone + Send {
    /// Takes in attention rows the method asked for. A prompt's rows may arrive in any number of pieces.
    fn observe(&mut self, _rows: AttentionRows<'_>) {}

    /// Called when all rows of a prompt are in.
    fn end_prompt(&mut self) {}

    /// Appends what is to be known of the whole layer before its tokens are scored: numbers that are added up over its heads and
    /// come back as [`ResidentTokens::layer_sums`]. The same tokens are scored next.
    fn measure(&mut self, _tokens: ResidentTokens<'_>, _sums: &mut Vec<f64>) {}

    /// Writes one score a token into `out`, which is empty; a score that is NaN counts as the lowest.
    fn score(&mut self, tokens: ResidentTokens<'_>, out: &mut Vec<f32>);

    /// The second score of a method that chooses in two stages, of the tokens last scored.
    fn second_stage(&self) -> Option<SecondStage<'_>> {
        None
    }

    /// Forgets every token that is not at one of `positions` (ascending).
    fn retain(&mut self, _positions: &[u32]) {}

    /// Rows dropped because an entry was not finite or the row had no mass.
    fn nan_rows(&self) -> u64 {
        0
    }

    /// Bytes of memory this scorer holds.
    fn state_bytes(&self) -> u64 {
        0
    }
}

clone_trait_object!(TokenScorer);

/// What can be varied with any method.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Axes {
    /// `heads`: how the query heads of a group become one score a token, where a method reads attention rows.
    pub heads: HeadPooling,
    /// `sinks`: the first so many positions are pinned.
    pub sinks: u32,
    /// `recent`: the newest pages, pinned.
    pub recent: RecentPages,
    /// `block`: how the tokens of a page become one score.
    pub block: BlockProjection,
    /// `allot`: how the budget is shared out among layers and heads.
    pub allotment: Allotment,
    /// `share`: whether the heads of a layer keep the same pages.
    pub sharing: Sharing,
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
    /// What a step reads of what stays, where that is not the method's own affair; policies that have it spell it.
    pub reading: Reading,
}

/// Four sinks, the best token of a page counts, every KV group for itself and alike, the budget kept after every step.
impl Default for Axes {
    fn default() -> Self {
        Self {
            heads: HeadPooling::Own,
            sinks: 4,
            recent: RecentPages::Count(0),
            block: BlockProjection::Max,
            allotment: Allotment::Uniform,
            sharing: Sharing::Group,
            granularity: Granularity::Page,
            schedule: Schedule::Rolling,
            rows: RowOrigin::Prompt,
            packing: Packing::Position,
            tiers: None,
            reading: Reading::All,
        }
    }
}

/// A method's own options, and the axes.
#[derive(Clone, Debug)]
pub(crate) struct Options<M> {
    pub(crate) method: M,
    pub(crate) axes: Axes,
}

const SHARINGS: [(&str, Sharing); 2] = [("group", Sharing::Group), ("layer", Sharing::Layer)];

impl<M: 'static> Options<M> {
    /// The axis of methods that read attention rows.
    pub(crate) const HEADS: &'static [OptionKey<Self>] = &[OptionKey {
        key: "heads",
        expected: "own, mean, max, entropy or union",
        read: |options, text| word(text, &HeadPooling::WORDS).map(|heads| options.axes.heads = heads),
        show: |options| spelling(options.axes.heads, &HeadPooling::WORDS),
    }];

    /// The axes of all methods as options, in canonical order.
    pub(crate) const AXES: &'static [OptionKey<Self>] = &[
        OptionKey {
            key: "sinks",
            expected: "a number of tokens, 0 or more",
            read: |options, text| text.parse().ok().map(|sinks| options.axes.sinks = sinks),
            show: |options| options.axes.sinks.to_string(),
        },
        OptionKey {
            key: "recent",
            expected: RecentPages::EXPECTED,
            read: |options, text| text.parse().ok().map(|recent| options.axes.recent = recent),
            show: |options| options.axes.recent.to_string(),
        },
        OptionKey {
            key: "block",
            expected: "max, sum or mean",
            read: |options, text| word(text, &BlockProjection::WORDS).map(|block| options.axes.block = block),
            show: |options| spelling(options.axes.block, &BlockProjection::WORDS),
        },
        OptionKey {
            key: "allot",
            expected: Allotment::EXPECTED,
            read: |options, text| text.parse().ok().map(|allotment| options.axes.allotment = allotment),
            show: |options| options.axes.allotment.to_string(),
        },
        OptionKey {
            key: "share",
            expected: "group or layer",
            read: |options, text| word(text, &SHARINGS).map(|sharing| options.axes.sharing = sharing),
            show: |options| spelling(options.axes.sharing, &SHARINGS),
        },
        OptionKey {
            key: "granularity",
            expected: "page or token",
            read: |options, text| word(text, &Granularity::WORDS).map(|of| options.axes.granularity = of),
            show: |options| spelling(options.axes.granularity, &Granularity::WORDS),
        },
        OptionKey {
            key: "schedule",
            expected: Schedule::EXPECTED,
            read: |options, text| text.parse().ok().map(|schedule| options.axes.schedule = schedule),
            show: |options| options.axes.schedule.to_string(),
        },
        OptionKey {
            key: "pack",
            expected: "position or score",
            read: |options, text| word(text, &Packing::WORDS).map(|packing| options.axes.packing = packing),
            show: |options| spelling(options.axes.packing, &Packing::WORDS),
        },
        OptionKey {
            key: "rows",
            expected: "prompt or probe",
            read: |options, text| word(text, &RowOrigin::WORDS).map(|rows| options.axes.rows = rows),
            show: |options| spelling(options.axes.rows, &RowOrigin::WORDS),
        },
        OptionKey {
            key: "tiers",
            expected: Tiers::EXPECTED,
            read: |options, text| Tiers::read(text).map(|tiers| options.axes.tiers = tiers),
            show: |options| Tiers::show(options.axes.tiers),
        },
    ];
}

/// A method and its axes, as a policy.
#[derive(Clone, Debug)]
pub struct TokenPolicy {
    method: Arc<dyn TokenMethod>,
    axes: Axes,
    name: String,
    /// The canonical text.
    text: String,
}

impl TokenPolicy {
    /// The policy that evicts by `method`'s scores. It shows itself as the method's name alone.
    #[must_use]
    pub fn new(method: impl TokenMethod + 'static, axes: Axes) -> Self {
        let name = method.name().to_owned();
        Self { method: Arc::new(method), axes, text: name.clone(), name }
    }

    /// The same under the name by which it was called, which may be another than its method's, and with its canonical text.
    pub(crate) fn spelled(name: &str, method: impl TokenMethod + 'static, axes: Axes, text: String) -> Self {
        Self { name: name.to_owned(), text, ..Self::new(method, axes) }
    }
}

/// The canonical text, which [`parse_policy`](crate::parse_policy) reads back.
impl fmt::Display for TokenPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl EvictionPolicy for TokenPolicy {
    fn name(&self) -> &str {
        &self.name
    }

    fn needs(&self) -> Taps {
        self.method.needs(self.axes.schedule)
    }

    fn schedule(&self) -> Schedule {
        self.axes.schedule
    }

    fn pins(&self) -> Pins {
        Pins { sink_tokens: self.axes.sinks as usize, recent_pages: self.axes.recent }
    }

    fn allotment(&self) -> Allotment {
        self.axes.allotment
    }

    fn sharing(&self) -> Sharing {
        self.axes.sharing
    }

    fn granularity(&self) -> Granularity {
        // Tokens are what is packed.
        if self.axes.packing == Packing::Score { Granularity::Token } else { self.axes.granularity }
    }

    fn rows(&self) -> RowOrigin {
        self.axes.rows
    }

    fn packing(&self) -> Packing {
        self.axes.packing
    }

    fn tiers(&self) -> Option<Tiers> {
        self.axes.tiers
    }

    fn release(&self) -> Release {
        self.method.release()
    }

    fn least_budget(&self) -> LeastBudget {
        self.method.least_budget()
    }

    fn reading(&self) -> Reading {
        match self.axes.reading {
            Reading::All => self.method.reading(),
            pages => pages,
        }
    }

    fn key_channels(&self) -> Option<KeyChannels> {
        self.method.key_channels()
    }

    fn file(&self) -> Option<&Path> {
        self.method.file()
    }

    fn rotation(&self) -> Rotation {
        self.method.rotation()
    }

    fn scorer(&self, shape: &CacheShape, group: KvGroup) -> Box<dyn PageScorer> {
        let alone = CacheShape { group_size: 1, ..shape.clone() };
        let heads = || (0..shape.group_size).map(|_| self.method.scorer(&alone, group)).collect();
        let headwise = match self.axes.heads {
            HeadPooling::Own => None,
            pooling => HeadwiseScorer::new(pooling, heads(), self.needs().prompt),
        };
        let tokens = match headwise {
            Some(headwise) => Box::new(headwise),
            None => self.method.scorer(shape, group),
        };
        let (scores, second, positions) = (Vec::new(), Vec::new(), Vec::new());
        Box::new(BlockScorer { tokens, block: self.axes.block, scores, second, positions })
    }
}

/// Page scores of token scores.
#[derive(Clone)]
struct BlockScorer {
    tokens: Box<dyn TokenScorer>,
    block: BlockProjection,
    /// Kept to spare a decision the allocation.
    scores: Vec<f32>,
    /// Of the pages, where the method chooses in two stages.
    second: Vec<f32>,
    positions: Vec<u32>,
}

impl PageScorer for BlockScorer {
    fn observe(&mut self, rows: AttentionRows<'_>) {
        self.tokens.observe(rows);
    }

    fn end_prompt(&mut self) {
        self.tokens.end_prompt();
    }

    fn measure(&mut self, tokens: ResidentTokens<'_>, sums: &mut Vec<f64>) {
        self.tokens.measure(tokens, sums);
    }

    fn score(&mut self, pages: &[PageSpan], tokens: ResidentTokens<'_>, out: &mut Vec<f32>) {
        self.scores.clear();
        self.tokens.score(tokens, &mut self.scores);
        assert_eq!(self.scores.len(), tokens.len(), "a score a token");
        of_pages(self.block, pages, tokens.positions, &self.scores, out);
        if let Some(SecondStage { scores, .. }) = self.tokens.second_stage() {
            of_pages(self.block, pages, tokens.positions, scores, &mut self.second);
        }
    }

    fn second_stage(&self) -> Option<SecondStage<'_>> {
        self.tokens.second_stage().map(|stage| SecondStage { scores: &self.second, ..stage })
    }

    fn retain(&mut self, pages: &[PageSpan]) {
        self.positions.clear();
        self.positions.extend(pages.iter().flat_map(|page| page.first_position..page.first_position + page.len));
        self.tokens.retain(&self.positions);
        // A prompt's worth is not needed again before another prompt.
        self.positions = Vec::new();
        self.scores = Vec::new();
        self.second = Vec::new();
    }

    fn nan_rows(&self) -> u64 {
        self.tokens.nan_rows()
    }

    fn state_bytes(&self) -> u64 {
        let scores = self.scores.capacity() + self.second.capacity();
        let buffers = scores * size_of::<f32>() + self.positions.capacity() * size_of::<u32>();
        self.tokens.state_bytes() + (size_of::<Self>() + buffers) as u64
    }

    /// One score a token is all there is, so heads that choose alone choose alike.
    fn uor_per_head(&self, _pages: &[PageSpan], _k_pages: usize) -> f64 {
        1.0
    }
}

/// Writes a score a page into `out`, of the `scores` of the tokens at `positions`; both lists ascend.
fn of_pages(block: BlockProjection, pages: &[PageSpan], positions: &[u32], scores: &[f32], out: &mut Vec<f32>) {
    out.clear();
    let mut scored = positions.iter().zip(scores).peekable();
    for page in pages {
        let mut of_page = Vec::new();
        while let Some((_, &score)) = scored.next_if(|(position, _)| u64::from(**position) < page.end()) {
            of_page.push(if score.is_nan() { f32::NEG_INFINITY } else { score });
        }
        out.push(block.of(&of_page));
    }
}
