//! Forks: a second sequence that begins as another one at rest, and shares its pages.

use entrokv_cache::{EvictionPolicy, PoolExhausted, Rotation};
use thiserror::Error;

use super::{Engine, Ledger, SubmitError};
use crate::coding::Coding;
use crate::kv_file::kept_between_turns;
use crate::segments::SegmentLists;
use crate::sequence::{EvictionOptions, Request, Sequence, SequenceId, Turn};

/// Why a sequence was not forked. Nothing has changed then.
#[derive(Debug, Error)]
pub enum ForkError {
    /// No such sequence.
    #[error("there is no sequence {0}")]
    Unknown(SequenceId),
    /// An answer under way.
    #[error("sequence {0} is still answering; cancel it or let it finish before it is forked")]
    Busy(SequenceId),
    /// No room for the pages that are still written to.
    #[error(transparent)]
    Pool(#[from] PoolExhausted),
}

impl Engine {
    /// A second sequence with the tokens and the cache of `id`, which has finished or was cancelled. [`Engine::extend`] goes on with
    /// either as if there were no other, to the bit.
    ///
    /// Full pages are shared until one of the two rewrites them: the pool counts their bytes once, and each sequence reports all
    /// that it reads. The fork lives under no cap until its next turn names one. What some policies keep from turn to turn is not
    /// forked: after a turn under one, a next turn of the fork under one is refused ([`SubmitError::LeftBehind`]).
    ///
    /// # Errors
    /// [`ForkError`].
    pub fn fork(&mut self, id: SequenceId) -> Result<SequenceId, ForkError> {
        let Self { runner, shape, pool, sequences, .. } = self;
        let Sequence { tokens, computed, cache, coding, turned_sinks, turn, .. } =
            sequences.get(&id).ok_or(ForkError::Unknown(id))?;
        if turn.finished.is_none() {
            return Err(ForkError::Busy(id));
        }
        let cache = cache.fork(pool, *computed, &mut |moves| runner.copy_pages(moves))?;
        let has_state = turn.eviction.as_ref().is_some_and(|eviction| kept_state(eviction.policy()).is_some());
        let left_behind = has_state || turn.left_behind;
        let mut fork = Sequence {
            tokens: tokens.clone(),
            computed: *computed,
            cache,
            segments: SegmentLists::new(shape),
            coding: coding.as_ref().and_then(Coding::forked),
            turned_sinks: turned_sinks.clone(),
            ledger: Ledger::default(),
            turn: Turn { left_behind, ..Turn::resting(turn.prompt_end, None) },
        };
        fork.note_bytes();
        let id = SequenceId(self.next_id);
        self.next_id += 1;
        self.sequences.insert(id, fork);
        Ok(id)
    }
}

impl Sequence {
    /// Whether the policy of `request` has all it goes on with.
    pub(super) fn check_left_behind(&self, request: &Request) -> Result<(), SubmitError> {
        let Some(EvictionOptions { policy, .. }) = &request.eviction else { return Ok(()) };
        match kept_state(&**policy).filter(|_| self.turn.left_behind) {
            Some(keeps) => Err(SubmitError::LeftBehind { policy: policy.to_string(), keeps }),
            None => Ok(()),
        }
    }
}

/// What `policy` keeps for the next turn that a fork has not got; turned sinks it has.
fn kept_state(policy: &dyn EvictionPolicy) -> Option<&'static str> {
    kept_between_turns(policy).filter(|_| policy.rotation() != Rotation::Slot)
}
