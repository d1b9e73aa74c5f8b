//! What a sequence's cache holds, as the pool counts it.

use entrokv_cache::{CacheShape, KindFootprint, PageKind};

use super::ledger::KvBytes;
use crate::eviction::{Eviction, EvictionReport, StepReads};
use crate::sequence::Sequence;

/// A sequence's cache as the pool counts it.
#[derive(Clone, Debug, PartialEq)]
pub struct KvReport {
    /// Tokens of the sequence, evicted ones included.
    pub logical_tokens: usize,
    /// Payload bytes of pages held in global layers.
    pub bytes_held: u64,
    /// Payload bytes of pages held in window layers, which no budget touches.
    pub bytes_window: u64,
    /// The resolved cap, once the prompt has been read.
    pub bytes_budget: Option<u64>,
    /// What the whole cache of the sequence would hold in global layers as it is written: not encoded, nothing evicted.
    pub bytes_full: u64,
    /// Block tables and what attention reads of them, and the constants of codes.
    pub bytes_metadata: u64,
    /// What the policy keeps.
    pub bytes_policy_state: u64,
    /// What `schedule=once` let grow after its eviction.
    pub bytes_appended: u64,
    /// The most of each kind at any time of the sequence, within a step too.
    pub peak: KvBytes,
    /// Steps that ended with more held than a rolling budget allows; 0, or the engine has a bug.
    pub budget_violations: u64,
    /// Pages and bytes of all layers by kind of page.
    pub kinds: Vec<KindFootprint>,
    /// Eviction so far.
    pub eviction: EvictionReport,
    /// Pages that the last step of decoding has read of those held, where the policy chooses them; otherwise all are read.
    pub step_reads: Option<StepReads>,
}

impl KvReport {
    /// The report of `sequence`, whose pages are stored as `kind`.
    pub(super) fn of(sequence: &Sequence, shape: &CacheShape, kind: PageKind) -> Self {
        let bytes = KvBytes::of(sequence);
        let eviction = sequence.turn.eviction.as_ref();
        let pages = sequence.computed.div_ceil(shape.page_size) as u64;
        Self {
            logical_tokens: sequence.tokens.len(),
            bytes_held: bytes.held,
            bytes_window: bytes.window,
            bytes_budget: eviction.filter(|_| sequence.is_answering()).and_then(Eviction::budget_bytes),
            bytes_full: pages * kind.written_as().page_bytes(shape) * shape.num_global_groups() as u64,
            bytes_metadata: bytes.metadata,
            bytes_policy_state: bytes.policy_state,
            bytes_appended: eviction.map_or(0, |eviction| eviction.appended_bytes(bytes.held)),
            peak: sequence.ledger.peak(),
            budget_violations: sequence.ledger.budget_violations(),
            kinds: sequence.cache.footprint().kinds,
            eviction: eviction.map(Eviction::report).unwrap_or_default(),
            step_reads: eviction.and_then(Eviction::step_reads),
        }
    }
}
