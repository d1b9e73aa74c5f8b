//! `entrokv chat`: a conversation in the terminal that goes on past its budget.
//!
//! One sequence lives through the conversation: a further message is appended to its cache, evicted or not, and the
//! budget is fixed anew at the end of each. Editing the history throws the sequence away and reads it again.

use std::io::{self, IsTerminal, Write};
use std::path::Path;

use clap::Args;
use entrokv::{
    Completion, EndTokens, EvictionOptions, FinishReason, Message, Model, Question, Request, SequenceId, SpecialTokens,
};
use rustyline::error::ReadlineError;
use rustyline::history::FileHistory;
use rustyline::{DefaultEditor, Editor};

use crate::bench::mib;
use crate::cli::CacheDir;
use crate::failure::Failure;
use crate::interrupt::Listening;
use crate::kv_file_args::{KvFileArgs, Loaded};
use crate::model_args::{EvictionArgs, ModelArgs};
use crate::output;
use crate::progress::Progress;
use crate::rendering;
use crate::sampling_args::SamplingArgs;
use crate::transcript::{Transcript, spelled_end};

const HELP: &str = "\
/help          this list
/stats         the cache as the pool counts it, and speeds
/history       the conversation so far
/undo          forget the last question and its answer
/retry         answer the last question again
/edit TEXT     replace the last question by TEXT and answer it
/system TEXT   set the system message and start over
/clear         start over
/quit          leave (so does Ctrl-D)
Ctrl-C stops an answer.";

const EXAMPLES: &str = "\
Examples:
  entrokv chat -m smollm2-135m
  entrokv chat -m qwen2.5-1.5b --kv-budget 512tok --system 'Answer in one sentence.' --temperature 0.7
  entrokv chat -m qwen2.5-1.5b --kv-load monday.kv --kv-save monday.kv
In the conversation /help lists the commands; Ctrl-C stops an answer.";

/// With which model, and how.
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct ChatArgs {
    /// A system message
    #[arg(long, env = "ENTROKV_SYSTEM", value_name = "TEXT")]
    system: Option<String>,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    eviction: EvictionArgs,
    #[command(flatten)]
    kv_file: KvFileArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
}

/// Runs the command.
pub(crate) fn run(args: &ChatArgs, cache: &CacheDir) -> Result<(), Failure> {
    if args.kv_file.source().is_none() {
        args.eviction.check(Question::NextTurn)?;
    } else if args.system.is_some() {
        return Err(Failure::Usage("--system begins a conversation, and --kv-load goes on with one".into()));
    }
    args.kv_file.check(&args.eviction)?;
    let mut model = args.model.run.identified(&args.model.path(cache)?, args.kv_file.identity())?;
    if model.chat_template.is_none() {
        let why = format!("{} has no chat template; use `entrokv generate`", model.config.name);
        return Err(Failure::Failed(why));
    }
    let loaded = args.kv_file.load(&mut model.engine, &args.eviction)?;
    let mut conversation = Conversation { args, model, eviction: None, messages: Vec::new(), live: None, last: None };
    match loaded {
        Some(loaded) => conversation.take_up(loaded)?,
        None => {
            let fit = args.kv_file.fit(&conversation.model.engine);
            conversation.eviction = args.eviction.options(Question::NextTurn, fit)?;
            args.eviction.announce(conversation.eviction.as_ref());
            conversation.clear(args.system.clone());
        }
    }
    let ended = if io::stdin().is_terminal() {
        eprintln!("{} (type /help for commands)", conversation.model.config.name);
        interactive(&mut conversation)
    } else {
        piped(&mut conversation)
    };
    match ended {
        Err(Failure::Interrupted) => Err(Failure::Interrupted),
        ended => conversation.save().and(ended),
    }
}

/// Takes every line of stdin. A refused turn does not lose the rest; the first one is told last, with the exit code.
fn piped(conversation: &mut Conversation<'_>) -> Result<(), Failure> {
    let mut refused = Ok(());
    for line in io::stdin().lines() {
        let line = line.map_err(|error| Failure::while_doing("stdin", error))?;
        match conversation.take(line.trim()) {
            Ok(After::Continue) => {}
            Ok(After::Quit) => break,
            Err(Failure::Interrupted) => return Err(Failure::Interrupted),
            Err(failure) if refused.is_ok() => refused = Err(failure),
            Err(failure) => {
                failure.report();
            }
        }
    }
    refused
}

fn interactive(conversation: &mut Conversation<'_>) -> Result<(), Failure> {
    let mut editor: Editor<(), FileHistory> = DefaultEditor::new()?;
    loop {
        match editor.readline("> ") {
            Ok(line) => {
                let line = line.trim();
                if !line.is_empty() {
                    editor.add_history_entry(line)?;
                }
                match conversation.take(line) {
                    Ok(After::Continue) => {}
                    Ok(After::Quit) => return Ok(()),
                    // A refused turn is no reason to lose the conversation.
                    Err(Failure::Failed(why) | Failure::Usage(why)) => eprintln!("error: {why}"),
                    Err(Failure::Interrupted) => {}
                }
            }
            Err(ReadlineError::Interrupted) => eprintln!("(Ctrl-D or /quit leaves)"),
            Err(ReadlineError::Eof) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

enum After {
    Continue,
    Quit,
}

/// The messages, and the sequence that has read them.
struct Conversation<'a> {
    args: &'a ChatArgs,
    model: Model,
    /// The cap on its cache.
    eviction: Option<EvictionOptions>,
    /// Role and text, oldest first.
    messages: Vec<(String, String)>,
    live: Option<Live>,
    last: Option<Completion>,
}

/// A sequence and the text that its tokens spell.
struct Live {
    id: SequenceId,
    text: String,
}

impl Conversation<'_> {
    /// A line of input: a command or a question.
    fn take(&mut self, line: &str) -> Result<After, Failure> {
        let (command, rest) = line.split_once(' ').unwrap_or((line, ""));
        match command {
            "" => {}
            "/help" => output::line(HELP)?,
            "/quit" | "/exit" | "/bye" => return Ok(After::Quit),
            "/stats" => output::line(self.stats())?,
            "/history" => {
                for (role, text) in &self.messages {
                    output::line(format_args!("{role}: {text}"))?;
                }
            }
            "/clear" => self.clear(self.system()),
            "/system" => self.clear(Some(rest.to_string()).filter(|text| !text.is_empty())),
            "/undo" => {
                self.undo();
            }
            "/retry" => match self.undo() {
                Some(question) => self.ask(question)?,
                None => eprintln!("there is no question to answer again"),
            },
            "/edit" if rest.is_empty() => eprintln!("/edit needs the new question"),
            "/edit" => match self.undo() {
                Some(_) => self.ask(rest.to_string())?,
                None => eprintln!("there is no question to edit"),
            },
            unknown if unknown.starts_with('/') => eprintln!("unknown command {unknown}; /help lists them"),
            _ => self.ask(line.to_string())?,
        }
        Ok(After::Continue)
    }

    /// Goes on with a conversation from a file.
    fn take_up(&mut self, loaded: Loaded) -> Result<(), Failure> {
        let Some(Transcript { messages, text }) = loaded.transcript else {
            let path = self.args.kv_file.source().unwrap_or(Path::new("")).display();
            let why = format!("{path}: it holds a text and no conversation; go on with `entrokv generate --kv-load`");
            return Err(Failure::Failed(why));
        };
        self.live = Some(Live { id: loaded.id, text });
        (self.messages, self.eviction) = (messages, loaded.eviction);
        Ok(())
    }

    /// Writes the conversation and its cache to the file asked for, if one was.
    fn save(&self) -> Result<(), Failure> {
        let Some(path) = self.args.kv_file.target() else { return Ok(()) };
        let Some(live) = &self.live else {
            return Err(Failure::Failed(format!(
                "{} is not written: no cache of the conversation is left",
                path.display()
            )));
        };
        let transcript = Transcript { messages: self.messages.clone(), text: live.text.clone() };
        self.args.kv_file.save(&self.model.engine, live.id, &transcript.notes()?)
    }

    fn system(&self) -> Option<String> {
        self.messages.first().filter(|(role, _)| role == "system").map(|(_, text)| text.clone())
    }

    fn clear(&mut self, system: Option<String>) {
        self.forget_sequence();
        self.messages = system.map(|text| ("system".to_string(), text)).into_iter().collect();
        self.last = None;
    }

    fn forget_sequence(&mut self) {
        if let Some(live) = self.live.take() {
            self.model.engine.close(live.id);
        }
    }

    /// Drops the last question and its answer and returns the question.
    fn undo(&mut self) -> Option<String> {
        let at = self.messages.iter().rposition(|(role, _)| role == "user")?;
        let question = self.messages.drain(at..).next().map(|(_, text)| text);
        self.forget_sequence();
        question
    }

    /// Reads `question`, streams the answer, remembers both.
    fn ask(&mut self, question: String) -> Result<(), Failure> {
        self.messages.push(("user".to_string(), question));
        let answered = self.answer();
        if answered.is_err() {
            self.messages.pop();
            self.forget_sequence();
        }
        answered
    }

    fn answer(&mut self) -> Result<(), Failure> {
        let template = self.model.chat_template.as_ref().expect("checked when the conversation began");
        let messages: Vec<Message> =
            self.messages.iter().map(|(role, text)| Message::new(role.as_str(), text.as_str())).collect();
        let full = template.render(&messages, &rendering::options())?;
        let (id, read) = self.submit(&full)?;
        self.live = Some(Live { id, text: full.clone() });
        let listening = Listening::start();
        let mut out = io::stdout().lock();
        let mut reading = Some(Progress::steps("reading", read as u64));
        let completion = self.model.engine.finish(id, &mut |step| {
            match &reading {
                Some(bar) if step.token.is_none() && step.finished.is_none() => bar.follow(step),
                _ => drop(reading.take()),
            }
            // A terminal that went away ends the program at the next prompt; the answer is not worth a panic.
            let _ = out.write_all(step.text.as_bytes()).and_then(|()| out.flush());
        })?;
        drop(listening);
        writeln!(out)?;
        drop(out);
        if let FinishReason::Failed(why) = &completion.finish_reason {
            return Err(Failure::Failed(why.clone()));
        }
        self.messages.push(("assistant".to_string(), completion.text.clone()));
        let completion = self.compress(id, completion)?;
        match spelled_end(&self.model.tokenizer, &completion) {
            Some(end) => self.live = Some(Live { id, text: full + &completion.text + &end }),
            // A stop string: the cache holds it, the conversation does not, so the next turn reads it all again.
            None => self.forget_sequence(),
        }
        if completion.kv.logical_tokens >= self.model.engine.context_len() {
            eprintln!("(the context of {} tokens is full; /clear starts over)", self.model.engine.context_len());
        }
        self.last = Some(completion);
        Ok(())
    }

    /// Compresses the cache after an answer, where the policy waits for that; Ctrl-C leaves it as it is.
    fn compress(&mut self, id: SequenceId, answered: Completion) -> Result<Completion, Failure> {
        if answered.finish_reason == FinishReason::Cancelled || !self.model.engine.compress(id)? {
            return Ok(answered);
        }
        let listening = Listening::start();
        let bar = Progress::steps("compressing", 0);
        let rested = self.model.engine.finish(id, &mut |step| bar.follow(step))?;
        drop((bar, listening));
        match &rested.finish_reason {
            FinishReason::Failed(why) => Err(Failure::Failed(why.clone())),
            FinishReason::Cancelled => {
                eprintln!("(the cache stays as it was; the next answer's end tries again)");
                Ok(answered)
            }
            FinishReason::Stop | FinishReason::Length => Ok(Completion { kv: rested.kv, ..answered }),
        }
    }

    /// Gives the engine what it has not read of `full`; returns the sequence and how many tokens that was.
    fn submit(&mut self, full: &str) -> Result<(SequenceId, usize), Failure> {
        let unread = |live: &Live| Some((live.id, full.strip_prefix(&live.text)?.to_string()));
        if let Some((id, rest)) = self.live.as_ref().and_then(unread).filter(|(_, rest)| !rest.is_empty()) {
            let prompt = self.model.tokenizer.encode_raw(&rest, SpecialTokens::Parse)?;
            let read = prompt.len();
            let request = self.request(prompt);
            self.model.engine.extend(id, request).map_err(Failure::refused)?;
            return Ok((id, read));
        }
        // The template spells the past differently now (or there is none): read the conversation from its start.
        self.forget_sequence();
        let prompt = self.model.tokenizer.encode(full, SpecialTokens::Parse)?;
        let read = prompt.len();
        let request = self.request(prompt);
        Ok((self.model.engine.submit(request).map_err(Failure::refused)?, read))
    }

    fn request(&self, prompt: Vec<u32>) -> Request {
        let sampling = &self.args.sampling;
        Request {
            prompt,
            max_tokens: sampling.max_tokens.map(usize::from),
            sampling: sampling.options(),
            stop: sampling.stop.clone(),
            end_tokens: if sampling.ignore_eos { EndTokens::Ignore } else { EndTokens::Stop },
            eviction: self.eviction.clone(),
        }
    }

    /// The cache as the pool counts it, and speeds, of the last answer.
    fn stats(&self) -> String {
        let Some(last) = &self.last else { return "nothing has been said yet".to_string() };
        let (kv, timing) = (&last.kv, &last.timing);
        let raised = if kv.eviction.budget_raised { ", raised to what is pinned" } else { "" };
        let budget = kv.bytes_budget.map_or("no budget".to_string(), |bytes| format!("budget {}{raised}", mib(bytes)));
        let [held, full, peak] = [kv.bytes_held, kv.bytes_full, kv.peak.held].map(mib);
        let [metadata, policy] = [kv.bytes_metadata, kv.bytes_policy_state].map(mib);
        [
            format!("tokens    {} of a context of {}", kv.logical_tokens, self.model.engine.context_len()),
            format!("KV held   {held} ({budget}; the full cache would be {full}; {peak} at most)"),
            format!("beside    metadata {metadata}, policy state {policy}"),
            format!("evicted   {} pages", kv.eviction.pages_evicted),
            format!(
                "read      {} for the last answer, {:.1} tokens/s",
                timing.prefill_tokens,
                timing.prefill_tokens_per_s()
            ),
            format!("answering {:.1} tokens/s", timing.decode_tokens_per_s()),
        ]
        .join("\n")
    }
}
