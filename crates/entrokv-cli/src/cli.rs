//! The command line: every flag is also an environment variable, `ENTROKV_` and its name in capitals.

use std::io;
use std::path::PathBuf;

use clap::{Args, CommandFactory, Parser, Subcommand};
use clap_complete::Shell;

use crate::failure::Failure;
use crate::{bench, chat, demo, generate, inspect, perplexity, pull, tokenize};

/// Run language models with a hard cap on the memory of their KV cache.
///
/// The cache is allocated, scored and freed at (layer, KV head, page): `--kv-budget 20%` keeps a fifth of the prompt's
/// cache, and the bytes really go back.
#[derive(Parser)]
#[command(name = "entrokv", version, propagate_version = true, after_help = EXAMPLES)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) cache: CacheDir,
    #[command(subcommand)]
    pub(crate) command: Command,
}

const EXAMPLES: &str = "\
Examples:
  entrokv demo                                        a long prompt answered with the full cache and with a fifth of it
  entrokv pull smollm2-135m                           fetch a small model once (98 MB)
  entrokv generate -m smollm2-135m --chat --prompt 'What is a KV cache?'
  entrokv generate -m model.gguf --prompt-file book.txt --kv-budget 64MiB
  entrokv inspect -m model.gguf                       geometry, tensor types, and what budget gives what
  entrokv chat -m qwen2.5-1.5b --kv-budget 512tok     a conversation that goes on past the budget";

/// Where pulled models are kept.
#[derive(Args)]
pub(crate) struct CacheDir {
    /// Folder of pulled models [default: entrokv/models in the user's cache folder]
    #[arg(long = "cache-dir", env = "ENTROKV_CACHE", value_name = "DIR", global = true)]
    pub(crate) dir: Option<PathBuf>,
}

impl CacheDir {
    /// The folder asked for, or the default.
    pub(crate) fn path(&self) -> Result<PathBuf, Failure> {
        match &self.dir {
            Some(dir) => Ok(dir.clone()),
            None => Ok(entrokv::pull::default_cache_dir()?),
        }
    }
}

/// What to do.
#[derive(Subcommand)]
pub(crate) enum Command {
    /// Fetch a model: a known name, a URL, or hf:OWNER/REPO/FILE
    Pull(pull::PullArgs),
    /// Show a model's geometry, tensor types and KV bytes, and what each budget keeps
    Inspect(inspect::InspectArgs),
    /// Answer a question about a long document with the full cache and with a fifth of it, side by side
    Demo(demo::DemoArgs),
    /// Continue a prompt
    Generate(generate::GenerateArgs),
    /// Talk with a model
    Chat(chat::ChatArgs),
    /// Turn a JSON array of strings on stdin into token ids
    Tokenize(tokenize::TokenizeArgs),
    /// Score a text on stdin: mean negative log likelihood, the last position's best logits, a greedy continuation
    Perplexity(perplexity::PerplexityArgs),
    /// Measure reading and generating speed, and the memory they take
    Bench(bench::BenchArgs),
    /// Print a shell's completion script
    Completions(CompletionsArgs),
}

/// Which shell.
#[derive(Args)]
pub(crate) struct CompletionsArgs {
    /// The shell to complete for
    shell: Shell,
}

/// Prints the completion script of a shell.
pub(crate) fn completions(args: &CompletionsArgs) -> Result<(), Failure> {
    clap_complete::generate(args.shell, &mut Cli::command(), "entrokv", &mut io::stdout());
    Ok(())
}
