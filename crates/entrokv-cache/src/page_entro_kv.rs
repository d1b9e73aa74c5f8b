//! Page-EntroKV: heads that know where to look decide which pages stay.
//!
//! Per KV group, with `A_h` the attention row of query head `h`:
//! 1. set the sinks apart and renormalise, `A~_h` (theorem 2: no function of the raw entropy tells a sink head from a
//!    retrieval head);
//! 2. collision entropy `H_h = -ln sum_t A~_h(t)^2`;
//! 3. head weights `w = softmax(-H / tau)`;
//! 4. pooled score `s(t) = sum_h w_h A_h(t)`;
//! 5. page score `max s(t)` over the page's tokens;
//! 6. [`select_pages`](crate::select_pages).
//!
//! After an eviction all of this is over the resident tokens: `T` is their number, the sinks are those of them at
//! positions below `sinks`, and `N` is the rest. Arithmetic is in f64; a page's score is handed out in f32.
//!
//! While decoding (`schedule=rolling`) the weights stay as the prompt made them and the score follows the rows of the
//! decoded tokens: `s(t) <- g s(t) + (1 - g) sum_h w_h A_step,h(t)`, a new token starting at 0.

mod head_pages;
mod head_view;
mod options;
mod prompt_rows;
mod scorer;
mod token_scores;

use std::fmt;

pub use options::{BlockProjection, ObservedRow, PageEntroKvOptions, PoolOn, Pooling};
pub use scorer::PageEntroKvScorer;

pub(crate) use options::{OPTION_KEYS, PRESETS};
pub(crate) use prompt_rows::PromptRows;

use crate::allotment::Allotment;
use crate::attention_rows::Taps;
use crate::pins::Pins;
use crate::policy::{EvictionPolicy, Granularity, Packing, PageScorer, PolicyError, RowOrigin, Schedule};
use crate::policy_options::OptionSet;
use crate::shape::{CacheShape, KvGroup};
use crate::tiers::Tiers;

const OPTIONS: OptionSet<PageEntroKvOptions> = OptionSet {
    policy: PageEntroKv::NAME,
    keys: &[OPTION_KEYS],
    without: &[],
    presets: PRESETS,
    default: PageEntroKvOptions::default,
};

/// The policy `page-entro-kv`.
///
/// | option | values | default | what |
/// |---|---|---|---|
/// | `preset` | `paper`, `serving` | | sets the others first, wherever it stands |
/// | `sinks` | tokens | 4 | first positions, out of the entropy and pinned |
/// | `alpha` | 0 to `inf` | 2 | order of the Rényi entropy |
/// | `tau` | above 0, `inf` | 0.5 | temperature of the head weights |
/// | `pooling` | `entropy`, `mean`, `max` | `entropy` | heads to one score a token |
/// | `row` | `last`, `window:N`, `accumulated` | `last` | prompt rows read |
/// | `pool_on` | `raw`, `isolated` | `raw` | rows pooled |
/// | `block` | `max`, `sum`, `mean` | `max` | tokens to one score a page |
/// | `pool` | odd, 1 to 255 | 1 | average along positions before `block` |
/// | `recent` | pages, `quarter` | 0 | newest pages, pinned |
/// | `decay` | 0 to 1 | 0.98 | `g` of the rolling score |
/// | `allot` | see [`Allotment`] | `uniform` | how the budget is shared out among layers and heads |
/// | `granularity` | `page`, `token` | `page` | whether pages are evicted or tokens |
/// | `schedule` | `once`, `rolling`, `every:N`, `per_chunk:N` | `rolling` | when pages are evicted |
/// | `rows` | `prompt`, `probe` | `prompt` | whose rows are read |
/// | `pack` | `position`, `score` | `position` | in which order tokens that stay are stored |
/// | `tiers` | `none`, or see [`Tiers`] | `none` | kinds of the pages that stay |
///
/// The default is the paper's method but for the schedule: a budget given to an engine is a cap after every step.
/// `preset=paper` is the paper's method whole and so evicts once. `preset=serving` is `row=window:32,pool=5,
/// recent=quarter`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PageEntroKv {
    options: PageEntroKvOptions,
}

impl PageEntroKv {
    /// The policy's name on a command line.
    pub const NAME: &'static str = "page-entro-kv";

    /// The policy with the given options.
    ///
    /// # Errors
    /// [`PolicyError::BadValue`] for an option out of its range.
    pub fn new(options: PageEntroKvOptions) -> Result<Self, PolicyError> {
        OPTIONS.check(&options)?;
        Ok(Self { options })
    }

    /// The policy with options read from `key=value` items parted by commas, or its defaults for `None`.
    ///
    /// # Errors
    /// [`PolicyError`] for an option that is not known, out of range, or given twice.
    pub fn parse(options: Option<&str>) -> Result<Self, PolicyError> {
        Ok(Self { options: OPTIONS.parse(options)? })
    }

    /// A fresh scorer of a group of `group_size` query heads whose pages hold `page_size` tokens; as
    /// [`scorer`](EvictionPolicy::scorer), with its entropies and weights to be read.
    #[must_use]
    pub fn group_scorer(&self, group_size: usize, page_size: usize) -> PageEntroKvScorer {
        PageEntroKvScorer::new(self.options.clone(), group_size, page_size)
    }

    /// The options.
    #[must_use]
    pub fn options(&self) -> &PageEntroKvOptions {
        &self.options
    }
}

/// The canonical text: the name, and the options that depart from the default. [`parse_policy`](crate::parse_policy)
/// reads it back.
impl fmt::Display for PageEntroKv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        OPTIONS.write(&self.options, f)
    }
}

impl EvictionPolicy for PageEntroKv {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn needs(&self) -> Taps {
        let step_rows = self.options.schedule.goes_on();
        Taps { prompt: self.options.row.tap(), step_rows, ..Taps::default() }
    }

    fn schedule(&self) -> Schedule {
        self.options.schedule
    }

    fn pins(&self) -> Pins {
        Pins { sink_tokens: self.options.sinks as usize, recent_pages: self.options.recent }
    }

    fn allotment(&self) -> Allotment {
        self.options.allotment
    }

    fn granularity(&self) -> Granularity {
        // Tokens are what is packed.
        if self.options.packing == Packing::Score { Granularity::Token } else { self.options.granularity }
    }

    fn rows(&self) -> RowOrigin {
        self.options.rows
    }

    fn packing(&self) -> Packing {
        self.options.packing
    }

    fn tiers(&self) -> Option<Tiers> {
        self.options.tiers
    }

    fn scorer(&self, shape: &CacheShape, _group: KvGroup) -> Box<dyn PageScorer> {
        Box::new(self.group_scorer(shape.group_size, shape.page_size))
    }
}
