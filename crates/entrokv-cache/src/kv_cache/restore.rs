//! A cache made anew from what was noted of another: how a sequence comes back from a file.

use std::sync::Arc;

use thiserror::Error;

use crate::kv_cache::KvCache;
use crate::kv_cache::table::Table;
use crate::page::PageIndex;
use crate::page_kind::{KindShapeError, PageKind};
use crate::pool::{PagePool, PoolExhausted};
use crate::shape::{CacheShape, KvGroup, LayerKind};

/// What there is to know of a page beside its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageRecord {
    /// Which page of the sequence it is.
    pub index: PageIndex,
    /// How its elements are stored.
    pub kind: PageKind,
    /// Tokens filled, from the page's first slot on.
    pub len: u32,
    /// Absolute positions of its tokens `[len]`, where they have moved together from several pages; `None` where they are
    /// those of the page's index.
    pub positions: Option<Box<[u32]>>,
}

impl PageRecord {
    /// Absolute positions of its tokens, in the order of its slots.
    pub fn positions(&self, page_size: usize) -> impl Iterator<Item = u32> {
        let first = self.index.first_position(page_size);
        (0..self.len).map(move |slot| self.positions.as_deref().map_or(first + slot, |own| own[slot as usize]))
    }
}

impl KvCache {
    /// A cache of `logical_len` tokens that opens pages as `kind` and holds the pages of `tables`, those of a KV group each in
    /// the order of [`CacheShape::groups`]; their bytes are undefined.
    ///
    /// # Errors
    /// [`RestoreError`] if no cache could have come to hold these pages, or the pool has no room for all of them. Then the
    /// pool is as before.
    pub fn restore(
        shape: Arc<CacheShape>,
        kind: PageKind,
        logical_len: usize,
        tables: &[Vec<PageRecord>],
        pool: &mut PagePool,
    ) -> Result<Self, RestoreError> {
        if tables.len() != shape.num_groups() {
            return Err(RestoreError::Tables { got: tables.len(), limit: shape.num_groups() });
        }
        if u32::try_from(logical_len).is_err() {
            return Err(RestoreError::TooLong { got: logical_len });
        }
        let mut cache = Self::new(shape, kind);
        cache.logical_len = logical_len;
        for (group, records) in cache.shape.groups().zip(tables) {
            cache.check_records(group, records)?;
        }
        let shape = Arc::clone(&cache.shape);
        let mut refused = Ok(());
        for (table, records) in cache.tables.iter_mut().zip(tables) {
            refused = refused.and_then(|()| table.fill(pool, &shape, records));
        }
        match refused {
            Ok(()) => Ok(cache),
            Err(error) => {
                cache.release(pool);
                Err(error.into())
            }
        }
    }

    /// Whether `group` of this cache, which holds nothing yet, could hold these pages.
    fn check_records(&self, group: KvGroup, records: &[PageRecord]) -> Result<(), RestoreError> {
        let page_size = self.shape.page_size;
        let layer_kind = self.shape.layers[group.layer as usize];
        let num_pages = self.shape.pages_for(self.logical_len);
        let (mut least, mut next_position) = (0, 0);
        for record in records {
            let page = record.index;
            let place = page.0 as usize;
            if place < least || place >= num_pages {
                return Err(RestoreError::Order { group, page });
            }
            least = place + 1;
            let filled = self.logical_len.min(least * page_size) - place * page_size;
            if record.len as usize != filled {
                return Err(RestoreError::Len { group, page, got: record.len, wanted: filled });
            }
            let may_change = layer_kind == LayerKind::Global && filled == page_size;
            if record.kind != self.kind && !(may_change && self.kind.can_become(record.kind)) {
                return Err(RestoreError::Kind { group, page, got: record.kind, written: self.kind });
            }
            record.kind.check(&self.shape)?;
            let own = record.positions.as_deref();
            let first = page.first_position(page_size);
            // Tokens stand where others stood that were not after them, and are evicted by policies only.
            let fits = own.is_none_or(|own| {
                own.len() == filled && may_change && own.iter().zip(first..).all(|(own, place)| *own >= place)
            });
            let ascends = |position: u32| {
                let ascends = position >= next_position && (position as usize) < self.logical_len;
                next_position = position.saturating_add(1);
                ascends
            };
            if !fits || !record.positions(page_size).all(ascends) {
                return Err(RestoreError::Positions { group, page });
            }
        }
        // The open page is never freed, and a window keeps all that the next query sees.
        let first_needed = match layer_kind {
            LayerKind::Global => self.open_page().map_or(num_pages, |page| page.0 as usize),
            LayerKind::Window(window) => {
                let first_visible = (self.logical_len + 1).saturating_sub(window as usize);
                self.open_page().map_or(num_pages, |page| page.0 as usize).min(first_visible / page_size)
            }
        };
        let is_needed = |record: &&PageRecord| record.index.0 as usize >= first_needed;
        let got = match layer_kind {
            LayerKind::Global => records.iter().filter(is_needed).count(),
            LayerKind::Window(_) => records.len(),
        };
        let wanted = num_pages - first_needed;
        if got != wanted || !records.iter().rev().take(wanted).all(|record| is_needed(&record)) {
            return Err(RestoreError::Missing { group, first: first_needed, got, wanted });
        }
        Ok(())
    }
}

impl Table {
    /// Takes a frame for each of `records`, which ascend.
    fn fill(&mut self, pool: &mut PagePool, shape: &CacheShape, records: &[PageRecord]) -> Result<(), PoolExhausted> {
        for record in records {
            let frame = pool.allocate(record.kind.page_bytes(shape))?;
            self.push(record, frame);
        }
        Ok(())
    }
}

/// Why no cache can hold the pages noted.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum RestoreError {
    /// Not one table a KV group.
    #[error("{got} block tables for {limit} KV groups")]
    Tables {
        /// Tables given.
        got: usize,
        /// Groups of the geometry.
        limit: usize,
    },
    /// Positions of more than 32 bits.
    #[error("{got} tokens are more than the limit of {}", u32::MAX)]
    TooLong {
        /// Tokens.
        got: usize,
    },
    /// Pages that do not ascend, or lie beyond the sequence.
    #[error("layer {}, KV head {}: page {} is out of order or beyond the last", group.layer, group.kv_head, page.0)]
    Order {
        /// Whose.
        group: KvGroup,
        /// The page.
        page: PageIndex,
    },
    /// A page that holds more or fewer tokens than the sequence has there.
    #[error("layer {}, KV head {}: page {} holds {got} tokens, and not {wanted}", group.layer, group.kv_head, page.0)]
    Len {
        /// Whose.
        group: KvGroup,
        /// The page.
        page: PageIndex,
        /// Tokens noted.
        got: u32,
        /// Tokens the sequence has there.
        wanted: usize,
    },
    /// Tokens at positions that they cannot have come from.
    #[error("layer {}, KV head {}: positions of page {} do not follow each other", group.layer, group.kv_head, page.0)]
    Positions {
        /// Whose.
        group: KvGroup,
        /// The page.
        page: PageIndex,
    },
    /// A page of a kind it cannot have.
    #[error(
        "layer {}, KV head {}: page {} is stored as {got}, which pages written as {written} do not become there",
        group.layer, group.kv_head, page.0
    )]
    Kind {
        /// Whose.
        group: KvGroup,
        /// The page.
        page: PageIndex,
        /// Its kind.
        got: PageKind,
        /// How pages are written.
        written: PageKind,
    },
    /// Not the pages that are always there: the open one, and those of a window.
    #[error(
        "layer {}, KV head {}: {got} pages where the {wanted} from page {first} on must be",
        group.layer, group.kv_head
    )]
    Missing {
        /// Whose.
        group: KvGroup,
        /// The first page that must be there.
        first: usize,
        /// Pages there are.
        got: usize,
        /// Pages there must be.
        wanted: usize,
    },
    /// A geometry whose pages cannot be of a kind.
    #[error(transparent)]
    PageKind(#[from] KindShapeError),
    /// No room for all pages.
    #[error(transparent)]
    Pool(#[from] PoolExhausted),
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::encoding::Encoding;
    use crate::kv_cache::{PageFate, ResidentPage};

    const CODED: PageKind = PageKind::of(Encoding::Q8_0);

    /// Two layers of two KV heads, the second with a window of 21; pages of 16 tokens.
    fn shape() -> Arc<CacheShape> {
        Arc::new(CacheShape::new(vec![LayerKind::Global, LayerKind::Window(21)], 2, 3, 32, 16).unwrap())
    }

    fn records(cache: &KvCache) -> Vec<Vec<PageRecord>> {
        cache.shape().groups().map(|group| cache.table(group).iter().map(ResidentPage::record).collect()).collect()
    }

    /// A cache of `len` tokens in which the first head of the global layer keeps one of `every` tokens, as many as fill pages, and
    /// then `fates` decide about the full pages of both; and its pool.
    fn noted(len: usize, every: usize, fates: &[u8]) -> (PagePool, KvCache) {
        let mut pool = PagePool::new(8 << 20);
        let mut cache = KvCache::new(shape(), PageKind::F16);
        cache.grow(&mut pool, len).unwrap();
        cache.slide_windows(&mut pool);
        let kept: Vec<u32> = (0..len as u32 / 16 * 16).step_by(every).collect();
        let whole_pages = &kept[..kept.len() / 16 * 16];
        cache.compact(&mut pool, KvGroup { layer: 0, kv_head: 0 }, whole_pages, &mut |_, _, _| ()).unwrap();
        for (group, shift) in shape().global_groups().zip([0, 1]) {
            let fate = |(page, record): (usize, &ResidentPage)| match fates[(page + shift) % fates.len()] {
                _ if record.len < 16 => PageFate::Keep,
                0 => PageFate::Free,
                1 => PageFate::Recode(CODED),
                _ => PageFate::Keep,
            };
            let fates: Vec<PageFate> = cache.table(group).iter().enumerate().map(fate).collect();
            cache.apply(&mut pool, group, &fates, &mut |_| ()).unwrap();
        }
        (pool, cache)
    }

    proptest! {
        #[test]
        fn a_restored_cache_is_the_one_it_was_noted_from(
            len in 0_usize..200, every in 1_usize..4, fates in prop::collection::vec(0_u8..3, 1..12), more in 0_usize..40,
        ) {
            let (mut pool, mut cache) = noted(len, every, &fates);
            let mut other_pool = PagePool::new(8 << 20);
            let mut other =
                KvCache::restore(shape(), PageKind::F16, len, &records(&cache), &mut other_pool).unwrap();
            prop_assert_eq!(other_pool.used_bytes(), pool.used_bytes());
            for step in [0, more] {
                cache.grow(&mut pool, step).unwrap();
                other.grow(&mut other_pool, step).unwrap();
                cache.slide_windows(&mut pool);
                other.slide_windows(&mut other_pool);
                prop_assert_eq!(records(&other), records(&cache));
                prop_assert_eq!(other.footprint().kinds, cache.footprint().kinds);
                prop_assert_eq!(other.open_page(), cache.open_page());
                for group in shape().groups() {
                    prop_assert_eq!(other.resident_tokens(group), cache.resident_tokens(group));
                    let slot = |cache: &KvCache, position| cache.slot(group, position).map(|slot| (slot.kind, slot.index));
                    for position in 0..(len + more) as u32 {
                        prop_assert_eq!(slot(&other, position), slot(&cache, position));
                    }
                }
            }
            cache.release(&mut pool);
            other.release(&mut other_pool);
            prop_assert_eq!(other_pool.used_bytes(), 0);
        }

        /// Every single change of a record is refused but for those that make another possible cache, and never panics.
        #[test]
        fn any_records_are_restored_as_they_are_or_refused(
            len in 0_usize..200, every in 1_usize..4, at in 0_usize..1000, index in 0_u32..20, kind in 0_usize..4,
            filled in 0_u32..18, moved in any::<bool>(),
        ) {
            let (mut pool, cache) = noted(len, every, &[0, 1, 2]);
            let mut tables = records(&cache);
            cache.release(&mut pool);
            let total: usize = tables.iter().map(Vec::len).sum();
            if let Some(at) = at.checked_rem(total)
                && let Some(record) = tables.iter_mut().flatten().nth(at)
            {
                let kinds = [record.kind, PageKind::F16, CODED, PageKind::F32];
                let positions = if moved { Some((index..index + filled).collect()) } else { record.positions.clone() };
                *record = PageRecord { index: PageIndex(index), kind: kinds[kind], len: filled, positions };
            }
            match KvCache::restore(shape(), PageKind::F16, len, &tables, &mut pool) {
                Ok(cache) => {
                    prop_assert_eq!(records(&cache), tables);
                    cache.release(&mut pool);
                }
                Err(error) => prop_assert!(!error.to_string().contains('\n')),
            }
            prop_assert_eq!(pool.used_bytes(), 0);
        }
    }

    #[test]
    fn what_no_cache_can_hold_is_refused_and_takes_nothing() {
        let (mut pool, cache) = noted(100, 1, &[2]);
        let good = records(&cache);
        cache.release(&mut pool);
        type Change = fn(&mut Vec<Vec<PageRecord>>);
        let cases: [(Change, &str); 13] = [
            (|tables| tables.truncate(3), "3 block tables for 4 KV groups"),
            (|tables| tables[1].swap(0, 1), "layer 0, KV head 1: page 0 is out of order or beyond the last"),
            (
                |tables| tables[0][6].index = PageIndex(7),
                "layer 0, KV head 0: page 7 is out of order or beyond the last",
            ),
            (|tables| tables[0][2].len = 15, "layer 0, KV head 0: page 2 holds 15 tokens, and not 16"),
            (|tables| tables[0][6].len = 16, "layer 0, KV head 0: page 6 holds 16 tokens, and not 4"),
            (
                |tables| tables[0][6].kind = CODED,
                "layer 0, KV head 0: page 6 is stored as q8_0, which pages written as f16 do not become there",
            ),
            (
                |tables| tables[2][0].kind = CODED,
                "layer 1, KV head 0: page 5 is stored as q8_0, which pages written as f16 do not become there",
            ),
            (
                |tables| tables[0][1].positions = Some((15..31).collect()),
                "layer 0, KV head 0: positions of page 1 do not follow each other",
            ),
            (
                |tables| tables[0][1].positions = Some((20..36).collect()),
                "layer 0, KV head 0: positions of page 2 do not follow each other",
            ),
            (
                |tables| tables[2][0].positions = Some((80..96).collect()),
                "layer 1, KV head 0: positions of page 5 do not follow each other",
            ),
            (|tables| tables[0].truncate(6), "layer 0, KV head 0: 0 pages where the 1 from page 6 on must be"),
            (|tables| tables[3].truncate(1), "layer 1, KV head 1: 1 pages where the 2 from page 5 on must be"),
            (
                |tables| {
                    tables[3]
                        .insert(0, PageRecord { index: PageIndex(4), kind: PageKind::F16, len: 16, positions: None });
                },
                "layer 1, KV head 1: 3 pages where the 2 from page 5 on must be",
            ),
        ];
        for (change, message) in cases {
            let mut tables = good.clone();
            change(&mut tables);
            let refused = KvCache::restore(shape(), PageKind::F16, 100, &tables, &mut pool);
            assert_eq!(refused.map(|_| ()).unwrap_err().to_string(), message);
            assert_eq!(pool.used_bytes(), 0, "{message}");
        }
        let mut small = PagePool::new(5 * 2048);
        let refused = KvCache::restore(shape(), PageKind::F16, 100, &good, &mut small);
        assert!(matches!(refused, Err(RestoreError::Pool(_))));
        assert_eq!(small.used_bytes(), 0);
    }
}
