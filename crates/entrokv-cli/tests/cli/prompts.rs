//! How a prompt becomes tokens: from flag, file or stdin, raw or through the model's chat template.

use crate::program::{Bench, replaced, text};

/// Tokens of the prompt as `generate --json` counts them.
#[track_caller]
fn num_tokens(bench: &Bench, words: &[&str], stdin: &str) -> u64 {
    let json = bench.run_model("generate", &[words, &["--json", "-n", "1"]].concat(), stdin).json();
    json["usage"]["prompt_tokens"].as_u64().unwrap()
}

#[test]
fn a_prompt_comes_from_a_flag_a_file_or_stdin() {
    let bench = Bench::new();
    let file = bench.file("prompt.txt", "zzzz\u{e9}");
    for (words, stdin) in [
        (&["--prompt", "zzzz\u{e9}"][..], "not read"),
        (&["--prompt-file", text(&file)], "not read"),
        (&[], "zzzz\u{e9}"),
    ] {
        // The model has a token for the last letter.
        assert_eq!(num_tokens(&bench, words, stdin), 5, "{words:?}");
    }
}

#[test]
fn a_chat_prompt_goes_through_the_template() {
    let bench = Bench::new();
    // <|im_start|> u s er \n z <|im_end|> \n <|im_start|> and the 10 bytes of "assistant\n", none of which merge.
    assert_eq!(num_tokens(&bench, &["--chat", "--prompt", "z"], ""), 8 + 1 + 10);
    // And 11 more for <|im_start|> s y s t e m \n q <|im_end|> \n.
    assert_eq!(num_tokens(&bench, &["--system", "q", "--prompt", "z"], ""), 8 + 1 + 10 + 11);
}

#[test]
fn a_template_may_ask_for_the_date() {
    let bench = Bench::new();
    let model = std::fs::read(&bench.model).unwrap();
    let count = |template: &str| {
        std::fs::write(&bench.model, replaced(&model, "{{ '<|im_start|>assistant\n' }}", template)).unwrap();
        num_tokens(&bench, &["--chat", "--prompt", "z"], "")
    };
    let date = count("{{ strftime_now('%Y-%m-%d') }}");
    assert_eq!(date, count("{{ '2001-02-03'             }}"));
    assert_eq!(date, 8 + 10);
}
