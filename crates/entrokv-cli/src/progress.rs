//! Progress bars for what takes over a second, on a terminal only.

use std::time::Duration;

use entrokv::StepOutput;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar is drawn only if its work is still going on after this long.
const PATIENCE: Duration = Duration::from_secs(1);

/// A bar on stderr that stays away from quick work; nothing is drawn where stderr is no terminal.
pub(crate) struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// A bar of `len` steps.
    pub(crate) fn steps(what: impl Into<String>, len: u64) -> Self {
        Self::styled(what.into(), len, "{msg} [{bar:32}] {pos}/{len} {eta}")
    }

    /// A bar that counts bytes.
    pub(crate) fn bytes(what: impl Into<String>, len: u64) -> Self {
        Self::styled(what.into(), len, "{msg} [{bar:32}] {bytes}/{total_bytes} {bytes_per_sec} {eta}")
    }

    fn styled(what: String, len: u64, template: &str) -> Self {
        let bar = ProgressBar::with_draw_target(Some(len), ProgressDrawTarget::hidden());
        let style = ProgressStyle::with_template(template).expect("the templates above are valid");
        bar.set_style(style.progress_chars("=> "));
        bar.set_message(what);
        Self { bar }
    }

    /// Moves the bar.
    pub(crate) fn set(&self, position: u64) {
        if self.bar.is_hidden() && self.bar.elapsed() > PATIENCE {
            self.bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(10));
        }
        self.bar.set_position(position);
    }

    /// Shows how far a prompt has been read, or repeated for a policy.
    pub(crate) fn follow(&self, step: &StepOutput) {
        match step.pass {
            Some(pass) => {
                self.restart("repeating", pass.total as u64);
                self.set(pass.done as u64);
            }
            None => self.set(step.computed as u64),
        }
    }

    /// Changes what is being done, and how much of it there is.
    pub(crate) fn restart(&self, what: impl Into<String>, len: u64) {
        self.bar.set_message(what.into());
        self.bar.set_length(len);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
