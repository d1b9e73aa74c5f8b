//! The state of Page-EntroKV in one KV group of one sequence.

use crate::attention_rows::{AttentionRows, PageSpan, RowSource, is_row};
use crate::entropy::{head_weights, residual_entropy};
use crate::page_entro_kv::head_pages::HeadPages;
use crate::page_entro_kv::head_view::HeadView;
use crate::page_entro_kv::options::{PageEntroKvOptions, Pooling};
use crate::page_entro_kv::prompt_rows::PromptRows;
use crate::page_entro_kv::token_scores::TokenScores;
use crate::policy::PageScorer;
use crate::resident_tokens::ResidentTokens;
use crate::token_table::TokenTable;

/// Scores the pages of one KV group as [`PageEntroKv`](crate::PageEntroKv) does.
#[derive(Clone, Debug)]
pub struct PageEntroKvScorer {
    options: PageEntroKvOptions,
    group_size: usize,
    page_size: usize,
    /// The rows of the prompt being read, if one is.
    prompt: Option<PromptRows>,
    /// `H_h`, as of the last prompt's end.
    entropies: Vec<f64>,
    /// `w_h`, as of the last prompt's end.
    weights: Vec<f64>,
    /// `s(t)`, one a token.
    scores: TokenTable,
    head_pages: HeadPages,
    /// How a step reads each head's row, `None` for a bad one; kept to spare a step the allocation.
    views: Vec<Option<HeadView>>,
    /// Rows dropped in turns that ended and in steps.
    bad_rows: u64,
}

impl PageEntroKvScorer {
    /// A scorer that has seen nothing: all scores are 0 and all heads weigh alike.
    pub(crate) fn new(options: PageEntroKvOptions, group_size: usize, page_size: usize) -> Self {
        Self {
            entropies: vec![0.0; group_size],
            weights: vec![1.0 / group_size as f64; group_size],
            scores: TokenTable::new(1),
            head_pages: HeadPages::new(group_size),
            views: vec![None; group_size],
            prompt: None,
            bad_rows: 0,
            options,
            group_size,
            page_size,
        }
    }

    /// `H_h` of every head, in nats, as of the last prompt's end, `[group_size]`.
    #[must_use]
    pub fn entropies(&self) -> &[f64] {
        &self.entropies
    }

    /// `w_h` of every head, as of the last prompt's end, `[group_size]`.
    ///
    /// `1 / r` when heads are pooled by their mean; not used when by their maximum.
    #[must_use]
    pub fn weights(&self) -> &[f64] {
        &self.weights
    }

    /// Positions of the tokens that have a score, ascending.
    #[must_use]
    pub fn positions(&self) -> &[u32] {
        self.scores.positions()
    }

    /// `s(t)` of those tokens, before any average pool.
    #[must_use]
    pub fn token_scores(&self) -> &[f64] {
        self.scores.column(0)
    }

    /// Takes in the row of one decoded token: `s(t) <- g s(t) + (1 - g) sum_h w_h A_h(t)`, a new token starting at 0.
    fn step(&mut self, rows: AttentionRows<'_>, row: usize) {
        let num_sinks = num_sinks(rows.positions, self.options.sinks);
        for head in 0..self.group_size {
            let masses = rows.head(row, head);
            self.views[head] = is_row(masses).then(|| HeadView::of(self.options.pool_on, &masses[num_sinks..]));
            self.bad_rows += u64::from(self.views[head].is_none());
        }
        self.scores.align(rows.positions);
        let scores = self.scores.column_mut(0);
        let (decay, fresh) = (self.options.decay, 1.0 - self.options.decay);
        match self.options.pooling {
            Pooling::Entropy | Pooling::Mean => {
                scores.iter_mut().for_each(|score| *score *= decay);
                for (head, (view, weight)) in self.views.iter().zip(&self.weights).enumerate() {
                    if let Some(view) = view {
                        view.add(fresh * weight, rows.head(row, head), num_sinks, scores);
                    }
                }
            }
            Pooling::Max => {
                for (token, score) in scores.iter_mut().enumerate() {
                    let heads = self.views.iter().enumerate();
                    let seen = heads.filter_map(|(head, view)| {
                        view.map(|view| view.see(f64::from(rows.head(row, head)[token]), token < num_sinks))
                    });
                    *score = decay * *score + fresh * seen.fold(0.0, f64::max);
                }
            }
        }
    }

    /// Makes `s(t)` of the rows the heads count, one a column.
    fn pool(&mut self, seen: &TokenTable) {
        self.scores.clear();
        self.scores.align(seen.positions());
        let scores = self.scores.column_mut(0);
        for (head, weight) in self.weights.iter().enumerate() {
            for (score, &mass) in scores.iter_mut().zip(seen.column(head)) {
                *score = match self.options.pooling {
                    Pooling::Entropy | Pooling::Mean => *score + weight * mass,
                    Pooling::Max => score.max(mass),
                };
            }
        }
    }
}

impl PageScorer for PageEntroKvScorer {
    fn observe(&mut self, rows: AttentionRows<'_>) {
        assert_eq!(rows.group_size, self.group_size, "rows of a group of another size");
        if rows.positions.is_empty() {
            return;
        }
        match rows.source {
            RowSource::Step => {
                for row in 0..rows.num_rows() {
                    self.step(rows, row);
                }
            }
            RowSource::Prompt | RowSource::ColumnSums { .. } | RowSource::Probe | RowSource::Reconstruction => {
                let fresh = || PromptRows::new(self.options.row, self.group_size);
                self.prompt.get_or_insert_with(fresh).observe(rows);
            }
        }
    }

    fn end_prompt(&mut self) {
        let Some(prompt) = self.prompt.take() else {
            return; // no rows since the last prompt: what was known stays
        };
        self.bad_rows += prompt.bad_rows();
        let (mut rows, has_row) = prompt.into_means();
        let num_sinks = num_sinks(rows.positions(), self.options.sinks);
        for (head, &has_row) in has_row.iter().enumerate() {
            // A head without a row is all zeros, which as a residual without mass has the entropy rule R5 asks for.
            let residual = &rows.column(head)[num_sinks..];
            self.entropies[head] = residual_entropy(residual.iter().copied(), self.options.order);
            if has_row {
                let view = HeadView::of(self.options.pool_on, residual);
                for (token, mass) in rows.column_mut(head).iter_mut().enumerate() {
                    *mass = view.see(*mass, token < num_sinks);
                }
            }
        }
        if self.options.pooling == Pooling::Entropy {
            self.weights = head_weights(&self.entropies, self.options.tau);
        }
        self.pool(&rows);
        self.head_pages.project(&rows, self.page_size, &self.options);
    }

    fn score(&mut self, pages: &[PageSpan], _tokens: ResidentTokens<'_>, out: &mut Vec<f32>) {
        out.clear();
        let scores = TokenScores { positions: self.scores.positions(), values: self.scores.column(0) };
        out.extend(pages.iter().map(|&page| scores.of_page(page, &self.options) as f32));
    }

    fn retain(&mut self, pages: &[PageSpan]) {
        // Both lists ascend.
        let mut pages = pages.iter().peekable();
        let stays = |position: &u32| {
            while pages.next_if(|page| page.end() <= u64::from(*position)).is_some() {}
            pages.peek().is_some_and(|page| page.first_position <= *position)
        };
        let positions: Vec<u32> = self.scores.positions().iter().copied().filter(stays).collect();
        self.scores.align(&positions);
        self.scores.shrink();
    }

    fn nan_rows(&self) -> u64 {
        self.bad_rows + self.prompt.as_ref().map_or(0, PromptRows::bad_rows)
    }

    fn state_bytes(&self) -> u64 {
        let tables = self.scores.bytes() + self.head_pages.bytes() + self.prompt.as_ref().map_or(0, PromptRows::bytes);
        let heads = (self.entropies.capacity() + self.weights.capacity()) * size_of::<f64>()
            + self.views.capacity() * size_of::<Option<HeadView>>();
        (size_of::<Self>() + tables + heads) as u64
    }

    fn uor_per_head(&self, pages: &[PageSpan], k_pages: usize) -> f64 {
        self.head_pages.union_overhead_ratio(pages, k_pages)
    }
}

/// Number of resident tokens among the first `sinks` positions.
fn num_sinks(positions: &[u32], sinks: u32) -> usize {
    positions.partition_point(|&position| position < sinks)
}
