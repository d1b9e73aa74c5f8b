//! A file that is there whole or not at all.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use tempfile::{Builder, NamedTempFile};

/// Bytes written at a time: pages are small.
const BUFFER_BYTES: usize = 1 << 20;

/// A file under a temporary name in the folder where it is to be, until [`PendingFile::commit`] gives it its own.
///
/// Dropped before that it is removed, and what was there under the final name stays.
#[derive(Debug)]
pub struct PendingFile {
    path: PathBuf,
    file: BufWriter<NamedTempFile>,
}

impl PendingFile {
    /// A file that is to be at `path`.
    ///
    /// # Errors
    /// Where its folder is missing or may not be written to, or `path` is a folder.
    pub fn create(path: &Path) -> io::Result<Self> {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let (Some(name), false) = (path.file_name(), path.is_dir()) else {
            return Err(io::Error::new(io::ErrorKind::IsADirectory, "it is a folder"));
        };
        let mut prefix = std::ffi::OsString::from(".");
        prefix.push(name);
        let mut builder = Builder::new();
        builder.prefix(&prefix).suffix(".new");
        permit(&mut builder);
        let file = builder.tempfile_in(folder).map_err(cause)?;
        Ok(Self { path: path.to_owned(), file: BufWriter::with_capacity(BUFFER_BYTES, file) })
    }

    /// Gives the finished file its name, over whatever had it, once its bytes are on disk.
    ///
    /// # Errors
    /// Of writing and renaming; the file is gone then, and what was there before stays.
    pub fn commit(self) -> io::Result<()> {
        let Self { path, file } = self;
        let file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.as_file().sync_all()?;
        file.persist(&path).map_err(|error| error.error)?;
        sync_folder(&path)
    }
}

impl Write for PendingFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Leaves it to the user's mask who may read the file, as for every other file of theirs.
fn permit(builder: &mut Builder<'_, '_>) {
    #[cfg(unix)]
    builder.permissions(<std::fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o666));
    #[cfg(not(unix))]
    let _ = builder;
}

/// Makes the renaming itself durable, where folders can be flushed.
fn sync_folder(path: &Path) -> io::Result<()> {
    match path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        Some(folder) if cfg!(unix) => File::open(folder)?.sync_all(),
        _ => Ok(()),
    }
}

/// The system's reason alone: the temporary name in the library's message says nothing to anybody, and the reason is no source
/// of its error.
fn cause(error: io::Error) -> io::Error {
    match error.to_string().split_once(" at path ") {
        Some((reason, _)) => io::Error::new(error.kind(), reason),
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_is_there_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.kv");
        fs::write(&path, "old").unwrap();
        let mut file = PendingFile::create(&path).unwrap();
        file.write_all(&[7; 3 << 20]).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(names(folder.path()).len(), 2);
        drop(file);
        assert_eq!((names(folder.path()), fs::read(&path).unwrap()), (vec!["a.kv".to_string()], b"old".to_vec()));
        let mut file = PendingFile::create(&path).unwrap();
        file.write_all(&[7; 3 << 20]).unwrap();
        file.commit().unwrap();
        assert_eq!((names(folder.path()), fs::read(&path).unwrap()), (vec!["a.kv".to_string()], vec![7; 3 << 20]));
    }

    #[test]
    fn places_where_no_file_can_be_are_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let refused = |path: &Path| PendingFile::create(path).unwrap_err().to_string();
        assert_eq!(refused(folder.path()), "it is a folder");
        assert_eq!(refused(Path::new("/")), "it is a folder");
        let missing = refused(&folder.path().join("no/such/a.kv"));
        assert!(missing.contains("No such file") && !missing.contains('\n') && !missing.contains(".new"), "{missing}");
        assert!(names(folder.path()).is_empty());
    }

    #[test]
    #[cfg(unix)]
    fn the_users_mask_decides_who_may_read_it() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let [plain, ours] = ["plain", "a.kv"].map(|name| folder.path().join(name));
        fs::write(&plain, "").unwrap();
        PendingFile::create(&ours).unwrap().commit().unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&ours), mode(&plain));
    }
}
