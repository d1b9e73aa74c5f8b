//! What a tile's keys and values are read from: strips of 16 absolute positions.
//!
//! A strip's keys lie transposed: lane `i` of every vector belongs to position `first + i`, `first` being a multiple of 16.
//! Pages whose slots line up with that are read where they are; of others, and of pages of two bytes an element that many
//! queries will read, an f32 copy is made in a buffer of the thread's.

use std::ops::Range;

use half::bf16;

use super::aligned::Aligned;
use super::pack::{PackKeys, PackValues};
use super::softmax::Sight;
use super::{AttentionParams, ScoreArithmetic, Segment, SegmentList, TILE};
use crate::codes::min_max::{ExpandStrip, MinMaxStrip};
use crate::codes::packing::Part;
use crate::page::{PageFormat, PageLayout};
use crate::simd::{Kernel, LANES, Pairs, Simd};

/// Up to how many query rows read f16 and bf16 pages directly, converting as they load. More rows than two register blocks share
/// the cost of an f32 copy.
const MAX_DIRECT_ROWS: usize = 12;

/// How many strips ahead of those in use memory is asked for: 64 KiB of f16 pages of 64 elements.
const STRIPS_AHEAD: usize = 16;

/// Strips of a whole tile.
const MAX_STRIPS: usize = TILE as usize / LANES;

/// The resident tokens of 16 absolute positions.
#[derive(Clone, Copy, Debug)]
pub(super) struct Strip {
    /// How keys are stored.
    pub(super) key_format: PageFormat,
    /// How values are stored.
    pub(super) value_format: PageFormat,
    /// Key elements of 16 slots, as they lie in a page.
    pub(super) keys: *const u8,
    /// Value elements of 16 slots, as they lie in a page of a head dimension of `value_stride`.
    pub(super) values: *const u8,
    /// A multiple of 16, at least `head_dim`.
    pub(super) value_stride: usize,
    /// What to ask memory for while these keys are read, as many bytes; only a hint, never read through.
    pub(super) ahead_of_keys: *const u8,
    /// The same for these values.
    pub(super) ahead_of_values: *const u8,
    /// The absolute position of lane 0, a multiple of 16.
    pub(super) first: u64,
    /// Which lanes are resident, never none. Keys and values of other lanes hold anything.
    pub(super) resident: u16,
    /// Place of the first resident lane in the list's tokens; the others follow.
    pub(super) first_token: usize,
}

// SAFETY: two addresses, read through only by `product.rs`, whose callers promise what lies there.
unsafe impl Send for Strip {}

impl Strip {
    /// Lanes at positions `oldest..=newest` that are resident.
    pub(super) fn visible(&self, oldest: u64, newest: u64) -> u16 {
        if newest < self.first {
            return 0;
        }
        let up_to_newest = match newest - self.first {
            last @ 0..15 => (1u16 << (last + 1)) - 1,
            _ => u16::MAX,
        };
        let from_oldest = match oldest.saturating_sub(self.first) {
            first @ 0..16 => u16::MAX << first,
            _ => 0,
        };
        self.resident & up_to_newest & from_oldest
    }
}

/// What of the tokens is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Parts {
    KeysAndValues,
    KeysOnly,
}

/// A thread's memory for strips.
#[derive(Default)]
pub(super) struct StripBuffers {
    strips: Vec<Strip>,
    keys: Aligned<f32>,
    values: Aligned<f32>,
    page: Aligned<f32>,
    key_pairs: Aligned<u32>,
    value_pairs: Aligned<u32>,
}

/// Reads the tiles of one KV head's list in ascending order.
pub(super) struct TileReader<'a> {
    params: &'a AttentionParams,
    /// Where the frames are.
    memory: &'a [u8],
    list: &'a SegmentList,
    parts: Parts,
    /// Rows of queries that will read each tile.
    num_rows: usize,
    /// What some of them sees; strips out of sight are left out.
    sight: Sight,
    /// The first segment that ends after the last tile read.
    next: usize,
    /// The place of its first token in the list's tokens.
    first_token: usize,
    /// For a page of the formats last looked at.
    places: StripPlaces,
    strips_per_page: usize,
}

/// Where strips lie in pages of one layout: worked out when formats change, not for every strip.
#[derive(Clone, Copy, Debug)]
struct StripPlaces {
    formats: [PageFormat; 2],
    /// Bytes of a page.
    page_bytes: usize,
    /// Bytes of a strip's keys.
    key_bytes: usize,
    /// Bytes before the first value.
    values_at: usize,
    /// Bytes of a strip's values.
    value_bytes: usize,
}

impl StripPlaces {
    fn of(layout: &PageLayout) -> StripPlaces {
        StripPlaces {
            formats: [layout.keys, layout.values],
            page_bytes: layout.bytes(),
            key_bytes: layout.keys.bytes(Part::Keys, LANES, layout.head_dim),
            values_at: layout.key_bytes(),
            value_bytes: layout.values.bytes(Part::Values, LANES, layout.head_dim),
        }
    }

    /// The frame of a page.
    ///
    /// Panics if it is not inside `memory`.
    #[inline(always)]
    fn frame<'a>(&self, memory: &'a [u8], segment: &Segment) -> &'a [u8] {
        let frame = memory.get(segment.frame..).and_then(|rest| rest.get(..self.page_bytes));
        frame.expect("frames lie inside the memory they are said to be in")
    }

    /// Where the keys and the values of a strip of a page are. Whole strips lie one after the other in every format.
    #[inline(always)]
    fn parts(&self, frame: *const u8, strip: usize) -> [*const u8; 2] {
        let values_at = self.values_at.wrapping_add(strip.wrapping_mul(self.value_bytes));
        [frame.wrapping_add(strip.wrapping_mul(self.key_bytes)), frame.wrapping_add(values_at)]
    }
}

impl<'a> TileReader<'a> {
    /// A reader of tiles from `first_tile` on.
    pub(super) fn new(
        params: &'a AttentionParams,
        (memory, list): (&'a [u8], &'a SegmentList),
        parts: Parts,
        (num_rows, sight): (usize, Sight),
        first_tile: u64,
    ) -> Self {
        let next = list.place_from(first_tile * TILE);
        let first_token = list.first_token(next);
        let AttentionParams { page_size, head_dim, .. } = *params;
        let plain = PageLayout { keys: PageFormat::F16, values: PageFormat::F16, page_size, head_dim };
        let places = StripPlaces::of(&plain);
        let strips_per_page = page_size / LANES;
        TileReader { params, memory, list, parts, num_rows, sight, next, first_token, places, strips_per_page }
    }

    /// The strips of `tile` with something resident in sight, in ascending order; `tile` must be above the last one read.
    ///
    /// The pointers in the strips are valid until `buffers` is used again: they point into frames (borrowed for `'a`) or
    /// into `buffers`, to 16 * head_dim key elements and 16 rows of value elements (keys only: no values).
    pub(super) fn read<'b, S: Simd>(&mut self, simd: S, tile: u64, buffers: &'b mut StripBuffers) -> &'b [Strip] {
        // The part of the tile in sight, in whole strips.
        let whole = LANES as u64;
        let start = (tile * TILE).max(self.sight.oldest / whole * whole);
        let end = ((tile + 1) * TILE).min((self.sight.newest / whole + 1) * whole);
        let list = self.list;
        while let Some(segment) = list.segments().get(self.next).filter(|segment| segment.end() <= start) {
            self.pass(segment);
        }
        let (mut first_token, segments) = (self.first_token, &list.segments()[self.next..]);
        let mut lined_up = self.params.head_dim.is_multiple_of(LANES) && self.params.page_size.is_multiple_of(LANES);
        let slots_in_sight = |segment: &Segment| {
            let position = u64::from(segment.position);
            start.saturating_sub(position) as usize..(segment.end().min(end) - position) as usize
        };
        buffers.strips.clear();
        buffers.strips.reserve(MAX_STRIPS);
        let mut num_inside = 0;
        for segment in segments.iter().take_while(|segment| u64::from(segment.position) < end) {
            lined_up &= segment.position.is_multiple_of(LANES as u32);
            if lined_up {
                self.push_in_place(segment, slots_in_sight(segment), first_token, &mut buffers.strips);
            }
            first_token += segment.len as usize;
            num_inside += 1;
        }
        let segments = &segments[..num_inside];
        if lined_up {
            self.look_ahead(&mut buffers.strips);
        } else {
            buffers.strips.clear();
            let mut first_token = self.first_token;
            for segment in segments {
                self.gather(simd, segment, slots_in_sight(segment), first_token, buffers);
                first_token += segment.len as usize;
            }
            self.point_to_copies(buffers);
        }
        if self.list.has_min_max() {
            self.expand_min_max(simd, buffers);
        }
        // The last one may reach into the next tile.
        segments.iter().rev().skip(1).for_each(|segment| self.pass(segment));
        let many_rows = lined_up && self.num_rows > MAX_DIRECT_ROWS;
        if S::Pairs::EXIST && self.params.scores == ScoreArithmetic::Rounded {
            self.pack_keys(simd, buffers);
        } else if many_rows {
            self.widen_keys(simd, buffers);
        }
        if self.parts == Parts::KeysOnly {
            return &buffers.strips;
        }
        if S::Pairs::EXIST {
            self.pack_values(simd, buffers);
        } else if many_rows {
            self.widen_values(simd, buffers);
        }
        &buffers.strips
    }

    /// Goes on from `segment`, the next one, to that after it.
    #[inline(always)]
    fn pass(&mut self, segment: &Segment) {
        self.next += 1;
        self.first_token += segment.len as usize;
    }

    /// Elements from one value row of a copy to the next.
    fn padded_dim(&self) -> usize {
        self.params.head_dim.next_multiple_of(LANES)
    }

    /// Adds the strips of a page that lines up with them.
    #[inline(always)]
    fn push_in_place(&mut self, segment: &Segment, slots: Range<usize>, first_token: usize, strips: &mut Vec<Strip>) {
        self.look_at(segment);
        let (places, value_stride) = (self.places, self.params.head_dim);
        let frame = places.frame(self.memory, segment).as_ptr();
        let mut slot = slots.start;
        while slot < slots.end {
            let [keys, values] = places.parts(frame, slot / LANES);
            let num_resident = (slots.end - slot).min(LANES);
            // There is room for a tile: what follows has no other branch to prepare for.
            assert!(strips.len() < strips.capacity());
            strips.push(Strip {
                key_format: segment.keys,
                value_format: segment.values,
                keys,
                values,
                value_stride,
                // What the last strips of a list ask for; `look_ahead` knows better for others.
                ahead_of_keys: values,
                ahead_of_values: values,
                first: u64::from(segment.position) + slot as u64,
                resident: u16::MAX >> (LANES - num_resident),
                first_token: first_token + slot,
            });
            slot += LANES;
        }
    }

    /// Lets the strips of a tile, in place, ask for as many that come [`STRIPS_AHEAD`] later: keys, values of one after the
    /// other. All keys of the tile are read before any values. Whole strips are asked for in both halves of that time, so
    /// that memory is read in order and never idle; in the list's last tile, its own values with its keys. What comes after this
    /// reader's last tile is asked for as well: mostly the same thread reads it next.
    #[inline(always)]
    fn look_ahead(&mut self, strips: &mut [Strip]) {
        let (Some(first), Some(segment)) = (strips.first(), self.list.segments().get(self.next)) else { return };
        let index = first.first.saturating_sub(u64::from(segment.position)) as usize / LANES + STRIPS_AHEAD;
        let (page, mut start) = match self.strips_per_page {
            1 => (index, 0),
            n => (index / n, index % n),
        };
        let pages = self.list.segments().get(self.next + page..).unwrap_or(&[]);
        let mut ahead = [[first.keys; 2]; MAX_STRIPS];
        let mut found = 0;
        'pages: for segment in pages {
            self.look_at(segment);
            for strip in start..self.strips_per_page {
                if found == strips.len() {
                    break 'pages;
                }
                // Only asked for: whether it is inside is checked when it is read.
                ahead[found] = self.places.parts(self.memory.as_ptr().wrapping_add(segment.frame), strip);
                found += 1;
            }
            start = 0;
        }
        let ahead = &ahead.as_flattened()[..2 * found];
        let (of_keys, of_values) = ahead.split_at(strips.len().min(ahead.len()));
        strips.iter_mut().zip(of_keys).for_each(|(strip, ahead)| strip.ahead_of_keys = *ahead);
        strips.iter_mut().zip(of_values).for_each(|(strip, ahead)| strip.ahead_of_values = *ahead);
    }

    /// Makes `places` those of a page's formats.
    #[inline(always)]
    fn look_at(&mut self, segment: &Segment) {
        if self.places.formats != [segment.keys, segment.values] {
            self.places = StripPlaces::of(&self.params.layout(segment));
        }
    }

    /// Whether the kernels in pairs of bf16 can read a part where it is, and should.
    fn readable_in_pairs(&self, format: PageFormat) -> bool {
        match format {
            PageFormat::F32 => false,
            PageFormat::F16 => self.num_rows <= MAX_DIRECT_ROWS,
            PageFormat::Bf16 => true,
            // Codes that are multiplied are read where they are, the others have been expanded.
            PageFormat::Q8_0 | PageFormat::Tq4 | PageFormat::Tq3 | PageFormat::Tq2 => true,
            PageFormat::Kivi4 | PageFormat::Kivi2 => false,
        }
    }

    /// Replaces codes between smallest and largest elements by f32 copies of what they stand for, which are read like plain pages
    /// from here on. Their strips are in place (see [`SegmentList`]), so that nothing else has copies in these buffers yet.
    fn expand_min_max<S: Simd>(&self, simd: S, buffers: &mut StripBuffers) {
        let d = self.params.head_dim;
        let StripBuffers { strips, keys, values, .. } = buffers;
        keys.reserve(strips.len() * LANES * d);
        values.reserve(strips.len() * LANES * d);
        let copies = keys.chunks_exact_mut(LANES * d).zip(values.chunks_exact_mut(LANES * d));
        for (strip, (keys, values)) in strips.iter_mut().zip(copies) {
            if let Some(bits) = strip.key_format.min_max_bits() {
                let layout = MinMaxStrip { bits, part: Part::Keys, head_dim: d };
                strip.keys = expand_part(simd, layout, strip.keys, keys);
                (strip.key_format, strip.ahead_of_keys) = (PageFormat::F32, strip.keys);
            }
            if let Some(bits) = strip.value_format.min_max_bits().filter(|_| self.parts == Parts::KeysAndValues) {
                let layout = MinMaxStrip { bits, part: Part::Values, head_dim: d };
                strip.values = expand_part(simd, layout, strip.values, values);
                (strip.value_format, strip.ahead_of_values) = (PageFormat::F32, strip.values);
            }
        }
    }

    /// Replaces f32 keys, and f16 ones that many rows will read, by copies in pairs of bf16.
    fn pack_keys<S: Simd>(&self, simd: S, buffers: &mut StripBuffers) {
        let d = self.params.head_dim;
        let StripBuffers { strips, key_pairs, .. } = buffers;
        let len = d.div_ceil(2) * LANES;
        key_pairs.reserve(strips.len() * len);
        for (strip, to) in strips.iter_mut().zip(key_pairs.chunks_exact_mut(len)) {
            if !self.readable_in_pairs(strip.key_format) {
                simd.vectorize(PackKeys { strip, head_dim: d, to });
                strip.keys = to.as_ptr().cast();
                (strip.key_format, strip.ahead_of_keys) = (PageFormat::Bf16, strip.keys);
            }
        }
    }

    /// The same with values, and with all those of strips with lanes that are not resident.
    fn pack_values<S: Simd>(&self, simd: S, buffers: &mut StripBuffers) {
        let StripBuffers { strips, value_pairs, .. } = buffers;
        let len = LANES / 2 * self.padded_dim();
        value_pairs.reserve(strips.len() * len);
        for (strip, to) in strips.iter_mut().zip(value_pairs.chunks_exact_mut(len)) {
            if !self.readable_in_pairs(strip.value_format)
                || strip.resident != u16::MAX && !strip.value_format.is_coded()
            {
                simd.vectorize(PackValues { strip, to });
                strip.values = to.as_ptr().cast();
                (strip.value_format, strip.ahead_of_values) = (PageFormat::Bf16, strip.values);
            }
        }
    }

    /// Replaces keys of two bytes an element by f32 copies.
    fn widen_keys<S: Simd>(&self, simd: S, buffers: &mut StripBuffers) {
        let d = self.params.head_dim;
        let StripBuffers { strips, keys, .. } = buffers;
        keys.reserve(strips.len() * LANES * d);
        for (strip, copy) in strips.iter_mut().zip(keys.chunks_exact_mut(LANES * d)) {
            if strip.key_format.is_coded() {
                continue;
            }
            strip.keys = widen_part(simd, strip.keys, strip.key_format, (copy, LANES));
            (strip.key_format, strip.ahead_of_keys) = (PageFormat::F32, strip.keys);
        }
    }

    /// Replaces values of two bytes an element by f32 copies.
    fn widen_values<S: Simd>(&self, simd: S, buffers: &mut StripBuffers) {
        let d = self.params.head_dim;
        let StripBuffers { strips, values, .. } = buffers;
        values.reserve(strips.len() * LANES * d);
        for (strip, copy) in strips.iter_mut().zip(values.chunks_exact_mut(LANES * d)) {
            if strip.value_format.is_coded() {
                continue;
            }
            // In-place strips have no padding between value rows.
            strip.values = widen_part(simd, strip.values, strip.value_format, (copy, d));
            (strip.value_format, strip.ahead_of_values) = (PageFormat::F32, strip.values);
        }
    }

    /// Copies `slots` of a page of any size and position to where they belong in f32 strips.
    fn gather<S: Simd>(
        &self,
        simd: S,
        segment: &Segment,
        slots: Range<usize>,
        first_token: usize,
        buffers: &mut StripBuffers,
    ) {
        let (d, padded) = (self.params.head_dim, self.padded_dim());
        let layout = self.params.layout(segment);
        let frame = StripPlaces::of(&layout).frame(self.memory, segment);
        let (key_bytes, value_bytes) = frame.split_at(layout.key_bytes());
        let part_len = layout.page_size * d;
        let StripBuffers { strips, keys, values, page, .. } = buffers;
        // A tile has at most TILE / LANES strips: no copy moves while there are pointers to it.
        keys.reserve(TILE as usize * d);
        values.reserve(TILE as usize * padded);
        page.reserve(part_len);

        decode_elements(simd, segment.keys, key_bytes, &mut page[..part_len]);
        for slot in slots.clone() {
            let position = u64::from(segment.position) + slot as u64;
            let lane = (position % LANES as u64) as usize;
            let first = position - lane as u64;
            if strips.last().is_none_or(|strip| strip.first != first) {
                strips.push(Strip {
                    key_format: PageFormat::F32,
                    value_format: PageFormat::F32,
                    // Set when the copies are complete.
                    keys: std::ptr::null(),
                    values: std::ptr::null(),
                    value_stride: padded,
                    ahead_of_keys: std::ptr::null(),
                    ahead_of_values: std::ptr::null(),
                    first,
                    resident: 0,
                    first_token: first_token + slot,
                });
            }
            let index = strips.len() - 1;
            strips[index].resident |= 1 << lane;
            let to = keys[index * LANES * d + lane..].iter_mut().step_by(LANES).take(d);
            to.enumerate().for_each(|(i, to)| *to = page[layout.key_place(slot, i)]);
        }
        if self.parts == Parts::KeysOnly {
            return;
        }
        decode_elements(simd, segment.values, value_bytes, &mut page[..part_len]);
        for slot in slots {
            let position = u64::from(segment.position) + slot as u64;
            let lane = (position % LANES as u64) as usize;
            // The strips of this page are the last ones.
            let Some(index) = strips.iter().rposition(|strip| strip.first == position - lane as u64) else { continue };
            let to = values[(index * LANES + lane) * padded..][..d].iter_mut();
            to.enumerate().for_each(|(i, to)| *to = page[layout.value_place(slot, i)]);
        }
    }

    /// Lets the strips that `gather` made point to its copies.
    fn point_to_copies(&self, buffers: &mut StripBuffers) {
        let StripBuffers { strips, keys, values, .. } = buffers;
        let keys = keys.chunks_exact(LANES * self.params.head_dim);
        let values = values.chunks_exact(LANES * self.padded_dim());
        for ((strip, keys), values) in strips.iter_mut().zip(keys).zip(values) {
            strip.keys = keys.as_ptr().cast();
            strip.values = values.as_ptr().cast();
            (strip.ahead_of_keys, strip.ahead_of_values) = (strip.keys, strip.values);
        }
    }
}

/// Writes what a part's codes stand for to `copy`, and returns where that is.
fn expand_part<S: Simd>(simd: S, layout: MinMaxStrip, part: *const u8, copy: &mut [f32]) -> *const u8 {
    // SAFETY: a strip's part in place is a whole strip of its format, in a borrowed frame (see `TileReader::read`).
    let strip = unsafe { std::slice::from_raw_parts(part, layout.bytes()) };
    simd.vectorize(ExpandStrip { layout, strip, out: &mut *copy });
    copy.as_ptr().cast()
}

/// Copies one part of a strip as f32, in rows, and returns where it is; f32 is not copied but returned.
///
/// `copy` is the room for all elements of the part and the length of its rows: 16 for keys, the head dimension for values.
fn widen_part<S: Simd>(
    simd: S,
    part: *const u8,
    format: PageFormat,
    (copy, row_len): (&mut [f32], usize),
) -> *const u8 {
    if format == PageFormat::F32 {
        return part;
    }
    // SAFETY: a strip's part has as many elements as its copy, in a borrowed frame (see `TileReader::read`).
    let from = unsafe { std::slice::from_raw_parts(part, 2 * copy.len()) };
    let to = &mut *copy;
    match format {
        PageFormat::Bf16 => simd.vectorize(WidenPairs { from, to, row_len }),
        _ => simd.vectorize(Widen { from, to }),
    }
    copy.as_ptr().cast()
}

/// Elements of one part of a page as f32, where they are.
fn decode_elements<S: Simd>(simd: S, format: PageFormat, bytes: &[u8], out: &mut [f32]) {
    match format {
        PageFormat::F32 => {
            let (elements, _) = bytes.as_chunks();
            out.iter_mut().zip(elements).for_each(|(out, element)| *out = f32::from_ne_bytes(*element));
        }
        PageFormat::F16 => simd.vectorize(Widen { from: bytes, to: out }),
        PageFormat::Bf16 => {
            let (elements, _) = bytes.as_chunks();
            out.iter_mut().zip(elements).for_each(|(out, element)| *out = bf16::from_ne_bytes(*element).to_f32());
        }
        coded => unreachable!("{coded:?} has no elements"),
    }
}

/// f16 elements as f32.
struct Widen<'a> {
    from: &'a [u8],
    to: &'a mut [f32],
}

impl Kernel for Widen<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        assert_eq!(self.from.len(), 2 * self.to.len());
        let (to, to_rest) = self.to.as_chunks_mut::<LANES>();
        let (from, from_rest) = self.from.as_chunks::<{ 2 * LANES }>();
        for (to, from) in to.iter_mut().zip(from) {
            // SAFETY: `from` is 16 f16.
            s.store(to, unsafe { s.load_f16_ptr(from.as_ptr().cast()) });
        }
        if !to_rest.is_empty() {
            let mut padded = [0; 2 * LANES];
            padded[..from_rest.len()].copy_from_slice(from_rest);
            // SAFETY: `padded` is 16 f16.
            s.store_partial(to_rest, unsafe { s.load_f16_ptr(padded.as_ptr().cast()) });
        }
    }
}

/// Pairs of bf16 as f32: every two rows of `to` lie in `from` interleaved, element by element.
struct WidenPairs<'a> {
    from: &'a [u8],
    to: &'a mut [f32],
    /// A multiple of 16.
    row_len: usize,
}

impl Kernel for WidenPairs<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        assert!(self.from.len() == 2 * self.to.len() && self.row_len.is_multiple_of(LANES));
        let (from, _) = self.from.as_chunks::<{ 4 * LANES }>();
        let mut from = from.iter();
        for rows in self.to.chunks_exact_mut(2 * self.row_len) {
            let (first, second) = rows.split_at_mut(self.row_len);
            let vectors = first.as_chunks_mut::<LANES>().0.iter_mut().zip(second.as_chunks_mut::<LANES>().0);
            for ((first, second), from) in vectors.zip(&mut from) {
                // SAFETY: `from` is 16 pairs.
                unsafe {
                    s.store(first, s.load_bf16_first_ptr(from.as_ptr().cast()));
                    s.store(second, s.load_bf16_second_ptr(from.as_ptr().cast()));
                }
            }
        }
    }
}
