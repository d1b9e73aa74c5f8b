//! `entrokv generate`: continues a prompt, streaming the text.

use std::io::{self, IsTerminal, Read, Write};
use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use clap::builder::FalseyValueParser;
use entrokv::{EndTokens, FinishReason, Message, Model, Request, SpecialTokens};

use crate::cli::CacheDir;
use crate::completion_json::CompletionJson;
use crate::failure::Failure;
use crate::interrupt::Listening;
use crate::model_args::{EvictionArgs, ModelArgs, raised_note};
use crate::progress::Progress;
use crate::rendering;
use crate::sampling_args::SamplingArgs;

const EXAMPLES: &str = "\
Examples:
  entrokv generate -m smollm2-135m --chat --prompt 'What is a KV cache?'
  entrokv generate -m model.gguf --prompt-file book.txt --kv-budget 20% -n 200
  entrokv generate -m model.gguf --kv-budget 64MiB --policy page-entro-kv:tau=0.5 --json < book.txt";

/// What to continue, and how.
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct GenerateArgs {
    /// The prompt [default: read from --prompt-file or stdin]
    #[arg(short, long, env = "ENTROKV_PROMPT", value_name = "TEXT", conflicts_with = "prompt_file")]
    prompt: Option<String>,
    /// A file with the prompt
    #[arg(short = 'f', long, env = "ENTROKV_PROMPT_FILE", value_name = "FILE", visible_alias = "file")]
    prompt_file: Option<PathBuf>,
    /// Put the prompt into the model's chat template as a user's message
    #[arg(long, env = "ENTROKV_CHAT", value_parser = FalseyValueParser::new())]
    chat: bool,
    /// A system message before it (implies --chat)
    #[arg(long, env = "ENTROKV_SYSTEM", value_name = "TEXT")]
    system: Option<String>,
    /// Print one JSON object instead of streaming text
    #[arg(long, env = "ENTROKV_JSON", value_parser = FalseyValueParser::new())]
    json: bool,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    eviction: EvictionArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
}

/// Runs the command.
pub(crate) fn run(args: &GenerateArgs, cache: &CacheDir) -> Result<(), Failure> {
    let eviction = args.eviction.options()?;
    let path = args.model.path(cache)?;
    let prompt = read_prompt(args)?;
    let start = Instant::now();
    let mut model = args.model.run.open(&path)?;
    let load = start.elapsed();
    let tokens = tokenize(args, &model, prompt)?;
    let prompt_tokens = tokens.len();
    let request = Request {
        prompt: tokens,
        max_tokens: args.sampling.max_tokens.map(usize::from),
        sampling: args.sampling.options(),
        stop: args.sampling.stop.clone(),
        end_tokens: if args.sampling.ignore_eos { EndTokens::Ignore } else { EndTokens::Stop },
        eviction,
    };

    let id = model.engine.submit(request).map_err(Failure::refused)?;
    let listening = Listening::start();
    let mut reading = Some(Progress::steps("reading", prompt_tokens as u64));
    let mut out = io::stdout().lock();
    let mut broken = None;
    let completion = model.engine.finish(id, &mut |step| {
        match &reading {
            Some(bar) if step.token.is_none() && step.finished.is_none() => bar.set(step.computed as u64),
            _ => drop(reading.take()),
        }
        if !args.json && broken.is_none() {
            broken = out.write_all(step.text.as_bytes()).and_then(|()| out.flush()).err();
            if broken.is_some() {
                listening.raise();
            }
        }
    })?;
    model.engine.close(id);
    if let Some(error) = broken {
        return Err(Failure::while_doing("stdout", error));
    }
    let reason = completion.finish_reason.clone();
    if completion.kv.eviction.budget_raised {
        eprintln!("{}", raised_note(&completion.kv));
    }
    if args.json {
        serde_json::to_writer(&mut out, &CompletionJson::new(completion, prompt_tokens, load))?;
    }
    writeln!(out)?;
    match reason {
        FinishReason::Cancelled => Err(Failure::Interrupted),
        FinishReason::Failed(why) => Err(Failure::Failed(why)),
        FinishReason::Stop | FinishReason::Length => Ok(()),
    }
}

fn read_prompt(args: &GenerateArgs) -> Result<String, Failure> {
    if let Some(prompt) = &args.prompt {
        return Ok(prompt.clone());
    }
    let (bytes, source) = match &args.prompt_file {
        Some(path) => {
            let source = path.display().to_string();
            (std::fs::read(path).map_err(|error| Failure::while_doing(&source, error))?, source)
        }
        None if io::stdin().is_terminal() => {
            return Err(Failure::Usage("no prompt: give --prompt TEXT, --prompt-file FILE, or text on stdin".into()));
        }
        None => (read_stdin()?, "stdin".to_string()),
    };
    utf8(bytes, &source)
}

/// All of stdin.
pub(crate) fn read_stdin() -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    io::stdin().lock().read_to_end(&mut bytes).map_err(|error| Failure::while_doing("stdin", error))?;
    Ok(bytes)
}

/// Text, or an error that says where it stops being text.
pub(crate) fn utf8(bytes: Vec<u8>, source: &str) -> Result<String, Failure> {
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        Failure::Failed(format!(
            "{source} is not UTF-8 text: invalid byte {:#04x} at offset {at}",
            error.as_bytes()[at]
        ))
    })
}

fn tokenize(args: &GenerateArgs, model: &Model, prompt: String) -> Result<Vec<u32>, Failure> {
    if !args.chat && args.system.is_none() {
        return Ok(model.tokenizer.encode(&prompt, SpecialTokens::Parse)?);
    }
    let template = model
        .chat_template
        .as_ref()
        .ok_or_else(|| Failure::Failed(format!("{} has no chat template; run without --chat", model.config.name)))?;
    let mut messages = Vec::new();
    if let Some(system) = &args.system {
        messages.push(Message::new("system", system.as_str()));
    }
    messages.push(Message::new("user", prompt));
    let text = template.render(&messages, &rendering::options())?;
    Ok(model.tokenizer.encode(&text, SpecialTokens::Parse)?)
}
