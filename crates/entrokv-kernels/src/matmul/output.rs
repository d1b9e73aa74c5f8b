//! The output of a product, written by several threads, each its own rows.

use std::marker::PhantomData;

use super::Sums;
use crate::matrix::TILE_ROWS;

/// A mutable borrow of `out` [tokens, rows] that hands out row tiles: a thread's rows are scattered over `out`, token by
/// token, so that no split of the slice could give them.
pub(super) struct Output<'a> {
    start: *mut f32,
    num_tokens: usize,
    rows: usize,
    borrowed: PhantomData<&'a mut [f32]>,
}

// SAFETY: a shared `Output` only gives access through `read` and `write`, whose callers promise that no two threads are
// at one tile; f32 may be sent to any thread.
unsafe impl Sync for Output<'_> {}

impl<'a> Output<'a> {
    /// Borrows `out`, a whole number of tokens of `rows` values.
    pub(super) fn new(out: &'a mut [f32], rows: usize) -> Self {
        assert!(out.len().is_multiple_of(rows));
        Self { start: out.as_mut_ptr(), num_tokens: out.len() / rows, rows, borrowed: PhantomData }
    }

    /// Writes the rows of `tile` that exist.
    ///
    /// # Safety
    /// - No other thread reads or writes this tile during the call.
    #[inline(always)]
    pub(super) unsafe fn write(&self, token: usize, tile: usize, sums: &Sums) {
        // SAFETY: the caller's promise, passed on.
        let rows = unsafe { self.rows_of(token, tile) };
        match rows.first_chunk_mut() {
            Some(whole) => *whole = *sums,
            None => write_some(rows, sums),
        }
    }

    /// Asks for what [`Self::write`] will write to, so that it need not wait for it.
    #[inline]
    pub(super) fn prefetch(&self, token: usize, tile: usize) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            let place = self.start.wrapping_add(token * self.rows + tile * TILE_ROWS);
            // SAFETY: a hint, which never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(place.cast()) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (token, tile);
    }

    /// Reads the rows of `tile` that exist into the first values of `sums`.
    ///
    /// # Safety
    /// - No other thread writes this tile during the call.
    pub(super) unsafe fn read(&self, token: usize, tile: usize, sums: &mut Sums) {
        // SAFETY: the caller's promise, passed on.
        let rows = unsafe { self.rows_of(token, tile) };
        sums[..rows.len()].copy_from_slice(rows);
    }

    /// # Safety
    /// - No other thread uses this tile while the result lives.
    #[inline(always)]
    #[expect(clippy::mut_from_ref, reason = "exclusive by the caller's promise")]
    unsafe fn rows_of(&self, token: usize, tile: usize) -> &mut [f32] {
        let first = tile * TILE_ROWS;
        assert!(token < self.num_tokens && first < self.rows);
        let len = TILE_ROWS.min(self.rows - first);
        // SAFETY: `token * rows + first + len <= num_tokens * rows`, the length of the borrowed slice (line above); the
        // caller promises that nobody else is at these rows.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(token * self.rows + first), len) }
    }
}

/// Writes the rows of a last tile that is not whole. On its own, because the compiler would make one copy of unknown length, a
/// call, of this and of a whole tile's, which is four stores.
#[cold]
#[inline(never)]
fn write_some(rows: &mut [f32], sums: &Sums) {
    rows.copy_from_slice(&sums[..rows.len()]);
}
