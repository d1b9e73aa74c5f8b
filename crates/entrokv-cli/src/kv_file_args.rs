//! Flags that keep a sequence with its cache in a file, and take it up again.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Args;
use entrokv::kv_file::{self, Notes, PendingFile};
use entrokv::{Engine, EvictionOptions, Identity, Question, SequenceId};

use crate::failure::Failure;
use crate::interrupt::{self, Listening};
use crate::model_args::{EvictionArgs, Fit};
use crate::transcript::Transcript;

/// Where a sequence comes from, and where it goes.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Keeping the KV cache")]
pub(crate) struct KvFileArgs {
    /// Go on after the text whose cache is in FILE: it is not read again, and the prompt follows it
    #[arg(long, env = "ENTROKV_KV_LOAD", value_name = "FILE")]
    kv_load: Option<PathBuf>,
    /// Write the text and its cache, as the budget left it, to FILE at the end, also after Ctrl-C in an answer
    #[arg(long, env = "ENTROKV_KV_SAVE", value_name = "FILE")]
    kv_save: Option<PathBuf>,
}

/// A sequence from a file, and how to go on with it.
pub(crate) struct Loaded {
    pub(crate) id: SequenceId,
    /// The flags' cap, and the file's where they say nothing.
    pub(crate) eviction: Option<EvictionOptions>,
    /// The conversation it is, if it is one.
    pub(crate) transcript: Option<Transcript>,
}

impl KvFileArgs {
    /// Whether both files can be what they are asked to be, as far as can be told before anything is read.
    pub(crate) fn check(&self, eviction: &EvictionArgs) -> Result<(), Failure> {
        if let Some(path) = &self.kv_load {
            open(path)?;
        }
        if let Some(path) = &self.kv_save {
            if let Some(policy) = eviction.load_options()?.policy {
                kv_file::check_policy(&*policy)?;
            }
            PendingFile::create(path).map_err(|error| Failure::while_doing(path.display(), error))?;
        }
        Ok(())
    }

    /// What the model must be opened with.
    pub(crate) fn identity(&self) -> Identity {
        if self.kv_load.is_some() || self.kv_save.is_some() { Identity::Hashed } else { Identity::Unknown }
    }

    /// What the default policy may do with the cache of a sequence of `engine`: KV files are of plain pages.
    pub(crate) fn fit(&self, engine: &Engine) -> Fit {
        if self.kv_save.is_some() { Fit::Pages } else { Fit::of_engine(engine) }
    }

    /// The file to load, if there is one.
    pub(crate) fn source(&self) -> Option<&Path> {
        self.kv_load.as_deref()
    }

    /// The file to save, if there is one.
    pub(crate) fn target(&self) -> Option<&Path> {
        self.kv_save.as_deref()
    }

    /// Takes in the sequence of the file to load, if there is one.
    pub(crate) fn load(&self, engine: &mut Engine, eviction: &EvictionArgs) -> Result<Option<Loaded>, Failure> {
        let Some(path) = &self.kv_load else { return Ok(None) };
        let in_file = |error: &dyn std::fmt::Display| Failure::while_doing(path.display(), error);
        let loaded =
            engine.load_sequence(&mut open(path)?, &eviction.load_options()?).map_err(|error| in_file(&error))?;
        Ok(Some(Loaded {
            id: loaded.id,
            eviction: eviction.continuing(loaded.eviction.as_ref(), Question::Seen, Fit::Pages)?,
            transcript: Transcript::noted(&loaded.notes)?,
        }))
    }

    /// Writes `id` to the file to save, if there is one: whole, or not at all.
    pub(crate) fn save(&self, engine: &Engine, id: SequenceId, notes: &Notes) -> Result<(), Failure> {
        let Some(path) = &self.kv_save else { return Ok(()) };
        let _listening = Listening::start();
        let flag = interrupt::flag();
        let write = || -> Result<(), Failure> {
            let mut file = Interruptible { file: PendingFile::create(path)?, flag: Arc::clone(&flag) };
            engine.save_sequence(id, notes, &mut file)?;
            Ok(file.file.commit()?)
        };
        write().map_err(|failure| match failure {
            _ if flag.load(Ordering::Relaxed) => Failure::Interrupted,
            Failure::Failed(why) => Failure::while_doing(path.display(), why),
            failure => failure,
        })
    }
}

fn open(path: &Path) -> Result<File, Failure> {
    File::open(path).map_err(|error| Failure::while_doing(path.display(), error))
}

/// A file that takes no more bytes once Ctrl-C has been pressed.
struct Interruptible {
    file: PendingFile,
    flag: Arc<AtomicBool>,
}

impl Write for Interruptible {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.flag.load(Ordering::Relaxed) {
            return Err(io::Error::other("interrupted"));
        }
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}
