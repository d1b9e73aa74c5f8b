//! Forks: a second sequence that begins as another one at rest, and shares its pages.

use entrokv_cache::PoolExhausted;
use thiserror::Error;

use super::{Engine, Ledger};
use crate::coding::Coding;
use crate::segments::SegmentLists;
use crate::sequence::{Sequence, SequenceId, Turn};

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
    /// that it reads. What its policy has seen is copied: the fork can be compressed in its place ([`Engine::compress`]), under
    /// another budget too ([`Engine::set_cap`]).
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
        let mut fork = Sequence {
            tokens: tokens.clone(),
            computed: *computed,
            cache,
            segments: SegmentLists::new(shape),
            coding: coding.as_ref().and_then(Coding::forked),
            turned_sinks: turned_sinks.clone(),
            ledger: Ledger::default(),
            turn: Turn::resting(turn.prompt_end, turn.eviction.clone()),
        };
        fork.note_bytes();
        let id = SequenceId(self.next_id);
        self.next_id += 1;
        self.sequences.insert(id, fork);
        Ok(id)
    }
}
