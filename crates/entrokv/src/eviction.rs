//! Eviction of one sequence: attention rows in, page fates out.
//!
//! Scoring, pooling heads, allotting the budget, selecting and freeing are separate steps, and all but the bookkeeping
//! lives in `entrokv-cache`. This file knows when each happens (the rules are `docs/architecture.md`, "When pages go"):
//! * while a prompt is read, the rows its policy asked for are collected ([`Eviction::tap_prompt`], [`Eviction::observe`]);
//! * at its end the budget is fixed and everything over it goes ([`Eviction::end_prompt`]); it is fixed again when a coded
//!   cache begins to encode later than that ([`Eviction::reprice`]);
//! * a rolling policy also sees the row of every token generated, and evicts a page of each KV group before it opens
//!   another ([`Eviction::make_room`]).
//!
//! Only global layers are ever scored or freed; window layers look after themselves.

use std::ops::Range;
use std::sync::Arc;

use entrokv_cache::{
    Allotment, AttentionRows, Budget, BudgetError, CacheShape, EvictionPolicy, GroupUnits, KvCache, KvGroup, LayerKind,
    OpenPage, PageCost, PageFate, PageIndex, PagePool, PageScorer, PageSpan, ResidentTokens, ResolvedBudget, RowSource,
    RowTap, Schedule, Sharing, TokenTap, pages_to_evict, select_pages,
};
use entrokv_kernels::attention::Tap;
use entrokv_kernels::codes::KeyConstants;
use entrokv_kernels::threads::Threads;

use crate::model::ModelRunner;
use crate::sequence::EvictionOptions;
use crate::store::TokenVectors;

/// What eviction did to a sequence so far.
#[derive(Clone, Copy, Debug, PartialEq)]
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
    /// Bytes held right after the last eviction at a prompt's end.
    held_after_prompt: Option<u64>,
    report: EvictionReport,
    scratch: Scratch,
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
    /// Reads keys and values.
    pub(crate) runner: &'a dyn ModelRunner,
}

/// Buffers of the decode path.
#[derive(Default)]
struct Scratch {
    positions: Vec<u32>,
    indices: Vec<PageIndex>,
    spans: Vec<PageSpan>,
}

impl Eviction {
    /// A cap for a sequence of `shape` whose pages may weigh `cost`: as written, for the first are not encoded at once.
    ///
    /// # Errors
    /// An absolute budget below what the policy pins.
    pub(crate) fn new(options: &EvictionOptions, shape: &Arc<CacheShape>, cost: PageCost) -> Result<Self, BudgetError> {
        let policy = Arc::clone(&options.policy);
        options.budget.check(shape, cost, &policy.pins())?;
        let (mut groups, mut first_group) = (Vec::new(), Vec::new());
        for (layer, layer_kind) in shape.layers.iter().enumerate() {
            if matches!(layer_kind, LayerKind::Window(_)) {
                first_group.push(None);
                continue;
            }
            first_group.push(Some(groups.len()));
            for kv_head in 0..shape.num_kv_heads as u32 {
                let group = KvGroup { layer: layer as u32, kv_head };
                let scorer = policy.scorer(shape, group);
                groups.push(ScoredGroup { group, scorer, column_sums: Vec::new(), cap: usize::MAX });
            }
        }
        Ok(Self {
            policy,
            budget: options.budget,
            shape: Arc::clone(shape),
            prompt_tokens: 0,
            resolved: None,
            num_summed_rows: vec![0; shape.layers.len()],
            groups,
            first_group,
            held_after_prompt: None,
            report: EvictionReport::default(),
            scratch: Scratch::default(),
        })
    }

    /// Goes on counting where the last turn of the sequence ended.
    pub(crate) fn carry_totals(&mut self, last: &Self) {
        self.report = EvictionReport { budget_raised: false, ..last.report() };
    }

    /// Whether the policy is shown rows in the current phase, so that no step may run twice.
    pub(crate) fn is_watching(&self) -> bool {
        let needs = self.policy.needs();
        if self.resolved.is_some() { needs.step_rows } else { needs.prompt != RowTap::None }
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
    pub(crate) fn tap_answer(&self, layer: usize) -> Tap {
        if self.first_group[layer].is_some() && self.policy.needs().step_rows && self.resolved.is_some() {
            Tap::Rows { from_row: 0, out: Vec::new() }
        } else {
            Tap::None
        }
    }

    /// Shows the policy what attention recorded in `layer`.
    pub(crate) fn observe(&mut self, cache: &KvCache, layer: usize, source: RowSource, tap: Tap, threads: &Threads) {
        let Some(first) = self.first_group[layer] else { return };
        let groups = &mut self.groups[first..first + self.shape.num_kv_heads];
        match tap {
            Tap::None => {}
            Tap::ColumnSums { out } => {
                for (group, sums) in groups.iter_mut().zip(out) {
                    group.column_sums = sums;
                }
            }
            Tap::Rows { out, .. } => {
                let group_size = self.shape.group_size;
                // Groups know nothing of each other: who observes which cannot show.
                threads.for_each_chunk(groups, 1, |kv_head, group| {
                    let mut columns = Vec::new();
                    positions(cache, group[0].group, &mut columns);
                    let (positions, rows) = (columns.as_slice(), out[kv_head].as_slice());
                    group[0].scorer.observe(AttentionRows { source, group_size, positions, rows });
                });
            }
        }
    }

    /// Fixes the budget of a prompt that has just been read, its pages weighing `cost`, and frees what is over it.
    pub(crate) fn end_prompt(&mut self, held: Held<'_>, pool: &mut PagePool, cost: PageCost) {
        let cache = &*held.cache;
        self.prompt_tokens = cache.logical_len();
        let keep = self.resolve(cost);
        for group in &mut self.groups {
            if self.num_summed_rows[group.group.layer as usize] > 0 {
                positions(cache, group.group, &mut self.scratch.positions);
                let num_rows = self.num_summed_rows[group.group.layer as usize];
                group.scorer.observe(AttentionRows {
                    source: RowSource::ColumnSums { num_rows },
                    group_size: self.shape.group_size,
                    positions: &self.scratch.positions,
                    rows: &group.column_sums,
                });
                group.column_sums = Vec::new();
            }
            group.scorer.end_prompt();
        }
        self.groups.iter_mut().for_each(|group| group.cap = keep);
        let open = if cache.open_page().is_some() { OpenPage::Newest } else { OpenPage::None };
        let scores = self.scores(&held, |table_len| table_len > keep);
        if !matches!(self.policy.allotment(), Allotment::Uniform) && scores.iter().all(Option::is_some) {
            self.allot(&held, &scores, keep, open);
        }
        let cache = held.cache;
        let pins = self.policy.pins();
        let (mut pages_held, mut alone) = (0.0, 0.0);
        for (group, scores) in self.groups.iter_mut().zip(&scores) {
            let table_len = cache.table(group.group).len();
            let Some(scores) = scores.as_ref().filter(|_| table_len > group.cap) else {
                (pages_held, alone) = (pages_held + 1.0, alone + 1.0);
                continue;
            };
            self.scratch.read(cache, group.group);
            let pinned = pins.pinned(&self.scratch.indices, self.shape.page_size, keep, open);
            let kept = select_pages(scores, group.cap, &pinned);
            alone += group.scorer.uor_per_head(&self.scratch.spans, group.cap);
            let mut fates = vec![PageFate::Free; table_len];
            for page in kept.iter() {
                fates[page] = PageFate::Keep;
            }
            self.report.pages_evicted += (table_len - kept.len()) as u64;
            cache
                .apply(pool, group.group, &fates, &mut |_| ())
                .expect("the open page is pinned, and no page changes its kind");
            self.scratch.read(cache, group.group);
            group.scorer.retain(&self.scratch.spans);
            pages_held += cache.table(group.group).len() as f64 / kept.len() as f64;
        }
        if !self.groups.is_empty() {
            let num_groups = self.groups.len() as f64;
            (self.report.uor, self.report.uor_per_head) = (pages_held / num_groups, alone / num_groups);
        }
    }

    /// Shares `keep` pages a group out among the groups by their scores.
    fn allot(&mut self, held: &Held<'_>, scores: &[Option<Vec<f32>>], keep: usize, open: OpenPage) {
        let (pins, page_size) = (self.policy.pins(), self.shape.page_size);
        let mut pinned = Vec::with_capacity(self.groups.len());
        for group in &self.groups {
            self.scratch.read(held.cache, group.group);
            pinned.push(pins.pinned(&self.scratch.indices, page_size, keep, open));
        }
        let least = pins.smallest_pages(page_size);
        let units: Vec<GroupUnits<'_>> = scores
            .iter()
            .zip(&pinned)
            .map(|(scores, pinned)| GroupUnits { scores: scores.as_deref().unwrap_or(&[]), pinned, least })
            .collect();
        let caps = self.policy.allotment().counts(&units, self.shape.num_kv_heads, keep);
        self.groups.iter_mut().zip(caps).for_each(|(group, cap)| group.cap = cap);
    }

    /// The page scores of every KV group, those of layers in which no table `is_long_enough` left out.
    fn scores(&mut self, held: &Held<'_>, is_long_enough: impl Fn(usize) -> bool) -> Vec<Option<Vec<f32>>> {
        let cache = &*held.cache;
        let mut all = Vec::with_capacity(self.groups.len());
        for groups in self.groups.chunks_mut(self.shape.num_kv_heads) {
            if !groups.iter().any(|group| is_long_enough(cache.table(group.group).len())) {
                all.resize(all.len() + groups.len(), None);
                continue;
            }
            let layer = groups[0].group.layer;
            let vectors = match self.policy.needs().tokens {
                TokenTap::None => vec![TokenVectors::default(); groups.len()],
                TokenTap::Keys | TokenTap::KeysAndValues => held.runner.token_vectors(cache, layer, held.constants),
            };
            let first = all.len();
            for (group, TokenVectors { keys, values }) in groups.iter_mut().zip(&vectors) {
                self.scratch.read(cache, group.group);
                positions(cache, group.group, &mut self.scratch.positions);
                let tokens = ResidentTokens { positions: &self.scratch.positions, keys, values };
                let mut scores = Vec::new();
                group.scorer.score(&self.scratch.spans, tokens, &mut scores);
                all.push(Some(scores));
            }
            if self.policy.sharing() == Sharing::Layer {
                share(&mut all[first..]);
            }
        }
        all
    }

    /// Fixes the budget anew where pages weigh something else from now on: the same bytes hold more of them.
    pub(crate) fn reprice(&mut self, cost: PageCost) {
        if let Some(before) = self.resolved.as_ref().map(|resolved| resolved.pages_per_group) {
            let more = self.resolve(cost).saturating_sub(before);
            // Codes weigh less the more of a group's pages they are, so shares that fitted still do.
            self.groups.iter_mut().for_each(|group| group.cap = group.cap.saturating_add(more));
        }
    }

    /// Fixes the budget; the pages each KV group may hold.
    fn resolve(&mut self, cost: PageCost) -> usize {
        let resolved = self.budget.resolve(&self.shape, cost, self.prompt_tokens, &self.policy.pins());
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

    /// Frees a page of each KV group that is about to open one beyond its budget; `next` is the position to be written.
    pub(crate) fn make_room(&mut self, held: Held<'_>, pool: &mut PagePool, next: usize) {
        if self.resolved.as_ref().is_none_or(|resolved| resolved.unlimited) {
            return;
        }
        let opens_page = next.is_multiple_of(self.shape.page_size);
        if !opens_page || self.policy.schedule() == Schedule::Once || next < held.cache.logical_len() {
            return;
        }
        // With shares of the budget a group may have room where its neighbours have not.
        let least = self.groups.iter().map(|group| group.cap).min().unwrap_or(0);
        let scores = self.scores(&held, |table_len| table_len >= least);
        let (cache, pins) = (held.cache, self.policy.pins());
        for (group, scores) in self.groups.iter_mut().zip(&scores) {
            let table_len = cache.table(group.group).len();
            let Some(scores) = scores.as_ref().filter(|_| table_len >= group.cap) else { continue };
            self.scratch.read(cache, group.group);
            let pinned = pins.pinned(&self.scratch.indices, self.shape.page_size, group.cap, OpenPage::Next);
            let mut fates = vec![PageFate::Keep; table_len];
            for page in pages_to_evict(scores, &pinned, group.cap - 1) {
                fates[page] = PageFate::Free;
                self.report.pages_evicted += 1;
            }
            cache
                .apply(pool, group.group, &fates, &mut |_| ())
                .expect("no page is open here, and none changes its kind");
        }
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

    /// Memory of the policy's own state.
    pub(crate) fn state_bytes(&self) -> u64 {
        self.groups.iter().map(|g| g.scorer.state_bytes() + (g.column_sums.capacity() * size_of::<f32>()) as u64).sum()
    }

    /// What eviction did so far, all turns counted.
    pub(crate) fn report(&self) -> EvictionReport {
        let here: u64 = self.groups.iter().map(|group| group.scorer.nan_rows()).sum();
        EvictionReport { nan_rows: self.report.nan_rows + here, ..self.report }
    }
}

/// Gives every group the mean of the groups' page scores. Groups that keep the same pages hold the same pages; should a sequence
/// have come to hold others, each goes on by itself.
fn share(scores: &mut [Option<Vec<f32>>]) {
    let rows: Vec<&Vec<f32>> = scores.iter().flatten().collect();
    let Some(first) = rows.first() else { return };
    if rows.len() < scores.len() || rows.iter().any(|row| row.len() != first.len()) {
        return;
    }
    let mean = |page: usize| rows.iter().map(|row| f64::from(row[page])).sum::<f64>() / rows.len() as f64;
    let means: Vec<f32> = (0..first.len()).map(|page| mean(page) as f32).collect();
    scores.iter_mut().flatten().for_each(|row| row.copy_from_slice(&means));
}

/// Absolute positions of the tokens of `group`, ascending: the columns of its attention rows.
fn positions(cache: &KvCache, group: KvGroup, out: &mut Vec<u32>) {
    out.clear();
    for page in cache.table(group) {
        let first = page.first_position(cache.shape().page_size);
        out.extend(first..first + page.len);
    }
}

impl Scratch {
    /// Notes the resident pages of `group`.
    fn read(&mut self, cache: &KvCache, group: KvGroup) {
        self.indices.clear();
        self.spans.clear();
        let page_size = cache.shape().page_size;
        for page in cache.table(group) {
            self.indices.push(page.index);
            self.spans.push(PageSpan { first_position: page.first_position(page_size), len: page.len });
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
