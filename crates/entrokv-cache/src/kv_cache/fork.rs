//! Two caches of the same tokens, which share the pages that neither writes to any more.
//!
//! Pages that are full are only ever read, but for two things that rewrite them: tokens that move together
//! ([`KvCache::compact`]) and whoever changes keys in place ([`KvCache::own_pages`]). Both take frames of their own first.

use std::sync::Arc;

use crate::kv_cache::KvCache;
use crate::kv_cache::fate::PageMove;
use crate::pool::{PagePool, PoolExhausted};
use crate::shape::KvGroup;

impl KvCache {
    /// A second cache of the first `len` tokens, which have been written; the same pages, and each goes its own way from here.
    ///
    /// Full pages are shared, and the pool counts their bytes once. The page that token `len` goes into gets a frame of its own in
    /// the fork; `copy` is called once with all of these, if there are any, and must copy their tokens.
    ///
    /// # Errors
    /// [`PoolExhausted`] if the pool has no room for them. Then nothing has changed and `copy` was not called.
    pub fn fork(
        &self,
        pool: &mut PagePool,
        len: usize,
        copy: &mut dyn FnMut(&[PageMove]),
    ) -> Result<Self, PoolExhausted> {
        let mut fork = Self::new(Arc::clone(&self.shape), self.kind);
        fork.logical_len = len.min(self.logical_len);
        let mut moves = Vec::new();
        for (table, other) in fork.tables.iter_mut().zip(&self.tables) {
            if let Err(error) = table.fork(other, pool, &self.shape, fork.logical_len, &mut moves) {
                fork.release(pool);
                return Err(error);
            }
        }
        if !moves.is_empty() {
            copy(&moves);
        }
        Ok(fork)
    }

    /// Makes the first `num_pages` pages of `group` this cache's own, so that they may be written to: those that it shares with
    /// forks get new frames. `copy` is called once with all of these, if there are any, and must copy their tokens.
    ///
    /// # Errors
    /// [`PoolExhausted`] if the pool has no room for them. Then nothing has changed and `copy` was not called.
    pub fn own_pages(
        &mut self,
        pool: &mut PagePool,
        group: KvGroup,
        num_pages: usize,
        copy: &mut dyn FnMut(&[PageMove]),
    ) -> Result<(), PoolExhausted> {
        let index = self.shape.group_index(group);
        self.tables[index].own(pool, num_pages, copy)
    }
}

#[cfg(test)]
mod tests;
