//! Sinks that move along with the newest tokens: rotation by slot, at the cost of rewriting the sinks' keys alone.
//!
//! StreamingLLM (Xiao et al. 2023, section 3.2) counts distances in the cache and not in the text: what it holds is numbered
//! from 0, keys are rotated by their number, queries by theirs. A score depends on the difference of two rotations only (Su et
//! al. 2021, equation 16). Once `E` positions between the sinks and the newest tokens are gone, the newest keys and every
//! query stand `E` ahead of their numbers, all alike, and so the scores are the same if nothing is turned back but the sinks
//! are turned forward by `E`: a token with `e` of those positions before it, by `E - e`. Positions, block tables and policies
//! stay what they were.
//!
//! * Keys are turned anew each time from what was cached, so that roundings do not add up.
//! * What moves is the unbroken run of first tokens: where pages are evicted all tokens of a sink's page, those that are no
//!   sinks too; where tokens are, the sinks alone.
//! * Sinks stay where they were turned to when a later turn has another policy.

use std::collections::BTreeMap;

use entrokv_cache::{KvCache, KvGroup, PagePlace, PagePool, PoolExhausted, ResidentPage};

use crate::eviction::Held;

/// First keys of a page, to be rotated further than they were when they were cached.
#[derive(Clone, Debug)]
pub struct TurnedPage {
    /// A plain page.
    pub place: PagePlace,
    /// Its first keys as they were cached, `[tokens, head_dim]`.
    pub keys: Vec<f32>,
    /// By how many positions each, `[tokens]`.
    pub by: Vec<u32>,
}

/// The sinks of one sequence, once they have been turned.
#[derive(Clone, Debug, Default)]
pub(crate) struct TurnedSinks {
    groups: BTreeMap<KvGroup, FirstKeys>,
}

/// The first tokens of a KV group.
#[derive(Clone, Debug)]
struct FirstKeys {
    /// As cached, `[tokens, head_dim]`, from position 0 on.
    keys: Vec<f32>,
    /// Positions that the group had given up when they were turned last.
    num_evicted: u32,
}

impl TurnedSinks {
    /// Turns the first tokens of every KV group of global layers, up to the end of the page of the last of `sink_tokens`, by as
    /// many positions as the group has given up; `held.constants` are those of the cache's codes, or none.
    ///
    /// # Errors
    /// [`PoolExhausted`] if forks share the pages of these tokens and there is no room for pages of the sequence's own: groups
    /// that were not reached keep their keys as they were.
    pub(crate) fn follow(
        &mut self,
        held: Held<'_>,
        pool: &mut PagePool,
        sink_tokens: usize,
    ) -> Result<(), PoolExhausted> {
        let Held { cache, constants, runner } = held;
        let shape = cache.shape().clone();
        let (page_size, head_dim) = (shape.page_size, shape.head_dim);
        // Of one layer at a time, and only where something is turned for the first time.
        let mut vectors = (u32::MAX, Vec::new());
        for group in shape.global_groups() {
            let num_evicted = (cache.logical_len() - cache.resident_tokens(group)) as u32;
            if num_evicted == self.groups.get(&group).map_or(0, |first| first.num_evicted) {
                continue;
            }
            let first = self.groups.entry(group).or_insert_with(|| {
                if vectors.0 != group.layer {
                    vectors = (group.layer, runner.token_vectors(cache, group.layer, constants));
                }
                let run = first_run(cache, group, sink_tokens.next_multiple_of(page_size));
                FirstKeys { keys: vectors.1[group.kv_head as usize].keys[..run * head_dim].to_vec(), num_evicted: 0 }
            });
            let num_pages = first.num_pages(cache, group);
            cache.own_pages(pool, group, num_pages, &mut |moves| runner.copy_pages(moves))?;
            first.num_evicted = num_evicted;
            runner.turn_keys(&first.turned(cache, group));
        }
        Ok(())
    }

    /// Whether nothing has been turned.
    pub(crate) fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Bytes of the keys kept.
    pub(crate) fn state_bytes(&self) -> u64 {
        let entry = size_of::<(KvGroup, FirstKeys)>();
        self.groups.values().map(|first| (entry + first.keys.capacity() * size_of::<f32>()) as u64).sum()
    }
}

impl FirstKeys {
    /// How many pages of `group` begin with one of these tokens.
    fn num_pages(&self, cache: &KvCache, group: KvGroup) -> usize {
        let (page_size, head_dim) = (cache.shape().page_size, cache.shape().head_dim);
        let num_known = (self.keys.len() / head_dim) as u32;
        let is_known = |page: &&ResidentPage| page.positions(page_size).next().is_some_and(|at| at < num_known);
        cache.table(group).iter().take_while(is_known).count()
    }

    /// The pages of `group` that begin with one of these tokens, and how far they are turned now.
    fn turned(&self, cache: &KvCache, group: KvGroup) -> Vec<TurnedPage> {
        let (page_size, head_dim) = (cache.shape().page_size, cache.shape().head_dim);
        let num_known = (self.keys.len() / head_dim) as u32;
        let mut pages = Vec::new();
        let mut num_before = 0;
        for page in cache.table(group) {
            let place = PagePlace { kind: page.kind, range: page.range() };
            let mut turned = TurnedPage { place, keys: Vec::new(), by: Vec::new() };
            for (position, number) in page.positions(page_size).zip(num_before..).take_while(|(p, _)| *p < num_known) {
                turned.keys.extend_from_slice(&self.keys[position as usize * head_dim..][..head_dim]);
                turned.by.push(self.num_evicted - (position - number));
            }
            if turned.by.is_empty() {
                break;
            }
            num_before += page.len;
            pages.push(turned);
        }
        pages
    }
}

/// How many tokens `group` holds of an unbroken run from position 0 on, `most` at most.
fn first_run(cache: &KvCache, group: KvGroup, most: usize) -> usize {
    let pages = cache.table(group).iter();
    let positions = pages.flat_map(|page| page.positions(cache.shape().page_size)).take(most);
    positions.zip(0..).take_while(|(position, place)| position == place).count()
}
