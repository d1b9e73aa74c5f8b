//! The command line: every flag is also an environment variable that begins with `ENTROKV_`, and flags win.
//!
//! Two commands may spell a flag alike and mean different things (`--prompt` of `generate` is a text, of `bench` a list
//! of lengths); their variables differ then. What is no flag (the source of `pull`, the shell of `completions`) has none.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, Subcommand};
use clap_complete::Shell;

use crate::failure::Failure;
use crate::{bench, chat, demo, generate, inspect, needle, perplexity, policies, pull, tokenize};

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
  entrokv demo                                      one answer with the full cache, one with a fifth
  entrokv pull smollm2-135m                         fetch a small model once (98 MB)
  entrokv generate -m smollm2-135m --chat --prompt 'What is a KV cache?'
  entrokv generate -m model.gguf --prompt-file book.txt --kv-budget 64MiB
  entrokv inspect model.gguf                        geometry, and what budget gives what
  entrokv chat -m qwen2.5-1.5b --kv-budget 512tok   a conversation that goes on past the budget
Every flag is also an environment variable, which its help names.";

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
    /// Ask for facts hidden in long texts, of the full cache and of compressed ones
    Needle(needle::NeedleArgs),
    /// Measure reading and generating speed, and the memory they take
    Bench(bench::BenchArgs),
    /// List the eviction policies: who described them, what they read, what they free
    Policies(policies::PoliciesArgs),
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
    // Into memory first: the generator panics where a pipe has been closed.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "entrokv", &mut script);
    io::stdout().write_all(&script).map_err(|error| Failure::while_doing("stdout", error))
}

/// Prints help where help was asked for; anything else is bad usage, told in one line.
pub(crate) fn refuse(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() || error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        error.exit();
    }
    let text = error.to_string();
    let reason = text.split("\n\nUsage:").next().and_then(|text| text.split("\n\nFor more").next()).unwrap_or(&text);
    let reason = reason.strip_prefix("error: ").unwrap_or(reason).replace(":\n", ":");
    Failure::Usage(format!("{reason}\nsee --help")).report()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Every argument of every command, `--help` and `--version` aside.
    fn arguments(command: &clap::Command) -> Vec<(String, clap::Arg)> {
        let own = command.get_arguments().filter(|arg| !["help", "version"].contains(&arg.get_id().as_str()));
        let own = own.map(|arg| (command.get_name().to_string(), arg.clone()));
        own.chain(command.get_subcommands().flat_map(arguments)).collect()
    }

    #[test]
    fn every_flag_has_a_variable_and_every_variable_one_meaning() {
        let mut meanings: BTreeMap<String, String> = BTreeMap::new();
        for (command, arg) in arguments(&Cli::command()) {
            let Some(long) = arg.get_long() else {
                assert!(["pull", "completions", "inspect", "tokenize"].contains(&command.as_str()), "{command}");
                continue;
            };
            let variable = arg.get_env().and_then(|name| name.to_str());
            let Some(variable) = variable else { panic!("{command} --{long} has no variable") };
            assert!(variable.starts_with("ENTROKV_"), "{command} --{long}: {variable}");
            let meaning = meanings.entry(variable.to_string()).or_insert_with(|| long.to_string());
            assert_eq!(meaning, long, "{command} --{long}: {variable} is the variable of another flag");
        }
        assert!(meanings.len() > 30, "{meanings:?}");
    }

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }
}
