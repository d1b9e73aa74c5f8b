//! What one KV head of a sequence attends to: checked as it is put together, so that it can be kept from call to call.
//!
//! Invariant, which the kernels' reads and writes rely on: segments ascend by position and do not overlap, none has more tokens
//! than its page has slots, their formats exist for the list's pages, and with codes among them all start at multiples of 16.
//! Where their frames are is checked when they are read.

use super::coded::KeyCodes;
use crate::page::{PageFormat, PageLayout};
use crate::simd::LANES;

/// Filled slots of one page of one KV head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The format of the page's keys; one list may mix formats.
    pub keys: PageFormat,
    /// The format of its values.
    pub values: PageFormat,
    /// Where its frame begins, in bytes of [`AttentionSpan::memory`](super::AttentionSpan::memory).
    pub frame: usize,
    /// Absolute position of slot 0; slot `i` holds the token at `position + i`.
    pub position: u32,
    /// Number of filled slots.
    pub len: u32,
}

impl Segment {
    /// The position after the last filled slot.
    pub(super) fn end(&self) -> u64 {
        u64::from(self.position) + u64::from(self.len)
    }
}

/// The segments of one KV head in ascending position, and what a call must know of them: a step of decoding would not want
/// to look at each of tens of thousands for that.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentList {
    page_size: usize,
    head_dim: usize,
    segments: Vec<Segment>,
    /// Number of tokens before each segment.
    first_tokens: Vec<u32>,
    num_tokens: usize,
    contents: Contents,
}

/// Numbers of segments of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Contents {
    /// By the format of their keys, in the order of [`PageFormat`].
    keys: [usize; PageFormat::ALL.len()],
    /// By the format of their values.
    values: [usize; PageFormat::ALL.len()],
    /// Those that start at no multiple of 16.
    off_strips: usize,
}

impl SegmentList {
    /// An empty list of pages of `page_size` slots, with keys and values of `head_dim` elements.
    pub fn new(page_size: usize, head_dim: usize) -> Self {
        let (segments, first_tokens) = (Vec::new(), Vec::new());
        SegmentList { page_size, head_dim, segments, first_tokens, num_tokens: 0, contents: Contents::default() }
    }

    /// The segments, ascending.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Slots of a page.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Number of tokens of all segments.
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// Bytes the list takes beside itself.
    pub fn heap_bytes(&self) -> u64 {
        (self.segments.capacity() * size_of::<Segment>() + self.first_tokens.capacity() * size_of::<u32>()) as u64
    }

    /// Adds a segment.
    ///
    /// # Panics
    /// If it begins before the last one ends, has more tokens than a page has slots, positions of more than 32 bits or formats
    /// its page cannot have, or if one of a list with codes starts at no multiple of 16.
    pub fn push(&mut self, segment: Segment) {
        let last = self.segments.last();
        if last.is_none_or(|last| [last.keys, last.values] != [segment.keys, segment.values]) {
            assert_eq!(self.layout(&segment).validate(), Ok(()));
        }
        assert!(segment.len as usize <= self.page_size, "{} tokens in a page", segment.len);
        let end = last.map_or(0, Segment::end);
        assert!(
            u64::from(segment.position) >= end,
            "segments must be in ascending order and must not overlap: position {} follows {end}",
            segment.position,
        );
        assert!(segment.end() <= 1 << 32, "positions up to {} do not fit 32 bits", segment.end());
        self.contents.add(&segment);
        assert!(
            self.contents.off_strips == 0 || !self.contents.any(PageFormat::is_coded),
            "pages beside coded ones start at multiples of {LANES}",
        );
        self.segments.push(segment);
        // No truncation: tokens have different positions, of 32 bits.
        self.first_tokens.push(self.num_tokens as u32);
        self.num_tokens += segment.len as usize;
    }

    /// Drops all segments from the `len`-th on.
    pub fn truncate(&mut self, len: usize) {
        for segment in self.segments.drain(len.min(self.segments.len())..) {
            self.contents.remove(&segment);
            self.num_tokens -= segment.len as usize;
        }
        self.first_tokens.truncate(len);
    }

    /// The list of its segments at `places`, which ascend.
    ///
    /// # Panics
    /// If there is no such segment, or places do not ascend.
    #[must_use]
    pub fn of_places(&self, places: &[usize]) -> SegmentList {
        let mut list = SegmentList::new(self.page_size, self.head_dim);
        list.segments.reserve_exact(places.len());
        list.first_tokens.reserve_exact(places.len());
        places.iter().for_each(|&place| list.push(self.segments[place]));
        list
    }

    /// Gives back memory that a list which was once much longer does not need.
    pub fn shrink(&mut self) {
        if self.segments.len() < self.segments.capacity() / 4 {
            self.segments.shrink_to(2 * self.segments.len());
            self.first_tokens.shrink_to(2 * self.segments.len());
        }
    }

    /// Whether it is of pages of `page_size` slots with keys and values of `head_dim` elements.
    pub(super) fn has_shape(&self, page_size: usize, head_dim: usize) -> bool {
        (self.page_size, self.head_dim) == (page_size, head_dim)
    }

    /// Number of tokens before the segment at `place`; of all tokens from its end on.
    #[inline(always)]
    pub(super) fn first_token(&self, place: usize) -> usize {
        self.first_tokens.get(place).map_or(self.num_tokens, |&first_token| first_token as usize)
    }

    /// The place of the first segment that ends after `position`.
    pub(super) fn place_from(&self, position: u64) -> usize {
        let ended = |segment: &Segment| segment.end() <= position;
        // Where it is if nothing was evicted: a search would miss the nearest caches at every step.
        let place = (position / self.page_size as u64) as usize;
        match (place.checked_sub(1), self.segments.get(place)) {
            (before, Some(segment)) if !ended(segment) && before.is_none_or(|before| ended(&self.segments[before])) => {
                place
            }
            _ => self.segments.partition_point(ended),
        }
    }

    /// Number of tokens before `position`.
    pub(super) fn tokens_before(&self, position: u64) -> usize {
        let place = self.place_from(position);
        let inside = self.segments.get(place).map_or(0, |segment| position.saturating_sub(u64::from(segment.position)));
        self.first_token(place) + inside as usize
    }

    /// Codes of its keys.
    pub(super) fn key_codes(&self) -> KeyCodes {
        PageFormat::ALL
            .into_iter()
            .filter(|format| self.contents.keys[*format as usize] > 0)
            .fold(KeyCodes::default(), KeyCodes::with)
    }

    /// Whether some of its values are stored rotated.
    pub(super) fn has_rotated_values(&self) -> bool {
        PageFormat::ALL.into_iter().any(|format| format.is_rotated() && self.contents.values[format as usize] > 0)
    }

    /// Whether some of its keys or values are codes that attention reads as what they stand for.
    pub(super) fn has_min_max(&self) -> bool {
        self.contents.any(|format| format.min_max_bits().is_some())
    }

    fn layout(&self, segment: &Segment) -> PageLayout {
        let Segment { keys, values, .. } = *segment;
        PageLayout { keys, values, page_size: self.page_size, head_dim: self.head_dim }
    }
}

impl Contents {
    fn add(&mut self, segment: &Segment) {
        self.keys[segment.keys as usize] += 1;
        self.values[segment.values as usize] += 1;
        self.off_strips += usize::from(!segment.position.is_multiple_of(LANES as u32));
    }

    fn remove(&mut self, segment: &Segment) {
        self.keys[segment.keys as usize] -= 1;
        self.values[segment.values as usize] -= 1;
        self.off_strips -= usize::from(!segment.position.is_multiple_of(LANES as u32));
    }

    /// Whether keys or values of some segment are of such a format.
    fn any(&self, such: fn(PageFormat) -> bool) -> bool {
        let held = |format: PageFormat| self.keys[format as usize] + self.values[format as usize] > 0;
        PageFormat::ALL.into_iter().any(|format| such(format) && held(format))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(position: u32, len: u32) -> Segment {
        Segment { keys: PageFormat::F16, values: PageFormat::F16, frame: 0, position, len }
    }

    fn list(page_size: usize, segments: impl IntoIterator<Item = Segment>) -> SegmentList {
        let mut list = SegmentList::new(page_size, 64);
        segments.into_iter().for_each(|segment| list.push(segment));
        list
    }

    #[test]
    fn a_truncated_list_is_one_that_never_was_longer() {
        let coded = |position| Segment { keys: PageFormat::Q8_0, values: PageFormat::Tq2, ..segment(position, 16) };
        let all = [segment(0, 16), coded(16), segment(48, 16), coded(64), segment(96, 3)];
        for len in 0..=all.len() {
            let mut truncated = list(16, all);
            truncated.truncate(len);
            assert_eq!(truncated, list(16, all[..len].iter().copied()));
        }
        // What was coded is gone, and with it what it asked of the others.
        let mut emptied = list(16, all);
        emptied.truncate(0);
        emptied.push(segment(5, 7));
        assert_eq!(emptied, list(16, [segment(5, 7)]));
    }

    #[test]
    fn a_list_of_places_is_one_of_these_segments() {
        let coded = |position| Segment { keys: PageFormat::Q8_0, values: PageFormat::Tq2, ..segment(position, 16) };
        let all = [segment(0, 16), coded(16), segment(48, 16), coded(64), segment(96, 3)];
        assert_eq!(list(16, all).of_places(&[0, 2, 4]), list(16, [all[0], all[2], all[4]]));
        assert_eq!(list(16, all).of_places(&[0, 1, 2, 3, 4]), list(16, all));
        assert_eq!(list(16, all).of_places(&[]), list(16, []));
    }

    #[test]
    fn tokens_before_a_position_are_counted_over_gaps() {
        let list = list(8, [segment(3, 5), segment(8, 8), segment(40, 2)]);
        for (position, want) in [(0, 0), (3, 0), (4, 1), (8, 5), (15, 12), (16, 13), (39, 13), (41, 14), (99, 15)] {
            assert_eq!(list.tokens_before(position), want, "position {position}");
        }
        assert_eq!([0, 1, 2, 3].map(|place| list.first_token(place)), [0, 5, 13, 15]);
    }

    #[test]
    fn the_place_of_a_position_is_found_with_and_without_gaps() {
        let whole = list(16, (0..9).map(|page| segment(page * 16, 16)));
        let short_pages = list(16, (0..40).map(|page| segment(page * 3, 3)));
        let gaps = list(16, [segment(16, 16), segment(32, 16), segment(80, 5), segment(112, 16)]);
        for list in [whole, short_pages, gaps, list(16, [])] {
            for position in 0..150 {
                let want = list.segments().iter().take_while(|segment| segment.end() <= position).count();
                assert_eq!(list.place_from(position), want, "position {position} of {:?}", list.segments());
            }
        }
    }

    #[test]
    fn memory_of_a_list_that_was_long_goes_back() {
        let mut list = list(16, (0..1000).map(|page| segment(page * 16, 16)));
        let before = list.heap_bytes();
        list.truncate(100);
        list.shrink();
        assert!(list.heap_bytes() <= 200 * 28 && before >= 1000 * 28, "{before} {}", list.heap_bytes());
    }

    #[test]
    #[should_panic(expected = "must not overlap: position 8 follows 16")]
    fn overlapping_segments_panic() {
        list(16, [segment(0, 16), segment(8, 8)]);
    }

    #[test]
    #[should_panic(expected = "17 tokens in a page")]
    fn more_tokens_than_slots_panic() {
        list(16, [segment(0, 17)]);
    }

    #[test]
    #[should_panic(expected = "start at multiples of 16")]
    fn a_page_off_the_strips_beside_codes_panics() {
        list(16, [segment(8, 16), Segment { keys: PageFormat::Q8_0, ..segment(32, 16) }]);
    }
}
