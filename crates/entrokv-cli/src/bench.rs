//! `entrokv bench`: reading and generating speed on seeded random tokens, and the memory they take.

mod kernels;

use std::fs;
use std::io::{self, Write};

use clap::Args;
use clap::builder::FalseyValueParser;
use entrokv::{EndTokens, Question, Request};
use serde::Serialize;

use crate::cli::CacheDir;
use crate::failure::Failure;
use crate::model_args::{EvictionArgs, Fit, RunArgs, resolve};
use crate::progress::Progress;

const EXAMPLES: &str = "\
Examples:
  entrokv bench -m smollm2-135m --prompt 512,8000 --generate 64 --threads 2
  entrokv bench -m model.gguf --prompt 8000 --kv-budget 20% --repetitions 5 --json
  entrokv bench --kernels --threads 2";

/// What to measure.
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct BenchArgs {
    /// A GGUF file, or the name of a pulled model
    #[arg(short, long, env = "ENTROKV_MODEL", value_name = "MODEL", required_unless_present = "kernels")]
    model: Option<String>,
    /// Time each kernel beside what memory and the arithmetic units of this machine can do; needs no model
    #[arg(long, env = "ENTROKV_KERNELS", value_parser = FalseyValueParser::new())]
    kernels: bool,
    /// Prompt lengths, comma separated
    #[arg(short, long, env = "ENTROKV_PROMPT_TOKENS", value_name = "N,N", value_delimiter = ',', default_value = "512", visible_alias = "n-prompt", value_parser = clap::value_parser!(u32).range(1..))]
    prompt: Vec<u32>,
    /// Tokens to generate after each
    #[arg(short = 'n', long, env = "ENTROKV_GENERATE", value_name = "N", default_value = "64", visible_alias = "n-gen", value_parser = clap::value_parser!(u32).range(1..))]
    generate: u32,
    /// Measure everything this often and print each run; compare medians
    #[arg(short, long, env = "ENTROKV_REPETITIONS", value_name = "N", default_value = "1", value_parser = clap::value_parser!(u32).range(1..))]
    repetitions: u32,
    /// Print one JSON object
    #[arg(long, env = "ENTROKV_JSON", value_parser = FalseyValueParser::new())]
    json: bool,
    #[command(flatten)]
    run: RunArgs,
    #[command(flatten)]
    eviction: EvictionArgs,
}

#[derive(Serialize)]
struct Report {
    cpu: String,
    isa: &'static str,
    threads: usize,
    model: String,
    cache_type: String,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    prompt: u32,
    generate: u32,
    prefill_s: f64,
    prefill_tokens_per_s: f64,
    decode_tokens_per_s: f64,
    pass_s: f64,
    observe_s: f64,
    evict_s: f64,
    encode_s: f64,
    kv_bytes_held: u64,
    /// What the budget resolved to; without one, the full cache.
    kv_bytes_budget: u64,
    kv_bytes_full: u64,
    kv_bytes_window: u64,
    kv_bytes_metadata: u64,
    kv_bytes_policy_state: u64,
    /// The most of each at any time.
    kv_bytes_peak: u64,
    kv_bytes_window_peak: u64,
    kv_bytes_metadata_peak: u64,
    kv_bytes_policy_state_peak: u64,
    budget_violations: u64,
    /// At the end of the answer, the cache still held.
    rss_bytes: Option<u64>,
    peak_rss_bytes: Option<u64>,
}

/// Runs the command.
pub(crate) fn run(args: &BenchArgs, cache: &CacheDir) -> Result<(), Failure> {
    match &args.model {
        _ if args.kernels => kernels::run(&args.run, args.json),
        Some(model) => run_model(args, model, cache),
        None => Err(Failure::Usage("bench needs --model or --kernels".to_string())),
    }
}

fn run_model(args: &BenchArgs, model: &str, cache: &CacheDir) -> Result<(), Failure> {
    args.eviction.check(Question::Seen)?;
    let options = args.run.options();
    let mut model = args.run.open(&resolve(model, cache)?)?;
    let fit = Fit::of_engine(&model.engine);
    let vocab = model.tokenizer.vocab_size() as u64;
    let mut report = Report {
        cpu: cpu_name(),
        isa: options.isa.name(),
        threads: options.threads.get(),
        model: model.config.name.clone(),
        cache_type: options.page_kind.to_string(),
        rows: Vec::new(),
    };
    for &prompt in &args.prompt {
        // The first generated token comes out of reading the prompt.
        let (needed, limit) = (prompt as usize + args.generate as usize + 1, model.engine.context_len());
        if needed > limit {
            let what = format!("a prompt of {prompt} tokens and {} generated ones", args.generate);
            return Err(Failure::Failed(format!("{what} need a context of {needed}, the context holds {limit}")));
        }
    }
    let bar = Progress::steps("measuring", args.prompt.len() as u64 * u64::from(args.repetitions));
    for repetition in 0..args.repetitions {
        for &prompt in &args.prompt {
            let eviction = args.eviction.for_prompt(Question::Seen, fit, &model.engine, prompt as usize)?;
            let request = Request {
                prompt: random_tokens(u64::from(repetition), vocab, prompt as usize),
                end_tokens: EndTokens::Ignore,
                eviction,
                ..Request::greedy(Vec::new(), args.generate as usize + 1)
            };
            reset_peak_rss();
            let id = model.engine.submit(request).map_err(Failure::refused)?;
            let completion = model.engine.finish(id, &mut |_| ())?;
            let rss_bytes = resident("VmRSS:");
            model.engine.close(id);
            if completion.tokens.len() != args.generate as usize + 1 {
                let reason = completion.finish_reason;
                return Err(Failure::Failed(format!("prompt of {prompt}: ended early ({reason:?})")));
            }
            let kv = &completion.kv;
            report.rows.push(Row {
                prompt,
                generate: args.generate,
                prefill_s: completion.timing.prefill.as_secs_f64(),
                prefill_tokens_per_s: completion.timing.prefill_tokens_per_s(),
                decode_tokens_per_s: completion.timing.decode_tokens_per_s(),
                pass_s: completion.timing.pass.as_secs_f64(),
                observe_s: completion.timing.observe.as_secs_f64(),
                evict_s: completion.timing.evict.as_secs_f64(),
                encode_s: completion.timing.encode.as_secs_f64(),
                kv_bytes_held: kv.bytes_held,
                kv_bytes_budget: kv.bytes_budget.unwrap_or(kv.bytes_full),
                kv_bytes_full: kv.bytes_full,
                kv_bytes_window: kv.bytes_window,
                kv_bytes_metadata: kv.bytes_metadata,
                kv_bytes_policy_state: kv.bytes_policy_state,
                kv_bytes_peak: kv.peak.held,
                kv_bytes_window_peak: kv.peak.window,
                kv_bytes_metadata_peak: kv.peak.metadata,
                kv_bytes_policy_state_peak: kv.peak.policy_state,
                budget_violations: kv.budget_violations,
                rss_bytes,
                // The system notes its high-water mark late by some pages.
                peak_rss_bytes: resident("VmHWM:").max(rss_bytes),
            });
            bar.set(report.rows.len() as u64);
        }
    }
    drop(bar);
    print(args.json, &report)
}

fn print(json: bool, report: &Report) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    if json {
        serde_json::to_writer(&mut out, report)?;
        writeln!(out)?;
        return Ok(());
    }
    writeln!(
        out,
        "{} on {} ({}, {} threads, {} cache)",
        report.model, report.cpu, report.isa, report.threads, report.cache_type
    )?;
    writeln!(
        out,
        "{:>8} {:>14} {:>14} {:>12} {:>12} {:>12} {:>10} {:>10} {:>11}",
        "prompt", "prefill tok/s", "decode tok/s", "KV held", "KV peak", "KV full", "metadata", "policy", "peak RSS"
    )?;
    for row in &report.rows {
        let rss = row.peak_rss_bytes.map_or("-".to_string(), mib);
        let [held, peak, full] = [row.kv_bytes_held, row.kv_bytes_peak, row.kv_bytes_full].map(mib);
        let [metadata, policy] = [row.kv_bytes_metadata, row.kv_bytes_policy_state].map(mib);
        let (prefill, decode) = (row.prefill_tokens_per_s, row.decode_tokens_per_s);
        writeln!(
            out,
            "{:>8} {prefill:>14.1} {decode:>14.1} {held:>12} {peak:>12} {full:>12} {metadata:>10} {policy:>10} {rss:>11}",
            row.prompt
        )?;
    }
    Ok(())
}

/// Bytes as mebibytes with two decimals.
pub(crate) fn mib(bytes: u64) -> String {
    format!("{:.2} MiB", bytes as f64 / f64::from(1 << 20))
}

/// Token ids from a linear congruential generator (Numerical Recipes' constants), the same everywhere.
fn random_tokens(seed: u64, vocab: u64, len: usize) -> Vec<u32> {
    let mut state = 12_345u32.wrapping_add(seed as u32);
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (u64::from(state >> 8) % vocab) as u32
        })
        .collect()
}

/// The processor's name where the system tells it.
fn cpu_name() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        info.lines().find_map(|line| line.split_once(':').filter(|(key, _)| key.trim() == name)).map(|(_, v)| v.trim())
    };
    let family = match (field("cpu family"), field("model")) {
        (Some(family), Some(model)) => format!(" (family {family} model {model})"),
        _ => String::new(),
    };
    field("model name").map_or_else(|| std::env::consts::ARCH.to_string(), |name| format!("{name}{family}"))
}

/// Bytes of the resident set, where the system tells them: `VmRSS:` now, `VmHWM:` at most since the last reset.
fn resident(field: &str) -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(field))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Starts the peak anew, where the system can; otherwise peaks only grow, which is true of the whole process.
fn reset_peak_rss() {
    let _ = fs::write("/proc/self/clear_refs", "5");
}
