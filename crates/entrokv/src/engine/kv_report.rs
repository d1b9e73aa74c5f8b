//! What a sequence's cache holds, as the pool counts it.

use entrokv_cache::{CacheShape, KindFootprint, PageKind};

use crate::coding::Coding;
use crate::eviction::{Eviction, EvictionReport};
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
    /// Block tables and what attention reads of them, policy state, and the constants of codes.
    pub bytes_metadata: u64,
    /// What `schedule=once` let grow after its eviction.
    pub bytes_appended: u64,
    /// Pages and bytes of all layers by kind of page.
    pub kinds: Vec<KindFootprint>,
    /// Eviction so far.
    pub eviction: EvictionReport,
}

impl KvReport {
    /// The report of `sequence`, whose pages are stored as `kind`.
    pub(super) fn of(sequence: &Sequence, shape: &CacheShape, kind: PageKind) -> Self {
        let footprint = sequence.cache.footprint();
        let eviction = sequence.turn.eviction.as_ref();
        let pages = sequence.computed.div_ceil(shape.page_size) as u64;
        Self {
            logical_tokens: sequence.tokens.len(),
            bytes_held: footprint.global_bytes,
            bytes_window: footprint.window_bytes,
            bytes_budget: eviction.filter(|_| !sequence.is_reading()).and_then(Eviction::budget_bytes),
            bytes_full: pages * kind.written_as().page_bytes(shape) * shape.num_global_groups() as u64,
            bytes_metadata: footprint.metadata_bytes
                + sequence.segments.heap_bytes()
                + eviction.map_or(0, Eviction::state_bytes)
                + sequence.coding.as_ref().map_or(0, Coding::state_bytes),
            bytes_appended: eviction.map_or(0, |eviction| eviction.appended_bytes(footprint.global_bytes)),
            kinds: footprint.kinds,
            eviction: eviction.map(Eviction::report).unwrap_or_default(),
        }
    }
}
