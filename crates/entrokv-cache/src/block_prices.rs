//! What it costs to free blocks of a KV head by evicting single tokens (KV-Compress, Rehg 2024).
//!
//! A head's tokens lie in blocks of `B` slots, the last one partly filled. Evicting any `h + (n - 1) B` tokens, `h` being those in its
//! last block, and moving the others into their slots frees `n` blocks. The tokens of lowest metric are evicted, so the `n`-th block
//! costs the metric of the dearest of them, and blocks of all heads can be compared.

use crate::selection::rank;

/// The blocks of one head, priced.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockPrices {
    /// Slots in the order in which they would go.
    order: Vec<usize>,
    /// The price of each further block, rising; none of infinity.
    prices: Vec<f32>,
    /// Tokens in the last block.
    hang: usize,
    block: usize,
}

impl BlockPrices {
    /// Prices of a head whose slots have `metrics`, in blocks of `block` slots (1 or more). A metric of infinity protects its slot; of
    /// equal metrics the lower slot goes first, and NaN goes before all numbers.
    ///
    /// # Panics
    /// When `block` is 0.
    #[must_use]
    pub fn of(metrics: &[f32], block: usize) -> Self {
        let mut order: Vec<usize> = (0..metrics.len()).collect();
        order.sort_by(|&a, &b| rank(metrics[a]).total_cmp(&rank(metrics[b])));
        let hang = match metrics.len() % block {
            0 => block,
            hang => hang,
        };
        let dearest = order.iter().skip(hang - 1).step_by(block).map(|&slot| metrics[slot]);
        let prices = dearest.take_while(|&price| price != f32::INFINITY).collect();
        Self { order, prices, hang, block }
    }

    /// The price of each further block that can be freed, `[blocks]`, rising.
    #[must_use]
    pub fn prices(&self) -> &[f32] {
        &self.prices
    }

    /// The slots to evict so that `num_blocks` are freed, or as many as can be; ascending.
    #[must_use]
    pub fn slots(&self, num_blocks: usize) -> Vec<usize> {
        let num_slots = match num_blocks.min(self.prices.len()) {
            0 => 0,
            blocks => self.hang + (blocks - 1) * self.block,
        };
        let mut slots = self.order[..num_slots].to_vec();
        slots.sort_unstable();
        slots
    }
}

/// How many blocks each of `heads` frees so that the cheapest `num_blocks` of all are freed, or as many as have a price; of equal
/// prices the lower head pays first.
#[must_use]
pub fn cheapest_blocks(heads: &[BlockPrices], num_blocks: usize) -> Vec<usize> {
    let mut all: Vec<(f32, usize)> = heads
        .iter()
        .enumerate()
        .flat_map(|(head, blocks)| blocks.prices.iter().map(move |&price| (rank(price), head)))
        .collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let mut freed = vec![0; heads.len()];
    all.into_iter().take(num_blocks).for_each(|(_, head)| freed[head] += 1);
    freed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_go_by_the_price_of_their_dearest_token() {
        let a = BlockPrices::of(&[0.9, 0.1, 0.5, 0.05, 0.2, 0.8], 4);
        let b = BlockPrices::of(&[0.3, 0.31, 0.32, 0.33, 0.6, 0.7, 0.95, 0.99], 4);
        assert_eq!((a.prices(), b.prices()), (&[0.1, 0.9][..], &[0.33, 0.99][..]));
        let heads = [a, b];
        let evicted = |num_blocks: usize| {
            let freed = cheapest_blocks(&heads, num_blocks);
            [heads[0].slots(freed[0]), heads[1].slots(freed[1])]
        };
        assert_eq!(evicted(0), [vec![], vec![]]);
        assert_eq!(evicted(1), [vec![1, 3], vec![]]);
        assert_eq!(evicted(2), [vec![1, 3], vec![0, 1, 2, 3]]);
        assert_eq!(evicted(3), [vec![0, 1, 2, 3, 4, 5], vec![0, 1, 2, 3]]);
        assert_eq!(evicted(9), [(0..6).collect::<Vec<_>>(), (0..8).collect()]);
    }

    #[test]
    fn what_is_protected_has_no_price() {
        let inf = f32::INFINITY;
        let head = BlockPrices::of(&[0.5, inf, f32::NAN, 0.25, inf], 2);
        // One token in the last block, then two more: 0.5 is the dearest.
        assert!(head.prices()[0].is_nan() && head.prices()[1..] == [0.5]);
        assert_eq!(head.slots(9), [0, 2, 3]);
        assert_eq!(BlockPrices::of(&[inf; 3], 2).prices(), []);
        assert_eq!(BlockPrices::of(&[], 2).slots(1), []);
    }
}
