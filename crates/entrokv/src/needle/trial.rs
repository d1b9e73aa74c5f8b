//! Measuring: every context and text is read once under each recipe and budget, and asked about in forks.

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
use crate::sequence::{FinishReason, Request, SequenceId};

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

    pub(super) fn rows(
        &mut self,
        settings: &[Setting],
        cases: &[Case],
        readings: &[Reading],
        texts: &[Vec<u32>],
        text_tokens: usize,
    ) -> Result<Vec<Row>, NeedleError> {
        let mut rows: Vec<Row> = settings.iter().map(Setting::row).collect();
        for (case, reading) in cases.iter().zip(readings) {
            let mut full: Option<Vec<bool>> = None;
            for (setting, row) in settings.iter().zip(&mut rows) {
                let start = Instant::now();
                let right = self.ask(setting, case, reading, row).map_err(|error| setting.blame(error))?;
                row.count(case, full.get_or_insert_with(|| right.clone()), &right);
                row.seconds += start.elapsed().as_secs_f64();
            }
        }
        let mut means: Vec<Vec<f64>> = vec![Vec::new(); settings.len()];
        for text in texts {
            let mut full: Option<Vec<Vec<f32>>> = None;
            for ((setting, row), means) in settings.iter().zip(&mut rows).zip(&mut means) {
                let start = Instant::now();
                let logits = self.predict(setting, text, text_tokens).map_err(|error| setting.blame(error))?;
                let full = full.get_or_insert_with(|| logits.clone());
                let sum: f64 = full.iter().zip(&logits).map(|(full, logits)| divergence(full, logits)).sum();
                means.push(sum / logits.len() as f64);
                row.seconds += start.elapsed().as_secs_f64();
            }
        }
        for (row, means) in rows.iter_mut().zip(means) {
            row.finish(readings.len(), &means);
        }
        Ok(rows)
    }

    /// Which questions of `case` are answered when its context has been compressed; `row` hears what is held then.
    fn ask(
        &mut self,
        setting: &Setting,
        case: &Case,
        reading: &Reading,
        row: &mut Row,
    ) -> Result<Vec<bool>, NeedleError> {
        let (id, len) = self.compress(setting, &reading.context)?;
        if let Some(kv) = self.engine.kv_report(id) {
            row.bytes_held += kv.bytes_held;
            row.bytes_full += kv.bytes_full;
        }
        let answers = self.answers(id, &reading.context[len..], &reading.questions);
        self.engine.close(id);
        self.advance(reading.context.len() - len);
        let right = |(question, answer): (&Question, String)| question.is_answered_by(&answer);
        Ok(case.questions.iter().zip(answers?).map(right).collect())
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

    /// Logits before each of the tokens that follow `text_tokens` and one more of `text`, when those have been compressed.
    fn predict(&mut self, setting: &Setting, text: &[u32], text_tokens: usize) -> Result<Vec<Vec<f32>>, NeedleError> {
        let (id, len) = self.compress(setting, &text[..text_tokens])?;
        let (prompt, answer) = text[len..].split_at(text_tokens + 1 - len);
        let mut rows = Vec::with_capacity(answer.len());
        let read = self.engine.read_answer(id, prompt.to_vec(), answer, &mut |row| rows.push(row.to_vec()));
        self.engine.close(id);
        self.advance(text.len() - len);
        read?;
        Ok(rows)
    }

    /// Reads the whole pages of `tokens` and compresses them; how many tokens that is.
    fn compress(&mut self, setting: &Setting, tokens: &[u32]) -> Result<(SequenceId, usize), NeedleError> {
        let kind = setting.recipe.kind(self.default);
        self.engine.set_page_kind(kind)?;
        let page_size = self.engine.shape().page_size;
        let len = tokens.len() / page_size * page_size;
        let eviction = setting.cap(len, self.engine.shape(), kind);
        let id = self.engine.submit(Request { eviction, ..Request::greedy(tokens[..len].to_vec(), 0) })?;
        let (done, total) = (self.done, self.total);
        let read = finished(self.engine, id, &mut |computed| (self.progress)(done + computed as u64, total));
        if let Err(error) = read {
            self.engine.close(id);
            return Err(error);
        }
        self.advance(len);
        Ok((id, len))
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
