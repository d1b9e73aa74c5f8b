//! `entrokv tokenize`: token ids of strings, in the form of the golden files.

use clap::Args;
use entrokv::{Gguf, SpecialTokens, Tokenizer};
use serde::Serialize;

use crate::cli::CacheDir;
use crate::failure::Failure;
use crate::generate::{read_stdin, utf8};
use crate::model_args::resolve;
use crate::output;

const EXAMPLES: &str = "\
Examples:
  echo '[\"Call me Ishmael.\"]' | entrokv tokenize smollm2-135m
  entrokv tokenize model.gguf --pre qwen2 < texts.json";

/// Whose tokenizer.
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct TokenizeArgs {
    /// A GGUF file, or the name of a pulled model
    #[arg(env = "ENTROKV_MODEL", value_name = "MODEL")]
    model: String,
    /// Pre-tokenizer to use instead of the one the file names
    #[arg(long, env = "ENTROKV_PRE", value_name = "NAME")]
    pre: Option<String>,
}

#[derive(Serialize)]
struct Row<'a> {
    /// As plain text: nothing added, special tokens not looked for.
    ids: Vec<u32>,
    /// Special tokens parsed, and BOS and EOS added where the file asks, even next to one that is there (llama.cpp's form).
    ids_with_special: Vec<u32>,
    text: &'a str,
}

/// Runs the command.
pub(crate) fn run(args: &TokenizeArgs, cache: &CacheDir) -> Result<(), Failure> {
    let path = resolve(&args.model, cache)?;
    let gguf = Gguf::open(&path)?;
    let tokenizer = Tokenizer::from_metadata(gguf.metadata(), args.pre.as_deref())
        .map_err(|error| Failure::while_doing(path.display(), error))?;
    let input = utf8(read_stdin()?, "stdin")?;
    let texts: Vec<String> = serde_json::from_str(&input)
        .map_err(|error| Failure::Failed(format!("stdin is not a JSON array of strings: {error}")))?;
    let rows = texts
        .iter()
        .map(|text| {
            Ok(Row {
                ids: tokenizer.encode(text, SpecialTokens::Plain)?,
                ids_with_special: tokenizer.encode(text, SpecialTokens::ParseDoubling)?,
                text,
            })
        })
        .collect::<Result<Vec<_>, Failure>>()?;
    output::line(serde_json::to_string(&rows)?)
}
