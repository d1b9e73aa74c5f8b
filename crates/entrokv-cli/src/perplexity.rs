//! `entrokv perplexity`: how well a model predicts a text, in the form of the golden files.

use std::num::NonZeroUsize;

use clap::Args;
use entrokv::{EndTokens, EvictionOptions, Model, PageKind, Question, Request, SpecialTokens};
use serde::Serialize;

use crate::cli::CacheDir;
use crate::failure::Failure;
use crate::generate::{read_stdin, utf8};
use crate::model_args::{EvictionArgs, Fit, ModelArgs, parse_kind};
use crate::output;
use crate::progress::Progress;

/// How many logits of the last position are printed.
const TOP: usize = 20;

const EXAMPLES: &str = "\
Examples:
  entrokv perplexity -m smollm2-135m --tokens 1024 --generate 16 < book.txt
  entrokv perplexity -m smollm2-135m --cache-type tq3 --compare f16 < book.txt      what coding the cache costs
  entrokv perplexity -m smollm2-135m --prompt-tokens 2000 --tokens 2500 --kv-budget 20% --policy snapkv < book.txt
                                                  what a cap costs: the first 2,000 tokens are a prompt read under it, the
                                                  next 500 a given answer, beside the full cache

A coded cache is read as decoding reads it: every position sees codes except for the first page and the last 32 positions
(and, with tq keys, for the first 176 positions of the text, which centre and scale them). Activations of 8 bits answer any
change of the cache with a divergence of about 0.005 nats; --activations f32 shows that of the codes alone.";

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
    /// Score with a cache of this type beside it, and report how far the predictions lie apart
    #[arg(long, env = "ENTROKV_COMPARE", value_name = "TYPE", value_parser = parse_kind)]
    compare: Option<PageKind>,
    /// Take the first N tokens for a prompt and score the rest as its answer, under --kv-budget and with the full cache
    #[arg(long, env = "ENTROKV_SCORED_PROMPT", value_name = "N", requires = "kv_budget", conflicts_with_all = ["compare", "generate"])]
    prompt_tokens: Option<NonZeroUsize>,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    eviction: EvictionArgs,
}

#[derive(Serialize)]
struct Score {
    greedy: Vec<u32>,
    mean_nll: f64,
    tokens: Vec<u32>,
    top20_last: Vec<(u32, f32)>,
    #[serde(skip_serializing_if = "Option::is_none")]
    compared: Option<Compared>,
}

/// The same text with another type of cache.
#[derive(Serialize)]
struct Compared {
    cache_type: String,
    mean_nll: f64,
    /// Of the predictions from the other's, in nats. With 8-bit activations any change of the cache costs some of it.
    mean_kl: f64,
    kv_bytes_held: u64,
    kv_bytes_held_by_other: u64,
}

/// A text after a prompt that was read under a cap.
#[derive(Serialize)]
struct Capped {
    budget: String,
    policy: String,
    prompt_tokens: usize,
    scored_tokens: usize,
    mean_nll: f64,
    mean_nll_full: f64,
    /// Of the capped predictions from those with the full cache, in nats.
    mean_kl: f64,
    worst_kl: f64,
    kv_bytes_held: u64,
    kv_bytes_budget: Option<u64>,
    kv_bytes_full: u64,
}

/// Runs the command.
pub(crate) fn run(args: &PerplexityArgs, cache: &CacheDir) -> Result<(), Failure> {
    let text = utf8(read_stdin()?, "stdin")?;
    let mut model = args.model.open(cache)?;
    let mut tokens: Vec<u32> = model.tokenizer.bos().filter(|_| model.tokenizer.adds_bos()).into_iter().collect();
    tokens.extend(model.tokenizer.encode_raw(&text, SpecialTokens::Plain)?);
    tokens.truncate(args.tokens.unwrap_or(usize::MAX));
    let fit = Fit::of_engine(&model.engine);
    let prompt_tokens = args.prompt_tokens.map_or(tokens.len(), NonZeroUsize::get);
    if let Some(eviction) = args.eviction.for_prompt(Question::Seen, fit, &model.engine, prompt_tokens)? {
        return capped(args, &mut model, &tokens, &eviction);
    }
    let bar = Progress::steps("scoring", tokens.len() as u64);
    let mut progress = |done| bar.set(done as u64);
    let (score, compared) = match args.compare {
        None => (model.engine.score(&tokens, &mut progress)?, None),
        Some(other) => {
            let comparison = model.engine.compare(&tokens, other, &mut progress)?;
            let compared = Compared {
                cache_type: other.to_string(),
                mean_nll: comparison.reference.mean_nll(),
                mean_kl: comparison.mean_kl(),
                kv_bytes_held: comparison.score.bytes_held,
                kv_bytes_held_by_other: comparison.reference.bytes_held,
            };
            (comparison.score, Some(compared))
        }
    };
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
    output::line(serde_json::to_string(&Score { greedy, mean_nll: score.mean_nll(), tokens, top20_last, compared })?)
}

/// Scores what follows the prompt under a cap and with the full cache.
fn capped(args: &PerplexityArgs, model: &mut Model, tokens: &[u32], eviction: &EvictionOptions) -> Result<(), Failure> {
    let Some(prompt_tokens) = args.prompt_tokens.map(NonZeroUsize::get) else {
        return Err(Failure::Usage("--kv-budget needs --prompt-tokens: what is scored follows a prompt".to_string()));
    };
    let Some((prompt, answer)) = tokens.split_at_checked(prompt_tokens).filter(|(_, answer)| !answer.is_empty()) else {
        let got = tokens.len();
        return Err(Failure::Failed(format!(
            "--prompt-tokens {prompt_tokens} leaves nothing to score of a text of {got} tokens"
        )));
    };
    let bar = Progress::steps("scoring", tokens.len() as u64);
    let score = model.engine.score_answer(prompt, answer, eviction, &mut |done| bar.set(done as u64))?;
    drop(bar);
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    output::line(serde_json::to_string(&Capped {
        budget: eviction.budget.to_string(),
        policy: eviction.policy.to_string(),
        prompt_tokens,
        scored_tokens: answer.len(),
        mean_nll: mean(&score.nll),
        mean_nll_full: mean(&score.full_nll),
        mean_kl: mean(&score.kl),
        worst_kl: score.kl.iter().copied().fold(0.0, f64::max),
        kv_bytes_held: score.kv.bytes_held,
        kv_bytes_budget: score.kv.bytes_budget,
        kv_bytes_full: score.kv.bytes_full,
    })?)
}
