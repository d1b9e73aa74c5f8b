//! Plain URLs against a loopback server.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use sha2::{Digest as _, Sha256};
use tempfile::TempDir;

use super::server::{Reply, Request, Server, Stop};
use super::{listing, touch};
use crate::pull::transfer::Proxies;
use crate::pull::{PullError, Puller, Silent, Source, Stage, Update, digest, resolve};

/// A model-like file of 300,000 bytes, different for each seed.
pub(super) fn content(seed: u32) -> Vec<u8> {
    let mut content = b"GGUF".to_vec();
    content.extend((1..75_000_u32).flat_map(|i| i.wrapping_mul(2_654_435_761).wrapping_add(seed).to_le_bytes()));
    content
}

/// A cache of one test, with a puller that goes through no proxy.
pub(super) struct Cache(TempDir);

impl Cache {
    pub(super) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(super) fn puller(&self) -> Puller {
        let mut puller = Puller::new(self.0.path());
        puller.remote.proxies = Proxies::Never;
        puller
    }

    pub(super) fn pull(&self, url: &str) -> Result<PathBuf, PullError> {
        self.puller().pull(&Source::parse(url).unwrap(), &mut Silent)
    }

    /// Pulls until `bytes` have come, then cancels.
    pub(super) fn cancel_after(&self, puller: Puller, url: &str, bytes: u64) {
        let cancel = Arc::new(AtomicBool::new(false));
        let mut asked = Instant::now();
        let error = puller.cancel_on(Arc::clone(&cancel)).pull(&Source::parse(url).unwrap(), &mut |update: Update| {
            if update.stage == Stage::Downloading && update.bytes_done >= bytes && !cancel.load(Ordering::Relaxed) {
                cancel.store(true, Ordering::Relaxed);
                asked = Instant::now();
            }
        });
        assert!(matches!(error, Err(PullError::Cancelled)), "{error:?}");
        assert!(asked.elapsed() < Duration::from_secs(2), "slow to stop");
    }

    /// Files in the cache, without the folders' names.
    pub(super) fn files(&self) -> Vec<String> {
        listing(self.0.path()).iter().map(|path| path.rsplit('/').next().unwrap().to_owned()).collect()
    }
}

const PULLED: [&str; 2] = ["m.gguf", "m.gguf.receipt"];

/// A server that sends `content(0)` well, except that the first answer stops after 200,000 bytes.
fn stopping(stop: Stop) -> Server {
    Server::start(move |request| {
        let reply = Reply::file(request, &content(0), "v1");
        if request.index == 0 { reply.stop(200_000, stop) } else { reply }
    })
}

#[test]
fn a_url_is_fetched_once_and_found_again() {
    let server = Server::start(|request| Reply::file(request, &content(0), "v1"));
    let cache = Cache::new();
    let url = server.url("/dir/m.gguf?download=true");
    let mut updates = Vec::new();
    let source = Source::parse(&url).unwrap();
    let path = cache.puller().pull(&source, &mut |update| updates.push(update)).unwrap();
    assert_eq!(fs::read(&path).unwrap(), content(0));
    assert_eq!(cache.files(), PULLED);
    let done = Update { stage: Stage::Finishing, bytes_done: 300_000, bytes_total: Some(300_000) };
    assert_eq!(*updates.last().unwrap(), done);
    assert_eq!(resolve(&url, cache.0.path()).unwrap(), path);
    assert_eq!(cache.pull(&url).unwrap(), path);
    assert_eq!(server.requests().len(), 1);
    // Edited since: nothing vouches for it any more.
    touch(&path);
    cache.pull(&url).unwrap();
    assert_eq!(server.requests().len(), 2);
}

#[test]
fn redirects_are_followed() {
    let server = Server::start(|request| match request.path.as_str() {
        "/m.gguf" => Reply::new(302, "moved").header("Location", "/elsewhere?key=1"),
        _ => Reply::file(request, &content(0), "v1"),
    });
    let cache = Cache::new();
    let path = cache.pull(&server.url("/m.gguf")).unwrap();
    assert!(path.ends_with("m.gguf"));
    assert_eq!(fs::read(path).unwrap(), content(0));
}

#[test]
fn a_cut_transfer_goes_on_where_it_was_cut() {
    let server = stopping(Stop::Cut);
    let cache = Cache::new();
    let path = cache.pull(&server.url("/m.gguf")).unwrap();
    assert_eq!(fs::read(path).unwrap(), content(0));
    let requests = server.requests();
    assert_eq!(requests.len(), 2);
    assert_eq!(requests[1].range_start(), Some(200_000));
    assert_eq!(requests[1].header("if-range"), Some("\"v1\""));
}

#[test]
fn a_cancelled_pull_goes_on_where_it_stopped() {
    let server = stopping(Stop::Stall);
    let cache = Cache::new();
    let url = server.url("/m.gguf");
    cache.cancel_after(cache.puller(), &url, 200_000);
    assert_eq!(cache.files(), ["journal.json", "model.partial"]);
    let path = cache.pull(&url).unwrap();
    assert_eq!(fs::read(path).unwrap(), content(0));
    assert_eq!(server.requests()[1].range_start(), Some(200_000));
    assert_eq!(cache.files(), PULLED);
}

#[test]
fn a_server_that_cannot_go_on_starts_over() {
    let server = Server::start(|request| {
        let reply = Reply::new(200, content(0)).header("ETag", "\"v1\"");
        if request.index == 0 { reply.stop(200_000, Stop::Cut) } else { reply }
    });
    let cache = Cache::new();
    let path = cache.pull(&server.url("/m.gguf")).unwrap();
    assert_eq!(fs::read(path).unwrap(), content(0));
}

#[test]
fn a_file_that_changed_meanwhile_is_fetched_whole() {
    // The first answer is of the old file; what follows is of the new one, under the same name.
    let server = Server::start(|request| match request.index {
        0 => Reply::file(request, &content(0), "v1").stop(200_000, Stop::Cut),
        _ => Reply::file(request, &content(1), "v2"),
    });
    let cache = Cache::new();
    let path = cache.pull(&server.url("/m.gguf")).unwrap();
    assert_eq!(fs::read(path).unwrap(), content(1));
    assert_eq!(server.requests().len(), 2);
}

#[test]
fn without_a_validator_nothing_is_gone_on_from_unless_a_digest_proves_it() {
    let bare = |request: &Request| {
        let mut reply = Reply::file(request, &content(0), "v1");
        reply.headers.retain(|(name, _)| name != "ETag");
        if request.index == 0 { reply.stop(200_000, Stop::Cut) } else { reply }
    };
    let server = Server::start(bare);
    let path = Cache::new();
    path.pull(&server.url("/m.gguf")).unwrap();
    assert_eq!(server.requests()[1].range_start(), None);

    let server = Server::start(bare);
    let digest = digest::hex(Sha256::new_with_prefix(content(0)));
    let cache = Cache::new();
    let path = cache.pull(&server.url(&format!("/m.gguf#sha256={digest}"))).unwrap();
    assert_eq!(fs::read(path).unwrap(), content(0));
    assert_eq!(server.requests()[1].range_start(), Some(200_000));
}

#[test]
fn a_wrong_range_is_not_believed() {
    let server = Server::start(|request| match request.index {
        0 => Reply::file(request, &content(0), "v1").stop(200_000, Stop::Cut),
        1 => {
            Reply::new(206, &content(0)[5..]).header("Content-Range", "bytes 5-299999/300000").header("ETag", "\"v1\"")
        }
        _ => Reply::file(request, &content(0), "v1"),
    });
    let cache = Cache::new();
    assert_eq!(fs::read(cache.pull(&server.url("/m.gguf")).unwrap()).unwrap(), content(0));
    assert_eq!(server.requests()[2].range_start(), None);
}

#[test]
fn a_pull_killed_just_before_its_end_needs_no_byte_more() {
    // A server that never says how long the file is: only the next request shows that it was complete.
    let server = Server::start(|request| Reply::file(request, &content(0), "v1"));
    let cache = Cache::new();
    let url = server.url("/m.gguf");
    let source = Source::parse(&url).unwrap();
    let work = source.slot(cache.0.path()).work().to_path_buf();
    fs::create_dir_all(&work).unwrap();
    fs::write(work.join("model.partial"), content(0)).unwrap();
    let journal = serde_json::json!({"identity": url, "bytes": 300_000, "parts": 0, "validator": "\"v1\""});
    fs::write(work.join("journal.json"), journal.to_string()).unwrap();
    assert_eq!(fs::read(cache.pull(&url).unwrap()).unwrap(), content(0));
    assert_eq!(server.requests()[0].range_start(), Some(300_000));
    assert_eq!(server.requests().len(), 1);
}

#[test]
fn digests_are_checked_and_wrong_files_removed() {
    let server = Server::start(|request| Reply::file(request, &content(0), "v1"));
    let good = digest::hex(Sha256::new_with_prefix(content(0)));
    let bad = digest::hex(Sha256::new_with_prefix(content(1)));
    let cache = Cache::new();
    let url = server.url("/m.gguf");
    let error = cache.pull(&format!("{url}#sha256={bad}")).unwrap_err();
    let PullError::WrongSha256 { expected, got, .. } = &error else { panic!("{error}") };
    assert_eq!((expected, got), (&bad, &good));
    assert_eq!(cache.files(), [""; 0]);
    cache.pull(&format!("{url}#sha256={}", good.to_uppercase())).unwrap();
    assert_eq!(cache.files(), PULLED);
}

#[test]
fn spoilt_leftovers_are_dropped_where_a_digest_shows_it() {
    let server = stopping(Stop::Stall);
    let cache = Cache::new();
    let digest = digest::hex(Sha256::new_with_prefix(content(0)));
    let url = server.url(&format!("/m.gguf#sha256={digest}"));
    cache.cancel_after(cache.puller(), &url, 200_000);
    let partial = Source::parse(&url).unwrap().slot(cache.0.path()).work().join("model.partial");
    let mut spoilt = fs::read(&partial).unwrap();
    spoilt[1_000] ^= 1;
    fs::write(&partial, spoilt).unwrap();
    assert_eq!(fs::read(cache.pull(&url).unwrap()).unwrap(), content(0));
    assert_eq!(cache.files(), PULLED);
}

#[test]
fn refusals_and_failures_are_one_line_each_and_leave_nothing() {
    struct Case {
        reply: Reply,
        expected: &'static str,
        requests: usize,
    }
    let cases = [
        Case {
            reply: Reply::new(404, "no"),
            expected: "answered HTTP 404 (not found): check the spelling",
            requests: 1,
        },
        Case { reply: Reply::new(403, "no"), expected: "answered HTTP 403 (access refused)", requests: 1 },
        Case { reply: Reply::new(503, "no"), expected: "answered HTTP 503 (server failure): try again", requests: 4 },
        Case {
            reply: Reply::new(200, "<!doctype html>"),
            expected: "no GGUF file: it begins with \"<!doctype",
            requests: 1,
        },
        Case { reply: Reply::new(200, ""), expected: "is no GGUF file: it begins with \"\"", requests: 1 },
        Case { reply: Reply::new(200, "GGUF").stop(0, Stop::Cut), expected: "broke off after 0 bytes", requests: 4 },
    ];
    for Case { reply, expected, requests } in cases {
        let server = Server::start(move |_| reply.clone());
        let cache = Cache::new();
        let error = cache.pull(&server.url("/m.gguf?secret=1")).unwrap_err().to_string();
        assert!(error.contains(expected) && !error.contains('\n'), "{expected}: {error}");
        assert!(!error.contains("secret"), "{error}");
        assert_eq!(server.requests().len(), requests, "{expected}");
        assert_eq!(cache.files(), [""; 0], "{expected}");
    }
}

#[test]
fn an_unreachable_server_and_a_bad_url_are_told_apart() {
    let url = Server::start(|_| Reply::default()).url("/m.gguf"); // gone at once
    let cache = Cache::new();
    let error = cache.pull(&url).unwrap_err();
    assert!(matches!(error, PullError::NoNetwork { .. }), "{error:?}");
    assert!(error.to_string().contains("Connection refused"), "{error}");
    let error = cache.pull("http://host:port/m.gguf").unwrap_err();
    assert!(matches!(error, PullError::BadUrl { .. }), "{error:?}");
    assert_eq!(cache.files(), [""; 0]);
}

#[test]
fn a_full_disk_is_told_before_the_body() {
    let server = Server::start(|request| Reply::file(request, &content(0), "v1"));
    let cache = Cache::new();
    let mut puller = cache.puller();
    puller.probe = |_| Some(299_999);
    let error = puller.pull(&Source::parse(&server.url("/m.gguf")).unwrap(), &mut Silent).unwrap_err();
    assert!(matches!(error, PullError::DiskFull { needed: 300_000, available: Some(299_999), .. }), "{error:?}");
    assert_eq!(cache.files(), [""; 0]);
}

#[test]
fn the_first_file_of_a_split_model_brings_the_others() {
    let server = Server::start(|request| Reply::file(request, &content(request.path.len() as u32), "v1"));
    let cache = Cache::new();
    let path = cache.pull(&server.url("/d/m-00001-of-00003.gguf")).unwrap();
    assert!(path.ends_with("m-00001-of-00003.gguf"));
    let paths: Vec<String> = server.requests().into_iter().map(|request| request.path).collect();
    assert_eq!(paths, ["/d/m-00001-of-00003.gguf", "/d/m-00002-of-00003.gguf", "/d/m-00003-of-00003.gguf"]);
    let folder = listing(path.parent().unwrap());
    assert_eq!(folder.iter().filter(|file| file.ends_with(".gguf")).count(), 3, "{folder:?}");
}
