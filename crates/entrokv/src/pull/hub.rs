//! Pulls a file of a hub repository through the hub's own client, pinned to one commit.
//!
//! Which file it is comes from the repository's listing (`paths-info`), not from the headers of the download: those are
//! lost where the download is redirected to a content network, as it is for every large file.

use std::path::PathBuf;

use hf_hub::repository::RepoTreeEntry;
use hf_hub::{HFClient, HFError, HFRepository, RepoTypeModel};

use super::digest;
use super::error::{PullError, one_line};
use super::free_space::{self, Probe};
use super::partial::Partial;
use super::slot::{Expected, Slot};
use super::source::HubSource;
use super::transfer::{self, Cut, FRUITLESS_ATTEMPTS, Proxies};
use super::watch::Watch;

/// Everything a pull from the hub needs besides the watch.
pub(crate) struct HubPull<'a> {
    /// What to pull.
    pub(crate) source: &'a HubSource,
    /// Its place in the cache, locked.
    pub(crate) slot: &'a Slot,
    /// Base URL of the hub; else `HF_ENDPOINT`, else the public one.
    pub(crate) endpoint: Option<&'a str>,
    /// Access token; else `HF_TOKEN`, else the one stored by the hub's own tools, else none.
    pub(crate) token: Option<&'a str>,
    /// Whether to go through proxies.
    pub(crate) proxies: Proxies,
    /// Asks for the free bytes of a file system.
    pub(crate) probe: Probe,
}

/// One version of one file, as the repository lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Listed {
    /// Commit that the listing belongs to.
    commit: String,
    /// Git's id of the content (of the pointer to it, where it is large).
    oid: String,
    expected: Expected,
    bytes: u64,
}

impl HubPull<'_> {
    /// Downloads, verifies and publishes the file.
    ///
    /// # Errors
    /// Anything of [`PullError`] but the errors of pip and of plain URLs.
    pub(crate) fn run(&self, watch: &mut Watch<'_>) -> Result<PathBuf, PullError> {
        let repository = self.repository()?;
        let listed = transfer::run(self.look_up(&repository, watch))?;
        watch.set_total(Some(listed.bytes));
        self.slot.make_work()?;
        let identity = format!("{} oid {} of {} bytes", self.slot.what(), listed.oid, listed.bytes);
        let mut partial = Partial::open(self.slot.work(), &identity, watch)?;
        free_space::require(listed.bytes.saturating_sub(partial.bytes()), self.slot.work(), self.probe)?;
        transfer::persist(&mut partial, watch, async |partial, watch| {
            self.attempt(&repository, &listed, partial, watch).await
        })?;
        self.slot.publish(partial, &listed.expected, watch)
    }

    fn repository(&self) -> Result<HFRepository<RepoTypeModel>, PullError> {
        let mut builder = HFClient::builder()
            .client(transfer::client(self.proxies)?)
            .cache_enabled(false)
            .retry_max_attempts(FRUITLESS_ATTEMPTS as usize - 1);
        if let Some(endpoint) = self.endpoint {
            builder = builder.endpoint(endpoint);
        }
        if let Some(token) = self.token {
            builder = builder.token(token);
        }
        let client = builder.build().map_err(|error| self.explain(&error))?;
        Ok(client.model(&self.source.owner, &self.source.repo))
    }

    /// Asks which commit is the newest and what the file is there.
    async fn look_up(
        &self,
        repository: &HFRepository<RepoTypeModel>,
        watch: &mut Watch<'_>,
    ) -> Result<Listed, PullError> {
        let info = transfer::patiently(repository.info().send(), 0, watch).await?;
        let info = info.map_err(|error| self.explain(&error))?;
        let commit = info.sha.ok_or_else(|| self.error("it does not say which commit is the newest"))?;
        let paths = vec![self.source.file.clone()];
        let listing = repository.get_paths_info().paths(paths).revision(commit.clone()).send();
        let listing = transfer::patiently(listing, 0, watch).await?.map_err(|error| self.explain(&error))?;
        let found = listing.into_iter().find_map(|entry| match entry {
            RepoTreeEntry::File { oid, size, path, lfs, .. } if path == self.source.file => Some((oid, size, lfs)),
            _ => None,
        });
        let Some((oid, bytes, lfs)) = found else {
            let files = info.siblings.unwrap_or_default().into_iter().map(|sibling| sibling.rfilename);
            return Err(self.no_such_file(files));
        };
        let sha256 = lfs.and_then(|lfs| lfs.sha256).filter(|text| digest::is_sha256(text));
        let expected = Expected { bytes: Some(bytes), sha256: sha256.map(|text| text.to_ascii_lowercase()) };
        Ok(Listed { commit, oid, expected, bytes })
    }

    async fn attempt(
        &self,
        repository: &HFRepository<RepoTypeModel>,
        listed: &Listed,
        partial: &mut Partial,
        watch: &mut Watch<'_>,
    ) -> Result<(), Cut> {
        let start = partial.bytes();
        if start == listed.bytes {
            return Ok(());
        }
        let request = repository
            .download_file_stream()
            .filename(&self.source.file)
            .revision(listed.commit.clone())
            .maybe_range((start > 0).then_some(start..listed.bytes));
        let opened = transfer::patiently(request.send(), start, watch).await?;
        let (length, stream) = opened.map_err(|error| self.explain(&error))?;
        // The client does not tell whether a range was granted; the length of the answer does.
        if start > 0 && length != Some(listed.bytes - start) {
            partial.restart(None)?;
            if length != Some(listed.bytes) {
                return Err(Cut::Broken(self.error("it sent another range than asked for")));
            }
        }
        watch.set_back(partial.bytes());
        transfer::drain(stream, partial, Some(listed.bytes), self.slot.what(), watch).await
    }

    /// Names the files the user may have meant.
    fn no_such_file(&self, files: impl Iterator<Item = String>) -> PullError {
        const MOST: usize = 12;
        let mut models: Vec<String> = files.filter(|file| file.ends_with(".gguf")).collect();
        if models.is_empty() {
            return self.error("the repository has no such file, and no .gguf file at all");
        }
        let more = models.len().saturating_sub(MOST);
        models.truncate(MOST);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        self.error(&format!("the repository has no such file; it has {}{more}", models.join(", ")))
    }

    /// Says in one line what the hub's client met and what to do.
    fn explain(&self, error: &HFError) -> PullError {
        match error {
            // The hub answers alike for what does not exist and for what this user may not see.
            HFError::AuthRequired { .. } | HFError::RepoNotFound { .. } => self.error(
                "no such repository, or it is private: check the spelling, or set HF_TOKEN to a token that may read it",
            ),
            HFError::Forbidden { .. } => self.error(
                "access refused: accept the model's terms on its page, and set HF_TOKEN to a token of that account",
            ),
            HFError::EntryNotFound { .. } | HFError::RevisionNotFound { .. } => {
                self.error("the repository has no such file")
            }
            HFError::RateLimited { .. } => self.error("too many requests: wait a while, or set HF_TOKEN"),
            HFError::Http { context } => {
                self.error(&format!("it answered HTTP {}: try again later", context.status.as_u16()))
            }
            HFError::Request { source, .. } => {
                PullError::NoNetwork { what: self.slot.what().to_owned(), detail: transfer::cause(source) }
            }
            HFError::Url(_) => self.error("the address of the hub (HF_ENDPOINT) is no URL"),
            other => self.error(&one_line(&other.to_string())),
        }
    }

    fn error(&self, detail: &str) -> PullError {
        PullError::Hub { what: self.slot.what().to_owned(), detail: detail.to_owned() }
    }
}
