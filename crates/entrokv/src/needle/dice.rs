//! Seeded choices.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha12Rng;

/// A stream of choices: the same for a seed on every machine.
pub(super) struct Dice(ChaCha12Rng);

impl Dice {
    /// The stream number `stream` of this seed.
    pub(super) fn new(seed: u64, stream: u64) -> Self {
        let mut random = ChaCha12Rng::seed_from_u64(seed);
        random.set_stream(stream);
        Self(random)
    }

    /// A number below `limit`, which is above 0 and far below 2^64: its bias does not show.
    pub(super) fn below(&mut self, limit: usize) -> usize {
        (self.0.next_u64() % limit as u64) as usize
    }

    /// One of `all`, which are not none.
    pub(super) fn pick<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    /// The numbers below `limit` in some order.
    pub(super) fn order(&mut self, limit: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..limit).collect();
        for place in (1..limit).rev() {
            order.swap(place, self.below(place + 1));
        }
        order
    }
}
