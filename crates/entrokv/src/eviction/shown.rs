//! What a policy is shown: attention rows, queries, inputs of layers, and what a pass has recorded.

use std::ops::Range;
use std::sync::Arc;

use entrokv_cache::{AttentionRows, KvCache, KvGroup, RowOrigin, RowSource, RowTap};
use entrokv_kernels::attention::{SegmentList, Tap};
use entrokv_kernels::compute::Compute;
use entrokv_kernels::threads::Threads;

use super::page_choice::PageChoice;
use super::{Eviction, Held, LayerRows, ScoredGroup, StepReads, UnrotatedQueries};
use crate::engine::{Record, tokens_at};
use crate::gates::{GateInput, Gates, HeadGates};

impl Eviction {
    /// Whether what `gates` say of every token that the sequence holds is known.
    pub(crate) fn knows(&self, gates: &Arc<Gates>) -> bool {
        self.gates.as_ref().is_some_and(|scores| scores.are_of(gates))
    }

    /// What of its inputs in `layer` the policy's gates are to be shown.
    pub(crate) fn gate_input(&self, layer: usize) -> GateInput {
        self.gates.as_ref().map_or(GateInput::None, |scores| scores.gates().input(layer))
    }

    /// Asks the gate of `layer` about the tokens at positions `rows`, whose inputs are `x`.
    pub(crate) fn observe_inputs(&mut self, layer: usize, rows: &Range<usize>, x: &[f32], compute: &Compute) {
        if let (Some(scores), Some(first)) = (&mut self.gates, self.first_group[layer]) {
            let said = scores.gates().scores(compute, layer, x);
            scores.record(first, rows, &said);
        }
    }

    /// Shows the policy what a pass has recorded of a chunk.
    pub(crate) fn observe_pass(&mut self, cache: &KvCache, record: &Record) {
        let (columns, group_size) = (record.columns(), self.shape.group_size);
        for group in &mut self.groups {
            let positions: Vec<u32> = tokens_at(cache, group.group, &columns).map(|(position, _)| position).collect();
            let (source, positions, rows) = (RowSource::Reconstruction, &positions, &record.masses(group.group));
            group.scorer.observe(AttentionRows { source, group_size, positions, rows });
        }
        self.repeated = columns.end as usize;
    }

    /// Notes that a probe has asked about a text of `len` tokens.
    pub(crate) fn end_probe(&mut self, len: usize) {
        self.probed = len;
    }

    /// Whether the policy is shown rows or queries while a prompt is read, or while decoding, so that no such step may run twice.
    pub(crate) fn is_watching(&self, reading: bool) -> bool {
        let needs = self.policy.needs();
        let sums_heads = self.heads.as_ref().is_some_and(HeadGates::is_reading);
        let own_rows = needs.prompt != RowTap::None && self.policy.rows() == RowOrigin::Prompt;
        let sees_rows = if reading { own_rows || sums_heads } else { self.sees_steps() };
        sees_rows || self.sees_queries(reading) || reading && (self.two_way_sums.is_some() || self.channels.is_some())
    }

    /// Whether it is shown the row of every token generated. What is in tiers is not scored again before the next prompt.
    fn sees_steps(&self) -> bool {
        self.policy.needs().step_rows && self.policy.tiers().is_none()
    }

    /// Whether the policy is shown queries: once nothing more is to be decided they are not summed.
    fn sees_queries(&self, reading: bool) -> bool {
        self.query_sums.is_some() && (reading || self.policy.schedule().goes_on())
    }

    /// Shows the policy queries of a prompt, or of a generated token, before RoPE.
    pub(crate) fn see_unrotated(&mut self, queries: UnrotatedQueries<'_>, reading: bool, compute: &Compute) {
        if !self.sees_queries(reading) {
            return;
        }
        if let Some(sums) = &mut self.query_sums {
            sums.add(queries, compute);
        }
    }

    /// Shows the policy queries and keys of a prompt, or a part of it, that ends before `prompt_end`.
    pub(crate) fn see_prompt(&mut self, rows: LayerRows<'_>, prompt_end: usize, compute: &Compute) {
        if let Some(sums) = &mut self.two_way_sums {
            sums.add(rows, prompt_end, compute);
        }
        if let Some(sums) = &mut self.channels {
            sums.add(rows, prompt_end);
        }
    }

    /// Shows the policy's gates the `queries` `[tokens, num_heads, head_dim]` of the tokens at positions `rows` before RoPE, and
    /// their `keys`.
    pub(crate) fn observe_unrotated(&mut self, layer: usize, rows: &Range<usize>, queries: &mut [f32], keys: &[f32]) {
        if let (Some(scores), Some(first)) = (&mut self.gates, self.first_group[layer])
            && scores.gates().is_query_channel()
        {
            let (group_len, d) = (self.shape.group_size * self.shape.head_dim, self.shape.head_dim);
            let channel: Vec<f32> = queries.chunks_exact(group_len).map(|group| group[d - 1]).collect();
            scores.record(first, rows, &channel);
        }
        if let (Some(heads), Some(first)) = (&mut self.heads, self.first_group[layer]) {
            heads.add(first / self.shape.num_kv_heads, rows.len(), queries, keys);
        }
        self.hide_gate(layer, queries);
    }

    /// Clears the channel of `queries` that is a gate: rotation fills it again from the one it is paired with.
    pub(crate) fn hide_gate(&self, layer: usize, queries: &mut [f32]) {
        let is_gate = self.gates.as_ref().is_some_and(|scores| scores.gates().is_query_channel());
        if is_gate && self.first_group[layer].is_some() {
            let (group_len, d) = (self.shape.group_size * self.shape.head_dim, self.shape.head_dim);
            queries.chunks_exact_mut(group_len).for_each(|group| group[d - 1] = 0.0);
        }
    }

    /// What attention should record of a prompt's `rows` (absolute positions); the prompt ends before `prompt_end`.
    pub(crate) fn tap_prompt(
        &mut self,
        layer: usize,
        rows: Range<usize>,
        prompt_end: usize,
        resident: &[usize],
    ) -> Tap {
        let Some(first) = self.first_group[layer] else { return Tap::None };
        let window = match self.policy.needs().prompt {
            RowTap::None => return Tap::None,
            RowTap::Last => 1,
            RowTap::Window(window) => window,
            RowTap::Accumulated => {
                let groups = &mut self.groups[first..first + self.shape.num_kv_heads];
                let out = groups.iter_mut().zip(resident);
                let widen = |(group, &tokens): (&mut ScoredGroup, &usize)| {
                    widen(std::mem::take(&mut group.column_sums), self.shape.group_size, tokens)
                };
                self.num_summed_rows[layer] += rows.len();
                return Tap::ColumnSums { out: out.map(widen).collect() };
            }
        };
        let from = prompt_end.saturating_sub(window).max(rows.start);
        if from < rows.end { Tap::Rows { from_row: from - rows.start, out: Vec::new() } } else { Tap::None }
    }

    /// What attention should record of the row of a generated token.
    pub(crate) fn tap_answer(&mut self, layer: usize) -> Tap {
        if self.first_group[layer].is_some() && self.sees_steps() && self.resolved.is_some() {
            Tap::Rows { from_row: 0, out: std::mem::take(&mut self.step_rows) }
        } else {
            Tap::None
        }
    }

    /// Takes what the choice of pages goes by from those that are full by now.
    pub(super) fn learn_pages(&mut self, held: &Held<'_>) {
        if let Some(choice) = &mut self.page_choice {
            let groups: Vec<KvGroup> = self.groups.iter().map(|group| group.group).collect();
            choice.follow(&groups, held.cache, held.constants, &*held.runner);
        }
    }

    /// The lists that attention reads in `layer` instead of `held` for the `queries` of a generated token after RoPE, where the policy
    /// has it read a few pages.
    pub(crate) fn choose_pages(
        &mut self,
        layer: usize,
        queries: &[f32],
        held: &[SegmentList],
        threads: &Threads,
    ) -> Option<Vec<SegmentList>> {
        let first = self.first_group[layer]?;
        self.page_choice.as_mut()?.choose(layer, first, queries, held, threads)
    }

    /// What the last step of decoding has read, where that is the policy's choice.
    pub(crate) fn step_reads(&self) -> Option<StepReads> {
        self.page_choice.as_ref().map(PageChoice::last)
    }

    /// Shows the policy what attention recorded in `layer`, of the columns of the first `text_len` tokens.
    pub(crate) fn observe(
        &mut self,
        cache: &KvCache,
        layer: usize,
        source: RowSource,
        text_len: usize,
        tap: Tap,
        threads: &Threads,
    ) {
        let Some(first) = self.first_group[layer] else { return };
        let groups = &mut self.groups[first..first + self.shape.num_kv_heads];
        match tap {
            Tap::None => {}
            Tap::ColumnSums { out } => {
                for (group, sums) in groups.iter_mut().zip(out) {
                    group.column_sums = sums;
                }
            }
            Tap::ColumnMaxima(_) => unreachable!("a pass keeps its own"),
            Tap::Rows { out, .. } => {
                let group_size = self.shape.group_size;
                let choice = self.page_choice.as_ref().filter(|_| source == RowSource::Step);
                // Groups know nothing of each other: who observes which cannot show.
                threads.for_each_chunk(groups, 1, |kv_head, group| {
                    let mut columns = Vec::new();
                    cache.columns(group[0].group, &mut columns);
                    let spread = choice
                        .map(|choice| choice.spread(kv_head, cache.table(group[0].group), &out[kv_head], group_size));
                    let rows = spread.as_deref().unwrap_or(&out[kv_head]);
                    let of_text = columns.partition_point(|&column| (column as usize) < text_len);
                    let trimmed: Vec<f32> = match columns.len() - of_text {
                        0 => Vec::new(),
                        _ => rows.chunks_exact(columns.len()).flat_map(|row| &row[..of_text]).copied().collect(),
                    };
                    let rows = if of_text == columns.len() { rows } else { &trimmed };
                    let positions = &columns[..of_text];
                    group[0].scorer.observe(AttentionRows { source, group_size, positions, rows });
                });
                // The rows of a prompt are many; their memory is not kept.
                if source == RowSource::Step {
                    self.step_rows = out;
                }
            }
        }
    }
}

/// Column sums of more tokens than before: the new ones begin at 0.
fn widen(old: Vec<f32>, group_size: usize, tokens: usize) -> Vec<f32> {
    let before = old.len() / group_size;
    if before == tokens {
        return old;
    }
    let mut new = vec![0.0; group_size * tokens];
    if before > 0 {
        for (new, old) in new.chunks_exact_mut(tokens).zip(old.chunks_exact(before)) {
            new[..before].copy_from_slice(old);
        }
    }
    new
}
