//! Which KV heads keep everything, and which only their first and newest tokens.

use crate::selection::rank;

/// How many KV heads stream, of all layers together: those of the smallest gates (DuoAttention, Xiao et al. 2024).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StreamingHeads {
    /// Part of the heads that stream whatever room there is, from 0 to 1; rounded to whole heads, halves to even.
    pub at_least: f64,
}

impl StreamingHeads {
    /// Pages that each KV group may hold, `gates` having one number for each: `full` of them or, where it streams, `few`.
    ///
    /// As many stream as must for all to hold no more than `total`, and at least as many as are to. Should `few` of each be too many
    /// already, all stream. Equal gates stream in the order of their groups, those that are no numbers first.
    #[must_use]
    pub fn counts(self, gates: &[f32], full: usize, few: usize, total: usize) -> Vec<usize> {
        let few = few.min(full);
        let over = full.saturating_mul(gates.len()).saturating_sub(total);
        let needed = if over == 0 { 0 } else { over.div_ceil((full - few).max(1)) };
        let wanted = (self.at_least * gates.len() as f64).round_ties_even() as usize;
        let mut order: Vec<usize> = (0..gates.len()).collect();
        order.sort_by(|&a, &b| rank(gates[a]).total_cmp(&rank(gates[b])));
        let mut counts = vec![full; gates.len()];
        order.iter().take(needed.max(wanted)).for_each(|&group| counts[group] = few);
        counts
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_smallest_gates_stream_first_and_equals_in_their_order() {
        let gates = [0.5, 0.0, 0.9, 0.0, f32::NAN, -0.0];
        let counts = |at_least, total| StreamingHeads { at_least }.counts(&gates, 10, 3, total);
        assert_eq!(counts(0.0, 60), [10; 6]);
        assert_eq!(counts(0.0, 59), [10, 10, 10, 10, 3, 10]);
        assert_eq!(counts(0.0, 46), [10, 3, 10, 10, 3, 10]);
        assert_eq!(counts(0.0, 45), [10, 3, 10, 3, 3, 10]);
        assert_eq!(counts(0.5, usize::MAX), [10, 3, 10, 3, 3, 10]);
        assert_eq!(counts(0.7, 60), [10, 3, 10, 3, 3, 3]);
        assert_eq!(counts(0.0, 18), [3; 6]);
        assert_eq!(counts(0.0, 1), [3; 6], "there is nothing below the pins");
        assert_eq!(counts(1.0, 60), [3; 6]);
        assert_eq!(StreamingHeads { at_least: 1.0 }.counts(&gates, 2, 3, 60), [2; 6], "a short text is kept whole");
        assert_eq!(StreamingHeads::default().counts(&[], 2, 3, 0), [0; 0]);
    }

    proptest! {
        /// The sum is within the total where that can be, no head streams that need not, and a head that has begun to stream goes on
        /// as the text grows.
        #[test]
        fn as_few_heads_stream_as_must(
            gates in prop::collection::vec(0.0_f32..1.0, 1..20), full in 1_usize..60, few in 1_usize..20, total in 0_usize..900,
        ) {
            let counts = |full| StreamingHeads::default().counts(&gates, full, few, total);
            let now = counts(full);
            let (sum, streaming) = (now.iter().sum::<usize>(), now.iter().filter(|count| **count < full).count());
            prop_assert!(sum <= total || streaming == gates.len() || few >= full);
            prop_assert!(streaming == 0 || sum + full - few > total);
            let next = counts(full + 1);
            for (now, next) in now.iter().zip(next) {
                prop_assert!(*now == full || next == few);
            }
        }
    }
}
