//! CriticalKV: half of the budget by attention, the rest by what a token adds to the layer's output.

use std::sync::Arc;

use super::{Cur, ExpectedAttention, H2o, LagKv, ObservedAttention, SnapKv, Tova};
use crate::attention_rows::{AttentionRows, Taps};
use crate::pins::RecentPages;
use crate::policy::{EvictionPolicy, PolicyError, Schedule};
use crate::policy_options::{OptionKey, OptionSet};
use crate::resident_tokens::{OutputTap, ResidentTokens};
use crate::second_stage::SecondStage;
use crate::shape::{CacheShape, KvGroup};
use crate::token_policy::{Axes, Options, TokenMethod, TokenScorer};

/// The policy `critical-kv` (Feng et al. 2025): with `s` the score of another method, a part `first` of the budget goes to the best
/// by `s`, the rest to the best by `(s + epsilon) |W_O^T v|_1`, the norm averaged over the heads of a group.
///
/// Shares of a budget are allotted by `s`, so `allot=ada-floor:0.2` is the adaptive form. Methods are those whose scores are never
/// negative, with their defaults; expected attention leaves its own norm of the value out. Four sinks and the newest 32 tokens stay
/// whatever the method.
#[derive(Clone, Debug)]
pub struct CriticalKv {
    /// `inner`: the method.
    pub inner: Arc<dyn TokenMethod>,
    /// `first`: part of the budget that its score alone settles.
    pub first: f64,
    /// `epsilon`: added to its score, so that the norm tells where the score is 0.
    pub epsilon: f64,
}

/// The methods that `inner` may name.
fn methods() -> [Arc<dyn TokenMethod>; 7] {
    [
        Arc::new(SnapKv::default()),
        Arc::new(ExpectedAttention { value_norm: false, ..ExpectedAttention::default() }),
        Arc::new(H2o),
        Arc::new(ObservedAttention),
        Arc::new(Tova),
        Arc::new(Cur::default()),
        Arc::new(LagKv::default()),
    ]
}

impl Default for CriticalKv {
    fn default() -> Self {
        Self { inner: Arc::new(SnapKv::default()), first: 0.5, epsilon: 1e-4 }
    }
}

const OPTIONS: OptionSet<Options<CriticalKv>> = OptionSet {
    policy: CriticalKv::NAME,
    keys: &[
        &[
            OptionKey {
                key: "inner",
                expected: "snapkv, expected-attention, h2o, observed-attention, tova, cur or lagkv",
                read: |options, text| {
                    options.method.inner = methods().into_iter().find(|method| method.name() == text)?;
                    Some(())
                },
                show: |options| options.method.inner.name().to_owned(),
            },
            OptionKey {
                key: "first",
                expected: "a part from 0 to 1",
                read: |options, text| {
                    options.method.first = text.parse().ok().filter(|part| (0.0..=1.0).contains(part))?;
                    Some(())
                },
                show: |options| options.method.first.to_string(),
            },
            OptionKey {
                key: "epsilon",
                expected: "a number from 0 to 1",
                read: |options, text| {
                    options.method.epsilon = text.parse().ok().filter(|number| (0.0..=1.0).contains(number))?;
                    Some(())
                },
                show: |options| options.method.epsilon.to_string(),
            },
        ],
        Options::AXES,
    ],
    // Heads have norms of their own.
    without: &["share"],
    presets: &[],
    default: || Options {
        method: CriticalKv::default(),
        axes: Axes { recent: RecentPages::Tokens(32), ..Axes::default() },
    },
};

impl CriticalKv {
    /// The policy's name on a command line.
    pub const NAME: &'static str = "critical-kv";

    pub(crate) fn parse(options: Option<&str>) -> Result<Box<dyn EvictionPolicy>, PolicyError> {
        OPTIONS.parse(options).map(|options| OPTIONS.policy(options))
    }
}

impl TokenMethod for CriticalKv {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn needs(&self, schedule: Schedule) -> Taps {
        Taps { output: OutputTap::Norms, ..self.inner.needs(schedule) }
    }

    fn scorer(&self, shape: &CacheShape, group: KvGroup) -> Box<dyn TokenScorer> {
        let inner = self.inner.scorer(shape, group);
        Box::new(CriticalScorer { inner, first: self.first, epsilon: self.epsilon, second: Vec::new() })
    }
}

#[derive(Clone)]
struct CriticalScorer {
    inner: Box<dyn TokenScorer>,
    first: f64,
    epsilon: f64,
    second: Vec<f32>,
}

impl TokenScorer for CriticalScorer {
    fn observe(&mut self, rows: AttentionRows<'_>) {
        self.inner.observe(rows);
    }

    fn end_prompt(&mut self) {
        self.inner.end_prompt();
    }

    fn score(&mut self, tokens: ResidentTokens<'_>, out: &mut Vec<f32>) {
        self.inner.score(tokens, out);
        let norms = out.iter().zip(tokens.output_norms);
        self.second.clear();
        self.second.extend(norms.map(|(&score, &norm)| ((f64::from(score) + self.epsilon) * f64::from(norm)) as f32));
    }

    fn second_stage(&self) -> Option<SecondStage<'_>> {
        Some(SecondStage { share: self.first, scores: &self.second })
    }

    fn retain(&mut self, positions: &[u32]) {
        self.inner.retain(positions);
        // Made anew at the next decision.
        self.second = Vec::new();
    }

    fn nan_rows(&self) -> u64 {
        self.inner.nan_rows()
    }

    fn state_bytes(&self) -> u64 {
        self.inner.state_bytes() + (size_of::<Self>() + self.second.capacity() * size_of::<f32>()) as u64
    }
}
