//! `entrokv needle`: rows, and one line for what cannot be measured.

use serde_json::Value;

use crate::program::{Bench, text};

/// Short enough for the tiny model's context.
const SMALL: [&str; 10] =
    ["--contexts", "2", "--tokens", "700", "--facts", "4", "--kl-texts", "1", "--kl-tokens", "200"];

#[test]
fn rows_are_recipes_at_budgets() {
    let bench = Bench::new();
    let words =
        [&SMALL[..], &["--recipes", "f16;snapkv:window=8;f16/knorm", "--budgets", "30%,15%", "--json"]].concat();
    let json = bench.run_model("needle", &words, "").json();
    assert_eq!(json["model"], "tiny llama, seed 1");
    let rows = json["rows"].as_array().unwrap();
    let names: Vec<(&str, Option<&str>)> =
        rows.iter().map(|row| (row["recipe"].as_str().unwrap(), row["budget"].as_str())).collect();
    let snapkv = "snapkv:window=8";
    let expected = [
        ("full", None),
        ("f16", None),
        (snapkv, Some("30%")),
        (snapkv, Some("15%")),
        ("f16/knorm", Some("30%")),
        ("f16/knorm", Some("15%")),
    ];
    assert_eq!(names, expected);
    for row in rows {
        let number = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key} of {row}"));
        assert_eq!((number("questions"), row["depth100"]["questions"].as_u64()), (6.0, Some(2)));
        assert!(number("answered") <= number("answered_full") && number("kl_mean") <= number("kl_worst"));
        let share = number("bytes_held") / number("bytes_full");
        let most = match row["budget"].as_str() {
            Some("30%") => 0.3,
            Some(_) => 0.15,
            None => 1.0,
        };
        assert!(share > 0.0 && share <= most, "{row}");
        assert!(number("seconds") > 0.0 && row["interval"].as_array().unwrap().len() == 2);
    }
    assert_eq!((&rows[0]["kl_mean"], &rows[1]["kl_worst"]), (&0.0.into(), &0.0.into()));
    assert!(rows[2]["kl_mean"].as_f64().unwrap() > 0.0);
}

#[test]
fn the_table_has_a_line_a_row() {
    let bench = Bench::new();
    let cases = "{\"context\": \"A long and a very short text.\", \"questions\": [{\"question\": \"Who?\", \"answer\": \"me\"}]}\n";
    let path = bench.file("cases.jsonl", cases);
    let words = ["--cases", text(&path), "--recipes", "f16", "--recipes", "full", "--kl-texts", "0"];
    let table = bench.run_model("needle", &words, "").success();
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(
        lines[0],
        "tiny llama, seed 1: the full cache answers 0 of 1 questions, and 0 of 0 about a context's end"
    );
    assert!(lines[2].starts_with("recipe") && lines[3].starts_with("full ") && lines[4].starts_with("f16 "), "{table}");
    assert_eq!(lines.len(), 5, "{table}");
    assert!(lines[3].contains("100.0 %"), "{table}");
    let document = bench.file("text.txt", "The sea was on the west side, and none of them had seen it.");
    let words =
        ["--document", text(&document), "--question", "Where?", "--answer", "west", "--recipes", "f16", "--json"];
    let json = bench.run_model("needle", &[&words[..], &["--kl-texts", "0"]].concat(), "").json();
    assert_eq!(json["rows"][0]["questions"], 1);
    assert_eq!(json["rows"][1]["kl_mean"], Value::Null);
}

#[test]
fn what_makes_no_sense_is_one_line() {
    let bench = Bench::new();
    let empty = bench.file("empty.txt", " \n");
    let short = bench.file("short.txt", "Too short to cut from.");
    let full = bench.file("text.txt", "The sea was on the west side, and none of them had seen it.");
    let lines = bench
        .file("cases.jsonl", "{\"context\": \"x\", \"questions\": [{\"question\": \"a\", \"answer\": \"b\"}]}\n{]\n");
    let none = bench.file("none.jsonl", "\n");
    let [empty, short, full, lines, none] = [&empty, &short, &full, &lines, &none].map(|path| text(path));
    let cases: [(&[&str], &str); 13] = [
        (&["--document", empty, "--question", "a", "--answer", "b"], "empty.txt: the context is empty"),
        (&["--document", full], "text.txt: there is no question"),
        (&["--document", full, "--question", "a"], "1 --question and 0 --answer"),
        (&["--document", full, "--question", "a", "--answer", ""], "text.txt: a question has no answer"),
        (&["--document", "nowhere.txt", "--question", "a", "--answer", "b"], "nowhere.txt: "),
        (&["--question", "a", "--answer", "b"], "need --document"),
        (&["--cases", lines], "cases.jsonl: line 2: key must be a string"),
        (&["--cases", none], "none.jsonl: there are no cases"),
        (&["--recipes", "f16;lru"], "unknown recipe \"lru\""),
        (&["--recipes", "tq4"], "cache type tq4 needs a head dimension"),
        (&["--tokens", "100000", "--recipes", "f16"], "the model's context holds"),
        (&["--haystack", short, "--recipes", "f16"], "the text has "),
        (&["--facts", "99", "--recipes", "f16"], "99 facts a context were asked for; there are 20"),
    ];
    let complaints: Vec<String> = cases
        .into_iter()
        .filter_map(|(words, expected)| {
            let run = bench.run_model("needle", words, "");
            run.complaint(1, expected).map(|why| format!("{words:?}: {why}"))
        })
        .collect();
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
    bench.run_model("needle", &["--budgets", "much"], "").fails(2, "much");
    bench.run_model("needle", &["--contexts", "0"], "").fails(2, "--contexts");
}
