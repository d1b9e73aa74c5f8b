//! Standard output that may go away: a closed pipe is a failure of one line, not a panic.

use std::fmt::Display;
use std::io::{self, Write};

use crate::failure::Failure;

/// Prints `text` and a newline.
pub(crate) fn line(text: impl Display) -> Result<(), Failure> {
    writeln!(io::stdout().lock(), "{text}").map_err(|error| Failure::while_doing("stdout", error))
}
