//! Attention rows and queries on their way from a forward pass to the policies and codes of the sequences in its batch.

use std::ops::Range;
use std::time::{Duration, Instant};

use entrokv_cache::{KvCache, RowOrigin, RowSource};
use entrokv_kernels::attention::{SegmentList, Tap};
use entrokv_kernels::compute::Compute;
use entrokv_kernels::threads::Threads;

use super::pass::Record;
use crate::coding::QueryMoments;
use crate::eviction::{Eviction, LayerRows, UnrotatedQueries};
use crate::gates::GateInput;
use crate::model::AttentionSink;

/// What a span's rows are, for the policy.
pub(super) enum Phase<'a> {
    /// Rows of a prompt, or a part of it that is evicted after by itself, that ends before this position.
    Prompt { end: usize },
    /// Rows of a probe that ends before this position, behind a text of so many tokens.
    Probe { text_len: usize, end: usize },
    /// Rows that repeat a prompt.
    Pass(&'a mut Record),
    /// The row of a token generated.
    Answer,
}

impl Phase<'_> {
    /// Whether its tokens are a probe's: nobody's business but for what they look at.
    fn is_probe(&self) -> bool {
        matches!(self, Self::Probe { .. })
    }
}

/// One span of the batch.
pub(super) struct SpanTaps<'a> {
    /// The policy, where the sequence has a cap.
    pub(super) eviction: Option<&'a mut Eviction>,
    /// What codes want to know of the queries, where the cache is stored as codes.
    pub(super) queries: Option<&'a mut QueryMoments>,
    /// Its block tables.
    pub(super) cache: &'a KvCache,
    /// Absolute positions of the rows.
    pub(super) rows: Range<usize>,
    /// What the rows are.
    pub(super) phase: Phase<'a>,
    /// Clock of the observation.
    pub(super) time: &'a mut Duration,
}

/// Routes attention rows and queries to the sequences of a batch.
pub(super) struct Taps<'a> {
    /// In batch order.
    pub(super) spans: Vec<SpanTaps<'a>>,
}

impl AttentionSink for Taps<'_> {
    fn input_tap(&self, span: usize, layer: usize) -> GateInput {
        self.spans[span].eviction.as_ref().map_or(GateInput::None, |eviction| eviction.gate_input(layer))
    }

    fn inputs(&mut self, span: usize, layer: usize, inputs: &[f32], compute: &Compute) {
        let SpanTaps { eviction, rows, time, phase, .. } = &mut self.spans[span];
        if let (Some(eviction), false) = (eviction, phase.is_probe()) {
            let start = Instant::now();
            eviction.observe_inputs(layer, rows, inputs, compute);
            **time += start.elapsed();
        }
    }

    fn unrotated(&mut self, span: usize, layer: usize, queries: &mut [f32], keys: &[f32]) {
        let SpanTaps { eviction, rows, phase, .. } = &mut self.spans[span];
        if let (Some(eviction), false) = (eviction, phase.is_probe()) {
            eviction.observe_unrotated(layer, rows, queries, keys);
        }
    }

    fn queries(&mut self, span: usize, layer: usize, queries: &mut [f32]) {
        let SpanTaps { eviction, queries: moments, rows, .. } = &mut self.spans[span];
        if let Some(eviction) = eviction {
            eviction.hide_gate(layer, queries);
        }
        if let Some(moments) = moments {
            moments.add(layer, rows.start, queries);
        }
    }

    fn unrotated_queries(&mut self, span: usize, layer: usize, queries: &[f32], compute: &Compute) {
        let SpanTaps { eviction, rows, phase, time, .. } = &mut self.spans[span];
        if let (Some(eviction), false) = (eviction, phase.is_probe()) {
            let start = Instant::now();
            let queries = UnrotatedQueries { layer, first_position: rows.start, rows: queries };
            eviction.see_unrotated(queries, matches!(phase, Phase::Prompt { .. }), compute);
            **time += start.elapsed();
        }
    }

    fn queries_and_keys(&mut self, span: usize, layer: usize, queries: &[f32], keys: &[f32], compute: &Compute) {
        let SpanTaps { eviction, rows, phase, time, .. } = &mut self.spans[span];
        if let (Some(eviction), Phase::Prompt { end }) = (eviction, phase) {
            let start = Instant::now();
            let rows = LayerRows { layer, first_position: rows.start, queries, keys };
            eviction.see_prompt(rows, *end, compute);
            **time += start.elapsed();
        }
    }

    fn reads(
        &mut self,
        span: usize,
        layer: usize,
        queries: &[f32],
        held: &[SegmentList],
        threads: &Threads,
    ) -> Option<Vec<SegmentList>> {
        let SpanTaps { eviction, phase, time, .. } = &mut self.spans[span];
        if let Phase::Pass(record) = phase {
            return record.reads(layer, held);
        }
        let (Some(eviction), Phase::Answer) = (eviction, phase) else { return None };
        let start = Instant::now();
        let chosen = eviction.choose_pages(layer, queries, held, threads);
        **time += start.elapsed();
        chosen
    }

    fn tap(&mut self, span: usize, layer: usize, resident: &[usize]) -> Tap {
        let SpanTaps { eviction, rows, phase, .. } = &mut self.spans[span];
        match (eviction, phase) {
            (_, Phase::Pass(record)) => record.tap(layer),
            (None, _) => Tap::None,
            (Some(eviction), Phase::Prompt { end }) if eviction.policy().rows() == RowOrigin::Prompt => {
                eviction.tap_prompt(layer, rows.clone(), *end, resident)
            }
            (Some(_), Phase::Prompt { .. }) => Tap::None,
            (Some(eviction), Phase::Probe { end, .. }) => eviction.tap_prompt(layer, rows.clone(), *end, resident),
            (Some(eviction), Phase::Answer) => eviction.tap_answer(layer),
        }
    }

    fn observe(&mut self, span: usize, layer: usize, tap: Tap, threads: &Threads) {
        let SpanTaps { eviction, cache, phase, time, .. } = &mut self.spans[span];
        let source = match phase {
            Phase::Prompt { .. } => RowSource::Prompt,
            Phase::Probe { .. } => RowSource::Probe,
            Phase::Pass(record) => return record.put_back(layer, tap),
            Phase::Answer => RowSource::Step,
        };
        if let Some(eviction) = eviction {
            let start = Instant::now();
            let text_len = if let Phase::Probe { text_len, .. } = phase { *text_len } else { usize::MAX };
            eviction.observe(cache, layer, source, text_len, tap, threads);
            **time += start.elapsed();
        }
    }
}
