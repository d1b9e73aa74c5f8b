//! What eviction did to a sequence.

use serde::{Deserialize, Serialize};

/// What eviction did to a sequence so far.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvictionReport {
    /// Pages freed.
    pub pages_evicted: u64,
    /// Mean over KV groups of pages held over pages its one set needs, at the last eviction: 1 by construction, counted.
    pub uor: f64,
    /// Mean over KV groups of what heads choosing alone would have held, in the same unit.
    pub uor_per_head: f64,
    /// Attention rows dropped for holding something that is no number.
    pub nan_rows: u64,
    /// Whether the budget was below the smallest possible and was raised to it.
    pub budget_raised: bool,
}

impl Default for EvictionReport {
    fn default() -> Self {
        Self { pages_evicted: 0, uor: 1.0, uor_per_head: 1.0, nan_rows: 0, budget_raised: false }
    }
}
