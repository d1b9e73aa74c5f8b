//! Which parts of a reservation are in use, block by block of a huge page: what the operating system is told about it.

use std::ops::Range;

/// Bytes of a block: of a huge page where ordinary ones have 4 KiB.
pub(super) const BLOCK_BYTES: u64 = 2 << 20;

/// The blocks of a reservation, those that were ever in use. Offsets are the reservation's; blocks start where a huge page
/// can, so the first one may be shorter.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    /// Bytes by which the first block starts before the reservation.
    lead: u64,
    /// Bytes of the reservation.
    len: u64,
    /// Bytes of a page of the operating system; at least 4 KiB, so that a block has at most 512.
    os_page: u64,
    blocks: Vec<Block>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Block {
    /// One bit for each page of the operating system.
    in_use: [u64; 8],
    backing: Backing,
}

/// What pages of the operating system a block may get.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Backing {
    /// A huge one, as every block may in the beginning.
    #[default]
    Huge,
    /// Ordinary ones only.
    Small,
}

/// What is to be done after part of a block was given back.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Released {
    /// The block.
    pub(super) block: Range<u64>,
    /// What it may be backed by from now on, if that changes.
    pub(super) backing: Option<Backing>,
    /// Whole pages that nothing uses any more.
    pub(super) unused: Vec<Range<u64>>,
}

impl Blocks {
    /// Blocks of `len` bytes at `address`, none in use.
    pub(super) fn new(address: u64, len: u64, os_page: u64) -> Self {
        Self { lead: address % BLOCK_BYTES, len, os_page: os_page.max(4096), blocks: Vec::new() }
    }

    /// Notes that `range`, inside the reservation, may be written from now on.
    pub(super) fn take(&mut self, range: Range<u64>) {
        for index in self.indices(&range) {
            if self.blocks.len() <= index {
                self.blocks.resize(index + 1, Block::default());
            }
            for page in self.pages(index, &range) {
                self.blocks[index].in_use[page / 64] |= 1 << (page % 64);
            }
        }
    }

    /// Notes that the whole pages `range` are not in use any more, and says for each block what follows from it.
    ///
    /// A block with holes gets no huge page any more, for that would fill the holes. What of its huge page was never in use
    /// goes back, too. A block that is empty is as good as new.
    pub(super) fn release(&mut self, range: Range<u64>) -> Vec<Released> {
        let mut all = Vec::new();
        for index in self.indices(&range) {
            // What was never taken needs no release.
            let Some(mut block) = self.blocks.get(index).copied() else { continue };
            for page in self.pages(index, &range) {
                block.in_use[page / 64] &= !(1 << (page % 64));
            }
            let bytes = self.bytes(index);
            let is_empty = block.in_use == [0; 8];
            let backing = if is_empty { Backing::Huge } else { Backing::Small };
            let part = range.start.max(bytes.start)..range.end.min(bytes.end);
            all.push(Released {
                backing: (backing != block.backing).then_some(backing),
                unused: match (is_empty, block.backing) {
                    (true, _) => vec![bytes.clone()],
                    (false, Backing::Huge) => self.unused(index, &block),
                    (false, Backing::Small) => vec![part],
                },
                block: bytes,
            });
            self.blocks[index] = Block { backing, ..block };
        }
        all
    }

    /// The blocks that `range` touches.
    fn indices(&self, range: &Range<u64>) -> Range<usize> {
        if range.is_empty() {
            return 0..0;
        }
        let end = (range.end + self.lead).div_ceil(BLOCK_BYTES);
        ((range.start + self.lead) / BLOCK_BYTES) as usize..end as usize
    }

    /// The bytes of block `index` that belong to the reservation.
    fn bytes(&self, index: usize) -> Range<u64> {
        let start = index as u64 * BLOCK_BYTES;
        start.saturating_sub(self.lead)..(start + BLOCK_BYTES - self.lead).min(self.len)
    }

    /// The pages of block `index` that `range` touches.
    fn pages(&self, index: usize, range: &Range<u64>) -> Range<usize> {
        let start = index as u64 * BLOCK_BYTES;
        let first = (range.start + self.lead).saturating_sub(start) / self.os_page;
        let end = (range.end + self.lead - start).min(BLOCK_BYTES).div_ceil(self.os_page);
        first as usize..end as usize
    }

    /// The pages of block `index` that are not in use, as ranges of bytes.
    fn unused(&self, index: usize, block: &Block) -> Vec<Range<u64>> {
        let bytes = self.bytes(index);
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for page in self.pages(index, &bytes).filter(|page| block.in_use[page / 64] >> (page % 64) & 1 == 0) {
            let start = index as u64 * BLOCK_BYTES + page as u64 * self.os_page - self.lead;
            let end = (start + self.os_page).min(bytes.end);
            match ranges.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => ranges.push(start..end),
            }
        }
        ranges
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    #[test]
    fn a_block_with_holes_is_small_until_it_is_empty() {
        let mut blocks = Blocks::new(0, 10 * BLOCK_BYTES, PAGE);
        blocks.take(BLOCK_BYTES..BLOCK_BYTES + 10 * PAGE - 7);
        let block = BLOCK_BYTES..2 * BLOCK_BYTES;
        // The first hole: what the huge page had beyond what was taken goes, too.
        let hole = BLOCK_BYTES + PAGE..BLOCK_BYTES + 2 * PAGE;
        let unused = vec![hole.clone(), BLOCK_BYTES + 10 * PAGE..2 * BLOCK_BYTES];
        let first = Released { block: block.clone(), backing: Some(Backing::Small), unused };
        assert_eq!(blocks.release(hole), [first]);
        // The next one: it alone.
        let hole = BLOCK_BYTES + 4 * PAGE..BLOCK_BYTES + 5 * PAGE;
        let next = Released { block: block.clone(), backing: None, unused: vec![hole.clone()] };
        assert_eq!(blocks.release(hole), [next]);
        // The rest, released with neighbours that were never taken.
        let last = Released { block: block.clone(), backing: Some(Backing::Huge), unused: vec![block] };
        assert_eq!(blocks.release(BLOCK_BYTES / 2..3 * BLOCK_BYTES)[1..], [last]);
    }

    #[test]
    fn blocks_start_where_huge_pages_can() {
        let lead = BLOCK_BYTES - 3 * PAGE;
        let mut blocks = Blocks::new(7 * BLOCK_BYTES + lead, BLOCK_BYTES + 5 * PAGE, PAGE);
        blocks.take(0..BLOCK_BYTES + 5 * PAGE);
        // Three pages of the first block belong to the reservation, then comes a whole block, then two pages of a third.
        let (first, second) = (0..3 * PAGE, 3 * PAGE..3 * PAGE + BLOCK_BYTES);
        let third = second.end..second.end + 2 * PAGE;
        let released = blocks.release(2 * PAGE..4 * PAGE);
        assert_eq!([&released[0].block, &released[1].block], [&first, &second]);
        let parts = [2 * PAGE..3 * PAGE, 3 * PAGE..4 * PAGE];
        assert_eq!(released.into_iter().flat_map(|released| released.unused).collect::<Vec<_>>(), parts);
        let rest = blocks.release(4 * PAGE..third.end);
        assert_eq!(rest.into_iter().flat_map(|released| released.unused).collect::<Vec<_>>(), [second, third]);
    }

    #[test]
    fn what_was_never_taken_needs_no_release() {
        let mut blocks = Blocks::new(0, 4 * BLOCK_BYTES, PAGE);
        assert_eq!(blocks.release(0..4 * BLOCK_BYTES), []);
        blocks.take(5..5);
        assert_eq!(blocks.release(0..PAGE), []);
    }
}
