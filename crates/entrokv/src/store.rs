//! The bytes behind the pages: one reservation, addressed by the frames of the pool.
//!
//! The pool decides which byte ranges live; this file only reads and writes them, and hands what the pool reclaimed back
//! to the operating system. The layout inside a page is the kernels' business.

mod file_pages;
mod key_ranges;

use std::io;
use std::ops::Range;

use entrokv_cache::{Encoding, KvCache, KvGroup, PageKind, PageMove, PagePlace};
use entrokv_kernels::arena::Arena;
use entrokv_kernels::codes::KeyConstants;
use entrokv_kernels::compute::Compute;
use entrokv_kernels::page::{PageFormat, PageLayout, TokenRows, recode};

pub use self::key_ranges::KeyPages;

/// Keys and values of every page of every sequence.
pub struct Store {
    arena: Arena,
    page_size: usize,
    head_dim: usize,
}

/// Keys and values of one layer at consecutive positions.
#[derive(Clone, Copy, Debug)]
pub struct NewTokens<'a> {
    /// Absolute position of the first token.
    pub first_position: u32,
    /// Keys after RoPE, `[tokens, num_kv_heads, head_dim]`.
    pub k: &'a [f32],
    /// Values, of the same shape.
    pub v: &'a [f32],
}

/// Mean and standard deviation of the keys of one KV group, channel by channel.
#[derive(Clone, Debug, PartialEq)]
pub struct KeyMoments {
    /// Means `[head_dim]`.
    pub mean: Vec<f32>,
    /// Standard deviations `[head_dim]`.
    pub std: Vec<f32>,
}

/// Keys and values of the tokens that one KV group holds, in the order of its table.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenVectors {
    /// `[tokens, head_dim]`, after RoPE.
    pub keys: Vec<f32>,
    /// `[tokens, head_dim]`.
    pub values: Vec<f32>,
}

impl TokenVectors {
    /// Those behind the first `elements` of keys and of values, if there are any vectors.
    pub(crate) fn after(mut self, elements: usize) -> Self {
        self.keys.drain(..elements.min(self.keys.len()));
        self.values.drain(..elements.min(self.values.len()));
        self
    }
}

impl Store {
    /// Reserves `capacity_bytes` of address space; memory is taken when a page is first written.
    ///
    /// # Errors
    /// The operating system's refusal.
    pub fn reserve(capacity_bytes: u64, page_size: usize, head_dim: usize) -> io::Result<Self> {
        Ok(Self { arena: Arena::reserve(capacity_bytes)?, page_size, head_dim })
    }

    /// Tokens a page.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    fn layout(&self, kind: PageKind) -> PageLayout {
        let (keys, values) = (format(kind.keys), format(kind.values));
        PageLayout { keys, values, page_size: self.page_size, head_dim: self.head_dim }
    }

    /// Writes `tokens` into the slots that `cache` has for them in `layer`.
    pub fn write(&mut self, compute: &Compute, cache: &KvCache, layer: u32, tokens: NewTokens<'_>) {
        let NewTokens { first_position, k, v } = tokens;
        let num_kv_heads = cache.shape().num_kv_heads;
        let (head_dim, page_size) = (self.head_dim, self.page_size as u32);
        let stride = num_kv_heads * head_dim;
        let end = first_position + (k.len() / stride) as u32;
        let (mut ranges, mut parts) = (Vec::new(), Vec::new());
        for kv_head in 0..num_kv_heads {
            let table = cache.table(KvGroup { layer, kv_head: kv_head as u32 });
            // From the end, where the pages to write are: a step of decoding touches one entry of a long table.
            let pages = table.iter().rev().take_while(|page| page.index.0 >= first_position / page_size);
            for page in pages {
                let start = page.first_position(self.page_size);
                let positions = start.max(first_position)..(start + page_size).min(end);
                if positions.is_empty() {
                    continue;
                }
                let at = (positions.start - first_position) as usize * stride + kv_head * head_dim;
                let rows = TokenRows { k: &k[at..], v: &v[at..], stride, len: positions.len() };
                ranges.push(page.range());
                parts.push((self.layout(page.kind), (positions.start - start) as usize, rows));
            }
        }
        let write = |index: usize, frame: &mut [u8]| {
            let (layout, first_slot, rows) = &parts[index];
            layout.write_tokens(frame, *first_slot, *rows);
        };
        if end - first_position == 1 {
            // One token of each head: less work than waking a thread.
            ranges.into_iter().enumerate().for_each(|(index, range)| write(index, self.arena.bytes_mut(range)));
        } else {
            self.arena.for_each_range(&compute.threads, &ranges, write);
        }
    }

    /// All of the reservation, in which the frames of the pool lie.
    pub fn memory(&self) -> &[u8] {
        self.arena.bytes(0..self.arena.len())
    }

    /// Writes `keys` `[tokens, head_dim]` over those of the first tokens of a plain page; values stay to the bit.
    pub fn write_keys(&mut self, page: &PagePlace, keys: &[f32]) {
        let layout = self.layout(page.kind);
        let frame = self.arena.bytes_mut(page.range.clone());
        let (mut old, mut value) = (vec![0.0; self.head_dim], vec![0.0; self.head_dim]);
        for (slot, key) in keys.chunks_exact(self.head_dim).enumerate() {
            layout.read_token(frame, slot, None, &mut old, &mut value);
            layout.write_token(frame, slot, key, &value);
        }
    }

    /// Encodes pages of one KV group: the bytes of each move's old place into its new one, a page a task.
    ///
    /// # Panics
    /// If the kinds of a move are not those the cache lets pass, or `constants` are missing for rotated keys.
    pub fn recode(&mut self, compute: &Compute, moves: &[PageMove], constants: Option<&KeyConstants>) {
        let new_bytes = |page: &PageMove| (page.to.range.end - page.to.range.start) as usize;
        let stride = moves.iter().map(new_bytes).max().unwrap_or(1);
        // Old and new frames lie in one reservation, which only one thread may write at a time.
        let mut encoded = vec![0; moves.len() * stride];
        compute.threads.for_each_chunk(&mut encoded, stride, |index, out| {
            let page = &moves[index];
            let (from, to) = (self.layout(page.from.kind), self.layout(page.to.kind));
            let frame = self.arena.bytes(page.from.range.clone());
            recode(compute.isa, &from, frame, &to, &mut out[..new_bytes(page)], page.len as usize, constants)
                .expect("the cache checked the kinds, and constants are taken before pages are encoded");
        });
        for (page, bytes) in moves.iter().zip(encoded.chunks_exact(stride)) {
            self.arena.bytes_mut(page.to.range.clone()).copy_from_slice(&bytes[..new_bytes(page)]);
        }
    }

    /// Moves tokens of one KV group together: that at place `kept[i]` (ascending) of those in the pages `from`, counting through
    /// them, to place `i` of those in `to`, which are the first of these pages or take their place.
    ///
    /// # Panics
    /// If a page is not plain, or a place is not in the pages.
    pub fn compact(&mut self, compute: &Compute, from: &[PagePlace], to: &[PagePlace], kept: &[u32]) {
        let (page_size, head_dim) = (self.page_size, self.head_dim);
        // Pages of tokens that are where they belong.
        let unmoved = kept.iter().zip(0..).take_while(|(from, to)| *from == to).count() / page_size;
        let kept = &kept[unmoved * page_size..];
        // Plain elements survive being read as f32 and written again, and a copy spares thinking about what overlaps.
        let mut moved = vec![0.0; kept.len() * 2 * head_dim];
        compute.threads.for_each_chunk(&mut moved, 2 * page_size * head_dim, |page, rows| {
            let rows = rows.chunks_exact_mut(2 * head_dim);
            for (row, &place) in rows.zip(&kept[page * page_size..]) {
                let (from, slot) = (&from[place as usize / page_size], place as usize % page_size);
                let (k, v) = row.split_at_mut(head_dim);
                self.layout(from.kind).read_token(self.arena.bytes(from.range.clone()), slot, None, k, v);
            }
        });
        let into = &to[unmoved..][..kept.len().div_ceil(page_size)];
        let ranges: Vec<Range<u64>> = into.iter().map(|page| page.range.clone()).collect();
        let layouts: Vec<PageLayout> = into.iter().map(|page| self.layout(page.kind)).collect();
        self.arena.for_each_range(&compute.threads, &ranges, |page, frame| {
            let rows = &moved[page * 2 * page_size * head_dim..];
            let rows = &rows[..rows.len().min(2 * page_size * head_dim)];
            let len = rows.len() / (2 * head_dim);
            layouts[page].write_tokens(
                frame,
                0,
                TokenRows { k: rows, v: &rows[head_dim..], stride: 2 * head_dim, len },
            );
        });
    }

    /// What is stored of the keys and values of each KV group of `layer`, a group a task; `constants` are those of all groups of
    /// `cache`, or none.
    pub fn token_vectors(
        &self,
        compute: &Compute,
        cache: &KvCache,
        layer: u32,
        constants: &[Option<KeyConstants>],
    ) -> Vec<TokenVectors> {
        let groups: Vec<KvGroup> = cache.shape().groups_of(layer).collect();
        let mut all = vec![TokenVectors::default(); groups.len()];
        compute.threads.for_each_chunk(&mut all, 1, |index, vectors| {
            let len = cache.resident_tokens(groups[index]) * self.head_dim;
            let constants = constants.get(cache.shape().group_index(groups[index])).and_then(Option::as_ref);
            let mut keys = vec![0.0; len];
            let mut values = vec![0.0; len];
            let mut rows = keys.chunks_exact_mut(self.head_dim).zip(values.chunks_exact_mut(self.head_dim));
            for page in cache.table(groups[index]) {
                let (layout, frame) = (self.layout(page.kind), self.arena.bytes(page.range()));
                for (slot, (key, value)) in (0..page.len as usize).zip(&mut rows) {
                    layout.read_token(frame, slot, constants, key, value);
                }
            }
            vectors[0] = TokenVectors { keys, values };
        });
        all
    }

    /// Moments of the keys in full plain pages, for each of several groups; sums are f64, by ascending slot.
    pub fn key_moments(&self, compute: &Compute, groups: &[Vec<PagePlace>]) -> Vec<KeyMoments> {
        let mut moments = vec![KeyMoments { mean: Vec::new(), std: Vec::new() }; groups.len()];
        compute.threads.for_each_chunk(&mut moments, 1, |group, moments| {
            moments[0] = self.moments_of(&groups[group]);
        });
        moments
    }

    fn moments_of(&self, pages: &[PagePlace]) -> KeyMoments {
        let (mut k, mut v) = (vec![0.0; self.head_dim], vec![0.0; self.head_dim]);
        // Of what keys differ from the first one, so that squares of a large common part do not drown the rest.
        let (mut first, mut sums) = (Vec::new(), vec![[0.0; 2]; self.head_dim]);
        for page in pages {
            let layout = self.layout(page.kind);
            for slot in 0..self.page_size {
                layout.read_token(self.arena.bytes(page.range.clone()), slot, None, &mut k, &mut v);
                if first.is_empty() {
                    first.clone_from(&k);
                }
                for (([sum, squares], k), first) in sums.iter_mut().zip(&k).zip(&first) {
                    let x = f64::from(*k) - f64::from(*first);
                    *sum += x;
                    *squares += x * x;
                }
            }
        }
        let count = (pages.len() * self.page_size) as f64;
        let mean = first.iter().zip(&sums).map(|(first, [sum, _])| (f64::from(*first) + sum / count) as f32).collect();
        let variance = |[sum, squares]: &[f64; 2]| squares / count - (sum / count).powi(2);
        KeyMoments { mean, std: sums.iter().map(|sums| variance(sums).max(0.0).sqrt() as f32).collect() }
    }

    /// Gives `ranges` back to the operating system; they must hold no live frame.
    pub fn reclaim(&mut self, ranges: &[Range<u64>]) {
        for range in ranges {
            self.arena.release(range.clone());
        }
    }
}

/// The kernels' name of an encoding.
pub(crate) fn format(encoding: Encoding) -> PageFormat {
    match encoding {
        Encoding::F32 => PageFormat::F32,
        Encoding::F16 => PageFormat::F16,
        Encoding::Bf16 => PageFormat::Bf16,
        Encoding::Q8_0 => PageFormat::Q8_0,
        Encoding::Tq4 => PageFormat::Tq4,
        Encoding::Tq3 => PageFormat::Tq3,
        Encoding::Tq2 => PageFormat::Tq2,
        Encoding::Kivi4 => PageFormat::Kivi4,
        Encoding::Kivi2 => PageFormat::Kivi2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use entrokv_cache::{CacheShape, LayerKind};

    #[test]
    fn the_pool_and_the_kernels_agree_on_what_pages_there_are_and_what_they_weigh() {
        for keys in Encoding::ALL {
            for values in Encoding::ALL {
                let kind = PageKind { keys, values };
                for (head_dim, page_size) in
                    [(64, 16), (96, 64), (128, 256), (256, 16), (512, 32), (544, 16), (80, 16), (64, 5), (64, 24)]
                {
                    let shape = CacheShape::new(vec![LayerKind::Global], 1, 1, head_dim, page_size).unwrap();
                    let layout = PageLayout { keys: format(keys), values: format(values), page_size, head_dim };
                    let valid = layout.validate().is_ok();
                    assert_eq!(kind.check(&shape).is_ok(), valid, "{kind}, {head_dim}, {page_size}");
                    if valid {
                        assert_eq!(kind.page_bytes(&shape), layout.bytes() as u64, "{kind}, {head_dim}, {page_size}");
                    }
                }
            }
        }
    }

    #[test]
    fn key_moments_are_those_of_the_keys() {
        let (page_size, head_dim) = (16, 32);
        let shape = std::sync::Arc::new(CacheShape::new(vec![LayerKind::Global], 2, 1, head_dim, page_size).unwrap());
        let mut store = Store::reserve(1 << 20, page_size, head_dim).unwrap();
        let mut pool = entrokv_cache::PagePool::new(1 << 20);
        let mut cache = KvCache::new(shape, PageKind::F32);
        cache.grow(&mut pool, 48).unwrap();
        // Channel i of head h at position t: a large common part, and a spread that grows with the channel.
        let key = |t: usize, h: usize, i: usize| 100.0 + h as f32 + (t * (i + 1) % 7) as f32 * 0.01;
        let k: Vec<f32> =
            (0..48).flat_map(|t| (0..2).flat_map(move |h| (0..head_dim).map(move |i| key(t, h, i)))).collect();
        let tokens = NewTokens { first_position: 0, k: &k, v: &vec![0.0; k.len()] };
        let compute = Compute::new(entrokv_kernels::isa::Isa::detect(), std::num::NonZeroUsize::MIN);
        store.write(&compute, &cache, 0, tokens);
        let places = |kv_head| {
            let table = cache.table(KvGroup { layer: 0, kv_head });
            table[1..].iter().map(|page| PagePlace { kind: page.kind, range: page.range() }).collect()
        };
        let moments = store.key_moments(&compute, &[places(0), places(1)]);
        for (h, moments) in moments.iter().enumerate() {
            for i in 0..head_dim {
                let keys: Vec<f64> = (16..48).map(|t| f64::from(key(t, h, i))).collect();
                let mean = keys.iter().sum::<f64>() / 32.0;
                let std = (keys.iter().map(|k| (k - mean).powi(2)).sum::<f64>() / 32.0).sqrt();
                assert!((f64::from(moments.mean[i]) - mean).abs() < 1e-5);
                assert!((f64::from(moments.std[i]) - std).abs() < 1e-7, "{} {std}", moments.std[i]);
            }
        }
        cache.release(&mut pool);
    }
}
