//! `entrokv demo`: one long prompt, one fact hidden in it, one question; answered with the whole cache, with a fifth of it,
//! and with a tenth that was made before the question was known.

use std::io::{self, Write};

use clap::Args;
use clap::builder::FalseyValueParser;
use entrokv::pull::{DEFAULT_MODEL, default_model_at_hand};
use entrokv::{
    AUTO, EndTokens, EvictionOptions, Message, Model, Question, RenderOptions, Request, SamplingOptions, SpecialTokens,
    parse_policy, recipe,
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
/// The rows; the first keeps everything.
const TRIALS: [Trial; 3] = [
    Trial { cap: None, question: Question::Seen },
    Trial { cap: Some(("20%", "page-entro-kv:preset=serving")), question: Question::Seen },
    Trial { cap: Some(("10%", AUTO)), question: Question::Later },
];

/// How the question is answered once.
struct Trial {
    /// Budget and policy.
    cap: Option<(&'static str, &'static str)>,
    /// Whether it is there when the cache is cut down, or follows.
    question: Question,
}

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
    policy: String,
    asked: &'static str,
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
    let text = template.render(&messages, &RenderOptions::default())?;
    let prompt_tokens = model.tokenizer.encode(&text, SpecialTokens::Parse)?.len();
    let mut report = Report {
        question: QUESTION.to_string(),
        expected: EXPECTED.to_string(),
        model: model.config.name.clone(),
        prompt_tokens,
        rows: Vec::new(),
    };
    if !args.json {
        output::line(format_args!(
            "{}: {} tokens of a harbour's logbook, and at its end: {QUESTION}\n",
            report.model, prompt_tokens
        ))?;
    }
    for trial in TRIALS {
        report.rows.push(answered(&mut model, &text, trial)?);
    }
    let mut out = io::stdout().lock();
    if args.json {
        serde_json::to_writer(&mut out, &report)?;
        writeln!(out)?;
        return Ok(());
    }
    print(&mut out, &report)
}

/// Reads `text`, which ends in the question, as `trial` says, and answers.
fn answered(model: &mut Model, text: &str, trial: Trial) -> Result<Row, Failure> {
    let (budget, policy) = trial.cap.unwrap_or(("100%", "none"));
    let policy = match trial.cap {
        Some((budget, AUTO)) => recipe(AUTO, budget.parse()?, trial.question)?,
        _ => policy.to_string(),
    };
    let eviction = match trial.cap {
        Some((budget, _)) => Some(EvictionOptions { budget: budget.parse()?, policy: parse_policy(&policy)?.into() }),
        None => None,
    };
    let request = |prompt: Vec<u32>, max_tokens: usize, eviction| Request {
        prompt,
        max_tokens: Some(max_tokens),
        sampling: SamplingOptions::greedy(),
        stop: Vec::new(),
        end_tokens: EndTokens::Stop,
        eviction,
    };
    let bar = Progress::steps("reading", 0);
    let (before, question) = text.rsplit_once(QUESTION).unwrap_or((text, ""));
    let (id, read) = match trial.question {
        Question::Seen => {
            let prompt = model.tokenizer.encode(text, SpecialTokens::Parse)?;
            bar.restart("reading", prompt.len() as u64);
            (model.engine.submit(request(prompt, MAX_TOKENS, eviction))?, None)
        }
        Question::Later | Question::NextTurn | Question::Probed => {
            let prompt = model.tokenizer.encode(before, SpecialTokens::Parse)?;
            bar.restart("reading", prompt.len() as u64);
            let id = model.engine.submit(request(prompt, 0, eviction))?;
            let read = model.engine.finish(id, &mut |step| bar.follow(step))?;
            let question = model.tokenizer.encode_raw(&format!("{QUESTION}{question}"), SpecialTokens::Parse)?;
            // What comes from here on is nobody's to evict.
            model.engine.extend(id, request(question, MAX_TOKENS, None))?;
            (id, Some(read))
        }
    };
    let completion = model.engine.finish(id, &mut |step| bar.follow(step));
    model.engine.close(id);
    let completion = completion?;
    let (kv, prefill) = match read {
        Some(read) => (read.kv, read.timing),
        None => (completion.kv, completion.timing),
    };
    Ok(Row {
        budget: budget.to_string(),
        policy,
        asked: match trial.question {
            Question::Seen => "before",
            Question::Later | Question::NextTurn | Question::Probed => "after",
        },
        correct: completion.text.contains(EXPECTED),
        answer: completion.text.trim().to_string(),
        bytes_held: kv.bytes_held,
        bytes_budget: kv.bytes_budget.unwrap_or(kv.bytes_full),
        bytes_full: kv.bytes_full,
        bytes_metadata: kv.bytes_metadata,
        bytes_policy_state: kv.bytes_policy_state,
        bytes_peak: kv.peak.held,
        prefill_tokens_per_s: prefill.prefill_tokens_per_s(),
        decode_tokens_per_s: completion.timing.decode_tokens_per_s(),
    })
}

fn print(out: &mut impl Write, report: &Report) -> Result<(), Failure> {
    writeln!(
        out,
        "{:<8} {:<8} {:<8} {:>12} {:>12} {:>13} {:>13}  answer",
        "budget", "asked", "right", "KV held", "KV budget", "prefill tok/s", "decode tok/s"
    )?;
    for row in &report.rows {
        let right = if row.correct { "yes" } else { "NO" };
        let (held, budget) = (mib(row.bytes_held), mib(row.bytes_budget));
        let (prefill, decode) = (row.prefill_tokens_per_s, row.decode_tokens_per_s);
        let answer = row.answer.replace('\n', " ");
        writeln!(
            out,
            "{:<8} {:<8} {right:<8} {held:>12} {budget:>12} {prefill:>13.1} {decode:>13.1}  {answer}",
            row.budget, row.asked
        )?;
    }
    let held = |i: usize| report.rows[i].bytes_held as f64;
    writeln!(
        out,
        "\nBytes are what the page pool holds: {:.1} % and {:.1} % of the full cache, freed for real.\nAsked before: the question \
         was in the prompt that was cut down. Asked after: the cache of the text alone was, and the question came then.",
        100.0 * held(1) / held(0),
        100.0 * held(2) / held(0)
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
