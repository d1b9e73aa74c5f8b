//! KV-Compress: squared attention, and the cheapest blocks of all heads and layers go.

use super::pool_kind::{ODD_KERNEL, PoolKind, odd_kernel};
use crate::allotment::Allotment;
use crate::attention_rows::{AttentionRows, RowSource, RowTap, Taps, is_row};
use crate::pins::RecentPages;
use crate::policy::{EvictionPolicy, PolicyError, Schedule};
use crate::policy_options::{OptionKey, OptionSet, at_least};
use crate::resident_tokens::ResidentTokens;
use crate::shape::{CacheShape, KvGroup};
use crate::token_policy::{Axes, Options, TokenMethod, TokenScorer};
use crate::token_table::TokenTable;

/// The policy `kv-compress` (Rehg 2024): the squares of the attention of the last `window` queries, the largest within `kernel`
/// tokens of each query head, summed over a group's heads; the squares of each decoded row come on top. The newest 64 tokens stay,
/// and pages are bought back from all layers and heads by their [prices](Allotment::Prices).
///
/// A block is a page, which goes with all its tokens and at the price of the dearest one. With `granularity=token` it is the paper's:
/// single tokens are evicted wherever they lie and others moved, at the prices of [`BlockPrices`](crate::BlockPrices). `preset=kvc-w` observes and protects 8 tokens, as in the
/// authors' runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvCompress {
    /// `window`: queries observed.
    pub window: usize,
    /// `power`: that attention is raised to, 1 or 2.
    pub power: u8,
    /// `kernel`: tokens whose largest counts for each, odd.
    pub kernel: usize,
    /// `buffer`: a query does not count for so many tokens up to its own.
    pub buffer: u32,
}

impl Default for KvCompress {
    fn default() -> Self {
        Self { window: 32, power: 2, kernel: 7, buffer: 0 }
    }
}

const OPTIONS: OptionSet<Options<KvCompress>> = OptionSet {
    policy: KvCompress::NAME,
    keys: &[
        &[
            OptionKey {
                key: "window",
                expected: "a number of queries, 1 or more",
                read: |options, text| at_least(text, 1).map(|window| options.method.window = window),
                show: |options| options.method.window.to_string(),
            },
            OptionKey {
                key: "power",
                expected: "1 or 2",
                read: |options, text| {
                    let power = text.parse().ok().filter(|power| (1..=2).contains(power))?;
                    options.method.power = power;
                    Some(())
                },
                show: |options| options.method.power.to_string(),
            },
            OptionKey {
                key: "kernel",
                expected: ODD_KERNEL,
                read: |options, text| odd_kernel(text).map(|kernel| options.method.kernel = kernel),
                show: |options| options.method.kernel.to_string(),
            },
            OptionKey {
                key: "buffer",
                expected: "a number of tokens, 0 or more",
                read: |options, text| text.parse().ok().map(|buffer| options.method.buffer = buffer),
                show: |options| options.method.buffer.to_string(),
            },
        ],
        Options::HEADS,
        Options::AXES,
    ],
    without: &[],
    presets: &[("kvc-w", || Options { method: KvCompress { window: 8, ..KvCompress::default() }, axes: axes(8) })],
    default: || Options { method: KvCompress::default(), axes: axes(64) },
};

fn axes(protected: usize) -> Axes {
    let recent = RecentPages::Tokens(protected);
    Axes { sinks: 0, recent, allotment: Allotment::Prices, ..Axes::default() }
}

impl KvCompress {
    /// The policy's name on a command line.
    pub const NAME: &'static str = "kv-compress";

    pub(crate) fn parse(options: Option<&str>) -> Result<Box<dyn EvictionPolicy>, PolicyError> {
        OPTIONS.parse(options).map(|options| OPTIONS.policy(options))
    }
}

impl TokenMethod for KvCompress {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn needs(&self, schedule: Schedule) -> Taps {
        let step_rows = schedule.goes_on();
        Taps { prompt: RowTap::Window(self.window), step_rows, ..Taps::default() }
    }

    fn scorer(&self, shape: &CacheShape, _group: KvGroup) -> Box<dyn TokenScorer> {
        let heads = TokenTable::new(shape.group_size);
        Box::new(KvCompressScorer { options: *self, heads, metric: TokenTable::new(1), reading: false, bad_rows: 0 })
    }
}

#[derive(Clone)]
struct KvCompressScorer {
    options: KvCompress,
    /// What each head gave so far, a column each, while a prompt is read.
    heads: TokenTable,
    metric: TokenTable,
    reading: bool,
    bad_rows: u64,
}

impl KvCompressScorer {
    /// What a mass counts.
    fn raised(power: u8, mass: f32) -> f64 {
        f64::from(mass).powi(i32::from(power))
    }
}

impl TokenScorer for KvCompressScorer {
    fn observe(&mut self, rows: AttentionRows<'_>) {
        let KvCompress { power, buffer, .. } = self.options;
        let is_step = rows.source == RowSource::Step;
        if !is_step && !std::mem::replace(&mut self.reading, true) {
            self.heads.clear();
        }
        let table = if is_step { &mut self.metric } else { &mut self.heads };
        table.align(rows.positions);
        for row in 0..rows.num_rows() {
            let query = rows.num_seen(row) - 1;
            // The columns far enough before the query's own.
            let far =
                rows.positions.partition_point(|&position| position.saturating_add(buffer) <= rows.positions[query]);
            for head in 0..rows.group_size {
                let masses = rows.head(row, head);
                if !is_row(masses) {
                    self.bad_rows += 1;
                    continue;
                }
                let sums = table.column_mut(if is_step { 0 } else { head });
                sums.iter_mut().zip(&masses[..far]).for_each(|(sum, &mass)| *sum += Self::raised(power, mass));
            }
        }
    }

    fn end_prompt(&mut self) {
        if !std::mem::take(&mut self.reading) {
            return; // no rows since the last prompt: what was known stays
        }
        let num_heads = self.heads.num_columns();
        let heads = std::mem::replace(&mut self.heads, TokenTable::new(num_heads));
        self.metric.clear();
        self.metric.align(heads.positions());
        for head in 0..num_heads {
            let pooled = PoolKind::Max.along(heads.positions(), heads.column(head), self.options.kernel);
            self.metric.column_mut(0).iter_mut().zip(pooled).for_each(|(sum, head)| *sum += head);
        }
    }

    fn score(&mut self, tokens: ResidentTokens<'_>, out: &mut Vec<f32>) {
        out.extend(self.metric.at(0, tokens.positions).map(|metric| metric as f32));
    }

    fn retain(&mut self, positions: &[u32]) {
        self.metric.align(positions);
        self.metric.shrink();
    }

    fn nan_rows(&self) -> u64 {
        self.bad_rows
    }

    fn state_bytes(&self) -> u64 {
        (size_of::<Self>() + self.heads.bytes() + self.metric.bytes()) as u64
    }
}
