//! Codes of one sequence's cache: which pages are encoded, when, and with what constants.
//!
//! Tokens are written into plain pages. A page is encoded once, from what was written, when it is full, holds no sink and
//! lies outside the newest [`RECENT_TOKENS`] positions: all such pages at a prompt's end, and while decoding each as it
//! leaves the window. Codes are never encoded again, and window layers, which drop their pages soon, stay plain.
//!
//! Rotated keys need a centre and a channel scale of each KV group ([`KeyConstants`]). They are taken once, just before the
//! first page is encoded and before anything is evicted, from the keys that could be encoded then and from the queries of
//! the positions read so far; until there are [`LEAST_POSITIONS`] of those, pages stay plain. Invariants:
//! * What is encoded depends on the tokens and on where prompts end, never on chunks, threads, batches or frames.
//! * At most [`Coding::cost`]'s number of pages of a group are plain after each step, unless the pool had no room to
//!   encode, which [`Coding::encode`] reports.

mod query_moments;

use std::ops::Range;
use std::sync::Arc;

use entrokv_cache::{
    CacheShape, FateError, KvCache, KvGroup, LayerKind, PageCost, PageFate, PageKind, PageMove, PagePlace, PagePool,
    PoolExhausted, ResidentPage, Tiers,
};
use entrokv_kernels::codes::KeyConstants;

pub(crate) use self::query_moments::QueryMoments;
use crate::model::ModelRunner;
use crate::store::KeyMoments;

/// Newest tokens whose pages stay as they were written.
pub(crate) const RECENT_TOKENS: usize = 32;

/// First tokens whose pages stay as they were written: attention sinks are large, few, and read by every query.
const SINK_TOKENS: usize = 4;

/// Fewest positions that constants are taken from.
const LEAST_POSITIONS: usize = 128;

/// Most positions that constants are taken from. Constants of the first 516 positions of a text serve the rest as well as
/// those of all, and a bound keeps their cost a constant, however long the prompt.
const MOST_POSITIONS: usize = 1024;

/// What encodes the pages of one sequence.
pub(crate) struct Coding {
    kind: PageKind,
    /// Whether that, or any other kind that pages are to be of, has rotated keys.
    needs_constants: bool,
    /// Newest tokens whose pages stay as they were written.
    recent: usize,
    shape: Arc<CacheShape>,
    queries: QueryMoments,
    /// In the order of [`CacheShape::groups`], once they are taken; empty before, and where none are needed.
    constants: Vec<Option<KeyConstants>>,
    /// Whether pages that should be codes are not, because the pool had no room.
    behind: bool,
    /// Most payload bytes of global layers while new frames stood beside old ones.
    peak_held_bytes: u64,
}

impl Coding {
    /// For a sequence of `shape` whose cache is stored as `kind`; `None` where nothing is ever encoded.
    pub(crate) fn new(shape: &Arc<CacheShape>, kind: PageKind) -> Option<Self> {
        kind.is_coded().then(|| Self::of_kinds(shape, kind, kind.needs_constants()))
    }

    fn of_kinds(shape: &Arc<CacheShape>, kind: PageKind, needs_constants: bool) -> Self {
        Self {
            kind,
            needs_constants,
            recent: RECENT_TOKENS,
            shape: Arc::clone(shape),
            queries: QueryMoments::new(shape, needs_constants, positions(shape)),
            constants: Vec::new(),
            behind: false,
            peak_held_bytes: 0,
        }
    }

    /// As [`Coding::new`] for a cache of tiers, whose pages are encoded as soon as they are full: where a budget is few tokens'
    /// worth, plain ones are what it cannot afford.
    pub(crate) fn of_tiers(shape: &Arc<CacheShape>, tiers: Tiers) -> Option<Self> {
        let needs_constants = tiers.kinds().any(PageKind::needs_constants);
        tiers.coded().map(|kind| Self { recent: 0, ..Self::of_kinds(shape, kind, needs_constants) })
    }

    /// What it encodes pages as.
    pub(crate) fn kind(&self) -> PageKind {
        self.kind
    }

    /// Whether it has noted what the pages of `tiers` need.
    pub(crate) fn serves(&self, tiers: Tiers) -> bool {
        self.needs_constants || !tiers.kinds().any(PageKind::needs_constants)
    }

    /// Encodes what comes as the first of `tiers` that is coded, which it [`serves`](Self::serves).
    pub(crate) fn change_tiers(&mut self, tiers: Tiers) {
        self.kind = tiers.coded().unwrap_or(self.kind);
    }

    /// As [`Coding::new`], going on from what another sequence at rest had: what codes of the keys of the global KV groups are
    /// relative to, none where that is still to be taken, from `query_squares`, which are empty else.
    pub(crate) fn resume(shape: &Arc<CacheShape>, kind: PageKind, saved: SavedCoding) -> Option<Self> {
        let SavedCoding { constants, query_squares, behind } = saved;
        let mut coding = Self::new(shape, kind)?;
        coding.queries.resume(query_squares);
        if !constants.is_empty() {
            let mut constants = constants.into_iter();
            let of_layer = |group: KvGroup| match shape.layers[group.layer as usize] {
                LayerKind::Global => constants.next(),
                LayerKind::Window(_) => None,
            };
            coding.constants = shape.groups().map(of_layer).collect();
        }
        coding.behind = behind;
        Some(coding)
    }

    /// The same for a fork of the sequence.
    pub(crate) fn forked(&self) -> Option<Self> {
        let (recent, needs_constants) = (self.recent, self.needs_constants);
        Self::resume(&self.shape, self.kind, self.saved()).map(|fork| Self { recent, needs_constants, ..fork })
    }

    /// What [`Coding::resume`] goes on from.
    pub(crate) fn saved(&self) -> SavedCoding {
        SavedCoding {
            constants: self.constants.iter().flatten().cloned().collect(),
            query_squares: self.queries.squares().to_vec(),
            behind: self.behind,
        }
    }

    /// For a forward pass: the constants in the order of [`CacheShape::groups`], and what its queries are added to.
    pub(crate) fn parts(&mut self) -> (&[Option<KeyConstants>], &mut QueryMoments) {
        (&self.constants, &mut self.queries)
    }

    /// The constants in the order of [`CacheShape::groups`]; none before they are taken.
    pub(crate) fn constants(&self) -> &[Option<KeyConstants>] {
        &self.constants
    }

    /// The step that was begun was whole: its queries count.
    pub(crate) fn commit(&mut self) {
        self.queries.commit();
    }

    /// What pages weigh from now on.
    pub(crate) fn cost(&self) -> PageCost {
        let max_written = if self.can_encode() {
            sink_pages(&self.shape) + self.recent.div_ceil(self.shape.page_size) + 1
        } else {
            usize::MAX
        };
        PageCost { written: self.kind.written_as(), stored: self.kind, max_written }
    }

    /// Bytes kept beside the pages: constants, and the sums they are taken from.
    pub(crate) fn state_bytes(&self) -> u64 {
        let constants = self.constants.iter().flatten().count() * KeyConstants::bytes(self.shape.head_dim);
        (constants + self.queries.bytes()) as u64
    }

    /// Most payload bytes of global layers while pages were encoded, new frames and old.
    pub(crate) fn peak_held_bytes(&self) -> u64 {
        self.peak_held_bytes
    }

    /// Logical length at which the next page leaves the window of a sequence of `len` tokens.
    pub(crate) fn next_boundary(&self, len: usize) -> usize {
        let page_size = self.shape.page_size;
        (len + 1).saturating_sub(self.recent).next_multiple_of(page_size) + self.recent
    }

    /// Takes the constants if they are needed, not taken yet, and there are positions enough.
    pub(crate) fn take_constants(&mut self, cache: &KvCache, runner: &dyn ModelRunner, when: EncodeWhen) -> Taken {
        let len = cache.logical_len();
        if self.can_encode() || len < LEAST_POSITIONS + self.recent || !self.is_time(when, len) {
            return Taken::No;
        }
        let page_size = self.shape.page_size;
        let places = |group: KvGroup| -> Vec<PagePlace> {
            let counts = |page: &&ResidentPage| {
                self.may_encode(page, len) && (page.end_position(page_size) as usize) <= positions(&self.shape).end
            };
            let place = |page: &ResidentPage| PagePlace { kind: page.kind, range: page.range() };
            cache.table(group).iter().filter(counts).map(place).collect()
        };
        let groups: Vec<Vec<PagePlace>> = self.shape.global_groups().map(places).collect();
        if groups.iter().any(|pages| pages.len() * page_size < LEAST_POSITIONS) {
            return Taken::No;
        }
        let mut moments = runner.key_moments(&groups).into_iter();
        let constants = self.shape.groups().enumerate().map(|(index, group)| {
            if self.shape.layers[group.layer as usize] != LayerKind::Global {
                return None;
            }
            let KeyMoments { mean, std } = moments.next()?;
            Some(KeyConstants::from_moments(&mean, &std, &self.queries.rms(index, len)))
        });
        self.constants = constants.collect();
        self.queries.finish();
        Taken::Yes
    }

    /// Encodes every page of `cache` that has left the window, if any can have done so since the last step.
    ///
    /// # Errors
    /// [`PoolExhausted`] if the pool had no room for some group's codes beside its plain pages: these stay as they are and
    /// are tried again after the next step.
    pub(crate) fn encode(
        &mut self,
        cache: &mut KvCache,
        pool: &mut PagePool,
        runner: &mut dyn ModelRunner,
        when: EncodeWhen,
    ) -> Result<(), PoolExhausted> {
        let len = cache.logical_len();
        if !self.can_encode() || !(self.behind || self.is_time(when, len)) {
            return Ok(());
        }
        self.behind = false;
        let mut refused = Ok(());
        let mut fates = Vec::new();
        let mut held = cache.footprint().global_bytes;
        let bytes = |place: &PagePlace| place.range.end - place.range.start;
        for (index, group) in self.shape.groups().enumerate() {
            if self.shape.layers[group.layer as usize] != LayerKind::Global {
                continue;
            }
            fates.clear();
            fates.extend(
                cache
                    .table(group)
                    .iter()
                    .map(|page| if self.may_encode(page, len) { PageFate::Recode(self.kind) } else { PageFate::Keep }),
            );
            if fates.iter().all(|fate| *fate == PageFate::Keep) {
                continue;
            }
            let constants = self.constants.get(index).and_then(Option::as_ref);
            let mut recode = |moves: &[PageMove]| {
                runner.recode(moves, constants);
                held += moves.iter().map(|page| bytes(&page.to)).sum::<u64>();
                self.peak_held_bytes = self.peak_held_bytes.max(held);
                held -= moves.iter().map(|page| bytes(&page.from)).sum::<u64>();
            };
            match cache.apply(pool, group, &fates, &mut recode) {
                Ok(_) => {}
                Err(FateError::Pool(error)) => {
                    self.behind = true;
                    refused = Err(error);
                }
                Err(error) => unreachable!("full plain pages of a global layer can be encoded: {error}"),
            }
        }
        refused
    }

    fn is_time(&self, when: EncodeWhen, len: usize) -> bool {
        let past = len.checked_sub(self.recent);
        when == EncodeWhen::Now || past.is_some_and(|past| past.is_multiple_of(self.shape.page_size))
    }

    /// Whether there is all that encoding takes.
    pub(crate) fn can_encode(&self) -> bool {
        !self.needs_constants || !self.constants.is_empty()
    }

    /// Whether a page of a sequence of `len` tokens is to be codes and is not yet.
    fn may_encode(&self, page: &ResidentPage, len: usize) -> bool {
        page.kind != self.kind
            && page.settled().is_none()
            && page.index.0 as usize >= sink_pages(&self.shape)
            && page.len as usize == self.shape.page_size
            && page.end_position(self.shape.page_size) as usize + self.recent <= len
    }
}

/// The state of a [`Coding`] between two turns.
#[derive(Debug, Default)]
pub(crate) struct SavedCoding {
    /// Of the global KV groups; empty before they are taken, and where none are needed.
    pub(crate) constants: Vec<KeyConstants>,
    /// What they are taken from: sums `[num_groups, head_dim]`; empty once they are.
    pub(crate) query_squares: Vec<f64>,
    /// Whether pages that should be codes are not.
    pub(crate) behind: bool,
}

/// When pages are looked for that have left the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EncodeWhen {
    /// Where a single token may have pushed a page out of the window: after a token of an answer.
    AtBoundary,
    /// In any case: at a prompt's end.
    Now,
}

/// Whether constants were taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// Not now.
    No,
    /// Just now: pages are encoded from here on.
    Yes,
}

/// Positions that constants are taken from, as far as they have been computed.
fn positions(shape: &CacheShape) -> Range<usize> {
    let first = sink_pages(shape) * shape.page_size;
    first..first + MOST_POSITIONS.next_multiple_of(shape.page_size)
}

/// Pages that hold a sink and are never encoded.
pub(crate) fn sink_pages(shape: &CacheShape) -> usize {
    SINK_TOKENS.div_ceil(shape.page_size)
}
