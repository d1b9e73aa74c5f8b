//! The model file while it grows: appended, hashed as it passes, and able to be taken up again after a kill.
//!
//! A journal beside the file says how many bytes are known to be on disk and what they are the beginning of. A process
//! that dies at any instant leaves a file at least as long as its journal says; the next one cuts the file to that length, hashes it
//! again, and goes on. A journal that is missing, unreadable or about something else means starting from nothing.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::digest;
use super::error::PullError;
use super::free_space::available_bytes;
use super::watch::Watch;

/// Bytes between two flushes to disk: what a killed transfer loses at most.
#[cfg(feature = "hub")]
const CHECKPOINT: u64 = 32 << 20;

/// What the journal records.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Journal {
    /// What the bytes are the beginning of; any change of it makes them worthless.
    identity: String,
    /// Bytes known to be on disk.
    bytes: u64,
    /// Whole parts among them.
    parts: usize,
    /// What the server called this very content (ETag or date), so that it can refuse to go on with another.
    validator: Option<String>,
}

impl Journal {
    fn read(path: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(path).ok()?).ok()
    }
}

/// A model file that is being written.
#[derive(Debug)]
pub(crate) struct Partial {
    path: PathBuf,
    journal_path: PathBuf,
    file: File,
    hasher: Sha256,
    bytes: u64,
    journal: Journal,
}

impl Partial {
    /// The files of a partial model in its folder.
    pub(crate) const FILES: [&'static str; 2] = ["model.partial", "journal.json"];

    /// Whether `dir` holds bytes that a later pull can go on from.
    pub(crate) fn is_worth_keeping(dir: &Path) -> bool {
        Journal::read(&dir.join(Self::FILES[1])).is_some_and(|journal| journal.bytes > 0)
    }

    /// Takes up what an earlier pull of the same `identity` left in `dir`, or starts from nothing.
    pub(crate) fn open(dir: &Path, identity: &str, watch: &mut Watch<'_>) -> Result<Self, PullError> {
        let [path, journal_path] = Self::FILES.map(|name| dir.join(name));
        let on_disk = fs::metadata(&path).map_or(0, |meta| meta.len());
        let journal = Journal::read(&journal_path)
            .filter(|journal| journal.identity == identity && journal.bytes <= on_disk)
            .unwrap_or_else(|| Journal { identity: identity.to_owned(), ..Journal::default() });
        let write_error = |source| PullError::from_write(&path, source, 0, None);
        let mut file = File::options().create(true).append(true).open(&path).map_err(write_error)?;
        file.set_len(journal.bytes).map_err(write_error)?;
        file.flush().map_err(write_error)?;
        let hasher = digest::hash_prefix(&path, journal.bytes, watch)?;
        Ok(Self { bytes: journal.bytes, path, journal_path, file, hasher, journal })
    }

    /// Bytes written so far.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whole parts written so far.
    pub(crate) fn parts(&self) -> usize {
        self.journal.parts
    }

    /// Appends `bytes` of a file of `total` bytes (0 where unknown).
    pub(crate) fn append(&mut self, bytes: &[u8], total: u64) -> Result<(), PullError> {
        self.file.write_all(bytes).map_err(|source| self.write_error(source, total, bytes.len()))?;
        self.hasher.update(bytes);
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    /// As [`append`](Self::append), for a stream without parts: also flushes now and then, so that a kill loses little.
    #[cfg(feature = "hub")]
    pub(crate) fn append_stream(&mut self, bytes: &[u8], total: u64) -> Result<(), PullError> {
        self.append(bytes, total)?;
        if self.bytes - self.journal.bytes >= CHECKPOINT { self.checkpoint(0) } else { Ok(()) }
    }

    /// Flushes everything written so far and records it, together with the number of whole parts.
    pub(crate) fn checkpoint(&mut self, parts: usize) -> Result<(), PullError> {
        self.file.sync_data().map_err(|source| self.write_error(source, 0, 0))?;
        self.journal.bytes = self.bytes;
        self.journal.parts = parts;
        let text = serde_json::to_vec(&self.journal).expect("a journal is a plain record");
        write_replacing(&self.journal_path, &text).map_err(|source| self.write_error(source, 0, 0))
    }

    /// Drops everything written and starts again with content that the server calls `validator`.
    #[cfg(feature = "hub")]
    pub(crate) fn restart(&mut self, validator: Option<String>) -> Result<(), PullError> {
        self.file.set_len(0).map_err(|source| self.write_error(source, 0, 0))?;
        self.hasher = Sha256::new();
        self.bytes = 0;
        self.journal.validator = validator;
        self.checkpoint(0)
    }

    /// What the server called the content that these bytes are the beginning of.
    #[cfg(feature = "hub")]
    pub(crate) fn validator(&self) -> Option<&str> {
        self.journal.validator.as_deref()
    }

    /// Flushes the finished file and returns its path, its length and its SHA-256.
    pub(crate) fn finish(self) -> Result<(PathBuf, u64, String), PullError> {
        self.file.sync_all().map_err(|source| self.write_error(source, 0, 0))?;
        Ok((self.path, self.bytes, digest::hex(self.hasher)))
    }

    fn write_error(&self, source: io::Error, total: u64, chunk: usize) -> PullError {
        let needed = total.saturating_sub(self.bytes).max(chunk as u64);
        let available = self.path.parent().and_then(available_bytes);
        PullError::from_write(&self.path, source, needed, available)
    }
}

/// Writes a small file under a temporary name and renames it, so that a reader sees the old or the new content, never half.
pub(crate) fn write_replacing(path: &Path, content: &[u8]) -> io::Result<()> {
    let temporary = path.with_extension("new");
    let mut file = File::create(&temporary)?;
    file.write_all(content)?;
    file.sync_data()?;
    fs::rename(&temporary, path)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_fills_while_writing_is_told_with_what_is_missing() {
        let path = PathBuf::from("/dev/full");
        let journal = Journal::default();
        let file = File::options().write(true).open(&path).unwrap();
        let mut partial =
            Partial { journal_path: path.clone(), path, file, hasher: Sha256::new(), bytes: 1_000, journal };
        let error = partial.append(&[0; 100], 5_000).unwrap_err();
        assert!(matches!(error, PullError::DiskFull { needed: 4_000, available: Some(_), .. }), "{error:?}");
        assert!(error.to_string().starts_with("disk full at /dev/full: 4000 bytes needed, "), "{error}");
    }
}
