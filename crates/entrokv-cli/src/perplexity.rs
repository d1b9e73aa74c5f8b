//! `entrokv perplexity`: how well a model predicts a text, in the form of the golden files.

use clap::Args;
use entrokv::{EndTokens, Request, SpecialTokens};
use serde::Serialize;

use crate::cli::CacheDir;
use crate::failure::Failure;
use crate::generate::{read_stdin, utf8};
use crate::model_args::ModelArgs;
use crate::output;
use crate::progress::Progress;

/// How many logits of the last position are printed.
const TOP: usize = 20;

const EXAMPLES: &str = "\
Examples:
  entrokv perplexity -m smollm2-135m --tokens 1024 --generate 16 < book.txt";

/// What to score.
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct PerplexityArgs {
    /// Score the first N tokens of the text [default: all]
    #[arg(long, env = "ENTROKV_TOKENS", value_name = "N")]
    tokens: Option<usize>,
    /// Continue the text greedily by this many tokens
    #[arg(long, env = "ENTROKV_GENERATE", value_name = "N", default_value_t = 0)]
    generate: usize,
    #[command(flatten)]
    model: ModelArgs,
}

#[derive(Serialize)]
struct Score {
    greedy: Vec<u32>,
    mean_nll: f64,
    tokens: Vec<u32>,
    top20_last: Vec<(u32, f32)>,
}

/// Runs the command.
pub(crate) fn run(args: &PerplexityArgs, cache: &CacheDir) -> Result<(), Failure> {
    let text = utf8(read_stdin()?, "stdin")?;
    let mut model = args.model.open(cache)?;
    let mut tokens: Vec<u32> = model.tokenizer.bos().filter(|_| model.tokenizer.adds_bos()).into_iter().collect();
    tokens.extend(model.tokenizer.encode_raw(&text, SpecialTokens::Plain)?);
    tokens.truncate(args.tokens.unwrap_or(usize::MAX));
    let bar = Progress::steps("scoring", tokens.len() as u64);
    let score = model.engine.score(&tokens, &mut |done| bar.set(done as u64))?;
    drop(bar);
    let greedy = if args.generate == 0 {
        Vec::new()
    } else {
        let request = Request { end_tokens: EndTokens::Ignore, ..Request::greedy(tokens.clone(), args.generate) };
        model.engine.generate(request, |_| ())?.tokens
    };
    let mut top20_last: Vec<(u32, f32)> = (0..).zip(score.last_logits.iter().copied()).collect();
    top20_last.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    top20_last.truncate(TOP);
    output::line(serde_json::to_string(&Score { greedy, mean_nll: score.mean_nll(), tokens, top20_last })?)
}
