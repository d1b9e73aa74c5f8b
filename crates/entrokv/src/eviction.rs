//! Eviction of one sequence: attention rows in, page fates out.
//!
//! Scoring, pooling heads, allotting the budget, selecting and freeing are separate steps, and all but the bookkeeping
//! lives in `entrokv-cache`. What a policy is shown is in `eviction/shown.rs`, decisions are in `eviction/decisions.rs` and
//! `eviction/arrange.rs`; together they know when each happens (the rules are `docs/architecture.md`, "When pages go"):
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
mod decisions;
mod page_choice;
mod query_sums;
mod report;
mod saved;
mod shown;
mod two_way_sums;
mod units;

use std::sync::Arc;

use entrokv_cache::{
    Budget, BudgetError, CacheShape, EvictionPolicy, Granularity, KvCache, KvGroup, LayerKind, LeastBudget, LogitScale,
    PageCost, PageKind, PageScorer, QueryTap, Reading, Reconstruction, ResolvedBudget, Rotation, RowOrigin, RowTap,
    Schedule, TwoWayTap,
};
use entrokv_kernels::codes::KeyConstants;

use crate::gates::{GateScores, Gates, HeadGates};
use crate::model::ModelRunner;
use crate::sequence::EvictionOptions;

use self::channel_sums::ChannelSums;
use self::page_choice::PageChoice;
pub use self::page_choice::StepReads;
use self::query_sums::QuerySums;
pub(crate) use self::query_sums::UnrotatedQueries;
pub use self::report::EvictionReport;
pub(crate) use self::two_way_sums::LayerRows;
use self::two_way_sums::{Blocks, TwoWaySums};

/// The cap of one turn of a sequence and what keeps it.
#[derive(Clone)]
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
    /// The text of so many tokens has been asked what a probe asks.
    probed: usize,
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

#[derive(Clone)]
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
            probed: 0,
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

    /// Goes on under other `options`, whose policy scores as this one does: another budget, and whatever else is decided once all
    /// that is shown has been shown.
    pub(crate) fn change_cap(&mut self, options: &EvictionOptions) {
        self.policy = Arc::clone(&options.policy);
        self.budget = options.budget;
    }

    /// What decides which pages stay.
    pub(crate) fn policy(&self) -> &dyn EvictionPolicy {
        &*self.policy
    }

    /// Whether nothing is to go yet, not until [`Eviction::begin`].
    pub(crate) fn waits(&self) -> bool {
        self.least_text().is_some() && !self.is_due
    }

    /// How many tokens there must be for a policy that waits for the answer; `None` for others.
    pub(crate) fn least_text(&self) -> Option<usize> {
        match self.policy.schedule() {
            Schedule::AfterAnswer(tokens) => Some(tokens as usize),
            _ => None,
        }
    }

    /// The answer is over.
    pub(crate) fn begin(&mut self) {
        self.is_due = true;
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
        evicts
            && self.probed < len
            && self.policy.rows() == RowOrigin::Probe
            && self.policy.needs().prompt != RowTap::None
    }

    /// Where reading from `position` on pauses for an eviction before the prompt's end, if the policy wants that.
    pub(crate) fn pause_after(&self, position: usize) -> Option<usize> {
        self.policy.schedule().pause_after(position)
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
