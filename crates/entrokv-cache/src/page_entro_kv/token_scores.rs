//! From one score a token to one score a page.

use crate::attention_rows::PageSpan;
use crate::page_entro_kv::options::{BlockProjection, PageEntroKvOptions};

/// One score a token, on its way to one score a page.
#[derive(Clone, Copy)]
pub(super) struct TokenScores<'a> {
    /// Positions of the tokens, ascending.
    pub(super) positions: &'a [u32],
    /// Their scores.
    pub(super) values: &'a [f64],
}

impl TokenScores<'_> {
    /// The page's score: the average pool if there is one, then the block projection. Tokens never scored count 0.
    pub(super) fn of_page(&self, page: PageSpan, options: &PageEntroKvOptions) -> f64 {
        let start = self.positions.partition_point(|&position| position < page.first_position);
        let len = self.positions[start..].partition_point(|&position| u64::from(position) < page.end());
        let tokens = (start..start + len).map(|index| self.pooled(index, options.pool_width));
        match options.block {
            BlockProjection::Max => tokens.fold(0.0, f64::max),
            BlockProjection::Sum => tokens.sum(),
            BlockProjection::Mean => tokens.sum::<f64>() / f64::from(page.len.max(1)),
        }
    }

    /// Average over `width` positions about a token, always divided by `width`: positions before 0, after the last
    /// token, or evicted count 0, for there is nothing at them that keeping this page would keep.
    fn pooled(&self, index: usize, width: usize) -> f64 {
        let reach = (width / 2) as u64;
        if reach == 0 {
            return self.values[index];
        }
        // Mostly nothing near is missing: ascending positions that span `2 reach` are all there.
        let side = reach as usize;
        if let (Some(start), Some(&last)) = (index.checked_sub(side), self.positions.get(index + side))
            && u64::from(last - self.positions[start]) == 2 * reach
        {
            return self.values[start..=index + side].iter().sum::<f64>() / width as f64;
        }
        let position = u64::from(self.positions[index]);
        let near = |other: u32| position.abs_diff(u64::from(other)) <= reach;
        let before = self.positions[..index].iter().rev().take_while(|&&other| near(other)).count();
        let after = self.positions[index + 1..].iter().take_while(|&&other| near(other)).count();
        let sum: f64 = self.values[index - before..=index + after].iter().sum();
        sum / width as f64
    }
}
