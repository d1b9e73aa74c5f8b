//! Files that are no models, or none this program can run: one line each, exit code 1.

use crate::program::{Bench, replaced, text};

/// The start of a file that claims so many tensors and metadata entries.
fn header(num_tensors: u64, num_entries: u64) -> Vec<u8> {
    [&b"GGUF"[..], &3u32.to_le_bytes(), &num_tensors.to_le_bytes(), &num_entries.to_le_bytes()].concat()
}

/// A file whose one F32 tensor begins `offset` bytes into the data.
fn one_tensor(offset: u64) -> Vec<u8> {
    let name = b"token_embd.weight";
    let mut bytes = header(1, 0);
    bytes.extend((name.len() as u64).to_le_bytes());
    bytes.extend(name);
    bytes.extend(1u32.to_le_bytes());
    bytes.extend(32u64.to_le_bytes());
    bytes.extend(0u32.to_le_bytes());
    bytes.extend(offset.to_le_bytes());
    bytes.resize(bytes.len().next_multiple_of(32) + 128, 0);
    bytes
}

#[test]
fn every_bad_model_is_refused_in_one_line_by_every_command() {
    let bench = Bench::new();
    let good = std::fs::read(&bench.model).unwrap();
    let cases: [(&str, Vec<u8>, &str); 9] = [
        ("empty", Vec::new(), "empty"),
        ("text", b"Call me Ishmael. Some years ago, never mind how long precisely".to_vec(), "GGUF"),
        ("cut in its header", good[..100].to_vec(), "the header counts 20 tensors"),
        ("cut in its vocabulary", good[..2000].to_vec(), "truncated or corrupt"),
        ("cut in its tensors", good[..good.len() - 1000].to_vec(), "end"),
        ("unknown architecture", replaced(&good, "llama", "mamba"), "(supported: llama, "),
        ("tensor past the end", one_tensor(1 << 40), "token_embd.weight"),
        ("absurd number of tensors", [header(u64::MAX, 0), vec![0; 64]].concat(), "tensors"),
        ("absurd number of entries", [header(0, u64::MAX / 2), vec![0; 64]].concat(), "metadata"),
    ];
    let mut complaints = Vec::new();
    for (name, bytes, expected) in cases {
        let path = bench.file("bad.gguf", bytes);
        let path = text(&path);
        let runs = [
            bench.run(&["inspect", path], ""),
            bench.run(&["generate", "-m", path, "--prompt", "x"], ""),
            bench.run(&["chat", "-m", path], "x\n"),
            bench.run(&["bench", "-m", path], ""),
            bench.run(&["perplexity", "-m", path], "x"),
        ];
        for run in runs {
            let complaint = run.complaint(1, expected).or(run.complaint(1, path));
            complaints.extend(complaint.map(|why| format!("{name}: {why}")));
            assert_eq!(run.stderr.matches(path).count(), 1, "{name}: {run:?}");
        }
        // A vocabulary needs no architecture.
        if name != "unknown architecture" {
            let run = bench.run(&["tokenize", path], "[]");
            complaints.extend(run.complaint(1, path).map(|why| format!("{name}: {why}")));
        }
    }
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}

#[test]
fn a_missing_model_says_what_there_is() {
    let bench = Bench::new();
    bench.run(&["generate", "-m", "missing.gguf", "--prompt", "x"], "").fails(1, "no model file at missing.gguf");
    bench.run(&["inspect", "nobody"], "").fails(1, "unknown model 'nobody': give a file, one of smollm2-135m");
    bench.run(&["inspect", "smollm2-135m"], "").fails(1, "run `entrokv pull smollm2-135m` (98 MB)");
    bench.run(&["inspect", text(&bench.path(""))], "").fails(1, "it is a folder");
}

#[test]
fn a_missing_model_is_told_before_the_prompt_is_read() {
    let bench = Bench::new();
    let mut command = bench.command();
    command.args(["generate", "-m", "missing.gguf"]).stdin(std::process::Stdio::piped());
    command.stderr(std::process::Stdio::piped());
    let mut child = command.spawn().unwrap();
    // The pipe stays open and silent while the program ends.
    let stdin = child.stdin.take();
    assert_eq!(child.wait().unwrap().code(), Some(1));
    drop(stdin);
}
