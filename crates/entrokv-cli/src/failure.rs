//! How a command ends when it does not succeed.

use std::fmt;

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
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Failed(error.to_string())
    }
}
