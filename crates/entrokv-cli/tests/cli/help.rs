//! What the program says of itself.

use crate::program::Bench;

const COMMANDS: [&str; 10] =
    ["pull", "inspect", "demo", "generate", "chat", "tokenize", "perplexity", "needle", "bench", "completions"];

#[test]
fn every_command_has_help_with_an_example() {
    let bench = Bench::new();
    let overview = bench.run(&["--help"], "").success();
    for command in COMMANDS {
        assert!(overview.contains(&format!("\n  {command} ")), "{command}");
        let help = bench.run(&[command, "--help"], "").success();
        assert!(help.contains(&format!("\n  entrokv {command} ")) || help.contains("entrokv completions"), "{help}");
    }
}

#[test]
fn every_shell_gets_a_completion_script() {
    let bench = Bench::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = bench.run(&["completions", shell], "").success();
        assert!(script.contains("kv-budget"), "{shell}");
    }
}

#[test]
fn flags_are_known_by_the_names_other_engines_give_them() {
    let bench = Bench::new();
    let llama_cpp = ["-p", "Call me", "--n-predict", "3", "-c", "512", "--batch-size", "64", "--temp", "0", "-t", "1"];
    bench.run_model("generate", &llama_cpp, "").success();
    let vllm = ["-p", "Call me", "--max-tokens", "3", "--max-model-len", "512", "--block-size", "32"];
    bench.run_model("generate", &vllm, "").success();
}

#[test]
fn the_environment_stands_in_for_flags() {
    let bench = Bench::new();
    let run = |vars: &[(&str, &str)], words: &[&str]| {
        let mut command = bench.command();
        command.args(words).env("ENTROKV_MODEL", &bench.model).envs(vars.iter().copied());
        crate::program::Outcome::from(command.output().unwrap()).success()
    };
    let vars = [
        ("ENTROKV_PROMPT", "Call me"),
        ("ENTROKV_MAX_TOKENS", "3"),
        ("ENTROKV_IGNORE_EOS", "yes"),
        ("ENTROKV_JSON", "1"),
        ("ENTROKV_STOP", "never, ever"),
        ("ENTROKV_KV_BUDGET", "64tok"),
    ];
    let json: serde_json::Value = serde_json::from_str(&run(&vars, &["generate"])).unwrap();
    assert_eq!(json["tokens"].as_array().unwrap().len(), 3);
    // Flags win.
    let json: serde_json::Value = serde_json::from_str(&run(&vars, &["generate", "-n", "2"])).unwrap();
    assert_eq!(json["tokens"].as_array().unwrap().len(), 2);
    assert!(run(&[("ENTROKV_JSON", "0")], &["inspect"]).starts_with("tiny llama"));
}
