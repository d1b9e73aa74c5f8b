//! A long conversation of a real model in a tenth of its cache, which remembers what was said first.

use std::path::PathBuf;

use crate::program::{Bench, text};

/// What is talked about in between.
const SMALL_TALK: [&str; 28] = [
    "What is the capital of Portugal?",
    "Name three fruits that are red.",
    "What does a thermometer measure?",
    "How many legs does a spider have?",
    "Which planet is closest to the sun?",
    "Give me a synonym for fast.",
    "What is 14 times 3?",
    "Who wrote Hamlet?",
    "Name a metal that is liquid at room temperature.",
    "What language is spoken in Brazil?",
    "What do bees make?",
    "How many minutes are in two hours?",
    "What is the opposite of heavy?",
    "Which ocean lies between Europe and America?",
    "What gas do plants take in?",
    "Name a string instrument.",
    "What is the square of nine?",
    "What colour do you get from blue and yellow?",
    "Which animal is the largest on earth?",
    "How many continents are there?",
    "What is bread made of?",
    "Name a programming language that starts with P.",
    "What is the boiling point of water in Celsius?",
    "Which month comes after June?",
    "What is the plural of mouse?",
    "Name a country in South America.",
    "How many sides does a hexagon have?",
    "What do you call frozen water?",
];

/// What is said first, what is asked last, and what the answer holds.
const MEMORIES: [[&str; 3]; 2] = [
    [
        "Please remember: my sister Hanna keeps the lighthouse of Vlieland, and its lamp was replaced in 1987. Just say OK.",
        "In which year was the lamp of my sister's lighthouse replaced?",
        "1987",
    ],
    [
        "Please remember this for later: my sister Odalys keeps her bicycle in shed number 58, and the gate code is 7319.",
        "What is the gate code of the shed in which my sister keeps her bicycle?",
        "7319",
    ],
];

/// Twenty-eight turns about other things, a pass after each from 512 tokens on, a tenth of the bytes.
#[test]
fn thirty_turns_in_a_tenth_of_the_cache_remember_the_first() {
    let Some(models) = std::env::var_os("ENTROKV_MODELS").map(PathBuf::from) else { return };
    let model = models.join("qwen2.5-1.5b.gguf");
    if !model.is_file() {
        return;
    }
    let bench = Bench::new();
    for [said, asked, expected] in MEMORIES {
        let turns = [&[said], &SMALL_TALK[..], &[asked, "/stats"]].concat().join("\n");
        let words = ["chat", "-m", text(&model), "-t", "2", "-n", "40", "--temp", "0", "--kv-budget", "10%"];
        let outcome = bench.run(&words, turns);
        assert_eq!(outcome.code, Some(0), "{outcome:?}");
        assert!(outcome.stderr.starts_with("auto under 10%: kvzip:"), "{outcome:?}");
        // The last answer stands before what `/stats` says.
        let (answers, stats) = outcome.stdout.split_once("\ntokens ").unwrap();
        let last = answers.lines().last().unwrap();
        assert!(last.contains(expected), "{last}\n{}", outcome.stdout);
        assert!(stats.contains("(budget 2."), "{stats}");
    }
}
