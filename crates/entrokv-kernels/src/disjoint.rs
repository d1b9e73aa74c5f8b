//! A slice whose disjoint parts several threads write at a time.

use std::marker::PhantomData;
use std::ops::Range;

/// A mutable slice handed to several threads, each of which takes parts that no other one takes.
///
/// For results whose parts are interleaved (one head of every row), where `chunks_mut` cannot hand them out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DisjointMut<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: a part is reached only through `part`, whose caller promises that nobody else holds an overlapping one; `T: Send`
// allows to write it on another thread.
unsafe impl<T: Send> Sync for DisjointMut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for DisjointMut<'_, T> {}

impl<'a, T> DisjointMut<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        DisjointMut { start: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// The elements of `range`.
    ///
    /// # Safety
    /// - As long as the part lives, no other part that overlaps `range` does.
    ///
    /// # Panics
    /// If `range` is not inside the slice.
    pub(crate) unsafe fn part(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} elements", self.len);
        // SAFETY: inside the slice, which is borrowed for `'a`; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.end - range.start) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_write_interleaved_parts() {
        let mut data = vec![0; 12];
        let shared = DisjointMut::new(&mut data);
        std::thread::scope(|scope| {
            for i in 0..3 {
                scope.spawn(move || {
                    for row in 0..4 {
                        // SAFETY: thread `i` takes column `i`.
                        let part = unsafe { shared.part(row * 3 + i..row * 3 + i + 1) };
                        part[0] = i;
                    }
                });
            }
        });
        assert_eq!(data, [0, 1, 2].repeat(4));
    }

    #[test]
    #[should_panic(expected = "2..5 of 4 elements")]
    fn a_part_outside_panics() {
        // SAFETY: the only part.
        unsafe { DisjointMut::new(&mut [0; 4]).part(2..5) };
    }
}
