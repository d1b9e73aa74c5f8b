//! Decisions about the units of every KV group: at a prompt's end, and ahead of a page to be opened.
//!
//! Scoring, sharing the budget out, selecting and freeing are steps of their own. Policies of tiers decide in `arrange.rs`.

use entrokv_cache::{
    Allotment, AttentionForm, AttentionRows, FateError, Granularity, GroupUnits, KvGroup, OpenPage, OutputTap,
    PageCost, PageFate, PagePlace, PagePool, Pins, PoolExhausted, QueryMoments, Release, ResidentTokens,
    ResolvedBudget, RotaryPairs, RowSource, Sharing, TokenTap, select_pages, select_tokens,
};
use entrokv_kernels::rope::RopeLayout;

use super::units::Units;
use super::{Eviction, Held, ScoredGroup};
use crate::config::ModelConfig;
use crate::model::ModelRunner;
use crate::store::TokenVectors;

impl Eviction {
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
                cache.columns(group.group, &mut columns);
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
    pub(super) fn scored(&mut self, held: &Held<'_>, is_long_enough: impl Fn(usize) -> bool) -> Vec<Option<Units>> {
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
                held.cache.columns(group, &mut left);
                gates.retain(index, &left);
            }
        }
        Ok(())
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
