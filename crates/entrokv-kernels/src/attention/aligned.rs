//! Scratch memory whose vectors never straddle a cache line.

use std::ops::{Deref, DerefMut};

/// One cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// A growing buffer of f32, aligned to 64 bytes: an unaligned 512-bit load touches two cache lines and takes twice as long.
#[derive(Default)]
pub(super) struct Aligned {
    lines: Vec<Line>,
}

impl Aligned {
    /// Makes room for `len` elements at least; new ones are 0.
    pub(super) fn reserve(&mut self, len: usize) {
        let num_lines = len.div_ceil(16);
        if self.lines.len() < num_lines {
            self.lines.resize(num_lines, Line([0.0; 16]));
        }
    }
}

impl Deref for Aligned {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        // SAFETY: `Line` is 16 f32 without padding (64 bytes, aligned to 64).
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.lines.len() * 16) }
    }
}

impl DerefMut for Aligned {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as in `deref`; any bits are a valid f32.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.lines.len() * 16) }
    }
}
