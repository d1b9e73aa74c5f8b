//! Smallest and largest key elements of pages, as they are stored.

use entrokv_cache::{PagePlace, key_range};
use entrokv_kernels::codes::KeyConstants;
use entrokv_kernels::compute::Compute;

use super::Store;

/// Full pages of one KV group.
#[derive(Clone, Debug)]
pub struct KeyPages<'a> {
    /// Where they are.
    pub places: Vec<PagePlace>,
    /// What rotated codes among their keys are relative to.
    pub constants: Option<&'a KeyConstants>,
}

impl Store {
    /// For each of several KV groups the ranges of the keys in its pages, `[pages, 2, head_dim]`: smallest, then largest elements.
    ///
    /// # Panics
    /// If constants are missing for rotated keys.
    pub fn key_ranges(&self, compute: &Compute, groups: &[KeyPages<'_>]) -> Vec<Vec<f32>> {
        let mut ranges = vec![Vec::new(); groups.len()];
        compute.threads.for_each_chunk(&mut ranges, 1, |group, ranges| {
            let KeyPages { places, constants } = &groups[group];
            let mut keys = vec![0.0; self.page_size * self.head_dim];
            let mut value = vec![0.0; self.head_dim];
            for place in places {
                let (layout, frame) = (self.layout(place.kind), self.arena.bytes(place.range.clone()));
                for (slot, key) in keys.chunks_exact_mut(self.head_dim).enumerate() {
                    layout.read_token(frame, slot, *constants, key, &mut value);
                }
                ranges[0].extend(key_range(&keys, self.head_dim));
            }
        });
        ranges
    }
}
