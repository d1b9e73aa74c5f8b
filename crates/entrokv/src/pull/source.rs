//! Where a model comes from, as the user spells it, and where it goes in the cache.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use sha2::{Digest as _, Sha256};

use super::catalogue::{NamedModel, named_model};
use super::digest;
use super::error::PullError;
use super::slot::{Expected, Slot};

/// Where a model comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A model of the catalogue, by its short name: `smollm2-135m`.
    Named(&'static NamedModel),
    /// A file behind a plain URL: `https://example.org/model.gguf`, with `#sha256=...` where the digest is known.
    Url(UrlSource),
    /// A file of a hub repository: `hf:OWNER/REPO/FILE`.
    Hub(HubSource),
}

/// A file behind a plain URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UrlSource {
    /// The URL without fragment.
    pub url: String,
    /// Last segment of its path, which names the cached file.
    pub file: String,
    /// SHA-256 the file must have, lower-case hexadecimal.
    pub sha256: Option<String>,
}

/// A file of a hub repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubSource {
    /// User or organisation.
    pub owner: String,
    /// Repository.
    pub repo: String,
    /// Path of the file inside it; may hold folders.
    pub file: String,
}

impl Source {
    /// Reads a source from its text. Nothing is looked up anywhere.
    ///
    /// # Errors
    /// [`PullError::UnknownName`], [`PullError::BadUrl`], [`PullError::BadHubFile`].
    pub fn parse(text: &str) -> Result<Self, PullError> {
        if let Some(rest) = text.strip_prefix("hf:") {
            return HubSource::parse(text, rest).map(Self::Hub);
        }
        if text.contains("://") {
            return UrlSource::parse(text).map(Self::Url);
        }
        named_model(text).map(Self::Named).ok_or_else(|| PullError::UnknownName { name: text.to_owned() })
    }

    /// Where the model is in `cache_dir` once it has been pulled.
    pub fn path_in(&self, cache_dir: &Path) -> PathBuf {
        cache_dir.join(self.relative_path())
    }

    /// Size of the model in bytes, where it is known without asking a server.
    pub fn bytes(&self) -> Option<u64> {
        self.expected().bytes
    }

    /// The other files of a split model, where this is its first: `NAME-00001-of-0000N.gguf`.
    pub(crate) fn split_siblings(&self) -> Vec<Self> {
        let (file, count) = match self {
            // A signed URL is good for one file only.
            Self::Url(source) if !source.url.contains('?') => (&source.file, split_count(&source.file)),
            Self::Hub(source) => (&source.file, split_count(&source.file)),
            _ => return Vec::new(),
        };
        let stem = &file[..file.len().saturating_sub(SPLIT_SUFFIX_LEN)];
        let names = (2..=count).map(|number| format!("{stem}-{number:05}-of-{count:05}.gguf"));
        names
            .map(|name| match self {
                Self::Url(source) => {
                    let folder = source.url.strip_suffix(source.file.as_str()).unwrap_or(&source.url);
                    Self::Url(UrlSource { url: format!("{folder}{name}"), file: name, sha256: None })
                }
                Self::Hub(source) => Self::Hub(HubSource { file: name, ..source.clone() }),
                Self::Named(model) => Self::Named(model),
            })
            .collect()
    }

    pub(crate) fn slot(&self, cache_dir: &Path) -> Slot {
        Slot::new(cache_dir, &self.relative_path(), self.to_string())
    }

    pub(crate) fn expected(&self) -> Expected {
        match self {
            Self::Named(model) => Expected { bytes: Some(model.bytes), sha256: Some(model.sha256.to_owned()) },
            Self::Url(source) => Expected { bytes: None, sha256: source.sha256.clone() },
            Self::Hub(_) => Expected::default(),
        }
    }

    /// `NAME.gguf`, `url/DIGEST/FILE` or `hf/OWNER/REPO/FILE`.
    ///
    /// The digest is that of the URL's folder, so that files which lie side by side there lie side by side here, as
    /// the parts of a split model must.
    fn relative_path(&self) -> PathBuf {
        match self {
            Self::Named(model) => PathBuf::from(format!("{}.gguf", model.name)),
            Self::Url(source) => {
                let folder = source.url.split(['?', '#']).next().unwrap_or_default();
                let folder = folder.strip_suffix(source.file.as_str()).unwrap_or(folder);
                let digest = digest::hex(Sha256::new_with_prefix(folder));
                Path::new("url").join(&digest[..16]).join(&source.file)
            }
            Self::Hub(source) => Path::new("hf").join(&source.owner).join(&source.repo).join(&source.file),
        }
    }
}

impl FromStr for Source {
    type Err = PullError;

    fn from_str(text: &str) -> Result<Self, PullError> {
        Self::parse(text)
    }
}

/// The spelling that [`Source::parse`] reads.
impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Named(model) => f.write_str(model.name),
            Self::Url(source) => match &source.sha256 {
                Some(sha256) => write!(f, "{}#sha256={sha256}", source.url),
                None => f.write_str(&source.url),
            },
            Self::Hub(source) => write!(f, "hf:{}/{}/{}", source.owner, source.repo, source.file),
        }
    }
}

impl UrlSource {
    fn parse(text: &str) -> Result<Self, PullError> {
        let bad = |reason: &str| PullError::BadUrl { url: text.to_owned(), reason: reason.to_owned() };
        let (url, fragment) = text.split_once('#').map_or((text, None), |(url, fragment)| (url, Some(fragment)));
        let (scheme, rest) = url.split_once("://").ok_or_else(|| bad("no scheme"))?;
        if !["http", "https"].iter().any(|known| scheme.eq_ignore_ascii_case(known)) {
            return Err(bad("only http:// and https:// are supported"));
        }
        if url.chars().any(|c| c.is_whitespace() || c.is_control()) {
            return Err(bad("it holds spaces; write them as %20"));
        }
        let (host, path) = rest.split_once('/').ok_or_else(|| bad("no path to a file"))?;
        if host.is_empty() {
            return Err(bad("no host"));
        }
        let path = path.split('?').next().unwrap_or_default();
        let file = path.rsplit('/').next().unwrap_or_default();
        if !is_plain_component(file) {
            return Err(bad("its path does not end in a file name"));
        }
        let sha256 = match fragment {
            None | Some("") => None,
            Some(fragment) => {
                let sha256 = fragment.strip_prefix("sha256=").filter(|text| digest::is_sha256(text));
                Some(sha256.ok_or_else(|| bad("after '#' only sha256= and 64 hexadecimal digits may follow"))?)
            }
        };
        Ok(Self { url: url.to_owned(), file: file.to_owned(), sha256: sha256.map(str::to_ascii_lowercase) })
    }
}

impl HubSource {
    fn parse(text: &str, rest: &str) -> Result<Self, PullError> {
        let bad = |reason| PullError::BadHubFile { text: text.to_owned(), reason };
        let mut parts = rest.splitn(3, '/');
        let (Some(owner), Some(repo), Some(file)) = (parts.next(), parts.next(), parts.next()) else {
            return Err(bad("it needs an owner, a repository and a file"));
        };
        if ![owner, repo].into_iter().chain(file.split('/')).all(is_plain_component) {
            return Err(bad("an empty or unusable part"));
        }
        Ok(Self { owner: owner.to_owned(), repo: repo.to_owned(), file: file.to_owned() })
    }
}

/// Length of `-00001-of-00002.gguf`.
const SPLIT_SUFFIX_LEN: usize = 20;

/// Number of files of the split model whose first file is called `file`; 0 where it is none.
fn split_count(file: &str) -> u32 {
    let suffix = file.len().checked_sub(SPLIT_SUFFIX_LEN).and_then(|start| file.get(start..)).unwrap_or_default();
    let count = suffix.strip_prefix("-00001-of-").and_then(|rest| rest.strip_suffix(".gguf"));
    count.filter(|count| count.bytes().all(|b| b.is_ascii_digit())).and_then(|count| count.parse().ok()).unwrap_or(0)
}

/// Whether `text` can name one file or folder everywhere: what a server or a user sends must not lead out of the cache.
fn is_plain_component(text: &str) -> bool {
    !text.is_empty()
        && !text.starts_with('.')
        && text.len() <= 200
        && !text.chars().any(|c| c.is_control() || matches!(c, '/' | '\\' | ':' | '*' | '?' | '"' | '<' | '>' | '|'))
}
