//! The KV cache of one sequence: a block table for each (layer, KV head), and what becomes of the pages in it.
//!
//! The *logical length* is how many tokens the sequence has had; how many of them a KV group still holds is its
//! *resident length*. Pages keep their index, so keys keep their absolute position whatever is evicted around them.
//! The last page of a table is *open* while it has room; every table opens its pages at the same logical lengths.
//!
//! Invariants, each a test of that name:
//!
//! * `growing_is_all_or_nothing`: a refused growth changes neither cache nor pool.
//! * `growing_opens_as_many_pages_as_needed`, for any number of tokens at once.
//! * `evicted_pages_never_come_back`, and what remains stays in ascending order.
//! * `the_open_page_cannot_be_freed`: the next token would have nowhere to go.
//! * `a_refused_fate_changes_nothing`, a plan the pool has no room for included.
//! * `tokens_that_stay_move_together`, keep their positions, and free every page they do not fill.
//! * `packed_tokens_stand_where_they_were_put`, and every position is still found.
//! * `settled_pages_do_not_move`.
//! * `a_recoded_page_moves_to_a_frame_of_its_size`, and the old frame is free once its bytes have been read.
//! * `truncating_undoes_growing`, to the byte.
//! * `window_layers_keep_what_the_next_query_sees`, and no policy touches them.
//! * `footprint_is_what_the_frames_hold`.
//! * `releasing_returns_every_frame`.
//! * `what_follows_revisions_is_what_a_table_holds`.
//! * `nothing_written_to_a_fork_shows_in_another`, whatever either does.
//! * `a_restored_cache_is_the_one_it_was_noted_from`, and `what_no_cache_can_hold_is_refused_and_takes_nothing`.

mod fate;
mod footprint;
mod fork;
mod restore;
mod table;

use std::sync::Arc;

use crate::page::PageIndex;
use crate::page_kind::PageKind;
use crate::pool::{PagePool, PoolExhausted};
use crate::shape::{CacheShape, KvGroup, LayerKind};

use self::table::Table;

pub use self::fate::{Applied, FateError, MoveTokens, PageFate, PageMove, PagePlace};
pub use self::footprint::{Footprint, KindFootprint};
pub use self::restore::{PageRecord, RestoreError};
pub use self::table::{ResidentPage, Revision, Slot};

/// Block tables of one sequence, one for each KV group, over frames of a [`PagePool`].
///
/// Every call that takes a pool must be given the one the cache grew from. A cache holds frames until
/// [`KvCache::release`]; dropping it instead is a bug that debug builds refuse, as for a [`Frame`](crate::Frame).
///
/// Methods that take a [`KvGroup`] panic if the shape has no such group.
///
/// ```
/// use std::sync::Arc;
/// use entrokv_cache::{CacheShape, KvCache, KvGroup, LayerKind, PageFate, PageKind, PagePool};
///
/// // Two layers of three KV heads, 64 elements a key, 16 tokens a page.
/// let shape = Arc::new(CacheShape::new(vec![LayerKind::Global; 2], 3, 3, 64, 16)?);
/// let mut pool = PagePool::new(1 << 20);
/// let mut cache = KvCache::new(shape, PageKind::F16);
/// cache.grow(&mut pool, 40)?;
///
/// // One page of one head goes; its siblings stay, and so do all positions.
/// let group = KvGroup { layer: 1, kv_head: 2 };
/// cache.apply(&mut pool, group, &[PageFate::Keep, PageFate::Free, PageFate::Keep], &mut |_| ())?;
/// assert_eq!((cache.logical_len(), cache.resident_tokens(group)), (40, 24));
/// assert_eq!(cache.slot(group, 20), None);
/// assert_eq!(cache.footprint().global_bytes, (6 * 3 - 1) * 4096);
/// cache.release(&mut pool);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct KvCache {
    shape: Arc<CacheShape>,
    kind: PageKind,
    logical_len: usize,
    /// In the order of [`CacheShape::groups`].
    tables: Vec<Table>,
}

impl KvCache {
    /// An empty cache whose pages are opened as `kind`.
    pub fn new(shape: Arc<CacheShape>, kind: PageKind) -> Self {
        let tables = (0..shape.num_groups()).map(|_| Table::default()).collect();
        Self { shape, kind, logical_len: 0, tables }
    }

    /// The geometry.
    pub fn shape(&self) -> &CacheShape {
        &self.shape
    }

    /// Kind of newly opened pages.
    pub fn kind(&self) -> PageKind {
        self.kind
    }

    /// Tokens the sequence has had, evicted ones included: the absolute position of the next one.
    pub fn logical_len(&self) -> usize {
        self.logical_len
    }

    /// Tokens `group` still holds.
    pub fn resident_tokens(&self, group: KvGroup) -> usize {
        self.table_of(group).resident_tokens()
    }

    /// The pages `group` holds, ascending by index; the open page, if there is one, is the last.
    pub fn table(&self, group: KvGroup) -> &[ResidentPage] {
        self.table_of(group).pages()
    }

    /// How often `group` has lost pages or tokens or moved them, for who keeps something that was read from its table.
    pub fn revision(&self, group: KvGroup) -> Revision {
        self.table_of(group).revision()
    }

    /// The first place in the table of `group` whose page may be another, in another frame, or of other tokens than at `revision`:
    /// pages before it are as they were, but that the last one may have got tokens. Exact for the last revision and the one
    /// before.
    pub fn first_changed(&self, group: KvGroup, revision: Revision) -> usize {
        self.table_of(group).first_changed(revision)
    }

    /// Where the key and value of `position` live in `group`; `None` once evicted, and for positions not reached yet.
    pub fn slot(&self, group: KvGroup, position: u32) -> Option<Slot> {
        self.table_of(group).slot(position, self.shape.page_size)
    }

    /// Index of the page that is partly filled, if one is: every table holds it, as its last.
    pub fn open_page(&self) -> Option<PageIndex> {
        (!self.logical_len.is_multiple_of(self.shape.page_size))
            .then(|| PageIndex((self.logical_len / self.shape.page_size) as u32))
    }

    /// Pages each KV group opens when the sequence grows by `num_tokens`.
    pub fn new_pages_per_group(&self, num_tokens: usize) -> usize {
        self.shape.pages_for(self.logical_len.saturating_add(num_tokens)) - self.shape.pages_for(self.logical_len)
    }

    /// Pages [`KvCache::grow`] takes from the pool for `num_tokens`, over all KV groups.
    pub fn pages_needed(&self, num_tokens: usize) -> u64 {
        (self.new_pages_per_group(num_tokens) as u64).saturating_mul(self.tables.len() as u64)
    }

    /// Makes room for `num_tokens` more tokens in every KV group: fills open pages, then opens new ones.
    ///
    /// # Errors
    /// [`PoolExhausted`] if the pool cannot hold all new pages of all groups, or positions would pass 32 bits. Then
    /// nothing has changed.
    pub fn grow(&mut self, pool: &mut PagePool, num_tokens: usize) -> Result<(), PoolExhausted> {
        let page_bytes = self.kind.page_bytes(&self.shape);
        let num_pages = self.pages_needed(num_tokens);
        let len = self.logical_len.checked_add(num_tokens).filter(|len| u32::try_from(*len).is_ok());
        // Asking first, for the exact number, spares the pool from allocations that would have to be undone.
        let Some(len) = len.filter(|_| pool.available(page_bytes, num_pages) == num_pages) else {
            return Err(pool.exhausted(num_pages.saturating_mul(page_bytes)));
        };
        for table in &mut self.tables {
            table.extend(self.logical_len..len, self.shape.page_size, self.kind, || {
                pool.allocate(page_bytes).expect("the pool has just said that all pages fit")
            });
        }
        self.logical_len = len;
        Ok(())
    }

    /// Forgets every token from position `len` on and frees the pages that held no others: the sequence is as it was when it
    /// had `len` tokens, but for what has been evicted since. Does nothing to a sequence that is no longer than that.
    ///
    /// # Panics
    /// If a fork shares the page that would be open again: a token written to it would show there. In debug builds also if that
    /// page has been encoded or evicted: a token could not be written to it.
    pub fn truncate(&mut self, pool: &mut PagePool, len: usize) {
        if len >= self.logical_len {
            return;
        }
        for table in &mut self.tables {
            table.truncate(pool, len, self.shape.page_size);
        }
        self.logical_len = len;
        let is_owned = |table: &Table| table.pages().last().is_none_or(|page| page.is_owned(pool));
        assert!(self.open_page().is_none() || self.tables.iter().all(is_owned), "the open page is written to");
        debug_assert!(
            self.open_page().is_none_or(|open| self.tables.iter().all(|table| {
                table.pages().last().is_some_and(|page| page.index == open && page.kind == self.kind)
            })),
            "the open page must be there to be written to"
        );
    }

    /// Gives each page `group` holds its fate, in the order of [`KvCache::table`].
    ///
    /// Pages that are to be of another kind get new frames first; `recode` is called once with all of them, if there are
    /// any, and must fill the new frames from the old ones. Then the old frames go back to the pool, and so do those of
    /// the pages that are freed.
    ///
    /// # Errors
    /// [`FateError`] if the fates are not one a page, a page cannot have its fate, the pool has no room for the new frames
    /// beside the old ones, or the group belongs to a window layer, which no policy touches. Then nothing has changed and
    /// `recode` was not called.
    pub fn apply(
        &mut self,
        pool: &mut PagePool,
        group: KvGroup,
        fates: &[PageFate],
        recode: &mut dyn FnMut(&[PageMove]),
    ) -> Result<Applied, FateError> {
        let open_page = self.open_page();
        let index = self.shape.group_index(group);
        if self.shape.layers[group.layer as usize] != LayerKind::Global {
            return Err(FateError::WindowLayer { layer: group.layer });
        }
        let table = &mut self.tables[index];
        table.check(fates, open_page)?;
        let pages_recoded = table.recode(pool, &self.shape, fates, recode)?;
        let freed = table.retain(pool, |index, _| fates[index] != PageFate::Free);
        Ok(Applied { pages_recoded, ..freed })
    }

    /// Pages at the head of the table of `group` that are settled ([`ResidentPage::settled`]).
    pub fn num_settled(&self, group: KvGroup) -> usize {
        self.table(group).partition_point(|page| page.settled().is_some())
    }

    /// Settles the first pages of `group`, as many as there are `scores`: pages that may only be freed from now on.
    pub fn settle(&mut self, group: KvGroup, scores: &[f32]) {
        let index = self.shape.group_index(group);
        self.tables[index].settle(scores);
    }

    /// Whether tokens of `group` stand in another order than that of their positions.
    pub fn is_packed(&self, group: KvGroup) -> bool {
        self.table_of(group).is_packed()
    }

    /// Writes to `columns`, in place of what was there, a number for each token that `group` holds, ascending in the order of
    /// [`KvCache::table`]: its absolute position, or, in a packed group, the place at which it stands in attention.
    pub fn columns(&self, group: KvGroup, columns: &mut Vec<u32>) {
        let (table, page_size, is_packed) = (self.table(group), self.shape.page_size, self.is_packed(group));
        columns.clear();
        columns.reserve(table.len() * page_size);
        for page in table {
            match page.moved_positions() {
                Some(moved) if !is_packed => columns.extend_from_slice(moved),
                _ => {
                    let first = page.first_position(page_size);
                    columns.extend(first..first + page.len);
                }
            }
        }
    }

    /// Whether the tokens of `group` in pages that are not settled can be kept and evicted one by one ([`KvCache::compact`]): these
    /// pages are plain.
    pub fn is_by_token(&self, group: KvGroup) -> bool {
        let table = &self.table(group)[self.num_settled(group)..];
        table.iter().all(|page| page.kind == self.kind && !page.kind.is_coded())
    }

    /// Keeps the tokens of `group` at the places `kept` of those it holds in pages neither settled nor open, in the order of
    /// [`KvCache::table`]; the others go. What stays is moved together, in the order of `kept`, into the first of these pages, and
    /// the rest of them are freed. In another order than an ascending one the tokens are *packed*.
    ///
    /// Tokens keep their positions ([`ResidentPage::positions`]). `move_tokens` is called once with the pages that hold them now,
    /// all full, those that will, and `kept`: it must move token `kept[i]` to place `i`. Pages that a fork shares move to new
    /// frames, so that it sees nothing of this.
    ///
    /// # Errors
    /// [`FateError`] if `kept` is not a whole number of pages' worth of places, all different, a page is not plain, the group
    /// belongs to a window layer, or the pool has no room for new frames. Then nothing has changed and `move_tokens` was not
    /// called.
    pub fn compact(
        &mut self,
        pool: &mut PagePool,
        group: KvGroup,
        kept: &[u32],
        move_tokens: &mut MoveTokens<'_>,
    ) -> Result<Applied, FateError> {
        if self.shape.layers[group.layer as usize] != LayerKind::Global {
            return Err(FateError::WindowLayer { layer: group.layer });
        }
        if !self.is_by_token(group) {
            return Err(FateError::CodedTokens { layer: group.layer });
        }
        let page_size = self.shape.page_size;
        let pages = self.num_settled(group)..self.table(group).len() - usize::from(self.open_page().is_some());
        let closed = pages.len() * page_size;
        let mut is_kept = vec![false; closed];
        let differ = kept
            .iter()
            .all(|&place| is_kept.get_mut(place as usize).is_some_and(|is_kept| !std::mem::replace(is_kept, true)));
        if !differ || !kept.len().is_multiple_of(page_size) {
            return Err(FateError::Tokens { got: kept.len(), closed, page_size });
        }
        let index = self.shape.group_index(group);
        Ok(self.tables[index].compact(pool, page_size, pages, kept, move_tokens)?)
    }

    /// Frees the pages of window layers that the next query cannot see: those without a position greater than
    /// `logical_len - window`. The open page stays even for a window of one token, since the next token goes there.
    pub fn slide_windows(&mut self, pool: &mut PagePool) -> Applied {
        let open_page = self.open_page();
        let page_size = self.shape.page_size;
        let mut applied = Applied::default();
        for (layer, tables) in self.tables.chunks_mut(self.shape.num_kv_heads).enumerate() {
            let LayerKind::Window(window) = self.shape.layers[layer] else { continue };
            let first_visible = (self.logical_len + 1).saturating_sub(window as usize);
            for table in tables {
                // Ascending pages: those out of sight are the first ones, and on most steps there are none.
                let is_past = |page: &ResidentPage| {
                    page.end_position(page_size) as usize <= first_visible && Some(page.index) != open_page
                };
                let num_past = table.pages().partition_point(is_past);
                if num_past > 0 {
                    applied += table.retain(pool, |place, _| place >= num_past);
                }
            }
        }
        applied
    }

    /// What the cache holds, counted from its frames.
    pub fn footprint(&self) -> Footprint {
        let mut footprint = Footprint {
            metadata_bytes: (size_of::<Self>() + self.tables.capacity() * size_of::<Table>()) as u64,
            ..Footprint::default()
        };
        for (group, table) in self.shape.groups().zip(&self.tables) {
            footprint.add(self.shape.layers[group.layer as usize], table);
        }
        footprint
    }

    /// Gives every frame back.
    pub fn release(mut self, pool: &mut PagePool) {
        for table in &mut self.tables {
            table.retain(pool, |_, _| false);
        }
    }

    fn table_of(&self, group: KvGroup) -> &Table {
        &self.tables[self.shape.group_index(group)]
    }
}

#[cfg(test)]
mod tests;
