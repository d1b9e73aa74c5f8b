//! The bytes of one sequence, kind by kind: now, at most, and whether they kept to the budget.

use super::pass::Pass;
use crate::coding::Coding;
use crate::eviction::Eviction;
use crate::sequence::Sequence;

/// Bytes that belong to one sequence, in kinds that are never mixed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvBytes {
    /// Payload of global layers, which a budget caps: frames of their pages.
    pub held: u64,
    /// Payload of window layers, which no budget touches.
    pub window: u64,
    /// Block tables and what attention reads of them, and the constants of codes.
    pub metadata: u64,
    /// What the policy keeps: rows it has seen, scores, keys as they were before they were turned, what a pass under way has
    /// recorded.
    pub policy_state: u64,
}

impl KvBytes {
    /// What `sequence` holds now.
    pub(super) fn of(sequence: &Sequence) -> Self {
        let footprint = sequence.cache.footprint();
        Self {
            held: footprint.global_bytes,
            window: footprint.window_bytes,
            metadata: footprint.metadata_bytes
                + sequence.segments.heap_bytes()
                + sequence.coding.as_ref().map_or(0, Coding::state_bytes),
            policy_state: sequence.turn.eviction.as_ref().map_or(0, Eviction::state_bytes)
                + sequence.turned_sinks.state_bytes()
                + sequence.turn.pass.as_ref().map_or(0, Pass::bytes),
        }
    }

    /// The larger one of each kind.
    fn max(self, other: Self) -> Self {
        Self {
            held: self.held.max(other.held),
            window: self.window.max(other.window),
            metadata: self.metadata.max(other.metadata),
            policy_state: self.policy_state.max(other.policy_state),
        }
    }
}

/// What has been noted of one sequence so far.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ledger {
    /// The most of each kind, at whatever time.
    peak: KvBytes,
    /// Steps that ended with more held than the budget.
    budget_violations: u64,
}

impl Ledger {
    pub(super) fn peak(&self) -> KvBytes {
        self.peak
    }

    pub(super) fn budget_violations(&self) -> u64 {
        self.budget_violations
    }
}

impl Sequence {
    /// Notes what is held at this moment.
    pub(super) fn note_bytes(&mut self) {
        self.ledger.peak = self.ledger.peak.max(KvBytes::of(self));
    }

    /// Notes what a step has left, what it took on the way, and whether the budget was kept.
    pub(super) fn audit(&mut self) {
        let bytes = KvBytes::of(self);
        let on_the_way = KvBytes {
            held: self.coding.as_ref().map_or(0, Coding::peak_held_bytes),
            policy_state: self.turn.eviction.as_ref().map_or(0, Eviction::peak_state_bytes),
            ..bytes
        };
        self.ledger.peak = self.ledger.peak.max(bytes).max(on_the_way);
        let eviction = self.turn.eviction.as_ref().filter(|_| !self.is_reading());
        let is_over = eviction.is_some_and(|eviction| eviction.is_over(bytes.held));
        self.ledger.budget_violations += u64::from(is_over);
        debug_assert!(!is_over, "a step ended with {} bytes held, more than the budget", bytes.held);
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Arc;

    use entrokv_cache::parse_policy;

    use crate::tiny::{TinyArchitecture, TinyModel};
    use crate::{EndTokens, EvictionOptions, Gguf, Model, ModelOptions, Request};

    /// Where what keeps the budget is broken, the counter counts every step that ends over it, and only those.
    #[test]
    fn steps_over_the_budget_are_counted() {
        let gguf = Gguf::from_bytes(TinyModel::new(TinyArchitecture::Llama).gguf().unwrap()).unwrap();
        let mut engine = Model::from_gguf(&gguf, &ModelOptions::default(), &mut |_| ()).unwrap().engine;
        let policy = Arc::from(parse_policy("streaming-llm").unwrap());
        let request = Request {
            end_tokens: EndTokens::Ignore,
            eviction: Some(EvictionOptions { budget: "4pages".parse().unwrap(), policy }),
            ..Request::greedy((0..128).collect(), 50)
        };
        let id = engine.submit(request).unwrap();
        engine.step().unwrap();
        assert_eq!(engine.kv_report(id).unwrap().budget_violations, 0);
        engine.sequences.get_mut(&id).unwrap().turn.eviction.as_mut().unwrap().break_caps();
        // The first step after the prompt's 8 full pages opens one more than there may be.
        for step in 1..=20 {
            let outcome = catch_unwind(AssertUnwindSafe(|| engine.step().unwrap()));
            if cfg!(debug_assertions) {
                assert!(outcome.is_err());
                return;
            }
            let kv = engine.kv_report(id).unwrap();
            assert!(kv.bytes_held > kv.bytes_budget.unwrap());
            assert_eq!((outcome.unwrap().len(), kv.budget_violations), (1, step));
        }
        engine.close(id);
    }
}
