//! Eviction of one sequence: attention rows in, page fates out.
//!
//! Scoring, pooling heads, allotting the budget, selecting and freeing are separate steps, and all but the bookkeeping
//! lives in `entrokv-cache`. This file knows when each happens (the rules are `docs/architecture.md`, "When pages go"):
//! * while a prompt is read, the rows its policy asked for are collected ([`Eviction::tap_prompt`], [`Eviction::observe`]);
//! * at its end the budget is fixed and everything over it goes ([`Eviction::end_prompt`]); it is fixed again when a coded
//!   cache begins to encode later than that ([`Eviction::reprice`]);
//! * a policy of gates is never shown inputs: the gates are, as tokens are read, and what they said of the tokens still held is
//!   kept for its decisions, from one turn of a sequence to the next;
//! * a rolling policy also sees the row of every token generated, and evicts a page of each KV group before it opens
//!   another ([`Eviction::make_room`]).
//!
//! Only global layers are ever scored or freed; window layers look after themselves.

mod arrange;
mod channel_sums;
mod page_choice;
mod query_sums;
mod saved;
mod two_way_sums;
mod units;

use std::ops::Range;
use std::sync::Arc;

use entrokv_cache::{
    Allotment, AttentionForm, AttentionRows, Budget, BudgetError, CacheShape, EvictionPolicy, FateError, Granularity,
    GroupUnits, KvCache, KvGroup, LayerKind, LeastBudget, LogitScale, OpenPage, OutputTap, PageCost, PageFate,
    PageKind, PagePlace, PagePool, PageScorer, Pins, PoolExhausted, QueryMoments, QueryTap, Reading, Reconstruction,
    Release, ResidentTokens, ResolvedBudget, RotaryPairs, Rotation, RowOrigin, RowSource, RowTap, Schedule, Sharing,
    TokenTap, TwoWayTap, select_pages, select_tokens,
};
use entrokv_kernels::attention::{SegmentList, Tap};
use entrokv_kernels::codes::KeyConstants;
use entrokv_kernels::compute::Compute;
use entrokv_kernels::rope::RopeLayout;
use entrokv_kernels::threads::Threads;
use serde::{Deserialize, Serialize};

use crate::config::ModelConfig;
use crate::engine::{Record, tokens_at};
use crate::gates::{GateInput, GateScores, Gates, HeadGates};
use crate::model::ModelRunner;
use crate::sequence::EvictionOptions;
use crate::store::TokenVectors;

use self::channel_sums::ChannelSums;
use self::page_choice::PageChoice;
pub use self::page_choice::StepReads;
use self::query_sums::QuerySums;
pub(crate) use self::query_sums::UnrotatedQueries;
pub(crate) use self::two_way_sums::LayerRows;
use self::two_way_sums::{Blocks, TwoWaySums};
use self::units::Units;

/// What eviction did to a sequence so far.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvictionReport {
    /// Pages freed.
    pub pages_evicted: u64,
    /// Mean over KV groups of pages held over pages its one set needs, at the last eviction: 1 by construction, counted.
    pub uor: f64,
    /// Mean over KV groups of what heads choosing alone would have held, in the same unit.
    pub uor_per_head: f64,
    /// Attention rows dropped for holding something that is no number.
    pub nan_rows: u64,
    /// Whether the budget was below the smallest possible and was raised to it.
    pub budget_raised: bool,
}

impl Default for EvictionReport {
    fn default() -> Self {
        Self { pages_evicted: 0, uor: 1.0, uor_per_head: 1.0, nan_rows: 0, budget_raised: false }
    }
}

/// The cap of one turn of a sequence and what keeps it.
pub(crate) struct Eviction {
    policy: Arc<dyn EvictionPolicy>,
    budget: Budget,
    shape: Arc<CacheShape>,
    /// Tokens of the prompt (all turns counted) the budget is fixed for.
    prompt_tokens: usize,
    /// Fixed when the prompt has been read.
    resolved: Option<ResolvedBudget>,
    /// One scorer a KV group of the global layers, in (layer, KV head) order.
    groups: Vec<ScoredGroup>,
    /// First entry of `groups` of each layer; `None` for window layers.
    first_group: Vec<Option<usize>>,
    /// Prompt rows added into the column sums so far, where the policy asked for those.
    num_summed_rows: Vec<usize>,
    /// What a policy of queries' moments is shown.
    query_sums: Option<QuerySums>,
    /// What is cleared in keys at the prompt's end, where the policy clears any.
    channels: Option<ChannelSums>,
    /// What is read of the pages held, where the policy has a step read a few.
    page_choice: Option<PageChoice>,
    /// What a policy that looks both ways is shown.
    two_way_sums: Option<TwoWaySums>,
    /// The rows of a token generated, per KV head of a layer: what attention fills, layer after layer and step after step.
    step_rows: Vec<Vec<f32>>,
    /// Positions before this one have been repeated by passes.
    repeated: usize,
    /// Whether a policy that waits for the answer has been told that it is over.
    is_due: bool,
    /// Bytes held right after the last eviction at a prompt's end.
    held_after_prompt: Option<u64>,
    /// Most bytes that the policy's state has had when it decided about a prompt.
    peak_state_bytes: u64,
    report: EvictionReport,
    /// What the policy's gates said of tokens, where it has any.
    gates: Option<GateScores>,
    /// What they say of heads, where it is that.
    heads: Option<HeadGates>,
}

struct ScoredGroup {
    group: KvGroup,
    scorer: Box<dyn PageScorer>,
    /// Column sums of the prompt's rows `[group_size, tokens]`, handed to the scorer at its end.
    column_sums: Vec<f32>,
    /// Pages it may hold, once the budget is fixed.
    cap: usize,
}

/// What a sequence holds, and who can read it.
pub(crate) struct Held<'a> {
    /// Its block tables.
    pub(crate) cache: &'a mut KvCache,
    /// What rotated codes of its keys are relative to, in the order of [`CacheShape::groups`]; empty where there are none.
    pub(crate) constants: &'a [Option<KeyConstants>],
    /// Reads keys and values, and moves them.
    pub(crate) runner: &'a mut dyn ModelRunner,
}

impl Eviction {
    /// A cap for a sequence of `shape` whose pages may weigh `cost`: as written, for the first are not encoded at once. The model
    /// multiplies dot products with `logit_scale`.
    ///
    /// # Errors
    /// An absolute budget below what the policy pins, or any below 100 % of a policy that frees nothing.
    pub(crate) fn new(
        options: &EvictionOptions,
        shape: &Arc<CacheShape>,
        cost: PageCost,
        gates: Option<Arc<Gates>>,
        logit_scale: f32,
    ) -> Result<Self, BudgetError> {
        let policy = Arc::clone(&options.policy);
        if policy.least_budget() == LeastBudget::Everything && !options.budget.is_everything() {
            return Err(BudgetError::NothingFreed { budget: options.budget });
        }
        options.budget.check(shape, cost, &policy.pins())?;
        let mut unit_shape = CacheShape::clone(shape);
        if policy.granularity() == Granularity::Token {
            unit_shape.page_size = 1;
        }
        let needs = policy.needs();
        let query_sums = match needs.queries {
            QueryTap::None => None,
            QueryTap::Moments { first } => Some(QuerySums::new(shape, first)),
        };
        let two_way_sums = match needs.two_way {
            TwoWayTap::None => None,
            TwoWayTap::Sums { chunk, first, last, scale } => {
                let scale = match scale {
                    LogitScale::Unscaled => 1.0,
                    LogitScale::Scaled => logit_scale,
                };
                Some(TwoWaySums::new(shape, Blocks { chunk, first, last, scale }))
            }
        };
        let (mut groups, mut first_group) = (Vec::new(), Vec::new());
        for (layer, layer_kind) in shape.layers.iter().enumerate() {
            if matches!(layer_kind, LayerKind::Window(_)) {
                first_group.push(None);
                continue;
            }
            first_group.push(Some(groups.len()));
            for kv_head in 0..shape.num_kv_heads as u32 {
                let group = KvGroup { layer: layer as u32, kv_head };
                let scorer = policy.scorer(&unit_shape, group);
                groups.push(ScoredGroup { group, scorer, column_sums: Vec::new(), cap: usize::MAX });
            }
        }
        let channels = policy.key_channels().map(|channels| ChannelSums::new(shape, channels));
        let page_choice = match policy.reading() {
            Reading::All => None,
            Reading::Pages(reads) => Some(PageChoice::new(reads, groups.len(), shape.head_dim, logit_scale)),
        };
        let heads = gates.as_ref().and_then(|gates| gates.heads());
        let of_tokens = gates.filter(|gates| gates.see_tokens());
        let gates = of_tokens.map(|gates| GateScores::new(gates, groups.len()));
        Ok(Self {
            policy,
            budget: options.budget,
            shape: Arc::clone(shape),
            prompt_tokens: 0,
            resolved: None,
            num_summed_rows: vec![0; shape.layers.len()],
            query_sums,
            channels,
            page_choice,
            two_way_sums,
            groups,
            first_group,
            step_rows: Vec::new(),
            repeated: 0,
            is_due: false,
            held_after_prompt: None,
            peak_state_bytes: 0,
            report: EvictionReport::default(),
            gates,
            heads,
        })
    }

    /// Goes on where the last turn of the sequence ended: with its counts, with what the gates said, and with what was summed, or
    /// said by passes, for the same policy.
    pub(crate) fn carry_on(&mut self, last: &mut Self) {
        self.report = EvictionReport { budget_raised: false, ..last.report() };
        self.gates = self.gates.take().map(|gates| last.gates.take().unwrap_or(gates));
        if let (Some(heads), Some(last)) = (&mut self.heads, last.heads.take()) {
            heads.carry_on(last);
        }
        let (needs, before) = (self.policy.needs(), last.policy.needs());
        if needs.queries == before.queries {
            self.query_sums = last.query_sums.take();
        }
        if needs.two_way == before.two_way {
            self.two_way_sums = last.two_way_sums.take();
        }
        if last.repeated > 0 && self.policy.to_string() == last.policy.to_string() {
            self.repeated = last.repeated;
            for (group, last) in self.groups.iter_mut().zip(&mut last.groups) {
                self.report.nan_rows -= last.scorer.nan_rows();
                std::mem::swap(&mut group.scorer, &mut last.scorer);
            }
        }
    }

    /// What decides which pages stay.
    pub(crate) fn policy(&self) -> &dyn EvictionPolicy {
        &*self.policy
    }

    /// Whether nothing is to go yet, not until [`Eviction::begin`].
    pub(crate) fn waits(&self) -> bool {
        self.policy.schedule() == Schedule::AfterAnswer && !self.is_due
    }

    /// The answer is over.
    pub(crate) fn begin(&mut self) {
        self.is_due = true;
    }

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

    /// What a pass over a sequence of `len` tokens is to be: how, how many first positions its rows see, and where it begins.
    pub(crate) fn pass_wanted(&self, len: usize) -> Option<(Reconstruction, usize, usize)> {
        let reconstruction = self.policy.needs().reconstruction?;
        let pins = self.policy.pins();
        let resolved = self.budget.resolve(&self.shape, PageKind::F16, len, &pins);
        // Where nothing is ever evicted nobody asks for scores.
        let evicts = !resolved.is_ok_and(|resolved| resolved.unlimited);
        evicts.then_some((reconstruction, pins.sink_tokens, self.repeated))
    }

    /// Whether rows of a probe are wanted over a text of `len` tokens.
    pub(crate) fn wants_probe(&self, len: usize) -> bool {
        let resolved = self.budget.resolve(&self.shape, PageKind::F16, len, &self.policy.pins());
        let evicts = !resolved.is_ok_and(|resolved| resolved.unlimited);
        evicts && self.policy.rows() == RowOrigin::Probe && self.policy.needs().prompt != RowTap::None
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

    /// Whether the policy is shown rows or queries while a prompt is read, or while decoding, so that no such step may run twice.
    pub(crate) fn is_watching(&self, reading: bool) -> bool {
        let needs = self.policy.needs();
        let sums_heads = self.heads.as_ref().is_some_and(HeadGates::is_reading);
        let own_rows = needs.prompt != RowTap::None && self.policy.rows() == RowOrigin::Prompt;
        let sees_rows = if reading { own_rows || sums_heads } else { needs.step_rows };
        sees_rows || self.sees_queries(reading) || reading && (self.two_way_sums.is_some() || self.channels.is_some())
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

    /// Where reading from `position` on pauses for an eviction before the prompt's end, if the policy wants that.
    pub(crate) fn pause_after(&self, position: usize) -> Option<usize> {
        self.policy.schedule().pause_after(position)
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
        if self.first_group[layer].is_some() && self.policy.needs().step_rows && self.resolved.is_some() {
            Tap::Rows { from_row: 0, out: std::mem::take(&mut self.step_rows) }
        } else {
            Tap::None
        }
    }

    /// Takes what the choice of pages goes by from those that are full by now.
    fn learn_pages(&mut self, held: &Held<'_>) {
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
                    positions(cache, group[0].group, &mut columns);
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

    /// Fixes the budget of a prompt of `prompt_tokens` (all turns counted) that has been read, or a chunk of it
    /// ([`Eviction::pause_after`]), its pages weighing `cost`, and frees what is over it.
    ///
    /// # Errors
    /// [`PoolExhausted`] as from [`Eviction::evict`], or if a policy of tiers found no room for new pages beside old ones: KV groups
    /// that were not reached hold what they held.
    pub(crate) fn end_prompt(
        &mut self,
        mut held: Held<'_>,
        pool: &mut PagePool,
        cost: PageCost,
        prompt_tokens: usize,
    ) -> Result<(), PoolExhausted> {
        let cache = &*held.cache;
        self.prompt_tokens = prompt_tokens;
        let tiers = self.policy.tiers();
        let keep = self.resolve(cost);
        let num_summed_rows = std::mem::replace(&mut self.num_summed_rows, vec![0; self.shape.layers.len()]);
        let mut columns = Vec::new();
        for group in &mut self.groups {
            let num_rows = num_summed_rows[group.group.layer as usize];
            if num_rows > 0 {
                positions(cache, group.group, &mut columns);
                group.scorer.observe(AttentionRows {
                    source: RowSource::ColumnSums { num_rows },
                    group_size: self.shape.group_size,
                    positions: &columns,
                    rows: &group.column_sums,
                });
                group.column_sums = Vec::new();
            }
            group.scorer.end_prompt();
        }
        self.groups.iter_mut().for_each(|group| group.cap = keep);
        let open = if cache.open_page().is_some() { OpenPage::Newest } else { OpenPage::None };
        if let Some(tiers) = tiers {
            return self.arrange(&mut held, pool, tiers, open);
        }
        let full = self.shape.pages_for(cache.logical_len());
        self.cap_heads(held.runner, full, keep);
        let releases = self.policy.release() == Release::Marked;
        let least = self.groups.iter().map(|group| group.cap).min().unwrap_or(keep);
        let scored = self.scored(&held, |table_len| releases || table_len > least);
        self.peak_state_bytes = self.peak_state_bytes.max(self.state_bytes());
        let pins = self.policy.pins();
        // What fits need not be shared out.
        let is_over = scored.iter().flatten().any(|units| units.num_pages() > keep);
        let is_shared_out = !matches!(self.policy.allotment(), Allotment::Uniform | Allotment::Heads(_));
        if is_over && is_shared_out && scored.iter().all(Option::is_some) {
            self.allot(&scored, &pins, keep, open);
        }
        let (mut pages_held, mut alone) = (0.0, 0.0);
        for (index, units) in scored.into_iter().enumerate() {
            let ScoredGroup { group, mut cap, .. } = self.groups[index];
            let mut pinned = Vec::new();
            if let Some(units) = &units {
                // Half of no limit would be everything.
                let budget = if keep == usize::MAX { units.num_pages() } else { keep };
                pinned = units.pinned(&pins, budget, open);
                if releases {
                    cap = cap.min(units.unmarked_pages(&pinned));
                }
            }
            let Some(units) = units.filter(|units| units.num_pages() > cap) else {
                (pages_held, alone) = (pages_held + 1.0, alone + 1.0);
                continue;
            };
            let num_kept = units.in_pages(cap);
            alone += self.groups[index].scorer.uor_per_head(&units.spans, num_kept);
            self.evict(&mut held, pool, group, &units, &pinned, num_kept)?;
            let left = Units::of(held.cache, group, self.policy.granularity());
            self.groups[index].scorer.retain(&left.spans);
            if let Some(gates) = &mut self.gates {
                gates.retain(index, &left.positions);
            }
            pages_held += left.num_pages() as f64 / cap as f64;
        }
        if let Some(channels) = &mut self.channels {
            channels.clear(&mut held, pool, prompt_tokens)?;
        }
        self.learn_pages(&held);
        if !self.groups.is_empty() {
            let num_groups = self.groups.len() as f64;
            (self.report.uor, self.report.uor_per_head) = (pages_held / num_groups, alone / num_groups);
        }
        Ok(())
    }

    /// Says which heads stream, where that is how the policy shares the budget out: a head that does not has room for `full` pages.
    fn cap_heads(&mut self, runner: &dyn ModelRunner, full: usize, keep: usize) {
        let Allotment::Heads(streaming) = self.policy.allotment() else { return };
        let Some(heads) = &mut self.heads else { return };
        let few = self.policy.pins().smallest_pages(self.shape.page_size);
        let total = keep.saturating_mul(self.groups.len());
        let caps = streaming.counts(heads.settle(runner.config()), full, few, total);
        self.groups.iter_mut().zip(caps).for_each(|(group, cap)| group.cap = cap);
    }

    /// Shares `keep` pages a group out among the groups by their scores.
    fn allot(&mut self, scored: &[Option<Units>], pins: &Pins, keep: usize, open: OpenPage) {
        let pages = scored.iter().flatten().map(|units| units.pages(&units.pinned(pins, keep, open)));
        let pages: Vec<(Vec<f32>, Vec<usize>)> = pages.collect();
        let least = pins.smallest_pages(self.shape.page_size);
        let units: Vec<GroupUnits<'_>> =
            pages.iter().map(|(scores, pinned)| GroupUnits { scores, pinned, least }).collect();
        let caps = self.policy.allotment().counts(&units, self.shape.num_kv_heads, keep);
        self.groups.iter_mut().zip(caps).for_each(|(group, cap)| group.cap = cap);
    }

    /// Keeps the best `num_kept` of `units`, which are those of `group`, and frees the others.
    ///
    /// # Errors
    /// [`PoolExhausted`] if tokens are to move together that forks share, and there is no room for pages of the sequence's own.
    fn evict(
        &mut self,
        held: &mut Held<'_>,
        pool: &mut PagePool,
        group: KvGroup,
        units: &Units,
        pinned: &[usize],
        num_kept: usize,
    ) -> Result<(), PoolExhausted> {
        let Held { cache, runner, .. } = held;
        let safe =
            self.resolved.as_ref().map_or(0, |resolved| self.policy.allotment().safe_units(resolved.pages_per_group));
        let (scores, pinned) = units.staged(num_kept, safe, pinned);
        let applied = match units.granularity {
            Granularity::Page => {
                let mut fates = vec![PageFate::Free; units.num_pages()];
                for page in &select_pages(scores, num_kept, &pinned) {
                    fates[page] = PageFate::Keep;
                }
                cache
                    .apply(pool, group, &fates, &mut |_| ())
                    .expect("the open page is pinned, and none changes its kind")
            }
            Granularity::Token => {
                let closed = units.positions.len() - units.num_open();
                let kept = select_tokens(scores, num_kept, &pinned);
                let kept: Vec<u32> = kept.iter().filter(|&token| token < closed).map(|token| token as u32).collect();
                let mut move_tokens =
                    |from: &[PagePlace], to: &[PagePlace], kept: &[u32]| runner.compact(from, to, kept);
                match cache.compact(pool, group, &kept, &mut move_tokens) {
                    Ok(applied) => applied,
                    Err(FateError::Pool(error)) => return Err(error),
                    Err(error) => unreachable!("whole pages of tokens that can move stay: {error}"),
                }
            }
        };
        self.report.pages_evicted += applied.pages_freed;
        Ok(())
    }

    /// The units of every KV group and their scores, those of layers in which no table `is_long_enough` left out.
    fn scored(&mut self, held: &Held<'_>, is_long_enough: impl Fn(usize) -> bool) -> Vec<Option<Units>> {
        let cache = &*held.cache;
        let (form, needs) = (attention_form(held.runner.config()), self.policy.needs());
        let (query_sums, two_way_sums) = (self.query_sums.as_ref(), self.two_way_sums.as_ref());
        let mut all = Vec::with_capacity(self.groups.len());
        for groups in self.groups.chunks_mut(self.shape.num_kv_heads) {
            if !groups.iter().any(|group| is_long_enough(cache.table(group.group).len())) {
                all.extend(groups.iter().map(|_| None));
                continue;
            }
            let layer = groups[0].group.layer;
            let vectors = match needs.tokens {
                TokenTap::None if needs.output == OutputTap::None => vec![TokenVectors::default(); groups.len()],
                _ => held.runner.token_vectors(cache, layer, held.constants),
            };
            let of_new = |(vectors, group): (TokenVectors, &ScoredGroup)| {
                let settled = cache.num_settled(group.group) * self.shape.page_size * self.shape.head_dim;
                vectors.after(settled)
            };
            let vectors: Vec<TokenVectors> = vectors.into_iter().zip(groups.iter()).map(of_new).collect();
            let output_norms = match needs.output {
                OutputTap::None => vec![Vec::new(); groups.len()],
                OutputTap::Norms => held.runner.output_norms(layer, &vectors),
            };
            let mut units: Vec<Units> =
                groups.iter().map(|group| Units::of(cache, group.group, self.policy.granularity())).collect();
            let two_way: Vec<Vec<f32>> = groups
                .iter()
                .zip(&units)
                .map(|(group, units)| two_way_sums.map_or(Vec::new(), |sums| sums.at(group.group, &units.positions)))
                .collect();
            let of_group = |index: usize, group: KvGroup| ResidentTokens {
                positions: &[],
                keys: &vectors[index].keys,
                values: &vectors[index].values,
                gates: &[],
                form,
                output_norms: &output_norms[index],
                two_way: &two_way[index],
                layer_sums: &[],
                queries: query_sums.map_or(QueryMoments::default(), |sums| sums.of(group)),
            };
            let mut layer_sums: Vec<f64> = Vec::new();
            for (index, (group, units)) in groups.iter_mut().zip(&units).enumerate() {
                let mut own = Vec::new();
                let tokens = ResidentTokens { positions: &units.positions, ..of_group(index, group.group) };
                group.scorer.measure(tokens, &mut own);
                layer_sums.resize(own.len(), 0.0);
                layer_sums.iter_mut().zip(own).for_each(|(sum, own)| *sum += own);
            }
            let first = all.len();
            for (index, (group, units)) in groups.iter_mut().zip(&mut units).enumerate() {
                let (positions, layer_sums) = (&units.positions, &layer_sums);
                let gates = self.gates.as_ref().map(|gates| gates.at(first + index, positions)).unwrap_or_default();
                let tokens = ResidentTokens { positions, layer_sums, gates: &gates, ..of_group(index, group.group) };
                let mut scores = Vec::new();
                group.scorer.score(&units.spans, tokens, &mut scores);
                units.take(scores, group.scorer.second_stage());
            }
            all.extend(units.into_iter().map(Some));
            if self.policy.sharing() == Sharing::Layer {
                share(&mut all[first..]);
            }
        }
        all
    }

    /// Fixes the budget anew where pages weigh something else from now on: the same bytes hold more of them.
    pub(crate) fn reprice(&mut self, cost: PageCost) {
        if self.policy.tiers().is_some() {
            return;
        }
        if let Some(before) = self.resolved.as_ref().map(|resolved| resolved.pages_per_group) {
            let more = self.resolve(cost).saturating_sub(before);
            // Codes weigh less the more of a group's pages they are, so shares that fitted still do.
            self.groups.iter_mut().for_each(|group| group.cap = group.cap.saturating_add(more));
        }
    }

    /// Fixes the budget; the pages each KV group may hold.
    fn resolve(&mut self, cost: PageCost) -> usize {
        let (pins, tokens) = (self.policy.pins(), self.prompt_tokens);
        let resolved = match self.policy.tiers() {
            None => self.budget.resolve(&self.shape, cost, tokens, &pins),
            Some(_) => self.budget.resolve_in_bytes(&self.shape, cost.written, tokens, &pins),
        };
        // An absolute budget was checked when the turn began, and a fraction is raised to the smallest possible.
        let resolved = resolved.expect("a budget that passed its check resolves");
        self.report.budget_raised |= resolved.raised;
        let pages_per_group = resolved.pages_per_group;
        self.resolved = Some(resolved);
        pages_per_group
    }

    /// Notes what the prompt's end has left: what comes on top under a schedule that evicts once is counted from here.
    pub(crate) fn note_held(&mut self, held: u64) {
        self.held_after_prompt = Some(held);
    }

    /// Frees pages of each KV group that is about to open one beyond its budget, one or as many as the policy's schedule says; `next` is the position to be written.
    ///
    /// # Errors
    /// [`PoolExhausted`] as from [`Eviction::evict`]: KV groups that were not reached hold what they held.
    pub(crate) fn make_room(
        &mut self,
        mut held: Held<'_>,
        pool: &mut PagePool,
        next: usize,
    ) -> Result<(), PoolExhausted> {
        let opens_page = next.is_multiple_of(self.shape.page_size) && next >= held.cache.logical_len();
        if opens_page {
            self.learn_pages(&held);
        }
        let releases = self.policy.release() == Release::Marked;
        let Some(ResolvedBudget { pages_per_group: keep, unlimited, .. }) = self.resolved else { return Ok(()) };
        if unlimited && !releases && self.heads.is_none() {
            return Ok(());
        }
        if !opens_page || !self.policy.schedule().goes_on() {
            return Ok(());
        }
        if self.policy.tiers().is_some() {
            self.make_room_in_bytes(&mut held, pool, next);
            return Ok(());
        }
        self.cap_heads(held.runner, next / self.shape.page_size + 1, keep);
        // With shares of the budget a group may have room where its neighbours have not.
        let least = self.groups.iter().map(|group| group.cap).min().unwrap_or(0);
        let (pins, page_size) = (self.policy.pins(), self.shape.page_size);
        let pages_at_once = self.policy.schedule().pages_at_once(page_size);
        let scored = self.scored(&held, |table_len| releases || table_len >= least);
        for (index, units) in scored.into_iter().enumerate() {
            let ScoredGroup { group, cap, .. } = self.groups[index];
            let Some(units) = units.filter(|units| releases || units.num_pages() >= cap) else { continue };
            let pinned = units.pinned(&pins, cap.min(units.num_pages() + 1), OpenPage::Next);
            let mut left = units.num_pages();
            if left >= cap {
                left = cap.saturating_sub(pages_at_once).max(units.pages_of(pinned.len()));
            }
            if releases {
                left = left.min(units.unmarked_pages(&pinned));
            }
            if left == units.num_pages() {
                continue;
            }
            self.evict(&mut held, pool, group, &units, &pinned, units.in_pages(left))?;
            if let Some(gates) = &mut self.gates {
                let mut left = Vec::new();
                positions(held.cache, group, &mut left);
                gates.retain(index, &left);
            }
        }
        Ok(())
    }

    /// The resolved cap in payload bytes; `None` before the prompt has been read, and where it caps nothing.
    pub(crate) fn budget_bytes(&self) -> Option<u64> {
        self.resolved.as_ref().filter(|resolved| !resolved.unlimited).map(|resolved| resolved.bytes)
    }

    /// What grew since the prompt's end under a schedule that evicts once.
    pub(crate) fn appended_bytes(&self, held: u64) -> u64 {
        match (self.policy.schedule(), self.held_after_prompt) {
            (Schedule::Once, Some(before)) => held.saturating_sub(before),
            _ => 0,
        }
    }

    /// Whether `held` bytes are more than the sequence may hold after a step of its answer; once is not for good.
    pub(crate) fn is_over(&self, held: u64) -> bool {
        self.policy.schedule().goes_on() && self.budget_bytes().is_some_and(|budget| held > budget)
    }

    /// First positions whose keys move along with the newest ones, where the policy rotates by slot.
    pub(crate) fn sinks_to_turn(&self) -> Option<usize> {
        (self.policy.rotation() == Rotation::Slot).then(|| self.policy.pins().sink_tokens)
    }

    /// The most that [`Eviction::state_bytes`] was within a step.
    pub(crate) fn peak_state_bytes(&self) -> u64 {
        self.peak_state_bytes
    }

    /// Lets groups grow past the budget, to see that it is noticed.
    #[cfg(test)]
    pub(crate) fn break_caps(&mut self) {
        self.groups.iter_mut().for_each(|group| group.cap = usize::MAX);
    }

    /// Memory of the policy's own state.
    pub(crate) fn state_bytes(&self) -> u64 {
        let sums = self.groups.iter().map(|group| &group.column_sums);
        let floats: usize = sums.chain(&self.step_rows).map(Vec::capacity).sum();
        let scorers: u64 = self.groups.iter().map(|group| group.scorer.state_bytes()).sum();
        let gates = self.gates.as_ref().map_or(0, GateScores::bytes) + self.heads.as_ref().map_or(0, HeadGates::bytes);
        let queries = self.query_sums.as_ref().map_or(0, QuerySums::bytes);
        let two_way = self.two_way_sums.as_ref().map_or(0, TwoWaySums::bytes);
        let channels = self.channels.as_ref().map_or(0, ChannelSums::bytes);
        let choice = self.page_choice.as_ref().map_or(0, PageChoice::bytes);
        scorers + (floats * size_of::<f32>()) as u64 + gates + queries + two_way + choice + channels
    }

    /// What eviction did so far, all turns counted.
    pub(crate) fn report(&self) -> EvictionReport {
        let here: u64 = self.groups.iter().map(|group| group.scorer.nan_rows()).sum();
        EvictionReport { nan_rows: self.report.nan_rows + here, ..self.report }
    }
}

/// Gives every group of a layer the mean of the groups' scores. Groups that keep the same units hold the same ones; should a
/// sequence have come to hold others, each goes on by itself.
fn share(layer: &mut [Option<Units>]) {
    let rows: Vec<&Vec<f32>> = layer.iter().flatten().map(|units| &units.scores).collect();
    let Some(first) = rows.first() else { return };
    if rows.len() < layer.len() || rows.iter().any(|row| row.len() != first.len()) {
        return;
    }
    let mean = |unit: usize| rows.iter().map(|row| f64::from(row[unit])).sum::<f64>() / rows.len() as f64;
    let means: Vec<f32> = (0..first.len()).map(|unit| mean(unit) as f32).collect();
    layer.iter_mut().flatten().for_each(|units| units.scores.copy_from_slice(&means));
}

/// How queries meet keys in the global layers.
fn attention_form(config: &ModelConfig) -> AttentionForm<'_> {
    let pairs = match config.rope.layout {
        RopeLayout::Halves => RotaryPairs::Halves,
        RopeLayout::Interleaved => RotaryPairs::Neighbours,
    };
    AttentionForm { frequencies: &config.rope.global, pairs, scale: config.attention_scale }
}

/// The columns of attention rows over the tokens of `group` ([`KvCache::columns`]).
fn positions(cache: &KvCache, group: KvGroup, out: &mut Vec<u32>) {
    out.clear();
    out.extend(cache.columns(group));
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
