//! A model's place in the cache: the final file, the receipt that it was verified, the lock, the folder for work in progress.
//!
//! ```text
//! CACHE/NAME.gguf                 the model, only ever whole and verified
//! CACHE/NAME.gguf.receipt         its size, time and sha256 when it was verified
//! CACHE/.pulling/NAME.gguf.lock   held by the one process that is pulling it
//! CACHE/.pulling/NAME.gguf/       that process's work; whatever a lock holder finds there, a dead process left
//! ```

use std::fs::{self, File, Metadata, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};

use super::digest;
use super::error::PullError;
use super::partial::{Partial, write_replacing};
use super::progress::Stage;
use super::watch::{TICK, Watch};

/// What is known of a model before it arrives.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Expected {
    /// Size in bytes.
    pub(crate) bytes: Option<u64>,
    /// SHA-256, lower-case hexadecimal.
    pub(crate) sha256: Option<String>,
}

/// Proof, kept beside a model, that this very file was verified.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Receipt {
    bytes: u64,
    /// Modification time in nanoseconds since the epoch: a file written to since is verified anew.
    modified_ns: u64,
    sha256: String,
}

/// One model's place in the cache.
#[derive(Debug, Clone)]
pub(crate) struct Slot {
    what: String,
    path: PathBuf,
    work: PathBuf,
    lock: PathBuf,
}

/// Held while a model is being pulled; released on drop, and by the system when the process dies.
#[derive(Debug)]
pub(crate) struct SlotLock {
    _file: File,
}

impl Slot {
    /// The place `relative` (no `..`, no root) in `cache_dir`, for the model that messages call `what`.
    pub(crate) fn new(cache_dir: &Path, relative: &Path, what: String) -> Self {
        let flat: Vec<_> = relative.iter().map(|part| part.to_string_lossy()).collect();
        let flat = flat.join("--");
        let pulling = cache_dir.join(".pulling");
        Self {
            what,
            path: cache_dir.join(relative),
            lock: pulling.join(format!("{flat}.lock")),
            work: pulling.join(flat),
        }
    }

    /// How messages call the model.
    #[cfg(feature = "hub")]
    pub(crate) fn what(&self) -> &str {
        &self.what
    }

    /// Where the model is once pulled.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Folder for work in progress; only for the holder of the lock.
    pub(crate) fn work(&self) -> &Path {
        &self.work
    }

    /// Waits until no other process or thread is pulling this model.
    ///
    /// # Errors
    /// [`PullError::CacheFolder`] where the cache cannot be written, [`PullError::Cancelled`].
    pub(crate) fn lock(&self, watch: &mut Watch<'_>) -> Result<SlotLock, PullError> {
        for dir in [self.path.parent(), self.lock.parent()].into_iter().flatten() {
            fs::create_dir_all(dir).map_err(|source| PullError::from_write(dir, source, 0, None))?;
        }
        let file = File::options()
            .create(true)
            .append(true)
            .open(&self.lock)
            .map_err(|source| PullError::from_write(&self.lock, source, 0, None))?;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(SlotLock { _file: file }),
                Err(TryLockError::WouldBlock) => {
                    watch.report(Stage::Waiting, 0)?;
                    thread::sleep(TICK);
                }
                Err(TryLockError::Error(source)) => return Err(PullError::Io { path: self.lock.clone(), source }),
            }
        }
    }

    /// Whether a receipt vouches that the cached file is `expected`. Reads no more than the receipt.
    ///
    /// Without an expected digest the receipt is all there is to tell a whole file from one that was cut or edited since.
    pub(crate) fn is_vouched(&self, expected: &Expected) -> bool {
        let Ok(meta) = fs::metadata(&self.path) else { return false };
        let receipt = fs::read(self.receipt_path()).ok().and_then(|text| serde_json::from_slice::<Receipt>(&text).ok());
        receipt.is_some_and(|receipt| {
            receipt.bytes == meta.len()
                && receipt.modified_ns == modified_ns(&meta)
                && expected.bytes.is_none_or(|bytes| bytes == receipt.bytes)
                && expected.sha256.as_ref().is_none_or(|sha256| *sha256 == receipt.sha256)
        })
    }

    /// Whether the cached file has the expected size and digest, by reading it. False where no digest is expected.
    ///
    /// # Errors
    /// [`PullError::Io`] where a file is there but cannot be read, [`PullError::Cancelled`].
    pub(crate) fn is_verified(&self, expected: &Expected, watch: &mut Watch<'_>) -> Result<bool, PullError> {
        let Some(sha256) = &expected.sha256 else { return Ok(false) };
        let Ok(meta) = fs::metadata(&self.path) else { return Ok(false) };
        if !meta.is_file() || expected.bytes.is_some_and(|bytes| bytes != meta.len()) {
            return Ok(false);
        }
        Ok(digest::hex(digest::hash_prefix(&self.path, meta.len(), watch)?) == *sha256)
    }

    /// Records that the cached file was just found to have this digest. Only for the holder of the lock.
    pub(crate) fn vouch(&self, sha256: String) -> Result<(), PullError> {
        let write_error = |source| PullError::from_write(&self.path, source, 0, None);
        let meta = fs::metadata(&self.path).map_err(write_error)?;
        let receipt = Receipt { bytes: meta.len(), modified_ns: modified_ns(&meta), sha256 };
        let text = serde_json::to_vec(&receipt).expect("a receipt is a plain record");
        write_replacing(&self.receipt_path(), &text).map_err(write_error)
    }

    /// Makes the work folder. Of what a dead process left in it, only the growing file and its journal stay.
    pub(crate) fn make_work(&self) -> Result<(), PullError> {
        let write_error = |source| PullError::from_write(&self.work, source, 0, None);
        fs::create_dir_all(&self.work).map_err(write_error)?;
        for entry in fs::read_dir(&self.work).map_err(write_error)? {
            let entry = entry.map_err(write_error)?;
            if Partial::FILES.iter().any(|kept| entry.file_name() == *kept) {
                continue;
            }
            let is_folder = entry.file_type().map_err(write_error)?.is_dir();
            let removed = if is_folder { fs::remove_dir_all(entry.path()) } else { fs::remove_file(entry.path()) };
            removed.map_err(write_error)?;
        }
        Ok(())
    }

    /// Leaves the work folder as a failed pull should: with what the next one can go on from, or not at all.
    pub(crate) fn tidy_after(&self, error: &PullError) {
        // A second failure must not hide the first; what stays behind, the next pull removes.
        let _ = if error.keeps_partial() && Partial::is_worth_keeping(&self.work) {
            self.make_work()
        } else {
            self.clear_work()
        };
    }

    /// Removes the work folder with everything in it.
    pub(crate) fn clear_work(&self) -> Result<(), PullError> {
        match fs::remove_dir_all(&self.work) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(PullError::CacheFolder { path: self.work.clone(), source: error })
            }
            _ => Ok(()),
        }
    }

    /// Verifies a finished file and moves it into place, with its receipt.
    ///
    /// # Errors
    /// [`PullError::WrongSize`], [`PullError::WrongSha256`], or a failed write; the caller then clears the work folder.
    pub(crate) fn publish(
        &self,
        partial: Partial,
        expected: &Expected,
        watch: &mut Watch<'_>,
    ) -> Result<PathBuf, PullError> {
        watch.report(Stage::Finishing, partial.bytes())?;
        let (temporary, bytes, sha256) = partial.finish()?;
        if let Some(expected) = expected.bytes.filter(|&expected| expected != bytes) {
            return Err(PullError::WrongSize { what: self.what.clone(), expected, got: bytes });
        }
        if let Some(expected) = expected.sha256.as_ref().filter(|&expected| *expected != sha256) {
            return Err(PullError::WrongSha256 { what: self.what.clone(), expected: expected.clone(), got: sha256 });
        }
        let write_error = |source| PullError::from_write(&self.path, source, 0, None);
        fs::rename(&temporary, &self.path).map_err(write_error)?;
        self.vouch(sha256)?;
        self.sync_folder().map_err(write_error)?;
        Ok(self.path.clone())
    }

    fn receipt_path(&self) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(".receipt");
        name.into()
    }

    /// Makes the rename itself durable, where folders can be flushed.
    fn sync_folder(&self) -> io::Result<()> {
        match self.path.parent() {
            Some(folder) if cfg!(unix) => File::open(folder)?.sync_all(),
            _ => Ok(()),
        }
    }
}

/// Modification time in nanoseconds since the epoch; 0 where the system has none.
fn modified_ns(meta: &Metadata) -> u64 {
    let since = meta.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    since.and_then(|since| u64::try_from(since.as_nanos()).ok()).unwrap_or(0)
}
