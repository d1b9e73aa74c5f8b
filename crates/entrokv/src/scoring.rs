//! How well a model predicts a text: the numbers behind `perplexity`.

use std::sync::Arc;

use entrokv_cache::{KvCache, PoolExhausted};

use crate::engine::Engine;
use crate::model::{BatchSpan, LogitsWanted, NoTaps, RunError};

/// Most rows of logits held at once: of a vocabulary of 262,144, 128 MiB.
const MAX_ROWS: usize = 128;

/// A text scored token by token.
#[derive(Clone, Debug, PartialEq)]
pub struct TextScore {
    /// `-ln p(token[i + 1] | tokens[..=i])` in nats, one fewer than there are tokens.
    pub nll: Vec<f64>,
    /// Logits after the last token, `[vocab_size]`.
    pub last_logits: Vec<f32>,
}

impl TextScore {
    /// Mean negative log likelihood in nats; NaN for a single token.
    pub fn mean_nll(&self) -> f64 {
        self.nll.iter().sum::<f64>() / self.nll.len() as f64
    }
}

/// Why a text was not scored.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ScoreError {
    /// Nothing to score.
    #[error("the text has 0 tokens; at least 1 is needed")]
    Empty,
    /// More than the context holds.
    #[error("the text has {got} tokens, the context holds {limit}")]
    TooLong {
        /// Its tokens.
        got: usize,
        /// Context length.
        limit: usize,
    },
    /// No room for its cache.
    #[error(transparent)]
    Pool(#[from] PoolExhausted),
    /// The pass was interrupted or met a bad token id.
    #[error(transparent)]
    Run(#[from] RunError),
}

impl Engine {
    /// Scores `tokens` with the whole cache kept; `progress` hears the number of tokens done.
    ///
    /// # Errors
    /// [`ScoreError`]; the pool is as before in any case.
    pub fn score(&mut self, tokens: &[u32], progress: &mut dyn FnMut(usize)) -> Result<TextScore, ScoreError> {
        if tokens.is_empty() {
            return Err(ScoreError::Empty);
        }
        if tokens.len() > self.context_len() {
            return Err(ScoreError::TooLong { got: tokens.len(), limit: self.context_len() });
        }
        let mut cache = KvCache::new(Arc::clone(self.shape()), self.page_kind());
        let score = self.score_into(&mut cache, tokens, progress);
        self.retire(cache);
        score
    }

    fn score_into(
        &mut self,
        cache: &mut KvCache,
        tokens: &[u32],
        progress: &mut dyn FnMut(usize),
    ) -> Result<TextScore, ScoreError> {
        let mut score = TextScore { nll: Vec::with_capacity(tokens.len() - 1), last_logits: Vec::new() };
        let mut done = 0;
        for chunk in tokens.chunks(self.options.chunk_size.get().min(MAX_ROWS)) {
            cache.grow(&mut self.pool, chunk.len())?;
            let span = BatchSpan { tokens: chunk, first_position: done as u32, cache, logits: LogitsWanted::All };
            let mut logits = self.runner.forward(&[span], &mut NoTaps)?;
            for (row, at) in logits.rows(0).zip(done + 1..) {
                match tokens.get(at) {
                    Some(&next) => score.nll.push(log_sum_exp(row) - f64::from(row[next as usize])),
                    None => score.last_logits = row.to_vec(),
                }
            }
            done += chunk.len();
            cache.slide_windows(&mut self.pool);
            progress(done);
        }
        Ok(score)
    }
}

/// `ln sum exp(x)` in f64.
fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    max + logits.iter().map(|&x| (f64::from(x) - max).exp()).sum::<f64>().ln()
}
