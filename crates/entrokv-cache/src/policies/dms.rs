//! DMS: a model that was trained to say of each token whether it may be forgotten.

use std::path::{Path, PathBuf};

use super::past_window;
use crate::attention_rows::Taps;
use crate::gate_tap::GateTap;
use crate::policy::{EvictionPolicy, PolicyError, Release, Schedule};
use crate::policy_options::{OptionKey, OptionSet, at_least, file, file_text};
use crate::resident_tokens::ResidentTokens;
use crate::shape::{CacheShape, KvGroup};
use crate::token_policy::{Axes, Options, TokenMethod, TokenScorer};

/// The policy `dms` (Lancucki et al. 2025): `scale q - offset`, `q` being the last channel of a group's first query head before
/// RoPE, or what a projection of the layer's input says. Where that is above 0 the token is marked to go once `window` later ones
/// have come. Where the budget binds, those of the largest go first.
///
/// The model must be one that was trained for it: its channel carries the decision and is hidden from attention. A prompt is read
/// densely here and evicted from at its end, where the authors' queries no longer see what has been marked for so long.
#[derive(Clone, Debug, PartialEq)]
pub struct Dms {
    /// `gates`: the file of the projections, for models whose queries carry no decision.
    pub gates: Option<PathBuf>,
    /// `scale`.
    pub scale: f32,
    /// `offset`.
    pub offset: f32,
    /// `window`: later tokens after which a marked one goes, 1 or more.
    pub window: usize,
}

impl Default for Dms {
    fn default() -> Self {
        Self { gates: None, scale: 100.0, offset: 5.0, window: 512 }
    }
}

const OPTIONS: OptionSet<Options<Dms>> = OptionSet {
    policy: Dms::NAME,
    keys: &[
        &[
            OptionKey {
                key: "gates",
                expected: "a file",
                read: |options, text| file(text).map(|gates| options.method.gates = Some(gates)),
                show: |options| file_text(options.method.gates.as_deref()),
            },
            OptionKey {
                key: "scale",
                expected: "a number above 0",
                read: |options, text| finite(text).filter(|x| *x > 0.0).map(|scale| options.method.scale = scale),
                show: |options| options.method.scale.to_string(),
            },
            OptionKey {
                key: "offset",
                expected: "a number",
                read: |options, text| finite(text).map(|offset| options.method.offset = offset),
                show: |options| options.method.offset.to_string(),
            },
            OptionKey {
                key: "window",
                expected: "a number of tokens, 1 or more",
                read: |options, text| at_least(text, 1).map(|window| options.method.window = window),
                show: |options| options.method.window.to_string(),
            },
        ],
        Options::AXES,
    ],
    without: &[],
    presets: &[],
    default: || Options { method: Dms::default(), axes: Axes { sinks: 0, ..Axes::default() } },
};

fn finite(text: &str) -> Option<f32> {
    text.parse().ok().filter(|x: &f32| x.is_finite())
}

impl Dms {
    /// The policy's name on a command line.
    pub const NAME: &'static str = "dms";

    pub(crate) fn parse(options: Option<&str>) -> Result<Box<dyn EvictionPolicy>, PolicyError> {
        OPTIONS.parse(options).map(|options| OPTIONS.policy(options))
    }
}

impl TokenMethod for Dms {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn needs(&self, _schedule: Schedule) -> Taps {
        Taps::of_gate(if self.gates.is_some() { GateTap::Projection } else { GateTap::QueryChannel })
    }

    fn release(&self) -> Release {
        Release::Marked
    }

    fn file(&self) -> Option<&Path> {
        self.gates.as_deref()
    }

    fn scorer(&self, _shape: &CacheShape, _group: KvGroup) -> Box<dyn TokenScorer> {
        Box::new(DmsScorer { scale: self.scale, offset: self.offset, window: self.window })
    }
}

#[derive(Clone)]
struct DmsScorer {
    scale: f32,
    offset: f32,
    window: usize,
}

impl TokenScorer for DmsScorer {
    fn score(&mut self, tokens: ResidentTokens<'_>, out: &mut Vec<f32>) {
        let old = past_window(tokens, self.window);
        out.extend(tokens.gates.iter().enumerate().map(|(token, &gate)| {
            let logit = self.scale * gate - self.offset;
            // What is no number is the lowest, but not marked to go.
            if logit > 0.0 && token < old { f32::NEG_INFINITY } else { (-logit).max(f32::MIN) }
        }));
    }
}
