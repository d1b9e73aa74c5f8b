//! The idea of EntroKV without tensors: pages, pool, block tables, budgets, the byte ledger and eviction policies.
//!
//! A cache is kept at (layer, KV head, page). Each pair of a layer and a KV head, a [`KvGroup`], owns a block table of
//! its own ([`KvCache`]), so that a page of one head can be freed while its siblings stay. Pages live in frames of one
//! byte-capped [`PagePool`]; a frame is an offset and a length, and the bytes behind it belong to whoever embeds this
//! crate. A [`Budget`] says how much may stay, [`Pins`] what must, and both are resolved with integers only.
//!
//! Nothing here reads a tensor, does I/O or spawns a thread. Equal calls give equal pages and equal offsets.

#![forbid(unsafe_code)]

pub mod allotment;
pub mod attention_form;
pub mod attention_rows;
pub mod block_prices;
pub mod budget;
pub mod certificate;
pub mod encoding;
pub mod entropy;
pub mod gate_tap;
pub mod head_pooling;
mod headwise_scorer;
pub mod key_channels;
pub mod key_ranges;
pub mod kv_cache;
pub mod overlap;
pub mod page;
pub mod page_cost;
pub mod page_entro_kv;
pub mod page_kind;
pub mod pins;
pub mod policies;
pub mod policy;
mod policy_options;
pub mod pool;
pub mod pooled_pages;
pub mod pyramid;
pub mod query_moments;
pub mod reading;
mod recipe;
pub mod resident_tokens;
pub mod schedule;
pub mod second_stage;
pub mod selection;
pub mod shape;
pub mod streaming_heads;
pub mod tiers;
mod token_policy;
mod token_table;
pub mod two_way_tap;

pub use allotment::{Allotment, GroupUnits, pages_of_tokens};
pub use attention_form::{AttentionForm, RotaryPairs};
pub use attention_rows::{AttentionRows, PageSpan, PassView, Reconstruction, RowSource, RowTap, Taps};
pub use block_prices::{BlockPrices, cheapest_blocks};
pub use budget::{Budget, BudgetError, BudgetParseError, Ratio, RatioError, ResolvedBudget};
pub use certificate::{Certificates, FiniteContext};
pub use encoding::{Encoding, EncodingError};
pub use entropy::{MIN_RESIDUAL_MASS, RenyiOrder, head_weights, residual_entropy};
pub use gate_tap::GateTap;
pub use head_pooling::HeadPooling;
pub use key_channels::{KeyChannels, channel_scores};
pub use key_ranges::{KeyRanges, key_range};
pub use kv_cache::{
    Applied, FateError, Footprint, KindFootprint, KvCache, MoveTokens, PageFate, PageMove, PagePlace, PageRecord,
    ResidentPage, RestoreError, Revision, Slot,
};
pub use overlap::{Overlap, OverlapError};
pub use page::PageIndex;
pub use page_cost::PageCost;
pub use page_entro_kv::{
    BlockProjection, ObservedRow, PageEntroKv, PageEntroKvOptions, PageEntroKvScorer, PoolOn, Pooling,
};
pub use page_kind::{KindShapeError, PageKind, PageKindError};
pub use pins::{OpenPage, Pins, RecentPages};
pub use policy::{
    EvictionPolicy, Granularity, LeastBudget, POLICIES, Packing, PageScorer, PolicyEntry, PolicyError, Release,
    Rotation, RowOrigin, Sharing, deciding_later, parse_policy,
};
pub use pool::{ClassUsage, Frame, PagePool, PoolExhausted};
pub use pooled_pages::PooledPages;
pub use pyramid::{Pyramid, PyramidForm};
pub use query_moments::{QueryMoments, QueryTap, moments_len};
pub use reading::{BoundHeads, PageJudge, PageReads, Reading};
pub use recipe::{AUTO, Question, recipe, recipe_fits};
pub use resident_tokens::{OutputTap, ResidentTokens, TokenTap};
pub use schedule::Schedule;
pub use second_stage::SecondStage;
pub use selection::{PageSet, pages_to_evict, select_pages, select_tokens};
pub use shape::{CacheShape, KvGroup, LayerKind, ShapeError};
pub use streaming_heads::StreamingHeads;
pub use tiers::{AboveTier, LowerTier, TierPage, Tiers};
pub use token_policy::{Axes, TokenMethod, TokenPolicy, TokenScorer};
pub use two_way_tap::{LogitScale, TwoWayTap};
