//! Bad prompts, flags and surroundings: one line each; exit code 2 where a flag is to blame, else 1.

use std::process::Stdio;

use crate::program::{Bench, text};

#[test]
fn bad_flags_are_bad_usage() {
    let bench = Bench::new();
    let cases: [(&[&str], &str); 25] = [
        (&["--kv-budget", "0"], "must be greater than 0"),
        (&["--kv-budget", "0%"], "must be greater than 0"),
        (&["--kv-budget=-5tok"], "negative"),
        (&["--kv-budget", "12"], "12tok"),
        (&["--kv-budget", "much"], "much"),
        (&["--kv-budget", "evict:1"], "the part evicted is 0 or more and below 1"),
        (&["--kv-budget", "evict:-20%"], "the part evicted is 0 or more and below 1"),
        (&["--kv-budget", "evict:lots"], "evict:0.8"),
        (&["--policy", "lru", "--kv-budget", "20%"], "known are page-entro-kv, mean-pages"),
        (&["--policy", "page-entro-kv:tua=1", "--kv-budget", "20%"], "unknown option `tua` of page-entro-kv"),
        (&["--policy", "page-entro-kv:tau=0", "--kv-budget", "20%"], "a temperature above 0"),
        (&["--policy", "page-entro-kv"], "needs --kv-budget"),
        (&["--policy", "kvzap", "--kv-budget", "20%"], "kvzap needs gates trained for the model: kvzap:gates=FILE"),
        (&["--policy", "fast-kvzip:gates=x,window=2%", "--kv-budget", "20%"], "option `window` of fast-kvzip is auto"),
        (&["--policy", "none", "--kv-budget", "20%"], "--policy none keeps everything"),
        (&["--page-size", "257"], "257"),
        (
            &["--cache-type", "q4_0"],
            "unknown cache type \"q4_0\": the types are f32, f16, bf16, q8_0, tq4, tq3, tq2, kivi4, kivi2",
        ),
        (&["--cache-type", "tq3v5"], "unknown cache type \"tq3v5\""),
        (&["-k", "tq3v2"], "unknown cache type \"tq3v2\""),
        (&["--cache-type-v", ""], "unknown cache type \"\""),
        (&["--temperature=-1"], "temperature"),
        (&["--top-p", "1.5"], "top_p"),
        (&["--max-tokens", "0"], "0"),
        (&["--isa", "mmx"], "mmx"),
        (&["--promt", "x"], "--prompt"),
    ];
    let complaints: Vec<String> = cases
        .into_iter()
        .filter_map(|(words, expected)| {
            let run = bench.run_model("generate", &[&["--prompt", "Call me"], words].concat(), "");
            run.complaint(2, expected).map(|why| format!("{words:?}: {why}"))
        })
        .collect();
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
    bench.run(&["generate", "--prompt", "x"], "").fails(2, "--model <MODEL>");
    bench.run_model("inspect", &["--tokens", "5"], "").fails(2, "--kv-budget");
    bench.run_model("inspect", &["--kv-budget", "1page"], "").fails(1, "the smallest budget is 2pages");
    bench.run(&["conquer"], "").fails(2, "unrecognized subcommand 'conquer'");
}

#[test]
fn bad_prompts_are_failures() {
    let bench = Bench::new();
    bench.run_model("generate", &["--prompt", ""], "").fails(1, "the prompt has 0 tokens");
    bench.run_model("generate", &[], "").fails(1, "the prompt has 0 tokens");
    let prompt = ["--prompt", "zzzzzzzzzz", "--ctx-size", "4"];
    bench.run_model("generate", &prompt, "").fails(1, "the prompt has 10 tokens, the context holds 4");
    bench.run_model("generate", &["--prompt-file", "missing.txt"], "").fails(1, "missing.txt: No such file");
    bench
        .run_model("generate", &[], b"Call \xff me")
        .fails(1, "stdin is not UTF-8 text: invalid byte 0xff at offset 5");
    let file = bench.file("latin1.txt", b"caf\xe9");
    let file = text(&file);
    bench.run_model("generate", &["--prompt-file", file], "").fails(1, "invalid byte 0xe9 at offset 3");
}

#[test]
fn a_budget_under_the_pins_is_a_failure() {
    let bench = Bench::new();
    for (budget, expected) in [("1tok", "the smallest budget is 32tok"), ("1B", "the smallest budget is 8KiB")] {
        bench.run_model("generate", &["--prompt", "Call me", "--kv-budget", budget], "").fails(1, expected);
    }
}

#[test]
fn gates_that_cannot_be_read_are_failures() {
    let bench = Bench::new();
    let refused = |policy: &str, expected: &str| {
        let words = ["--prompt", "Call me", "--kv-budget", "50%", "--policy", policy];
        bench.run_model("generate", &words, "").fails(1, expected);
    };
    refused("kvzap:gates=missing.safetensors", "gates missing.safetensors: No such file");
    let file = bench.file("prose.safetensors", b"It was the best of times");
    for policy in ["kvzap", "fast-kvzip"] {
        refused(&format!("{policy}:gates={}", text(&file)), "prose.safetensors: not a safetensors file: ");
    }
    // A well-formed file without a tensor in it.
    let header: &[u8] = b"{}      ";
    let file = bench.file("empty.safetensors", [&(header.len() as u64).to_le_bytes(), header].concat());
    refused(
        &format!("kvzap:gates={}", text(&file)),
        "tensor 'layers.0.weight' is missing; the model needs it with shape [",
    );
}

#[test]
fn a_cache_type_that_the_heads_do_not_allow_is_a_failure() {
    let bench = Bench::new();
    let refused = "needs a head dimension that is a multiple of 32 and at most 512, got 16";
    for words in [["--cache-type", "tq4"], ["-k", "q8_0"], ["-v", "tq2"]] {
        bench.run_model("generate", &[&["--prompt", "Call me"][..], &words].concat(), "").fails(1, refused);
        bench.run_model("bench", &words, "").fails(1, refused);
        bench.run_model("perplexity", &words, "Call me").fails(1, refused);
    }
    bench.run_model("perplexity", &["--compare", "tq4"], "Call me").fails(1, refused);
    bench.run_model("perplexity", &["--compare", "tq1"], "Call me").fails(2, "unknown cache type \"tq1\"");
}

#[test]
fn a_capped_perplexity_needs_a_prompt_and_something_after_it() {
    let bench = Bench::new();
    let prompt = "none of them had seen the other sea. ".repeat(20);
    let capped = |words: &[&str]| bench.run_model("perplexity", words, prompt.as_str());
    capped(&["--kv-budget", "20%"]).fails(2, "--kv-budget needs --prompt-tokens");
    capped(&["--prompt-tokens", "9"]).fails(2, "--kv-budget");
    capped(&["--prompt-tokens", "0", "--kv-budget", "20%"]).fails(2, "'0'");
    capped(&["--prompt-tokens", "50", "--tokens", "50", "--kv-budget", "20%"])
        .fails(1, "--prompt-tokens 50 leaves nothing to score of a text of 50 tokens");
    capped(&["--prompt-tokens", "50", "--tokens", "60", "--kv-budget", "1tok"])
        .fails(1, "the smallest budget is 32tok");
    capped(&["--prompt-tokens", "50", "--kv-budget", "20%", "--policy", "snapkv:schedule=per_chunk:0"])
        .fails(2, "option `schedule` of snapkv is once, rolling, every:N or per_chunk:N");
    capped(&["--prompt-tokens", "50", "--kv-budget", "20%", "--policy", "snapkv:granularity=head"])
        .fails(2, "option `granularity` of snapkv is page or token, got `head`");
}

#[test]
fn bad_texts_are_failures() {
    let bench = Bench::new();
    bench.run_model("tokenize", &[], "Call me").fails(1, "stdin is not a JSON array of strings");
    bench.run_model("tokenize", &[], b"[\"\xff\"]").fails(1, "stdin is not UTF-8 text");
    bench.run_model("perplexity", &[], "").fails(1, "the text has 0 tokens");
    bench.run_model("perplexity", &[], b"\xff").fails(1, "stdin is not UTF-8 text");
    bench.run_model("perplexity", &["-c", "4"], "zzzzzzzzzz").fails(1, "the text has 10 tokens, the context holds 4");
    bench.run_model("bench", &["--prompt", "0"], "").fails(2, "0 is not in 1..");
    let words = ["-c", "80", "--prompt", "64", "--generate", "16"];
    bench.run_model("bench", &words, "").fails(1, "need a context of 81, the context holds 80");
    bench.run_model("chat", &[], b"\xff\n").fails(1, "stdin");
}

#[test]
fn a_pool_too_small_for_the_prompt_is_a_failure() {
    let bench = Bench::new();
    let words = ["--prompt", "zzzzzzzzzz", "--kv-pool", "1KiB"];
    let run = bench.run_model("generate", &words, "");
    assert_eq!((run.code, run.stderr.lines().count()), (Some(1), 1), "{run:?}");
}

#[test]
fn a_closed_pipe_ends_the_answer_at_once() {
    let bench = Bench::new();
    let mut command = bench.command();
    command.args(["generate", "-m", text(&bench.model), "--prompt", "x", "--ignore-eos"]);
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.starts_with("error: stdout: ") && stderr.lines().count() == 1, "{stderr}");
}

#[test]
fn a_closed_pipe_is_no_panic_for_any_command() {
    let bench = Bench::new();
    let commands: [&[&str]; 4] = [&["inspect", "MODEL"], &["tokenize", "MODEL"], &["completions", "bash"], &["--help"]];
    for words in commands {
        let words = words.iter().map(|&word| if word == "MODEL" { text(&bench.model) } else { word });
        let mut command = bench.command();
        command.args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        drop(child.stdout.take());
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), b"[\"a\"]").ok();
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(!stderr.contains("panicked") && stderr.lines().count() <= 1, "{command:?}: {stderr}");
    }
}
