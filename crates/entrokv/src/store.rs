//! The bytes behind the pages: one reservation, addressed by the frames of the pool.
//!
//! The pool decides which byte ranges live; this file only reads and writes them, and hands what the pool reclaimed back
//! to the operating system. The layout inside a page is the kernels' business.

use std::io;
use std::ops::Range;

use entrokv_cache::{KvCache, KvGroup, PageKind};
use entrokv_kernels::arena::Arena;
use entrokv_kernels::attention::Segment;
use entrokv_kernels::page::{PageFormat, PageLayout};

/// Keys and values of every page of every sequence.
pub struct Store {
    arena: Arena,
    page_size: usize,
    head_dim: usize,
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

    /// Writes keys and values `[tokens, num_kv_heads, head_dim]` of one layer at consecutive positions.
    pub fn write(&mut self, cache: &KvCache, layer: u32, first_position: u32, k: &[f32], v: &[f32]) {
        let num_kv_heads = cache.shape().num_kv_heads;
        let (head_dim, page_size) = (self.head_dim, self.page_size as u32);
        let end = first_position + (k.len() / (num_kv_heads * head_dim)) as u32;
        for kv_head in 0..num_kv_heads {
            let table = cache.table(KvGroup { layer, kv_head: kv_head as u32 });
            let from = table.partition_point(|page| page.index.0 < first_position / page_size);
            for page in &table[from..] {
                let layout = self.layout(page.kind);
                let start = page.first_position(self.page_size);
                let frame = self.arena.bytes_mut(page.range());
                for position in start.max(first_position)..(start + page_size).min(end) {
                    let row = (position - first_position) as usize * num_kv_heads + kv_head;
                    let at = row * head_dim..(row + 1) * head_dim;
                    layout.write_token(frame, (position - start) as usize, &k[at.clone()], &v[at]);
                }
            }
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
