//! `entrokv demo`: one long prompt, one fact hidden in it, one question; answered with the whole cache and with a fifth.

use std::io::{self, Write};

use clap::Args;
use clap::builder::FalseyValueParser;
use entrokv::pull::{DEFAULT_MODEL, default_model_at_hand};
use entrokv::{
    EndTokens, EvictionOptions, Message, RenderOptions, Request, SamplingOptions, SpecialTokens, parse_policy,
};
use serde::Serialize;

use crate::bench::mib;
use crate::cli::CacheDir;
use crate::failure::Failure;
use crate::model_args::RunArgs;
use crate::output;
use crate::progress::Progress;
use crate::pull;

/// The document, with the fact somewhere in its middle.
const DOCUMENT: &str = include_str!("demo/document.txt");
/// What is asked after it.
const QUESTION: &str = "What is the combination of the blue locker?";
/// What a right answer contains.
const EXPECTED: &str = "7492";
/// Tokens of an answer.
const MAX_TOKENS: usize = 48;
/// Budgets of the rows; the first keeps everything.
const BUDGETS: [Option<&str>; 2] = [None, Some("20%")];
const POLICY: &str = "page-entro-kv:preset=serving";

const EXAMPLES: &str = "\
Examples:
  entrokv demo
  entrokv demo --json --threads 2";

/// How to run it.
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct DemoArgs {
    /// Print one JSON object
    #[arg(long, env = "ENTROKV_JSON", value_parser = FalseyValueParser::new())]
    json: bool,
    #[command(flatten)]
    run: RunArgs,
}

#[derive(Serialize)]
struct Report {
    question: String,
    expected: String,
    model: String,
    prompt_tokens: usize,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    budget: String,
    policy: &'static str,
    answer: String,
    correct: bool,
    bytes_held: u64,
    bytes_budget: u64,
    bytes_full: u64,
    bytes_metadata: u64,
    bytes_policy_state: u64,
    bytes_peak: u64,
    prefill_tokens_per_s: f64,
    decode_tokens_per_s: f64,
}

/// Runs the command.
pub(crate) fn run(args: &DemoArgs, cache: &CacheDir) -> Result<(), Failure> {
    let path = match default_model_at_hand() {
        Some(path) => path,
        None => pull::fetch(DEFAULT_MODEL, cache)?,
    };
    let mut model = args.run.open(&path)?;
    let template =
        model.chat_template.as_ref().ok_or_else(|| Failure::Failed(format!("{DEFAULT_MODEL} has no chat template")))?;
    let content = format!("{DOCUMENT}\n{QUESTION}");
    let messages = [Message::new("user", content)];
    let prompt = template.render(&messages, &RenderOptions::default())?;
    let prompt = model.tokenizer.encode(&prompt, SpecialTokens::Parse)?;
    let mut report = Report {
        question: QUESTION.to_string(),
        expected: EXPECTED.to_string(),
        model: model.config.name.clone(),
        prompt_tokens: prompt.len(),
        rows: Vec::new(),
    };
    if !args.json {
        output::line(format_args!(
            "{}: {} tokens of a harbour's logbook, and at its end: {QUESTION}\n",
            report.model,
            prompt.len()
        ))?;
    }
    for budget in BUDGETS {
        let eviction = match budget {
            Some(text) => Some(EvictionOptions { budget: text.parse()?, policy: parse_policy(POLICY)?.into() }),
            None => None,
        };
        let request = Request {
            prompt: prompt.clone(),
            max_tokens: Some(MAX_TOKENS),
            sampling: SamplingOptions::greedy(),
            stop: Vec::new(),
            end_tokens: EndTokens::Stop,
            eviction,
        };
        let bar = Progress::steps("reading", prompt.len() as u64);
        let completion = model.engine.generate(request, |step| bar.set(step.computed as u64))?;
        drop(bar);
        report.rows.push(Row {
            budget: budget.unwrap_or("100%").to_string(),
            policy: if budget.is_some() { POLICY } else { "none" },
            correct: completion.text.contains(EXPECTED),
            answer: completion.text.trim().to_string(),
            bytes_held: completion.kv.bytes_held,
            bytes_budget: completion.kv.bytes_budget.unwrap_or(completion.kv.bytes_full),
            bytes_full: completion.kv.bytes_full,
            bytes_metadata: completion.kv.bytes_metadata,
            bytes_policy_state: completion.kv.bytes_policy_state,
            bytes_peak: completion.kv.peak.held,
            prefill_tokens_per_s: completion.timing.prefill_tokens_per_s(),
            decode_tokens_per_s: completion.timing.decode_tokens_per_s(),
        });
    }
    let mut out = io::stdout().lock();
    if args.json {
        serde_json::to_writer(&mut out, &report)?;
        writeln!(out)?;
        return Ok(());
    }
    print(&mut out, &report)
}

fn print(out: &mut impl Write, report: &Report) -> Result<(), Failure> {
    writeln!(
        out,
        "{:<8} {:<8} {:>12} {:>12} {:>13} {:>13}  answer",
        "budget", "right", "KV held", "KV budget", "prefill tok/s", "decode tok/s"
    )?;
    for row in &report.rows {
        let right = if row.correct { "yes" } else { "NO" };
        let (held, budget) = (mib(row.bytes_held), mib(row.bytes_budget));
        let (prefill, decode) = (row.prefill_tokens_per_s, row.decode_tokens_per_s);
        let answer = row.answer.replace('\n', " ");
        writeln!(out, "{:<8} {right:<8} {held:>12} {budget:>12} {prefill:>13.1} {decode:>13.1}  {answer}", row.budget)?;
    }
    let held = |i: usize| report.rows[i].bytes_held as f64;
    writeln!(
        out,
        "\nBytes are what the page pool holds: {:.1} % of the full cache, freed for real.",
        100.0 * held(1) / held(0)
    )?;
    for row in &report.rows {
        let (metadata, policy, peak) = (mib(row.bytes_metadata), mib(row.bytes_policy_state), mib(row.bytes_peak));
        writeln!(
            out,
            "Beside them at {}: {metadata} of block tables, {policy} of the policy; {peak} at most.",
            row.budget
        )?;
    }
    Ok(())
}
