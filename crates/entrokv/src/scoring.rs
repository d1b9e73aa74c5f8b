//! How well a model predicts a text: the numbers behind `perplexity`.

use entrokv_cache::{KindShapeError, KvCache, PageKind, PoolExhausted};
use entrokv_kernels::attention::Tap;
use entrokv_kernels::threads::Threads;

use crate::coding::{Coding, EncodeWhen, QueryMoments};
use crate::engine::Engine;
use crate::model::{AttentionSink, BatchSpan, Logits, LogitsWanted, RunError};
use crate::segments::SegmentLists;

/// Most rows of logits held at once: of a vocabulary of 262,144, 128 MiB.
const MAX_ROWS: usize = 128;

/// A text scored token by token.
#[derive(Clone, Debug, PartialEq)]
pub struct TextScore {
    /// `-ln p(token[i + 1] | tokens[..=i])` in nats, one fewer than there are tokens.
    pub nll: Vec<f64>,
    /// Logits after the last token, `[vocab_size]`.
    pub last_logits: Vec<f32>,
    /// Payload bytes of all pages at the end.
    pub bytes_held: u64,
}

/// A text scored with two kinds of cache side by side.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// With the engine's kind.
    pub score: TextScore,
    /// With the kind it is compared with.
    pub reference: TextScore,
    /// Kullback-Leibler divergence of the engine's distribution from the reference's in nats, after each token.
    pub kl: Vec<f64>,
}

impl Comparison {
    /// Mean divergence over all positions.
    pub fn mean_kl(&self) -> f64 {
        self.kl.iter().sum::<f64>() / self.kl.len() as f64
    }
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
    /// A kind the pages of the model cannot be of.
    #[error(transparent)]
    PageKind(#[from] KindShapeError),
    /// No room for its cache.
    #[error(transparent)]
    Pool(#[from] PoolExhausted),
    /// The pass was interrupted or met a bad token id.
    #[error(transparent)]
    Run(#[from] RunError),
}

impl Engine {
    /// Scores `tokens` with no budget; `progress` hears the number of tokens done.
    ///
    /// A coded cache is read as decoding would read it: each position sees codes wherever pages had left the window of the
    /// newest tokens before it, sinks aside, and plain pages as long as there were too few positions to take constants from.
    ///
    /// # Errors
    /// [`ScoreError`]; the pool is as before in any case.
    pub fn score(&mut self, tokens: &[u32], progress: &mut dyn FnMut(usize)) -> Result<TextScore, ScoreError> {
        let [score] = self.score_as([self.page_kind()], tokens, progress, &mut |_| ())?;
        Ok(score)
    }

    /// Scores `tokens` twice at once, with the engine's cache and with one stored as `reference`.
    ///
    /// # Errors
    /// As [`Engine::score`], and [`ScoreError::PageKind`] where the model's pages cannot be of that kind.
    pub fn compare(
        &mut self,
        tokens: &[u32],
        reference: PageKind,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Comparison, ScoreError> {
        reference.check(self.shape())?;
        let mut kl = Vec::with_capacity(tokens.len());
        let kinds = [self.page_kind(), reference];
        let scores = self.score_as(kinds, tokens, progress, &mut |logits| {
            let ours: Vec<Vec<f32>> = logits.rows(0).map(|row| row.to_vec()).collect();
            kl.extend(logits.rows(1).zip(&ours).map(|(reference, ours)| divergence(reference, ours)));
        })?;
        let [score, reference] = scores;
        Ok(Comparison { score, reference, kl })
    }

    /// Scores `tokens` with a cache of each kind, in one batch a chunk; `observe` sees the logits of each chunk.
    fn score_as<const N: usize>(
        &mut self,
        kinds: [PageKind; N],
        tokens: &[u32],
        progress: &mut dyn FnMut(usize),
        observe: &mut dyn FnMut(&mut Logits),
    ) -> Result<[TextScore; N], ScoreError> {
        if tokens.is_empty() {
            return Err(ScoreError::Empty);
        }
        if tokens.len() > self.context_len() {
            return Err(ScoreError::TooLong { got: tokens.len(), limit: self.context_len() });
        }
        let mut texts = kinds.map(|kind| {
            let (cache, coding) = self.new_cache(kind);
            let segments = SegmentLists::new(cache.shape());
            Text { cache, segments, coding, nll: Vec::with_capacity(tokens.len() - 1), last_logits: Vec::new() }
        });
        let read = self.read(&mut texts, tokens, progress, observe);
        let scores = texts.map(|text| {
            let bytes_held = text.cache.footprint().payload_bytes();
            self.retire(text.cache);
            TextScore { nll: text.nll, last_logits: text.last_logits, bytes_held }
        });
        read.map(|()| scores)
    }

    fn read(
        &mut self,
        texts: &mut [Text],
        tokens: &[u32],
        progress: &mut dyn FnMut(usize),
        observe: &mut dyn FnMut(&mut Logits),
    ) -> Result<(), ScoreError> {
        let most = self.options.chunk_size.get().min(MAX_ROWS / texts.len());
        let mut done = 0;
        while done < tokens.len() {
            // A page that leaves the window is codes to the next position, so no chunk reaches over such a place.
            let boundaries =
                texts.iter().filter_map(|text| text.coding.as_ref()).map(|coding| coding.next_boundary(done));
            let end = boundaries.chain([done + most, tokens.len()]).min().unwrap_or(tokens.len());
            for text in &mut *texts {
                text.cache.grow(&mut self.pool, end - done)?;
            }
            let mut batch = Vec::with_capacity(texts.len());
            let mut sink = Queries { first_position: done, spans: Vec::with_capacity(texts.len()) };
            for text in &mut *texts {
                let (constants, mut queries) = text.coding.as_mut().map(Coding::parts).unzip();
                if let Some(queries) = &mut queries {
                    queries.begin(&(done..end));
                }
                sink.spans.push(queries);
                batch.push(BatchSpan {
                    tokens: &tokens[done..end],
                    first_position: done as u32,
                    cache: text.segments.follow(&text.cache),
                    constants: constants.unwrap_or(&[]),
                    logits: LogitsWanted::All,
                });
            }
            let mut logits = self.runner.forward(&batch, &mut sink)?;
            observe(&mut logits);
            for (span, text) in texts.iter_mut().enumerate() {
                for (row, at) in logits.rows(span).zip(done + 1..) {
                    match tokens.get(at) {
                        Some(&next) => text.nll.push(log_sum_exp(row) - f64::from(row[next as usize])),
                        None => text.last_logits = row.to_vec(),
                    }
                }
                text.cache.slide_windows(&mut self.pool);
                if let Some(coding) = &mut text.coding {
                    coding.commit();
                    coding.take_constants(&text.cache, self.runner.as_ref(), EncodeWhen::AtBoundary);
                    coding.encode(&mut text.cache, &mut self.pool, self.runner.as_mut(), EncodeWhen::AtBoundary)?;
                }
            }
            done = end;
            progress(done);
        }
        Ok(())
    }
}

/// A text being scored with one kind of cache.
struct Text {
    cache: KvCache,
    segments: SegmentLists,
    coding: Option<Coding>,
    nll: Vec<f64>,
    last_logits: Vec<f32>,
}

/// Takes the queries of a batch to what constants are taken from.
struct Queries<'a> {
    first_position: usize,
    /// In batch order.
    spans: Vec<Option<&'a mut QueryMoments>>,
}

impl AttentionSink for Queries<'_> {
    fn queries(&mut self, span: usize, layer: usize, queries: &mut [f32]) {
        if let Some(moments) = &mut self.spans[span] {
            moments.add(layer, self.first_position, queries);
        }
    }

    fn tap(&mut self, _span: usize, _layer: usize, _resident: &[usize]) -> Tap {
        Tap::None
    }

    fn observe(&mut self, _span: usize, _layer: usize, _tap: Tap, _threads: &Threads) {}
}

/// `ln sum exp(x)` in f64.
pub(crate) fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    max + logits.iter().map(|&x| (f64::from(x) - max).exp()).sum::<f64>().ln()
}

/// `sum_i p_i ln(p_i / q_i)` in f64, `p` and `q` the softmax of the logits.
pub(crate) fn divergence(p: &[f32], q: &[f32]) -> f64 {
    let (p_sum, q_sum) = (log_sum_exp(p), log_sum_exp(q));
    let log_ratio = |p: f64, q: f64| (p - p_sum) - (q - q_sum);
    p.iter().zip(q).map(|(&p, &q)| (f64::from(p) - p_sum).exp() * log_ratio(f64::from(p), f64::from(q))).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergence_is_that_of_the_distributions() {
        // (1/2, 1/4, 1/4) from (1/4, 1/4, 1/2), each with another constant added to its logits.
        let [p, q] = [[2.0_f32, 1.0, 1.0], [1.0, 1.0, 2.0]].map(|odds| odds.map(f32::ln));
        let expected = 0.5 * 2.0_f64.ln() + 0.25 * 0.5_f64.ln();
        assert!((divergence(&p.map(|x| x + 3.0), &q.map(|x| x - 7.0)) - expected).abs() < 1e-6);
        assert_eq!(divergence(&p, &p), 0.0);
    }
}
