//! The two ears of a long job: the caller's wish to stop, and the caller's progress bar.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::error::PullError;
use super::progress::{Progress, Stage, Update};

/// How long any wait lasts at most before the wish to stop is looked at again.
pub(crate) const TICK: Duration = Duration::from_millis(50);

/// Carries cancellation inwards and progress outwards through every step of a pull.
pub(crate) struct Watch<'a> {
    cancel: &'a AtomicBool,
    progress: &'a mut dyn Progress,
    total: Option<u64>,
    /// Most bytes reported as brought so far: a package is first downloaded and then unpacked, and no bar should run backwards.
    furthest: u64,
}

impl<'a> Watch<'a> {
    /// Watches a job over `total` bytes, where that is known already.
    pub(crate) fn new(cancel: &'a AtomicBool, progress: &'a mut dyn Progress, total: Option<u64>) -> Self {
        Self { cancel, progress, total, furthest: 0 }
    }

    /// Corrects the size of the job once the server has told it.
    #[cfg(feature = "hub")]
    pub(crate) fn set_total(&mut self, total: Option<u64>) {
        self.total = total;
    }

    /// Lets the next report fall behind the last: the job starts again from `done` bytes.
    pub(crate) fn set_back(&mut self, done: u64) {
        self.furthest = done;
    }

    /// Whether the caller has asked to stop.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancel.load(Ordering::Relaxed)
    }

    /// Fails with [`PullError::Cancelled`] once the caller has asked to stop.
    pub(crate) fn check(&self) -> Result<(), PullError> {
        if self.is_cancelled() { Err(PullError::Cancelled) } else { Ok(()) }
    }

    /// Reports `done` bytes of the job, then checks for the wish to stop.
    pub(crate) fn report(&mut self, stage: Stage, done: u64) -> Result<(), PullError> {
        let done = match stage {
            // These count something else than the bytes brought.
            Stage::Waiting | Stage::Checking => done,
            Stage::Downloading | Stage::Unpacking | Stage::Finishing => {
                self.furthest = self.furthest.max(done);
                self.furthest
            }
        };
        let bytes_done = self.total.map_or(done, |total| done.min(total));
        self.progress.update(Update { stage, bytes_done, bytes_total: self.total });
        self.check()
    }
}
