//! Pulls against fakes: a fake pip, a loopback server, a loopback hub. One test pulls the default model for real.

#[cfg(feature = "hub")]
mod hub;
#[cfg(unix)] // the fake pip is a shell script
mod named;
mod places;
#[cfg(feature = "hub")]
mod server;
#[cfg(unix)]
mod shelf;
#[cfg(feature = "hub")]
mod url;

use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, SystemTime};

/// Every file under `folder` but the locks, relative, sorted.
fn listing(folder: &Path) -> Vec<String> {
    fn walk(root: &Path, folder: &Path, found: &mut Vec<String>) {
        for entry in fs::read_dir(folder).into_iter().flatten().map(Result::unwrap) {
            let path = entry.path();
            if path.is_dir() {
                walk(root, &path, found);
            } else if path.extension().is_none_or(|extension| extension != "lock") {
                found.push(path.strip_prefix(root).unwrap().to_string_lossy().into_owned());
            }
        }
    }
    let mut found = Vec::new();
    walk(folder, folder, &mut found);
    found.sort();
    found
}

/// Moves a file's modification time, as an editor would.
fn touch(path: &Path) {
    let file = File::options().append(true).open(path).unwrap();
    file.set_modified(SystemTime::now() + Duration::from_secs(5)).unwrap();
}
