//! A method's scores of each query head apart, pooled.

use crate::attention_rows::{AttentionRows, RowSource, RowTap};
use crate::entropy::{RenyiOrder, head_weights, residual_entropy};
use crate::head_pooling::HeadPooling;
use crate::page_entro_kv::{ObservedRow, PageEntroKvOptions, PromptRows};
use crate::resident_tokens::ResidentTokens;
use crate::token_policy::TokenScorer;

/// Scores the tokens of one KV group head by head: a scorer each, that takes its head for a group of one.
///
/// Any method that reads attention rows can be had so. Heads are averaged within a method before whatever it does next, a pool along
/// positions, say; here each head goes all the way and the scores are pooled.
#[derive(Clone)]
pub(crate) struct HeadwiseScorer {
    pooling: HeadPooling,
    heads: Vec<Box<dyn TokenScorer>>,
    /// Prompt rows read for their entropy.
    row: ObservedRow,
    prompt: Option<PromptRows>,
    /// `w_h`, as of the last prompt's end; alike before, and where entropy is not asked for.
    weights: Vec<f64>,
}

impl HeadwiseScorer {
    /// A scorer of the group whose heads have the scorers `heads` and whose prompt rows come as `tap` says; `None` where that is
    /// none, for then all heads would score alike.
    pub(crate) fn new(pooling: HeadPooling, heads: Vec<Box<dyn TokenScorer>>, tap: RowTap) -> Option<Self> {
        let row = match tap {
            RowTap::None => return None,
            RowTap::Last => ObservedRow::Last,
            RowTap::Window(num_rows) => ObservedRow::Window(num_rows),
            RowTap::Accumulated => ObservedRow::Accumulated,
        };
        let weights = vec![1.0 / heads.len() as f64; heads.len()];
        Some(Self { pooling, heads, row, prompt: None, weights })
    }
}

impl TokenScorer for HeadwiseScorer {
    fn observe(&mut self, rows: AttentionRows<'_>) {
        if self.pooling == HeadPooling::Entropy && rows.source != RowSource::Step {
            let fresh = || PromptRows::new(self.row, self.heads.len());
            self.prompt.get_or_insert_with(fresh).observe(rows);
        }
        for (head, scorer) in self.heads.iter_mut().enumerate() {
            let own: Vec<f32> = (0..rows.num_rows()).flat_map(|row| rows.head(row, head)).copied().collect();
            scorer.observe(AttentionRows { group_size: 1, rows: &own, ..rows });
        }
    }

    fn end_prompt(&mut self) {
        self.heads.iter_mut().for_each(|scorer| scorer.end_prompt());
        let Some(prompt) = self.prompt.take() else { return };
        let PageEntroKvOptions { sinks, tau, .. } = PageEntroKvOptions::default();
        let (means, _) = prompt.into_means();
        let num_sinks = means.positions().partition_point(|&position| position < sinks);
        let entropy = |head| residual_entropy(means.column(head)[num_sinks..].iter().copied(), RenyiOrder::COLLISION);
        self.weights = head_weights(&(0..self.heads.len()).map(entropy).collect::<Vec<_>>(), tau);
    }

    fn score(&mut self, tokens: ResidentTokens<'_>, out: &mut Vec<f32>) {
        let of_head = |scorer: &mut Box<dyn TokenScorer>| {
            let mut scores = Vec::with_capacity(tokens.len());
            scorer.score(tokens, &mut scores);
            scores
        };
        let heads: Vec<Vec<f32>> = self.heads.iter_mut().map(of_head).collect();
        self.pooling.pool(&heads, &self.weights, out);
    }

    fn retain(&mut self, positions: &[u32]) {
        self.heads.iter_mut().for_each(|scorer| scorer.retain(positions));
    }

    fn nan_rows(&self) -> u64 {
        self.heads.iter().map(|scorer| scorer.nan_rows()).sum()
    }

    fn state_bytes(&self) -> u64 {
        let own = size_of::<Self>()
            + self.weights.capacity() * size_of::<f64>()
            + self.prompt.as_ref().map_or(0, PromptRows::bytes);
        own as u64 + self.heads.iter().map(|scorer| scorer.state_bytes()).sum::<u64>()
    }
}
