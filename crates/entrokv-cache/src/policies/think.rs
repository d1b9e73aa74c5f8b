//! ThinK: channels of keys that weigh little in the logits go.

use super::all_alike::AllAlike;
use crate::attention_rows::Taps;
use crate::key_channels::KeyChannels;
use crate::policy::{EvictionPolicy, LeastBudget, PolicyError, Schedule};
use crate::policy_options::{OptionKey, OptionSet, at_least};
use crate::shape::{CacheShape, KvGroup};
use crate::token_policy::{Axes, Options, TokenMethod, TokenScorer};

/// The policy `think` (Xu et al. 2024): at a prompt's end the channels of each KV head that weigh least in the logits of the last
/// `window` queries are cleared in its keys, but for those of the `recent` newest tokens; keys that come later are whole.
///
/// A page here has all channels, so a cleared one takes the room it took: attention is that of the paper, and nothing is freed.
/// Defaults are those of the authors' code; `recent=0` is kvpress's form.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Think {
    /// What goes.
    pub channels: KeyChannels,
}

impl Default for Think {
    fn default() -> Self {
        Self { channels: KeyChannels { window: 32, fraction: 0.4, recent: 128 } }
    }
}

const OPTIONS: OptionSet<Options<Think>> = OptionSet {
    policy: Think::NAME,
    keys: &[&[
        OptionKey {
            key: "fraction",
            expected: "a part of the channels from 0 to below 1",
            read: |options, text| {
                let fraction = text.parse().ok().filter(|part| (0.0..1.0).contains(part))?;
                options.method.channels.fraction = fraction;
                Some(())
            },
            show: |options| options.method.channels.fraction.to_string(),
        },
        OptionKey {
            key: "window",
            expected: "a number of queries, 1 or more",
            read: |options, text| at_least(text, 1).map(|window| options.method.channels.window = window),
            show: |options| options.method.channels.window.to_string(),
        },
        OptionKey {
            key: "recent",
            expected: "a number of tokens, 0 or more",
            read: |options, text| at_least(text, 0).map(|recent| options.method.channels.recent = recent),
            show: |options| options.method.channels.recent.to_string(),
        },
    ]],
    without: &[],
    presets: &[],
    // Nothing goes, so nothing need be pinned.
    default: || Options { method: Think::default(), axes: Axes { sinks: 0, ..Axes::default() } },
};

impl Think {
    /// The policy's name on a command line.
    pub const NAME: &'static str = "think";

    pub(crate) fn parse(options: Option<&str>) -> Result<Box<dyn EvictionPolicy>, PolicyError> {
        OPTIONS.parse(options).map(|options| OPTIONS.policy(options))
    }
}

impl TokenMethod for Think {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn needs(&self, _schedule: Schedule) -> Taps {
        Taps::default()
    }

    fn least_budget(&self) -> LeastBudget {
        LeastBudget::Everything
    }

    fn key_channels(&self) -> Option<KeyChannels> {
        Some(self.channels)
    }

    fn scorer(&self, _shape: &CacheShape, _group: KvGroup) -> Box<dyn TokenScorer> {
        Box::new(AllAlike)
    }
}
