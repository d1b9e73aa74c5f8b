//! How much a user may still write to a file system.

use std::path::Path;

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
