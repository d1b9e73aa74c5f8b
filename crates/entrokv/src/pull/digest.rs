//! SHA-256 of files, as lower-case hexadecimal.

use std::fmt::Write as _;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use sha2::{Digest as _, Sha256};

use super::error::PullError;
use super::progress::Stage;
use super::watch::Watch;

/// Bytes read, hashed and written at a time: large enough for speed, small enough to stop at once.
pub(crate) const CHUNK: usize = 256 * 1024;

/// Spells a finished digest.
pub(crate) fn hex(hasher: Sha256) -> String {
    hasher.finalize().iter().fold(String::with_capacity(64), |mut text, byte| {
        let _ = write!(text, "{byte:02x}"); // writing to a String cannot fail
        text
    })
}

/// Whether `text` is a SHA-256 in hexadecimal.
pub(crate) fn is_sha256(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|b| b.is_ascii_hexdigit())
}

/// Feeds the first `len` bytes of the file to a new hasher.
///
/// # Errors
/// [`PullError::Io`] where the file is shorter or cannot be read, [`PullError::Cancelled`].
pub(crate) fn hash_prefix(path: &Path, len: u64, watch: &mut Watch<'_>) -> Result<Sha256, PullError> {
    let io = |source| PullError::Io { path: path.to_path_buf(), source };
    let mut file = File::open(path).map_err(io)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; CHUNK];
    let mut done = 0;
    while done < len {
        let want = CHUNK.min(usize::try_from(len - done).unwrap_or(CHUNK));
        file.read_exact(&mut buffer[..want]).map_err(io)?;
        hasher.update(&buffer[..want]);
        done += want as u64;
        watch.report(Stage::Checking, done)?;
    }
    Ok(hasher)
}
