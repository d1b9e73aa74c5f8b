//! The block table of one KV group: its resident pages, and running counts of what they hold.

use std::ops::Range;

use crate::kv_cache::fate::{Applied, FateError, MoveTokens, PageFate, PageMove, PagePlace};
use crate::kv_cache::footprint::KindFootprint;
use crate::kv_cache::restore::PageRecord;
use crate::page::PageIndex;
use crate::page_kind::PageKind;
use crate::pool::{Frame, PagePool, PoolExhausted};
use crate::shape::CacheShape;

/// A page a KV group holds, and the frame it lives in.
#[derive(Debug)]
pub struct ResidentPage {
    /// Which page of the sequence it is.
    pub index: PageIndex,
    /// How its elements are stored.
    pub kind: PageKind,
    /// Tokens filled, from the page's first slot on: `page_size` but for the open page.
    pub len: u32,
    /// Absolute positions of its tokens `[len]`, where they have moved together from several pages; `None` where they are
    /// those of the page's index.
    positions: Option<Box<[u32]>>,
    /// Its score when it was last decided about, where that was for good.
    settled: Option<f32>,
    frame: Frame,
}

/// Counts the times a block table lost pages or tokens or moved them to other frames. Growth is not counted: it leaves pages
/// where they are, but for the tokens that the last one gets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Revision(u64);

/// Where the key and value of one position live.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slot {
    /// Bytes of the page's frame.
    pub range: Range<u64>,
    /// How the page is stored.
    pub kind: PageKind,
    /// Which of the page's slots it is, below `page_size`.
    pub index: usize,
}

impl ResidentPage {
    /// The bytes of its frame.
    pub fn range(&self) -> Range<u64> {
        self.frame.range()
    }

    /// Position that stands for its first token in attention: tokens that moved together stand at the places of those they
    /// took over from. Every query that is still to come is behind all of these places, so that their order is nobody's business.
    pub fn first_position(&self, page_size: usize) -> u32 {
        self.index.first_position(page_size)
    }

    /// Absolute positions of its tokens; ascending, unless its tokens were packed by score.
    pub fn positions(&self, page_size: usize) -> impl Iterator<Item = u32> {
        let first = self.first_position(page_size);
        (0..self.len).map(move |slot| self.positions.as_deref().map_or(first + slot, |own| own[slot as usize]))
    }

    /// Absolute positions of its tokens, if these have moved together from several pages.
    pub(super) fn moved_positions(&self) -> Option<&[u32]> {
        self.positions.as_deref()
    }

    /// Absolute position after that of its newest token.
    pub fn end_position(&self, page_size: usize) -> u32 {
        let moved = self.positions.as_deref().and_then(|own| own.iter().max());
        moved.map_or(self.first_position(page_size) + self.len, |last| last + 1)
    }

    /// Whether its tokens have moved together from several pages.
    pub fn is_compacted(&self) -> bool {
        self.positions.is_some()
    }

    /// Its score when a plan last decided about it, where the plan settled its kind and its tokens: it may be freed from then
    /// on, and nothing else happens to it.
    pub fn settled(&self) -> Option<f32> {
        self.settled
    }

    /// What there is to know of it beside its bytes.
    pub fn record(&self) -> PageRecord {
        PageRecord { index: self.index, kind: self.kind, len: self.len, positions: self.positions.clone() }
    }

    /// The copy of its first `len` tokens into `frame`.
    fn copied_to(&self, frame: &Frame, len: u32) -> PageMove {
        let place = |range| PagePlace { kind: self.kind, range };
        PageMove { page: self.index, len, from: place(self.range()), to: place(frame.range()) }
    }

    /// Whether a token could be written to it without anybody else seeing that.
    pub(super) fn is_owned(&self, pool: &PagePool) -> bool {
        !pool.is_shared(&self.frame)
    }

    /// Bytes it takes beside its entry in the table.
    fn heap_bytes(&self) -> usize {
        self.positions.as_deref().map_or(0, size_of_val)
    }
}

/// Resident pages of one KV group, ascending.
#[derive(Debug, Default)]
pub(super) struct Table {
    pages: Vec<ResidentPage>,
    /// Tokens of `pages`, and their number and bytes by kind: kept as they change, since a step asks for them more often
    /// than it changes them, and a long sequence has many pages.
    resident_tokens: usize,
    held: Vec<KindFootprint>,
    /// Bytes of the positions of compacted pages.
    position_bytes: usize,
    /// Whether tokens stand in another order than that of their positions.
    is_packed: bool,
    revision: Revision,
    /// The first place whose page the last revision changed.
    first_changed: usize,
}

impl Table {
    pub(super) fn pages(&self) -> &[ResidentPage] {
        &self.pages
    }

    pub(super) fn resident_tokens(&self) -> usize {
        self.resident_tokens
    }

    pub(super) fn held(&self) -> &[KindFootprint] {
        &self.held
    }

    pub(super) fn revision(&self) -> Revision {
        self.revision
    }

    /// The first place whose page may be another than at `revision`.
    pub(super) fn first_changed(&self, revision: Revision) -> usize {
        match self.revision.0.checked_sub(revision.0) {
            Some(0) => self.pages.len(),
            Some(1) => self.first_changed,
            _ => 0,
        }
    }

    fn change(&mut self, first_changed: usize) {
        self.revision.0 += 1;
        self.first_changed = first_changed;
    }

    /// Bytes the table takes beside itself.
    pub(super) fn heap_bytes(&self) -> u64 {
        let entries =
            self.pages.capacity() * size_of::<ResidentPage>() + self.held.capacity() * size_of::<KindFootprint>();
        (entries + self.position_bytes) as u64
    }

    pub(super) fn slot(&self, position: u32, page_size: usize) -> Option<Slot> {
        let slot_in = |page: &ResidentPage| page.positions(page_size).position(|own| own == position);
        if self.is_packed {
            let found = self.pages.iter().find_map(|page| Some((page, slot_in(page)?)));
            return found.map(|(page, index)| Slot { range: page.range(), kind: page.kind, index });
        }
        // Pages ascend by their tokens' positions, whether these have moved or not.
        let page = self.pages.get(self.pages.partition_point(|page| page.end_position(page_size) <= position))?;
        slot_in(page).map(|index| Slot { range: page.range(), kind: page.kind, index })
    }

    /// Adds the tokens at `positions`, which follow the last one, taking a frame for each page they begin.
    pub(super) fn extend(
        &mut self,
        positions: Range<usize>,
        page_size: usize,
        kind: PageKind,
        mut next_frame: impl FnMut() -> Frame,
    ) {
        let mut position = positions.start;
        while position < positions.end {
            let page_start = position / page_size * page_size;
            let filled = positions.end.min(page_start + page_size) - page_start;
            if position == page_start {
                let frame = next_frame();
                let held = KindFootprint::entry(&mut self.held, kind);
                held.pages += 1;
                held.bytes += frame.bytes();
                let index = PageIndex((page_start / page_size) as u32);
                self.pages.push(ResidentPage {
                    index,
                    kind,
                    len: filled as u32,
                    positions: None,
                    settled: None,
                    frame,
                });
            } else {
                // A page that has begun and is not full is the open one, and the open one is never freed.
                self.pages.last_mut().expect("the open page is resident").len = filled as u32;
            }
            self.resident_tokens += page_start + filled - position;
            position = page_start + filled;
        }
    }

    /// Adds a page that follows those it holds.
    pub(super) fn push(&mut self, record: &PageRecord, frame: Frame) {
        let PageRecord { index, kind, len, .. } = *record;
        let held = KindFootprint::entry(&mut self.held, kind);
        held.pages += 1;
        held.bytes += frame.bytes();
        self.resident_tokens += len as usize;
        let page = ResidentPage { index, kind, len, positions: record.positions.clone(), settled: None, frame };
        self.position_bytes += page.heap_bytes();
        self.pages.push(page);
    }

    /// Takes pages that hold the tokens before position `len` of `other`: full ones as frames they share, the one that a next
    /// token goes into in a frame of its own, which `moves` then names.
    pub(super) fn fork(
        &mut self,
        other: &Self,
        pool: &mut PagePool,
        shape: &CacheShape,
        len: usize,
        moves: &mut Vec<PageMove>,
    ) -> Result<(), PoolExhausted> {
        for page in &other.pages {
            let filled = len.saturating_sub(page.first_position(shape.page_size) as usize).min(page.len as usize);
            if filled == 0 {
                break;
            }
            let frame = if filled == shape.page_size {
                pool.share(&page.frame)
            } else {
                let frame = pool.allocate(page.frame.bytes())?;
                moves.push(page.copied_to(&frame, filled as u32));
                frame
            };
            self.push(&PageRecord { len: filled as u32, ..page.record() }, frame);
            if let Some(own) = self.pages.last_mut() {
                own.settled = page.settled;
            }
        }
        self.is_packed = other.is_packed;
        Ok(())
    }

    /// Gives the first `num_pages` pages frames of their own where others own theirs, too, after `copy` has filled those.
    pub(super) fn own(
        &mut self,
        pool: &mut PagePool,
        num_pages: usize,
        copy: &mut dyn FnMut(&[PageMove]),
    ) -> Result<(), PoolExhausted> {
        let frames = self.fresh_frames(pool, 0..num_pages.min(self.pages.len()))?;
        let Some(&(first, _)) = frames.first() else { return Ok(()) };
        let moves: Vec<PageMove> =
            frames.iter().map(|(place, frame)| self.pages[*place].copied_to(frame, self.pages[*place].len)).collect();
        copy(&moves);
        self.change(first);
        self.replace_frames(pool, frames);
        Ok(())
    }

    /// New frames for those pages at `places` whose bytes others own, too: all of them or none.
    fn fresh_frames(&self, pool: &mut PagePool, places: Range<usize>) -> Result<Vec<(usize, Frame)>, PoolExhausted> {
        let mut frames = Vec::new();
        for place in places {
            let frame = &self.pages[place].frame;
            if !pool.is_shared(frame) {
                continue;
            }
            match pool.allocate(frame.bytes()) {
                Ok(frame) => frames.push((place, frame)),
                Err(error) => {
                    frames.into_iter().for_each(|(_, frame)| pool.release(frame));
                    return Err(error);
                }
            }
        }
        Ok(frames)
    }

    /// Puts pages into frames as large as theirs, which go back to the pool.
    fn replace_frames(&mut self, pool: &mut PagePool, frames: Vec<(usize, Frame)>) {
        for (place, frame) in frames {
            pool.release(std::mem::replace(&mut self.pages[place].frame, frame));
        }
    }

    /// Drops the tokens from position `len` on, and the pages that are empty then.
    pub(super) fn truncate(&mut self, pool: &mut PagePool, len: usize, page_size: usize) {
        self.retain(pool, |_, page| (page.first_position(page_size) as usize) < len);
        if let Some(page) = self.pages.last_mut() {
            let left = (len - page.first_position(page_size) as usize).min(page.len as usize);
            self.resident_tokens -= page.len as usize - left;
            page.len = left as u32;
        }
        self.change(self.pages.len().saturating_sub(1));
    }

    /// Whether every page can have its fate.
    pub(super) fn check(&self, fates: &[PageFate], open_page: Option<PageIndex>) -> Result<(), FateError> {
        if fates.len() != self.pages.len() {
            return Err(FateError::Count { got: fates.len(), resident: self.pages.len() });
        }
        for (page, fate) in self.pages.iter().zip(fates) {
            match *fate {
                PageFate::Keep => {}
                PageFate::Recode(to) if to == page.kind => {}
                PageFate::Free | PageFate::Recode(_) if Some(page.index) == open_page => {
                    return Err(FateError::OpenPage { page: page.index });
                }
                PageFate::Recode(to) if !page.kind.can_become(to) => {
                    return Err(FateError::Coded { page: page.index, from: page.kind, to });
                }
                PageFate::Recode(_) | PageFate::Free => {}
            }
        }
        Ok(())
    }

    /// Moves the pages that are to be of another kind into new frames, after `recode` has filled those; returns how many.
    ///
    /// All new frames are taken before the first old one is given back, so that a refusal leaves everything as it was.
    pub(super) fn recode(
        &mut self,
        pool: &mut PagePool,
        shape: &CacheShape,
        fates: &[PageFate],
        recode: &mut dyn FnMut(&[PageMove]),
    ) -> Result<u64, PoolExhausted> {
        let (mut frames, mut moves) = (Vec::new(), Vec::new());
        for (place, (page, fate)) in self.pages.iter().zip(fates).enumerate() {
            let PageFate::Recode(kind) = *fate else { continue };
            if kind == page.kind {
                continue;
            }
            match pool.allocate(kind.page_bytes(shape)) {
                Ok(frame) => {
                    let from = PagePlace { kind: page.kind, range: page.range() };
                    let to = PagePlace { kind, range: frame.range() };
                    moves.push(PageMove { page: page.index, len: page.len, from, to });
                    frames.push((place, kind, frame));
                }
                Err(error) => {
                    frames.into_iter().for_each(|(_, _, frame)| pool.release(frame));
                    return Err(error);
                }
            }
        }
        if moves.is_empty() {
            return Ok(0);
        }
        recode(&moves);
        self.change(frames[0].0);
        for (place, kind, frame) in frames {
            let page = &mut self.pages[place];
            let held = KindFootprint::entry(&mut self.held, kind);
            held.pages += 1;
            held.bytes += frame.bytes();
            let held = KindFootprint::entry(&mut self.held, page.kind);
            held.pages -= 1;
            held.bytes -= page.frame.bytes();
            page.kind = kind;
            pool.release(std::mem::replace(&mut page.frame, frame));
        }
        Ok(moves.len() as u64)
    }

    /// Keeps the tokens at the places `kept` of those of the pages at `range`, which are full, moved together in this order into
    /// as few of these pages as hold them; frees the other ones. The tokens of other pages stay where they are.
    ///
    /// `move_tokens` is given the places of the pages before and after, and of the tokens. Pages that get other tokens and whose
    /// bytes others own, too, move to new frames, all of which are taken first.
    pub(super) fn compact(
        &mut self,
        pool: &mut PagePool,
        page_size: usize,
        range: Range<usize>,
        kept: &[u32],
        move_tokens: &mut MoveTokens<'_>,
    ) -> Result<Applied, PoolExhausted> {
        let num_left = kept.len() / page_size;
        let num_unmoved = kept.iter().zip(0..).take_while(|(from, to)| *from == to).count() / page_size;
        let (first_moved, num_kept) = (range.start + num_unmoved, range.start + num_left);
        let frames = self.fresh_frames(pool, first_moved..num_kept)?;
        let pages = &self.pages[range.clone()];
        let from: Vec<PagePlace> =
            pages.iter().map(|page| PagePlace { kind: page.kind, range: page.range() }).collect();
        let mut to = from[..num_left].to_vec();
        frames.iter().for_each(|(place, frame)| to[place - range.start].range = frame.range());
        move_tokens(&from, &to, kept);
        let positions: Vec<u32> = pages.iter().flat_map(|page| page.positions(page_size)).collect();
        self.replace_frames(pool, frames);
        self.is_packed |= !kept.is_sorted();
        for (page, kept) in self.pages[range.clone()].iter_mut().zip(kept.chunks_exact(page_size)) {
            let own: Vec<u32> = kept.iter().map(|&place| positions[place as usize]).collect();
            let first = page.first_position(page_size);
            self.position_bytes -= page.heap_bytes();
            let unmoved = own.iter().zip(first..).all(|(own, at)| *own == at);
            page.positions = (!unmoved).then(|| own.into_boxed_slice());
            self.position_bytes += page.heap_bytes();
        }
        let applied = self.retain(pool, |place, _| place < num_kept || place >= range.end);
        // One change, from the first page that has other tokens.
        if applied.pages_freed > 0 {
            self.first_changed = self.first_changed.min(first_moved);
        } else if num_unmoved < num_left {
            self.change(first_moved);
        }
        Ok(applied)
    }

    /// Settles the first pages with these scores.
    pub(super) fn settle(&mut self, scores: &[f32]) {
        for (page, &score) in self.pages.iter_mut().zip(scores) {
            page.settled = Some(score);
        }
    }

    /// Whether tokens stand in another order than that of their positions.
    pub(super) fn is_packed(&self) -> bool {
        self.is_packed
    }

    /// Keeps the pages `keep` says (given their place in the table), frees the others.
    pub(super) fn retain(&mut self, pool: &mut PagePool, keep: impl Fn(usize, &ResidentPage) -> bool) -> Applied {
        let mut applied = Applied::default();
        let (mut place, mut first_freed) = (0, None);
        for page in self.pages.extract_if(.., |page| {
            let is_freed = !keep(place, page);
            if is_freed {
                first_freed.get_or_insert(place);
            }
            place += 1;
            is_freed
        }) {
            let held = KindFootprint::entry(&mut self.held, page.kind);
            held.pages -= 1;
            held.bytes -= page.frame.bytes();
            self.resident_tokens -= page.len as usize;
            self.position_bytes -= page.heap_bytes();
            applied += Applied {
                pages_freed: 1,
                tokens_freed: u64::from(page.len),
                bytes_freed: page.frame.bytes(),
                pages_recoded: 0,
            };
            pool.release(page.frame);
        }
        if let Some(place) = first_freed {
            self.change(place);
        }
        // Metadata is memory too: a prompt cut to a fifth does not go on paying for the table it once needed.
        if self.pages.len() < self.pages.capacity() / 4 {
            self.pages.shrink_to(2 * self.pages.len());
        }
        applied
    }
}
