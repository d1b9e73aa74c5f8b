//! What an eviction policy is, and how one is named on a command line.
//!
//! A policy is a set of options: which attention rows it reads, which pages it pins, when it evicts. Its scorers, one a
//! KV group, hold the state. Scoring is all a policy does; how many pages may stay and which ones win is settled by
//! [`Budget`](crate::Budget) and [`select_pages`](crate::select_pages), alike for every policy.

use std::fmt;
use std::path::Path;

use dyn_clone::{DynClone, clone_trait_object};
use thiserror::Error;

use crate::allotment::Allotment;
use crate::attention_rows::{AttentionRows, PageSpan, Taps};
use crate::key_channels::KeyChannels;
use crate::page_entro_kv::PageEntroKv;
use crate::pins::Pins;
use crate::policies::{
    AdaKv, Compactor, CriticalKv, Cur, Dms, DuoAttention, ExpectedAttention, FastGen, FastKvzip, H2o, KNorm, KeyDiff,
    KvCompress, Kvzap, Kvzip, LagKv, ObservedAttention, PagedEviction, PyramidKv, Quest, RKv, Random, RocketKv,
    Scissorhands, SnapKv, StreamingLlm, Think, Tova,
};
use crate::policy_options::scoring;
use crate::pooled_pages::PooledPages;
use crate::reading::Reading;
use crate::resident_tokens::ResidentTokens;
use crate::second_stage::SecondStage;
use crate::shape::{CacheShape, KvGroup};
use crate::tiers::Tiers;

pub use crate::schedule::Schedule;

/// How pages are chosen for eviction. It shows itself as the text that [`parse_policy`] reads.
pub trait EvictionPolicy: fmt::Debug + fmt::Display + Send + Sync {
    /// The policy's name, as [`parse_policy`] reads it.
    fn name(&self) -> &str;

    /// The attention rows its scorers read; attention computes no others.
    fn needs(&self) -> Taps;

    /// Whose rows it is shown where it asks for those of a prompt.
    fn rows(&self) -> RowOrigin {
        RowOrigin::Prompt
    }

    /// When it evicts.
    fn schedule(&self) -> Schedule;

    /// The pages it never evicts.
    fn pins(&self) -> Pins;

    /// How the budget is shared out among layers and heads.
    fn allotment(&self) -> Allotment {
        Allotment::Uniform
    }

    /// Whether the heads of a layer keep the same pages.
    fn sharing(&self) -> Sharing {
        Sharing::Group
    }

    /// Whether it evicts pages or tokens.
    fn granularity(&self) -> Granularity {
        Granularity::Page
    }

    /// In which order tokens that stay are stored.
    fn packing(&self) -> Packing {
        Packing::Position
    }

    /// The kinds of the pages that stay, where it decides about these too; a budget is one of bytes then.
    fn tiers(&self) -> Option<Tiers> {
        None
    }

    /// What it gives up beside what the budget has no room for.
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

    /// The file beside the model that it was given: what [`Taps::gate`] is computed with. It is read by whoever runs the model.
    fn file(&self) -> Option<&Path> {
        None
    }

    /// What the rotation of keys says once tokens between them are gone.
    fn rotation(&self) -> Rotation {
        Rotation::Position
    }

    /// What of its text its scores depend on. Policies in which that is the same are shown the same rows and say the same of them,
    /// whatever they decide then.
    fn scoring(&self) -> String {
        scoring(&self.to_string(), self.granularity())
    }

    /// A fresh scorer of one KV group; `shape` has pages of one token where tokens are decided about one by one.
    fn scorer(&self, shape: &CacheShape, group: KvGroup) -> Box<dyn PageScorer>;
}

/// Which pages go at a decision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Release {
    /// Those the budget has no room for, lowest scores first.
    #[default]
    OverBudget,
    /// These, and whatever room there is what is not pinned and has a score of minus infinity.
    Marked,
}

/// Whose attention rows stand for what will be asked of a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RowOrigin {
    /// Those of its own queries.
    #[default]
    Prompt,
    /// Those of a probe: a few questions that any text may be asked, read behind the prompt and dropped again. For prompts
    /// without their question.
    Probe,
}

impl RowOrigin {
    pub(crate) const WORDS: [(&str, Self); 2] = [("prompt", Self::Prompt), ("probe", Self::Probe)];
}

/// In which order the tokens of a KV group are stored once it has been decided about them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Packing {
    /// That of the text.
    #[default]
    Position,
    /// By falling score, so that whole pages go at the quality of single tokens, and a tighter budget is fewer of the same pages.
    /// Keys carry their positions, and attention has no order. What it costs: nothing behind the compressed prefix can be taken
    /// back, and no part of it be shared.
    Score,
}

impl Packing {
    pub(crate) const WORDS: [(&str, Self); 2] = [("position", Self::Position), ("score", Self::Score)];
}

/// The smallest budget that a policy can keep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LeastBudget {
    /// What it pins: a number of pages, whatever the prompt.
    #[default]
    Pins,
    /// All of the cache: it frees nothing.
    Everything,
}

/// What a rotary embedding stands for after an eviction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rotation {
    /// A token's position: distances are those of the text.
    #[default]
    Position,
    /// A token's number among those held: distances are those in the cache. Exact where a run of first tokens and a run of
    /// newest ones stay, which is how StreamingLLM evicts; what lies between two gaps keeps its position.
    Slot,
}

/// Which KV groups keep the same pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sharing {
    /// None: each keeps what it scores best itself.
    #[default]
    Group,
    /// Those of a layer: a page counts the mean of their scores.
    Layer,
}

/// What is evicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Granularity {
    /// Pages: nothing moves.
    #[default]
    Page,
    /// Tokens, wherever they are; those that stay are moved together, so that whole pages are freed. The budget and what an
    /// allotment gives to each group are still pages. Codes do not move: where pages are codes, a page counts what its best token
    /// counts.
    Token,
}

impl Granularity {
    pub(crate) const WORDS: [(&str, Self); 2] = [("page", Self::Page), ("token", Self::Token)];
}

/// Scores the pages of one KV group of one sequence; a higher score stays longer.
pub trait PageScorer: DynClone + Send {
    /// Takes in rows the policy asked for.
    ///
    /// A prompt's rows may arrive in any number of pieces, ascending; scores do not depend on how they were cut. The
    /// first prompt rows after [`end_prompt`](Self::end_prompt) begin another turn: the scores are then made anew from
    /// the rows over the tokens resident by that time.
    ///
    /// # Panics
    /// When the rows are of another group size than the scorer's shape.
    fn observe(&mut self, rows: AttentionRows<'_>);

    /// Makes scores of the prompt rows observed; call it when the last of them is in, before [`score`](Self::score).
    fn end_prompt(&mut self);

    /// Appends what is to be known of the whole layer before its tokens are scored: numbers that are added up over its heads and
    /// come back as [`ResidentTokens::layer_sums`]. The same tokens are scored next.
    fn measure(&mut self, _tokens: ResidentTokens<'_>, _sums: &mut Vec<f64>) {}

    /// Writes one score a page into `out`, which is cleared first. Never NaN. `tokens` are those of the pages, with what the
    /// policy asked for.
    fn score(&mut self, pages: &[PageSpan], tokens: ResidentTokens<'_>, out: &mut Vec<f32>);

    /// The second score of a policy that chooses in two stages, of the pages last scored.
    fn second_stage(&self) -> Option<SecondStage<'_>> {
        None
    }

    /// Forgets every token outside `pages`, the ones that stay after a decision, and gives the memory back. Scores of the
    /// others do not change.
    fn retain(&mut self, pages: &[PageSpan]);

    /// Rows (one query of one head) dropped so far because an entry was not finite or the row had no mass.
    fn nan_rows(&self) -> u64;

    /// Bytes of memory this scorer holds.
    fn state_bytes(&self) -> u64;

    /// Union overhead ratio had each head chosen alone: the pages in any head's own top `k_pages` over `k_pages`, as of
    /// the prompt's end. One set a group, which is what a policy here keeps, has ratio 1.
    fn uor_per_head(&self, pages: &[PageSpan], k_pages: usize) -> f64;
}

clone_trait_object!(PageScorer);

/// Reads the options of a policy: what stands behind its name and a colon, if anything does.
type Parse = fn(Option<&str>) -> Result<Box<dyn EvictionPolicy>, PolicyError>;

/// A policy that [`parse_policy`] knows.
#[derive(Clone, Copy, Debug)]
pub struct PolicyEntry {
    /// Its name on a command line.
    pub name: &'static str,
    /// Who described it.
    pub paper: &'static str,
    /// Whether pages it gives up are freed.
    pub frees: bool,
    /// Whether it needs a file beside the model.
    pub requires_file: bool,
    parse: Parse,
}

impl PolicyEntry {
    /// The policy with its defaults, and without the file it may require.
    #[must_use]
    pub fn default_policy(&self) -> Box<dyn EvictionPolicy> {
        (self.parse)(None).expect("no option is a bad option")
    }
}

/// As [`entry`], of a policy that nothing can be scored with before it is given its gates.
const fn gated(name: &'static str, paper: &'static str, parse: Parse) -> PolicyEntry {
    PolicyEntry { requires_file: true, ..entry(name, paper, parse) }
}

/// As [`entry`], of a policy that frees nothing.
const fn keeper(name: &'static str, paper: &'static str, parse: Parse) -> PolicyEntry {
    PolicyEntry { frees: false, ..entry(name, paper, parse) }
}

const fn entry(name: &'static str, paper: &'static str, parse: Parse) -> PolicyEntry {
    PolicyEntry { name, paper, frees: true, requires_file: false, parse }
}

/// The policies [`parse_policy`] knows.
pub const POLICIES: &[PolicyEntry] = &[
    entry(PageEntroKv::NAME, "Page-EntroKV, arXiv 2610.03135", |options| Ok(Box::new(PageEntroKv::parse(options)?))),
    entry(PooledPages::MEAN, "the baseline of Page-EntroKV, arXiv 2610.03135", |options| {
        Ok(Box::new(PooledPages::mean(options)?))
    }),
    entry(PooledPages::MAX, "the same with the largest head", |options| Ok(Box::new(PooledPages::max(options)?))),
    entry(AdaKv::NAME, "Ada-KV, Feng et al. 2024", AdaKv::parse),
    entry(Compactor::NAME, "Compactor, Chari and Van Durme 2025", Compactor::parse),
    entry(CriticalKv::NAME, "CriticalKV, Feng et al. 2025", CriticalKv::parse),
    entry(Cur::NAME, "CurDKV, Sengupta et al. 2025", Cur::parse),
    entry(Dms::NAME, "DMS, Lancucki et al. 2025", Dms::parse),
    entry(DuoAttention::NAME, "DuoAttention, Xiao et al. 2024", DuoAttention::parse),
    entry(ExpectedAttention::NAME, "Expected Attention, Devoto et al. 2025", ExpectedAttention::parse),
    entry(FastGen::NAME, "FastGen, Ge et al. 2024", FastGen::parse),
    gated(FastKvzip::NAME, "Fast KVzip, Kim et al. 2026", FastKvzip::parse),
    entry(H2o::NAME, "H2O, Zhang et al. 2023", H2o::parse),
    entry(KeyDiff::NAME, "KeyDiff, Park et al. 2025", KeyDiff::parse),
    entry(KNorm::NAME, "Devoto et al. 2024", KNorm::parse),
    entry(KvCompress::NAME, "KV-Compress, Rehg 2024", KvCompress::parse),
    gated(Kvzap::NAME, "KVzap, Jegou and Jeblick 2026", Kvzap::parse),
    entry(Kvzip::NAME, "KVzip, Kim et al. 2025", Kvzip::parse),
    entry(LagKv::NAME, "LagKV, Liang et al. 2025", LagKv::parse),
    entry(ObservedAttention::NAME, "the average form of H2O in kvpress", ObservedAttention::parse),
    entry(PagedEviction::NAME, "PagedEviction, Chitty-Venkata et al. 2025", PagedEviction::parse),
    entry(PyramidKv::NAME, "PyramidKV, Cai et al. 2024", PyramidKv::parse),
    keeper(Quest::NAME, "Quest, Tang et al. 2024", Quest::parse),
    entry(RKv::NAME, "R-KV, Cai et al. 2025", RKv::parse),
    entry(Random::NAME, "none: a baseline", Random::parse),
    entry(RocketKv::NAME, "RocketKV stage 1, Behnam et al. 2025", RocketKv::parse),
    entry(Scissorhands::NAME, "Scissorhands, Liu et al. 2023", Scissorhands::parse),
    entry(SnapKv::NAME, "SnapKV, Li et al. 2024", SnapKv::parse),
    entry(StreamingLlm::NAME, "StreamingLLM, Xiao et al. 2023", StreamingLlm::parse),
    keeper(Think::NAME, "ThinK, Xu et al. 2024", Think::parse),
    entry(Tova::NAME, "TOVA, Oren et al. 2024", Tova::parse),
];

/// The names of [`POLICIES`], as an error lists them.
fn known_names() -> String {
    POLICIES.iter().map(|entry| entry.name).collect::<Vec<_>>().join(", ")
}

/// The policy a text such as `page-entro-kv:preset=serving,tau=0.3,row=window:32` names.
///
/// The name comes first, then after a colon any options as `key=value`, parted by commas, in any order; `preset` is
/// applied before the others.
///
/// # Errors
/// [`PolicyError`] for a name, key or value that is not known, a key given twice, or `none`, which is no policy.
pub fn parse_policy(text: &str) -> Result<Box<dyn EvictionPolicy>, PolicyError> {
    let (name, options) = match text.split_once(':') {
        Some((name, options)) => (name.trim(), Some(options)),
        None => (text.trim(), None),
    };
    match POLICIES.iter().find(|entry| entry.name == name) {
        Some(entry) => {
            let policy = (entry.parse)(options)?;
            let lacks_file = entry.requires_file && policy.file().is_none();
            if lacks_file { Err(PolicyError::NeedsGates { policy: entry.name }) } else { Ok(policy) }
        }
        None if name == "none" => Err(PolicyError::NoPolicy),
        None => Err(PolicyError::UnknownPolicy { got: name.to_owned() }),
    }
}

/// The same policy, deciding when it is told to ([`Schedule::AfterAnswer`]) and not at a prompt's end: so that several budgets can
/// be tried on one reading. `None` for one that evicts while a prompt is read, and for one that has no schedule to be changed.
#[must_use]
pub fn deciding_later(policy: &dyn EvictionPolicy) -> Option<Box<dyn EvictionPolicy>> {
    if matches!(policy.schedule(), Schedule::PerChunk(_)) {
        return None;
    }
    let text = policy.to_string();
    let (name, options) = text.split_once(':').unwrap_or((&text, ""));
    let others = options.split(',').filter(|item| !item.is_empty() && !item.starts_with("schedule="));
    let options: Vec<String> =
        others.map(str::to_owned).chain([format!("schedule={}", Schedule::AfterAnswer(0))]).collect();
    parse_policy(&format!("{name}:{}", options.join(","))).ok()
}

/// Why a text names no policy.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PolicyError {
    /// A name no policy has.
    #[error("unknown policy `{got}`; known are {}", known_names())]
    UnknownPolicy {
        /// The name given.
        got: String,
    },
    /// `none`: whoever asks for no policy must not build one.
    #[error("`none` keeps every page and is not a policy; known are {}", known_names())]
    NoPolicy,
    /// An option that is not of the form `key=value`.
    #[error("an option of {policy} is KEY=VALUE, got `{got}`; known are {known}")]
    NotAnOption {
        /// The policy.
        policy: &'static str,
        /// The text given.
        got: String,
        /// Every key with its values.
        known: String,
    },
    /// A key the policy does not have.
    #[error("unknown option `{got}` of {policy}; known are {known}")]
    UnknownOption {
        /// The policy.
        policy: &'static str,
        /// The key given.
        got: String,
        /// Every key with its values.
        known: String,
    },
    /// A value out of an option's range.
    #[error("option `{key}` of {policy} is {expected}, got `{got}`")]
    BadValue {
        /// The policy.
        policy: &'static str,
        /// The key.
        key: &'static str,
        /// The values the option takes.
        expected: String,
        /// The value given.
        got: String,
    },
    /// A policy of gates without its gates.
    #[error("{policy} needs gates trained for the model: {policy}:gates=FILE, a file of the safetensors format")]
    NeedsGates {
        /// The policy.
        policy: &'static str,
    },
    /// A key given more than once.
    #[error("option `{key}` of {policy} is given twice")]
    Repeated {
        /// The policy.
        policy: &'static str,
        /// The key.
        key: &'static str,
    },
}
