//! Pulls a file behind a plain URL, going on after a cut where the server can prove that the file is still the same.

use std::path::PathBuf;

use reqwest::header::{CONTENT_RANGE, ETAG, HeaderMap, IF_RANGE, LAST_MODIFIED, RANGE};
use reqwest::{Client, StatusCode};

use super::error::PullError;
use super::free_space::{self, Probe};
use super::partial::Partial;
use super::slot::{Expected, Slot};
use super::source::UrlSource;
use super::transfer::{self, Cut, Proxies};
use super::watch::Watch;

/// Everything a pull from a URL needs besides the watch.
pub(crate) struct UrlPull<'a> {
    /// What to pull.
    pub(crate) source: &'a UrlSource,
    /// Its place in the cache, locked.
    pub(crate) slot: &'a Slot,
    /// Its digest, where the user gave it.
    pub(crate) expected: &'a Expected,
    /// Whether to go through proxies.
    pub(crate) proxies: Proxies,
    /// Asks for the free bytes of a file system.
    pub(crate) probe: Probe,
}

impl UrlPull<'_> {
    /// Downloads, verifies and publishes the file.
    ///
    /// # Errors
    /// Anything of [`PullError`] but the errors of pip and of the hub.
    pub(crate) fn run(&self, watch: &mut Watch<'_>) -> Result<PathBuf, PullError> {
        self.slot.make_work()?;
        let mut partial = Partial::open(self.slot.work(), &self.source.url, watch)?;
        let resumed = partial.bytes() > 0;
        self.fetch(&mut partial, watch)?;
        match self.slot.publish(partial, self.expected, watch) {
            // What an earlier pull left was not what it seemed: once more, from nothing.
            Err(PullError::WrongSha256 { .. }) if resumed => {
                self.slot.clear_work()?;
                self.slot.make_work()?;
                let mut partial = Partial::open(self.slot.work(), &self.source.url, watch)?;
                self.fetch(&mut partial, watch)?;
                self.slot.publish(partial, self.expected, watch)
            }
            outcome => outcome,
        }
    }

    fn fetch(&self, partial: &mut Partial, watch: &mut Watch<'_>) -> Result<(), PullError> {
        let client = transfer::client(self.proxies)?;
        transfer::persist(partial, watch, async |partial, watch| self.attempt(&client, partial, watch).await)
    }

    async fn attempt(&self, client: &Client, partial: &mut Partial, watch: &mut Watch<'_>) -> Result<(), Cut> {
        let mut request = client.get(&self.source.url);
        if let Some(condition) = self.condition(partial) {
            request = request.header(RANGE, format!("bytes={}-", partial.bytes()));
            if let Some(validator) = condition {
                request = request.header(IF_RANGE, validator);
            }
        }
        let response = transfer::patiently(request.send(), partial.bytes(), watch).await?;
        let response = response.map_err(|error| self.request_error(&error, partial))?;
        let total = match response.status() {
            StatusCode::PARTIAL_CONTENT => {
                let range = ContentRange::of(response.headers());
                let Some(range) = range.filter(|range| range.first == Some(partial.bytes())) else {
                    partial.restart(None)?;
                    return Err(self.broken(partial, "the server sent another range than asked for"));
                };
                range.total
            }
            StatusCode::RANGE_NOT_SATISFIABLE if partial.bytes() > 0 => {
                // Either the file was complete when the last pull was killed, or it is another, shorter one by now.
                if ContentRange::of(response.headers()).is_some_and(|range| range.total == Some(partial.bytes())) {
                    return Ok(());
                }
                partial.restart(None)?;
                return Err(self.broken(partial, "the file on the server has become shorter"));
            }
            status if status.is_success() => {
                partial.restart(validator(response.headers()))?;
                response.content_length()
            }
            status if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS => {
                return Err(Cut::Broken(self.status_error(status)));
            }
            status => return Err(self.status_error(status).into()),
        };
        watch.set_total(total);
        watch.set_back(partial.bytes());
        let needed = total.unwrap_or(0).saturating_sub(partial.bytes());
        free_space::require(needed, self.slot.work(), self.probe)?;
        transfer::drain(Box::pin(response.bytes_stream()), partial, total, &self.public_url(), watch).await
    }

    /// Whether the bytes we have can be gone on from, and the validator that proves them still good.
    ///
    /// Without a validator the digest the user gave proves it in the end; without either, nothing does.
    fn condition(&self, partial: &Partial) -> Option<Option<String>> {
        if partial.bytes() == 0 {
            return None;
        }
        match (partial.validator(), &self.expected.sha256) {
            (Some(validator), _) => Some(Some(validator.to_owned())),
            (None, Some(_)) => Some(None),
            (None, None) => None,
        }
    }

    /// A request that brought no answer: a malformed URL is final, anything else may pass.
    fn request_error(&self, error: &reqwest::Error, partial: &Partial) -> Cut {
        let detail = transfer::cause(error);
        if error.is_builder() {
            return PullError::BadUrl { url: self.source.url.clone(), reason: detail }.into();
        }
        if partial.bytes() > 0 {
            return self.broken(partial, &detail);
        }
        Cut::Broken(PullError::NoNetwork { what: self.public_url(), detail })
    }

    fn broken(&self, partial: &Partial, detail: &str) -> Cut {
        let detail = detail.to_owned();
        Cut::Broken(PullError::Interrupted { what: self.public_url(), bytes: partial.bytes(), detail })
    }

    fn status_error(&self, status: StatusCode) -> PullError {
        PullError::HttpStatus { url: self.public_url(), status: status.as_u16() }
    }

    /// The URL without its query, which may hold a signature.
    fn public_url(&self) -> String {
        self.source.url.split('?').next().unwrap_or_default().to_owned()
    }
}

/// What `Content-Range: bytes FIRST-LAST/TOTAL` says; `*` is unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ContentRange {
    first: Option<u64>,
    total: Option<u64>,
}

impl ContentRange {
    fn of(headers: &HeaderMap) -> Option<Self> {
        Self::parse(headers.get(CONTENT_RANGE)?.to_str().ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        let (range, total) = text.strip_prefix("bytes ")?.split_once('/')?;
        let first = range.split_once('-').and_then(|(first, _last)| first.parse().ok());
        Some(Self { first, total: total.parse().ok() })
    }
}

/// A name of this very content that `If-Range` may carry: a strong ETag, else the date of the last change.
fn validator(headers: &HeaderMap) -> Option<String> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
    text(ETAG).filter(|etag| etag.starts_with('"')).or_else(|| text(LAST_MODIFIED))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_ranges_are_read() {
        let range = |first, total| Some(ContentRange { first, total });
        assert_eq!(ContentRange::parse("bytes 5-9/10"), range(Some(5), Some(10)));
        assert_eq!(ContentRange::parse("bytes 5-9/*"), range(Some(5), None));
        assert_eq!(ContentRange::parse("bytes */10"), range(None, Some(10)));
        assert_eq!(ContentRange::parse("lines 1-2/3"), None);
        assert_eq!(ContentRange::parse("bytes"), None);
    }
}
