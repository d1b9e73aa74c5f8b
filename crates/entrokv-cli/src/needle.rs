//! `entrokv needle`: what compressed caches still answer, and how far their predictions move.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use clap::builder::FalseyValueParser;
use entrokv::needle::{Case, Contexts, Haystack, Hiding, Plan, Question, Recipe, Row};
use entrokv::{Budget, Model, PageKind};
use serde::Serialize;

use crate::bench::mib;
use crate::cli::CacheDir;
use crate::failure::Failure;
use crate::generate::utf8;
use crate::model_args::{ModelArgs, parse_budget};
use crate::output;
use crate::progress::Progress;

const EXAMPLES: &str = "\
Examples:
  entrokv needle -m smollm2-135m
  entrokv needle -m smollm2-135m --recipes 'tq4;tq3v2;kvzip;tq4/kvzip' --budgets 20%,10%
  entrokv needle -m model.gguf --haystack book.txt --contexts 10 --tokens 3000 --json
  entrokv needle -m model.gguf --document contract.txt --question 'When does it end?' --answer '31 May 2031'
  entrokv needle -m model.gguf --cases cases.jsonl --kl-texts 0

A recipe is full, a cache type (tq4, q8_0/tq4), a policy (snapkv:window=64), or both (tq3/kvzip); auto is as --policy auto. A line of --cases is
{\"context\": .., \"questions\": [{\"question\": .., \"answer\": ..}, ..]}; with \"prefix\" beside a question the model's answer begins so,
and the answer must follow at once. A budget in percent is one of the bytes of the full cache, for coded caches too.";

/// What to ask, and of which caches.
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct NeedleArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// A document to ask about [default: facts hidden in a text]
    #[arg(long, env = "ENTROKV_DOCUMENT", value_name = "FILE", conflicts_with = "cases")]
    document: Option<PathBuf>,
    /// A question about it; may be repeated
    #[arg(long, env = "ENTROKV_QUESTION", value_name = "TEXT")]
    question: Vec<String>,
    /// Its answer, which stands in the document; one a question
    #[arg(long, env = "ENTROKV_ANSWER", value_name = "TEXT")]
    answer: Vec<String>,
    /// Contexts and questions of your own, a JSON object a line
    #[arg(long, env = "ENTROKV_CASES", value_name = "FILE")]
    cases: Option<PathBuf>,
    /// Contexts to hide facts in
    #[arg(long, env = "ENTROKV_CONTEXTS", value_name = "N", default_value = "6", value_parser = clap::value_parser!(u16).range(1..))]
    contexts: u16,
    /// Tokens of each, about
    #[arg(long, env = "ENTROKV_CONTEXT_TOKENS", value_name = "N", default_value = "1500", value_parser = clap::value_parser!(u32).range(1..))]
    tokens: u32,
    /// Facts hidden in each: all but the last at even depths down to 90 %, the last at the end
    #[arg(long, env = "ENTROKV_FACTS", value_name = "N", default_value = "10", value_parser = clap::value_parser!(u16).range(1..))]
    facts: u16,
    /// Decides which facts, and which text where none is given
    #[arg(long, env = "ENTROKV_NEEDLE_SEED", value_name = "N", default_value = "1")]
    seed: u64,
    /// A text to cut contexts and texts from [default: one that is made up]
    #[arg(long, env = "ENTROKV_HAYSTACK", value_name = "FILE")]
    haystack: Option<PathBuf>,
    /// Ways to compress, parted by semicolons or given one by one
    #[arg(
        long,
        env = "ENTROKV_RECIPES",
        value_name = "RECIPES",
        value_delimiter = ';',
        default_value = "tq4;tq3;page-entro-kv:preset=serving;kvzip;auto"
    )]
    recipes: Vec<String>,
    /// Budgets of the recipes that evict, comma separated
    #[arg(long, env = "ENTROKV_BUDGETS", value_name = "BUDGETS", value_delimiter = ',', default_value = "20%,10%,5%", value_parser = parse_budget)]
    budgets: Vec<Budget>,
    /// Texts whose next 96 tokens are predicted; 0 measures no divergence
    #[arg(long, env = "ENTROKV_KL_TEXTS", value_name = "N", default_value = "6")]
    kl_texts: u16,
    /// Tokens of each that are compressed
    #[arg(long, env = "ENTROKV_KL_TOKENS", value_name = "N", default_value = "1500", value_parser = clap::value_parser!(u32).range(1..))]
    kl_tokens: u32,
    /// Print one JSON object
    #[arg(long, env = "ENTROKV_JSON", value_parser = FalseyValueParser::new())]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    model: String,
    rows: Vec<Row>,
}

/// Runs the command.
pub(crate) fn run(args: &NeedleArgs, cache: &CacheDir) -> Result<(), Failure> {
    let plan = plan(args)?;
    let mut model = open(args, &plan, cache)?;
    let bar = Progress::steps("measuring", 1);
    let rows = plan.run(&mut model, &mut |done, total| {
        bar.restart("measuring", total);
        bar.set(done);
    })?;
    drop(bar);
    let report = Report { model: model.config.name.clone(), rows };
    if args.json {
        return output::line(serde_json::to_string(&report)?);
    }
    print(&mut io::stdout().lock(), &report).map_err(|error| Failure::while_doing("stdout", error))
}

/// What the flags ask for.
fn plan(args: &NeedleArgs) -> Result<Plan, Failure> {
    let recipes = args.recipes.iter().filter(|text| !text.trim().is_empty());
    Ok(Plan {
        contexts: contexts(args)?,
        haystack: match &args.haystack {
            Some(path) => Haystack::Text { text: read(path)?, seed: args.seed },
            None => Haystack::Generated { seed: args.seed },
        },
        texts: usize::from(args.kl_texts),
        text_tokens: args.kl_tokens as usize,
        recipes: recipes.map(|text| text.parse::<Recipe>()).collect::<Result<_, _>>()?,
        budgets: args.budgets.clone(),
    })
}

fn contexts(args: &NeedleArgs) -> Result<Contexts, Failure> {
    if let Some(path) = &args.cases {
        let cases = Case::parse_lines(&read(path)?);
        return cases.map(Contexts::Given).map_err(|error| Failure::while_doing(path.display(), error));
    }
    let (questions, answers) = (args.question.len(), args.answer.len());
    let Some(path) = &args.document else {
        if questions + answers > 0 {
            return Err(Failure::Failed("--question and --answer need --document, which they are about".into()));
        }
        let (contexts, tokens, facts) = (usize::from(args.contexts), args.tokens as usize, usize::from(args.facts));
        return Ok(Contexts::Hidden(Hiding { contexts, tokens, facts }));
    };
    if questions != answers {
        return Err(Failure::Failed(format!(
            "there are {questions} --question and {answers} --answer: one is needed each"
        )));
    }
    let pairs = args.question.iter().zip(&args.answer);
    let question = |(question, answer): (&String, &String)| Question {
        question: question.clone(),
        prefix: String::new(),
        answer: answer.clone(),
        depth: None,
    };
    let case = Case { context: read(path)?, questions: pairs.map(question).collect() };
    case.check().map_err(|what| Failure::while_doing(path.display(), what))?;
    Ok(Contexts::Given(vec![case]))
}

fn read(path: &Path) -> Result<String, Failure> {
    let bytes = std::fs::read(path).map_err(|error| Failure::while_doing(path.display(), error))?;
    utf8(bytes, &path.display().to_string())
}

/// Opens the model with a pool that has room for a context as it is written and as the largest codes of any recipe.
fn open(args: &NeedleArgs, plan: &Plan, cache: &CacheDir) -> Result<Model, Failure> {
    let default = args.model.run.options().page_kind;
    let kinds = plan.recipes.iter().map(|recipe| recipe.kind(default)).filter(|kind| kind.is_coded());
    let mut run = args.model.run.clone();
    // An f32 cache is opened as such, for its arithmetic, and has room for any codes.
    if let Some(kind) = kinds.min().filter(|_| default.written_as() != PageKind::F32) {
        (run.cache_type_k, run.cache_type_v) = (Some(kind.keys), Some(kind.values));
    }
    let mut model = run.open(&args.model.path(cache)?)?;
    model.engine.set_page_kind(default)?;
    Ok(model)
}

fn print(out: &mut impl Write, report: &Report) -> io::Result<()> {
    let Report { model, rows } = report;
    let Some(full) = rows.first() else { return Ok(()) };
    let end = &full.depth100;
    writeln!(
        out,
        "{model}: the full cache answers {} of {} questions, and {} of {} about a context's end\n",
        full.answered_full, full.questions, end.answered_full, end.questions
    )?;
    let width = rows.iter().map(|row| row.recipe.chars().count()).max().unwrap_or(0).max("recipe".len());
    writeln!(
        out,
        "{:<width$} {:>8} {:>9} {:>15} {:>9} {:>17} {:>12} {:>8} {:>9}",
        "recipe", "budget", "right", "95 % interval", "depth 100", "KL [worst text]", "KV held", "of full", "seconds"
    )?;
    for row in rows {
        let right = format!("{}/{}", row.answered, row.answered_full);
        let interval = match row.answered_full {
            0 => "-".to_string(),
            _ => format!("{:.3} - {:.3}", row.interval[0], row.interval[1]),
        };
        let at_end = match row.depth100.answered_full {
            0 => "-".to_string(),
            full => format!("{}/{full}", row.depth100.answered),
        };
        let kl = match (row.kl_mean, row.kl_worst) {
            (Some(mean), Some(worst)) => format!("{mean:.4} [{worst:.4}]"),
            _ => "-".to_string(),
        };
        let share = 100.0 * row.bytes_held as f64 / (row.bytes_full as f64).max(1.0);
        writeln!(
            out,
            "{:<width$} {:>8} {right:>9} {interval:>15} {at_end:>9} {kl:>17} {:>12} {share:>6.1} % {:>9.1}",
            row.recipe,
            row.budget.as_deref().unwrap_or("-"),
            mib(row.bytes_held),
            row.seconds
        )?;
    }
    Ok(())
}
