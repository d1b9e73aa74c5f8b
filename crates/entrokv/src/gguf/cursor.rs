//! A read position in bytes that came from outside: every length is compared with what is left before it is used.

use super::error::HeaderProblem;

/// Reads little-endian fields one after the other and never past the end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    position: usize,
}

impl<'a> Cursor<'a> {
    /// A cursor at the first byte.
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, position: 0 }
    }

    /// Where the next read starts, in bytes from the beginning.
    pub(super) fn position(&self) -> usize {
        self.position
    }

    /// Bytes from here to the end.
    pub(super) fn left(&self) -> u64 {
        (self.bytes.len() - self.position) as u64
    }

    /// The bytes from an earlier position to this one.
    pub(super) fn since(&self, start: usize) -> &'a [u8] {
        &self.bytes[start..self.position]
    }

    /// The next `needed` bytes; `what` they are goes into the error.
    pub(super) fn take(&mut self, needed: u64, what: &'static str) -> Result<&'a [u8], HeaderProblem> {
        if needed > self.left() {
            return Err(HeaderProblem::PastEnd { what, needed, offset: self.position as u64, left: self.left() });
        }
        // `needed` is at most the length of a slice here, so it fits a usize.
        let start = self.position;
        self.position += needed as usize;
        Ok(self.since(start))
    }

    /// The next `N` bytes as an array.
    pub(super) fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], HeaderProblem> {
        Ok(self.take(N as u64, what)?.try_into().expect("take returns as many bytes as asked"))
    }

    /// An unsigned 32-bit number.
    pub(super) fn u32(&mut self, what: &'static str) -> Result<u32, HeaderProblem> {
        self.array(what).map(u32::from_le_bytes)
    }

    /// An unsigned 64-bit number.
    pub(super) fn u64(&mut self, what: &'static str) -> Result<u64, HeaderProblem> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A string: a 64-bit length, then as many bytes, which need not be text.
    pub(super) fn string(&mut self, what: &'static str) -> Result<&'a [u8], HeaderProblem> {
        let len = self.u64(what)?;
        self.take(len, what)
    }

    /// A string that must be text, because errors and callers name things by it.
    pub(super) fn name(&mut self, what: &'static str) -> Result<&'a str, HeaderProblem> {
        str::from_utf8(self.string(what)?).map_err(|_| HeaderProblem::NameNotUtf8)
    }
}
