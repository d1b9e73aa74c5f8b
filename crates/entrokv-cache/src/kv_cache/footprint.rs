//! The byte ledger of one sequence.

use crate::kv_cache::table::Table;
use crate::page::PageKind;
use crate::shape::LayerKind;

/// What a cache holds: payload, counted from frames, and metadata beside it, never mixed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Footprint {
    /// Payload bytes of pages of global layers: what a budget caps.
    pub global_bytes: u64,
    /// Payload bytes of pages of window layers, which no budget touches.
    pub window_bytes: u64,
    /// Bytes of the block tables themselves.
    pub metadata_bytes: u64,
    /// Pages held in global layers.
    pub global_pages: u64,
    /// Pages held in window layers.
    pub window_pages: u64,
    /// The payload of all layers by kind of page, in the order of [`PageKind::ALL`].
    pub kinds: [KindFootprint; PageKind::ALL.len()],
}

/// Pages of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KindFootprint {
    /// How many there are.
    pub pages: u64,
    /// Bytes of their frames.
    pub bytes: u64,
}

impl Footprint {
    /// Payload bytes of all layers.
    pub fn payload_bytes(&self) -> u64 {
        self.global_bytes + self.window_bytes
    }

    /// Pages of one kind, over all layers.
    pub fn kind(&self, kind: PageKind) -> KindFootprint {
        self.kinds[kind.ordinal()]
    }

    /// Counts in the table of one KV group of a layer.
    pub(super) fn add(&mut self, layer: LayerKind, table: &Table) {
        let (mut pages, mut bytes) = (0, 0);
        for (total, held) in self.kinds.iter_mut().zip(table.held()) {
            total.pages += held.pages;
            total.bytes += held.bytes;
            pages += held.pages;
            bytes += held.bytes;
        }
        match layer {
            LayerKind::Global => {
                self.global_pages += pages;
                self.global_bytes += bytes;
            }
            LayerKind::Window(_) => {
                self.window_pages += pages;
                self.window_bytes += bytes;
            }
        }
        self.metadata_bytes += table.heap_bytes();
    }
}
