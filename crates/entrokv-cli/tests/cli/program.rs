//! The program under test and the models it is given.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use entrokv::tiny::{TinyArchitecture, TinyModel};
use tempfile::TempDir;

/// A folder for one test, with a tiny model in it.
pub(crate) struct Bench {
    folder: TempDir,
    /// The tiny model's file.
    pub(crate) model: PathBuf,
}

impl Bench {
    /// With the plain tiny model.
    pub(crate) fn new() -> Self {
        Self::with(&TinyModel::new(TinyArchitecture::Llama))
    }

    /// With this tiny model.
    pub(crate) fn with(model: &TinyModel) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tiny.gguf");
        fs::write(&path, model.gguf().unwrap()).unwrap();
        Self { folder, model: path }
    }

    /// A path in the folder.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes a file into the folder.
    pub(crate) fn file(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, content).unwrap();
        path
    }

    /// The program, kept away from the settings, the cache and the proxies of whoever runs the tests.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_entrokv"));
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy();
            if name.starts_with("ENTROKV_") || name.to_ascii_lowercase().ends_with("_proxy") {
                command.env_remove(&*name);
            }
        }
        command.env("ENTROKV_CACHE", self.path("cache")).env("ENTROKV_THREADS", "1");
        command
    }

    /// Runs the program with these words, on `stdin`, to its end.
    pub(crate) fn run(&self, words: &[&str], stdin: impl Into<Vec<u8>>) -> Outcome {
        let mut command = self.command();
        command.args(words);
        assert_cmd::Command::from_std(command).write_stdin(stdin).output().unwrap().into()
    }

    /// Runs a command that opens the tiny model.
    pub(crate) fn run_model(&self, command: &str, words: &[&str], stdin: impl Into<Vec<u8>>) -> Outcome {
        let model = self.model.to_str().unwrap();
        let opening: &[&str] = if takes_model_by_place(command) { &[command, model] } else { &[command, "-m", model] };
        self.run(&[opening, words].concat(), stdin)
    }
}

/// Whether a command takes its model as an argument rather than as a flag.
fn takes_model_by_place(command: &str) -> bool {
    matches!(command, "inspect" | "tokenize")
}

/// How a run ended.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// The exit code; `None` after a signal.
    pub(crate) code: Option<i32>,
    /// What it printed.
    pub(crate) stdout: String,
    /// What it complained of.
    pub(crate) stderr: String,
}

impl From<Output> for Outcome {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

impl Outcome {
    /// What a run that succeeded printed.
    #[track_caller]
    pub(crate) fn success(self) -> String {
        assert_eq!((self.code, self.stderr.as_str()), (Some(0), ""), "{}", self.stdout);
        self.stdout
    }

    /// The JSON that a run that succeeded printed.
    #[track_caller]
    pub(crate) fn json(self) -> serde_json::Value {
        serde_json::from_str(&self.success()).unwrap()
    }

    /// What is wrong with a run that should have failed with `code` and one line that holds `expected`; for table tests.
    pub(crate) fn complaint(&self, code: i32, expected: &str) -> Option<String> {
        let one_line = self.stderr.starts_with("error: ") && self.stderr.trim_end().lines().count() == 1;
        let is_right = self.code == Some(code) && one_line && self.stderr.contains(expected) && self.stdout.is_empty();
        (!is_right).then(|| format!("expected exit code {code} and one line with {expected:?}: {self:?}"))
    }

    /// Fails unless the run failed with `code` and one line that holds `expected`.
    #[track_caller]
    pub(crate) fn fails(&self, code: i32, expected: &str) {
        assert_eq!(self.complaint(code, expected), None);
    }
}

/// The path as the command line takes it.
pub(crate) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// The file with every `from` replaced by `to`, which is as long.
pub(crate) fn replaced(bytes: &[u8], from: &str, to: &str) -> Vec<u8> {
    let (from, to) = (from.as_bytes(), to.as_bytes());
    let mut bytes = bytes.to_vec();
    for at in 0..bytes.len() - from.len() {
        if bytes[at..].starts_with(from) {
            bytes[at..at + to.len()].copy_from_slice(to);
        }
    }
    bytes
}
