//! What a capped cache costs: a given answer read token by token after a prompt, beside the full cache.

use std::collections::VecDeque;

use crate::engine::{Engine, KvReport, SubmitError};
use crate::model::RunError;
use crate::scoring::{divergence, log_sum_exp};
use crate::sequence::{EndTokens, EvictionOptions, FinishReason, Request, SequenceId, Timing};

/// An answer that is given whatever the model would choose, and what the model makes of it.
#[derive(Default)]
pub(crate) struct ForcedAnswer {
    /// The tokens.
    pub(crate) tokens: Vec<u32>,
    /// Logits before each token so far that nobody has looked at yet.
    pub(crate) rows: VecDeque<Vec<f32>>,
}

/// A given answer under a cap and with the full cache.
#[derive(Clone, Debug, PartialEq)]
pub struct AnswerScore {
    /// `-ln p(token)` in nats of each token of the answer, under the cap.
    pub nll: Vec<f64>,
    /// The same with the full cache.
    pub full_nll: Vec<f64>,
    /// Kullback-Leibler divergence of the capped distribution from the full one in nats, before each token.
    pub kl: Vec<f64>,
    /// The capped cache at the end.
    pub kv: KvReport,
    /// The clock of the capped sequence, whose steps it shares with the full one.
    pub timing: Timing,
}

/// Why an answer was not scored.
#[derive(Debug, thiserror::Error)]
pub enum AnswerError {
    /// Nothing to score.
    #[error("the answer has 0 tokens; at least 1 is needed")]
    Empty,
    /// The prompt, the answer or the cap was refused.
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// The prompt and the answer are more than the context holds.
    #[error("the text has {got} tokens, the context holds {limit}")]
    TooLong {
        /// Their tokens.
        got: usize,
        /// Context length.
        limit: usize,
    },
    /// A token id outside the vocabulary.
    #[error("token id {got} is outside the vocabulary of {limit} tokens")]
    TokenOutOfRange {
        /// The id.
        got: u32,
        /// Tokens of the vocabulary.
        limit: usize,
    },
    /// A sequence failed on the way.
    #[error("{0}")]
    Failed(String),
    /// The pass was interrupted.
    #[error(transparent)]
    Run(#[from] RunError),
}

impl Engine {
    /// Reads `prompt` under `eviction` and beside it with the full cache, then `answer` token by token in both, evicting as the
    /// policy does while decoding; `progress` hears how many tokens the capped sequence has read.
    ///
    /// # Errors
    /// [`AnswerError`]; the pool is as before in any case.
    pub fn score_answer(
        &mut self,
        prompt: &[u32],
        answer: &[u32],
        eviction: &EvictionOptions,
        progress: &mut dyn FnMut(usize),
    ) -> Result<AnswerScore, AnswerError> {
        self.check_answer(prompt.len(), answer)?;
        let request = |eviction| Request {
            end_tokens: EndTokens::Ignore,
            eviction,
            ..Request::greedy(prompt.to_vec(), answer.len())
        };
        let capped = self.submit_forced(request(Some(eviction.clone())), answer)?;
        let full = self.submit_forced(request(None), answer).inspect_err(|_| self.close(capped))?;
        let score = self.compare_answers(capped, full, answer, progress);
        self.close(capped);
        self.close(full);
        score
    }

    /// Gives `id`, which has finished, a further turn under no cap: `prompt`, and `answer` token by token; `see` is shown the
    /// logits before each token of the answer, `[vocab_size]`.
    ///
    /// # Errors
    /// [`AnswerError`].
    pub fn read_answer(
        &mut self,
        id: SequenceId,
        prompt: Vec<u32>,
        answer: &[u32],
        see: &mut dyn FnMut(&[f32]),
    ) -> Result<(), AnswerError> {
        self.check_answer(prompt.len() + self.tokens(id).map_or(0, <[u32]>::len), answer)?;
        self.extend(id, Request { end_tokens: EndTokens::Ignore, ..Request::greedy(prompt, answer.len()) })?;
        self.force(id, answer);
        for _ in answer {
            see(&self.next_row(id, &mut |_| ())?);
        }
        Ok(())
    }

    /// Whether `answer` can be read after a prompt that ends at `prompt_end`.
    fn check_answer(&self, prompt_end: usize, answer: &[u32]) -> Result<(), AnswerError> {
        let (got, limit) = (prompt_end + answer.len(), self.context_len());
        if answer.is_empty() {
            return Err(AnswerError::Empty);
        }
        if got > limit {
            return Err(AnswerError::TooLong { got, limit });
        }
        let limit = self.runner.vocab_size();
        match answer.iter().find(|&&id| id as usize >= limit) {
            Some(&got) => Err(AnswerError::TokenOutOfRange { got, limit }),
            None => Ok(()),
        }
    }

    fn force(&mut self, id: SequenceId, answer: &[u32]) {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.turn.forced = Some(ForcedAnswer { tokens: answer.to_vec(), rows: VecDeque::new() });
        }
    }

    fn submit_forced(&mut self, request: Request, answer: &[u32]) -> Result<SequenceId, SubmitError> {
        let id = self.submit(request)?;
        self.force(id, answer);
        Ok(id)
    }

    fn compare_answers(
        &mut self,
        capped: SequenceId,
        full: SequenceId,
        answer: &[u32],
        progress: &mut dyn FnMut(usize),
    ) -> Result<AnswerScore, AnswerError> {
        let (mut nll, mut full_nll, mut kl) = (Vec::new(), Vec::new(), Vec::new());
        for &token in answer {
            let ours = self.next_row(capped, progress)?;
            let reference = self.next_row(full, progress)?;
            let surprise = |row: &[f32]| log_sum_exp(row) - f64::from(row[token as usize]);
            nll.push(surprise(&ours));
            full_nll.push(surprise(&reference));
            kl.push(divergence(&reference, &ours));
        }
        let unknown = || AnswerError::Submit(SubmitError::Unknown(capped));
        let kv = self.kv_report(capped).ok_or_else(unknown)?;
        let timing = self.timing(capped).ok_or_else(unknown)?;
        Ok(AnswerScore { nll, full_nll, kl, kv, timing })
    }

    /// The logits before the next token of the answer of `id`, stepping until they are there.
    fn next_row(&mut self, id: SequenceId, progress: &mut dyn FnMut(usize)) -> Result<Vec<f32>, AnswerError> {
        loop {
            let sequence = self.sequences.get_mut(&id).ok_or(SubmitError::Unknown(id))?;
            if let Some(row) = sequence.turn.forced.as_mut().and_then(|forced| forced.rows.pop_front()) {
                return Ok(row);
            }
            match &sequence.turn.finished {
                None => {}
                Some(FinishReason::Failed(why)) => return Err(AnswerError::Failed(why.clone())),
                Some(_) => return Err(AnswerError::Run(RunError::Interrupted)),
            }
            for output in self.step()? {
                if output.id == id {
                    progress(output.computed);
                }
            }
        }
    }
}
