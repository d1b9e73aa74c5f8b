//! Ctrl-C: exit code 130, and nothing said so far is lost.

use std::io::Read as _;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use entrokv::tiny::{TinyArchitecture, TinyModel};

use crate::program::{Bench, Outcome, text};

/// How long a program that was told to stop may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// Sends Ctrl-C's signal.
pub(crate) fn interrupt(child: &Child) {
    let status = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(status.success());
}

/// Waits for a program that was told to stop.
#[track_caller]
pub(crate) fn ends(child: Child) -> Outcome {
    let start = Instant::now();
    let outcome = Outcome::from(child.wait_with_output().unwrap());
    assert!(start.elapsed() < PATIENCE, "took {:?}: {outcome:?}", start.elapsed());
    outcome
}

/// Starts a command with pipes on all sides.
pub(crate) fn start(mut command: Command) -> Child {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// A model whose answers take longer than any test waits.
fn endless() -> Bench {
    Bench::with(&TinyModel { context_length: 1 << 20, ..TinyModel::new(TinyArchitecture::Llama) })
}

#[test]
fn an_answer_keeps_what_was_printed() {
    let bench = endless();
    let mut command = bench.command();
    command.args(["generate", "-m", text(&bench.model), "--prompt", "Call me", "--ignore-eos"]);
    let mut child = start(command);
    child.stdout.as_mut().unwrap().read_exact(&mut [0; 1]).unwrap();
    interrupt(&child);
    let mut rest = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut rest).unwrap();
    let outcome = ends(child);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(130), ""));
    assert_eq!(rest.last(), Some(&b'\n'));
}

#[test]
fn a_json_answer_is_printed_as_far_as_it_came() {
    let bench = endless();
    // Before the answer has begun Ctrl-C ends the program without one, so wait longer where the machine is slow.
    for seconds in [1, 2, 4, 8, 16] {
        let mut command = bench.command();
        command.args(["generate", "-m", text(&bench.model), "--prompt", "Call me", "--ignore-eos", "--json"]);
        let child = start(command);
        thread::sleep(Duration::from_secs(seconds));
        interrupt(&child);
        let outcome = ends(child);
        assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(130), ""));
        if outcome.stdout.is_empty() {
            continue;
        }
        let json: serde_json::Value = serde_json::from_str(&outcome.stdout).unwrap();
        assert_eq!(json["finish_reason"], "cancelled");
        let num_tokens = json["tokens"].as_array().unwrap().len();
        assert!(num_tokens > 0);
        assert_eq!(json["usage"]["completion_tokens"], num_tokens);
        return;
    }
    panic!("no answer had begun after 16 seconds");
}

#[test]
fn a_program_that_waits_for_its_prompt_ends() {
    let bench = Bench::new();
    let mut command = bench.command();
    command.args(["generate", "-m", text(&bench.model)]);
    let mut child = start(command);
    let stdin = child.stdin.take();
    // Until the program has taken over the signal it would die of it; there is nothing to see by which to know.
    thread::sleep(Duration::from_millis(500));
    interrupt(&child);
    assert_eq!(ends(child).code, Some(130));
    drop(stdin);
}

#[test]
fn a_chat_loses_the_answer_and_goes_on() {
    let bench = endless();
    let mut command = bench.command();
    command.args(["chat", "-m", text(&bench.model), "--ignore-eos"]);
    let mut child = start(command);
    let mut stdin = child.stdin.take().unwrap();
    std::io::Write::write_all(&mut stdin, b"Who are you?\n").unwrap();
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut [0; 1]).unwrap();
    interrupt(&child);
    std::io::Write::write_all(&mut stdin, b"/history\n/quit\n").unwrap();
    let mut rest = Vec::new();
    stdout.read_to_end(&mut rest).unwrap();
    let outcome = ends(child);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
    let rest = String::from_utf8_lossy(&rest);
    assert!(rest.contains("user: Who are you?\nassistant: "), "{rest}");
}
