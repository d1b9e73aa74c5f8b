//! SnapKV: what the last queries of the prompt attend to stays, with its neighbourhood.

use super::pool_kind::{ODD_KERNEL, POOLS, PoolKind, odd_kernel};
use super::row_sums::RowSums;
use crate::attention_rows::{AttentionRows, RowSource, RowTap, Taps};
use crate::pins::RecentPages;
use crate::policy::{EvictionPolicy, PolicyError, Schedule};
use crate::policy_options::{OptionKey, OptionSet, at_least, spelling, word};
use crate::resident_tokens::ResidentTokens;
use crate::shape::{CacheShape, KvGroup};
use crate::token_policy::{Axes, Options, TokenMethod, TokenScorer};

/// The policy `snapkv` (Li et al. 2024): the mean attention of the last `window` queries and of a group's heads, pooled along
/// the tokens before the window with a kernel of `kernel`. The window itself stays.
///
/// Defaults are those of the authors' code. `preset=kvpress` is a window of 64. While decoding, which the paper leaves open,
/// a row of attention counts `1 / window` and what was known the rest, a running mean of as many rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnapKv {
    /// `window`: queries observed, and newest tokens kept.
    pub window: usize,
    /// `kernel`: tokens pooled together, odd.
    pub kernel: usize,
    /// `pool`: how.
    pub pool: PoolKind,
}

impl Default for SnapKv {
    fn default() -> Self {
        Self { window: 32, kernel: 5, pool: PoolKind::Average }
    }
}

const OPTIONS: OptionSet<Options<SnapKv>> = OptionSet {
    policy: SnapKv::NAME,
    keys: &[SnapKv::KEYS, Options::HEADS, Options::AXES],
    without: SnapKv::WITHOUT,
    presets: &[
        ("official", || Options { method: SnapKv::default(), axes: SnapKv::axes() }),
        ("kvpress", || Options { method: SnapKv { window: 64, ..SnapKv::default() }, axes: SnapKv::axes() }),
    ],
    default: || Options { method: SnapKv::default(), axes: SnapKv::axes() },
};

impl SnapKv {
    /// The policy's name on a command line.
    pub const NAME: &'static str = "snapkv";

    /// Its own options, in canonical order.
    pub(super) const KEYS: &'static [OptionKey<Options<Self>>] = &[
        OptionKey {
            key: "window",
            expected: "a number of queries, 1 or more",
            read: |options, text| at_least(text, 1).map(|window| options.method.window = window),
            show: |options| options.method.window.to_string(),
        },
        OptionKey {
            key: "kernel",
            expected: ODD_KERNEL,
            read: |options, text| odd_kernel(text).map(|kernel| options.method.kernel = kernel),
            show: |options| options.method.kernel.to_string(),
        },
        OptionKey {
            key: "pool",
            expected: "avg or max",
            read: |options, text| word(text, &POOLS).map(|pool| options.method.pool = pool),
            show: |options| spelling(options.method.pool, &POOLS),
        },
    ];

    /// The newest pages are those of the window.
    pub(super) const WITHOUT: &'static [&'static str] = &["recent"];

    /// The window is all that stays whatever its scores.
    pub(super) fn axes() -> Axes {
        Axes { sinks: 0, ..Axes::default() }
    }

    pub(crate) fn parse(options: Option<&str>) -> Result<Box<dyn EvictionPolicy>, PolicyError> {
        Self::parse_as(&OPTIONS, options)
    }

    /// The policy of a set of options that ends in SnapKV's scores.
    pub(super) fn parse_as(
        set: &OptionSet<Options<Self>>,
        options: Option<&str>,
    ) -> Result<Box<dyn EvictionPolicy>, PolicyError> {
        let mut options = set.parse(options)?;
        options.axes.recent = RecentPages::Tokens(options.method.window);
        Ok(set.policy(options))
    }
}

impl TokenMethod for SnapKv {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn needs(&self, schedule: Schedule) -> Taps {
        let step_rows = schedule.goes_on();
        Taps { prompt: RowTap::Window(self.window), step_rows, ..Taps::default() }
    }

    fn scorer(&self, _shape: &CacheShape, _group: KvGroup) -> Box<dyn TokenScorer> {
        Box::new(SnapKvScorer { options: *self, rows: RowSums::new(), reading: false })
    }
}

#[derive(Clone)]
struct SnapKvScorer {
    options: SnapKv,
    /// Sums over the window's rows while a prompt is read, then scores.
    rows: RowSums,
    reading: bool,
}

impl TokenScorer for SnapKvScorer {
    fn observe(&mut self, rows: AttentionRows<'_>) {
        if rows.source == RowSource::Step {
            let fresh = 1.0 / self.options.window as f64;
            self.rows.add(rows, 1.0 - fresh, fresh);
            return;
        }
        if !std::mem::replace(&mut self.reading, true) {
            self.rows.clear();
        }
        self.rows.add(rows, 1.0, 1.0);
    }

    fn end_prompt(&mut self) {
        if !std::mem::take(&mut self.reading) {
            return; // no rows since the last prompt: what was known stays
        }
        let num_rows = self.rows.num_rows().max(1) as f64;
        self.rows.sums_mut().iter_mut().for_each(|sum| *sum /= num_rows);
        let num_before = self.rows.sums().len().saturating_sub(self.options.window);
        let positions = &self.rows.positions()[..num_before];
        let before = &self.rows.sums()[..num_before];
        let pooled = self.options.pool.along(positions, before, self.options.kernel);
        self.rows.sums_mut()[..num_before].copy_from_slice(&pooled);
    }

    fn score(&mut self, tokens: ResidentTokens<'_>, out: &mut Vec<f32>) {
        out.extend(self.rows.at(tokens.positions).map(|score| score as f32));
    }

    fn retain(&mut self, positions: &[u32]) {
        self.rows.retain(positions);
    }

    fn nan_rows(&self) -> u64 {
        self.rows.bad_rows()
    }

    fn state_bytes(&self) -> u64 {
        self.rows.bytes()
    }
}
