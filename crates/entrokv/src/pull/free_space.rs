//! How much a user may still write to a file system.

use std::path::Path;

use super::error::PullError;

/// Asks for the bytes available to this user on the file system of a path; a test may answer for it.
pub(crate) type Probe = fn(&Path) -> Option<u64>;

/// Refuses, before the first byte, a download that the file system of `folder` cannot hold.
///
/// # Errors
/// [`PullError::DiskFull`] where fewer than `needed` bytes are known to be available.
pub(crate) fn require(needed: u64, folder: &Path, probe: Probe) -> Result<(), PullError> {
    match probe(folder) {
        Some(available) if available < needed => {
            Err(PullError::DiskFull { path: folder.to_path_buf(), needed, available: Some(available) })
        }
        _ => Ok(()),
    }
}

/// Bytes available to this user on the file system of `path`; `None` where the system does not say.
#[cfg(unix)]
pub(crate) fn available_bytes(path: &Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(path).ok()?;
    Some(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Bytes available to this user on the file system of `path`: not asked on this platform.
#[cfg(not(unix))]
pub(crate) fn available_bytes(_path: &Path) -> Option<u64> {
    None
}
