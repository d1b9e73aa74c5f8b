//! The arithmetic mean of a group's heads, the baseline Page-EntroKV departs from in one line.

use std::fmt;

use crate::allotment::Allotment;
use crate::attention_rows::Taps;
use crate::page_entro_kv::{OPTION_KEYS, PRESETS, PageEntroKv, PageEntroKvOptions, Pooling};
use crate::pins::Pins;
use crate::policy::{EvictionPolicy, Granularity, PageScorer, PolicyError, Schedule};
use crate::policy_options::OptionSet;
use crate::shape::{CacheShape, KvGroup};

/// The mean has neither weights nor, hence, entropies.
const OPTIONS: OptionSet<PageEntroKvOptions> = OptionSet {
    policy: MeanPages::NAME,
    keys: &[OPTION_KEYS],
    without: &["alpha", "tau", "pooling"],
    presets: PRESETS,
    default: PageEntroKvOptions::default,
};

/// The policy `mean-pages`: `s(t) = sum_h A_h(t) / r`, all else as in [`PageEntroKv`].
///
/// It takes the options of [`PageEntroKv`] but `pooling`, `alpha` and `tau`, which it has no use for.
#[derive(Clone, Debug, PartialEq)]
pub struct MeanPages(PageEntroKv);

impl MeanPages {
    /// The policy's name on a command line.
    pub const NAME: &'static str = "mean-pages";

    /// The policy with options read from `key=value` items parted by commas, or its defaults for `None`.
    ///
    /// # Errors
    /// [`PolicyError`] for an option that is not known, out of range, or given twice.
    pub fn parse(options: Option<&str>) -> Result<Self, PolicyError> {
        Ok(Self(PageEntroKv::new(PageEntroKvOptions { pooling: Pooling::Mean, ..OPTIONS.parse(options)? })?))
    }

    /// The options, with mean pooling among them.
    #[must_use]
    pub fn options(&self) -> &PageEntroKvOptions {
        self.0.options()
    }
}

/// The canonical text, as [`PageEntroKv`]'s.
impl fmt::Display for MeanPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        OPTIONS.write(self.options(), f)
    }
}

impl EvictionPolicy for MeanPages {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn needs(&self) -> Taps {
        self.0.needs()
    }

    fn schedule(&self) -> Schedule {
        self.0.schedule()
    }

    fn pins(&self) -> Pins {
        self.0.pins()
    }

    fn allotment(&self) -> Allotment {
        self.0.allotment()
    }

    fn granularity(&self) -> Granularity {
        self.0.granularity()
    }

    fn scorer(&self, shape: &CacheShape, group: KvGroup) -> Box<dyn PageScorer> {
        self.0.scorer(shape, group)
    }
}
