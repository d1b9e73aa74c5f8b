//! What the program tells chat templates besides the messages.

use chrono::Local;
use entrokv::RenderOptions;

/// The usual options, and the local time for templates that print a date.
pub(crate) fn options() -> RenderOptions {
    RenderOptions { now: Some(Local::now().naive_local()), ..RenderOptions::default() }
}
