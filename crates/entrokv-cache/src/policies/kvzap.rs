//! KVzap: a learned map of a layer's input predicts the logarithm of KVzip's score.

use std::path::{Path, PathBuf};

use super::past_window;
use crate::attention_rows::Taps;
use crate::gate_tap::GateTap;
use crate::policy::{EvictionPolicy, PolicyError, Release, Schedule};
use crate::policy_options::{OptionKey, OptionSet, at_least, file, file_text};
use crate::resident_tokens::ResidentTokens;
use crate::shape::{CacheShape, KvGroup};
use crate::token_policy::{Axes, Options, TokenMethod, TokenScorer};

/// The policy `kvzap` (Jegou and Jeblick 2026): the score is what the gate of its layer says of a token, the predicted logarithm of
/// its KVzip score.
///
/// With a threshold `tau` every token below it goes once `window` later ones have come, however much the budget has room for;
/// the budget stays the cap, and lower scores go first where it binds. Without one the budget alone decides, and no window is kept.
/// As in the paper, no sinks are protected.
#[derive(Clone, Debug, PartialEq)]
pub struct Kvzap {
    /// `gates`: the file of the gates; a policy without one scores nothing.
    pub gates: Option<PathBuf>,
    /// `tau`: the threshold; published ones are -3 to -6 (Qwen3-8B) and -6 to -9 (Llama-3.1-8B).
    pub tau: Option<f32>,
    /// `window`: newest tokens that the threshold does not touch, 1 or more.
    pub window: usize,
}

impl Default for Kvzap {
    fn default() -> Self {
        Self { gates: None, tau: None, window: 128 }
    }
}

const OPTIONS: OptionSet<Options<Kvzap>> = OptionSet {
    policy: Kvzap::NAME,
    keys: &[
        &[
            OptionKey {
                key: "gates",
                expected: "a file",
                read: |options, text| file(text).map(|gates| options.method.gates = Some(gates)),
                show: |options| file_text(options.method.gates.as_deref()),
            },
            OptionKey {
                key: "tau",
                expected: "a threshold, or none",
                read: |options, text| {
                    let number = || text.parse().ok().filter(|tau: &f32| tau.is_finite());
                    options.method.tau = if text == "none" { None } else { Some(number()?) };
                    Some(())
                },
                show: |options| options.method.tau.map_or("none".to_owned(), |tau| tau.to_string()),
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
    default: || Options { method: Kvzap::default(), axes: Axes { sinks: 0, ..Axes::default() } },
};

impl Kvzap {
    /// The policy's name on a command line.
    pub const NAME: &'static str = "kvzap";

    pub(crate) fn parse(options: Option<&str>) -> Result<Box<dyn EvictionPolicy>, PolicyError> {
        OPTIONS.parse(options).map(|options| OPTIONS.policy(options))
    }
}

impl TokenMethod for Kvzap {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn needs(&self, _schedule: Schedule) -> Taps {
        Taps::of_gate(GateTap::Kvzap)
    }

    fn release(&self) -> Release {
        if self.tau.is_some() { Release::Marked } else { Release::OverBudget }
    }

    fn file(&self) -> Option<&Path> {
        self.gates.as_deref()
    }

    fn scorer(&self, _shape: &CacheShape, _group: KvGroup) -> Box<dyn TokenScorer> {
        Box::new(KvzapScorer { tau: self.tau, window: self.window })
    }
}

#[derive(Clone)]
struct KvzapScorer {
    tau: Option<f32>,
    window: usize,
}

impl TokenScorer for KvzapScorer {
    fn score(&mut self, tokens: ResidentTokens<'_>, out: &mut Vec<f32>) {
        let old = past_window(tokens, self.window);
        out.extend(tokens.gates.iter().enumerate().map(|(token, &gate)| match self.tau {
            Some(tau) if gate < tau && token < old => f32::NEG_INFINITY,
            // What is no number is the lowest, but not marked to go.
            _ => gate.max(f32::MIN),
        }));
    }
}
