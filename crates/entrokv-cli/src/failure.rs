//! How a command ends when it does not succeed.

use std::fmt;
use std::process::ExitCode;

use entrokv::SubmitError;

use crate::interrupt;

/// The reason, which decides the exit code.
#[derive(Debug)]
pub(crate) enum Failure {
    /// What was asked makes no sense: exit code 2.
    Usage(String),
    /// What was asked could not be done: exit code 1.
    Failed(String),
    /// Ctrl-C: exit code 130.
    Interrupted,
}

impl Failure {
    /// A failure that says what was being done.
    pub(crate) fn while_doing(what: impl fmt::Display, error: impl fmt::Display) -> Self {
        Self::Failed(format!("{what}: {error}"))
    }

    /// A request the engine refused: bad usage where a flag's value is wrong by itself, a failure where the model or the
    /// prompt decides (a budget below the pins, a prompt over the context).
    pub(crate) fn refused(error: SubmitError) -> Self {
        match error {
            SubmitError::Sampling(_) | SubmitError::Stop(_) => Self::Usage(error.to_string()),
            error => error.into(),
        }
    }

    /// Says why, in one line on stderr, and gives the exit code.
    pub(crate) fn report(&self) -> ExitCode {
        let (message, code) = match self {
            Self::Interrupted => return ExitCode::from(interrupt::EXIT_CODE),
            Self::Usage(message) => (message, ExitCode::from(2)),
            Self::Failed(message) => (message, ExitCode::FAILURE),
        };
        eprintln!("error: {}", one_line(message));
        code
    }
}

/// The text with its lines joined: some errors quote a template or a file.
pub(crate) fn one_line(text: &str) -> String {
    text.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ")
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Failed(error.to_string())
    }
}
