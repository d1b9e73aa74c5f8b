//! Measuring: every context and text is read once for all settings that are shown the same, compressed in forks, and asked about in
//! forks of those.

use std::sync::Arc;
use std::time::Instant;

use entrokv_cache::{CacheShape, PageCost, PageKind};

use super::case::{Case, Question};
use super::chat_frame::ChatFrame;
use super::error::NeedleError;
use super::plan::Setting;
use super::row::Row;
use crate::engine::{Completion, Engine};
use crate::scoring::divergence;
use crate::sequence::{EvictionOptions, FinishReason, Request, SequenceId};

/// Tokens that an answer may have beyond those it is spelled with: a model may spell it otherwise.
const SPARE_TOKENS: usize = 4;
/// Tokens of an answer that begins as the model likes.
const FREE_TOKENS: usize = 48;

/// The tokens of a case.
pub(super) struct Reading {
    pub(super) context: Vec<u32>,
    /// Tokens of each question, and how many an answer may have.
    questions: Vec<(Vec<u32>, usize)>,
}

/// A text that has been compressed as a setting says.
struct Compressed {
    /// Which setting.
    number: usize,
    id: SequenceId,
    /// How many of its tokens have been read.
    len: usize,
    /// When work on it began, as if no other setting had been served by its reading.
    start: Instant,
}

/// What is running.
pub(super) struct Trial<'a> {
    pub(super) engine: &'a mut Engine,
    /// How caches are stored where a recipe does not say.
    pub(super) default: PageKind,
    /// Tokens read so far, and in all.
    pub(super) done: u64,
    pub(super) total: u64,
    pub(super) progress: &'a mut dyn FnMut(u64, u64),
}

impl Reading {
    pub(super) fn new(case: &Case, frame: &ChatFrame<'_>) -> Result<Self, NeedleError> {
        case.check().map_err(NeedleError::Case)?;
        let question = |question: &Question| {
            let tokens = frame.question(&question.question, &question.prefix)?;
            let spelled = frame.plain(&format!(" {}", question.answer))?.len() + SPARE_TOKENS;
            Ok((tokens, if question.prefix.is_empty() { spelled.max(FREE_TOKENS) } else { spelled }))
        };
        let questions = case.questions.iter().map(question).collect::<Result<_, NeedleError>>()?;
        Ok(Self { context: frame.context(&case.context)?, questions })
    }

    /// Tokens of all questions.
    pub(super) fn asked(&self) -> usize {
        self.questions.iter().map(|(tokens, _)| tokens.len()).sum()
    }

    /// Tokens of the longest sequence.
    pub(super) fn longest(&self) -> usize {
        self.context.len() + self.questions.iter().map(|(tokens, most)| tokens.len() + most).max().unwrap_or(0)
    }
}

impl Trial<'_> {
    /// Refuses what could not be read, before anything is.
    pub(super) fn check(&self, settings: &[Setting], lens: &[usize], longest: usize) -> Result<(), NeedleError> {
        let (page_size, limit) = (self.engine.shape().page_size, self.engine.context_len());
        if let Some(&got) = lens.iter().find(|&&len| len < page_size) {
            return Err(NeedleError::BelowPage { got, needed: page_size });
        }
        if longest > limit {
            return Err(NeedleError::TooLong { got: longest, limit });
        }
        for setting in settings {
            let kind = setting.recipe.kind(self.default);
            let check = |shape: &CacheShape, len: usize| match setting.cap(len, shape, kind) {
                Some(cap) => cap.budget.check(shape, PageCost::from(kind.written_as()), &cap.policy.pins()),
                None => Ok(()),
            };
            let shape = Arc::clone(self.engine.shape());
            kind.check(&shape).map_err(|error| setting.refused(error.to_string()))?;
            lens.iter()
                .try_for_each(|&len| check(&shape, len / page_size * page_size))
                .map_err(|error| setting.refused(error.to_string()))?;
        }
        Ok(())
    }

    /// A row a setting. `together` says by number which of them one reading serves.
    pub(super) fn rows(
        &mut self,
        settings: &[Setting],
        together: &[Vec<usize>],
        cases: &[Case],
        readings: &[Reading],
        texts: &[Vec<u32>],
        text_tokens: usize,
    ) -> Result<Vec<Row>, NeedleError> {
        let mut rows: Vec<Row> = settings.iter().map(Setting::row).collect();
        for (case, reading) in cases.iter().zip(readings) {
            let mut full: Option<Vec<bool>> = None;
            for numbers in together {
                self.each(settings, numbers, &reading.context, &mut |trial, Compressed { number, id, len, start }| {
                    let row = &mut rows[number];
                    if let Some(kv) = trial.engine.kv_report(id) {
                        row.bytes_held += kv.bytes_held;
                        row.bytes_full += kv.bytes_full;
                    }
                    let answers = trial.answers(id, &reading.context[len..], &reading.questions)?;
                    trial.advance(reading.asked());
                    let right = |(question, answer): (&Question, String)| question.is_answered_by(&answer);
                    let right: Vec<bool> = case.questions.iter().zip(answers).map(right).collect();
                    row.count(case, full.get_or_insert_with(|| right.clone()), &right);
                    row.seconds += start.elapsed().as_secs_f64();
                    Ok(())
                })?;
            }
        }
        let mut means: Vec<Vec<f64>> = vec![Vec::new(); settings.len()];
        for text in texts {
            let mut full: Option<Vec<Vec<f32>>> = None;
            for numbers in together {
                self.each(
                    settings,
                    numbers,
                    &text[..text_tokens],
                    &mut |trial, Compressed { number, id, len, start }| {
                        let logits = trial.predict(id, &text[len..], text_tokens + 1 - len)?;
                        trial.advance(text.len() - text_tokens - 1);
                        let full = full.get_or_insert_with(|| logits.clone());
                        let sum: f64 = full.iter().zip(&logits).map(|(full, logits)| divergence(full, logits)).sum();
                        means[number].push(sum / logits.len() as f64);
                        rows[number].seconds += start.elapsed().as_secs_f64();
                        Ok(())
                    },
                )?;
            }
        }
        for (row, means) in rows.iter_mut().zip(means) {
            row.finish(readings.len(), &means);
        }
        Ok(rows)
    }

    /// Reads the whole pages of `tokens` once, and calls `measure` for each of the settings of `numbers`.
    fn each(
        &mut self,
        settings: &[Setting],
        numbers: &[usize],
        tokens: &[u32],
        measure: &mut dyn FnMut(&mut Self, Compressed) -> Result<(), NeedleError>,
    ) -> Result<(), NeedleError> {
        let first = &settings[numbers[0]];
        let kind = first.recipe.kind(self.default);
        let page_size = self.engine.shape().page_size;
        let len = tokens.len() / page_size * page_size;
        let (shape, start) = (Arc::clone(self.engine.shape()), Instant::now());
        let late = |number: &usize| settings[*number].late_cap(len, &shape, kind);
        let is_shared = numbers.len() > 1;
        let cap = if is_shared {
            // Where one evicts nothing there is no pass to be made for it, so one that does leads.
            numbers.iter().filter_map(late).min_by_key(|cap| cap.budget.is_everything())
        } else {
            first.cap(len, &shape, kind)
        };
        let read = self.engine.set_page_kind(kind).map_err(NeedleError::from);
        let id = read.and_then(|()| self.read(&tokens[..len], cap)).map_err(|error| first.blame(error))?;
        self.advance(tokens.len());
        let mut outcome = if is_shared { self.pass(id).map_err(|error| first.blame(error)) } else { Ok(()) };
        let reading = start.elapsed();
        for &number in numbers {
            if outcome.is_err() {
                break;
            }
            let start = Instant::now().checked_sub(reading).unwrap_or(start);
            let setting = &settings[number];
            let measured = if is_shared {
                self.compressed(id, late(&number)).and_then(|fork| {
                    let measured = measure(self, Compressed { number, id: fork, len, start });
                    self.engine.close(fork);
                    measured
                })
            } else {
                measure(self, Compressed { number, id, len, start })
            };
            outcome = measured.map_err(|error| setting.blame(error));
        }
        self.engine.close(id);
        outcome
    }

    /// Reads `tokens` under `eviction`.
    fn read(&mut self, tokens: &[u32], eviction: Option<EvictionOptions>) -> Result<SequenceId, NeedleError> {
        let id = self.engine.submit(Request { eviction, ..Request::greedy(tokens.to_vec(), 0) })?;
        let (done, total) = (self.done, self.total);
        let read = finished(self.engine, id, &mut |computed| (self.progress)(done + computed as u64, total));
        match read {
            Ok(_) => Ok(id),
            Err(error) => {
                self.engine.close(id);
                Err(error)
            }
        }
    }

    /// Makes the pass of `id`, whose policy decides later.
    fn pass(&mut self, id: SequenceId) -> Result<(), NeedleError> {
        self.engine.make_pass(id)?;
        finished(self.engine, id, &mut |_| ()).map(drop)
    }

    /// A fork of `id` that is compressed under `cap`.
    fn compressed(&mut self, id: SequenceId, cap: Option<EvictionOptions>) -> Result<SequenceId, NeedleError> {
        let fork = self.engine.fork(id)?;
        let Self { engine, .. } = self;
        let compressed = cap.map_or(Ok(()), |cap| engine.set_cap(fork, &cap)).and_then(|()| engine.compress(fork));
        let compressed = compressed.map_err(NeedleError::from).and_then(|_| finished(engine, fork, &mut |_| ()));
        match compressed {
            Ok(_) => Ok(fork),
            Err(error) => {
                self.engine.close(fork);
                Err(error)
            }
        }
    }

    /// Answers of forks of `id`, each after `rest` and a question, as many at once as the pool has room for.
    fn answers(
        &mut self,
        id: SequenceId,
        rest: &[u32],
        questions: &[(Vec<u32>, usize)],
    ) -> Result<Vec<String>, NeedleError> {
        let shape = Arc::clone(self.engine.shape());
        let page_bytes = self.engine.page_kind().written_as().page_bytes(&shape);
        let mut answers = Vec::with_capacity(questions.len());
        while answers.len() < questions.len() {
            let mut room = self.engine.pool().available(page_bytes, u64::MAX);
            let mut forks = Vec::new();
            let mut outcome = Ok(());
            for (tokens, most) in &questions[answers.len()..] {
                let pages = (shape.pages_for(rest.len() + tokens.len() + most) + 1) * shape.num_groups();
                if !forks.is_empty() && pages as u64 > room {
                    break;
                }
                room = room.saturating_sub(pages as u64);
                match self.begin(id, [rest, tokens].concat(), *most) {
                    Ok(fork) => forks.push(fork),
                    Err(error) => {
                        outcome = Err(error);
                        break;
                    }
                }
            }
            for fork in forks {
                if outcome.is_ok() {
                    outcome = finished(self.engine, fork, &mut |_| ()).map(|done| answers.push(done.text));
                }
                self.engine.close(fork);
            }
            outcome?;
        }
        Ok(answers)
    }

    /// A fork of `id` that goes on with `prompt` under no cap.
    fn begin(&mut self, id: SequenceId, prompt: Vec<u32>, max_tokens: usize) -> Result<SequenceId, NeedleError> {
        let fork = self.engine.fork(id)?;
        match self.engine.extend(fork, Request::greedy(prompt, max_tokens)) {
            Ok(()) => Ok(fork),
            Err(error) => {
                self.engine.close(fork);
                Err(error.into())
            }
        }
    }

    /// Logits before each token of `rest` behind its first `prompt_len`, given one by one to `id`.
    fn predict(&mut self, id: SequenceId, rest: &[u32], prompt_len: usize) -> Result<Vec<Vec<f32>>, NeedleError> {
        let (prompt, answer) = rest.split_at(prompt_len);
        let fork = self.engine.fork(id)?;
        let mut rows = Vec::with_capacity(answer.len());
        let read = self.engine.read_answer(fork, prompt.to_vec(), answer, &mut |row| rows.push(row.to_vec()));
        self.engine.close(fork);
        read?;
        Ok(rows)
    }

    fn advance(&mut self, tokens: usize) {
        self.done += tokens as u64;
        (self.progress)(self.done, self.total);
    }
}

/// Steps until `id` has finished as it should; `computed` hears how many of its tokens have been read.
fn finished(engine: &mut Engine, id: SequenceId, computed: &mut dyn FnMut(usize)) -> Result<Completion, NeedleError> {
    let completion = engine.finish(id, &mut |step| computed(step.computed))?;
    match completion.finish_reason {
        FinishReason::Stop | FinishReason::Length => Ok(completion),
        FinishReason::Cancelled => Err(NeedleError::Interrupted),
        FinishReason::Failed(why) => Err(NeedleError::Failed(why)),
    }
}
