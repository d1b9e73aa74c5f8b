//! Why a sequence was not saved, and why a file was not taken for one.

use std::io;

use entrokv_cache::{BudgetError, PageKind, PolicyError, PoolExhausted, RestoreError};
use thiserror::Error;

use super::{FORMAT_VERSION, ModelId};
use crate::sequence::SequenceId;

/// Why a sequence was not saved; what the writer has received by then is no file.
#[derive(Debug, Error)]
pub enum SaveError {
    /// Keys that were rotated further stand in its pages, and a file has no room for what they were.
    #[error("sequence {0} has turned its sinks (rerotate=true), and a KV file does not hold what they were")]
    TurnedSinks(SequenceId),
    /// Pages settled by a plan, whose scores and order a file has no room for.
    #[error("the cache of sequence {0} is stored in tiers, and a KV file holds caches of one type")]
    Tiers(SequenceId),
    /// No such sequence.
    #[error("there is no sequence {0}")]
    Unknown(SequenceId),
    /// An answer under way: its policy has seen rows that no file keeps.
    #[error("sequence {0} is still answering; cancel it or let it finish before it is saved")]
    Busy(SequenceId),
    /// A policy whose next turn would go on with more than the cache.
    #[error("the policy {policy} keeps {keeps} from turn to turn, which a KV file does not hold")]
    PolicyState {
        /// The policy.
        policy: String,
        /// What it keeps.
        keeps: &'static str,
    },
    /// The model was opened without [`Identity::Hashed`](crate::Identity::Hashed).
    #[error("the model was opened without its identity (Identity::Hashed), which a KV file must name")]
    NoModelId,
    /// The writer's refusal.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Why no sequence was made of a file. Nothing has changed then.
#[derive(Debug, Error)]
pub enum KvFileError {
    /// Not what we write.
    #[error("it is no KV file: {why}")]
    Foreign {
        /// What is missing.
        why: String,
    },
    /// Another version of the format.
    #[error("it is a KV file of version {got}, and only version {FORMAT_VERSION} can be read")]
    Version {
        /// Its version.
        got: u64,
    },
    /// It ends early.
    #[error("it is cut short: {got} bytes of {wanted}")]
    Truncated {
        /// Bytes there are.
        got: u64,
        /// Bytes its header speaks of.
        wanted: u64,
    },
    /// It goes on too long.
    #[error("it has {got} bytes, and its header speaks of {wanted}")]
    Surplus {
        /// Bytes there are.
        got: u64,
        /// Bytes its header speaks of.
        wanted: u64,
    },
    /// Its checksum is another.
    #[error("it is damaged: its checksum is not that of its {bytes} bytes")]
    Damaged {
        /// Its length.
        bytes: u64,
    },
    /// It is whole and contradicts itself: no version of ours wrote it.
    #[error("it is whole and yet no sequence: {0}")]
    Malformed(String),
    /// Another geometry.
    #[error("it was made by {model} with {got} {what}, and this model has {wanted}")]
    Geometry {
        /// The model's name.
        model: String,
        /// What differs.
        what: &'static str,
        /// The file's.
        got: usize,
        /// The engine's.
        wanted: usize,
    },
    /// Another window.
    #[error(
        "it was made by {model} with a window of {got} tokens in layer {layer}, and this model has {wanted} (0: none)"
    )]
    Window {
        /// The model's name.
        model: String,
        /// The layer.
        layer: usize,
        /// The file's.
        got: u32,
        /// The engine's.
        wanted: u32,
    },
    /// Another model of the same geometry, or the same with other weights.
    #[error("it was made by another model: {} ({}), and this one is {} ({})", got.0, got.1, wanted.0, wanted.1)]
    Model {
        /// Name and identity in the file.
        got: (String, ModelId),
        /// Those of the engine's.
        wanted: (String, ModelId),
    },
    /// Other pages.
    #[error("it has pages of {got} tokens, and this cache has pages of {wanted} (--page-size)")]
    PageSize {
        /// The file's.
        got: usize,
        /// The engine's.
        wanted: usize,
    },
    /// Another kind of cache.
    #[error("it is a cache of type {got}, and this one is of type {wanted} (--cache-type)")]
    CacheType {
        /// The file's.
        got: String,
        /// The engine's.
        wanted: PageKind,
    },
    /// More than the context holds.
    #[error("it has {got} tokens, the context holds {limit}")]
    Context {
        /// Its tokens.
        got: usize,
        /// Context length.
        limit: usize,
    },
    /// Another policy than asked for.
    #[error("it was written under the policy {got}, and {wanted} was asked for")]
    Policy {
        /// The file's.
        got: String,
        /// The one asked for.
        wanted: String,
    },
    /// A policy of the file that nobody here knows, and none was given.
    #[error("it was written under the policy {got}, which is not known here: {source}")]
    UnknownPolicy {
        /// The file's.
        got: String,
        /// Why.
        source: PolicyError,
    },
    /// A cap that cannot be kept with this cache.
    #[error(transparent)]
    Budget(#[from] BudgetError),
    /// Too many pages.
    #[error(transparent)]
    Pool(#[from] PoolExhausted),
    /// The model was opened without [`Identity::Hashed`](crate::Identity::Hashed).
    #[error("the model was opened without its identity (Identity::Hashed), by which a KV file is known to be its own")]
    NoModelId,
    /// It could not be read.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<RestoreError> for KvFileError {
    fn from(error: RestoreError) -> Self {
        match error {
            RestoreError::Pool(error) => Self::Pool(error),
            error => Self::Malformed(error.to_string()),
        }
    }
}
