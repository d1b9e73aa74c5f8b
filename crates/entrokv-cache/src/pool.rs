//! Frames for pages of every kind, under one cap on bytes.
//!
//! The pool deals in offsets alone; whoever embeds it keeps the bytes. The capacity `0..capacity_bytes` is cut into
//! *slabs* of up to 64 equal frames. A slab serves one size class, the frames of one number of bytes, and goes back to
//! the pool when its last frame is released, so that any class may have it next. What a slab holds beyond live frames
//! is *stranded*: only its own class can use it. It is counted, not hidden.
//!
//! Invariants, each a test of that name:
//!
//! * `used_free_and_stranded_make_the_capacity`, always.
//! * `no_two_live_frames_overlap`.
//! * `one_class_fills_the_capacity_to_the_last_frame`: with a single class nothing is lost to rounding; room for `n`
//!   frames holds `n`.
//! * `equal_calls_give_equal_offsets`: the lowest slab with room, then the lowest frame in it; there is no other state.
//! * `slabs_move_between_classes_when_empty`.
//! * `frames_are_aligned_to_their_power_of_two`: to the largest one that divides their bytes, up to 4,096. A frame of
//!   whole OS pages therefore starts on one, and freeing it frees them.
//! * `reclaim_returns_what_became_free_and_nothing_else`.
//! * `a_shared_frame_is_free_when_its_last_owner_has_released_it`; until then its bytes count once, whoever owns it.
//!
//! Taking and releasing a frame cost the logarithm of the number of slabs, and of the number of shared frames. Opening a slab walks past the free ranges
//! too small for one frame of the class: none while there is one class, few when there are few.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use thiserror::Error;

/// Frames of a slab at most: one bit of a word each.
const MAX_SLAB_FRAMES: u64 = 64;
/// Bytes of a slab at most (one frame at least): what a class may strand in one slab stays small beside real caches.
const MAX_SLAB_BYTES: u64 = 512 << 10;
/// A slab takes no more than this part of the capacity (one frame at least), so that classes can share small pools.
const MIN_SLABS: u64 = 256;
/// Frames are aligned no further than to an OS page of the usual size.
const MAX_ALIGNMENT: u64 = 4096;

/// A byte-capped allocator of page frames in size classes.
#[derive(Debug)]
pub struct PagePool {
    capacity_bytes: u64,
    used_bytes: u64,
    /// Bytes of all slabs.
    slab_bytes: u64,
    /// Ranges in no slab, by offset; no two touch.
    free: BTreeMap<u64, u64>,
    /// Slabs by offset.
    slabs: BTreeMap<u64, Slab>,
    /// Classes by bytes of a frame, those with a slab.
    classes: BTreeMap<u64, Class>,
    /// Owners beyond the first of the frames that have any, by offset.
    more_owners: BTreeMap<u64, u32>,
    /// Ranges of frames released since the last [`PagePool::reclaim`], by offset; no two touch.
    released: BTreeMap<u64, u64>,
}

/// A run of equal frames; one bit each tells which are free.
#[derive(Debug)]
struct Slab {
    frame_bytes: u64,
    num_frames: u64,
    free: u64,
}

/// The slabs of one size of frame.
#[derive(Debug, Default)]
struct Class {
    num_slabs: u64,
    used_frames: u64,
    stranded_frames: u64,
    /// Offsets of slabs with a free frame.
    open: BTreeSet<u64>,
}

/// The bytes a page lives in, from [`PagePool::allocate`] until it is given to [`PagePool::release`].
///
/// It cannot be copied, so a page is freed once or not at all; where several own its bytes ([`PagePool::share`]), each has a
/// frame to release. Dropping one leaks its bytes from the pool for good, which debug builds refuse (unless a panic is
/// unwinding already).
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a frame that is dropped is lost to its pool"]
pub struct Frame {
    offset: u64,
    bytes: u64,
}

/// What one size class holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClassUsage {
    /// Bytes of each frame.
    pub frame_bytes: u64,
    /// Frames handed out.
    pub used_frames: u64,
    /// Frames of its slabs that are free: no other class can use them until their slab is empty.
    pub stranded_frames: u64,
    /// Slabs it holds.
    pub num_slabs: u64,
}

impl PagePool {
    /// An empty pool of `capacity_bytes`, of which frames may take every one.
    pub fn new(capacity_bytes: u64) -> Self {
        let free = if capacity_bytes > 0 { BTreeMap::from([(0, capacity_bytes)]) } else { BTreeMap::new() };
        Self {
            capacity_bytes,
            used_bytes: 0,
            slab_bytes: 0,
            free,
            slabs: BTreeMap::new(),
            classes: BTreeMap::new(),
            more_owners: BTreeMap::new(),
            released: BTreeMap::new(),
        }
    }

    /// A frame of `bytes` bytes (of one byte for zero), at the lowest offset its class has room at.
    ///
    /// # Errors
    /// [`PoolExhausted`], and nothing changed, where neither a slab of the class nor a free range has room.
    pub fn allocate(&mut self, bytes: u64) -> Result<Frame, PoolExhausted> {
        let bytes = bytes.max(1);
        let open = self.classes.get(&bytes).and_then(|class| class.open.first().copied());
        let Some(slab_offset) = open.or_else(|| self.open_slab(bytes)) else {
            return Err(self.exhausted(bytes));
        };
        let slab = self.slabs.get_mut(&slab_offset).expect("the open slabs of a class are slabs of the pool");
        let class = self.classes.get_mut(&bytes).expect("a class with an open slab exists");
        let slot = u64::from(slab.free.trailing_zeros());
        slab.free &= slab.free - 1;
        if slab.free == 0 {
            class.open.remove(&slab_offset);
        }
        class.used_frames += 1;
        class.stranded_frames -= 1;
        self.used_bytes += bytes;
        Ok(Frame { offset: slab_offset + slot * bytes, bytes })
    }

    /// The same bytes for one owner more: who writes to them now is seen by all. They are free when each owner has released
    /// its own.
    ///
    /// # Panics
    /// If `frame` came from another pool and this one holds no such frame.
    pub fn share(&mut self, frame: &Frame) -> Frame {
        let Frame { offset, bytes } = *frame;
        self.live_slot(frame);
        *self.more_owners.entry(offset).or_insert(0) += 1;
        Frame { offset, bytes }
    }

    /// Whether others own the bytes of `frame`, too.
    pub fn is_shared(&self, frame: &Frame) -> bool {
        self.more_owners.contains_key(&frame.offset)
    }

    /// Takes `frame` back; if nobody else owns its bytes they are free, and a slab that is empty now may serve any class.
    ///
    /// # Panics
    /// If `frame` came from another pool and this one holds no such frame.
    pub fn release(&mut self, frame: Frame) {
        let Range { start: offset, end } = frame.range();
        let bytes = frame.bytes;
        let (slab_offset, slot) = self.live_slot(&frame);
        std::mem::forget(frame);
        if let Entry::Occupied(mut more) = self.more_owners.entry(offset) {
            *more.get_mut() -= 1;
            if *more.get() == 0 {
                more.remove();
            }
            return;
        }
        let slab = self.slabs.get_mut(&slab_offset).expect("a live frame lies in a slab");
        slab.free |= 1 << slot;
        let is_empty = slab.free == slab.all_free();
        let slab_len = slab.num_frames * bytes;
        let class = self.classes.get_mut(&bytes).expect("a live frame has a class");
        class.used_frames -= 1;
        class.stranded_frames += 1;
        self.used_bytes -= bytes;
        if is_empty {
            class.open.remove(&slab_offset);
            class.stranded_frames -= slab_len / bytes;
            class.num_slabs -= 1;
            if class.num_slabs == 0 {
                self.classes.remove(&bytes);
            }
            self.slabs.remove(&slab_offset);
            self.slab_bytes -= slab_len;
            insert_merging(&mut self.free, slab_offset..slab_offset + slab_len);
        } else {
            class.open.insert(slab_offset);
        }
        insert_merging(&mut self.released, offset..end);
    }

    /// Frames of `bytes` bytes that could be allocated now, counted up to `wanted`.
    pub fn available(&self, bytes: u64, wanted: u64) -> u64 {
        let bytes = bytes.max(1);
        let mut frames = self.classes.get(&bytes).map_or(0, |class| class.stranded_frames);
        let mut ranges = self.free.iter();
        while frames < wanted
            && let Some((&offset, &len)) = ranges.next()
        {
            frames += frames_within(offset..offset + len, bytes);
        }
        frames.min(wanted)
    }

    /// Ranges that became wholly free since the last call, in whole granules at multiples of `granule`, ascending.
    ///
    /// A range is returned if something in it was released since the last call and no live frame touches it now, so a
    /// frame that was released and taken again is not. The cost is that of what was released, not of the pool. Whoever
    /// keeps the bytes may give those ranges back to the operating system.
    pub fn reclaim(&mut self, granule: u64) -> Vec<Range<u64>> {
        let granule = granule.max(1);
        let mut ranges: Vec<Range<u64>> = Vec::new();
        let mut examined = 0;
        for (offset, len) in std::mem::take(&mut self.released) {
            let mut start = (offset / granule * granule).max(examined);
            while start < offset + len && start.checked_add(granule).is_some_and(|end| end <= self.capacity_bytes) {
                let end = start + granule;
                if self.is_free(start..end) {
                    match ranges.last_mut() {
                        Some(last) if last.end == start => last.end = end,
                        _ => ranges.push(start..end),
                    }
                }
                start = end;
                examined = end;
            }
        }
        ranges
    }

    /// Bytes of live frames.
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// Bytes in no slab, which any class may take.
    pub fn free_bytes(&self) -> u64 {
        self.capacity_bytes - self.slab_bytes
    }

    /// Bytes of slabs that no live frame holds: of use to their own class alone.
    pub fn stranded_bytes(&self) -> u64 {
        self.slab_bytes - self.used_bytes
    }

    /// The cap: used, free and stranded bytes together.
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    /// The size classes that hold a slab, by bytes of a frame.
    pub fn classes(&self) -> impl Iterator<Item = ClassUsage> + '_ {
        self.classes.iter().map(|(&frame_bytes, class)| ClassUsage {
            frame_bytes,
            used_frames: class.used_frames,
            stranded_frames: class.stranded_frames,
            num_slabs: class.num_slabs,
        })
    }

    /// The refusal of `requested_bytes`, with the pool as it stands.
    pub(crate) fn exhausted(&self, requested_bytes: u64) -> PoolExhausted {
        PoolExhausted {
            requested_bytes,
            free_bytes: self.free_bytes(),
            stranded_bytes: self.stranded_bytes(),
            capacity_bytes: self.capacity_bytes,
        }
    }

    /// The slab in which `frame` lies, and its place there.
    ///
    /// # Panics
    /// If this pool holds no such frame.
    fn live_slot(&self, frame: &Frame) -> (u64, u64) {
        let Frame { offset, bytes } = *frame;
        let (&slab_offset, slab) = self.slabs.range(..=offset).next_back().expect("the frame is one of this pool");
        let slot = (offset - slab_offset) / slab.frame_bytes;
        let is_live = slab.frame_bytes == bytes
            && (offset - slab_offset).is_multiple_of(bytes)
            && slot < slab.num_frames
            && slab.free & (1 << slot) == 0;
        assert!(is_live, "the frame is one of this pool");
        (slab_offset, slot)
    }

    /// Cuts a slab for frames of `bytes` from the lowest free range with room for one, and returns its offset.
    fn open_slab(&mut self, bytes: u64) -> Option<u64> {
        let (start, len) =
            self.free.iter().map(|(&offset, &len)| (offset, len)).find(|&(o, l)| frames_within(o..o + l, bytes) > 0)?;
        let end = start + len;
        let offset = start.next_multiple_of(alignment(bytes));
        let num_frames = frames_within(start..end, bytes).min(slab_frames(bytes, self.capacity_bytes));
        let slab_end = offset + num_frames * bytes;
        self.free.remove(&start);
        for rest in [start..offset, slab_end..end] {
            if !rest.is_empty() {
                self.free.insert(rest.start, rest.end - rest.start);
            }
        }
        let mut slab = Slab { frame_bytes: bytes, num_frames, free: 0 };
        slab.free = slab.all_free();
        self.slabs.insert(offset, slab);
        self.slab_bytes += num_frames * bytes;
        let class = self.classes.entry(bytes).or_default();
        class.num_slabs += 1;
        class.stranded_frames += num_frames;
        class.open.insert(offset);
        Some(offset)
    }

    /// Whether no live frame touches `range`, which is not empty.
    fn is_free(&self, range: Range<u64>) -> bool {
        self.slabs.range(..range.end).rev().take_while(|(offset, slab)| *offset + slab.bytes() > range.start).all(
            |(&offset, slab)| {
                let first = range.start.saturating_sub(offset) / slab.frame_bytes;
                let last = ((range.end - 1 - offset) / slab.frame_bytes).min(slab.num_frames - 1);
                let touched = (u64::MAX >> (MAX_SLAB_FRAMES - 1 - (last - first))) << first;
                slab.free & touched == touched
            },
        )
    }
}

impl Slab {
    fn bytes(&self) -> u64 {
        self.num_frames * self.frame_bytes
    }

    /// The word in which every frame is free.
    fn all_free(&self) -> u64 {
        u64::MAX >> (MAX_SLAB_FRAMES - self.num_frames)
    }
}

impl Frame {
    /// Where it starts.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// How long it is.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The bytes it is.
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.bytes
    }
}

impl Drop for Frame {
    fn drop(&mut self) {
        debug_assert!(
            std::thread::panicking(),
            "a frame of {} bytes at {} was dropped, not released",
            self.bytes,
            self.offset
        );
    }
}

/// The largest power of two that divides `bytes`, up to [`MAX_ALIGNMENT`].
fn alignment(bytes: u64) -> u64 {
    (bytes & bytes.wrapping_neg()).min(MAX_ALIGNMENT)
}

/// Aligned frames of `bytes` that fit into `range`, side by side.
fn frames_within(range: Range<u64>, bytes: u64) -> u64 {
    let aligned = range.start.checked_next_multiple_of(alignment(bytes)).unwrap_or(range.end);
    range.end.saturating_sub(aligned) / bytes
}

/// Frames of a new slab, as long as the range it is cut from has room.
fn slab_frames(bytes: u64, capacity_bytes: u64) -> u64 {
    (MAX_SLAB_BYTES.min(capacity_bytes / MIN_SLABS) / bytes).clamp(1, MAX_SLAB_FRAMES)
}

/// Adds `range`, which overlaps none of `ranges` or lies within one, and joins it with those it touches.
fn insert_merging(ranges: &mut BTreeMap<u64, u64>, range: Range<u64>) {
    let Range { mut start, mut end } = range;
    if let Some((&offset, &len)) = ranges.range(..=start).next_back()
        && offset + len >= start
    {
        start = offset;
        end = end.max(offset + len);
    }
    // Ranges that begin inside the new one or where it ends: usually at most one, more only where released frames of
    // different sizes overlap in time, and each is removed once.
    while let Some((&offset, &len)) = ranges.range(start..=end).next() {
        ranges.remove(&offset);
        end = end.max(offset + len);
    }
    ranges.insert(start, end - start);
}

/// The pool has no room for what was asked.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "the page pool has no room for {requested_bytes} bytes: {free_bytes} are free and {stranded_bytes} bound to page \
     sizes in use, of a capacity of {capacity_bytes}"
)]
pub struct PoolExhausted {
    /// Bytes that were to be allocated.
    pub requested_bytes: u64,
    /// Bytes any class could take.
    pub free_bytes: u64,
    /// Bytes only their own class could take.
    pub stranded_bytes: u64,
    /// The cap.
    pub capacity_bytes: u64,
}

#[cfg(test)]
mod tests;
