//! What attention reads of a sequence, kept from step to step.
//!
//! A step of decoding adds one token to tens of thousands of pages. Making lists of them from the block tables each time took
//! a tenth of the step, on one thread; so the lists follow the tables instead, from the first page on that has changed.
//!
//! Invariant, a test of that name: `lists_that_followed_are_lists_made_anew`.

use entrokv_cache::{CacheShape, KvCache, KvGroup, ResidentPage, Revision};
use entrokv_kernels::attention::{Segment, SegmentList};

use crate::store::format;

/// The lists of segments of one sequence, which follow the block tables of its cache.
#[derive(Debug)]
pub struct SegmentLists {
    /// In the order of [`CacheShape::groups`].
    lists: Vec<SegmentList>,
    /// Those of the tables when they were read last.
    revisions: Vec<Revision>,
}

/// The block tables of a sequence and the segments they are to attention, at one moment.
#[derive(Clone, Copy, Debug)]
pub struct CacheView<'a> {
    cache: &'a KvCache,
    lists: &'a [SegmentList],
}

impl SegmentLists {
    /// Lists for a cache of `shape` that holds nothing yet.
    pub fn new(shape: &CacheShape) -> Self {
        let list = SegmentList::new(shape.page_size, shape.head_dim);
        Self { lists: vec![list; shape.num_groups()], revisions: vec![Revision::default(); shape.num_groups()] }
    }

    /// Brings the lists up to date with `cache`, always the same one.
    pub fn follow<'a>(&'a mut self, cache: &'a KvCache) -> CacheView<'a> {
        let page_size = cache.shape().page_size;
        for ((group, list), revision) in cache.shape().groups().zip(&mut self.lists).zip(&mut self.revisions) {
            // The last page may have got tokens.
            let num_same = cache.first_changed(group, *revision).min(list.segments().len().saturating_sub(1));
            list.truncate(num_same);
            cache.table(group)[num_same..].iter().for_each(|page| list.push(segment(page, page_size)));
            list.shrink();
            *revision = cache.revision(group);
        }
        CacheView { cache, lists: &self.lists }
    }

    /// Bytes the lists take.
    pub fn heap_bytes(&self) -> u64 {
        let own = self.lists.capacity() * size_of::<SegmentList>() + self.revisions.capacity() * size_of::<Revision>();
        own as u64 + self.lists.iter().map(SegmentList::heap_bytes).sum::<u64>()
    }
}

impl<'a> CacheView<'a> {
    /// The block tables.
    pub fn cache(&self) -> &'a KvCache {
        self.cache
    }

    /// What attention reads in `layer`, a list for each KV head.
    pub fn segments(&self, layer: usize) -> &'a [SegmentList] {
        let first = self.cache.shape().group_index(KvGroup { layer: layer as u32, kv_head: 0 });
        &self.lists[first..first + self.cache.shape().num_kv_heads]
    }
}

fn segment(page: &ResidentPage, page_size: usize) -> Segment {
    Segment {
        keys: format(page.kind.keys),
        values: format(page.kind.values),
        // Attention refuses what is not inside its memory, so that nothing need be checked here.
        frame: page.range().start as usize,
        position: page.first_position(page_size),
        len: page.len,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use entrokv_cache::{Encoding, LayerKind, PageFate, PageKind, PagePool};

    use super::*;

    /// SplitMix64.
    fn random(state: &mut u64) -> u64 {
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A global and a window layer of two KV heads under a random history: growth by a token or a chunk, pages freed and
    /// re-encoded, tokens moved together, tokens forgotten again, windows that slide. Lists follow at random moments, so that they
    /// miss any number of revisions.
    #[test]
    fn lists_that_followed_are_lists_made_anew() {
        for seed in 0..40 {
            let layers = vec![LayerKind::Global, LayerKind::Window(40)];
            let shape = Arc::new(CacheShape::new(layers, 2, 2, 32, 16).unwrap());
            let mut pool = PagePool::new(64 << 20);
            let mut cache = KvCache::new(Arc::clone(&shape), PageKind::F16);
            let mut lists = SegmentLists::new(&shape);
            let mut state = seed;
            let mut largest = 0;
            for step in 0..300 {
                match random(&mut state) % 8 {
                    0 => cache.grow(&mut pool, random(&mut state) as usize % 200).unwrap(),
                    1 | 2 => cache.grow(&mut pool, 1).unwrap(),
                    3 | 4 => {
                        let group = KvGroup { layer: 0, kv_head: random(&mut state) as u32 % 2 };
                        let (one_in, open) = (1 + random(&mut state) % 20, cache.open_page());
                        let fate = |page: &ResidentPage| match random(&mut state) % (2 * one_in) {
                            _ if Some(page.index) == open => PageFate::Keep,
                            0 => PageFate::Free,
                            1 if !page.kind.is_coded() => PageFate::Recode(PageKind::of(Encoding::Tq3)),
                            _ => PageFate::Keep,
                        };
                        let fates: Vec<PageFate> = cache.table(group).iter().map(fate).collect();
                        cache.apply(&mut pool, group, &fates, &mut |_| ()).unwrap();
                    }
                    5 => {
                        // Tokens moved together: the pages that stay are the first ones, full of others.
                        let group = KvGroup { layer: 0, kv_head: random(&mut state) as u32 % 2 };
                        let closed = cache.table(group).len() - usize::from(cache.open_page().is_some());
                        if cache.is_by_token(group) && random(&mut state).is_multiple_of(4) {
                            let kept: Vec<u32> = (0..16 * closed as u32 / 32 * 16).map(|token| 2 * token).collect();
                            cache.compact(&mut pool, group, &kept, &mut |_, _, _| ()).unwrap();
                        }
                    }
                    6 => {
                        let len = cache.logical_len();
                        cache.grow(&mut pool, 1 + random(&mut state) as usize % 40).unwrap();
                        if random(&mut state).is_multiple_of(2) {
                            let _ = lists.follow(&cache);
                        }
                        cache.truncate(&mut pool, len);
                    }
                    _ => {
                        cache.slide_windows(&mut pool);
                    }
                }
                if random(&mut state).is_multiple_of(3) {
                    let mut anew = SegmentLists::new(&shape);
                    let _ = anew.follow(&cache);
                    let _ = lists.follow(&cache);
                    assert_eq!(lists.lists, anew.lists, "seed {seed}, step {step}");
                    for (group, list) in shape.groups().zip(&lists.lists) {
                        let want: Vec<Segment> = cache.table(group).iter().map(|page| segment(page, 16)).collect();
                        assert_eq!(list.segments(), want, "seed {seed}, step {step}, {group:?}");
                        assert_eq!(list.num_tokens(), cache.resident_tokens(group));
                    }
                    largest = largest.max(lists.heap_bytes());
                }
            }
            assert!(largest > 0 && cache.logical_len() > 1000, "{largest}, {}", cache.logical_len());
            cache.release(&mut pool);
        }
    }
}
