//! `--kv-save` and `--kv-load`: what was read is not read again, and a file is there whole or not at all.

use std::fs;

use entrokv::tiny::{TinyArchitecture, TinyModel};

use crate::program::{Bench, text};

const TEXT: &str = "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse, and \
                    nothing particular to interest me on shore, I thought I would sail about a little.";

/// Names in the test's folder, the models' cache aside.
fn names(bench: &Bench) -> Vec<String> {
    let entries = fs::read_dir(bench.path("")).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = entries.filter(|name| name != "cache").collect();
    names.sort();
    names
}

#[test]
fn a_prompt_goes_on_after_what_was_loaded() {
    let bench = Bench::new();
    let file = bench.path("book.kv");
    let file = text(&file);
    for budget in [&[][..], &["--kv-budget", "60%"], &["--kv-budget", "96tok", "--policy", "snapkv:window=8"]] {
        let first = ["--prompt", TEXT, "-n", "20", "--ignore-eos", "--json", "--kv-save", file];
        let read = bench.run_model("generate", &[&first[..], budget].concat(), "").json();
        let prompt_tokens = read["usage"]["prompt_tokens"].as_u64().unwrap();
        assert_eq!(names(&bench), ["book.kv", "tiny.gguf"]);
        let more = ["--prompt", " And then", "-n", "20", "--ignore-eos", "--json", "--kv-load", file];
        let answer = bench.run_model("generate", &more, "").json();
        let new_tokens = answer["usage"]["prompt_tokens"].as_u64().unwrap();
        assert!(new_tokens < 12, "{new_tokens}");
        assert_eq!(answer["kv"]["logical_tokens"], prompt_tokens + 20 + new_tokens + 20);
        let held = |json: &serde_json::Value| json["kv"]["bytes_held"].as_u64().unwrap();
        let cap = |json: &serde_json::Value| json["kv"]["bytes_budget"].as_u64().unwrap();
        assert!(held(&answer) <= cap(&answer));
        // Without a flag the cap is the file's.
        assert_eq!(budget.is_empty(), cap(&answer) == answer["kv"]["bytes_full"].as_u64().unwrap());
        let evicted = |json: &serde_json::Value| json["kv"]["pages_evicted"].as_u64().unwrap();
        assert!(evicted(&answer) >= evicted(&read));
        // The same again, and with another budget.
        let again = bench.run_model("generate", &more, "").json();
        assert_eq!(again["tokens"], answer["tokens"]);
        let tighter = bench.run_model("generate", &[&more[..], &["--kv-budget", "64tok"]].concat(), "").json();
        assert!(held(&tighter) <= 4 * 4 * 1024, "{tighter}");
    }
}

#[test]
fn a_conversation_goes_on_from_program_to_program() {
    let bench = Bench::new();
    let file = bench.path("talk.kv");
    let file = text(&file);
    let words = ["-n", "12", "--ignore-eos", "--kv-budget", "80%"];
    let whole = bench.run_model("chat", &words, "One?\nTwo?\nThree?\n/history\n").success();
    let first = bench.run_model("chat", &[&words[..], &["--kv-save", file]].concat(), "One?\n").success();
    let both = ["-n", "12", "--ignore-eos", "--kv-load", file, "--kv-save", file];
    let second = bench.run_model("generate", &[&both[..], &["--chat", "--prompt", "Two?"]].concat(), "").success();
    let third = bench.run_model("chat", &both, "Three?\n/history\n").success();
    assert_eq!([first, second, third].concat(), whole);
    assert_eq!(names(&bench), ["talk.kv", "tiny.gguf"]);
}

#[test]
fn files_that_cannot_be_loaded_or_saved_are_told_at_once() {
    let bench = Bench::new();
    let file = bench.path("a.kv");
    let generate = |words: &[&str]| bench.run_model("generate", &[&["--prompt", TEXT, "-n", "4"], words].concat(), "");
    generate(&["--kv-budget", "60%", "--policy", "knorm", "--kv-save", text(&file)]).success();
    let bytes = fs::read(&file).unwrap();
    let damaged = bench.file("damaged.kv", [&bytes[..3000], &[!bytes[3000]], &bytes[3001..]].concat());
    let cut = bench.file("cut.kv", &bytes[..bytes.len() - 100]);
    let other =
        bench.file("other.gguf", TinyModel { seed: 2, ..TinyModel::new(TinyArchitecture::Llama) }.gguf().unwrap());
    let folder = bench.path("");
    let missing = bench.path("no/such/b.kv");
    let (file, folder, missing) = (text(&file), text(&folder), text(&missing));
    let cases: [(&[&str], i32, &str); 12] = [
        (&["--kv-load", missing], 1, "b.kv: No such file or directory"),
        (&["--kv-save", missing], 1, "b.kv: No such file or directory"),
        (&["--kv-save", folder], 1, "it is a folder"),
        (
            &["--kv-save", file, "--kv-budget", "50%", "--policy", "expected-attention"],
            1,
            "the policy expected-attention keeps sums over queries from turn to turn, which a KV file does not hold",
        ),
        (&["--kv-load", text(&damaged)], 1, "damaged.kv: it is damaged: "),
        (&["--kv-load", text(&cut)], 1, "cut.kv: it is cut short: "),
        (&["--kv-load", text(&bench.model)], 1, "tiny.gguf: it is no KV file: "),
        (
            &["--kv-load", file, "--page-size", "32"],
            1,
            "a.kv: it has pages of 16 tokens, and this cache has pages of 32",
        ),
        (
            &["--kv-load", file, "--policy", "tova"],
            1,
            "a.kv: it was written under the policy knorm, and tova was asked for",
        ),
        (&["--kv-load", file, "--policy", "none"], 2, "--policy none keeps everything and cannot keep a budget of 60%"),
        (&["--kv-load", file, "--chat"], 1, "a.kv: it holds a text and no conversation; run without --chat"),
        (&["--kv-load", file, "--system", "x"], 2, "--system begins a conversation, and --kv-load goes on with one"),
    ];
    let before = names(&bench);
    for (words, code, expected) in cases {
        assert_eq!(generate(words).complaint(code, expected), None, "{words:?}");
    }
    let words = ["generate", "-m", text(&other), "--prompt", "x", "--kv-load", file];
    bench.run(&words, "").fails(1, "a.kv: it was made by another model: tiny llama, seed 1 (");
    bench.run_model("chat", &["--kv-load", file], "x\n").fails(1, "it holds a text and no conversation; go on with");
    let unsaid = bench.run_model("chat", &["--kv-save", file], "");
    unsaid.fails(1, "a.kv is not written: no cache of the conversation is left");
    assert_eq!((names(&bench), fs::read(file).unwrap()), (before, bytes), "nothing was left behind or changed");
}

#[test]
#[cfg(unix)]
fn what_was_read_before_ctrl_c_is_kept() {
    use std::io::Read as _;

    use crate::interrupts::{ends, interrupt, start};

    let bench = Bench::with(&TinyModel { context_length: 1 << 20, ..TinyModel::new(TinyArchitecture::Llama) });
    let file = bench.path("endless.kv");
    let mut command = bench.command();
    command.args([
        "generate",
        "-m",
        text(&bench.model),
        "--prompt",
        "Call me",
        "--ignore-eos",
        "--kv-save",
        text(&file),
    ]);
    let mut child = start(command);
    child.stdout.as_mut().unwrap().read_exact(&mut [0; 1]).unwrap();
    interrupt(&child);
    child.stdout.take().unwrap().read_to_end(&mut Vec::new()).unwrap();
    assert_eq!(ends(child).code, Some(130));
    assert_eq!(names(&bench), ["endless.kv", "tiny.gguf"]);
    let words = ["--prompt", " more", "-n", "3", "--ignore-eos", "--json", "--kv-load", text(&file)];
    let answer = bench.run_model("generate", &words, "").json();
    assert!(answer["kv"]["logical_tokens"].as_u64().unwrap() > 15, "{answer}");
}
