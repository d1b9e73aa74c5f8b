//! The JSON other programs read: its keys, and numbers that must agree with each other.

use serde_json::Value;

use crate::program::Bench;

/// Bytes of a page of one KV head of the tiny model: 16 tokens of 16 keys and 16 values, 2 bytes each.
const PAGE_BYTES: u64 = 16 * (16 + 16) * 2;
/// Its KV groups: 2 layers of 2 heads.
const GROUPS: u64 = 4;

#[track_caller]
fn has_keys(object: &Value, keys: &[&str]) {
    let got: Vec<&str> = object.as_object().unwrap().keys().map(String::as_str).collect();
    for key in keys {
        assert!(got.contains(key), "no {key} among {got:?}");
    }
}

#[track_caller]
fn is_positive(object: &Value, keys: &[&str]) {
    for key in keys {
        assert!(object[key].as_f64().unwrap() > 0.0, "{key} of {object}");
    }
}

fn long_prompt() -> String {
    "the other sea was on the west side, and none of them had seen it. ".repeat(20)
}

#[test]
fn generate_prints_one_object() {
    let bench = Bench::new();
    let words = ["--json", "-n", "40", "--ignore-eos", "--kv-budget", "20%"];
    let json = bench.run_model("generate", &words, long_prompt()).json();
    has_keys(&json, &["text", "tokens", "finish_reason", "usage", "kv", "timing"]);
    assert_eq!(json["finish_reason"], "length");
    assert_eq!(json["tokens"].as_array().unwrap().len(), 40);
    assert_eq!(json["usage"]["completion_tokens"], 40);
    let prompt_tokens = json["usage"]["prompt_tokens"].as_u64().unwrap();
    let kv = &json["kv"];
    let pages = prompt_tokens / 5 / 16;
    assert!(pages > 4, "the prompt of {prompt_tokens} tokens is too short to prove anything");
    assert_eq!(kv["bytes_budget"], pages * GROUPS * PAGE_BYTES);
    assert!(kv["bytes_held"].as_u64() <= kv["bytes_budget"].as_u64(), "{kv}");
    assert_eq!(kv["bytes_held"].as_u64().unwrap() % (GROUPS * PAGE_BYTES), 0);
    assert_eq!(kv["logical_tokens"], prompt_tokens + 40);
    // The last token's keys and values are never needed.
    let full_pages = (prompt_tokens + 39).div_ceil(16);
    assert_eq!(kv["bytes_full"], full_pages * GROUPS * PAGE_BYTES);
    let held_pages = kv["bytes_held"].as_u64().unwrap() / PAGE_BYTES;
    assert_eq!(kv["pages_evicted"], full_pages * GROUPS - held_pages);
    assert_eq!((&kv["bytes_appended"], &kv["nan_rows"]), (&Value::from(0), &Value::from(0)));
    assert_eq!(kv["uor"], 1.0);
    is_positive(kv, &["bytes_metadata", "bytes_policy_state"]);
    // The most was held when the whole prompt had been read: whole pages of it, and its tables and rows with them.
    assert_eq!(kv["bytes_peak"], prompt_tokens.div_ceil(16) * GROUPS * PAGE_BYTES);
    assert_eq!((&kv["bytes_window_peak"], &kv["budget_violations"]), (&0.into(), &0.into()));
    for kind in ["bytes_metadata", "bytes_policy_state"] {
        let peak = format!("{kind}_peak");
        assert!(kv[&peak].as_u64() >= kv[kind].as_u64(), "{kv}");
    }
    has_keys(&json["timing"], &["load_s", "observe_s", "evict_s"]);
    is_positive(&json["timing"], &["load_s", "prefill_tokens_per_s", "decode_tokens_per_s"]);
}

#[test]
fn generate_streams_the_text_its_json_holds() {
    let bench = Bench::new();
    let words = ["--prompt", "Call me", "-n", "24", "--ignore-eos"];
    let text = bench.run_model("generate", &words, "").success();
    let json = bench.run_model("generate", &[&words[..], &["--json"]].concat(), "").json();
    assert_eq!(text.strip_suffix('\n'), json["text"].as_str());
    // Without a budget all that is held is all there is.
    let kv = &json["kv"];
    assert_eq!((&kv["bytes_held"], &kv["bytes_budget"]), (&kv["bytes_full"], &kv["bytes_full"]));
    assert_eq!(kv["pages_evicted"], 0);
}

#[test]
fn a_stop_string_finishes_with_stop_and_is_left_out() {
    let bench = Bench::new();
    let words = ["--prompt", "Call me", "-n", "24", "--ignore-eos", "--json"];
    let whole = bench.run_model("generate", &words, "").json();
    let whole = whole["text"].as_str().unwrap();
    let stop: String = whole.chars().skip(4).take(3).collect();
    let json = bench.run_model("generate", &[&words[..], &["--stop", &stop]].concat(), "").json();
    assert_eq!(json["finish_reason"], "stop");
    assert_eq!(json["text"].as_str().unwrap(), &whole[..whole.find(&stop).unwrap()]);
}

#[test]
fn a_budget_of_everything_is_no_budget() {
    let bench = Bench::new();
    let words = ["--json", "-n", "40", "--ignore-eos"];
    let all = bench.run_model("generate", &[&words[..], &["--kv-budget", "100%"]].concat(), long_prompt()).json();
    let none = bench.run_model("generate", &words, long_prompt()).json();
    assert_eq!(all["tokens"], none["tokens"]);
    assert_eq!(all["kv"]["bytes_held"], none["kv"]["bytes_held"]);
    assert_eq!(all["kv"]["bytes_budget"], none["kv"]["bytes_budget"]);
}

#[test]
fn every_kind_of_budget_and_policy_is_taken_and_kept() {
    let bench = Bench::new();
    let cases: [(&[&str], u64); 10] = [
        (&["--kv-budget", "128tok"], 8),
        (&["--kv-budget", "9pages"], 9),
        (&["--kv-budget", "32KiB"], 8),
        (&["--kv-budget", "40000"], 0),
        (&["--kv-budget", "128tok", "--policy", "page-entro-kv:tau=0.5,row=window:32"], 8),
        (&["--kv-budget", "128tok", "--policy", "page-entro-kv:preset=paper,alpha=inf,pooling=max"], 8),
        (&["--kv-budget", "128tok", "--policy", "mean-pages"], 8),
        (&["--kv-budget", "128tok", "--policy", "snapkv:window=16,allot=ada-interpolated:0.2"], 8),
        (&["--kv-budget", "9pages", "--policy", "knorm:allot=global"], 9),
        (&["--kv-budget", "32KiB", "--policy", "streaming-llm"], 8),
    ];
    for (words, pages) in cases {
        let run = bench.run_model("generate", &[&["--json", "-n", "8", "--ignore-eos"], words].concat(), long_prompt());
        if pages == 0 {
            run.fails(2, "does not say what it counts");
            continue;
        }
        let json = run.json();
        assert_eq!(json["kv"]["bytes_budget"], pages * GROUPS * PAGE_BYTES, "{words:?}");
        assert!(json["kv"]["bytes_held"].as_u64() <= json["kv"]["bytes_budget"].as_u64(), "{words:?}: {json}");
    }
}

#[test]
fn schedule_once_reports_what_grew() {
    let bench = Bench::new();
    let words =
        ["--json", "-n", "65", "--ignore-eos", "--kv-budget", "128tok", "--policy", "page-entro-kv:schedule=once"];
    let json = bench.run_model("generate", &words, long_prompt()).json();
    let kv = &json["kv"];
    let held = kv["bytes_held"].as_u64().unwrap();
    assert_eq!(kv["bytes_appended"].as_u64().unwrap(), 4 * GROUPS * PAGE_BYTES, "{kv}");
    assert!(held > kv["bytes_budget"].as_u64().unwrap(), "{kv}");
}

#[test]
fn bench_prints_one_object() {
    let bench = Bench::new();
    let words = ["--prompt", "64,320", "--generate", "8", "--threads", "1", "--kv-budget", "128tok", "--json"];
    let json = bench.run_model("bench", &words, "").json();
    has_keys(&json, &["cpu", "isa", "rows"]);
    let rows = json["rows"].as_array().unwrap();
    let prompts: Vec<_> = rows.iter().map(|row| row["prompt"].as_u64().unwrap()).collect();
    assert_eq!(prompts, [64, 320]);
    for row in rows {
        is_positive(row, &["prefill_s", "prefill_tokens_per_s", "decode_tokens_per_s", "kv_bytes_held"]);
        assert!(row["kv_bytes_held"].as_u64().unwrap() <= 8 * GROUPS * PAGE_BYTES);
        assert_eq!(row["kv_bytes_budget"], 8 * GROUPS * PAGE_BYTES);
        let prompt_pages = row["prompt"].as_u64().unwrap() / 16;
        assert_eq!(row["kv_bytes_peak"], prompt_pages.max(5) * GROUPS * PAGE_BYTES, "8 more tokens open a page at 64");
        is_positive(row, &["kv_bytes_metadata", "kv_bytes_policy_state"]);
        has_keys(row, &["kv_bytes_window_peak", "kv_bytes_metadata_peak", "kv_bytes_policy_state_peak"]);
        assert_eq!((&row["kv_bytes_window"], &row["budget_violations"]), (&0.into(), &0.into()));
        if cfg!(target_os = "linux") {
            is_positive(row, &["rss_bytes"]);
            assert!(row["peak_rss_bytes"].as_u64() >= row["rss_bytes"].as_u64(), "{row}");
        }
    }
}

#[test]
fn inspect_prints_one_object() {
    let bench = Bench::new();
    let json = bench.run_model("inspect", &["--json", "--prompt", "1000"], "").json();
    assert_eq!((&json["architecture"], &json["layers"]), (&"llama".into(), &2.into()));
    assert_eq!((&json["query_heads"], &json["kv_heads"], &json["head_dim"]), (&4.into(), &2.into(), &16.into()));
    assert_eq!(json["file_bytes"], std::fs::metadata(&bench.model).unwrap().len());
    assert_eq!(json["kv"][0]["bytes_per_token"], GROUPS * PAGE_BYTES / 16);
    let fifth = json["budgets"].as_array().unwrap().iter().find(|row| row["budget"] == "20%").unwrap();
    assert_eq!(fifth["pages_per_group"], 12);
    assert_eq!(fifth["bytes"], 12 * GROUPS * PAGE_BYTES);
    assert_eq!(fifth["bytes_full"], 63 * GROUPS * PAGE_BYTES);
}

#[test]
fn inspect_converts_a_budget_into_every_unit() {
    let bench = Bench::new();
    let of =
        |words: &[&str]| bench.run_model("inspect", &[&["--json"], words].concat(), "").json()["conversions"].take();
    // kvpress would keep 409 of 4,096 tokens: 25 whole pages, of which the sinks' and none other is pinned at a page's end.
    let ninety = of(&["--kv-budget", "evict:0.9", "--tokens", "4096", "--policy", "knorm"]);
    let expected = serde_json::json!([{
        "budget": "evict:90%", "policy": "knorm", "prompt_tokens": 4096, "pages_per_group": 25, "tokens_per_group": 400,
        "pinned_pages": 1, "bytes": 25 * GROUPS * PAGE_BYTES, "bytes_full": 256 * GROUPS * PAGE_BYTES,
        "fraction_kept": 400.0 / 4096.0, "fraction_evicted": 1.0 - 400.0 / 4096.0,
        "smallest_pages": 2, "smallest_bytes": 2 * GROUPS * PAGE_BYTES, "raised": false,
    }]);
    assert_eq!(ninety, expected);
    // The default policy pins a quarter of them beside the sinks' page.
    let tokens = of(&["--kv-budget", "512tok", "--tokens", "1000"]);
    assert_eq!((&tokens[0]["pages_per_group"], &tokens[0]["pinned_pages"]), (&32.into(), &9.into()));
    // More than the prompt needs is all of it, and every length of --prompt has its row.
    let all = of(&["--kv-budget", "1GiB", "--prompt", "100,1600"]);
    assert_eq!(all.as_array().unwrap().len(), 2);
    assert_eq!((&all[0]["tokens_per_group"], &all[0]["fraction_kept"]), (&100.into(), &1.0.into()));
    assert_eq!((&all[1]["bytes"], &all[1]["raised"]), (&all[1]["bytes_full"], &false.into()));
    let least = of(&["--kv-budget", "evict:0.999", "--tokens", "320"]);
    assert_eq!((&least[0]["pages_per_group"], &least[0]["raised"]), (&2.into(), &true.into()));
    let text = bench.run_model("inspect", &["--kv-budget", "evict:0.9", "--tokens", "4096"], "").success();
    for line in ["each KV head    25 pages, 400 tokens", "evicted         90.23 %", "smallest        2pages each"] {
        assert!(text.contains(line), "{line}: {text}");
    }
}

#[test]
fn tokenize_and_perplexity_print_the_golden_form() {
    let bench = Bench::new();
    let json = bench.run_model("tokenize", &[], r#"["a<|im_end|>", ""]"#).json();
    let rows = json.as_array().unwrap();
    assert_eq!(rows.len(), 2);
    assert_eq!(rows[0]["text"], "a<|im_end|>");
    assert_eq!(rows[0]["ids"].as_array().unwrap().len(), 11);
    assert_eq!(rows[0]["ids_with_special"].as_array().unwrap().len(), 2);
    assert_eq!(rows[1], serde_json::json!({"ids": [], "ids_with_special": [], "text": ""}));

    let score = bench.run_model("perplexity", &["--tokens", "50", "--generate", "3"], long_prompt()).json();
    let keys: Vec<&String> = score.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["greedy", "mean_nll", "tokens", "top20_last"]);
    assert_eq!((score["tokens"].as_array().unwrap().len(), score["greedy"].as_array().unwrap().len()), (50, 3));
    assert_eq!(score["top20_last"].as_array().unwrap().len(), 20);
    assert_eq!(score["top20_last"][0][0], score["greedy"][0]);
    is_positive(&score, &["mean_nll"]);

    let words =
        ["--prompt-tokens", "300", "--tokens", "340", "--kv-budget", "20%", "--policy", "h2o:granularity=token"];
    let capped = bench.run_model("perplexity", &words, long_prompt()).json();
    is_positive(&capped, &["mean_nll", "mean_nll_full", "mean_kl", "worst_kl"]);
    assert_eq!((&capped["prompt_tokens"], &capped["scored_tokens"]), (&300.into(), &40.into()));
    assert_eq!((&capped["budget"], &capped["policy"]), (&"20%".into(), &"h2o:granularity=token".into()));
    // 60 tokens, 3 pages.
    assert_eq!(capped["kv_bytes_budget"], 3 * GROUPS * PAGE_BYTES);
    assert!(capped["kv_bytes_held"].as_u64() <= capped["kv_bytes_budget"].as_u64());
    assert_eq!(capped["kv_bytes_full"], 22 * GROUPS * PAGE_BYTES);
}

#[test]
fn the_demo_is_right_with_a_fifth_of_the_cache_and_with_a_tenth_made_before_the_question() {
    let cache = std::env::var_os("ENTROKV_CACHE").map(Into::into);
    let cache = cache.unwrap_or_else(|| entrokv::pull::default_cache_dir().unwrap());
    let model = entrokv::pull::default_model(&cache).unwrap();
    let bench = Bench::new();
    let mut command = bench.command();
    // Where the cache holds the model `demo` finds it by its name; else the folder of models at hand does.
    command.args(["demo", "--json"]).env("ENTROKV_CACHE", &cache).env("ENTROKV_MODELS", model.parent().unwrap());
    command.env_remove("ENTROKV_THREADS");
    let json = crate::program::Outcome::from(command.output().unwrap()).json();
    has_keys(&json, &["question", "expected", "rows"]);
    let rows = json["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 3);
    for row in rows {
        assert_eq!(row["correct"], true, "{row}");
        assert!(row["answer"].as_str().unwrap().contains(json["expected"].as_str().unwrap()));
        assert!(row["bytes_held"].as_u64() <= row["bytes_budget"].as_u64(), "{row}");
        is_positive(row, &["bytes_held", "prefill_tokens_per_s", "decode_tokens_per_s"]);
    }
    let column = |key: &str| rows.iter().map(|row| row[key].as_str().unwrap()).collect::<Vec<_>>();
    assert_eq!(column("budget"), ["100%", "20%", "10%"]);
    assert_eq!(column("asked"), ["before", "before", "after"]);
    assert!(10 * rows[2]["bytes_held"].as_u64().unwrap() <= rows[0]["bytes_held"].as_u64().unwrap());
    // floor(T / 5) tokens are so many whole pages, of 4 KiB, in each of 90 KV heads.
    let prompt_tokens = json["prompt_tokens"].as_u64().unwrap();
    let pages = prompt_tokens / 5 / 16;
    assert_eq!(rows[1]["bytes_budget"], pages * 90 * 4096);
    assert_eq!(rows[1]["bytes_held"], rows[1]["bytes_budget"]);
    // Reading it took the whole of it, with a budget as without.
    assert_eq!(rows[1]["bytes_peak"], prompt_tokens.div_ceil(16) * 90 * 4096);
    assert_eq!(rows[0]["bytes_policy_state"], 0);
    is_positive(&rows[1], &["bytes_metadata", "bytes_policy_state"]);
}

#[test]
fn bench_times_every_kernel_without_a_model() {
    let json = Bench::new().run(&["bench", "--kernels", "--json"], "").json();
    has_keys(&json, &["cpu", "isa", "threads", "machine", "kernels"]);
    is_positive(&json["machine"], &["read_gb_per_s", "f32_gop_per_s", "int8_gop_per_s"]);
    let kernels = json["kernels"].as_array().unwrap();
    for kernel in kernels {
        has_keys(kernel, &["kernel", "shape", "gop_per_s", "bound", "share_of_bound"]);
        is_positive(kernel, &["seconds", "gb_per_s"]);
    }
    let of =
        |start: &str| kernels.iter().filter(|kernel| kernel["kernel"].as_str().unwrap().starts_with(start)).count();
    assert_eq!(of("matmul "), 26, "13 types of weights, one token and many");
    assert!(of("attention ") >= 4);
}

#[test]
fn policies_are_listed_with_what_they_need_and_free() {
    let bench = Bench::new();
    let json = bench.run(&["policies", "--json"], "").json();
    let rows = json.as_array().unwrap();
    assert!(rows.len() > 12);
    for row in rows {
        has_keys(row, &["name", "paper", "needs", "frees", "requires_file", "min_budget", "min_pages"]);
        let min_budget = if row["frees"] == true { Value::Null } else { 1.0.into() };
        assert_eq!((row["requires_file"].is_boolean(), &row["min_budget"]), (true, &min_budget), "{row}");
        assert_eq!(row["needs"][0], "positions");
    }
    let snap_kv = rows.iter().find(|row| row["name"] == "snapkv").unwrap();
    assert_eq!(snap_kv["needs"], serde_json::json!(["positions", "window rows", "step rows"]));
    let lag_kv = rows.iter().find(|row| row["name"] == "lagkv").unwrap();
    assert_eq!(lag_kv["needs"], serde_json::json!(["positions", "keys and values"]));
    let files: Vec<&Value> = rows.iter().filter(|row| row["requires_file"] == true).map(|row| &row["name"]).collect();
    assert_eq!(files, ["fast-kvzip", "kvzap"]);
    let kvzap = rows.iter().find(|row| row["name"] == "kvzap").unwrap();
    assert_eq!(kvzap["needs"], serde_json::json!(["positions", "layer inputs"]));
    let keeping: Vec<&Value> = rows.iter().filter(|row| row["frees"] == false).map(|row| &row["name"]).collect();
    assert_eq!(keeping, ["quest", "think"]);
    let quest = rows.iter().find(|row| row["name"] == "quest").unwrap();
    assert_eq!(quest["needs"], serde_json::json!(["positions", "queries", "key ranges"]));
    // The table has a line for each, under a head.
    let table = bench.run(&["policies"], "").success();
    assert_eq!(table.lines().count(), rows.len() + 1);
    assert!(table.lines().all(|line| line.len() < 140), "{table}");
    let quest = table.lines().find(|line| line.starts_with("quest ")).unwrap();
    assert_eq!(quest.split_whitespace().nth(1), Some("no"), "{quest}");
}

/// What `policies` says is the smallest budget of each policy is kept; anything less is refused in one line.
#[test]
fn smallest_budgets_are_kept_and_less_is_refused() {
    let bench = Bench::new();
    let rows = bench.run(&["policies", "--json"], "").json();
    let mut kept = 0;
    for row in rows.as_array().unwrap() {
        if row["requires_file"] == true {
            continue;
        }
        let (smallest, less) = match (row["min_budget"].as_f64(), row["min_pages"].as_u64()) {
            (Some(part), None) => (format!("{}%", 100.0 * part), format!("{}%", 100.0 * part - 0.001)),
            (None, Some(pages)) => (format!("{pages}pages"), format!("{}pages", pages - 1)),
            both => panic!("{both:?} in {row}"),
        };
        let name = row["name"].as_str().unwrap();
        let words = |budget| ["--json", "-n", "3", "--ignore-eos", "--policy", name, "--kv-budget", budget];
        let run = bench.run_model("generate", &words(&smallest), long_prompt());
        assert_eq!(run.code, Some(0), "{name}: {run:?}");
        let json: Value = serde_json::from_str(&run.stdout).unwrap();
        assert!(json["kv"]["bytes_held"].as_u64() <= json["kv"]["bytes_budget"].as_u64(), "{name}: {json}");
        let refused = if less == "0pages" { (2, "must be greater than 0") } else { (1, "the smallest budget is ") };
        let run = bench.run_model("generate", &words(&less), long_prompt());
        assert_eq!(run.complaint(refused.0, refused.1), None, "{name}");
        kept += 1;
    }
    assert!(kept > 25, "{kept}");
}

#[test]
fn a_policy_that_frees_nothing_says_what_it_reads() {
    let bench = Bench::new();
    let words = ["--json", "-n", "20", "--ignore-eos", "--policy", "quest:tokens=64,dense=1"];
    let run = bench.run_model("generate", &words, long_prompt());
    assert_eq!(run.code, Some(0), "{run:?}");
    let json: Value = serde_json::from_str(&run.stdout).unwrap();
    let kv = &json["kv"];
    assert_eq!((&kv["bytes_held"], &kv["pages_evicted"]), (&kv["bytes_full"], &0.into()));
    // All pages of the first layer's heads, and four of the second's.
    let pages = kv["bytes_full"].as_u64().unwrap() / (GROUPS * PAGE_BYTES);
    assert_eq!(kv["pages_read"], 2 * pages + 2 * 4);
    assert_eq!(run.stderr, format!("note: quest reads {} of {} pages, frees nothing\n", 2 * pages + 8, 4 * pages));
    let dense = bench.run_model("generate", &["--json", "-n", "2"], long_prompt()).json();
    assert_eq!(dense["kv"]["pages_read"], Value::Null);
    for budget in ["99%", "64MiB"] {
        let words = ["--policy", "quest", "--kv-budget", budget];
        bench
            .run_model("generate", &words, long_prompt())
            .fails(1, "the policy frees nothing, so that a KV budget of ");
    }
}
