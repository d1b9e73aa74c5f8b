//! The object `generate --json` prints.

use std::collections::BTreeMap;
use std::time::Duration;

use entrokv::{Completion, KvReport, Timing};
use serde::Serialize;

/// An answer and what it cost.
#[derive(Serialize)]
pub(crate) struct CompletionJson {
    text: String,
    tokens: Vec<u32>,
    finish_reason: &'static str,
    usage: Usage,
    kv: Kv,
    timing: Times,
}

#[derive(Serialize)]
struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
}

/// The cache as the pool counts it, bytes of payload unless they say otherwise.
#[derive(Serialize)]
pub(crate) struct Kv {
    logical_tokens: usize,
    pub(crate) bytes_held: u64,
    /// What the budget resolved to; without one, what is held.
    pub(crate) bytes_budget: u64,
    bytes_full: u64,
    bytes_window: u64,
    /// Block tables and constants of codes.
    bytes_metadata: u64,
    bytes_policy_state: u64,
    bytes_appended: u64,
    /// The most of each at any time: of what is held, of windows, of metadata, of policy state.
    bytes_peak: u64,
    bytes_window_peak: u64,
    bytes_metadata_peak: u64,
    bytes_policy_state_peak: u64,
    /// Steps that ended over a rolling budget: 0.
    budget_violations: u64,
    /// Pages of all layers by cache type.
    types: BTreeMap<String, TypeRow>,
    pages_evicted: u64,
    /// Pages that the last step of decoding read, where the policy chose them; `null` where it read all.
    pages_read: Option<u64>,
    /// Pages held over pages one choice per KV group needs: 1 where pooling works.
    uor: f64,
    /// What heads choosing alone would have had to hold, in the same unit.
    uor_per_head: f64,
    nan_rows: u64,
    budget_raised: bool,
}

#[derive(Serialize)]
struct TypeRow {
    pages: u64,
    bytes: u64,
}

#[derive(Serialize)]
struct Times {
    load_s: f64,
    prefill_s: f64,
    prefill_tokens_per_s: f64,
    /// Repeating the prompt for the policy.
    pass_s: f64,
    decode_tokens_per_s: f64,
    observe_s: f64,
    evict_s: f64,
    encode_s: f64,
}

impl Kv {
    pub(crate) fn new(report: &KvReport) -> Self {
        Self {
            logical_tokens: report.logical_tokens,
            bytes_held: report.bytes_held,
            bytes_budget: report.bytes_budget.unwrap_or(report.bytes_full),
            bytes_full: report.bytes_full,
            bytes_window: report.bytes_window,
            bytes_metadata: report.bytes_metadata,
            bytes_policy_state: report.bytes_policy_state,
            bytes_appended: report.bytes_appended,
            bytes_peak: report.peak.held,
            bytes_window_peak: report.peak.window,
            bytes_metadata_peak: report.peak.metadata,
            bytes_policy_state_peak: report.peak.policy_state,
            budget_violations: report.budget_violations,
            types: report
                .kinds
                .iter()
                .map(|held| (held.kind.to_string(), TypeRow { pages: held.pages, bytes: held.bytes }))
                .collect(),
            pages_evicted: report.eviction.pages_evicted,
            pages_read: report.step_reads.map(|reads| reads.pages_read),
            uor: report.eviction.uor,
            uor_per_head: report.eviction.uor_per_head,
            nan_rows: report.eviction.nan_rows,
            budget_raised: report.eviction.budget_raised,
        }
    }
}

impl CompletionJson {
    /// The object of `completion`, whose model took `load` to open.
    pub(crate) fn new(completion: Completion, prompt_tokens: usize, load: Duration) -> Self {
        let timing: Timing = completion.timing;
        Self {
            usage: Usage { prompt_tokens, completion_tokens: completion.tokens.len() },
            kv: Kv::new(&completion.kv),
            timing: Times {
                load_s: load.as_secs_f64(),
                prefill_s: timing.prefill.as_secs_f64(),
                prefill_tokens_per_s: timing.prefill_tokens_per_s(),
                pass_s: timing.pass.as_secs_f64(),
                decode_tokens_per_s: timing.decode_tokens_per_s(),
                observe_s: timing.observe.as_secs_f64(),
                evict_s: timing.evict.as_secs_f64(),
                encode_s: timing.encode.as_secs_f64(),
            },
            text: completion.text,
            tokens: completion.tokens,
            finish_reason: completion.finish_reason.name(),
        }
    }
}
