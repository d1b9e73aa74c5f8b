//! Scratch memory whose vectors never straddle a cache line.

use std::ops::{Deref, DerefMut};

/// One cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line<T>([T; 16]);

/// A kind of number of 4 bytes that may have any bits.
///
/// # Safety
/// The type is 4 bytes, and every bit pattern is a value.
pub(super) unsafe trait Word: Copy + Default {}

// SAFETY: 4 bytes, any bits.
unsafe impl Word for f32 {}
// SAFETY: as above.
unsafe impl Word for u32 {}

/// A growing buffer, aligned to 64 bytes: an unaligned 512-bit load touches two cache lines and takes twice as long.
#[derive(Default)]
pub(super) struct Aligned<T> {
    lines: Vec<Line<T>>,
}

impl<T: Word> Aligned<T> {
    /// Makes room for `len` elements at least; new ones are 0.
    pub(super) fn reserve(&mut self, len: usize) {
        let num_lines = len.div_ceil(16);
        if self.lines.len() < num_lines {
            self.lines.resize(num_lines, Line([T::default(); 16]));
        }
    }
}

impl<T: Word> Deref for Aligned<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `Line` is 16 words without padding (64 bytes, aligned to 64).
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.lines.len() * 16) }
    }
}

impl<T: Word> DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.lines.len() * 16) }
    }
}
