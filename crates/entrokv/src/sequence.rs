//! One sequence of tokens in the engine: what was asked, what was said, and the cache that remembers it.
//!
//! Two lengths, never confused: `tokens.len()` is the logical length (positions count it, contexts limit it); what the
//! cache still holds is the resident length, known to [`KvCache`] alone.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use entrokv_cache::{Budget, EvictionPolicy, KvCache};

use crate::coding::Coding;
use crate::engine::{Ledger, Pass, PassPlan};
use crate::eviction::Eviction;
use crate::forced_answer::ForcedAnswer;
use crate::repeat_instruction::RepeatInstruction;
use crate::sampler::{Sampler, SamplingOptions};
use crate::segments::SegmentLists;
use crate::text_stream::TextStream;
use crate::turned_sinks::TurnedSinks;

/// Names a sequence of an engine; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub(crate) u64);

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A cap on a sequence's cache and the policy that keeps it.
#[derive(Clone)]
pub struct EvictionOptions {
    /// How much may stay.
    pub budget: Budget,
    /// What decides which pages do.
    pub policy: Arc<dyn EvictionPolicy>,
}

/// What to read and how to answer: a first prompt, or a further turn of the same sequence.
#[derive(Clone)]
pub struct Request {
    /// Token ids to read; positions continue where the sequence ended.
    pub prompt: Vec<u32>,
    /// Most tokens to generate; `None` runs to the end of the context.
    pub max_tokens: Option<usize>,
    /// How to choose tokens.
    pub sampling: SamplingOptions,
    /// Texts that end the answer; they may span tokens and are not part of it.
    pub stop: Vec<String>,
    /// Whether the model's end-of-generation tokens end the answer.
    pub end_tokens: EndTokens,
    /// The cap on the cache, fixed anew when this prompt has been read.
    pub eviction: Option<EvictionOptions>,
}

impl Request {
    /// Greedy generation of at most `max_tokens` after `prompt`, the whole cache kept.
    pub fn greedy(prompt: Vec<u32>, max_tokens: usize) -> Self {
        Self {
            prompt,
            max_tokens: Some(max_tokens),
            sampling: SamplingOptions::greedy(),
            stop: Vec::new(),
            end_tokens: EndTokens::Stop,
            eviction: None,
        }
    }
}

/// What an end-of-generation token does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndTokens {
    /// Ends the answer.
    Stop,
    /// Is a token like any other (benchmarks).
    Ignore,
}

/// Why an answer ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// An end token or a stop string.
    Stop,
    /// The token limit of the request or the end of the context.
    Length,
    /// The caller asked.
    Cancelled,
    /// The pool could not hold the sequence, or sampling failed; the text says which.
    Failed(String),
}

impl FinishReason {
    /// The spelling of the wire: `stop`, `length`, `cancelled`, `error`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Cancelled => "cancelled",
            Self::Failed(_) => "error",
        }
    }
}

/// Wall time of a sequence, a step counted whole for every sequence that took part in it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timing {
    /// Reading the last prompt.
    pub prefill: Duration,
    /// Prompt tokens read in that time.
    pub prefill_tokens: usize,
    /// Repeating the prompt for the policy, before the first token.
    pub pass: Duration,
    /// Generating.
    pub decode: Duration,
    /// Tokens generated in that time (the first comes out of prefill).
    pub decode_tokens: usize,
    /// Feeding attention rows to the policy (both phases); the rows themselves are part of attention.
    pub observe: Duration,
    /// Scoring, selecting and freeing.
    pub evict: Duration,
    /// Encoding pages, and taking the constants for it.
    pub encode: Duration,
}

impl Timing {
    /// Prompt tokens a second; 0 before the first.
    pub fn prefill_tokens_per_s(&self) -> f64 {
        rate(self.prefill_tokens, self.prefill)
    }

    /// Generated tokens a second; 0 before the second.
    pub fn decode_tokens_per_s(&self) -> f64 {
        rate(self.decode_tokens, self.decode)
    }
}

fn rate(tokens: usize, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { tokens as f64 / time.as_secs_f64() }
}

/// The state of a sequence inside the engine.
pub(crate) struct Sequence {
    /// Every token, prompt and answer, in position order.
    pub tokens: Vec<u32>,
    /// How many of them have their keys and values in the cache (or had, before eviction).
    pub computed: usize,
    /// Block tables.
    pub cache: KvCache,
    /// What attention reads of them.
    pub segments: SegmentLists,
    /// What encodes its pages, where the cache is stored as codes.
    pub coding: Option<Coding>,
    /// What a policy that rotates by slot has done to its sinks.
    pub turned_sinks: TurnedSinks,
    /// Bytes noted so far.
    pub ledger: Ledger,
    /// The prompt being read or the answer being given.
    pub turn: Turn,
}

/// A prompt and its answer.
pub(crate) struct Turn {
    /// Logical length at which it ends: tokens before it are read, tokens after it are sampled.
    pub prompt_end: usize,
    /// Logical length at which generation ends with [`FinishReason::Length`].
    pub length_limit: usize,
    /// End-token rule.
    pub end_tokens: EndTokens,
    /// Draws the next token.
    pub sampler: Sampler,
    /// Turns tokens into text and watches for stop strings.
    pub text: Option<TextStream>,
    /// The text of the answer so far.
    pub said: String,
    /// An answer that is given, where none is sampled.
    pub forced: Option<ForcedAnswer>,
    /// The cap, if there is one.
    pub eviction: Option<Eviction>,
    /// The pass that repeats the prompt, while it is under way: the cache holds tokens behind [`Sequence::computed`] then.
    pub pass: Option<Pass>,
    /// Why the answer ended, while its cache is being compressed.
    pub resting: Option<FinishReason>,
    /// Why the answer ended; `None` while it is under way.
    pub finished: Option<FinishReason>,
    /// Clock of this turn.
    pub timing: Timing,
}

impl Turn {
    /// A turn whose prompt ended at `prompt_end`, and which has finished: its sequence waits for the next one.
    pub(crate) fn resting(prompt_end: usize, eviction: Option<Eviction>) -> Self {
        Self {
            prompt_end,
            length_limit: prompt_end,
            end_tokens: EndTokens::Stop,
            sampler: Sampler::new(SamplingOptions::greedy()).expect("greedy options are in range"),
            text: None,
            forced: None,
            eviction,
            said: String::new(),
            pass: None,
            resting: None,
            finished: Some(FinishReason::Stop),
            timing: Timing::default(),
        }
    }
}

impl Sequence {
    /// Tokens whose keys and values are still to be computed, at most `limit`; empty when there is nothing to do.
    pub(crate) fn pending(&self, limit: usize) -> &[u32] {
        if self.turn.finished.is_some() {
            return &[];
        }
        let left = match &self.turn.pass {
            Some(pass) => pass.pending(),
            None => &self.tokens[self.computed..self.part_end()],
        };
        &left[..left.len().min(limit)]
    }

    /// Logical length at which the part of the prompt that is being read ends: the prompt's end, or a pause for an eviction
    /// before it. While answering, that of all tokens.
    pub(crate) fn part_end(&self) -> usize {
        if !self.is_reading() {
            return self.tokens.len();
        }
        let pause = self.turn.eviction.as_ref().and_then(|eviction| eviction.pause_after(self.computed));
        pause.map_or(self.turn.prompt_end, |pause| pause.min(self.turn.prompt_end))
    }

    /// Position of the first pending token.
    pub(crate) fn next_position(&self) -> usize {
        self.computed + self.turn.pass.as_ref().map_or(0, Pass::done)
    }

    /// Whether the next step reads the token sampled last.
    pub(crate) fn is_answering(&self) -> bool {
        !self.is_reading() && self.turn.pass.is_none()
    }

    /// Begins the pass that the policy asks for, a probe or one over what it has not seen repeated or both, if it does, in a
    /// context of `context_len`; `logits` are those of the last row read, if it has any.
    pub(crate) fn begin_pass(
        &mut self,
        probe: &[u32],
        instruction: &RepeatInstruction,
        context_len: usize,
        logits: Option<&[f32]>,
    ) {
        let Self { tokens, computed, cache, turn, .. } = self;
        let Some(eviction) = &turn.eviction else { return };
        let plan = eviction.pass_wanted(*computed).map(|(reconstruction, sinks, from)| {
            let plan = PassPlan::new(reconstruction, from..*computed, sinks, context_len - *computed, instruction);
            plan.expect("the room was checked when the turn began, for at least as many tokens")
        });
        let probe = (eviction.wants_probe(*computed) && !probe.is_empty()).then_some(probe);
        turn.pass = Pass::begin(probe, plan, instruction, tokens, cache, logits);
    }

    /// Whether there is more of the prompt to be read.
    pub(crate) fn is_reading(&self) -> bool {
        self.computed < self.turn.prompt_end
    }

    /// Tokens generated in the current turn.
    pub(crate) fn answer(&self) -> &[u32] {
        &self.tokens[self.turn.prompt_end..]
    }
}
