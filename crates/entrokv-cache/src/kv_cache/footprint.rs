//! The byte ledger of one sequence.

use crate::kv_cache::table::Table;
use crate::page_kind::PageKind;
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
    /// The payload of all layers by kind of page, ascending; kinds without a page are left out.
    pub kinds: Vec<KindFootprint>,
}

/// Pages of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KindFootprint {
    /// The kind.
    pub kind: PageKind,
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
        let found = self.kinds.iter().find(|footprint| footprint.kind == kind);
        found.copied().unwrap_or(KindFootprint { kind, pages: 0, bytes: 0 })
    }

    /// Counts in the table of one KV group of a layer.
    pub(super) fn add(&mut self, layer: LayerKind, table: &Table) {
        let (mut pages, mut bytes) = (0, 0);
        for held in table.held().iter().filter(|held| held.pages > 0) {
            let total = KindFootprint::entry(&mut self.kinds, held.kind);
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

impl KindFootprint {
    /// The count of `kind` in a list that ascends by kind, added where it is missing.
    pub(super) fn entry(kinds: &mut Vec<KindFootprint>, kind: PageKind) -> &mut KindFootprint {
        let place = match kinds.binary_search_by_key(&kind, |footprint| footprint.kind) {
            Ok(place) => place,
            Err(place) => {
                kinds.insert(place, KindFootprint { kind, pages: 0, bytes: 0 });
                place
            }
        };
        &mut kinds[place]
    }
}
