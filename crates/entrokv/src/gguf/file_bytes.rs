//! The bytes of a model file: mapped from disk, or handed over in memory.

use std::{fmt, fs::File, io, ops::Deref, path::Path};

use memmap2::Mmap;

/// Bytes that stay where they are for as long as anybody reads them.
pub(super) enum FileBytes {
    /// Pages of the file, brought in by the system as they are touched.
    Mapped(Mmap),
    /// Bytes that were in memory already.
    Owned(Vec<u8>),
}

impl FileBytes {
    /// Maps a whole file for reading. An empty file gives no bytes.
    pub(super) fn map(path: &Path) -> io::Result<Self> {
        // Asked before opening, because opening a pipe waits for somebody to write to it.
        if !path.metadata()?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"));
        }
        let file = File::open(path)?;
        match file.metadata()?.len() {
            0 => Ok(Self::Owned(Vec::new())),
            _ => Ok(Self::Mapped(map_read_only(&file)?)),
        }
    }
}

/// Maps `file` as it is now.
///
/// A map is a view of a file that others may write to, and that is the one thing the compiler cannot check for us:
///
/// * *Written to while mapped*: the bytes change under a `&[u8]`. Nothing here decides twice on the same bytes without
///   checking twice: lengths are compared with the map's, which is fixed now; every later read of a value repeats the
///   checks; weights are numbers, and any bits are a number. Wrong answers are possible, reads outside the map are not.
/// * *Shortened while mapped*: touching a page past the new end kills the process with a bus error. No check of ours
///   can prevent that. What we do: whatever we write ourselves we write under a temporary name and rename, so that a
///   file under its final name is never shortened by us (replacing a file by renaming leaves our map the old one);
///   and a model copies its weights into the kernels' own layout when it is loaded, and needs no map afterwards.
///
/// Reading instead of mapping would hold the file twice in memory while a model loads, and reread what the page cache
/// has; all engines of this format map it for that reason.
#[allow(unsafe_code)]
fn map_read_only(file: &File) -> io::Result<Mmap> {
    // SAFETY: the map is private to this module and only ever read, as plain bytes without invariants, through slices
    // bounded by its length. Changes by other processes are the hazard described above.
    unsafe { Mmap::map(file) }
}

impl Deref for FileBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Owned(bytes) => bytes,
        }
    }
}

/// The length only: nobody wants to see a gigabyte.
impl fmt::Debug for FileBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self {
            Self::Mapped(_) => "mapped",
            Self::Owned(_) => "owned",
        };
        write!(f, "FileBytes({kind}, {} bytes)", self.len())
    }
}
