//! A step of the engine: choose, make room, grow, run, settle.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use entrokv_cache::{PageCost, PagePool, PoolExhausted};
use entrokv_kernels::heap;

use super::taps::{Phase, SpanTaps, Taps};
use super::{Engine, Pass, StepOutput};
use crate::coding::{Coding, EncodeWhen, Taken};
use crate::eviction::{Eviction, Held};
use crate::model::{BatchSpan, Logits, LogitsWanted, ModelRunner, RunError};
use crate::repeat_instruction::RepeatInstruction;
use crate::sequence::{EndTokens, FinishReason, Sequence, SequenceId};
use crate::text_stream::TextStream;
use crate::tokenizer::Tokenizer;

impl Engine {
    /// Advances every sequence that has work: one chunk of prompts and one token of each answer under way.
    ///
    /// # Errors
    /// [`RunError`]: no token was read or generated, and the step may be repeated. Pages evicted to make room stay evicted,
    /// and sequences whose policy was watching are cancelled.
    pub fn step(&mut self) -> Result<Vec<StepOutput>, RunError> {
        let start = Instant::now();
        let mut outputs = Vec::new();
        let work = self.schedule();
        let used = self.pool.used_bytes();
        let work = self.make_room(work, &mut outputs);
        let made_room = self.pool.used_bytes() < used;
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
        let rests = self.settle(&work, logits, start, &mut outputs);
        self.reclaim();
        if rests || made_room {
            // What a decision takes of the heap may be as much as the pages it frees.
            heap::give_back_freed();
        }
        Ok(outputs)
    }

    /// Answers under way first, one token each; then prompts and passes that repeat them, oldest first, within the chunk size.
    fn schedule(&self) -> Vec<Work> {
        let mut left = self.options.chunk_size.get();
        let mut work = Vec::new();
        for (&id, sequence) in self.sequences.iter().filter(|(_, s)| s.is_answering()) {
            if !sequence.pending(1).is_empty() {
                work.push(Work { id, tokens: 1 });
            }
        }
        for (&id, sequence) in self.sequences.iter().filter(|(_, s)| !s.is_answering()) {
            let tokens = sequence.pending(left).len();
            if tokens > 0 {
                work.push(Work { id, tokens });
                left -= tokens;
            }
        }
        work
    }

    /// Evicts ahead of answers that are about to open a page, so that no step ends over its budget; what cannot fails.
    fn make_room(&mut self, mut work: Vec<Work>, outputs: &mut Vec<StepOutput>) -> Vec<Work> {
        work.retain(|Work { id, .. }| {
            let Some(sequence) = self.sequences.get_mut(id).filter(|sequence| sequence.is_answering()) else {
                return true;
            };
            let made = sequence.make_room(&mut self.pool, self.runner.as_mut());
            if let Err(error) = &made {
                sequence.turn.finished = Some(FinishReason::Failed(error.to_string()));
                outputs.push(sequence.output(*id, None, String::new()));
            }
            made.is_ok()
        });
        work
    }

    /// Grows the caches for `work`; what the pool cannot hold waits while others run, and fails when nobody does.
    fn grow(&mut self, work: Vec<Work>, outputs: &mut Vec<StepOutput>) -> Vec<Work> {
        let mut grown = Vec::with_capacity(work.len());
        let mut refused: Option<(SequenceId, PoolExhausted)> = None;
        for item in work {
            let Some(sequence) = self.sequences.get_mut(&item.id) else { continue };
            // An interrupted step has grown already.
            let missing = (sequence.next_position() + item.tokens).saturating_sub(sequence.cache.logical_len());
            match sequence.cache.grow(&mut self.pool, missing) {
                Ok(()) => {
                    sequence.note_bytes();
                    grown.push(item);
                }
                Err(error) => {
                    refused.get_or_insert((item.id, error));
                }
            }
        }
        if let (true, Some((id, error))) = (grown.is_empty(), refused) {
            self.fail(id, error.to_string());
            outputs.extend(self.sequences.get(&id).map(|sequence| sequence.output(id, None, String::new())));
        }
        grown
    }

    /// Cancels the sequences of a step that failed half way while their policies were watching.
    fn cancel_watched(&mut self, work: &[Work]) {
        for Work { id, .. } in work {
            let Some(sequence) = self.sequences.get_mut(id) else { continue };
            let reading = sequence.is_reading();
            let is_watching = |eviction: &Eviction| eviction.is_watching(reading);
            // A pass may be shown the same masses twice, but no rows.
            let is_cancelled = match &sequence.turn.pass {
                Some(pass) => pass.record().is_none(),
                None => sequence.turn.eviction.as_ref().is_some_and(is_watching),
            };
            if is_cancelled {
                self.cancel(*id);
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
            let (reading, part_end, first) = (sequence.is_reading(), sequence.part_end(), sequence.next_position());
            let end = first + item.tokens;
            let Sequence { tokens, computed, cache, segments, coding, turn, .. } = sequence;
            let (constants, mut queries) = coding.as_mut().map(Coding::parts).unzip();
            let (tokens, logits, phase) = match &mut turn.pass {
                Some(pass) => {
                    // Constants are of the text alone.
                    queries = None;
                    let text = *computed..*computed + pass.len();
                    let phase = |record| match record {
                        Some(record) => Phase::Pass(record),
                        None => Phase::Probe { text_len: text.start, end: text.end },
                    };
                    let (tokens, record) = pass.parts(item.tokens);
                    (tokens, LogitsWanted::None, phase(record))
                }
                None => {
                    let phase = if reading { Phase::Prompt { end: part_end } } else { Phase::Answer };
                    let logits = if end == tokens.len() { LogitsWanted::Last } else { LogitsWanted::None };
                    (&tokens[first..end], logits, phase)
                }
            };
            if let Some(queries) = &mut queries {
                queries.begin(&(first..end));
            }
            let constants = constants.unwrap_or(&[]);
            batch.push(BatchSpan {
                tokens,
                first_position: first as u32,
                cache: segments.follow(cache),
                constants,
                logits,
            });
            taps.spans.push(SpanTaps {
                // A pass is for scores of the text; its own tokens are nobody's business.
                eviction: turn.eviction.as_mut().filter(|_| !matches!(phase, Phase::Pass(_))),
                queries,
                cache,
                rows: first..end,
                phase,
                time: &mut turn.timing.observe,
            });
        }
        self.runner.forward(&batch, &mut taps)
    }

    /// Counts what `work` has done, and lets caches, policies and answers follow; whether a cache came into the form it rests in,
    /// so that what that took of the heap is free for good.
    fn settle(&mut self, work: &[Work], mut logits: Logits, start: Instant, outputs: &mut Vec<StepOutput>) -> bool {
        let mut rests = false;
        for (span, item) in work.iter().enumerate() {
            let Some(sequence) = self.sequences.get_mut(&item.id) else { continue };
            let mut ended = sequence.count(&mut self.pool, item.tokens, start.elapsed());
            let mut row = logits.last(span);
            if ended == Ended::Prompt && !sequence.waits() {
                sequence.begin_pass(&self.options.probe, &self.options.repeat, self.context_len, row.as_deref());
            }
            let mut kept;
            if ended == Ended::PassChunk {
                kept = sequence.end_pass_chunk(&mut self.pool, &self.options.repeat);
                (row, ended) = (kept.as_deref_mut(), Ended::Prompt);
            }
            if sequence.turn.pass.is_some() {
                outputs.push(sequence.output(item.id, None, String::new()));
                continue;
            }
            let settled = sequence.settle(&mut self.pool, self.runner.as_mut(), ended);
            rests |= ended == Ended::Prompt && !sequence.is_reading() && sequence.shrinks();
            if let (Err(error), true) = (settled, sequence.is_capped()) {
                // What should be codes takes the room of plain pages, so the cap does not hold; without one it may wait.
                sequence.turn.finished = Some(FinishReason::Failed(error.to_string()));
                outputs.push(sequence.output(item.id, None, String::new()));
                continue;
            }
            sequence.audit();
            if let Some(reason) = sequence.turn.resting.take() {
                sequence.turn.finished = Some(reason);
            }
            outputs.push(match row {
                Some(row) => sequence.advance(item.id, row, self.tokenizer.as_deref()),
                None => sequence.output(item.id, None, String::new()),
            });
        }
        rests
    }
}

/// What ended with a step, as far as a sequence's cache is concerned.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ended {
    /// The prompt, or a part of it after which its policy evicts as after a prompt; and the pass that repeats it, where there
    /// is one.
    Prompt,
    /// Some of it, or a token of the answer.
    Chunk,
    /// A chunk of a pass.
    PassChunk,
}

/// A sequence's share of a step.
struct Work {
    id: SequenceId,
    tokens: usize,
}

impl Sequence {
    /// Notes that `tokens` more have been computed in `time`.
    fn count(&mut self, pool: &mut PagePool, tokens: usize, time: Duration) -> Ended {
        let (was_reading, part_end) = (self.is_reading(), self.part_end());
        if let Some(pass) = &mut self.turn.pass {
            self.turn.timing.pass += time;
            return if pass.advance(tokens) { Ended::PassChunk } else { Ended::Chunk };
        }
        self.computed += tokens;
        self.note_bytes();
        if let Some(coding) = &mut self.coding {
            coding.commit();
        }
        self.cache.slide_windows(pool);
        let timing = &mut self.turn.timing;
        if was_reading {
            timing.prefill += time;
            timing.prefill_tokens += tokens;
        } else {
            timing.decode += time;
            timing.decode_tokens += tokens;
        }
        if was_reading && self.computed == part_end { Ended::Prompt } else { Ended::Chunk }
    }

    /// Shows the policy what the chunk of a pass has said, forgets its tokens, and goes on to the next one. When the pass is
    /// over, the logits of the last row read before it, if it has any.
    fn end_pass_chunk(&mut self, pool: &mut PagePool, instruction: &RepeatInstruction) -> Option<Vec<f32>> {
        let Self { tokens, computed, cache, turn, .. } = self;
        let pass = turn.pass.take()?;
        let start = Instant::now();
        cache.truncate(pool, *computed);
        if let Some(eviction) = &mut turn.eviction {
            match pass.record() {
                Some(record) => eviction.observe_pass(cache, record),
                None => eviction.end_probe(*computed),
            }
        }
        turn.timing.observe += start.elapsed();
        match pass.next_chunk(instruction, tokens, cache) {
            Ok(pass) => {
                turn.pass = Some(pass);
                None
            }
            Err(logits) => logits,
        }
    }

    /// Whether its cache is to stay as it is until the answer has been given.
    fn waits(&self) -> bool {
        self.turn.eviction.as_ref().is_some_and(Eviction::waits)
    }

    /// Whether its cache becomes smaller than it is written.
    fn shrinks(&self) -> bool {
        self.turn.eviction.is_some() || self.coding.is_some()
    }

    /// Evicts and encodes after an answer.
    pub(super) fn compress(&mut self, pool: &mut PagePool, runner: &mut dyn ModelRunner) -> Result<(), PoolExhausted> {
        self.settle(pool, runner, Ended::Prompt)
    }

    /// Brings the cache into the form it rests in: at a prompt's end evicts what is over the budget, and there and while
    /// decoding encodes the pages that have left the window.
    ///
    /// Constants come first, since they are better taken from the whole prompt than from what is left of it; then
    /// eviction, since what goes need not be encoded.
    fn settle(&mut self, pool: &mut PagePool, runner: &mut dyn ModelRunner, ended: Ended) -> Result<(), PoolExhausted> {
        if self.is_reading() && ended == Ended::Chunk {
            return Ok(());
        }
        let Self { cache, coding, turn, turned_sinks, .. } = self;
        let start = Instant::now();
        let when = if ended == Ended::Prompt { EncodeWhen::Now } else { EncodeWhen::AtBoundary };
        let mut taken = Taken::No;
        let mut cost = PageCost::from(cache.kind());
        if let Some(coding) = coding {
            taken = coding.take_constants(cache, runner, when);
            cost = coding.cost();
            turn.timing.encode += start.elapsed();
        }
        if turn.eviction.as_ref().is_some_and(Eviction::waits) {
            return Ok(());
        }
        let mut evicted = Ok(());
        if let (Some(eviction), Ended::Prompt) = (&mut turn.eviction, ended) {
            let start = Instant::now();
            let constants = coding.as_ref().map_or(&[][..], Coding::constants);
            evicted = eviction.end_prompt(Held { cache, constants, runner }, pool, cost, turn.prompt_end);
            if let (Ok(()), Some(sinks)) = (&evicted, eviction.sinks_to_turn()) {
                evicted = turned_sinks.follow(Held { cache, constants, runner }, pool, sinks);
            }
            turn.timing.evict += start.elapsed();
        }
        let encoded = coding.as_mut().map_or(Ok(()), |coding| {
            let start = Instant::now();
            let encoded = coding.encode(cache, pool, runner, when);
            turn.timing.encode += start.elapsed();
            encoded
        });
        if let Some(eviction) = &mut turn.eviction {
            match (ended, taken) {
                (Ended::Prompt, _) => eviction.note_held(cache.footprint().global_bytes),
                (_, Taken::Yes) => eviction.reprice(cost),
                (_, Taken::No) => {}
            }
        }
        evicted.and(encoded)
    }

    /// Evicts where the next token opens a page beyond the budget, and turns the sinks after the newest tokens, where the policy
    /// rotates by slot.
    fn make_room(&mut self, pool: &mut PagePool, runner: &mut dyn ModelRunner) -> Result<(), PoolExhausted> {
        let Self { computed, cache, coding, turn, turned_sinks, .. } = self;
        let Some(eviction) = &mut turn.eviction else { return Ok(()) };
        let start = Instant::now();
        let constants = coding.as_ref().map_or(&[][..], Coding::constants);
        let made = eviction.make_room(Held { cache, constants, runner }, pool, *computed).and_then(|()| {
            let Some(sinks) = eviction.sinks_to_turn() else { return Ok(()) };
            turned_sinks.follow(Held { cache, constants, runner }, pool, sinks)
        });
        turn.timing.evict += start.elapsed();
        made
    }

    /// Whether a budget caps the cache now.
    fn is_capped(&self) -> bool {
        self.turn.eviction.as_ref().is_some_and(|eviction| eviction.budget_bytes().is_some())
    }

    /// Samples the next token and decides whether the answer goes on.
    fn advance(&mut self, id: SequenceId, logits: &mut [f32], tokenizer: Option<&Tokenizer>) -> StepOutput {
        let turn = &mut self.turn;
        if self.tokens.len() >= turn.length_limit {
            turn.finished = Some(FinishReason::Length);
            return self.output(id, None, String::new());
        }
        let forced = turn.forced.as_mut().and_then(|forced| {
            forced.rows.push_back(logits.to_vec());
            forced.tokens.get(self.tokens.len() - turn.prompt_end).copied()
        });
        let chosen = forced.map_or_else(|| turn.sampler.sample(logits, &self.tokens), Ok);
        let token = match chosen {
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
        turn.said.push_str(&text);
        self.output(id, Some(token), text)
    }

    fn output(&self, id: SequenceId, token: Option<u32>, text: String) -> StepOutput {
        let pass = self.turn.pass.as_ref().map(Pass::progress);
        StepOutput { id, computed: self.computed, pass, token, text, finished: self.turn.finished.clone() }
    }
}
