//! Geometry of a KV cache: which layers there are, how many heads share what, and how many tokens a page holds.

use thiserror::Error;

/// Largest number of tokens a page may hold.
pub const MAX_PAGE_SIZE: usize = 256;
/// Largest head dimension; far above any published model, it keeps every page under 8 MiB and every product in range.
pub const MAX_HEAD_DIM: usize = 4096;

/// What the queries of a layer may see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LayerKind {
    /// Every earlier position. Only these layers are subject to budgets and policies.
    Global,
    /// Positions greater than `query - window`: the newest `window` tokens, the query's own among them.
    Window(u32),
}

/// One physical KV head of one layer: the paper's `(l, g)`, and the owner of one block table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KvGroup {
    /// Layer, from 0.
    pub layer: u32,
    /// KV head within the layer, from 0.
    pub kv_head: u32,
}

/// Geometry of one sequence's KV cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheShape {
    /// Kind of each layer, first to last.
    pub layers: Vec<LayerKind>,
    /// KV heads of every layer.
    pub num_kv_heads: usize,
    /// Query heads that share one KV head: the paper's `r`.
    pub group_size: usize,
    /// Elements of one key, and of one value.
    pub head_dim: usize,
    /// Tokens a page: the paper's `B`.
    pub page_size: usize,
}

impl CacheShape {
    /// A validated geometry.
    ///
    /// # Errors
    /// [`ShapeError`] for a count of zero, a page size or head dimension out of range, a window of zero tokens, or more
    /// KV groups than 32 bits can number.
    pub fn new(
        layers: Vec<LayerKind>,
        num_kv_heads: usize,
        group_size: usize,
        head_dim: usize,
        page_size: usize,
    ) -> Result<Self, ShapeError> {
        if !(1..=MAX_PAGE_SIZE).contains(&page_size) {
            return Err(ShapeError::PageSize { got: page_size });
        }
        if !(1..=MAX_HEAD_DIM).contains(&head_dim) {
            return Err(ShapeError::HeadDim { got: head_dim });
        }
        for (what, count) in
            [("layers", layers.len()), ("KV heads", num_kv_heads), ("query heads per KV head", group_size)]
        {
            if count == 0 {
                return Err(ShapeError::Zero { what });
            }
        }
        if let Some(layer) = layers.iter().position(|kind| *kind == LayerKind::Window(0)) {
            return Err(ShapeError::EmptyWindow { layer });
        }
        let num_groups = layers.len() as u128 * num_kv_heads as u128;
        if num_groups > u128::from(u32::MAX) {
            return Err(ShapeError::TooManyGroups { got: num_groups });
        }
        Ok(Self { layers, num_kv_heads, group_size, head_dim, page_size })
    }

    /// KV groups of all layers.
    pub fn num_groups(&self) -> usize {
        self.layers.len() * self.num_kv_heads
    }

    /// KV groups of the global layers, over which a budget in bytes is split.
    pub fn num_global_groups(&self) -> usize {
        self.layers.iter().filter(|kind| **kind == LayerKind::Global).count() * self.num_kv_heads
    }

    /// Every KV group, by layer and then by KV head.
    pub fn groups(&self) -> impl Iterator<Item = KvGroup> + '_ {
        (0..self.layers.len() as u32).flat_map(|layer| self.groups_of(layer))
    }

    /// The KV groups of global layers, by layer and then by KV head.
    pub fn global_groups(&self) -> impl Iterator<Item = KvGroup> + '_ {
        self.groups().filter(|group| self.layers[group.layer as usize] == LayerKind::Global)
    }

    /// The KV groups of one layer, by KV head.
    pub fn groups_of(&self, layer: u32) -> impl Iterator<Item = KvGroup> + use<> {
        (0..self.num_kv_heads as u32).map(move |kv_head| KvGroup { layer, kv_head })
    }

    /// Position of `group` in [`CacheShape::groups`].
    ///
    /// # Panics
    /// If the geometry has no such group.
    pub fn group_index(&self, group: KvGroup) -> usize {
        let (layer, kv_head) = (group.layer as usize, group.kv_head as usize);
        assert!(layer < self.layers.len() && kv_head < self.num_kv_heads, "{group:?} is not a group of this cache");
        layer * self.num_kv_heads + kv_head
    }

    /// Pages that `num_tokens` tokens fill or begin to fill in one KV group.
    pub fn pages_for(&self, num_tokens: usize) -> usize {
        num_tokens.div_ceil(self.page_size)
    }
}

/// Why a geometry cannot be that of a cache.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ShapeError {
    /// A page of no tokens, or of more than [`MAX_PAGE_SIZE`].
    #[error("a page of {got} tokens is not supported: a page holds 1 to {MAX_PAGE_SIZE} tokens")]
    PageSize {
        /// The page size asked for.
        got: usize,
    },
    /// A head dimension of zero, or above [`MAX_HEAD_DIM`].
    #[error("a head dimension of {got} is not supported: it is 1 to {MAX_HEAD_DIM}")]
    HeadDim {
        /// The head dimension asked for.
        got: usize,
    },
    /// A count that must not be zero.
    #[error("a cache needs at least 1 of its {what}, got 0")]
    Zero {
        /// What is missing.
        what: &'static str,
    },
    /// A window layer in which a query would not even see itself.
    #[error("layer {layer} has a window of 0 tokens: a window holds at least 1")]
    EmptyWindow {
        /// The layer.
        layer: usize,
    },
    /// More groups than can be numbered.
    #[error("{got} KV groups are more than the limit of {}", u32::MAX)]
    TooManyGroups {
        /// Layers times KV heads.
        got: u128,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_numbered_by_layer_then_head() {
        let layers = vec![LayerKind::Global, LayerKind::Window(8), LayerKind::Global];
        let shape = CacheShape::new(layers, 2, 3, 64, 16).unwrap();
        let groups: Vec<_> = shape.groups().map(|group| (group.layer, group.kv_head)).collect();
        assert_eq!(groups, [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]);
        assert!(shape.groups().enumerate().all(|(index, group)| shape.group_index(group) == index));
        let global: Vec<_> = shape.global_groups().map(|group| (group.layer, group.kv_head)).collect();
        assert_eq!(global, [(0, 0), (0, 1), (2, 0), (2, 1)]);
        assert_eq!((shape.num_groups(), shape.num_global_groups()), (6, 4));
    }

    #[test]
    fn impossible_geometries_are_refused_with_got_and_limit() {
        let global = || vec![LayerKind::Global];
        let cases = [
            (
                CacheShape::new(global(), 1, 1, 64, 0),
                "a page of 0 tokens is not supported: a page holds 1 to 256 tokens",
            ),
            (
                CacheShape::new(global(), 1, 1, 64, 257),
                "a page of 257 tokens is not supported: a page holds 1 to 256 tokens",
            ),
            (CacheShape::new(global(), 1, 1, 0, 16), "a head dimension of 0 is not supported: it is 1 to 4096"),
            (CacheShape::new(global(), 1, 1, 4097, 16), "a head dimension of 4097 is not supported: it is 1 to 4096"),
            (CacheShape::new(vec![], 1, 1, 64, 16), "a cache needs at least 1 of its layers, got 0"),
            (CacheShape::new(global(), 0, 1, 64, 16), "a cache needs at least 1 of its KV heads, got 0"),
            (CacheShape::new(global(), 1, 0, 64, 16), "a cache needs at least 1 of its query heads per KV head, got 0"),
            (
                CacheShape::new(vec![LayerKind::Global, LayerKind::Window(0)], 1, 1, 64, 16),
                "layer 1 has a window of 0 tokens: a window holds at least 1",
            ),
            (
                CacheShape::new(global(), 1 << 33, 1, 64, 16),
                "8589934592 KV groups are more than the limit of 4294967295",
            ),
        ];
        for (got, message) in cases {
            assert_eq!(got.unwrap_err().to_string(), message);
        }
        for page_size in 1..=256 {
            assert!(CacheShape::new(global(), 1, 1, 64, page_size).is_ok());
        }
    }
}
