//! SnapKV: what the last queries of the prompt attend to stays, with its neighbourhood.

use super::row_sums::RowSums;
use crate::attention_rows::{AttentionRows, RowSource, RowTap, Taps};
use crate::pins::RecentPages;
use crate::policy::{EvictionPolicy, PolicyError, Schedule};
use crate::policy_options::{OptionKey, OptionSet, at_least, spelling, word};
use crate::resident_tokens::{ResidentTokens, TokenTap};
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

/// How neighbouring scores become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolKind {
    /// Their mean, tokens beyond the ends counting 0.
    Average,
    /// The largest.
    Max,
}

const POOLS: [(&str, PoolKind); 2] = [("avg", PoolKind::Average), ("max", PoolKind::Max)];

impl Default for SnapKv {
    fn default() -> Self {
        Self { window: 32, kernel: 5, pool: PoolKind::Average }
    }
}

const OPTIONS: OptionSet<Options<SnapKv>> = OptionSet {
    policy: SnapKv::NAME,
    keys: &[
        &[
            OptionKey {
                key: "window",
                expected: "a number of queries, 1 or more",
                read: |options, text| at_least(text, 1).map(|window| options.method.window = window),
                show: |options| options.method.window.to_string(),
            },
            OptionKey {
                key: "kernel",
                expected: "an odd number of tokens from 1 to 255",
                read: |options, text| {
                    let kernel = text.parse().ok().filter(|kernel| kernel % 2 == 1 && *kernel <= 255)?;
                    options.method.kernel = kernel;
                    Some(())
                },
                show: |options| options.method.kernel.to_string(),
            },
            OptionKey {
                key: "pool",
                expected: "avg or max",
                read: |options, text| word(text, &POOLS).map(|pool| options.method.pool = pool),
                show: |options| spelling(options.method.pool, &POOLS),
            },
        ],
        Options::HEADS,
        Options::AXES,
    ],
    // The newest pages are those of the window.
    without: &["recent"],
    presets: &[
        ("official", || Options { method: SnapKv::default(), axes: SnapKv::axes() }),
        ("kvpress", || Options { method: SnapKv { window: 64, ..SnapKv::default() }, axes: SnapKv::axes() }),
    ],
    default: || Options { method: SnapKv::default(), axes: SnapKv::axes() },
};

impl SnapKv {
    /// The policy's name on a command line.
    pub const NAME: &'static str = "snapkv";

    /// The window is all that stays whatever its scores.
    fn axes() -> Axes {
        Axes { sinks: 0, ..Axes::default() }
    }

    pub(crate) fn parse(options: Option<&str>) -> Result<Box<dyn EvictionPolicy>, PolicyError> {
        let mut options = OPTIONS.parse(options)?;
        options.axes.recent = RecentPages::Tokens(options.method.window);
        Ok(OPTIONS.policy(options))
    }
}

impl TokenMethod for SnapKv {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn needs(&self, schedule: Schedule) -> Taps {
        let step_rows = schedule.goes_on();
        Taps { prompt: RowTap::Window(self.window), step_rows, tokens: TokenTap::None }
    }

    fn scorer(&self, _shape: &CacheShape, _group: KvGroup) -> Box<dyn TokenScorer> {
        Box::new(SnapKvScorer { options: *self, rows: RowSums::new(), reading: false })
    }
}

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
        let pooled = pooled(positions, &self.rows.sums()[..num_before], self.options.kernel, self.options.pool);
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

/// `values` pooled along `positions` (ascending) with an odd `kernel`: neighbours are those within half of it, and where there is
/// none a mean counts 0.
fn pooled(positions: &[u32], values: &[f64], kernel: usize, kind: PoolKind) -> Vec<f64> {
    let reach = (kernel / 2) as u32;
    let (mut start, mut end) = (0, 0);
    positions
        .iter()
        .map(|&position| {
            start += positions[start..].iter().take_while(|&&other| other < position.saturating_sub(reach)).count();
            end += positions[end..].iter().take_while(|&&other| other <= position.saturating_add(reach)).count();
            let near = values[start..end].iter().copied();
            match kind {
                PoolKind::Average => near.sum::<f64>() / kernel as f64,
                PoolKind::Max => near.fold(0.0, f64::max),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn averages_count_what_lies_beyond_the_ends_as_nothing() {
        let pool = |values: &[f64], kernel, kind| {
            let positions: Vec<u32> = (0..values.len() as u32).collect();
            pooled(&positions, values, kernel, kind)
        };
        assert_eq!(pool(&[1.0; 6], 5, PoolKind::Average), [0.6, 0.8, 1.0, 1.0, 0.8, 0.6]);
        assert_eq!(pool(&[0.0, 3.0, 1.0, 0.0, 0.0], 3, PoolKind::Max), [3.0, 3.0, 3.0, 1.0, 0.0]);
        assert_eq!(pool(&[0.5, 0.25], 1, PoolKind::Average), [0.5, 0.25]);
        // After an eviction only neighbours in position are neighbours.
        assert_eq!(pooled(&[0, 7, 8], &[1.0, 1.0, 1.0], 3, PoolKind::Average), [1.0, 2.0, 2.0].map(|x| x / 3.0));
    }
}
