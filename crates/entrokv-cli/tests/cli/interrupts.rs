//! Ctrl-C: exit code 130, and nothing said so far is lost.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use entrokv::tiny::{TinyArchitecture, TinyModel};
use rustix::pty;

use crate::program::{Bench, Outcome, text};

/// How long a program that was told to stop may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a terminal is told when a line is about to be edited: pasted text shall be marked.
const PROMPT: &[u8] = b"\x1b[?2004h";

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
    stdin.write_all(b"Who are you?\n").unwrap();
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut [0; 1]).unwrap();
    interrupt(&child);
    stdin.write_all(b"/history\n/quit\n").unwrap();
    let mut rest = Vec::new();
    stdout.read_to_end(&mut rest).unwrap();
    let outcome = ends(child);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
    let rest = String::from_utf8_lossy(&rest);
    assert!(rest.contains("user: Who are you?\nassistant: "), "{rest}");
}

#[test]
fn a_chat_in_a_terminal_loses_the_answer_and_goes_on() {
    let bench = endless();
    let controller = pty::openpt(pty::OpenptFlags::RDWR | pty::OpenptFlags::NOCTTY).unwrap();
    pty::grantpt(&controller).unwrap();
    pty::unlockpt(&controller).unwrap();
    let name = pty::ptsname(&controller, Vec::new()).unwrap().into_string().unwrap();
    let terminal = File::options().read(true).write(true).open(name).unwrap();
    let mut command = bench.command();
    command.args(["chat", "-m", text(&bench.model), "--ignore-eos"]).env("TERM", "xterm");
    command.stdin(terminal.try_clone().unwrap()).stdout(terminal.try_clone().unwrap()).stderr(terminal);
    let mut child = command.spawn().unwrap();
    // The command holds the terminal's ends too: without them the conversation ends when the program does.
    drop(command);

    let mut screen = Screen { terminal: File::from(controller), unread: Vec::new() };
    screen.wait_for(PROMPT);
    screen.terminal.write_all(b"Who are you?\r").unwrap();
    // Typed text is shown up to the end of its line; what follows is the answer.
    screen.wait_for(b"Who are you?");
    screen.wait_for(b"\n");
    screen.read();
    interrupt(&child);
    screen.wait_for(PROMPT);
    screen.terminal.write_all(b"/stats\r").unwrap();
    screen.wait_for(b"tokens ");
    screen.wait_for(PROMPT);
    screen.terminal.write_all(b"/quit\r").unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

/// The other end of a terminal.
struct Screen {
    terminal: File,
    /// What was printed and not waited for yet.
    unread: Vec<u8>,
}

impl Screen {
    /// Reads until `text` has been printed, and forgets everything up to its end.
    fn wait_for(&mut self, text: &[u8]) {
        loop {
            if let Some(at) = self.unread.windows(text.len()).position(|window| window == text) {
                self.unread.drain(..at + text.len());
                return;
            }
            self.read();
        }
    }

    /// Reads what has been printed, at least a byte of it.
    fn read(&mut self) {
        let mut piece = [0; 4096];
        let len = self.terminal.read(&mut piece).unwrap();
        self.unread.extend_from_slice(&piece[..len]);
    }
}
