//! Hub files against a loopback hub, through the hub's own client.

use std::fs;

use sha2::{Digest as _, Sha256};

use super::server::{Reply, Request, Server, Stop};
use super::url::{Cache, content};
use crate::pull::{PullError, Puller, Silent, Source, digest};

const FILE: &str = "hf:me/repo/sub/m.gguf";
const PULLED: [&str; 2] = ["m.gguf", "m.gguf.receipt"];
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// The answers of a hub that holds `content(0)`, without those to the download itself.
fn api(request: &Request) -> Option<Reply> {
    let digest = digest::hex(Sha256::new_with_prefix(content(0)));
    let json = match (request.method.as_str(), request.path.as_str()) {
        ("GET", "/api/models/me/repo") => serde_json::json!({
            "id": "me/repo", "sha": COMMIT, "tags": [],
            "siblings": [{"rfilename": "README.md"}, {"rfilename": "sub/m.gguf"}, {"rfilename": "other.gguf"}],
        }),
        ("POST", path) if path == format!("/api/models/me/repo/paths-info/{COMMIT}") => serde_json::json!([{
            "type": "file", "oid": "a1", "size": 300_000, "path": "sub/m.gguf",
            "lfs": {"sha256": digest, "size": 300_000, "pointerSize": 134},
        }]),
        _ => return None,
    };
    Some(Reply::new(200, json.to_string()).header("Content-Type", "application/json"))
}

/// Whether this request is for the file itself at the pinned commit.
fn is_download(request: &Request) -> bool {
    request.path == format!("/me/repo/resolve/{COMMIT}/sub/m.gguf")
}

/// A hub that answers downloads with `download`.
fn hub(download: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Server {
    Server::start(move |request| match api(request) {
        Some(reply) => reply,
        None if is_download(request) => download(request),
        None => Reply::new(404, "no"),
    })
}

fn puller(cache: &Cache, hub: &Server) -> Puller {
    cache.puller().hub_endpoint(hub.url("")).hub_token("secret")
}

fn pull(cache: &Cache, hub: &Server) -> Result<std::path::PathBuf, PullError> {
    puller(cache, hub).pull(&Source::parse(FILE).unwrap(), &mut Silent)
}

/// Starts of the ranges of all `GET`s of the file.
fn ranges(server: &Server) -> Vec<Option<usize>> {
    let gets = server.requests().into_iter().filter(|request| request.method == "GET" && api(request).is_none());
    gets.map(|request| request.range_start()).collect()
}

#[test]
fn a_hub_file_is_fetched_once_with_the_token() {
    let hub = hub(|request| Reply::file(request, &content(0), "v1"));
    let cache = Cache::new();
    let path = pull(&cache, &hub).unwrap();
    assert!(path.ends_with("hf/me/repo/sub/m.gguf"));
    assert_eq!(fs::read(&path).unwrap(), content(0));
    assert_eq!(cache.files(), PULLED);
    let requests = hub.requests();
    assert!(requests.iter().all(|request| request.header("authorization") == Some("Bearer secret")));
    pull(&cache, &hub).unwrap();
    assert_eq!(hub.requests().len(), requests.len());
}

#[test]
fn the_token_does_not_follow_a_redirect_to_another_host() {
    let network = Server::start(|request| Reply::file(request, &content(0), "v1"));
    let target = network.other_url("/blob");
    // The first transfer is cut, so that a range is asked for through the redirect too.
    let cut = Server::start(|request| Reply::file(request, &content(0), "v1").stop(200_000, Stop::Cut));
    let cut_target = cut.other_url("/blob");
    let hub = hub(move |request| {
        let target = if request.header("range").is_some() { &target } else { &cut_target };
        Reply::new(302, "").header("Location", target)
    });
    let cache = Cache::new();
    let path = pull(&cache, &hub).unwrap();
    assert_eq!(fs::read(path).unwrap(), content(0));
    assert_eq!(ranges(&network), [Some(200_000)]);
    for server in [&network, &cut] {
        assert!(server.requests().iter().all(|request| request.header("authorization").is_none()));
    }
}

#[test]
fn a_cancelled_hub_pull_goes_on_where_it_stopped() {
    let hub = hub(|request| {
        let reply = Reply::file(request, &content(0), "v1");
        if request.range_start().is_none() { reply.stop(200_000, Stop::Stall) } else { reply }
    });
    let cache = Cache::new();
    cache.cancel_after(puller(&cache, &hub), FILE, 200_000);
    assert_eq!(cache.files(), ["journal.json", "model.partial"]);
    assert_eq!(fs::read(pull(&cache, &hub).unwrap()).unwrap(), content(0));
    assert_eq!(ranges(&hub), [None, Some(200_000)]);
    assert_eq!(cache.files(), PULLED);
}

#[test]
fn a_hub_that_cannot_go_on_starts_over() {
    let hub = hub(|request| {
        let reply = Reply::new(200, content(0)).header("ETag", "\"v1\"");
        if request.range_start().is_none() { reply.stop(200_000, Stop::Cut) } else { reply }
    });
    let cache = Cache::new();
    assert_eq!(fs::read(pull(&cache, &hub).unwrap()).unwrap(), content(0));
    assert_eq!(ranges(&hub), [None, Some(200_000)]);
}

#[test]
fn what_the_hub_sends_is_checked() {
    let other = hub(|request| Reply::file(request, &content(1), "v1"));
    let cache = Cache::new();
    let error = pull(&cache, &other).unwrap_err();
    assert!(matches!(error, PullError::WrongSha256 { .. }), "{error:?}");
    assert_eq!(cache.files(), [""; 0]);
    let page = hub(|_| Reply::new(200, vec![b' '; 300_000]));
    let error = pull(&cache, &page).unwrap_err();
    assert!(matches!(error, PullError::NotGguf { .. }), "{error:?}");
    assert_eq!(cache.files(), [""; 0]);
}

#[test]
fn refusals_are_one_line_each_that_says_what_to_do() {
    let cases: [(u16, &str); 4] = [
        (401, "hub: hf:me/repo/sub/m.gguf: no such repository, or it is private: check the spelling, or set HF_TOKEN"),
        (403, "hub: hf:me/repo/sub/m.gguf: access refused: accept the model's terms on its page, and set HF_TOKEN"),
        (404, "hub: hf:me/repo/sub/m.gguf: no such repository, or it is private"),
        (418, "hub: hf:me/repo/sub/m.gguf: it answered HTTP 418: try again later"),
    ];
    for (status, expected) in cases {
        let hub = Server::start(move |_| Reply::new(status, r#"{"error": "two\nlines"}"#));
        let cache = Cache::new();
        let error = pull(&cache, &hub).unwrap_err().to_string();
        assert!(error.starts_with(expected) && !error.contains('\n'), "{status}: {error}");
        assert_eq!(cache.files(), [""; 0]);
    }
}

#[test]
fn a_missing_file_is_told_with_the_files_there_are() {
    let hub = Server::start(|request| match request.method.as_str() {
        "POST" => Reply::new(200, "[]").header("Content-Type", "application/json"),
        _ => api(request).unwrap_or(Reply::new(404, "no")),
    });
    let cache = Cache::new();
    assert_eq!(
        pull(&cache, &hub).unwrap_err().to_string(),
        "hub: hf:me/repo/sub/m.gguf: the repository has no such file; it has sub/m.gguf, other.gguf"
    );
}

#[test]
fn an_unreachable_hub_is_told() {
    let cache = Cache::new();
    let endpoint = Server::start(|_| Reply::default()).url(""); // gone at once
    let source = Source::parse(FILE).unwrap();
    let error = cache.puller().hub_endpoint(endpoint).pull(&source, &mut Silent).unwrap_err();
    assert!(matches!(error, PullError::NoNetwork { .. }), "{error:?}");
    let error = cache.puller().hub_endpoint("no url").pull(&source, &mut Silent).unwrap_err();
    assert_eq!(error.to_string(), "hub: hf:me/repo/sub/m.gguf: the address of the hub (HF_ENDPOINT) is no URL");
}
