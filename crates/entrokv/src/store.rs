//! The bytes behind the pages: one reservation, addressed by the frames of the pool.
//!
//! The pool decides which byte ranges live; this file only reads and writes them, and hands what the pool reclaimed back
//! to the operating system. The layout inside a page is the kernels' business.

use std::io;
use std::ops::Range;

use entrokv_cache::{KvCache, KvGroup, PageKind};
use entrokv_kernels::arena::Arena;
use entrokv_kernels::attention::Segment;
use entrokv_kernels::compute::Compute;
use entrokv_kernels::page::{PageFormat, PageLayout, TokenRows};

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
        PageLayout { keys: format(kind), values: format(kind), page_size: self.page_size, head_dim: self.head_dim }
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

    /// What attention of one group reads, ascending by position.
    pub fn segments(&self, cache: &KvCache, group: KvGroup) -> Vec<Segment<'_>> {
        cache
            .table(group)
            .iter()
            .map(|page| Segment {
                keys: format(page.kind),
                values: format(page.kind),
                frame: self.arena.bytes(page.range()),
                position: page.first_position(self.page_size),
                len: page.len,
            })
            .collect()
    }

    /// Gives `ranges` back to the operating system; they must hold no live frame.
    pub fn reclaim(&mut self, ranges: &[Range<u64>]) {
        for range in ranges {
            self.arena.release(range.clone());
        }
    }
}

fn format(kind: PageKind) -> PageFormat {
    match kind {
        PageKind::F32 => PageFormat::F32,
        PageKind::F16 => PageFormat::F16,
    }
}
