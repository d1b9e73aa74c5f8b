//! Channels of keys that are cleared when a prompt has been read.

use std::sync::Arc;

use entrokv_cache::{CacheShape, KeyChannels, KvGroup, LayerKind, PagePlace, PagePool, PoolExhausted, channel_scores};

use super::{Held, LayerRows};

/// Squares of a prompt's last queries in every global layer.
///
/// Sums run in f64 by ascending position, so neither chunks nor batches show. A step that fails half way leaves half of its rows
/// in them: its sequence is cancelled, as any is whose policy was watching.
#[derive(Clone)]
pub(super) struct ChannelSums {
    shape: Arc<CacheShape>,
    channels: KeyChannels,
    layers: Vec<OfLayer>,
}

#[derive(Clone, Default)]
struct OfLayer {
    num_queries: usize,
    /// `[num_heads, head_dim]`; empty before the first query.
    squares: Vec<f64>,
}

impl ChannelSums {
    pub(super) fn new(shape: &Arc<CacheShape>, channels: KeyChannels) -> Self {
        Self { shape: Arc::clone(shape), channels, layers: vec![OfLayer::default(); shape.layers.len()] }
    }

    /// Adds rows of a prompt that ends before `prompt_end`, as far as they are among its last.
    pub(super) fn add(&mut self, rows: LayerRows<'_>, prompt_end: usize) {
        let CacheShape { num_kv_heads, group_size, head_dim, .. } = *self.shape;
        if self.shape.layers[rows.layer] != LayerKind::Global {
            return;
        }
        let width = num_kv_heads * group_size * head_dim;
        let skipped = prompt_end.saturating_sub(self.channels.window).saturating_sub(rows.first_position);
        let OfLayer { num_queries, squares } = &mut self.layers[rows.layer];
        squares.resize(width, 0.0);
        for query in rows.queries.chunks_exact(width).skip(skipped) {
            squares.iter_mut().zip(query).for_each(|(sum, q)| *sum += f64::from(*q) * f64::from(*q));
            *num_queries += 1;
        }
    }

    /// Clears the channels that go in what `held` has of all groups at the end of a prompt of `prompt_tokens`, and begins anew.
    ///
    /// # Errors
    /// [`PoolExhausted`] if forks share the pages to be written and there is no room for pages of the sequence's own: groups that
    /// were not reached keep their channels.
    pub(super) fn clear(
        &mut self,
        held: &mut Held<'_>,
        pool: &mut PagePool,
        prompt_tokens: usize,
    ) -> Result<(), PoolExhausted> {
        let CacheShape { group_size, head_dim, page_size, .. } = *self.shape;
        let end = prompt_tokens.saturating_sub(self.channels.recent);
        for (layer, sums) in self.layers.iter_mut().enumerate() {
            let OfLayer { num_queries, squares } = std::mem::take(sums);
            if num_queries == 0 {
                continue;
            }
            let layer = layer as u32;
            let mut vectors = held.runner.token_vectors(held.cache, layer, held.constants);
            let heads = vectors.iter_mut().zip(squares.chunks_exact(group_size * head_dim));
            for (kv_head, (vectors, squares)) in heads.enumerate() {
                let dropped = self.channels.dropped(&channel_scores(squares, num_queries, &vectors.keys, head_dim));
                for key in vectors.keys.chunks_exact_mut(head_dim) {
                    dropped.iter().for_each(|&channel| key[channel] = 0.0);
                }
                let group = KvGroup { layer, kv_head: kv_head as u32 };
                let table = held.cache.table(group);
                let written = table.iter().take_while(|page| (page.first_position(page_size) as usize) < end).count();
                let runner = &mut *held.runner;
                held.cache.own_pages(pool, group, written, &mut |moves| runner.copy_pages(moves))?;
                let mut keys = vectors.keys.as_slice();
                for page in held.cache.table(group) {
                    let (of_page, rest) = keys.split_at(page.len as usize * head_dim);
                    keys = rest;
                    let len = end.saturating_sub(page.first_position(page_size) as usize).min(page.len as usize);
                    let place = PagePlace { kind: page.kind, range: page.range() };
                    held.runner.write_keys(&place, &of_page[..len * head_dim]);
                }
            }
        }
        Ok(())
    }

    /// Bytes of the sums.
    pub(super) fn bytes(&self) -> u64 {
        self.layers.iter().map(|layer| (layer.squares.capacity() * size_of::<f64>()) as u64).sum()
    }
}
