use std::collections::BTreeMap;
use std::ops::Range;

use proptest::prelude::*;

use super::*;
use crate::encoding::Encoding;
use crate::kv_cache::{PageFate, PagePlace, ResidentPage};
use crate::page_kind::PageKind;
use crate::shape::{CacheShape, LayerKind};

const PAGE_SIZE: usize = 4;
const PAGE_BYTES: u64 = 128;

/// Two layers of two KV heads, the second with a window; 4-token pages of 128 bytes (f16).
fn shape() -> Arc<CacheShape> {
    let layers = vec![LayerKind::Global, LayerKind::Window(6)];
    Arc::new(CacheShape::new(layers, 2, 3, 8, PAGE_SIZE).unwrap())
}

/// The bytes behind a pool: a number for each token of each page.
struct Memory(Vec<u8>);

impl Memory {
    fn at(range: &Range<u64>, slot: usize) -> Range<usize> {
        let stride = (range.end - range.start) as usize / PAGE_SIZE;
        let start = range.start as usize + slot * stride;
        start..start + 8
    }

    fn write(&mut self, range: &Range<u64>, slot: usize, token: u64) {
        self.0[Self::at(range, slot)].copy_from_slice(&token.to_le_bytes());
    }

    fn read(&self, range: &Range<u64>, slot: usize) -> u64 {
        u64::from_le_bytes(self.0[Self::at(range, slot)].try_into().unwrap())
    }

    fn copy(&mut self, moves: &[PageMove]) {
        for page in moves {
            // A new frame holds whatever it held.
            self.0[page.to.range.start as usize..page.to.range.end as usize].fill(0xaa);
            for slot in 0..page.len as usize {
                let token = self.read(&page.from.range, slot);
                self.write(&page.to.range, slot, token);
            }
        }
    }

    fn compact(&mut self, from: &[PagePlace], to: &[PagePlace], kept: &[u32]) {
        for (place, &token) in kept.iter().enumerate() {
            let token = token as usize;
            let number = self.read(&from[token / PAGE_SIZE].range, token % PAGE_SIZE);
            self.write(&to[place / PAGE_SIZE].range, place % PAGE_SIZE, number);
        }
    }
}

/// A cache, and what each of its groups should hold at which positions.
struct Forked {
    cache: KvCache,
    expected: Vec<BTreeMap<u32, u64>>,
    /// Tokens that a fork has counted on.
    computed: usize,
}

impl Forked {
    fn new() -> Self {
        Self { cache: KvCache::new(shape(), PageKind::F16), expected: vec![BTreeMap::new(); 4], computed: 0 }
    }

    /// Writes new numbers at `positions`, which there is room for.
    fn write(&mut self, memory: &mut Memory, positions: Range<usize>, seed: u64) {
        for (index, group) in shape().groups().enumerate() {
            for position in positions.clone() {
                let slot = self.cache.slot(group, position as u32).unwrap();
                let token = (seed << 32 | index as u64) ^ (position as u64) << 8;
                memory.write(&slot.range, slot.index, token);
                self.expected[index].insert(position as u32, token);
            }
        }
    }

    /// Forgets what the cache no longer holds, or has not computed.
    fn prune(&mut self) {
        for (index, group) in shape().groups().enumerate() {
            let held: Vec<u32> = self.cache.table(group).iter().flat_map(|page| page.positions(PAGE_SIZE)).collect();
            self.expected[index].retain(|position, _| held.binary_search(position).is_ok());
        }
    }

    fn check(&self, memory: &Memory) {
        for (index, group) in shape().groups().enumerate() {
            for (&position, &token) in &self.expected[index] {
                let slot = self.cache.slot(group, position).unwrap();
                assert_eq!(memory.read(&slot.range, slot.index), token, "{group:?}, position {position}");
            }
        }
    }
}

/// Frames of all caches: those that overlap are the same, and the pool counts each once.
fn check_frames(pool: &PagePool, caches: &[Forked]) {
    let mut ranges: Vec<Range<u64>> = caches
        .iter()
        .flat_map(|Forked { cache, .. }| cache.shape().groups().flat_map(|group| cache.table(group)))
        .map(ResidentPage::range)
        .collect();
    ranges.sort_unstable_by_key(|range| range.start);
    ranges.dedup();
    assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start));
    assert_eq!(pool.used_bytes(), ranges.iter().map(|range| range.end - range.start).sum::<u64>());
}

#[derive(Debug, Clone)]
enum Step {
    /// Further tokens.
    Grow(usize),
    /// Tokens that are forgotten again, as those of a pass.
    Pass(usize),
    /// Pages freed, and pages that become codes.
    Apply { group: usize, free: u64, recode: u64 },
    /// Tokens moved together.
    Compact { group: usize, mask: u64 },
    /// Pages rewritten in place.
    Rewrite { group: usize, num_pages: usize },
    /// Windows slide.
    Slide,
    /// Another cache becomes a fork of this one; of what came before its newest tokens, which count as not computed.
    Fork { into: usize, uncomputed: usize },
}

fn steps() -> impl Strategy<Value = Vec<(usize, Step)>> {
    let group = 0_usize..2;
    let step = prop_oneof![
        4 => (1_usize..20).prop_map(Step::Grow),
        1 => (1_usize..20).prop_map(Step::Pass),
        2 => (group.clone(), any::<u64>(), any::<u64>())
            .prop_map(|(group, free, recode)| Step::Apply { group, free, recode }),
        3 => (group.clone(), any::<u64>()).prop_map(|(group, mask)| Step::Compact { group, mask }),
        2 => (group, 0_usize..4).prop_map(|(group, num_pages)| Step::Rewrite { group, num_pages }),
        2 => Just(Step::Slide),
        4 => (0_usize..3, prop_oneof![Just(0_usize), 0_usize..6])
            .prop_map(|(into, uncomputed)| Step::Fork { into, uncomputed }),
    ];
    prop::collection::vec((0_usize..3, step), 1..60)
}

fn run(num_pages: u64, steps: Vec<(usize, Step)>) {
    let mut pool = PagePool::new(num_pages * PAGE_BYTES);
    let mut memory = Memory(vec![0xaa; (num_pages * PAGE_BYTES) as usize]);
    let mut caches = [(); 3].map(|()| Forked::new());
    for (seed, (which, step)) in (1..).zip(steps) {
        let forked = &mut caches[which];
        let len = forked.cache.logical_len();
        match step {
            Step::Grow(num_tokens) => {
                if forked.cache.grow(&mut pool, num_tokens).is_ok() {
                    forked.write(&mut memory, len..len + num_tokens, seed);
                }
            }
            Step::Pass(num_tokens) => {
                if forked.cache.grow(&mut pool, num_tokens).is_ok() {
                    forked.write(&mut memory, len..len + num_tokens, seed);
                    forked.cache.truncate(&mut pool, len);
                }
            }
            Step::Apply { group, free, recode } => {
                let group = shape().groups().nth(group).unwrap();
                let open = forked.cache.open_page();
                let fate = |(place, page): (usize, &ResidentPage)| match place % 64 {
                    _ if Some(page.index) == open => PageFate::Keep,
                    bit if free >> bit & 1 == 1 => PageFate::Free,
                    bit if recode >> bit & 1 == 1 && !page.kind.is_coded() => {
                        PageFate::Recode(PageKind::of(Encoding::Tq4))
                    }
                    _ => PageFate::Keep,
                };
                let fates: Vec<PageFate> = forked.cache.table(group).iter().enumerate().map(fate).collect();
                // The pool may have no room for the codes.
                let _ = forked.cache.apply(&mut pool, group, &fates, &mut |moves| memory.copy(moves));
            }
            Step::Compact { group, mask } => {
                let group = shape().groups().nth(group).unwrap();
                let closed = forked.cache.table(group).len() - usize::from(forked.cache.open_page().is_some());
                let chosen = (0..(closed * PAGE_SIZE) as u32).filter(|token| mask >> (token % 64) & 1 == 1);
                let mut kept: Vec<u32> = chosen.collect();
                kept.truncate(kept.len() / PAGE_SIZE * PAGE_SIZE);
                // The pages may be codes, and the pool may have no room for pages that are not shared.
                let mut compact = |from: &[PagePlace], to: &[PagePlace], kept: &[u32]| memory.compact(from, to, kept);
                let _ = forked.cache.compact(&mut pool, group, &kept, &mut compact);
            }
            Step::Rewrite { group, num_pages } => {
                let index = group;
                let group = shape().groups().nth(group).unwrap();
                let owned = forked.cache.own_pages(&mut pool, group, num_pages, &mut |moves| memory.copy(moves));
                if owned.is_ok() {
                    for page in forked.cache.table(group).iter().take(num_pages) {
                        for (slot, position) in page.positions(PAGE_SIZE).enumerate() {
                            memory.write(&page.range(), slot, seed << 40);
                            forked.expected[index].insert(position, seed << 40);
                        }
                    }
                }
            }
            Step::Slide => {
                forked.cache.slide_windows(&mut pool);
            }
            Step::Fork { into, uncomputed } => {
                // Nothing is evicted or encoded behind what has been computed.
                let is_plain = |group| {
                    let table = forked.cache.table(group);
                    table.iter().rev().take(2).all(|page| !page.kind.is_coded() && !page.is_compacted())
                        && table.last().is_none_or(|page| page.end_position(PAGE_SIZE) as usize == len)
                        && table.len() > 2
                        && table[table.len() - 2].index.0 + 1 == table[table.len() - 1].index.0
                };
                let computed = if shape().groups().all(is_plain) { len - uncomputed.min(4) } else { len };
                let computed = computed.max(forked.computed);
                let expected = forked.expected.clone();
                let mut num_copied = 0;
                let fork = forked.cache.fork(&mut pool, computed, &mut |moves| {
                    num_copied += moves.len();
                    memory.copy(moves);
                });
                if let Ok(cache) = fork {
                    assert_eq!(num_copied, if computed.is_multiple_of(PAGE_SIZE) { 0 } else { 4 });
                    forked.computed = len;
                    let fork = Forked { cache, expected, computed };
                    std::mem::replace(&mut caches[into], fork).cache.release(&mut pool);
                    // Those tokens are computed at last, on one side.
                    if computed < len && into != which {
                        caches[which].write(&mut memory, computed..len, seed << 1);
                    }
                    let logical_len = caches[into].cache.logical_len();
                    assert_eq!(logical_len, computed);
                }
            }
        }
        caches.iter_mut().for_each(Forked::prune);
        caches.iter().for_each(|forked| forked.check(&memory));
        check_frames(&pool, &caches);
    }
    for forked in caches {
        forked.cache.release(&mut pool);
    }
    assert_eq!((pool.used_bytes(), pool.free_bytes()), (0, pool.capacity_bytes()));
}

proptest! {
    /// Three caches that fork from each other at random, in pools with and without room for all they want: each holds the
    /// bytes it would hold if it were alone.
    #[test]
    fn nothing_written_to_a_fork_shows_in_another(num_pages in prop_oneof![20_u64..200, Just(4000)], steps in steps()) {
        run(num_pages, steps);
    }
}

#[test]
fn a_fork_takes_one_page_of_each_group_and_no_more() {
    let mut pool = PagePool::new(100 * PAGE_BYTES);
    let mut cache = KvCache::new(shape(), PageKind::F16);
    cache.grow(&mut pool, 18).unwrap();
    let used = pool.used_bytes();
    let mut copied = Vec::new();
    let mut fork = cache.fork(&mut pool, 18, &mut |moves| copied.extend_from_slice(moves)).unwrap();
    assert_eq!(pool.used_bytes(), used + 4 * PAGE_BYTES);
    assert_eq!(copied.iter().map(|page| (page.page.0, page.len)).collect::<Vec<_>>(), [(4, 2); 4]);
    assert_eq!(fork.footprint(), cache.footprint());
    let group = KvGroup { layer: 0, kv_head: 1 };
    let ranges = |cache: &KvCache| cache.table(group).iter().map(ResidentPage::range).collect::<Vec<_>>();
    assert_eq!(ranges(&cache)[..4], ranges(&fork)[..4]);
    assert_ne!(ranges(&cache)[4], ranges(&fork)[4]);

    // A page that one gives up stays the other's; one that is to be written to moves.
    let fates = [PageFate::Free, PageFate::Keep, PageFate::Keep, PageFate::Keep, PageFate::Keep];
    cache.apply(&mut pool, group, &fates, &mut |_| ()).unwrap();
    assert_eq!(pool.used_bytes(), used + 4 * PAGE_BYTES);
    let before = (ranges(&fork), fork.revision(group));
    let mut copied = Vec::new();
    fork.own_pages(&mut pool, group, 2, &mut |moves| copied.extend_from_slice(moves)).unwrap();
    assert_eq!(copied.iter().map(|page| page.page.0).collect::<Vec<_>>(), [1], "the first was its own by then");
    assert_eq!((ranges(&fork)[0].clone(), fork.first_changed(group, before.1)), (before.0[0].clone(), 1));
    assert_ne!(ranges(&fork)[1], before.0[1]);
    cache.release(&mut pool);
    assert_eq!(pool.used_bytes(), fork.footprint().payload_bytes());
    fork.release(&mut pool);
    assert_eq!(pool.used_bytes(), 0);
}

#[test]
fn a_fork_without_room_takes_nothing() {
    let mut pool = PagePool::new(23 * PAGE_BYTES);
    let mut cache = KvCache::new(shape(), PageKind::F16);
    cache.grow(&mut pool, 18).unwrap();
    let used = pool.used_bytes();
    let refused = cache.fork(&mut pool, 18, &mut |_| unreachable!("refused"));
    assert_eq!(refused.map(|_| ()).unwrap_err().requested_bytes, PAGE_BYTES);
    assert_eq!(pool.used_bytes(), used);
    let fork = cache.fork(&mut pool, 16, &mut |_| unreachable!("full pages are shared")).unwrap();
    cache.release(&mut pool);
    assert_eq!(pool.used_bytes(), 16 * PAGE_BYTES);
    fork.release(&mut pool);
    assert_eq!(pool.used_bytes(), 0);
}

#[test]
#[should_panic(expected = "the open page is written to")]
fn a_shared_page_is_not_opened_again() {
    let mut pool = PagePool::new(100 * PAGE_BYTES);
    let mut cache = KvCache::new(shape(), PageKind::F16);
    cache.grow(&mut pool, 16).unwrap();
    let _fork = cache.fork(&mut pool, 16, &mut |_| ()).unwrap();
    cache.truncate(&mut pool, 14);
}
