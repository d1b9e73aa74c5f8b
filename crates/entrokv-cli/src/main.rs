//! The `entrokv` program: argument parsing, exit codes, and nothing else; each command is a file of its own.
//!
//! Exit codes: 0 done, 1 failed (one line on stderr says why), 2 bad usage, 130 stopped by Ctrl-C.

mod bench;
mod chat;
mod cli;
mod completion_json;
mod demo;
mod failure;
mod generate;
mod inspect;
mod interrupt;
mod kv_file_args;
mod model_args;
mod needle;
mod output;
mod perplexity;
mod policies;
mod progress;
mod pull;
mod rendering;
mod sampling_args;
mod tokenize;
mod transcript;

use std::process::ExitCode;

use clap::Parser;
use entrokv_kernels::heap;

use crate::cli::{Cli, Command};

fn main() -> ExitCode {
    interrupt::install();
    heap::keep_little();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return cli::refuse(&error),
    };
    let outcome = match cli.command {
        Command::Pull(args) => pull::run(&args, &cli.cache),
        Command::Inspect(args) => inspect::run(&args, &cli.cache),
        Command::Demo(args) => demo::run(&args, &cli.cache),
        Command::Generate(args) => generate::run(&args, &cli.cache),
        Command::Chat(args) => chat::run(&args, &cli.cache),
        Command::Tokenize(args) => tokenize::run(&args, &cli.cache),
        Command::Perplexity(args) => perplexity::run(&args, &cli.cache),
        Command::Needle(args) => needle::run(&args, &cli.cache),
        Command::Bench(args) => bench::run(&args, &cli.cache),
        Command::Policies(args) => policies::run(&args),
        Command::Completions(args) => cli::completions(&args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}
