//! A runner that notes what its policy had attention read.

use std::sync::{Arc, Mutex};

use entrokv::gates::GateInput;
use entrokv::gguf::Gguf;
use entrokv::model::{AttentionSink, BatchSpan, Decoder, Logits, ModelRunner, RunError};
use entrokv::{Engine, ModelOptions};
use entrokv_kernels::attention::{SegmentList, Tap};
use entrokv_kernels::compute::Compute;
use entrokv_kernels::threads::Threads;

use crate::support::watched::{Watch, watched};

/// What attention read in a layer for one token, by the first positions of pages.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) layer: usize,
    /// `[num_heads, head_dim]`, after RoPE.
    pub(crate) queries: Vec<f32>,
    /// Of each KV head.
    pub(crate) held: Vec<Vec<u32>>,
    /// Nothing where all that is held was read.
    pub(crate) read: Option<Vec<Vec<u32>>>,
}

/// Everything seen, in the order of layers and steps.
pub(crate) type Notes = Arc<Mutex<Vec<Seen>>>;

/// An engine without a tokenizer, and what it reads.
pub(crate) fn spied(gguf: &Gguf, options: &ModelOptions) -> (Engine, Notes) {
    let notes = Notes::default();
    (watched(gguf, options, Spy(Arc::clone(&notes))), notes)
}

/// Notes what is read.
struct Spy(Notes);

impl Watch for Spy {
    fn forward(
        &mut self,
        decoder: &mut Decoder,
        batch: &[BatchSpan<'_>],
        sink: &mut dyn AttentionSink,
    ) -> Result<Logits, RunError> {
        decoder.forward(batch, &mut SpySink { inner: sink, notes: &self.0 })
    }
}

/// The sink of a pass, watched.
struct SpySink<'a> {
    inner: &'a mut dyn AttentionSink,
    notes: &'a Notes,
}

fn first_positions(lists: &[SegmentList]) -> Vec<Vec<u32>> {
    lists.iter().map(|list| list.segments().iter().map(|segment| segment.position).collect()).collect()
}

impl AttentionSink for SpySink<'_> {
    fn input_tap(&self, span: usize, layer: usize) -> GateInput {
        self.inner.input_tap(span, layer)
    }

    fn inputs(&mut self, span: usize, layer: usize, inputs: &[f32], compute: &Compute) {
        self.inner.inputs(span, layer, inputs, compute);
    }

    fn unrotated(&mut self, span: usize, layer: usize, queries: &mut [f32], keys: &[f32]) {
        self.inner.unrotated(span, layer, queries, keys);
    }

    fn queries(&mut self, span: usize, layer: usize, queries: &mut [f32]) {
        self.inner.queries(span, layer, queries);
    }

    fn queries_and_keys(&mut self, span: usize, layer: usize, queries: &[f32], keys: &[f32], compute: &Compute) {
        self.inner.queries_and_keys(span, layer, queries, keys, compute);
    }

    fn unrotated_queries(&mut self, span: usize, layer: usize, queries: &[f32], compute: &Compute) {
        self.inner.unrotated_queries(span, layer, queries, compute);
    }

    fn reads(
        &mut self,
        span: usize,
        layer: usize,
        queries: &[f32],
        held: &[SegmentList],
        threads: &Threads,
    ) -> Option<Vec<SegmentList>> {
        let lists = self.inner.reads(span, layer, queries, held, threads);
        let read = lists.as_deref().map(first_positions);
        let seen = Seen { layer, queries: queries.to_vec(), held: first_positions(held), read };
        self.notes.lock().unwrap().push(seen);
        lists
    }

    fn tap(&mut self, span: usize, layer: usize, resident: &[usize]) -> Tap {
        self.inner.tap(span, layer, resident)
    }

    fn observe(&mut self, span: usize, layer: usize, tap: Tap, threads: &Threads) {
        self.inner.observe(span, layer, tap, threads);
    }
}
