//! `entrokv generate`: continues a prompt, streaming the text.

use std::io::{self, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use clap::builder::FalseyValueParser;
use entrokv::{Completion, EndTokens, FinishReason, Message, Model, Question, Request, SpecialTokens, Tokenizer};

use crate::cli::CacheDir;
use crate::completion_json::CompletionJson;
use crate::failure::Failure;
use crate::interrupt::Listening;
use crate::kv_file_args::{KvFileArgs, Loaded};
use crate::model_args::{EvictionArgs, ModelArgs, policy_note, raised_note};
use crate::progress::Progress;
use crate::rendering;
use crate::sampling_args::SamplingArgs;
use crate::transcript::{Transcript, spelled_end};

const EXAMPLES: &str = "\
Examples:
  entrokv generate -m smollm2-135m --chat --prompt 'What is a KV cache?'
  entrokv generate -m model.gguf --prompt-file book.txt --kv-budget 20% -n 200
  entrokv generate -m model.gguf --kv-budget 64MiB --policy page-entro-kv:tau=0.5 --json < book.txt
  entrokv generate -m model.gguf -f book.txt --kv-budget 20% -n 1 --kv-save book.kv
  entrokv generate -m model.gguf --kv-load book.kv --prompt ' In short,'";

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
    kv_file: KvFileArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
}

/// What is to be read, and what it is in words.
struct Prompt {
    tokens: Vec<u32>,
    /// The conversation it ends, where it is one.
    transcript: Option<Transcript>,
}

/// Runs the command.
pub(crate) fn run(args: &GenerateArgs, cache: &CacheDir) -> Result<(), Failure> {
    if args.kv_file.source().is_none() {
        args.eviction.check(Question::Seen)?;
    } else if args.system.is_some() {
        return Err(Failure::Usage("--system begins a conversation, and --kv-load goes on with one".into()));
    }
    args.kv_file.check(&args.eviction)?;
    let path = args.model.path(cache)?;
    let prompt = read_prompt(args)?;
    let start = Instant::now();
    let mut model = args.model.run.identified(&path, args.kv_file.identity())?;
    let load = start.elapsed();
    let loaded = args.kv_file.load(&mut model.engine, &args.eviction)?;
    let Prompt { tokens, transcript } = tokenize(args, &model, loaded.as_ref(), prompt)?;
    let prompt_tokens = tokens.len();
    let request = Request {
        prompt: tokens,
        max_tokens: args.sampling.max_tokens.map(usize::from),
        sampling: args.sampling.options(),
        stop: args.sampling.stop.clone(),
        end_tokens: if args.sampling.ignore_eos { EndTokens::Ignore } else { EndTokens::Stop },
        eviction: match &loaded {
            Some(loaded) => loaded.eviction.clone(),
            None => {
                let fit = args.kv_file.fit(&model.engine);
                args.eviction.for_prompt(Question::Seen, fit, &model.engine, prompt_tokens)?
            }
        },
    };

    args.eviction.announce(request.eviction.as_ref());
    let policy = request.eviction.as_ref().map(|eviction| Arc::clone(&eviction.policy));
    let id = match &loaded {
        Some(loaded) => model.engine.extend(loaded.id, request).map(|()| loaded.id),
        None => model.engine.submit(request),
    };
    let id = id.map_err(Failure::refused)?;
    let listening = Listening::start();
    let mut reading = Some(Progress::steps("reading", prompt_tokens as u64));
    let mut out = io::stdout().lock();
    let mut broken = None;
    let completion = model.engine.finish(id, &mut |step| {
        match &reading {
            Some(bar) if step.token.is_none() && step.finished.is_none() => bar.follow(step),
            _ => drop(reading.take()),
        }
        if !args.json && broken.is_none() {
            broken = out.write_all(step.text.as_bytes()).and_then(|()| out.flush()).err();
            if broken.is_some() {
                listening.raise();
            }
        }
    })?;
    drop(listening);
    if let Some(error) = broken {
        model.engine.close(id);
        return Err(Failure::while_doing("stdout", error));
    }
    let reason = completion.finish_reason.clone();
    let notes = transcript.and_then(|transcript| answered(transcript, &completion, &model.tokenizer));
    let notes = notes.as_ref().map(Transcript::notes).transpose()?.unwrap_or_default();
    let was_read = !completion.tokens.is_empty();
    if completion.kv.eviction.budget_raised {
        eprintln!("{}", raised_note(&completion.kv));
    }
    if let Some(note) = policy.and_then(|policy| policy_note(&*policy, completion.kv.step_reads)) {
        eprintln!("{note}");
    }
    if args.json {
        serde_json::to_writer(&mut out, &CompletionJson::new(completion, prompt_tokens, load))?;
    }
    writeln!(out)?;
    // A prompt of which Ctrl-C left a part is not what was asked to be kept.
    let kept = match reason {
        FinishReason::Failed(_) => Ok(()),
        _ if was_read => args.kv_file.save(&model.engine, id, &notes),
        _ => Ok(()),
    };
    model.engine.close(id);
    kept?;
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

/// The tokens of the prompt; behind what was loaded, without the beginning that a text of its own would have.
fn tokenize(args: &GenerateArgs, model: &Model, loaded: Option<&Loaded>, prompt: String) -> Result<Prompt, Failure> {
    let tokenizer = &model.tokenizer;
    if !args.chat && args.system.is_none() {
        let tokens = match loaded {
            Some(_) => tokenizer.encode_raw(&prompt, SpecialTokens::Parse)?,
            None => tokenizer.encode(&prompt, SpecialTokens::Parse)?,
        };
        return Ok(Prompt { tokens, transcript: None });
    }
    let template = model
        .chat_template
        .as_ref()
        .ok_or_else(|| Failure::Failed(format!("{} has no chat template; run without --chat", model.config.name)))?;
    let before = loaded.map(|loaded| transcript(args, loaded)).transpose()?;
    let mut messages = before.map(|before| before.messages.clone()).unwrap_or_default();
    if let Some(system) = &args.system {
        messages.push(("system".to_string(), system.clone()));
    }
    messages.push(("user".to_string(), prompt));
    let rendered: Vec<Message> =
        messages.iter().map(|(role, text)| Message::new(role.as_str(), text.as_str())).collect();
    let text = template.render(&rendered, &rendering::options())?;
    let tokens = match before {
        None => tokenizer.encode(&text, SpecialTokens::Parse)?,
        Some(before) => {
            let rest = text.strip_prefix(&before.text).ok_or_else(|| {
                Failure::Failed("the chat template spells the conversation that was loaded in other words now".into())
            })?;
            tokenizer.encode_raw(rest, SpecialTokens::Parse)?
        }
    };
    Ok(Prompt { tokens, transcript: Some(Transcript { messages, text }) })
}

/// The conversation that was loaded.
fn transcript<'a>(args: &GenerateArgs, loaded: &'a Loaded) -> Result<&'a Transcript, Failure> {
    let path = args.kv_file.source().unwrap_or(Path::new("")).display();
    let none = || Failure::Failed(format!("{path}: it holds a text and no conversation; run without --chat"));
    loaded.transcript.as_ref().ok_or_else(none)
}

/// The conversation with the answer, if the cache holds that and no more.
fn answered(before: Transcript, completion: &Completion, tokenizer: &Tokenizer) -> Option<Transcript> {
    let end = spelled_end(tokenizer, completion)?;
    let Transcript { mut messages, text } = before;
    messages.push(("assistant".to_string(), completion.text.clone()));
    Some(Transcript { messages, text: text + &completion.text + &end })
}
