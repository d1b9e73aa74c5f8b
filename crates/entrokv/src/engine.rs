//! The engine: several sequences over one model and one page pool, advanced a step at a time.
//!
//! A step reads aloud: choose what to run, make room under the budgets, grow the caches, run the model, settle the
//! results (evict at a prompt's end, encode, sample, stop). Invariants, each a test of that name:
//! * `budget_holds_after_every_step`: once its prompt is read, a rolling sequence never holds more than its budget.
//! * `closing_returns_every_page`: when no sequence is alive, the pool is empty.
//! * `forks_go_on_as_if_alone`: what one reads, evicts or encodes changes no bit of another.
//! * `an_interrupted_step_can_be_repeated`: an interrupt loses no token and changes no bit; a sequence whose policy was
//!   watching the step is cancelled instead, for a policy must not see a row twice.

mod forks;
mod kv_files;
mod kv_report;
mod ledger;
mod pass;
mod step;
mod taps;

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use entrokv_cache::{
    BudgetError, CacheShape, EvictionPolicy, GateTap, KindShapeError, KvCache, Packing, PageCost, PageKind, PagePool,
    Reading, Release, Rotation, RowOrigin, Schedule, Sharing,
};
use entrokv_kernels::arena::Arena;
use entrokv_kernels::heap;

pub use self::forks::ForkError;
pub use self::kv_report::KvReport;
pub use self::ledger::KvBytes;
pub(crate) use self::ledger::Ledger;
pub use self::pass::PassProgress;
pub(crate) use self::pass::{Pass, PassPlan, Record, tokens_at};
use crate::coding::{self, Coding};
use crate::eviction::Eviction;
use crate::gates::{Gates, GatesError};
use crate::kv_file::ModelId;
use crate::model::{ModelRunner, RunError};
use crate::repeat_instruction::RepeatInstruction;
use crate::sampler::{OptionError, Sampler};
use crate::segments::SegmentLists;
use crate::sequence::{EvictionOptions, FinishReason, Request, Sequence, SequenceId, Timing, Turn};
use crate::stop::StopError;
use crate::store::TokenVectors;
use crate::text_stream::TextStream;
use crate::tokenizer::Tokenizer;
use crate::turned_sinks::TurnedSinks;

/// Sizes of an engine.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// How pages are stored; coded kinds are written as plain ones first.
    pub page_kind: PageKind,
    /// Most prompt tokens read in one step; any number gives the same bits.
    pub chunk_size: NonZeroUsize,
    /// Most tokens a sequence may have; the model's context where `None`.
    pub context_len: Option<usize>,
    /// Cap on the bytes of all pages.
    pub pool_bytes: u64,
    /// What identifies the model in KV files; without it none are written or read.
    pub model_id: Option<ModelId>,
    /// How the model is asked to repeat a prompt, for policies that score by it.
    pub repeat: RepeatInstruction,
    /// What a model is asked for policies of `rows=probe`; empty where nothing is.
    pub probe: Vec<u32>,
}

/// Several sequences over one model and one pool.
pub struct Engine {
    pub(crate) runner: Box<dyn ModelRunner>,
    tokenizer: Option<Arc<Tokenizer>>,
    shape: Arc<CacheShape>,
    pub(crate) options: EngineOptions,
    context_len: usize,
    pub(crate) pool: PagePool,
    pub(crate) sequences: BTreeMap<SequenceId, Sequence>,
    next_id: u64,
    /// Gates that were read, by what they are and their file: read once, and not again if the file changes.
    gates: HashMap<(GateTap, Option<PathBuf>), Arc<Gates>>,
}

/// Why a request was refused before anything was read.
#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    /// Nothing to read.
    #[error("the prompt has 0 tokens; at least 1 is needed")]
    EmptyPrompt,
    /// A token id of the prompt or of the logit bias that the vocabulary does not have.
    #[error("token id {got} is outside the vocabulary of {limit}")]
    TokenOutOfRange {
        /// The id.
        got: u32,
        /// Size of the vocabulary.
        limit: usize,
    },
    /// More than the context holds.
    #[error("the prompt has {got} tokens, the context holds {limit}")]
    PromptTooLong {
        /// Logical length after the prompt.
        got: usize,
        /// Context length.
        limit: usize,
    },
    /// No room in the context for a policy's pass behind the prompt.
    #[error(
        "the policy repeats the prompt of {got} tokens behind itself, {needed} at a time; the context holds {limit}"
    )]
    NoRoomToRepeat {
        /// Logical length after the prompt.
        got: usize,
        /// Tokens there must be room for.
        needed: usize,
        /// Context length.
        limit: usize,
    },
    /// No room in the context for the probe behind the prompt.
    #[error("the probe of {probe} tokens is read behind the prompt of {got}; the context holds {limit}")]
    NoRoomToProbe {
        /// Logical length after the prompt.
        got: usize,
        /// Tokens of the probe.
        probe: usize,
        /// Context length.
        limit: usize,
    },
    /// A budget that cannot be kept.
    #[error(transparent)]
    Budget(#[from] BudgetError),
    /// Tiers over a cache that is codes already.
    #[error("tiers are made of plain pages, and this cache is of type {got}: leave the cache type to the tiers")]
    TieredCodes {
        /// How the cache is stored.
        got: PageKind,
    },
    /// A plain tier of another kind than what is written.
    #[error("a tier of {tier} cannot be made of pages written as {got}: a plain tier is of the cache's own type")]
    PlainTier {
        /// The tier.
        tier: PageKind,
        /// How tokens are written.
        got: PageKind,
    },
    /// Tiers that this geometry cannot have.
    #[error(transparent)]
    TierShape(#[from] KindShapeError),
    /// Tiers for a text that has been read without them.
    #[error(
        "tiers of codes need what the model's first queries say, and {got} tokens were read without it: begin a new sequence"
    )]
    LateTiers {
        /// Tokens read.
        got: usize,
    },
    /// A policy without tiers for a cache that has them.
    #[error("the cache is stored in tiers, and {policy} has none: name some, as in tiers=tq4")]
    SettledPages {
        /// The policy.
        policy: String,
    },
    /// Tiers with an axis that they have no room for.
    #[error("{policy} evicts by layer, by mark or by slot, or reads a part, and tiers plan pages of every KV head")]
    TieredPolicy {
        /// The policy.
        policy: String,
    },
    /// Packing without tiers.
    #[error("pack=score is for caches of tiers: say tiers=KIND too, as in tiers=f16 or tiers=tq4:3nats+tq3v2")]
    PackedAlone,
    /// Gates that cannot be had, or are another model's.
    #[error(transparent)]
    Gates(#[from] GatesError),
    /// A further turn under gates that have not seen the turns before it.
    #[error(
        "{policy} has not seen the {got} tokens before this turn; its gates must be those of every turn from the first"
    )]
    UnseenTokens {
        /// The policy.
        policy: String,
        /// Tokens before the turn.
        got: usize,
    },
    /// Another cap for a text that has been read, of a policy that would have been shown something else.
    #[error("{policy} does not score as {before} does, which has seen the text")]
    ScoresOtherwise {
        /// The policy.
        policy: String,
        /// The one that was shown the text.
        before: String,
    },
    /// Another cap where the text was read under none, or has been compressed already.
    #[error("sequence {0} does not wait to be compressed: read it under a policy of schedule=after_answer")]
    NotWaiting(SequenceId),
    /// A policy that rewrites pages which are codes by then.
    #[error(
        "rotating by slot rewrites the {needed} pages of the sinks, of which a {kind} cache keeps {limit} as written: ask for \
         fewer sinks or a plain cache type"
    )]
    CodedSinks {
        /// Pages that hold a sink.
        needed: usize,
        /// How many of them are never encoded.
        limit: usize,
        /// How pages are stored.
        kind: PageKind,
    },
    /// A policy that writes into pages which are codes by then.
    #[error("{policy} clears channels of keys, which a {kind} cache stores as codes: ask for plain keys")]
    CodedKeys {
        /// The policy.
        policy: String,
        /// How pages are stored.
        kind: PageKind,
    },
    /// Sampling options out of range.
    #[error(transparent)]
    Sampling(#[from] OptionError),
    /// A stop string that cannot be one.
    #[error(transparent)]
    Stop(#[from] StopError),
    /// Stop strings need text, and this engine has no tokenizer.
    #[error("stop strings need a tokenizer, and this engine was built without one")]
    NoTokenizer,
    /// No such sequence.
    #[error("there is no sequence {0}")]
    Unknown(SequenceId),
    /// A further turn while the last answer is still being generated.
    #[error("sequence {0} is still answering")]
    Busy(SequenceId),
}

/// Why caches are not stored as another kind from now on.
#[derive(Debug, thiserror::Error)]
pub enum PageKindRefused {
    /// Sequences whose pages are of the present kind.
    #[error("{got} sequence(s) are stored as {kind}; close them first")]
    InUse {
        /// Sequences alive.
        got: usize,
        /// How they are stored.
        kind: PageKind,
    },
    /// A kind that the model's pages cannot be of.
    #[error(transparent)]
    Shape(#[from] KindShapeError),
}

/// What a step gave one sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct StepOutput {
    /// Whose.
    pub id: SequenceId,
    /// Tokens of the sequence whose keys and values have been computed: how far a prompt has been read.
    pub computed: usize,
    /// How far the prompt has been repeated, while a policy has it repeated before the first token.
    pub pass: Option<PassProgress>,
    /// The token sampled, if the prompt has been read.
    pub token: Option<u32>,
    /// Text that became certain, whole characters only.
    pub text: String,
    /// Set when the answer ended with this step.
    pub finished: Option<FinishReason>,
}

/// An answer in full.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// Tokens generated, an end token included.
    pub tokens: Vec<u32>,
    /// Their text up to a stop string; empty without a tokenizer.
    pub text: String,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// The cache at the end.
    pub kv: KvReport,
    /// Wall time.
    pub timing: Timing,
}

impl Engine {
    /// An engine over `runner`, whose store must hold `options.pool_bytes`.
    ///
    /// `tokenizer` turns tokens into text and knows the end tokens; without it the engine speaks ids only.
    pub fn new(
        runner: Box<dyn ModelRunner>,
        shape: Arc<CacheShape>,
        tokenizer: Option<Arc<Tokenizer>>,
        options: EngineOptions,
    ) -> Self {
        let model_context = runner.config().context_len;
        let context_len = options.context_len.map_or(model_context, |len| len.min(model_context));
        let pool = PagePool::new(options.pool_bytes);
        let (sequences, gates) = (BTreeMap::new(), HashMap::new());
        Self { runner, tokenizer, shape, options, context_len, pool, sequences, next_id: 0, gates }
    }

    /// How pages are stored.
    pub fn page_kind(&self) -> PageKind {
        self.options.page_kind
    }

    /// Stores the pages of all sequences from now on as `kind`. The pool stays as large as it is.
    ///
    /// # Errors
    /// [`PageKindRefused`] while any sequence is alive, and for a kind that the pages of this model cannot be of.
    pub fn set_page_kind(&mut self, kind: PageKind) -> Result<(), PageKindRefused> {
        if !self.sequences.is_empty() {
            return Err(PageKindRefused::InUse { got: self.sequences.len(), kind: self.options.page_kind });
        }
        kind.check(&self.shape)?;
        self.options.page_kind = kind;
        Ok(())
    }

    /// Geometry of the cache.
    pub fn shape(&self) -> &Arc<CacheShape> {
        &self.shape
    }

    /// Most tokens a sequence may have.
    pub fn context_len(&self) -> usize {
        self.context_len
    }

    /// The tokenizer, if the engine has one.
    pub fn tokenizer(&self) -> Option<&Arc<Tokenizer>> {
        self.tokenizer.as_ref()
    }

    /// The pool all sequences share.
    pub fn pool(&self) -> &PagePool {
        &self.pool
    }

    /// Starts a sequence.
    ///
    /// # Errors
    /// [`SubmitError`]; nothing is allocated then.
    pub fn submit(&mut self, request: Request) -> Result<SequenceId, SubmitError> {
        let turn = self.turn(&request, 0)?;
        let tiers = request.eviction.as_ref().and_then(|eviction| eviction.policy.tiers());
        let (mut cache, mut coding) = self.new_cache(self.options.page_kind);
        if let Some(tiered) = tiers.and_then(|tiers| Coding::of_tiers(&self.shape, tiers)) {
            (cache, coding) = (KvCache::new(Arc::clone(&self.shape), tiered.kind().written_as()), Some(tiered));
        }
        let id = SequenceId(self.next_id);
        self.next_id += 1;
        let segments = SegmentLists::new(&self.shape);
        let (turned_sinks, ledger) = (TurnedSinks::default(), Ledger::default());
        let tokens = request.prompt;
        self.sequences
            .insert(id, Sequence { tokens, computed: 0, cache, segments, coding, turned_sinks, ledger, turn });
        Ok(id)
    }

    /// An empty cache that will be stored as `kind`, and what encodes its pages.
    pub(crate) fn new_cache(&self, kind: PageKind) -> (KvCache, Option<Coding>) {
        (KvCache::new(Arc::clone(&self.shape), kind.written_as()), Coding::new(&self.shape, kind))
    }

    /// Gives a finished sequence a further prompt: a turn of a conversation. Its cache stays as it is.
    ///
    /// # Errors
    /// [`SubmitError`]; the sequence is unchanged then.
    pub fn extend(&mut self, id: SequenceId, request: Request) -> Result<(), SubmitError> {
        let sequence = self.sequences.get(&id).ok_or(SubmitError::Unknown(id))?;
        if sequence.turn.finished.is_none() {
            return Err(SubmitError::Busy(id));
        }
        let start = sequence.tokens.len();
        let tiers = request.eviction.as_ref().and_then(|eviction| eviction.policy.tiers());
        if let Some(tiers) = tiers.filter(|tiers| tiers.coded().is_some())
            && !sequence.coding.as_ref().is_some_and(|coding| coding.serves(tiers))
        {
            return Err(SubmitError::LateTiers { got: start });
        }
        let is_settled = self.shape.groups().any(|group| sequence.cache.num_settled(group) > 0);
        if let (Some(eviction), None, true) = (&request.eviction, tiers, is_settled) {
            return Err(SubmitError::SettledPages { policy: eviction.policy.to_string() });
        }
        if let Some(EvictionOptions { policy, .. }) = &request.eviction
            && let Some(gates) = self.gates(&**policy)?.filter(|gates| gates.see_tokens())
        {
            let last = self.sequences.get(&id).and_then(|sequence| sequence.turn.eviction.as_ref());
            if !last.is_some_and(|last| last.knows(&gates)) {
                return Err(SubmitError::UnseenTokens { policy: policy.name().to_owned(), got: start });
            }
        }
        let mut turn = self.turn(&request, start)?;
        let sequence = self.sequences.get_mut(&id).ok_or(SubmitError::Unknown(id))?;
        if let (Some(next), Some(last)) = (&mut turn.eviction, &mut sequence.turn.eviction) {
            next.carry_on(last);
        }
        sequence.tokens.extend_from_slice(&request.prompt);
        sequence.turn = turn;
        Ok(())
    }

    /// The turn of `request`, checked; `start` is the logical length before its prompt.
    fn turn(&mut self, request: &Request, start: usize) -> Result<Turn, SubmitError> {
        if request.prompt.is_empty() {
            return Err(SubmitError::EmptyPrompt);
        }
        let end = start + request.prompt.len();
        if end > self.context_len {
            return Err(SubmitError::PromptTooLong { got: end, limit: self.context_len });
        }
        let vocab_size = self.runner.vocab_size();
        let biased = request.sampling.logit_bias.iter().map(|(id, _)| id);
        if let Some(&got) = request.prompt.iter().chain(biased).find(|&&id| id as usize >= vocab_size) {
            return Err(SubmitError::TokenOutOfRange { got, limit: vocab_size });
        }
        let text = match &self.tokenizer {
            Some(tokenizer) => Some(TextStream::new(tokenizer, &request.stop)?),
            None if request.stop.is_empty() => None,
            None => return Err(SubmitError::NoTokenizer),
        };
        let eviction = match &request.eviction {
            Some(options) => {
                self.check_rewrites(options)?;
                self.check_tiers(&*options.policy)?;
                let gates = self.gates(&*options.policy)?;
                let cost = PageCost::from(self.options.page_kind.written_as());
                let logit_scale = self.runner.config().attention_scale;
                Some(Eviction::new(options, &self.shape, cost, gates, logit_scale)?)
            }
            None => None,
        };
        if let Some(needs) = request.eviction.as_ref().and_then(|eviction| eviction.policy.needs().reconstruction) {
            let room = self.context_len - end;
            PassPlan::new(needs, 0..end, 0, room, &self.options.repeat)
                .map_err(|needed| SubmitError::NoRoomToRepeat { got: end, needed, limit: self.context_len })?;
        }
        let probe = self.options.probe.len();
        let is_probed = request.eviction.as_ref().is_some_and(|eviction| eviction.policy.rows() == RowOrigin::Probe);
        if is_probed && end + probe > self.context_len {
            return Err(SubmitError::NoRoomToProbe { got: end, probe, limit: self.context_len });
        }
        let length_limit = request.max_tokens.map_or(self.context_len, |n| self.context_len.min(end.saturating_add(n)));
        Ok(Turn {
            prompt_end: end,
            length_limit,
            end_tokens: request.end_tokens,
            sampler: Sampler::new(request.sampling.clone())?,
            text,
            forced: None,
            eviction,
            said: String::new(),
            pass: None,
            resting: None,
            finished: None,
            timing: Timing::default(),
        })
    }

    /// The gates that `policy` reads, if it reads any.
    fn gates(&mut self, policy: &dyn EvictionPolicy) -> Result<Option<Arc<Gates>>, GatesError> {
        let (tap, file) = (policy.needs().gate, policy.file());
        if tap == GateTap::None {
            return Ok(None);
        }
        let key = (tap, file.map(Path::to_owned));
        if let Some(gates) = self.gates.get(&key) {
            return Ok(Some(Arc::clone(gates)));
        }
        let gates = Arc::new(self.runner.load_gates(tap, file)?);
        self.gates.insert(key, Arc::clone(&gates));
        Ok(Some(gates))
    }

    /// Whether the pages that stay can be of the kinds that `policy` says.
    fn check_tiers(&self, policy: &dyn EvictionPolicy) -> Result<(), SubmitError> {
        let (got, tiers) = (self.options.page_kind, policy.tiers());
        if tiers.is_none() && policy.packing() == Packing::Score {
            return Err(SubmitError::PackedAlone);
        }
        let Some(tiers) = tiers else { return Ok(()) };
        if got.is_coded() {
            return Err(SubmitError::TieredCodes { got });
        }
        if policy.rotation() == Rotation::Slot
            || policy.release() == Release::Marked
            || policy.sharing() == Sharing::Layer
            || policy.reading() != Reading::All
        {
            return Err(SubmitError::TieredPolicy { policy: policy.to_string() });
        }
        for kind in tiers.kinds() {
            kind.check(&self.shape)?;
            if !self.options.page_kind.can_become(kind) || (!kind.is_coded() && kind != got) {
                return Err(SubmitError::PlainTier { tier: kind, got });
            }
        }
        Ok(())
    }

    /// Whether what a policy rewrites can be: the sinks of one that rotates by slot, keys of one that clears channels.
    fn check_rewrites(&self, options: &EvictionOptions) -> Result<(), SubmitError> {
        let kind = self.options.page_kind;
        let (needed, limit) = (options.policy.pins().sink_pages(self.shape.page_size), coding::sink_pages(&self.shape));
        if options.policy.rotation() == Rotation::Slot && kind.is_coded() && needed > limit {
            return Err(SubmitError::CodedSinks { needed, limit, kind });
        }
        if options.policy.key_channels().is_some() && kind.is_coded() {
            return Err(SubmitError::CodedKeys { policy: options.policy.name().to_owned(), kind });
        }
        Ok(())
    }

    /// Ends the answer of `id`; its cache stays until [`Engine::close`]. Does nothing to a finished or unknown sequence.
    pub fn cancel(&mut self, id: SequenceId) {
        self.end(id, FinishReason::Cancelled);
    }

    /// Compresses the cache of `id`, which has finished under a policy of `schedule=after_answer`: the steps that follow make its
    /// pass and evict. [`Engine::finish`] takes them; cancelled, they leave the cache as it was. `false` where that has been done,
    /// was never asked for, or the text is too short for codes to be made of it or for its policy (`after_answer:N`).
    ///
    /// # Errors
    /// [`SubmitError::Unknown`], and [`SubmitError::Busy`] while it answers.
    pub fn compress(&mut self, id: SequenceId) -> Result<bool, SubmitError> {
        let Some(begun) = self.begin_pass(id, Eviction::begin)? else { return Ok(false) };
        if begun {
            return Ok(true);
        }
        let Some(sequence) = self.sequences.get_mut(&id) else { return Ok(false) };
        if let Err(error) = sequence.compress(&mut self.pool, self.runner.as_mut()) {
            sequence.turn.finished = Some(FinishReason::Failed(error.to_string()));
        }
        self.reclaim();
        heap::give_back_freed();
        Ok(true)
    }

    /// Makes the pass that [`Engine::compress`] would make of `id` and evicts nothing, so that forks of it can be compressed
    /// without one of their own. The steps that follow make it; `false` where there is none to make.
    ///
    /// # Errors
    /// As [`Engine::compress`].
    pub fn make_pass(&mut self, id: SequenceId) -> Result<bool, SubmitError> {
        Ok(self.begin_pass(id, |_| ())? == Some(true))
    }

    /// Begins the pass of a sequence that waits to be compressed, if it has one to make; `None` if it does not wait. Its policy
    /// hears `when` first.
    fn begin_pass(&mut self, id: SequenceId, when: impl FnOnce(&mut Eviction)) -> Result<Option<bool>, SubmitError> {
        let sequence = self.sequences.get_mut(&id).ok_or(SubmitError::Unknown(id))?;
        let turn = &mut sequence.turn;
        let Some(reason) = turn.finished.clone() else { return Err(SubmitError::Busy(id)) };
        let Some(eviction) = turn.eviction.as_mut().filter(|eviction| eviction.waits()) else { return Ok(None) };
        // A text too short to be coded is too short to lose anything of it for.
        let can_encode = sequence.coding.as_ref().is_none_or(Coding::can_encode);
        let least = turn.prompt_end.max(eviction.least_text().unwrap_or(0));
        if sequence.computed < least || !can_encode {
            return Ok(None);
        }
        when(eviction);
        turn.prompt_end = sequence.computed;
        sequence.begin_pass(&self.options.probe, &self.options.repeat, self.context_len, None);
        let begun = sequence.turn.pass.is_some();
        if begun {
            (sequence.turn.resting, sequence.turn.finished) = (Some(reason), None);
        }
        Ok(Some(begun))
    }

    /// Puts `id`, which waits to be compressed, under another cap: another budget, and another policy that scores alike but
    /// decides otherwise ([`EvictionPolicy::scoring`]). Then [`Engine::compress`] is up to that one.
    ///
    /// # Errors
    /// [`SubmitError`]; the sequence is unchanged then.
    pub fn set_cap(&mut self, id: SequenceId, options: &EvictionOptions) -> Result<(), SubmitError> {
        self.check_tiers(&*options.policy)?;
        options.budget.check(
            &self.shape,
            PageCost::from(self.options.page_kind.written_as()),
            &options.policy.pins(),
        )?;
        let sequence = self.sequences.get_mut(&id).ok_or(SubmitError::Unknown(id))?;
        let waiting = sequence.turn.eviction.as_mut().filter(|eviction| eviction.waits());
        let eviction = waiting.ok_or(SubmitError::NotWaiting(id))?;
        let policy = || options.policy.to_string();
        let before = eviction.policy();
        let scores_alike = options.policy.scoring() == before.scoring();
        if !matches!(options.policy.schedule(), Schedule::AfterAnswer(_)) || !scores_alike {
            return Err(SubmitError::ScoresOtherwise { policy: policy(), before: before.to_string() });
        }
        let coded = |policy: &dyn EvictionPolicy| policy.tiers().filter(|tiers| tiers.coded().is_some());
        match (coded(before), coded(&*options.policy), &mut sequence.coding) {
            (None, None, _) => {}
            (Some(_), Some(tiers), Some(coding)) if coding.serves(tiers) => coding.change_tiers(tiers),
            (_, Some(_), _) => return Err(SubmitError::LateTiers { got: sequence.computed }),
            (Some(_), None, _) => return Err(SubmitError::SettledPages { policy: policy() }),
        }
        eviction.change_cap(options);
        Ok(())
    }

    /// Forgets a sequence and returns every page it held.
    pub fn close(&mut self, id: SequenceId) {
        if let Some(sequence) = self.sequences.remove(&id) {
            self.retire(sequence.cache);
        }
    }

    /// Returns every page of `cache`.
    pub(crate) fn retire(&mut self, cache: KvCache) {
        cache.release(&mut self.pool);
        self.reclaim();
    }

    /// Whether any sequence has work left.
    pub fn is_busy(&self) -> bool {
        self.sequences.values().any(|sequence| sequence.turn.finished.is_none())
    }

    /// All tokens of `id`, prompts and answers.
    pub fn tokens(&self, id: SequenceId) -> Option<&[u32]> {
        self.sequences.get(&id).map(|sequence| sequence.tokens.as_slice())
    }

    /// Block tables of `id`.
    pub fn cache(&self, id: SequenceId) -> Option<&KvCache> {
        self.sequences.get(&id).map(|sequence| &sequence.cache)
    }

    /// Keys and values that `id` holds of each KV head of `layer`, as they are stored.
    pub fn token_vectors(&self, id: SequenceId, layer: u32) -> Option<Vec<TokenVectors>> {
        let sequence = self.sequences.get(&id)?;
        let constants = sequence.coding.as_ref().map_or(&[][..], Coding::constants);
        Some(self.runner.token_vectors(&sequence.cache, layer, constants))
    }

    /// Wall time of the current turn of `id`.
    pub fn timing(&self, id: SequenceId) -> Option<Timing> {
        self.sequences.get(&id).map(|sequence| sequence.turn.timing)
    }

    /// The cache of `id` as the pool counts it.
    pub fn kv_report(&self, id: SequenceId) -> Option<KvReport> {
        self.sequences.get(&id).map(|sequence| KvReport::of(sequence, &self.shape, self.options.page_kind))
    }

    /// Runs `request` to its end, calling `on_output` after every step of it, and closes its sequence.
    ///
    /// # Errors
    /// [`SubmitError`] before anything ran. An interrupt ends the answer as [`FinishReason::Cancelled`].
    pub fn generate(
        &mut self,
        request: Request,
        mut on_output: impl FnMut(&StepOutput),
    ) -> Result<Completion, SubmitError> {
        let id = self.submit(request)?;
        let completion = self.finish(id, &mut on_output);
        self.close(id);
        completion
    }

    /// Steps until the answer of `id` is complete and returns it; other sequences advance too.
    ///
    /// # Errors
    /// [`SubmitError::Unknown`].
    pub fn finish(
        &mut self,
        id: SequenceId,
        on_output: &mut dyn FnMut(&StepOutput),
    ) -> Result<Completion, SubmitError> {
        while self.sequences.get(&id).ok_or(SubmitError::Unknown(id))?.turn.finished.is_none() {
            match self.step() {
                Ok(outputs) => {
                    for output in outputs.iter().filter(|output| output.id == id) {
                        on_output(output);
                    }
                }
                Err(RunError::Interrupted) => self.cancel(id),
                Err(error) => self.fail(id, error.to_string()),
            }
        }
        let sequence = self.sequences.get(&id).ok_or(SubmitError::Unknown(id))?;
        Ok(Completion {
            tokens: sequence.answer().to_vec(),
            // Also what it has said while others were waited for.
            text: sequence.turn.said.clone(),
            finish_reason: sequence.turn.finished.clone().unwrap_or(FinishReason::Cancelled),
            kv: KvReport::of(sequence, &self.shape, self.options.page_kind),
            timing: sequence.turn.timing,
        })
    }

    pub(crate) fn fail(&mut self, id: SequenceId, reason: String) {
        self.end(id, FinishReason::Failed(reason));
    }

    /// Ends the answer of `id`, if it has not ended, and what a pass has put into its cache goes.
    fn end(&mut self, id: SequenceId, reason: FinishReason) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        sequence.turn.finished.get_or_insert(reason);
        sequence.turn.resting = None;
        if sequence.turn.pass.take().is_some() {
            sequence.cache.truncate(&mut self.pool, sequence.computed);
            self.reclaim();
        }
    }

    pub(crate) fn reclaim(&mut self) {
        let ranges = self.pool.reclaim(Arena::os_page());
        self.runner.reclaim(&ranges);
    }
}
