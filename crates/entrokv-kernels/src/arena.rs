//! A range of address space for a pool of pages, in which only what is used costs memory.
//!
//! The whole capacity is reserved at once, so that frames never move; the operating system backs an address with memory
//! when it is first written, and takes it back on [`Arena::release`]. What the process holds resident is then what the
//! pool has in use (rounded to the pages of the operating system), not its capacity.
//!
//! **Huge pages** (Linux), because attention reads gigabytes a second out of here: behind pages of 4 KiB the address
//! translation limits a core to about two thirds of the bandwidth that it has behind pages of 2 MiB, and each costs a fault of
//! microseconds when a prompt first writes it. But a huge page is resident as a whole, and the system fills holes to make one.
//! So a block of 2 MiB may have one only while nothing of it has been given back. Resident memory exceeds what is in use by
//! less than one huge page for each place at which the use is growing, which for a pool that takes its lowest
//! frames first is one, and by nothing in blocks with holes.

mod blocks;

use std::fmt;
use std::io;
use std::ops::Range;

use memmap2::{MmapMut, MmapOptions};

use crate::disjoint::DisjointMut;
use crate::threads::Threads;

use blocks::{Backing, Blocks};

/// An anonymous reservation, zero until written.
pub struct Arena {
    /// `None` for an empty reservation, which `mmap` refuses.
    map: Option<MmapMut>,
    /// What of it is in use.
    blocks: Blocks,
}

impl Arena {
    /// Reserves `bytes` of address space. No memory is used and no swap is set aside yet.
    ///
    /// # Errors
    /// What the operating system says, when the range does not fit the address space or the process's limit.
    pub fn reserve(bytes: u64) -> io::Result<Arena> {
        let len = usize::try_from(bytes).map_err(|_| {
            io::Error::new(io::ErrorKind::OutOfMemory, format!("{bytes} bytes do not fit the address space"))
        })?;
        if len == 0 {
            return Ok(Arena { map: None, blocks: Blocks::default() });
        }
        let map = MmapOptions::new().len(len).no_reserve_swap().map_anon()?;
        let blocks = Blocks::new(map.as_ptr().addr() as u64, bytes, Self::os_page());
        let arena = Arena { map: Some(map), blocks };
        arena.back(0..bytes, Backing::Huge);
        Ok(arena)
    }

    /// Bytes reserved.
    pub fn len(&self) -> u64 {
        self.map.as_ref().map_or(0, |map| map.len() as u64)
    }

    /// Whether nothing is reserved.
    pub fn is_empty(&self) -> bool {
        self.map.is_none()
    }

    /// The bytes of `range`.
    ///
    /// # Panics
    /// If `range` is not inside the reservation.
    pub fn bytes(&self, range: Range<u64>) -> &[u8] {
        let range = self.checked(range);
        self.map.as_ref().map_or(&[], |map| &map[range])
    }

    /// The bytes of `range`, to be written.
    ///
    /// # Panics
    /// If `range` is not inside the reservation.
    pub fn bytes_mut(&mut self, range: Range<u64>) -> &mut [u8] {
        self.blocks.take(range.clone());
        let range = self.checked(range);
        self.map.as_mut().map_or(&mut [], |map| &mut map[range])
    }

    /// Runs `task(index, bytes)` for the bytes of each of `ranges`, in any order and on all `threads`.
    ///
    /// # Panics
    /// If a range is not inside the reservation, or two overlap.
    pub fn for_each_range(&mut self, threads: &Threads, ranges: &[Range<u64>], task: impl Fn(usize, &mut [u8]) + Sync) {
        let mut ascending: Vec<Range<usize>> = ranges.iter().map(|range| self.checked(range.clone())).collect();
        ascending.sort_unstable_by_key(|range| (range.start, range.end));
        for pair in ascending.windows(2) {
            assert!(pair[0].end <= pair[1].start, "{:?} and {:?} overlap", pair[0], pair[1]);
        }
        ranges.iter().for_each(|range| self.blocks.take(range.clone()));
        let bytes = DisjointMut::new(self.map.as_mut().map_or(&mut [][..], |map| &mut map[..]));
        threads.for_each(ranges.len(), |index| {
            let Range { start, end } = ranges[index];
            // SAFETY: no two ranges overlap (checked above), and every index is run once. No truncation: the range was checked
            // to be inside the map.
            task(index, unsafe { bytes.part(start as usize..end as usize) });
        });
    }

    /// Gives the memory of every whole page of the operating system inside `range` back to it; these bytes read as zero
    /// from then on. Bytes of `range` that share such a page with others are left as they are.
    ///
    /// # Panics
    /// If `range` is not inside the reservation.
    pub fn release(&mut self, range: Range<u64>) {
        let os_page = Self::os_page();
        let range = range.start.next_multiple_of(os_page)..range.end / os_page * os_page;
        if range.start >= range.end {
            return;
        }
        self.checked(range.clone());
        for released in self.blocks.release(range) {
            if released.backing == Some(Backing::Small)
                && let Some(unused) = released.unused.first()
            {
                // Before part of a huge page goes: the parts only become memory of their own when it is taken apart.
                self.split(unused.start..unused.start + os_page);
            }
            if let Some(backing) = released.backing {
                self.back(released.block, backing);
            }
            released.unused.into_iter().for_each(|range| self.drop_pages(range));
        }
    }

    /// Says what pages of the operating system `range` may get. Only advice: a system without huge pages answers with an
    /// error, and everything works without.
    fn back(&self, range: Range<u64>, backing: Backing) {
        #[cfg(target_os = "linux")]
        if let Some(map) = &self.map {
            let advice = match backing {
                Backing::Huge => memmap2::Advice::HugePage,
                Backing::Small => memmap2::Advice::NoHugePage,
            };
            let Range { start, end } = self.checked(range);
            let _ = map.advise_range(advice, start, end - start);
        }
        #[cfg(not(target_os = "linux"))]
        let _ = (range, backing);
    }

    /// Takes the huge page around `range`, a part of it that nothing uses, apart into ordinary ones, if it is one.
    fn split(&mut self, range: Range<u64>) {
        let range = self.checked(range);
        #[cfg(target_os = "linux")]
        if let Some(map) = &mut self.map {
            use memmap2::UncheckedAdvice;
            // SAFETY: as in `drop_pages`: until it is written again `range` may read as zero at any time, and nothing reads it
            // before.
            let _ = unsafe { map.unchecked_advise_range(UncheckedAdvice::Free, range.start, range.end - range.start) };
        }
        #[cfg(not(target_os = "linux"))]
        let _ = range;
    }

    /// Gives the memory of `range`, whole pages, back: it reads as zero from then on.
    fn drop_pages(&mut self, range: Range<u64>) {
        let range = self.checked(range);
        let Some(map) = &mut self.map else { return };
        #[cfg(target_os = "linux")]
        {
            use memmap2::UncheckedAdvice;
            // SAFETY: the map is private, anonymous and exclusively borrowed, so that no reference into the range can see its
            // bytes become zero; the range is inside the map and made of whole pages, so no other byte does.
            let advised =
                unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, range.start, range.end - range.start) };
            if advised.is_ok() {
                return;
            }
        }
        // Elsewhere, or refused (locked memory): the promise of zeros is kept, the memory stays.
        map[range].fill(0);
    }

    /// Bytes of a page of the operating system, the granule of [`Arena::release`].
    pub fn os_page() -> u64 {
        #[cfg(unix)]
        {
            rustix::param::page_size() as u64
        }
        #[cfg(not(unix))]
        {
            4096
        }
    }

    fn checked(&self, range: Range<u64>) -> Range<usize> {
        assert!(
            range.start <= range.end && range.end <= self.len(),
            "{range:?} is not inside an arena of {} bytes",
            self.len()
        );
        // No truncation: both ends are at most the map's length, a usize.
        range.start as usize..range.end as usize
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena").field("bytes", &self.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Held by tests of large arenas, which may lie in one mapping.
    static MEASURED: std::sync::Mutex<()> = std::sync::Mutex::new(());

    /// Bytes of the arena that the system holds in memory, and how many of them in huge pages.
    #[cfg(target_os = "linux")]
    fn resident_bytes(arena: &Arena) -> (u64, u64) {
        let address = arena.bytes(0..1).as_ptr() as u64;
        let parse = |x| u64::from_str_radix(x, 16).ok();
        let (mut inside, mut resident, mut huge) = (false, 0, 0);
        for line in std::fs::read_to_string("/proc/self/smaps").unwrap().lines() {
            let mut words = line.split_whitespace();
            let (name, value) = (words.next().unwrap(), words.next());
            if let Some((start, end)) = name.split_once('-')
                && let (Some(start), Some(end)) = (parse(start), parse(end))
            {
                inside = start < address + arena.len() && end > address;
            }
            let kib = |value: Option<&str>| value.unwrap().parse::<u64>().unwrap() * 1024;
            match name {
                "Rss:" if inside => resident += kib(value),
                "AnonHugePages:" if inside => huge += kib(value),
                _ => {}
            }
        }
        (resident, huge)
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn only_what_is_used_is_resident() {
        // Small arenas of other tests may lie in the same mapping; a huge page may be backed as a whole.
        const SLACK: u64 = 8 * MIB;
        let _alone = MEASURED.lock();
        let mut arena = Arena::reserve(4096 * MIB).unwrap();
        assert!(resident_bytes(&arena).0 < SLACK, "reserving is free");
        arena.bytes_mut(MIB..129 * MIB).fill(7);
        assert!((128 * MIB..128 * MIB + SLACK).contains(&resident_bytes(&arena).0));
        // A quarter of the pages, scattered: what is left has holes that nothing fills.
        for start in (MIB..129 * MIB).step_by(4 * Arena::os_page() as usize) {
            arena.release(start..start + Arena::os_page());
        }
        let (resident, huge) = resident_bytes(&arena);
        assert!((96 * MIB..96 * MIB + SLACK).contains(&resident), "{resident}");
        assert!(huge < SLACK, "{huge} bytes in huge pages that have holes");
        arena.release(MIB..129 * MIB);
        assert!(resident_bytes(&arena).0 < SLACK, "released memory has gone back");
        assert!(arena.bytes(0..130 * MIB).iter().all(|&b| b == 0));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn blocks_without_holes_are_in_huge_pages_where_the_system_has_them() {
        let enabled = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
        let _alone = MEASURED.lock();
        let mut arena = Arena::reserve(64 * MIB).unwrap();
        for _ in 0..2 {
            arena.bytes_mut(0..64 * MIB).fill(1);
            let (resident, huge) = resident_bytes(&arena);
            // Only a system that is short of memory gives less than most.
            println!("{huge} of {resident} bytes in huge pages: {enabled}");
            assert!(huge == 0 || huge >= 32 * MIB);
            arena.release(0..Arena::os_page());
            arena.release(0..64 * MIB);
        }
    }

    #[test]
    fn release_keeps_to_whole_pages_of_the_operating_system() {
        let page = Arena::os_page();
        let mut arena = Arena::reserve(4 * page).unwrap();
        arena.bytes_mut(0..4 * page).fill(1);
        arena.release(1..3 * page - 1);
        for (index, byte) in arena.bytes(0..4 * page).iter().enumerate() {
            let released = (page..2 * page).contains(&(index as u64));
            assert_eq!(*byte, u8::from(!released), "byte {index}");
        }
        arena.release(0..10);
        arena.release(4 * page..4 * page);
        assert_eq!(arena.bytes(0..1), [1]);
    }

    #[test]
    fn threads_write_ranges_in_any_order() {
        let mut arena = Arena::reserve(100).unwrap();
        let threads = Threads::new(std::num::NonZeroUsize::new(3).unwrap());
        let ranges: Vec<_> = (0..10).rev().map(|i| 10 * i..10 * i + 9).collect();
        arena.for_each_range(&threads, &ranges, |index, bytes| bytes.fill(index as u8 + 1));
        for (at, byte) in arena.bytes(0..100).iter().enumerate() {
            assert_eq!(*byte, if at % 10 == 9 { 0 } else { 10 - at as u8 / 10 }, "byte {at}");
        }
        Arena::reserve(0).unwrap().for_each_range(&threads, &[], |_, _| unreachable!("there is no range"));
    }

    #[test]
    #[should_panic(expected = "3..6 and 5..9 overlap")]
    fn ranges_that_overlap_panic() {
        let threads = Threads::new(std::num::NonZeroUsize::MIN);
        Arena::reserve(10).unwrap().for_each_range(&threads, &[5..9, 0..1, 3..6], |_, _| ());
    }

    #[test]
    fn an_empty_arena_is_fine_and_an_absurd_one_an_error() {
        let mut arena = Arena::reserve(0).unwrap();
        assert!(arena.is_empty() && arena.bytes(0..0).is_empty() && arena.bytes_mut(0..0).is_empty());
        arena.release(0..0);
        assert!(Arena::reserve(1 << 62).is_err());
    }

    #[test]
    #[should_panic(expected = "not inside an arena of 10 bytes")]
    fn a_range_outside_panics() {
        let _ = Arena::reserve(10).unwrap().bytes(5..11);
    }
}
