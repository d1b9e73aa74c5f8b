//! Heads pooled without weights, the baselines Page-EntroKV departs from in one line.

use std::fmt;

use crate::allotment::Allotment;
use crate::attention_rows::Taps;
use crate::page_entro_kv::{OPTION_KEYS, PRESETS, PageEntroKv, PageEntroKvOptions, Pooling};
use crate::pins::Pins;
use crate::policy::{EvictionPolicy, Granularity, PageScorer, PolicyError, Schedule};
use crate::policy_options::OptionSet;
use crate::shape::{CacheShape, KvGroup};

/// The policies `mean-pages`, `s(t) = sum_h A_h(t) / r`, and `max-pages`, `s(t) = max_h A_h(t)`; all else as in [`PageEntroKv`].
///
/// They take the options of [`PageEntroKv`] but `pooling`, `alpha` and `tau`, which they have no use for: there are neither weights
/// nor, hence, entropies. How the tokens of a page become one score is `block`, its maximum by default.
#[derive(Clone, Debug)]
pub struct PooledPages {
    policy: PageEntroKv,
    name: &'static str,
}

/// The options under a name.
const fn options(policy: &'static str) -> OptionSet<PageEntroKvOptions> {
    OptionSet {
        policy,
        keys: &[OPTION_KEYS],
        without: &["alpha", "tau", "pooling"],
        presets: PRESETS,
        default: PageEntroKvOptions::default,
    }
}

impl PooledPages {
    /// The name of the policy of means on a command line.
    pub const MEAN: &'static str = "mean-pages";
    /// The name of the policy of maxima on a command line.
    pub const MAX: &'static str = "max-pages";

    /// `mean-pages` with options read from `key=value` items parted by commas, or its defaults for `None`.
    ///
    /// # Errors
    /// [`PolicyError`] for an option that is not known, out of range, or given twice.
    pub fn mean(options: Option<&str>) -> Result<Self, PolicyError> {
        Self::parse(Self::MEAN, Pooling::Mean, options)
    }

    /// `max-pages`, in the same way.
    ///
    /// # Errors
    /// As [`mean`](Self::mean).
    pub fn max(options: Option<&str>) -> Result<Self, PolicyError> {
        Self::parse(Self::MAX, Pooling::Max, options)
    }

    fn parse(name: &'static str, pooling: Pooling, text: Option<&str>) -> Result<Self, PolicyError> {
        let options = PageEntroKvOptions { pooling, ..options(name).parse(text)? };
        Ok(Self { policy: PageEntroKv::new(options)?, name })
    }

    /// The options, with the pooling among them.
    #[must_use]
    pub fn options(&self) -> &PageEntroKvOptions {
        self.policy.options()
    }
}

/// The canonical text, as [`PageEntroKv`]'s.
impl fmt::Display for PooledPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        options(self.name).write(self.options(), f)
    }
}

impl EvictionPolicy for PooledPages {
    fn name(&self) -> &str {
        self.name
    }

    fn needs(&self) -> Taps {
        self.policy.needs()
    }

    fn schedule(&self) -> Schedule {
        self.policy.schedule()
    }

    fn pins(&self) -> Pins {
        self.policy.pins()
    }

    fn allotment(&self) -> Allotment {
        self.policy.allotment()
    }

    fn granularity(&self) -> Granularity {
        self.policy.granularity()
    }

    fn scorer(&self, shape: &CacheShape, group: KvGroup) -> Box<dyn PageScorer> {
        self.policy.scorer(shape, group)
    }
}
