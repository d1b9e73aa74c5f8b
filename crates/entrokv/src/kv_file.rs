//! KV files: one sequence with its cache, on disk, so that a text is read once and asked about later.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use entrokv::kv_file::{LoadOptions, PendingFile};
//! use entrokv::{Identity, Model, ModelOptions, Request};
//!
//! let options = ModelOptions { identity: Identity::Hashed, ..ModelOptions::default() };
//! let mut model = Model::open("model.gguf".as_ref(), &options, &mut |_| ())?;
//! let id = model.engine.submit(Request::greedy(vec![1, 2, 3], 10))?;
//! model.engine.finish(id, &mut |_| ())?;
//! let mut file = PendingFile::create("book.kv".as_ref())?;
//! model.engine.save_sequence(id, &Default::default(), &mut file)?;
//! file.commit()?;
//!
//! let mut file = std::fs::File::open("book.kv")?;
//! let loaded = model.engine.load_sequence(&mut file, &LoadOptions::default())?;
//! model.engine.extend(loaded.id, Request::greedy(vec![4, 5], 10))?;
//! # Ok(())
//! # }
//! ```
//!
//! A file is what a sequence at rest consists of: its tokens, its block tables, the bytes of its pages, what its codes are
//! relative to, and under which cap it lived. A policy's scores are not in it, for every turn of a sequence makes them anew;
//! a policy that keeps more than that from turn to turn is refused ([`check_policy`]).
//! The container is safetensors; `docs/kv-files.md` has the format to the byte. Invariants, each a test of that name:
//! * `loading_goes_on_as_if_never_saved`: the same tokens and the same bits, evicted, coded, windowed or plain.
//! * `a_file_that_is_not_whole_is_refused_and_changes_nothing`: one line, and the pool is as before.
//! * `equal_sequences_give_equal_files`, and what other sequences left in a frame is in none.

mod checksum;
mod contents;
mod error;
mod header;
mod model_id;
mod pending_file;
mod reader;
mod writer;

use std::collections::BTreeMap;
use std::sync::Arc;

use entrokv_cache::{EvictionPolicy, GateTap, QueryTap, Rotation, TwoWayTap};

pub use self::error::{KvFileError, SaveError};
pub use self::model_id::{ModelId, ModelIdError};
pub use self::pending_file::PendingFile;
use crate::sequence::{EvictionOptions, SequenceId};

pub(crate) use self::contents::Contents;
pub(crate) use self::header::{FORMAT_VERSION, Header, SavedCap, SavedModel};
pub(crate) use self::reader::KvFileReader;
pub(crate) use self::writer::write;

/// What whoever saves a sequence notes beside it, for whoever loads it: the engine does not look at it.
pub type Notes = BTreeMap<String, String>;

/// What is asked of a file beyond that it fits the engine.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// Refuses a sequence that lived under another policy than this; `None` takes any.
    pub policy: Option<Arc<dyn EvictionPolicy>>,
}

/// A sequence that came from a file: it has finished and waits for a further prompt.
#[derive(Clone)]
pub struct LoadedSequence {
    /// Its name in this engine.
    pub id: SequenceId,
    /// The cap it lived under, which its next turn should name again: a request without one is not capped.
    pub eviction: Option<EvictionOptions>,
    /// What was noted beside it.
    pub notes: Notes,
}

/// Whether a sequence that lives under `policy` can be saved: whether nothing but its cache lasts from turn to turn.
///
/// # Errors
/// [`SaveError::PolicyState`] for a policy that keeps what gates said of tokens or heads, sums over queries or over attention
/// that looks both ways, what passes said of tokens, keys as they were before they were turned, or scores of pages in tiers.
pub fn check_policy(policy: &dyn EvictionPolicy) -> Result<(), SaveError> {
    let scores = policy.tiers().map(|_| "scores of its pages");
    match kept_between_turns(policy).or(scores) {
        Some(keeps) => Err(SaveError::PolicyState { policy: policy.to_string(), keeps }),
        None => Ok(()),
    }
}

/// What `policy` keeps of a sequence from turn to turn beside the cache, in words.
pub(crate) fn kept_between_turns(policy: &dyn EvictionPolicy) -> Option<&'static str> {
    let needs = policy.needs();
    if needs.gate != GateTap::None {
        Some("what its gates said")
    } else if needs.queries != QueryTap::None {
        Some("sums over queries")
    } else if needs.two_way != TwoWayTap::None {
        Some("sums over attention")
    } else if needs.reconstruction.is_some() {
        Some("what its passes said")
    } else if policy.rotation() == Rotation::Slot {
        Some("keys of sinks")
    } else {
        None
    }
}
