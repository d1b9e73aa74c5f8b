//! A range of address space for a pool of pages, in which only what is used costs memory.
//!
//! The whole capacity is reserved at once, so that frames never move; the operating system backs an address with memory
//! when it is first written, and takes it back on [`Arena::release`]. What the process holds resident is then what the
//! pool has in use (rounded to the pages of the operating system), not its capacity.

use std::fmt;
use std::io;
use std::ops::Range;

use memmap2::{MmapMut, MmapOptions};

use crate::disjoint::DisjointMut;
use crate::threads::Threads;

/// An anonymous reservation, zero until written.
pub struct Arena {
    /// `None` for an empty reservation, which `mmap` refuses.
    map: Option<MmapMut>,
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
            return Ok(Arena { map: None });
        }
        let map = MmapOptions::new().len(len).no_reserve_swap().map_anon()?;
        Ok(Arena { map: Some(map) })
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

    /// Resident bytes of the mapping that holds the arena, as the kernel counts them for this process.
    #[cfg(target_os = "linux")]
    fn resident_bytes(arena: &Arena) -> u64 {
        let address = arena.bytes(0..1).as_ptr() as u64;
        let holds = |line: &str| {
            let (start, end) = line.split(' ').next()?.split_once('-')?;
            let parse = |x| u64::from_str_radix(x, 16).ok();
            Some((parse(start)?..parse(end)?).contains(&address))
        };
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let lines = maps.lines().skip_while(|line| holds(line) != Some(true));
        let resident = lines.filter_map(|line| line.strip_prefix("Rss:")).next().unwrap();
        resident.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn only_what_is_used_is_resident() {
        const MIB: u64 = 1 << 20;
        // Small arenas of other tests may lie in the same mapping; a huge page may be backed as a whole.
        const SLACK: u64 = 8 * MIB;
        let mut arena = Arena::reserve(4096 * MIB).unwrap();
        assert!(resident_bytes(&arena) < SLACK, "reserving is free");
        arena.bytes_mut(MIB..129 * MIB).fill(7);
        assert!(resident_bytes(&arena) >= 128 * MIB);
        arena.release(MIB..129 * MIB);
        assert!(resident_bytes(&arena) < SLACK, "released memory has gone back");
        assert!(arena.bytes(0..130 * MIB).iter().all(|&b| b == 0));
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
