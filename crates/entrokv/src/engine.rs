//! The engine: several sequences over one model and one page pool, advanced a step at a time.
//!
//! A step reads aloud: choose what to run, make room under the budgets, grow the caches, run the model, settle the
//! results (evict at a prompt's end, sample, stop). Invariants, each a test of that name:
//! * `budget_holds_after_every_step`: once its prompt is read, a rolling sequence never holds more than its budget.
//! * `closing_returns_every_page`: when no sequence is alive, the pool is empty.
//! * `an_interrupted_step_can_be_repeated`: an interrupt loses no token and changes no bit; a sequence whose policy was
//!   watching the step is cancelled instead, for a policy must not see a row twice.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use entrokv_cache::{BudgetError, CacheShape, Footprint, KvCache, PageKind, PagePool, PoolExhausted, RowSource};
use entrokv_kernels::attention::Tap;

use crate::eviction::{Eviction, EvictionReport};
use crate::model::{AttentionSink, BatchSpan, Logits, LogitsWanted, ModelRunner, RunError};
use crate::sampler::{OptionError, Sampler};
use crate::sequence::{EndTokens, FinishReason, Request, Sequence, SequenceId, Timing, Turn};
use crate::stop::StopError;
use crate::text_stream::TextStream;
use crate::tokenizer::Tokenizer;

/// OS pages are this large wherever the engine runs; ranges of whole ones go back to the system.
const RECLAIM_GRANULE: u64 = 4096;

/// Sizes of an engine.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Kind of every new page.
    pub page_kind: PageKind,
    /// Most prompt tokens read in one step; any number gives the same bits.
    pub chunk_size: NonZeroUsize,
    /// Most tokens a sequence may have; the model's context where `None`.
    pub context_len: Option<usize>,
    /// Cap on the bytes of all pages.
    pub pool_bytes: u64,
}

/// Several sequences over one model and one pool.
pub struct Engine {
    pub(crate) runner: Box<dyn ModelRunner>,
    tokenizer: Option<Arc<Tokenizer>>,
    shape: Arc<CacheShape>,
    pub(crate) options: EngineOptions,
    context_len: usize,
    pub(crate) pool: PagePool,
    sequences: BTreeMap<SequenceId, Sequence>,
    next_id: u64,
}

/// Why a request was refused before anything was read.
#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    /// Nothing to read.
    #[error("the prompt has 0 tokens; at least 1 is needed")]
    EmptyPrompt,
    /// More than the context holds.
    #[error("the prompt has {got} tokens, the context holds {limit}")]
    PromptTooLong {
        /// Logical length after the prompt.
        got: usize,
        /// Context length.
        limit: usize,
    },
    /// A budget that cannot be kept.
    #[error(transparent)]
    Budget(#[from] BudgetError),
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

/// What a step gave one sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct StepOutput {
    /// Whose.
    pub id: SequenceId,
    /// Tokens of the sequence whose keys and values have been computed: how far a prompt has been read.
    pub computed: usize,
    /// The token sampled, if the prompt has been read.
    pub token: Option<u32>,
    /// Text that became certain, whole characters only.
    pub text: String,
    /// Set when the answer ended with this step.
    pub finished: Option<FinishReason>,
}

/// A sequence's cache as the pool counts it.
#[derive(Clone, Debug, PartialEq)]
pub struct KvReport {
    /// Tokens of the sequence, evicted ones included.
    pub logical_tokens: usize,
    /// Payload bytes of pages held in global layers.
    pub bytes_held: u64,
    /// Payload bytes of pages held in window layers, which no budget touches.
    pub bytes_window: u64,
    /// The resolved cap, once the prompt has been read.
    pub bytes_budget: Option<u64>,
    /// What the whole cache of the sequence would hold in global layers.
    pub bytes_full: u64,
    /// Block tables and policy state.
    pub bytes_metadata: u64,
    /// What `schedule=once` let grow after its eviction.
    pub bytes_appended: u64,
    /// Eviction so far.
    pub eviction: EvictionReport,
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
        Self { runner, tokenizer, shape, options, context_len, pool, sequences: BTreeMap::new(), next_id: 0 }
    }

    /// Kind of every new page.
    pub fn page_kind(&self) -> PageKind {
        self.options.page_kind
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
        let cache = KvCache::new(Arc::clone(&self.shape), self.options.page_kind);
        let id = SequenceId(self.next_id);
        self.next_id += 1;
        self.sequences.insert(id, Sequence { tokens: request.prompt, computed: 0, cache, turn });
        Ok(id)
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
        let mut turn = self.turn(&request, sequence.tokens.len())?;
        let sequence = self.sequences.get_mut(&id).ok_or(SubmitError::Unknown(id))?;
        if let (Some(next), Some(last)) = (&mut turn.eviction, &sequence.turn.eviction) {
            next.carry_totals(last);
        }
        sequence.tokens.extend_from_slice(&request.prompt);
        sequence.turn = turn;
        Ok(())
    }

    /// The turn of `request`, checked; `start` is the logical length before its prompt.
    fn turn(&self, request: &Request, start: usize) -> Result<Turn, SubmitError> {
        if request.prompt.is_empty() {
            return Err(SubmitError::EmptyPrompt);
        }
        let end = start + request.prompt.len();
        if end > self.context_len {
            return Err(SubmitError::PromptTooLong { got: end, limit: self.context_len });
        }
        let text = match &self.tokenizer {
            Some(tokenizer) => Some(TextStream::new(tokenizer, &request.stop)?),
            None if request.stop.is_empty() => None,
            None => return Err(SubmitError::NoTokenizer),
        };
        let eviction = match &request.eviction {
            Some(options) => Some(Eviction::new(options, &self.shape, self.options.page_kind)?),
            None => None,
        };
        let length_limit = request.max_tokens.map_or(self.context_len, |n| self.context_len.min(end.saturating_add(n)));
        Ok(Turn {
            prompt_end: end,
            length_limit,
            end_tokens: request.end_tokens,
            sampler: Sampler::new(request.sampling.clone())?,
            text,
            eviction,
            finished: None,
            timing: Timing::default(),
        })
    }

    /// Ends the answer of `id`; its cache stays until [`Engine::close`]. Does nothing to a finished or unknown sequence.
    pub fn cancel(&mut self, id: SequenceId) {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.turn.finished.get_or_insert(FinishReason::Cancelled);
        }
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
        let mut text = String::new();
        while self.sequences.get(&id).ok_or(SubmitError::Unknown(id))?.turn.finished.is_none() {
            match self.step() {
                Ok(outputs) => {
                    for output in outputs.iter().filter(|output| output.id == id) {
                        text.push_str(&output.text);
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
            text,
            finish_reason: sequence.turn.finished.clone().unwrap_or(FinishReason::Cancelled),
            kv: KvReport::of(sequence, &self.shape, self.options.page_kind),
            timing: sequence.turn.timing,
        })
    }

    /// Advances every sequence that has work: one chunk of prompts and one token of each answer under way.
    ///
    /// # Errors
    /// [`RunError`]: nothing has changed for the caller; an interrupted step may be repeated.
    pub fn step(&mut self) -> Result<Vec<StepOutput>, RunError> {
        let start = Instant::now();
        let mut outputs = Vec::new();
        let work = self.schedule();
        self.make_room(&work);
        let work = self.grow(work, &mut outputs);
        if work.is_empty() {
            return Ok(outputs);
        }
        let logits = match self.run(&work) {
            Ok(logits) => logits,
            Err(error) => {
                self.cancel_watched(&work);
                return Err(error);
            }
        };
        self.settle(&work, logits, start, &mut outputs);
        self.reclaim();
        Ok(outputs)
    }

    /// Answers under way first, one token each; then prompts, oldest first, within the chunk size.
    fn schedule(&self) -> Vec<Work> {
        let mut left = self.options.chunk_size.get();
        let mut work = Vec::new();
        for (&id, sequence) in self.sequences.iter().filter(|(_, s)| !s.is_reading()) {
            if !sequence.pending(1).is_empty() {
                work.push(Work { id, tokens: 1 });
            }
        }
        for (&id, sequence) in self.sequences.iter().filter(|(_, s)| s.is_reading()) {
            let tokens = sequence.pending(left).len();
            if tokens > 0 {
                work.push(Work { id, tokens });
                left -= tokens;
            }
        }
        work
    }

    /// Evicts ahead of answers that are about to open a page, so that no step ends over its budget.
    fn make_room(&mut self, work: &[Work]) {
        for Work { id, .. } in work {
            let Some(sequence) = self.sequences.get_mut(id) else { continue };
            if sequence.is_reading() {
                continue;
            }
            if let Some(eviction) = &mut sequence.turn.eviction {
                let start = Instant::now();
                eviction.make_room(&mut sequence.cache, &mut self.pool, sequence.computed);
                sequence.turn.timing.evict += start.elapsed();
            }
        }
    }

    /// Grows the caches for `work`; what the pool cannot hold waits while others run, and fails when nobody does.
    fn grow(&mut self, work: Vec<Work>, outputs: &mut Vec<StepOutput>) -> Vec<Work> {
        let mut grown = Vec::with_capacity(work.len());
        let mut refused: Option<(SequenceId, PoolExhausted)> = None;
        for item in work {
            let Some(sequence) = self.sequences.get_mut(&item.id) else { continue };
            // An interrupted step has grown already.
            let missing = (sequence.computed + item.tokens).saturating_sub(sequence.cache.logical_len());
            match sequence.cache.grow(&mut self.pool, missing) {
                Ok(()) => grown.push(item),
                Err(error) => {
                    refused.get_or_insert((item.id, error));
                }
            }
        }
        if let (true, Some((id, error))) = (grown.is_empty(), refused) {
            self.fail(id, error.to_string());
            outputs.push(StepOutput {
                id,
                computed: self.sequences.get(&id).map_or(0, |sequence| sequence.computed),
                token: None,
                text: String::new(),
                finished: Some(FinishReason::Failed(error.to_string())),
            });
        }
        grown
    }

    /// Cancels the sequences of a step that failed half way while their policies were watching.
    fn cancel_watched(&mut self, work: &[Work]) {
        for Work { id, .. } in work {
            let Some(sequence) = self.sequences.get_mut(id) else { continue };
            if sequence.turn.eviction.as_ref().is_some_and(Eviction::is_watching) {
                sequence.turn.finished.get_or_insert(FinishReason::Cancelled);
            }
        }
    }

    fn run(&mut self, work: &[Work]) -> Result<Logits, RunError> {
        let mut batch = Vec::with_capacity(work.len());
        let mut taps = Taps { spans: Vec::with_capacity(work.len()) };
        // Disjoint borrows of the sequences, in the order of `work`.
        let mut by_id: BTreeMap<SequenceId, &mut Sequence> =
            self.sequences.iter_mut().map(|(&id, sequence)| (id, sequence)).collect();
        for item in work {
            let Some(sequence) = by_id.remove(&item.id) else { continue };
            let reading = sequence.is_reading();
            let Sequence { tokens, computed, cache, turn } = sequence;
            let (first, end) = (*computed, *computed + item.tokens);
            batch.push(BatchSpan {
                tokens: &tokens[first..end],
                first_position: first as u32,
                cache,
                logits: if end == tokens.len() { LogitsWanted::Last } else { LogitsWanted::None },
            });
            taps.spans.push(SpanTaps {
                eviction: turn.eviction.as_mut(),
                cache,
                rows: first..end,
                phase: if reading { Phase::Prompt { end: turn.prompt_end } } else { Phase::Answer },
                time: &mut turn.timing.observe,
            });
        }
        self.runner.forward(&batch, &mut taps)
    }

    fn settle(&mut self, work: &[Work], mut logits: Logits, start: Instant, outputs: &mut Vec<StepOutput>) {
        for (span, item) in work.iter().enumerate() {
            let Some(sequence) = self.sequences.get_mut(&item.id) else { continue };
            let was_reading = sequence.is_reading();
            sequence.computed += item.tokens;
            sequence.cache.slide_windows(&mut self.pool);
            let timing = &mut sequence.turn.timing;
            if was_reading {
                timing.prefill += start.elapsed();
                timing.prefill_tokens += item.tokens;
            } else {
                timing.decode += start.elapsed();
                timing.decode_tokens += item.tokens;
            }
            let prompt_is_read = was_reading && !sequence.is_reading();
            if let Some(eviction) = sequence.turn.eviction.as_mut().filter(|_| prompt_is_read) {
                let start = Instant::now();
                eviction.end_prompt(&mut sequence.cache, &mut self.pool, sequence.computed);
                sequence.turn.timing.evict += start.elapsed();
            }
            outputs.push(match logits.last(span) {
                Some(row) => sequence.advance(item.id, row, self.tokenizer.as_deref()),
                None => sequence.output(item.id, None, String::new()),
            });
        }
    }

    fn fail(&mut self, id: SequenceId, reason: String) {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.turn.finished.get_or_insert(FinishReason::Failed(reason));
        }
    }

    fn reclaim(&mut self) {
        let ranges = self.pool.reclaim(RECLAIM_GRANULE);
        self.runner.reclaim(&ranges);
    }
}

/// A sequence's share of a step.
struct Work {
    id: SequenceId,
    tokens: usize,
}

impl Sequence {
    /// Samples the next token and decides whether the answer goes on.
    fn advance(&mut self, id: SequenceId, logits: &mut [f32], tokenizer: Option<&Tokenizer>) -> StepOutput {
        let turn = &mut self.turn;
        if self.tokens.len() >= turn.length_limit {
            turn.finished = Some(FinishReason::Length);
            return self.output(id, None, String::new());
        }
        let token = match turn.sampler.sample(logits, &self.tokens) {
            Ok(token) => token,
            Err(error) => {
                turn.finished = Some(FinishReason::Failed(error.to_string()));
                return self.output(id, None, String::new());
            }
        };
        self.tokens.push(token);
        let is_end = |tokenizer: &Tokenizer| tokenizer.is_end_of_generation(token);
        let mut text = String::new();
        let mut held_back = true;
        if turn.end_tokens == EndTokens::Stop && tokenizer.is_some_and(is_end) {
            turn.finished = Some(FinishReason::Stop);
        } else {
            if let Some(stream) = &mut turn.text {
                let piece = stream.push(token);
                text = piece.text;
                if piece.stopped {
                    turn.finished = Some(FinishReason::Stop);
                    held_back = false;
                }
            }
            if turn.finished.is_none() && self.tokens.len() >= turn.length_limit {
                turn.finished = Some(FinishReason::Length);
            }
        }
        if turn.finished.is_some() && held_back {
            text.push_str(&turn.text.as_mut().map(TextStream::finish).unwrap_or_default());
        }
        self.output(id, Some(token), text)
    }

    fn output(&self, id: SequenceId, token: Option<u32>, text: String) -> StepOutput {
        StepOutput { id, computed: self.computed, token, text, finished: self.turn.finished.clone() }
    }
}

impl KvReport {
    fn of(sequence: &Sequence, shape: &CacheShape, kind: PageKind) -> Self {
        let footprint: Footprint = sequence.cache.footprint();
        let eviction = sequence.turn.eviction.as_ref();
        let pages = sequence.computed.div_ceil(shape.page_size) as u64;
        Self {
            logical_tokens: sequence.tokens.len(),
            bytes_held: footprint.global_bytes,
            bytes_window: footprint.window_bytes,
            bytes_budget: eviction.and_then(Eviction::budget_bytes),
            bytes_full: pages * kind.page_bytes(shape) * shape.num_global_groups() as u64,
            bytes_metadata: footprint.metadata_bytes + eviction.map_or(0, Eviction::state_bytes),
            bytes_appended: eviction.map_or(0, |eviction| eviction.appended_bytes(footprint.global_bytes)),
            eviction: eviction.map(Eviction::report).unwrap_or_default(),
        }
    }
}

/// What a span's rows are, for the policy.
enum Phase {
    /// Rows of a prompt that ends before this position.
    Prompt { end: usize },
    /// The row of a token generated.
    Answer,
}

struct SpanTaps<'a> {
    eviction: Option<&'a mut Eviction>,
    cache: &'a KvCache,
    rows: Range<usize>,
    phase: Phase,
    time: &'a mut Duration,
}

/// Routes attention rows to the policies of the sequences in a batch.
struct Taps<'a> {
    spans: Vec<SpanTaps<'a>>,
}

impl AttentionSink for Taps<'_> {
    fn tap(&mut self, span: usize, layer: usize, resident: &[usize]) -> Tap {
        let SpanTaps { eviction, rows, phase, .. } = &mut self.spans[span];
        match (eviction, phase) {
            (None, _) => Tap::None,
            (Some(eviction), Phase::Prompt { end }) => eviction.tap_prompt(layer, rows.clone(), *end, resident),
            (Some(eviction), Phase::Answer) => eviction.tap_answer(layer),
        }
    }

    fn observe(&mut self, span: usize, layer: usize, tap: Tap) {
        let SpanTaps { eviction, cache, phase, time, .. } = &mut self.spans[span];
        if let Some(eviction) = eviction {
            let start = Instant::now();
            let source = match phase {
                Phase::Prompt { .. } => RowSource::Prompt,
                Phase::Answer => RowSource::Step,
            };
            eviction.observe(cache, layer, source, tap);
            **time += start.elapsed();
        }
    }
}
