use proptest::prelude::*;

use super::*;
use crate::encoding::Encoding;

const GLOBAL: KvGroup = KvGroup { layer: 0, kv_head: 1 };
const WINDOW: KvGroup = KvGroup { layer: 1, kv_head: 0 };
const PAGE_BYTES: u64 = 128;
/// The same page as codes of 4 bits: 4 tokens of twice 4 bytes and a scale of 2.
const TQ4_BYTES: u64 = 48;

/// Two layers of two KV heads, the second with a window; 4-token pages of 128 bytes (f16).
fn shape(window: u32) -> Arc<CacheShape> {
    Arc::new(CacheShape::new(vec![LayerKind::Global, LayerKind::Window(window)], 2, 3, 8, 4).unwrap())
}

/// A cache of `num_tokens` over a pool of `num_pages`.
fn grown(num_pages: u64, num_tokens: usize) -> (PagePool, KvCache) {
    let mut pool = PagePool::new(num_pages * PAGE_BYTES);
    let mut cache = KvCache::new(shape(5), PageKind::F16);
    cache.grow(&mut pool, num_tokens).unwrap();
    (pool, cache)
}

/// For plans that move no page.
fn no_move(moves: &[PageMove]) {
    panic!("{moves:?} were to be moved");
}

fn indices(cache: &KvCache, group: KvGroup) -> Vec<u32> {
    cache.table(group).iter().map(|page| page.index.0).collect()
}

/// Everything a caller can see of a cache.
fn seen(cache: &KvCache) -> (usize, Footprint, Vec<String>) {
    let tables = cache.shape().groups().map(|group| format!("{:?}", cache.table(group))).collect();
    (cache.logical_len(), cache.footprint(), tables)
}

#[test]
fn growing_opens_as_many_pages_as_needed() {
    let (mut pool, mut cache) = grown(100, 0);
    // Logical length, pages of each group, tokens in the last page.
    for (num_tokens, len, pages, last) in [(3, 3, 1, 3), (1, 4, 1, 4), (0, 4, 1, 4), (14, 18, 5, 2), (1, 19, 5, 3)] {
        let needed = cache.pages_needed(num_tokens);
        let before = pool.used_bytes();
        cache.grow(&mut pool, num_tokens).unwrap();
        assert_eq!(pool.used_bytes(), before + needed * PAGE_BYTES);
        assert_eq!(cache.logical_len(), len);
        for group in cache.shape().groups() {
            assert_eq!(indices(&cache, group), (0..pages).collect::<Vec<_>>());
            assert_eq!(cache.table(group).last().unwrap().len, last);
            assert_eq!(cache.resident_tokens(group), len);
        }
        assert_eq!(pool.used_bytes(), u64::from(pages) * 4 * PAGE_BYTES);
    }
    assert_eq!(cache.open_page(), Some(PageIndex(4)));
    cache.release(&mut pool);
}

#[test]
fn growing_is_all_or_nothing() {
    // Room for three pages in each of four groups, and three more.
    let (mut pool, mut cache) = grown(15, 12);
    let (before, used) = (seen(&cache), pool.used_bytes());
    for num_tokens in [1, 4, 100, u32::MAX as usize, usize::MAX] {
        let refused = cache.grow(&mut pool, num_tokens).unwrap_err();
        assert_eq!((refused.free_bytes, refused.capacity_bytes), (3 * PAGE_BYTES, 15 * PAGE_BYTES));
        assert!(refused.requested_bytes >= 4 * PAGE_BYTES);
        assert_eq!((seen(&cache), pool.used_bytes()), (before.clone(), used));
        assert_eq!(pool.reclaim(1), [], "nothing was taken and put back either");
    }
    cache.grow(&mut pool, 0).unwrap();
    cache.release(&mut pool);

    // Positions are 32 bits wide, whatever the pool could hold.
    let mut pool = PagePool::new(u64::MAX);
    let cache_shape = CacheShape::new(vec![LayerKind::Global], 1, 1, 8, 256).unwrap();
    let mut cache = KvCache::new(Arc::new(cache_shape), PageKind::F16);
    assert!(cache.grow(&mut pool, u32::MAX as usize + 1).is_err());
    assert_eq!((cache.logical_len(), pool.used_bytes()), (0, 0));
    cache.release(&mut pool);
}

#[test]
fn truncating_undoes_growing() {
    for (len, more) in [(10, 1), (10, 2), (10, 3), (10, 40), (12, 1), (12, 9), (0, 7)] {
        let (mut pool, mut cache) = grown(100, len);
        if len > 8 {
            let fates = [PageFate::Keep, PageFate::Free, PageFate::Keep];
            cache.apply(&mut pool, GLOBAL, &fates, &mut no_move).unwrap();
            cache.slide_windows(&mut pool);
        }
        let pages = |cache: &KvCache| -> Vec<String> { seen(cache).2 };
        let held = |cache: &KvCache| (cache.footprint().global_bytes, cache.footprint().window_bytes);
        let resident = |cache: &KvCache| cache.shape().groups().map(|g| cache.resident_tokens(g)).collect::<Vec<_>>();
        let before = (pages(&cache), held(&cache), resident(&cache), pool.used_bytes());
        cache.grow(&mut pool, more).unwrap();
        assert_ne!(resident(&cache), before.2);
        cache.truncate(&mut pool, len + more);
        assert_eq!(cache.logical_len(), len + more, "nothing to forget");
        cache.truncate(&mut pool, len);
        assert_eq!((pages(&cache), held(&cache), resident(&cache), pool.used_bytes()), before, "{len} and {more}");
        assert_eq!(cache.logical_len(), len);
        // It grows on as ever.
        cache.grow(&mut pool, 5).unwrap();
        assert_eq!(cache.slot(WINDOW, len as u32 + 4).unwrap().index, (len + 4) % 4);
        cache.release(&mut pool);
        assert_eq!(pool.used_bytes(), 0);
    }
}

#[test]
fn slots_follow_positions() {
    let (mut pool, mut cache) = grown(100, 10);
    cache.apply(&mut pool, GLOBAL, &[PageFate::Keep, PageFate::Free, PageFate::Keep], &mut no_move).unwrap();
    let frame = |place: usize| cache.table(GLOBAL)[place].range();
    let slot = |range, index| Some(Slot { range, kind: PageKind::F16, index });
    assert_eq!(cache.slot(GLOBAL, 0), slot(frame(0), 0));
    assert_eq!(cache.slot(GLOBAL, 3), slot(frame(0), 3));
    assert_eq!(cache.slot(GLOBAL, 5), None, "evicted");
    assert_eq!(cache.slot(GLOBAL, 9), slot(frame(1), 1));
    assert_eq!(cache.slot(GLOBAL, 10), None, "not reached yet");
    assert_eq!(cache.table(GLOBAL)[1].first_position(4), 8);
    assert_eq!(cache.table(GLOBAL)[1].end_position(4), 10);
    cache.release(&mut pool);
}

#[test]
fn evicted_pages_never_come_back() {
    let (mut pool, mut cache) = grown(100, 16);
    let fates = [PageFate::Keep, PageFate::Free, PageFate::Free, PageFate::Free];
    let applied = cache.apply(&mut pool, GLOBAL, &fates, &mut no_move).unwrap();
    let freed = Applied { pages_freed: 3, tokens_freed: 12, bytes_freed: 3 * PAGE_BYTES, pages_recoded: 0 };
    assert_eq!(applied, freed);
    assert_eq!((cache.logical_len(), cache.resident_tokens(GLOBAL)), (16, 4));
    // The newest page was full, so it could go; what comes next has its own index.
    cache.grow(&mut pool, 5).unwrap();
    assert_eq!(indices(&cache, GLOBAL), [0, 4, 5]);
    assert_eq!(indices(&cache, KvGroup { layer: 0, kv_head: 0 }), [0, 1, 2, 3, 4, 5], "siblings are untouched");
    assert_eq!((cache.logical_len(), cache.resident_tokens(GLOBAL)), (21, 9));
    cache.release(&mut pool);
}

/// For caches whose bytes nobody keeps.
fn no_bytes(_from: &[PagePlace], _to: &[PagePlace], _kept: &[u32]) {}

fn positions(cache: &KvCache, group: KvGroup) -> Vec<u32> {
    cache.table(group).iter().flat_map(|page| page.positions(4)).collect()
}

#[test]
fn tokens_that_stay_move_together() {
    let (mut pool, mut cache) = grown(100, 18);
    let mut moved = Vec::new();
    let kept = [0, 1, 2, 3, 5, 6, 11, 15];
    let applied = cache
        .compact(&mut pool, GLOBAL, &kept, &mut |pages, to, kept| {
            assert_eq!(to, &pages[..2]);
            moved.push((pages.iter().map(|page| page.range.clone()).collect::<Vec<_>>(), kept.to_vec()));
        })
        .unwrap();
    let freed = Applied { pages_freed: 2, tokens_freed: 8, bytes_freed: 2 * PAGE_BYTES, pages_recoded: 0 };
    assert_eq!(applied, freed);
    let (ranges, told) = moved.pop().unwrap();
    assert_eq!((ranges.len(), &told[..], moved.len()), (4, &kept[..], 0));
    let table = cache.table(GLOBAL);
    assert_eq!(indices(&cache, GLOBAL), [0, 1, 4]);
    assert_eq!(table[..2].iter().map(|page| page.range()).collect::<Vec<_>>(), ranges[..2]);
    assert_eq!(positions(&cache, GLOBAL), [0, 1, 2, 3, 5, 6, 11, 15, 16, 17]);
    assert_eq!([0, 1, 2].map(|page| table[page].is_compacted()), [false, true, false]);
    assert_eq!([0, 1, 2].map(|page| table[page].end_position(4)), [4, 16, 18]);
    let slot = |page: usize, index| Some(Slot { range: table[page].range(), kind: PageKind::F16, index });
    assert_eq!(cache.slot(GLOBAL, 3), slot(0, 3));
    assert_eq!(cache.slot(GLOBAL, 11), slot(1, 2));
    assert_eq!([4, 7, 12, 14, 18].map(|position| cache.slot(GLOBAL, position)), [const { None }; 5]);
    assert_eq!(cache.slot(GLOBAL, 17), slot(2, 1));
    assert_eq!(cache.resident_tokens(GLOBAL), 10);
    // Again, with what has come since: the places are those of the tokens held.
    cache.grow(&mut pool, 6).unwrap();
    assert_eq!(cache.open_page(), None);
    cache.compact(&mut pool, GLOBAL, &[0, 7, 8, 15], &mut no_bytes).unwrap();
    assert_eq!((positions(&cache, GLOBAL), indices(&cache, GLOBAL)), (vec![0, 15, 16, 23], vec![0]));
    cache.release(&mut pool);
    assert_eq!(pool.used_bytes(), 0);
}

#[test]
fn packed_tokens_stand_where_they_were_put() {
    let (mut pool, mut cache) = grown(100, 18);
    assert!(!cache.is_packed(GLOBAL));
    let order = [0, 13, 7, 2, 15, 1, 4, 9];
    cache
        .compact(&mut pool, GLOBAL, &order, &mut |pages, _, kept| {
            assert_eq!((pages.len(), kept), (4, &order[..]));
        })
        .unwrap();
    assert!(cache.is_packed(GLOBAL));
    assert_eq!(positions(&cache, GLOBAL), [0, 13, 7, 2, 15, 1, 4, 9, 16, 17]);
    let mut columns = vec![7];
    cache.columns(GLOBAL, &mut columns);
    assert_eq!(columns, [0, 1, 2, 3, 4, 5, 6, 7, 16, 17]);
    for (place, position) in order.into_iter().enumerate() {
        let slot = cache.slot(GLOBAL, position).unwrap();
        assert_eq!((slot.range, slot.index), (cache.table(GLOBAL)[place / 4].range(), place % 4));
    }
    assert_eq!([3, 5, 12, 18].map(|position| cache.slot(GLOBAL, position)), [const { None }; 4]);
    assert_eq!(cache.slot(GLOBAL, 17).unwrap().index, 1);
    assert_eq!([0, 1, 2].map(|page| cache.table(GLOBAL)[page].end_position(4)), [14, 16, 18]);
    // Where nothing goes tokens still move.
    let (mut pool_2, mut other) = grown(100, 8);
    let before = other.revision(GLOBAL);
    other.compact(&mut pool_2, GLOBAL, &[0, 1, 2, 3, 7, 6, 5, 4], &mut no_bytes).unwrap();
    assert_eq!((other.first_changed(GLOBAL, before), other.table(GLOBAL).len()), (1, 2));
    cache.release(&mut pool);
    other.release(&mut pool_2);
}

#[test]
fn settled_pages_do_not_move() {
    let (mut pool, mut cache) = grown(100, 18);
    let tq4 = PageKind::of(Encoding::Tq4);
    let keep = PageFate::Keep;
    cache
        .apply(&mut pool, GLOBAL, &[PageFate::Recode(tq4), PageFate::Recode(tq4), keep, keep, keep], &mut |_| ())
        .unwrap();
    assert!(!cache.is_by_token(GLOBAL));
    cache.settle(GLOBAL, &[9.0, 1.0]);
    assert_eq!((cache.num_settled(GLOBAL), cache.is_by_token(GLOBAL)), (2, true));
    let ranges: Vec<_> = cache.table(GLOBAL).iter().map(ResidentPage::range).collect();
    // Places are those of the pages after them: tokens 8 to 15.
    cache
        .compact(&mut pool, GLOBAL, &[7, 0, 3, 4], &mut |pages, _, _| {
            assert_eq!(pages.iter().map(|page| page.range.clone()).collect::<Vec<_>>(), ranges[2..4]);
        })
        .unwrap();
    assert_eq!(positions(&cache, GLOBAL), [0, 1, 2, 3, 4, 5, 6, 7, 15, 8, 11, 12, 16, 17]);
    let free: [PageFate; 4] = [keep, PageFate::Free, keep, keep];
    cache.apply(&mut pool, GLOBAL, &free, &mut no_move).unwrap();
    let settled: Vec<Option<f32>> = cache.table(GLOBAL).iter().map(ResidentPage::settled).collect();
    assert_eq!((settled, cache.num_settled(GLOBAL)), (vec![Some(9.0), None, None], 1));
    cache.release(&mut pool);
    assert_eq!(pool.used_bytes(), 0);
}

#[test]
fn a_refused_compaction_changes_nothing() {
    let (mut pool, mut cache) = grown(100, 18);
    let (before, used) = (seen(&cache), pool.used_bytes());
    let refused = |cache: &mut KvCache, pool: &mut PagePool, group, kept: &[u32]| {
        cache.compact(pool, group, kept, &mut |_, _, _| unreachable!("refused")).unwrap_err().to_string()
    };
    for kept in [&[0, 1, 2][..], &[0, 1, 1, 2], &[3, 2, 1, 3], &[0, 1, 2, 16], &[0, 1, 2, u32::MAX]] {
        let error = refused(&mut cache, &mut pool, GLOBAL, kept);
        let tokens = kept.len();
        let expected = format!(
            "{tokens} tokens cannot be kept of 16 in full pages of 4: different ones, of whole pages' worth, can"
        );
        assert_eq!(error, expected);
    }
    assert_eq!(
        refused(&mut cache, &mut pool, WINDOW, &[0, 1, 2, 3]),
        "layer 1 has a window: its pages are not freed by a policy"
    );
    assert_eq!((seen(&cache), pool.used_bytes()), (before, used));
    let fates = [PageFate::Keep, PageFate::Recode(PageKind::of(Encoding::Tq4)), PageFate::Keep, PageFate::Keep];
    let fates: Vec<PageFate> = fates.into_iter().chain([PageFate::Keep]).collect();
    cache.apply(&mut pool, GLOBAL, &fates, &mut |_| ()).unwrap();
    assert_eq!(
        refused(&mut cache, &mut pool, GLOBAL, &[0, 1, 2, 3]),
        "tokens of layer 0 cannot be moved together: pages of them are codes"
    );
    cache.release(&mut pool);
}

proptest! {
    /// However often tokens are moved together and pages freed in between, what is held is what was kept, where it is said to be.
    #[test]
    fn tokens_are_where_their_positions_say(
        rounds in proptest::collection::vec((1usize..30, proptest::bits::u64::ANY, proptest::bool::ANY), 1..8),
    ) {
        let (mut pool, mut cache) = grown(1000, 0);
        // What each slot of the pool holds: the position written there.
        let mut bytes = std::collections::HashMap::new();
        let mut expected: Vec<u32> = Vec::new();
        let mut follower = Follower::default();
        for (grow, mask, by_token) in rounds {
            let first = cache.logical_len();
            cache.grow(&mut pool, grow).unwrap();
            for position in first..first + grow {
                let slot = cache.slot(GLOBAL, position as u32).unwrap();
                bytes.insert((slot.range.start, slot.index), position as u32);
                expected.push(position as u32);
            }
            let num_pages = cache.table(GLOBAL).len() - usize::from(cache.open_page().is_some());
            if by_token {
                let chosen: Vec<u32> = (0..4 * num_pages as u32).filter(|token| mask >> (token % 64) & 1 == 1).collect();
                let kept = chosen[..chosen.len() / 4 * 4].to_vec();
                let closed = 4 * num_pages;
                cache.compact(&mut pool, GLOBAL, &kept, &mut |pages, _, kept| {
                    let at = |place: usize| (pages[place / 4].range.start, place % 4);
                    for (to, &from) in kept.iter().enumerate() {
                        let token = bytes[&at(from as usize)];
                        bytes.insert(at(to), token);
                    }
                }).unwrap();
                let stays = |place: usize| place >= closed || kept.contains(&(place as u32));
                expected = expected.iter().enumerate().filter(|(place, _)| stays(*place)).map(|(_, p)| *p).collect();
            } else {
                let keeps = |page: usize| page >= num_pages || mask >> (page % 64) & 1 == 1;
                let fates: Vec<PageFate> = (0..cache.table(GLOBAL).len())
                    .map(|page| if keeps(page) { PageFate::Keep } else { PageFate::Free }).collect();
                let table = cache.table(GLOBAL).iter().enumerate();
                expected = table.filter(|(page, _)| keeps(*page)).flat_map(|(_, page)| page.positions(4)).collect();
                cache.apply(&mut pool, GLOBAL, &fates, &mut no_move).unwrap();
            }
            prop_assert_eq!(&positions(&cache, GLOBAL), &expected);
            follower.follow(&cache);
            prop_assert!(expected.is_sorted_by(|a, b| a < b));
            for &position in &expected {
                let slot = cache.slot(GLOBAL, position).unwrap();
                prop_assert_eq!(bytes[&(slot.range.start, slot.index)], position);
            }
            // What stands for a token in attention is at its position or before it, and ascends.
            let stand_ins: Vec<u32> = cache.table(GLOBAL).iter()
                .flat_map(|page| (0..page.len).map(|slot| page.first_position(4) + slot)).collect();
            prop_assert!(stand_ins.is_sorted_by(|a, b| a < b));
            prop_assert!(stand_ins.iter().zip(&expected).all(|(stand_in, position)| stand_in <= position));
            let owned: usize = cache.table(GLOBAL).iter().filter(|page| page.is_compacted()).map(|page| 4 * page.len as usize).sum();
            let plain: usize = cache.shape().groups().map(|group| cache.table(group).len()).sum();
            prop_assert!(cache.footprint().metadata_bytes as usize >= owned + plain * size_of::<ResidentPage>());
        }
        cache.release(&mut pool);
    }
}

#[test]
fn the_open_page_cannot_be_freed() {
    let (mut pool, mut cache) = grown(100, 6);
    for fate in [PageFate::Free, PageFate::Recode(PageKind::F32)] {
        let refused = cache.apply(&mut pool, GLOBAL, &[PageFate::Free, fate], &mut no_move).unwrap_err();
        assert_eq!(refused, FateError::OpenPage { page: PageIndex(1) });
        assert_eq!(refused.to_string(), "page 1 is still being filled and can be neither freed nor re-encoded");
    }
    cache.apply(&mut pool, GLOBAL, &[PageFate::Free, PageFate::Keep], &mut no_move).unwrap();
    cache.grow(&mut pool, 1).unwrap();
    assert_eq!(cache.table(GLOBAL)[0].len, 3);
    cache.release(&mut pool);
}

#[test]
fn a_refused_fate_changes_nothing() {
    let (mut pool, mut cache) = grown(33, 12);
    let tq4 = PageKind::of(Encoding::Tq4);
    let to_tq4 = [PageFate::Keep, PageFate::Recode(tq4), PageFate::Keep];
    cache.apply(&mut pool, GLOBAL, &to_tq4, &mut |_| ()).unwrap();
    let (before, used) = (seen(&cache), pool.used_bytes());
    let cases = [
        (GLOBAL, vec![PageFate::Free], "1 fates were given for 3 resident pages"),
        (GLOBAL, vec![PageFate::Free; 4], "4 fates were given for 3 resident pages"),
        (
            GLOBAL,
            vec![PageFate::Free, PageFate::Recode(PageKind::F16), PageFate::Keep],
            "page 1 cannot be re-encoded from tq4 to f16: codes stay what they are",
        ),
        (WINDOW, vec![PageFate::Free; 3], "layer 1 has a window: its pages are not freed by a policy"),
        (WINDOW, vec![PageFate::Recode(tq4); 3], "layer 1 has a window: its pages are not freed by a policy"),
    ];
    for (group, fates, message) in cases {
        assert_eq!(cache.apply(&mut pool, group, &fates, &mut no_move).unwrap_err().to_string(), message);
        assert_eq!((seen(&cache), pool.used_bytes()), (before.clone(), used));
    }
    // Its own kind is no change at all.
    let fates = [PageFate::Recode(PageKind::F16), PageFate::Recode(tq4), PageFate::Keep];
    let applied = cache.apply(&mut pool, GLOBAL, &fates, &mut no_move).unwrap();
    assert_eq!((applied, seen(&cache)), (Applied::default(), before));
    cache.release(&mut pool);

    // Room for one page of 32-bit floats beside what is there, not for two: neither is moved, the third is not freed.
    let mut pool = PagePool::new(12 * PAGE_BYTES + 2 * PAGE_BYTES);
    let mut cache = KvCache::new(shape(5), PageKind::F16);
    cache.grow(&mut pool, 12).unwrap();
    let (before, used) = (seen(&cache), pool.used_bytes());
    let to_f32 = PageFate::Recode(PageKind::F32);
    let refused = cache.apply(&mut pool, GLOBAL, &[to_f32, to_f32, PageFate::Free], &mut no_move).unwrap_err();
    assert!(matches!(&refused, FateError::Pool(pool) if pool.requested_bytes == 2 * PAGE_BYTES), "{refused}");
    assert_eq!((seen(&cache), pool.used_bytes()), (before, used));
    cache.apply(&mut pool, GLOBAL, &[to_f32, PageFate::Keep, PageFate::Free], &mut |_| ()).unwrap();
    cache.release(&mut pool);
    assert_eq!((pool.used_bytes(), pool.free_bytes()), (0, pool.capacity_bytes()));
}

#[test]
fn a_recoded_page_moves_to_a_frame_of_its_size() {
    let (mut pool, mut cache) = grown(100, 18);
    let kind = PageKind { keys: Encoding::Tq3, values: Encoding::Tq2 };
    let old: Vec<_> = cache.table(GLOBAL).iter().map(ResidentPage::range).collect();
    let mut moves = Vec::new();
    let fates = [PageFate::Keep, PageFate::Recode(kind), PageFate::Free, PageFate::Recode(kind), PageFate::Keep];
    let applied = cache.apply(&mut pool, GLOBAL, &fates, &mut |all| moves.extend_from_slice(all)).unwrap();
    let expected = Applied { pages_freed: 1, tokens_freed: 4, bytes_freed: PAGE_BYTES, pages_recoded: 2 };
    assert_eq!(applied, expected);
    // Four tokens of 8 elements: 3 bytes of keys, 2 of values and two scales of 2 bytes each.
    let bytes = 4 * (3 + 2 + 2 * 2);
    assert_eq!(kind.page_bytes(cache.shape()), bytes);
    for (page_move, place) in moves.iter().zip([1, 3]) {
        assert_eq!((page_move.page, page_move.len), (PageIndex(place as u32), 4));
        assert_eq!(page_move.from, PagePlace { kind: PageKind::F16, range: old[place].clone() });
        assert_eq!((page_move.to.kind, page_move.to.range.end - page_move.to.range.start), (kind, bytes));
        assert!(old.iter().all(|range| range.end <= page_move.to.range.start || page_move.to.range.end <= range.start));
    }
    let table: Vec<_> =
        cache.table(GLOBAL).iter().map(|page| (page.index.0, page.kind, page.len, page.range())).collect();
    assert_eq!(
        table,
        [
            (0, PageKind::F16, 4, old[0].clone()),
            (1, kind, 4, moves[0].to.range.clone()),
            (3, kind, 4, moves[1].to.range.clone()),
            (4, PageKind::F16, 2, old[4].clone()),
        ]
    );
    let slot = Slot { range: moves[0].to.range.clone(), kind, index: 2 };
    assert_eq!((cache.slot(GLOBAL, 6), cache.resident_tokens(GLOBAL)), (Some(slot), 14));
    let footprint = cache.footprint();
    assert_eq!(footprint.kind(kind), KindFootprint { kind, pages: 2, bytes: 2 * bytes });
    assert_eq!(footprint.kinds.iter().map(|held| held.kind).collect::<Vec<_>>(), [PageKind::F16, kind]);
    assert_eq!(footprint.payload_bytes(), pool.used_bytes());
    cache.release(&mut pool);
    assert_eq!((pool.used_bytes(), pool.free_bytes()), (0, pool.capacity_bytes()));
}

#[test]
fn window_layers_keep_what_the_next_query_sees() {
    for window in 1..14 {
        let mut pool = PagePool::new(1000 * PAGE_BYTES);
        let mut cache = KvCache::new(shape(window), PageKind::F16);
        for len in 1..40_usize {
            cache.grow(&mut pool, 1).unwrap();
            let used = pool.used_bytes();
            let applied = cache.slide_windows(&mut pool);
            assert_eq!(used - pool.used_bytes(), applied.bytes_freed);
            // The next query stands at position `len` and sees positions above `len - window`.
            let visible = |position: usize| position + window as usize > len;
            let expected: Vec<u32> = (0..len.div_ceil(4))
                .filter(|page| (page * 4..len.min(page * 4 + 4)).any(visible) || (len % 4 != 0 && page * 4 + 4 > len))
                .map(|page| page as u32)
                .collect();
            assert_eq!(indices(&cache, WINDOW), expected, "window {window}, {len} tokens");
            assert_eq!(cache.table(GLOBAL).len(), len.div_ceil(4), "global layers do not slide");
        }
        cache.release(&mut pool);
    }
}

#[test]
fn footprint_is_what_the_frames_hold() {
    let mut pool = PagePool::new(1 << 20);
    let mut cache = KvCache::new(shape(5), PageKind::F32);
    let empty = cache.footprint();
    assert_eq!((empty.payload_bytes(), empty.global_pages, empty.window_pages), (0, 0, 0));
    cache.grow(&mut pool, 30).unwrap();
    cache.slide_windows(&mut pool);
    cache
        .apply(
            &mut pool,
            GLOBAL,
            &[PageFate::Free; 7].into_iter().chain([PageFate::Keep]).collect::<Vec<_>>(),
            &mut no_move,
        )
        .unwrap();
    let footprint = cache.footprint();
    // Eight pages in one global group, one in the other; 26 - 29 and the open page's positions in two window groups.
    assert_eq!((footprint.global_pages, footprint.window_pages), (9, 4));
    assert_eq!((footprint.global_bytes, footprint.window_bytes), (9 * 256, 4 * 256));
    assert_eq!(footprint.kind(PageKind::F32), KindFootprint { kind: PageKind::F32, pages: 13, bytes: 13 * 256 });
    assert_eq!(footprint.kind(PageKind::F16), KindFootprint { kind: PageKind::F16, pages: 0, bytes: 0 });
    assert_eq!(footprint.kinds.len(), 1);
    assert_eq!(footprint.payload_bytes(), pool.used_bytes());
    assert!(footprint.metadata_bytes >= empty.metadata_bytes + 13 * size_of::<ResidentPage>() as u64);
    cache.release(&mut pool);
}

#[test]
fn tables_shrink_with_what_they_hold() {
    let (mut pool, mut cache) = grown(10_000, 4000);
    let full = cache.footprint().metadata_bytes;
    for kv_head in 0..2 {
        let fates: Vec<_> = (0..1000).map(|page| if page < 900 { PageFate::Free } else { PageFate::Keep }).collect();
        cache.apply(&mut pool, KvGroup { layer: 0, kv_head }, &fates, &mut no_move).unwrap();
    }
    cache.slide_windows(&mut pool);
    assert!(cache.footprint().metadata_bytes < full / 4);
    cache.release(&mut pool);
}

#[test]
#[should_panic(expected = "is not a group of this cache")]
fn a_group_the_shape_lacks_is_a_bug_of_the_caller() {
    let cache = KvCache::new(shape(5), PageKind::F16);
    let _ = cache.table(KvGroup { layer: 2, kv_head: 0 });
}

/// A step of the model test, for one of several caches over one pool.
#[derive(Debug, Clone)]
enum Step {
    Grow { cache: usize, num_tokens: usize },
    Apply { cache: usize, group: usize, free: u64, recode: u64 },
    Slide { cache: usize },
    Restart { cache: usize },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let cache = 0_usize..3;
    let step = prop_oneof![
        5 => (cache.clone(), 0_usize..30).prop_map(|(cache, num_tokens)| Step::Grow { cache, num_tokens }),
        4 => (cache.clone(), 0_usize..4, any::<u64>(), any::<u64>())
            .prop_map(|(cache, group, free, recode)| Step::Apply { cache, group, free, recode }),
        2 => cache.clone().prop_map(|cache| Step::Slide { cache }),
        1 => cache.prop_map(|cache| Step::Restart { cache }),
    ];
    prop::collection::vec(step, 1..60)
}

/// The same cache as sets of positions: what each group holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Model {
    len: usize,
    groups: [Vec<usize>; 4],
}

/// What is known of the pages of each group of a cache from earlier looks at it.
#[derive(Debug, Clone, Default)]
struct Follower {
    groups: [(Revision, Vec<String>); 4],
}

impl Follower {
    /// Looks at no page that has not changed, and knows what the tables hold all the same.
    fn follow(&mut self, cache: &KvCache) {
        for (group, (revision, pages)) in cache.shape().groups().zip(&mut self.groups) {
            // The last page may have got tokens.
            let num_same = cache.first_changed(group, *revision).min(pages.len().saturating_sub(1));
            pages.truncate(num_same);
            pages.extend(cache.table(group)[num_same..].iter().map(|page| format!("{page:?}")));
            *revision = cache.revision(group);
            assert!(cache.table(group).iter().map(|page| format!("{page:?}")).eq(pages.iter().cloned()));
        }
    }
}

#[test]
fn what_follows_revisions_is_what_a_table_holds() {
    let (mut pool, mut cache) = grown(100, 40);
    let start = cache.revision(GLOBAL);
    assert_eq!(cache.first_changed(GLOBAL, start), 10);
    cache.grow(&mut pool, 3).unwrap();
    assert_eq!((cache.revision(GLOBAL), cache.first_changed(GLOBAL, start)), (start, 11), "growth is no change");
    let fates = |changed: PageFate, at: usize, len: usize| {
        (0..len).map(|place| if place == at { changed } else { PageFate::Keep }).collect::<Vec<_>>()
    };
    cache.apply(&mut pool, GLOBAL, &fates(PageFate::Free, 6, 11), &mut no_move).unwrap();
    let freed = cache.revision(GLOBAL);
    assert_eq!((cache.first_changed(GLOBAL, start), cache.first_changed(GLOBAL, freed)), (6, 10));
    let recode = fates(PageFate::Recode(PageKind::of(Encoding::Tq4)), 8, 10);
    cache.apply(&mut pool, GLOBAL, &recode, &mut |_| ()).unwrap();
    assert_eq!(
        (cache.first_changed(GLOBAL, start), cache.first_changed(GLOBAL, freed)),
        (0, 8),
        "two changes are too many"
    );
    let sibling = KvGroup { layer: 0, kv_head: 0 };
    assert_eq!((cache.revision(sibling), cache.first_changed(sibling, start)), (start, 11));
    cache.release(&mut pool);
}

/// Tables, slots and ledger of `cache` say what `model` says.
fn check_against(cache: &KvCache, model: &Model) {
    assert_eq!(cache.logical_len(), model.len);
    for (group, positions) in cache.shape().groups().zip(&model.groups) {
        let held: Vec<usize> = cache
            .table(group)
            .iter()
            .flat_map(|page| page.first_position(4) as usize..page.end_position(4) as usize)
            .collect();
        assert_eq!(&held, positions);
        assert_eq!(cache.resident_tokens(group), positions.len());
        for position in 0..model.len + 5 {
            assert_eq!(cache.slot(group, position as u32).is_some(), positions.binary_search(&position).is_ok());
        }
    }
}

/// All frames of all caches are disjoint, and are all that the pool has given out.
fn check_frames(pool: &PagePool, caches: &[KvCache]) {
    let mut ranges: Vec<_> = caches
        .iter()
        .flat_map(|cache| cache.shape().groups().flat_map(|group| cache.table(group).iter().map(ResidentPage::range)))
        .collect();
    ranges.sort_unstable_by_key(|range| range.start);
    assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start), "a frame is in two tables");
    let bytes: u64 = ranges.iter().map(|range| range.end - range.start).sum();
    assert_eq!(pool.used_bytes(), bytes);
    assert_eq!(caches.iter().map(|cache| cache.footprint().payload_bytes()).sum::<u64>(), bytes);
    assert_eq!(pool.used_bytes() + pool.free_bytes() + pool.stranded_bytes(), pool.capacity_bytes());
}

proptest! {
    /// Three sequences of two kinds of page share a small pool: any history of growth, eviction, re-encoding, sliding and
    /// restarts agrees with sets of positions, and ends with an empty pool.
    #[test]
    fn releasing_returns_every_frame(num_pages in 0_u64..400, window in 1_u32..12, steps in steps()) {
        let mut pool = PagePool::new(num_pages * PAGE_BYTES);
        let fresh = |cache: usize| KvCache::new(shape(window), [PageKind::F16, PageKind::F32][cache % 2]);
        let mut caches: Vec<KvCache> = (0..3).map(fresh).collect();
        let mut models = vec![Model::default(); 3];
        let mut followers = vec![Follower::default(); 3];
        for step in steps {
            match step {
                Step::Grow { cache, num_tokens } => {
                    let before = seen(&caches[cache]);
                    let used = pool.used_bytes();
                    let needed = caches[cache].pages_needed(num_tokens);
                    let fits = pool.available(caches[cache].kind().page_bytes(&shape(1)), needed) == needed;
                    let model = &mut models[cache];
                    match caches[cache].grow(&mut pool, num_tokens) {
                        Ok(()) => {
                            prop_assert!(fits);
                            model.groups.iter_mut().for_each(|held| held.extend(model.len..model.len + num_tokens));
                            model.len += num_tokens;
                        }
                        Err(_) => prop_assert!(!fits && seen(&caches[cache]) == before && pool.used_bytes() == used),
                    }
                }
                Step::Apply { cache, group, free, recode } => {
                    let kv_group = caches[cache].shape().groups().nth(group).expect("four groups");
                    let table = caches[cache].table(kv_group);
                    let has = |mask: u64, place: usize| mask >> (place % 64) & 1 == 1;
                    let fate = |(place, page): (usize, &ResidentPage)| match (has(free, place), has(recode, place)) {
                        (true, _) => PageFate::Free,
                        (false, true) if !page.kind.is_coded() => PageFate::Recode(PageKind::of(Encoding::Tq4)),
                        (false, _) => PageFate::Keep,
                    };
                    let fates: Vec<_> = table.iter().enumerate().map(fate).collect();
                    let changes = |place: usize| fates[place] != PageFate::Keep;
                    let (mut freed, mut num_recoded) = (Vec::new(), 0);
                    for (page, fate) in table.iter().zip(&fates) {
                        match fate {
                            PageFate::Free => freed.push(page.index.0),
                            PageFate::Recode(_) => num_recoded += 1,
                            PageFate::Keep => {}
                        }
                    }
                    let model = &mut models[cache];
                    let open = model.len % 4 != 0;
                    let refused = group >= 2 || open && changes(table.len() - 1);
                    let fits = pool.available(TQ4_BYTES, num_recoded) == num_recoded;
                    let before = seen(&caches[cache]);
                    let mut num_moved = 0;
                    match caches[cache].apply(&mut pool, kv_group, &fates, &mut |moves| num_moved += moves.len() as u64) {
                        Ok(applied) => {
                            prop_assert!(!refused && fits);
                            let held = model.groups[group].len();
                            model.groups[group].retain(|position| !freed.contains(&((position / 4) as u32)));
                            prop_assert_eq!(applied.pages_freed, freed.len() as u64);
                            prop_assert_eq!(applied.tokens_freed, (held - model.groups[group].len()) as u64);
                            prop_assert_eq!((applied.pages_recoded, num_moved), (num_recoded, num_recoded));
                        }
                        Err(_) => {
                            prop_assert!((refused || !fits) && seen(&caches[cache]) == before);
                            prop_assert_eq!(num_moved, 0);
                        }
                    }
                }
                Step::Slide { cache } => {
                    caches[cache].slide_windows(&mut pool);
                    let Model { len, groups } = &mut models[cache];
                    let len = *len;
                    let stays = |page: usize| {
                        page * 4 + 3 + window as usize > len || (len % 4 != 0 && page == len / 4)
                    };
                    groups[2..].iter_mut().for_each(|held| held.retain(|position| stays(position / 4)));
                }
                Step::Restart { cache } => {
                    std::mem::replace(&mut caches[cache], fresh(cache)).release(&mut pool);
                    models[cache] = Model::default();
                    followers[cache] = Follower::default();
                }
            }
            // Not each time, so that some revisions are missed.
            if let Step::Grow { cache, .. } | Step::Slide { cache } = step {
                followers[cache].follow(&caches[cache]);
            }
            check_frames(&pool, &caches);
        }
        for ((cache, model), follower) in caches.iter().zip(&models).zip(&mut followers) {
            check_against(cache, model);
            follower.follow(cache);
        }
        for cache in caches {
            cache.release(&mut pool);
        }
        prop_assert_eq!((pool.used_bytes(), pool.free_bytes()), (0, pool.capacity_bytes()));
    }
}
