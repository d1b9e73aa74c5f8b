//! The idea of EntroKV without tensors: pages, pool, block tables, budgets, the byte ledger and eviction policies.

pub mod attention_rows;
pub mod entropy;
pub mod selection;

pub use attention_rows::{AttentionRows, PageSpan, RowSource, RowTap, Taps};
pub use entropy::{MIN_RESIDUAL_MASS, RenyiOrder, head_weights, residual_entropy};
pub use selection::{PageSet, pages_to_evict, select_pages};
