//! What gates have said of the tokens of one sequence.

use std::ops::Range;
use std::sync::Arc;

use super::Gates;

/// The gates of a sequence's policy, and what they said of the tokens it holds.
#[derive(Clone)]
pub(crate) struct GateScores {
    gates: Arc<Gates>,
    /// Of each KV group of the global layers, in (layer, KV head) order.
    groups: Vec<TokenScores>,
}

/// A number for each of some tokens, ascending by position.
#[derive(Clone, Debug, Default)]
struct TokenScores {
    positions: Vec<u32>,
    scores: Vec<f32>,
}

impl GateScores {
    /// Nothing said yet, of `num_groups` KV groups.
    pub(crate) fn new(gates: Arc<Gates>, num_groups: usize) -> Self {
        Self { gates, groups: vec![TokenScores::default(); num_groups] }
    }

    /// Whether these are the scores of `gates`.
    pub(crate) fn are_of(&self, gates: &Arc<Gates>) -> bool {
        Arc::ptr_eq(&self.gates, gates)
    }

    /// Whose scores they are.
    pub(crate) fn gates(&self) -> &Gates {
        &self.gates
    }

    /// Takes in what a gate says of the tokens at positions `rows`, `scores` `[tokens, num_kv_heads]`; `first_group` is the first
    /// KV group of their layer.
    pub(crate) fn record(&mut self, first_group: usize, rows: &Range<usize>, scores: &[f32]) {
        let num_heads = scores.len() / rows.len();
        for (head, group) in self.groups[first_group..first_group + num_heads].iter_mut().enumerate() {
            group.record(rows.start, scores.iter().copied().skip(head).step_by(num_heads));
        }
    }

    /// What was said of the tokens at `positions` of the KV group `group`.
    pub(crate) fn at(&self, group: usize, positions: &[u32]) -> Vec<f32> {
        self.groups[group].at(positions)
    }

    /// Forgets the tokens of `group` that are not at `positions`.
    pub(crate) fn retain(&mut self, group: usize, positions: &[u32]) {
        self.groups[group].retain(positions);
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> u64 {
        let bytes = |group: &TokenScores| {
            group.positions.capacity() * size_of::<u32>() + group.scores.capacity() * size_of::<f32>()
        };
        self.groups.iter().map(bytes).sum::<usize>() as u64
    }
}

impl TokenScores {
    /// Takes in `scores` of the tokens from `first_position` on. A step that was interrupted is run again: what it had recorded
    /// is replaced.
    fn record(&mut self, first_position: usize, scores: impl Iterator<Item = f32>) {
        let before = self.positions.partition_point(|&position| (position as usize) < first_position);
        self.positions.truncate(before);
        self.scores.truncate(before);
        self.scores.extend(scores);
        let first = first_position as u32;
        self.positions.extend(first..first + (self.scores.len() - before) as u32);
    }

    /// The scores at `positions` (ascending); NaN, which no scorer keeps, where none was recorded.
    fn at(&self, positions: &[u32]) -> Vec<f32> {
        let mut known = self.positions.iter().zip(&self.scores).peekable();
        let mut next = |position: u32| {
            while known.next_if(|(known, _)| **known < position).is_some() {}
            known.next_if(|(known, _)| **known == position).map_or(f32::NAN, |(_, score)| *score)
        };
        positions.iter().map(|&position| next(position)).collect()
    }

    fn retain(&mut self, positions: &[u32]) {
        self.scores = self.at(positions);
        self.positions = positions.to_vec();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_stay_with_their_tokens() {
        let mut scores = TokenScores::default();
        scores.record(0, [0.0, 1.0, 2.0, 3.0].into_iter());
        scores.record(4, [4.0, 5.0].into_iter());
        scores.retain(&[0, 1, 4, 5]);
        scores.record(6, [6.0].into_iter());
        assert_eq!(scores.at(&[0, 1, 4, 5, 6]), [0.0, 1.0, 4.0, 5.0, 6.0]);
        assert_eq!(scores.at(&[1, 6]), [1.0, 6.0]);
        assert!(scores.at(&[2])[0].is_nan(), "it was forgotten");
    }

    #[test]
    fn a_step_run_again_is_recorded_once() {
        let mut scores = TokenScores::default();
        scores.record(0, [0.5, 1.5].into_iter());
        scores.record(2, [9.0, 9.0, 9.0].into_iter());
        scores.record(2, [2.5, 3.5].into_iter());
        assert_eq!(scores.positions, [0, 1, 2, 3]);
        assert_eq!(scores.scores, [0.5, 1.5, 2.5, 3.5]);
    }
}
