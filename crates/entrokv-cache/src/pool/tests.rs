use proptest::prelude::*;

use super::*;

/// Sizes of frames a real pool mixes, and awkward ones: the smallest page there is, codes, odd numbers, the largest.
const SIZES: [u64; 10] = [32, 96, 576, 832, 1088, 2176, 4096, 8192, 12_345, 16_384];

/// What every state of a pool must satisfy, given the frames that are live.
fn check(pool: &PagePool, live: &[Frame]) {
    let mut owned: Vec<_> = live.iter().map(Frame::range).collect();
    owned.sort_unstable_by_key(|range| range.start);
    let more = owned.chunk_by(|a, b| a.start == b.start).filter(|owners| owners.len() > 1);
    let more: BTreeMap<u64, u32> = more.map(|owners| (owners[0].start, owners.len() as u32 - 1)).collect();
    assert_eq!(pool.more_owners, more);
    owned.dedup();
    let used: u64 = owned.iter().map(|range| range.end - range.start).sum();
    assert_eq!(pool.used_bytes(), used);
    assert_eq!(pool.used_bytes() + pool.free_bytes() + pool.stranded_bytes(), pool.capacity_bytes());

    let (mut class_used, mut class_stranded) = (0, 0);
    for class in pool.classes() {
        class_used += class.used_frames * class.frame_bytes;
        class_stranded += class.stranded_frames * class.frame_bytes;
        assert!(class.num_slabs > 0 && class.used_frames >= class.num_slabs, "an empty slab is nobody's: {class:?}");
    }
    assert_eq!((class_used, class_stranded), (pool.used_bytes(), pool.stranded_bytes()));

    assert!(owned.windows(2).all(|pair| pair[0].end <= pair[1].start), "two frames overlap");
    assert!(owned.last().is_none_or(|range| range.end <= pool.capacity_bytes()));

    // The free list is what the slabs leave over, in pieces that do not touch.
    assert_eq!(pool.free.values().sum::<u64>(), pool.free_bytes());
    let pieces: Vec<_> = pool.free.iter().map(|(&offset, &len)| (offset, offset + len)).collect();
    assert!(pieces.windows(2).all(|pair| pair[0].1 < pair[1].0));
}

fn release_all(pool: &mut PagePool, frames: Vec<Frame>) {
    for frame in frames {
        pool.release(frame);
    }
}

/// One range, spelled so that nobody takes it for the numbers in it.
fn whole(range: Range<u64>) -> Vec<Range<u64>> {
    Vec::from_iter(Some(range))
}

fn take(pool: &mut PagePool, bytes: u64, count: u64) -> Vec<Frame> {
    (0..count).map(|_| pool.allocate(bytes).unwrap()).collect()
}

#[test]
fn one_class_fills_the_capacity_to_the_last_frame() {
    for bytes in SIZES.into_iter().chain([1, 31, 512 << 10, (512 << 10) + 1]) {
        for count in [1, 2, 63, 64, 65, 300, 1001] {
            let mut pool = PagePool::new(bytes * count);
            assert_eq!(pool.available(bytes, u64::MAX), count);
            let frames = take(&mut pool, bytes, count);
            assert_eq!(frames.iter().map(Frame::offset).max(), Some((count - 1) * bytes), "{count} frames of {bytes}");
            let refused = pool.allocate(bytes).unwrap_err();
            let expected = PoolExhausted {
                requested_bytes: bytes,
                free_bytes: 0,
                stranded_bytes: 0,
                capacity_bytes: bytes * count,
            };
            assert_eq!(refused, expected);
            release_all(&mut pool, frames);
            assert_eq!((pool.used_bytes(), pool.free_bytes()), (0, bytes * count));
        }
    }
}

#[test]
fn equal_calls_give_equal_offsets() {
    let mut pool = PagePool::new(1 << 20);
    let mut frames = take(&mut pool, 4096, 6);
    assert_eq!(frames.iter().map(Frame::offset).collect::<Vec<_>>(), [0, 4096, 8192, 12_288, 16_384, 20_480]);
    // Freed out of order, taken again lowest first.
    for place in [4, 1] {
        pool.release(frames.remove(place));
    }
    assert_eq!(
        [4096, 16_384, 24_576],
        [(); 3].map(|()| {
            frames.push(pool.allocate(4096).unwrap());
            frames.last().unwrap().offset()
        })
    );
    release_all(&mut pool, frames);
}

#[test]
fn slabs_move_between_classes_when_empty() {
    let mut pool = PagePool::new(64 << 10);
    let mut halves = take(&mut pool, 4096, 16);
    assert!(pool.allocate(8192).is_err(), "every slab belongs to the other class");
    // Any two neighbours make room for one of twice the size.
    let second = halves.remove(2);
    let third = halves.remove(2);
    assert_eq!((second.offset(), third.offset()), (8192, 12_288));
    pool.release(third);
    assert!(pool.allocate(8192).is_err());
    pool.release(second);
    let whole = pool.allocate(8192).unwrap();
    assert_eq!(whole.offset(), 8192);
    release_all(&mut pool, halves);
    let wholes = take(&mut pool, 8192, 7);
    assert!(pool.classes().all(|class| class.frame_bytes == 8192 && class.used_frames == 8));
    release_all(&mut pool, wholes);
    pool.release(whole);
    check(&pool, &[]);
}

#[test]
fn what_one_class_strands_is_counted() {
    // 16 MiB: slabs of 64 KiB, 16 frames of 4 KiB.
    let mut pool = PagePool::new(16 << 20);
    let frame = pool.allocate(4096).unwrap();
    assert_eq!((pool.used_bytes(), pool.stranded_bytes()), (4096, 15 * 4096));
    let usage = ClassUsage { frame_bytes: 4096, used_frames: 1, stranded_frames: 15, num_slabs: 1 };
    assert_eq!(pool.classes().collect::<Vec<_>>(), [usage]);
    assert_eq!(pool.available(8192, u64::MAX), (16 << 20) / 8192 - 8);
    assert_eq!(pool.available(4096, u64::MAX), (16 << 20) / 4096 - 1);
    pool.release(frame);
    assert_eq!((pool.stranded_bytes(), pool.classes().count()), (0, 0));
}

#[test]
fn refusals_and_odd_requests_are_defined() {
    let mut pool = PagePool::new(0);
    let message =
        "the page pool has no room for 32 bytes: 0 are free and 0 bound to page sizes in use, of a capacity of 0";
    assert_eq!(pool.allocate(32).unwrap_err().to_string(), message);
    assert_eq!(pool.reclaim(4096), []);
    let mut pool = PagePool::new(u64::MAX);
    assert_eq!(pool.available(u64::MAX, 2), 1);
    let all = pool.allocate(u64::MAX).unwrap();
    assert!(pool.allocate(0).is_err());
    pool.release(all);
    let byte = pool.allocate(0).unwrap();
    assert_eq!(byte.bytes(), 1);
    pool.release(byte);
    check(&pool, &[]);
}

#[test]
#[should_panic(expected = "the frame is one of this pool")]
fn a_frame_of_another_pool_is_refused() {
    let mut pool = PagePool::new(1 << 16);
    let mut other = PagePool::new(1 << 16);
    let foreign = other.allocate(64).unwrap();
    pool.release(foreign);
}

/// Only debug builds pay for the check.
#[cfg(debug_assertions)]
#[test]
#[should_panic(expected = "was dropped, not released")]
fn a_dropped_frame_is_a_bug() {
    drop(PagePool::new(1 << 16).allocate(64));
}

#[test]
fn a_shared_frame_is_free_when_its_last_owner_has_released_it() {
    let mut pool = PagePool::new(1 << 20);
    let frame = pool.allocate(4096).unwrap();
    let (second, third) = (pool.share(&frame), pool.share(&frame));
    assert_eq!((second.range(), pool.used_bytes()), (frame.range(), 4096));
    let other = pool.allocate(4096).unwrap();
    assert_ne!(other.offset(), frame.offset());
    // The first owner is like any other.
    pool.release(frame);
    pool.release(third);
    assert!(!pool.is_shared(&second));
    assert_eq!((pool.used_bytes(), pool.reclaim(1)), (8192, Vec::new()));
    pool.release(second);
    assert_eq!((pool.used_bytes(), pool.reclaim(4096)), (4096, whole(0..4096)));
    pool.release(other);
    check(&pool, &[]);
}

#[test]
#[should_panic(expected = "the frame is one of this pool")]
fn a_frame_of_another_pool_is_not_shared() {
    let mut pool = PagePool::new(1 << 16);
    let foreign = PagePool::new(1 << 16).allocate(64).unwrap();
    let _ = pool.share(&foreign);
}

#[test]
fn reclaim_returns_what_became_free_and_nothing_else() {
    let mut pool = PagePool::new(10 * 4096 + 1024);
    // Two frames share a granule.
    let mut halves = take(&mut pool, 2048, 8);
    assert_eq!(pool.reclaim(4096), [], "nothing was released yet");
    pool.release(halves.remove(0));
    assert_eq!(pool.reclaim(4096), [], "its neighbour lives");
    pool.release(halves.remove(0));
    assert_eq!(pool.reclaim(4096), whole(0..4096));
    assert_eq!(pool.reclaim(4096), [], "given out once");
    // Released and taken again before the call: still in use.
    pool.release(halves.remove(0));
    pool.release(halves.remove(0));
    let again = pool.allocate(2048).unwrap();
    assert_eq!(again.offset(), 0, "the lowest is taken first");
    let another = take(&mut pool, 2048, 2);
    assert_eq!(another.iter().map(Frame::offset).collect::<Vec<_>>(), [2048, 4096]);
    assert_eq!(pool.reclaim(4096), []);
    // Neighbouring granules come back as one range; the last, incomplete granule never does.
    release_all(&mut pool, halves);
    release_all(&mut pool, another);
    pool.release(again);
    assert_eq!(pool.reclaim(4096), whole(0..16_384));
    let tail = take(&mut pool, 1024, 41);
    release_all(&mut pool, tail);
    assert_eq!(pool.reclaim(4096), whole(0..40_960));
}

/// A step of the model test.
#[derive(Debug, Clone)]
enum Step {
    Allocate { size: usize, count: u64 },
    Release { seed: usize, count: usize },
    Share { seed: usize, count: usize },
    Reclaim,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0..SIZES.len(), 1_u64..40).prop_map(|(size, count)| Step::Allocate { size, count }),
        4 => (any::<usize>(), 1_usize..40).prop_map(|(seed, count)| Step::Release { seed, count }),
        1 => (any::<usize>(), 1_usize..10).prop_map(|(seed, count)| Step::Share { seed, count }),
        1 => Just(Step::Reclaim),
    ];
    prop::collection::vec(step, 1..120)
}

/// Runs `steps`, checking the pool after each; returns every offset that was handed out.
fn run(capacity: u64, sizes: &[u64], steps: &[Step]) -> Vec<u64> {
    let mut pool = PagePool::new(capacity);
    let mut live: Vec<Frame> = Vec::new();
    let mut offsets = Vec::new();
    // Byte granules the owner of the bytes still backs: written when taken, dropped when reclaimed.
    const GRANULE: u64 = 4096;
    let mut dirty: BTreeSet<u64> = BTreeSet::new();
    for step in steps {
        match *step {
            Step::Allocate { size, count } => {
                let bytes = sizes[size % sizes.len()];
                let available = pool.available(bytes, count);
                for nth in 0..count {
                    match pool.allocate(bytes) {
                        Ok(frame) => {
                            assert!(nth < available, "the pool gave more than it said");
                            assert!(frame.offset().is_multiple_of(alignment(bytes)));
                            dirty.extend(frame.offset() / GRANULE..=(frame.range().end - 1) / GRANULE);
                            offsets.push(frame.offset());
                            live.push(frame);
                        }
                        Err(refused) => {
                            assert!(nth >= available, "the pool gave less than it said: {refused}");
                        }
                    }
                }
            }
            Step::Release { seed, count } => {
                for nth in 0..count.min(live.len()) {
                    let place = seed.wrapping_add(nth.wrapping_mul(31)) % live.len();
                    pool.release(live.swap_remove(place));
                }
            }
            Step::Share { seed, count } => {
                for nth in 0..count.min(live.len()) {
                    let place = seed.wrapping_add(nth.wrapping_mul(31)) % live.len();
                    live.push(pool.share(&live[place]));
                }
            }
            Step::Reclaim => {
                for range in pool.reclaim(GRANULE) {
                    assert!(range.start.is_multiple_of(GRANULE) && range.end.is_multiple_of(GRANULE));
                    assert!(!live.iter().any(|frame| frame.offset() < range.end && range.start < frame.range().end));
                    for granule in range.start / GRANULE..range.end / GRANULE {
                        dirty.remove(&granule);
                    }
                }
                // Nothing that could go back is kept: whatever is backed still holds a live frame (or the last,
                // incomplete granule).
                let needed: BTreeSet<u64> = live
                    .iter()
                    .flat_map(|frame| frame.offset() / GRANULE..=(frame.range().end - 1) / GRANULE)
                    .collect();
                assert!(dirty.iter().all(|granule| needed.contains(granule) || (granule + 1) * GRANULE > capacity));
            }
        }
        check(&pool, &live);
    }
    release_all(&mut pool, live);
    check(&pool, &[]);
    assert_eq!(pool.free_bytes(), capacity, "a leak");
    assert!(pool.classes().next().is_none() && pool.slabs.is_empty());
    offsets
}

proptest! {
    #[test]
    fn used_free_and_stranded_make_the_capacity(capacity in 0_u64..400_000, steps in steps()) {
        run(capacity, &SIZES, &steps);
    }

    /// The larger capacities have slabs of many frames.
    #[test]
    fn no_two_live_frames_overlap(capacity in 1_u64 << 20..1 << 25, steps in steps()) {
        let first = run(capacity, &SIZES, &steps);
        prop_assert_eq!(first, run(capacity, &SIZES, &steps), "the same calls gave other offsets");
    }

    /// With f16 pages and their double in use, whatever the history, no slab of one kind misaligns the other.
    #[test]
    fn frames_are_aligned_to_their_power_of_two(capacity in 0_u64..1 << 22, steps in steps()) {
        run(capacity, &[4096, 8192, 1088], &steps);
        prop_assert_eq!([32, 96, 1088, 4096, 8192, 12_345].map(alignment), [32, 32, 64, 4096, 4096, 1]);
    }

    /// A single class never loses a frame to its own history.
    #[test]
    fn one_class_is_never_refused_below_its_capacity(frames in 1_u64..900, size in 0..SIZES.len(), steps in steps()) {
        let bytes = SIZES[size];
        let mut pool = PagePool::new(frames * bytes);
        let mut live: Vec<Frame> = Vec::new();
        for step in steps {
            match step {
                Step::Allocate { count, .. } => {
                    for _ in 0..count * 8 {
                        let room = (live.len() as u64) < frames;
                        let got = pool.allocate(bytes);
                        prop_assert_eq!(got.is_ok(), room);
                        live.extend(got);
                    }
                }
                Step::Release { seed, count } => {
                    for nth in 0..(count * 8).min(live.len()) {
                        let place = seed.wrapping_add(nth.wrapping_mul(31)) % live.len();
                        pool.release(live.swap_remove(place));
                    }
                }
                Step::Share { .. } | Step::Reclaim => drop(pool.reclaim(4096)),
            }
        }
        release_all(&mut pool, live);
    }
}
