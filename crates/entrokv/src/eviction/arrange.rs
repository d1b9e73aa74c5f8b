//! Decisions of a policy that says of which kind each page is: one plan over the pages of all KV groups, in bytes.
//!
//! What a plan has decided about is settled: its pages keep their tokens, their kind and their score, and can only be freed, by a
//! later plan or to make room. So a tighter budget is fewer of the same pages, and nothing is ever made of codes again.
//!
//! Invariants, each a test of that name in `tests/tiers.rs`:
//! * `tiers_meet_the_budget_and_never_pass_it`, at the prompt's end and after every token.
//! * `tightening_frees_pages_and_moves_none`.
//! * `packing_shows_in_no_logit_while_nothing_is_evicted`, but for the order of sums.

use entrokv_cache::{
    Allotment, Encoding, FateError, Granularity, KvCache, KvGroup, OpenPage, Packing, PageFate, PageKind, PagePlace,
    PagePool, PoolExhausted, TierPage, Tiers,
};

use super::units::Units;
use super::{Eviction, Held};
use crate::coding::RECENT_TOKENS;

/// How the pages of the sinks are stored beside coded ones: rotated codes suit neither their keys nor how much they are read.
const SINK_KIND: PageKind = PageKind::of(Encoding::Q8_0);

/// What is planned for one KV group.
struct GroupPlan {
    group: KvGroup,
    /// Pages at the head of its table that were settled before.
    num_settled: usize,
    /// Places of the tokens of other closed pages in the order they are to be packed in; empty where pages stay as they are.
    order: Vec<u32>,
    /// Its closed pages as they will be, the settled ones first; what is pinned has a score of infinity.
    pages: Vec<TierPage>,
    /// The score that each is settled with: pins are for a decision, only the sinks stay pinned.
    worth: Vec<f32>,
}

impl Eviction {
    /// Gives every closed page its kind, or frees it, so that with the open ones they meet the budget.
    ///
    /// # Errors
    /// [`PoolExhausted`] if the pool has no room for the new pages of some group beside its old ones: it and those after it hold
    /// plain pages then.
    pub(super) fn arrange(
        &mut self,
        held: &mut Held<'_>,
        pool: &mut PagePool,
        tiers: Tiers,
        open: OpenPage,
    ) -> Result<(), PoolExhausted> {
        let Some(resolved) = self.resolved else { return Ok(()) };
        let scored = self.scored(held, |_| true);
        self.peak_state_bytes = self.peak_state_bytes.max(self.state_bytes());
        let written = held.cache.kind();
        let lacks_constants = held.constants.is_empty() && tiers.kinds().any(PageKind::needs_constants);
        let tiers = if lacks_constants { Tiers::of(written) } else { tiers };
        let mut plans: Vec<GroupPlan> = Vec::with_capacity(scored.len());
        for (index, units) in scored.iter().enumerate() {
            let Some(units) = units else { continue };
            plans.push(self.group_plan(
                held.cache,
                self.groups[index].group,
                units,
                resolved.pages_per_group,
                open,
                tiers,
            ));
        }
        let bytes = |kind: PageKind| kind.page_bytes(&self.shape);
        let open_bytes = if held.cache.open_page().is_some() { bytes(written) } else { 0 };
        let kinds: Vec<Vec<Option<PageKind>>> = match self.policy.allotment() {
            Allotment::Global | Allotment::Prices => {
                let all: Vec<TierPage> = plans.iter().flat_map(|plan| &plan.pages).copied().collect();
                let room = resolved.bytes.saturating_sub(open_bytes * plans.len() as u64);
                let mut kinds = tiers.plan(&all, bytes, room).into_iter();
                plans.iter().map(|plan| kinds.by_ref().take(plan.pages.len()).collect()).collect()
            }
            _ => {
                let room = (resolved.bytes / plans.len().max(1) as u64).saturating_sub(open_bytes);
                plans.iter().map(|plan| tiers.plan(&plan.pages, bytes, room)).collect()
            }
        };
        // What goes is freed everywhere before anything needs new frames.
        for (plan, kinds) in plans.iter().zip(&kinds) {
            self.release(held, pool, plan, kinds)?;
        }
        let mut alone = 0.0;
        for (index, (plan, kinds)) in plans.iter().zip(&kinds).enumerate() {
            let units = scored[index].as_ref().expect("every group has a plan");
            let kept = kinds.iter().skip(plan.num_settled).flatten().count();
            alone += self.groups[index].scorer.uor_per_head(&units.spans, units.in_pages(kept).max(1));
            self.encode(held, pool, plan, kinds)?;
            let left = Units::of(held.cache, plan.group, self.policy.granularity());
            self.groups[index].scorer.retain(&left.spans);
            if let Some(gates) = &mut self.gates {
                gates.retain(index, &left.positions);
            }
        }
        (self.report.uor, self.report.uor_per_head) = (1.0, alone / plans.len().max(1) as f64);
        Ok(())
    }

    /// The pages that `group` will have if all stay.
    fn group_plan(
        &self,
        cache: &KvCache,
        group: KvGroup,
        units: &Units,
        budget_pages: usize,
        open: OpenPage,
        tiers: Tiers,
    ) -> GroupPlan {
        let (page_size, table) = (self.shape.page_size, cache.table(group));
        let pins = self.policy.pins();
        let num_settled = cache.num_settled(group);
        let mut pages: Vec<TierPage> = table[..num_settled]
            .iter()
            .map(|page| TierPage { score: page.settled().unwrap_or(f32::NEG_INFINITY), kind: Some(page.kind) })
            .collect();
        let budget = if budget_pages == usize::MAX { units.num_pages() } else { budget_pages };
        let mut is_pinned = vec![false; units.scores.len()];
        let pinned = units.pinned(&pins, budget, open);
        pinned.iter().for_each(|&unit| is_pinned[unit] = true);
        let score = |unit: usize| if is_pinned[unit] { f32::INFINITY } else { units.scores[unit] };
        let mut worth: Vec<f32> = pages.iter().map(|page| page.score).collect();
        let mut order = Vec::new();
        if self.policy.packing() == Packing::Score && units.granularity == Granularity::Token {
            let closed = units.positions.len() - units.num_open();
            order.extend(0..closed as u32);
            // Stable: equals stay in the order of the text, and the pinned ones come first.
            order.sort_by(|&a, &b| score(b as usize).total_cmp(&score(a as usize)));
            for page in order.chunks_exact(page_size) {
                pages.push(TierPage { score: score(page[0] as usize), kind: None });
                worth.push(page.iter().map(|&token| units.scores[token as usize]).fold(f32::NEG_INFINITY, f32::max));
            }
        } else {
            let closed = table.len() - num_settled - usize::from(cache.open_page().is_some());
            for (unit, page) in table[num_settled..][..closed].iter().enumerate() {
                pages.push(TierPage { score: score(unit), kind: page.kind.is_coded().then_some(page.kind) });
                worth.push(units.scores[unit]);
            }
        }
        let sink_pages = pins.sink_pages(page_size).min(pages.len());
        if num_settled == 0 {
            worth[..sink_pages].fill(f32::INFINITY);
        }
        if num_settled == 0 && tiers.top.is_coded() {
            pages[..sink_pages].iter_mut().for_each(|page| page.kind = page.kind.or(Some(SINK_KIND)));
        }
        GroupPlan { group, num_settled, order, pages, worth }
    }

    /// Frees the pages that have no kind, after the tokens of those that are packed have moved.
    ///
    /// # Errors
    /// [`PoolExhausted`] if tokens are to move that forks share, and there is no room for pages of the sequence's own.
    fn release(
        &mut self,
        held: &mut Held<'_>,
        pool: &mut PagePool,
        plan: &GroupPlan,
        kinds: &[Option<PageKind>],
    ) -> Result<(), PoolExhausted> {
        let Held { cache, runner, .. } = held;
        let (settled, new) = kinds.split_at(plan.num_settled);
        let mut pages_freed = 0;
        let mut fates: Vec<PageFate> = Vec::with_capacity(cache.table(plan.group).len());
        let fate = |kind: &Option<PageKind>| if kind.is_some() { PageFate::Keep } else { PageFate::Free };
        if plan.order.is_empty() {
            fates.extend(kinds.iter().map(fate));
        } else {
            // A group's pages fall in score, so that those which stay are its first ones.
            let kept = &plan.order[..new.iter().flatten().count() * self.shape.page_size];
            let mut move_tokens = |from: &[PagePlace], to: &[PagePlace], kept: &[u32]| runner.compact(from, to, kept);
            match cache.compact(pool, plan.group, kept, &mut move_tokens) {
                Ok(applied) => pages_freed += applied.pages_freed,
                Err(FateError::Pool(error)) => return Err(error),
                Err(error) => unreachable!("whole pages of plain tokens stay: {error}"),
            }
            fates.extend(settled.iter().map(fate));
        }
        fates.resize(cache.table(plan.group).len(), PageFate::Keep);
        let applied = cache.apply(pool, plan.group, &fates, &mut |_| ()).expect("closed pages can go");
        self.report.pages_evicted += pages_freed + applied.pages_freed;
        Ok(())
    }

    /// Stores the pages that have stayed as the kinds they are to be of, and settles them.
    fn encode(
        &self,
        held: &mut Held<'_>,
        pool: &mut PagePool,
        plan: &GroupPlan,
        kinds: &[Option<PageKind>],
    ) -> Result<(), PoolExhausted> {
        let Held { cache, runner, constants } = held;
        let mut fates: Vec<PageFate> = kinds.iter().flatten().map(|&kind| PageFate::Recode(kind)).collect();
        fates.resize(cache.table(plan.group).len(), PageFate::Keep);
        let constants = constants.get(self.shape.group_index(plan.group)).and_then(Option::as_ref);
        match cache.apply(pool, plan.group, &fates, &mut |moves| runner.recode(moves, constants)) {
            Ok(_) => {}
            Err(FateError::Pool(error)) => return Err(error),
            Err(error) => unreachable!("closed plain pages can be encoded: {error}"),
        }
        let stayed = plan.worth.iter().zip(kinds).filter(|(_, kind)| kind.is_some());
        cache.settle(plan.group, &stayed.map(|(worth, _)| *worth).collect::<Vec<f32>>());
        Ok(())
    }

    /// Frees the pages that are worth least until every KV group can open one within the budget; `next` is the position to be
    /// written.
    ///
    /// Settled pages go first, by score; then the oldest of an answer, since nothing has scored these yet; then, under the smallest
    /// budgets, what was recent once; the sinks never.
    pub(super) fn make_room_in_bytes(&mut self, held: &mut Held<'_>, pool: &mut PagePool, next: usize) {
        let Some(budget) = self.budget_bytes() else { return };
        let cache = &mut *held.cache;
        let page_size = self.shape.page_size;
        let opened = cache.kind().page_bytes(&self.shape) * self.groups.len() as u64;
        let mut excess = (cache.footprint().global_bytes + opened).saturating_sub(budget);
        if excess == 0 {
            return;
        }
        let sink_pages = self.policy.pins().sink_pages(page_size);
        // (class, score or age, group, place), least worth first.
        let mut pages: Vec<(u8, f32, usize, usize)> = Vec::new();
        for (index, group) in self.groups.iter().enumerate() {
            for (place, page) in cache.table(group.group).iter().enumerate() {
                let age = page.index.0 as f32;
                let is_recent = page.end_position(page_size) as usize + RECENT_TOKENS > next;
                let (class, worth) = match page.settled() {
                    _ if (page.index.0 as usize) < sink_pages => continue,
                    Some(f32::INFINITY) => (2, age),
                    Some(score) => (0, score),
                    None if is_recent => (3, age),
                    None => (1, age),
                };
                pages.push((class, worth, index, place));
            }
        }
        pages.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)).then((b.2, b.3).cmp(&(a.2, a.3))));
        let mut fates: Vec<Vec<PageFate>> =
            self.groups.iter().map(|group| vec![PageFate::Keep; cache.table(group.group).len()]).collect();
        for (_, _, index, place) in pages {
            if excess == 0 {
                break;
            }
            fates[index][place] = PageFate::Free;
            let range = cache.table(self.groups[index].group)[place].range();
            excess = excess.saturating_sub(range.end - range.start);
        }
        for (group, fates) in self.groups.iter().zip(&fates) {
            let applied = cache.apply(pool, group.group, fates, &mut |_| ()).expect("no page is open yet");
            self.report.pages_evicted += applied.pages_freed;
        }
    }
}
