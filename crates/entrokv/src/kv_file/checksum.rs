//! Bytes on their way in or out, hashed as they pass.
//!
//! XXH3 (128 bits) finds every accident and costs less than copying the bytes; it is no defence against a forger, who could
//! as well make a whole file.

use std::io::{self, Read, Write};

use twox_hash::XxHash3_128;

/// Bytes of a checksum.
pub(super) const CHECKSUM_BYTES: usize = 16;

/// A checksum as a file holds it: the canonical form of XXH3, big-endian.
pub(super) type Checksum = [u8; CHECKSUM_BYTES];

/// A writer that knows the checksum of what it wrote.
pub(super) struct HashingWriter<W> {
    inner: W,
    hasher: XxHash3_128,
    bytes: u64,
}

impl<W: Write> HashingWriter<W> {
    pub(super) fn new(inner: W) -> Self {
        Self { inner, hasher: XxHash3_128::new(), bytes: 0 }
    }

    /// Writes all of `bytes`.
    pub(super) fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.inner.write_all(bytes)?;
        self.hasher.write(bytes);
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    /// Writes the checksum of all that was put, and returns how many bytes that made.
    pub(super) fn finish(mut self) -> io::Result<u64> {
        let checksum: Checksum = self.hasher.finish_128().to_be_bytes();
        self.inner.write_all(&checksum)?;
        self.inner.flush()?;
        Ok(self.bytes + CHECKSUM_BYTES as u64)
    }
}

/// A reader that knows the checksum of what it read, but for the last [`CHECKSUM_BYTES`], which may be a checksum themselves.
pub(super) struct HashingReader<R> {
    inner: R,
    hasher: XxHash3_128,
    /// The last bytes read.
    tail: Vec<u8>,
    bytes: u64,
}

impl<R: Read> HashingReader<R> {
    pub(super) fn new(inner: R) -> Self {
        Self { inner, hasher: XxHash3_128::new(), tail: Vec::new(), bytes: 0 }
    }

    /// Bytes read so far.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Appends `len` bytes to `out`, or as many as there are; memory follows what is there and not what was asked for.
    pub(super) fn take(&mut self, len: u64, out: &mut Vec<u8>) -> io::Result<()> {
        let before = out.len();
        (&mut self.inner).take(len).read_to_end(out)?;
        self.note(&out[before..]);
        Ok(())
    }

    /// Reads to the end; whether it ends with the checksum of all before.
    pub(super) fn is_whole(&mut self) -> io::Result<bool> {
        let mut buffer = vec![0; 1 << 20];
        loop {
            match self.inner.read(&mut buffer) {
                Ok(0) => break,
                Ok(len) => self.note(&buffer[..len]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(self.tail == self.hasher.finish_128().to_be_bytes())
    }

    fn note(&mut self, bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        // All but the last bytes of what has been read are hashed.
        let keep = bytes.len().min(CHECKSUM_BYTES);
        let (settled, last) = bytes.split_at(bytes.len() - keep);
        let surplus = (self.tail.len() + keep).saturating_sub(CHECKSUM_BYTES);
        self.hasher.write(&self.tail[..surplus]);
        self.tail.drain(..surplus);
        self.hasher.write(settled);
        self.tail.extend_from_slice(last);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_was_written_is_whole_however_it_is_read(
            bytes in prop::collection::vec(any::<u8>(), 0..200), cuts in prop::collection::vec(0_u64..40, 0..12),
        ) {
            let mut file = Vec::new();
            let mut writer = HashingWriter::new(&mut file);
            bytes.chunks(7).try_for_each(|chunk| writer.put(chunk)).unwrap();
            prop_assert_eq!(writer.finish().unwrap(), bytes.len() as u64 + 16);
            prop_assert_eq!(&file[..bytes.len()], &bytes[..]);
            prop_assert_eq!(&file[bytes.len()..], XxHash3_128::oneshot(&bytes).to_be_bytes());

            let mut reader = HashingReader::new(&file[..]);
            let mut read = Vec::new();
            cuts.into_iter().try_for_each(|len| reader.take(len, &mut read)).unwrap();
            prop_assert_eq!(&read[..], &file[..read.len()]);
            prop_assert!(reader.is_whole().unwrap());
            prop_assert_eq!(reader.bytes(), file.len() as u64);
        }

        #[test]
        fn what_was_cut_or_changed_is_not(
            bytes in prop::collection::vec(any::<u8>(), 0..100), at in any::<prop::sample::Index>(), bit in 0..8u32,
        ) {
            let mut file = bytes.clone();
            file.extend(XxHash3_128::oneshot(&bytes).to_be_bytes());
            let at = at.index(file.len());
            prop_assert!(!HashingReader::new(&file[..at]).is_whole().unwrap());
            file[at] ^= 1u8 << bit;
            prop_assert!(!HashingReader::new(&file[..]).is_whole().unwrap());
        }
    }
}
