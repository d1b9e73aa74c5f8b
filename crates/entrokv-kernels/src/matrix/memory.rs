//! Memory for packed weights, in huge pages where the OS gives them.
//!
//! Decoding reads every weight once a token, so that pages of 4 KiB cost an address translation for every 4 KiB of them. A huge
//! page holds several matrices of a small model: those loaded together lie side by side.

use std::fmt;
use std::io;
use std::sync::Arc;

use memmap2::{MmapOptions, MmapRaw};

use super::CACHE_LINE;

/// Bytes of a huge page where ordinary ones have 4 KiB.
const HUGE_PAGE: usize = 2 << 20;

/// Address space reserved at a time; what nobody writes takes no memory.
const RESERVED_BYTES: usize = 1 << 30;

/// Where the weights of a model go: matrices packed with one of these lie side by side. The memory goes back to the OS with the
/// last of them.
#[derive(Debug, Default)]
pub struct WeightMemory {
    /// The reservation that is being filled, and how much of it is taken.
    filling: Option<(Arc<Reservation>, usize)>,
}

/// Address space that is zero until written.
struct Reservation(MmapRaw);

/// Bytes of a reservation that belong to one matrix, at a cache line's start.
#[derive(Debug)]
pub(crate) struct Memory {
    reservation: Arc<Reservation>,
    start: usize,
    len: usize,
}

impl WeightMemory {
    /// Nothing reserved yet.
    pub fn new() -> WeightMemory {
        WeightMemory::default()
    }

    /// `bytes` bytes of zeros, `bytes > 0`.
    pub(crate) fn take(&mut self, bytes: usize) -> io::Result<Memory> {
        let fits = |(reservation, taken): &(Arc<Reservation>, usize)| bytes <= reservation.0.len() - taken;
        let (reservation, taken) = match self.filling.take().filter(fits) {
            Some(filling) => filling,
            None => Reservation::of_at_least(bytes)?,
        };
        let memory = Memory { reservation: Arc::clone(&reservation), start: taken, len: bytes };
        let next = (taken + bytes).next_multiple_of(CACHE_LINE);
        self.filling = (next < reservation.0.len()).then_some((reservation, next));
        Ok(memory)
    }
}

impl Reservation {
    /// One with `bytes` bytes or more behind the offset returned, where its first huge page can be.
    fn of_at_least(bytes: usize) -> io::Result<(Arc<Reservation>, usize)> {
        let too_large = || io::Error::new(io::ErrorKind::OutOfMemory, "more than the address space");
        let len = bytes.max(RESERVED_BYTES).checked_add(HUGE_PAGE).ok_or_else(too_large)?;
        // A process may be allowed little more address space than it needs.
        let map = |len| MmapOptions::new().len(len).no_reserve_swap().map_anon();
        let map = map(len).or_else(|_| map(bytes + HUGE_PAGE))?;
        #[cfg(target_os = "linux")]
        {
            // Only advice: a kernel without huge pages answers with an error, and everything works without.
            let _ = map.advise(memmap2::Advice::HugePage);
        }
        let first = map.as_ptr().addr().next_multiple_of(HUGE_PAGE) - map.as_ptr().addr();
        Ok((Arc::new(Reservation(MmapRaw::from(map))), first))
    }
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reservation").field("bytes", &self.0.len()).finish()
    }
}

impl Memory {
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: `take` made the range inside the reservation, which lives as long as `self`, for this `Memory` alone: nobody
        // writes it while `self` is borrowed.
        unsafe { std::slice::from_raw_parts(self.reservation.0.as_ptr().add(self.start), self.len) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.reservation.0.as_mut_ptr().add(self.start), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_of_a_model_lie_side_by_side_and_outlive_the_rest() {
        let mut memory = WeightMemory::new();
        let mut parts: Vec<Memory> = [100, 64, 1, 5000].into_iter().map(|len| memory.take(len).unwrap()).collect();
        drop(memory);
        let starts: Vec<usize> = parts.iter().map(|part| part.bytes().as_ptr().addr()).collect();
        assert_eq!(starts[0] % HUGE_PAGE, 0);
        assert_eq!([1, 2, 3].map(|i| starts[i] - starts[0]), [128, 192, 256]);
        for (value, part) in (1..).zip(&mut parts) {
            assert!(part.bytes().iter().all(|&byte| byte == 0));
            part.bytes_mut().fill(value);
        }
        drop(parts.remove(1));
        for (value, part) in [1, 3, 4].into_iter().zip(&parts) {
            assert!(part.bytes().iter().all(|&byte| byte == value));
        }
    }

    #[test]
    fn what_does_not_fit_gets_a_reservation_of_its_own() {
        let mut memory = WeightMemory::new();
        let small = memory.take(1).unwrap();
        let large = memory.take(2 * RESERVED_BYTES).unwrap();
        assert!(!Arc::ptr_eq(&small.reservation, &large.reservation));
        assert_eq!(large.bytes().len(), 2 * RESERVED_BYTES);
        assert!(memory.take(usize::MAX - 5).is_err());
        assert_eq!(memory.take(7).unwrap().bytes(), [0; 7]);
    }
}
