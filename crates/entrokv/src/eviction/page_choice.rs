//! Which of the pages it holds a step of decoding reads, where the policy has it read a few.
//!
//! The ranges of the keys are taken from the pages as they are stored, once a page is full: at a prompt's end, and while decoding
//! before another page is opened. So they are those of what attention would read, whatever turn or file a page comes from, but for
//! pages that have become codes since. The choice is made inside the forward pass, layer by layer, from the queries that attention
//! is about to use; of one sequence alone, each KV head for itself, so that neither threads nor batches show.

use entrokv_cache::{KeyRanges, KvCache, KvGroup, PagePlace, PageReads, ResidentPage};
use entrokv_kernels::attention::SegmentList;
use entrokv_kernels::codes::KeyConstants;
use entrokv_kernels::threads::Threads;

use crate::model::ModelRunner;
use crate::store::KeyPages;

/// What the last step of decoding has read, over the KV groups of all global layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepReads {
    /// Pages read.
    pub pages_read: u64,
    /// Pages held.
    pub pages_held: u64,
}

/// What is known of the pages of a sequence, and how they are chosen.
#[derive(Clone)]
pub(super) struct PageChoice {
    reads: PageReads,
    head_dim: usize,
    /// What the model multiplies dot products with.
    logit_scale: f32,
    /// Of each KV group of the global layers.
    ranges: Vec<KeyRanges>,
    /// What the last step has read of each.
    last: Vec<StepReads>,
    /// Places of the pages read, of each KV head of the layer chosen for last; none where it read all.
    places: Vec<Vec<usize>>,
}

impl PageChoice {
    /// For `num_groups` KV groups of global layers with keys of `head_dim` elements.
    pub(super) fn new(reads: PageReads, num_groups: usize, head_dim: usize, logit_scale: f32) -> Self {
        let (ranges, last) = (vec![KeyRanges::new(head_dim); num_groups], vec![StepReads::default(); num_groups]);
        Self { reads, head_dim, logit_scale, ranges, last, places: Vec::new() }
    }

    /// Takes the ranges of full pages that it does not have yet, of the KV groups `groups`, and forgets those of pages that are gone;
    /// `constants` are those of all groups of `cache`, or none.
    pub(super) fn follow(
        &mut self,
        groups: &[KvGroup],
        cache: &KvCache,
        constants: &[Option<KeyConstants>],
        runner: &dyn ModelRunner,
    ) {
        let page_size = cache.shape().page_size;
        let (mut pages, mut firsts) = (Vec::new(), Vec::new());
        for (group, ranges) in groups.iter().zip(&mut self.ranges) {
            let table = cache.table(*group);
            let held: Vec<u32> = table.iter().map(|page| page.first_position(page_size)).collect();
            ranges.retain(&held);
            let known = ranges.first_positions().len();
            let full = table.iter().zip(held).skip(known).filter(|(page, _)| page.len as usize == page_size);
            let (places, first): (Vec<PagePlace>, Vec<u32>) =
                full.map(|(page, first)| (PagePlace { kind: page.kind, range: page.range() }, first)).unzip();
            let constants = constants.get(cache.shape().group_index(*group)).and_then(Option::as_ref);
            pages.push(KeyPages { places, constants });
            firsts.push(first);
        }
        let taken = runner.key_ranges(&pages);
        for ((ranges, firsts), taken) in self.ranges.iter_mut().zip(firsts).zip(taken) {
            firsts
                .iter()
                .zip(taken.chunks_exact(2 * self.head_dim))
                .for_each(|(first, range)| ranges.push(*first, range));
        }
    }

    /// The lists that attention reads in `layer` instead of `held`, one a KV head, for `queries` `[num_heads, head_dim]` after RoPE;
    /// `first_group` is the layer's first KV group.
    pub(super) fn choose(
        &mut self,
        layer: usize,
        first_group: usize,
        queries: &[f32],
        held: &[SegmentList],
        threads: &Threads,
    ) -> Option<Vec<SegmentList>> {
        let last = &mut self.last[first_group..first_group + held.len()];
        for (last, list) in last.iter_mut().zip(held) {
            let pages_held = list.segments().len() as u64;
            *last = StepReads { pages_read: pages_held, pages_held };
        }
        self.places.clear();
        if layer < self.reads.first_layer {
            return None;
        }
        self.places.resize(held.len(), Vec::new());
        let group_len = queries.len() / held.len();
        threads.for_each_chunk(&mut self.places, 1, |kv_head, places| {
            let (list, ranges) = (&held[kv_head], &self.ranges[first_group + kv_head]);
            let queries = &queries[kv_head * group_len..(kv_head + 1) * group_len];
            let firsts: Vec<u32> = list.segments().iter().map(|segment| segment.position).collect();
            let scores = self.reads.scores(queries, self.head_dim, self.logit_scale, ranges);
            places[0] = self.reads.choose(&scores, ranges, &firsts, list.page_size());
        });
        let chosen: Vec<SegmentList> =
            held.iter().zip(&self.places).map(|(list, places)| list.of_places(places)).collect();
        last.iter_mut().zip(&chosen).for_each(|(last, list)| last.pages_read = list.segments().len() as u64);
        Some(chosen)
    }

    /// `rows` over the tokens read, `[group_size, tokens]`, as rows over all that `table`, of the layer chosen for last, holds: what was
    /// not read got nothing.
    pub(super) fn spread(&self, kv_head: usize, table: &[ResidentPage], rows: &[f32], group_size: usize) -> Vec<f32> {
        let Some(places) = self.places.get(kv_head) else { return rows.to_vec() };
        let num_tokens: usize = table.iter().map(|page| page.len as usize).sum();
        let mut spread = vec![0.0; group_size * num_tokens];
        let num_read = rows.len() / group_size;
        for (row, spread) in rows.chunks_exact(num_read).zip(spread.chunks_exact_mut(num_tokens)) {
            let (mut row, mut read, mut first) = (row, places.iter().peekable(), 0);
            for (place, page) in table.iter().enumerate() {
                let len = page.len as usize;
                if read.next_if_eq(&&place).is_some() {
                    let (of_page, rest) = row.split_at(len);
                    spread[first..first + len].copy_from_slice(of_page);
                    row = rest;
                }
                first += len;
            }
        }
        spread
    }

    /// What the last step has read.
    pub(super) fn last(&self) -> StepReads {
        let sum = |count: fn(&StepReads) -> u64| self.last.iter().map(count).sum();
        StepReads { pages_read: sum(|last| last.pages_read), pages_held: sum(|last| last.pages_held) }
    }

    /// Bytes it takes.
    pub(super) fn bytes(&self) -> u64 {
        self.ranges.iter().map(|ranges| size_of::<KeyRanges>() as u64 + ranges.heap_bytes()).sum::<u64>()
            + (self.last.capacity() * size_of::<StepReads>()) as u64
    }
}
