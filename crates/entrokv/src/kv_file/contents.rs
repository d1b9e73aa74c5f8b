//! All of a KV file but the bytes of its pages.

use entrokv_cache::{CacheShape, PageKind, PageRecord};
use entrokv_kernels::codes::KeyConstants;
use safetensors::Dtype;

use super::Header;

/// A sequence at rest, but for the bytes of its pages.
#[derive(Debug)]
pub(crate) struct Contents {
    /// Its words.
    pub(crate) header: Header,
    /// Every token, in position order.
    pub(crate) tokens: Vec<u32>,
    /// Pages of each KV group, in the order of [`CacheShape::groups`].
    pub(crate) tables: Vec<Vec<PageRecord>>,
    /// What the codes of each global KV group are relative to; empty where there is nothing yet, or never.
    pub(crate) constants: Vec<KeyConstants>,
    /// Sums of the squares of queries, `[num_groups, head_dim]`, where constants are still to be taken; else empty.
    pub(crate) query_squares: Vec<f64>,
}

/// A list of numbers as the file has it.
pub(super) struct List {
    pub(super) name: &'static str,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    /// Little-endian.
    pub(super) bytes: Vec<u8>,
}

impl Contents {
    /// The kinds of its pages, ascending.
    pub(crate) fn kinds_of(tables: &[Vec<PageRecord>]) -> Vec<PageKind> {
        let mut kinds: Vec<PageKind> = tables.iter().flatten().map(|record| record.kind).collect();
        kinds.sort_unstable();
        kinds.dedup();
        kinds
    }

    /// Its pages in the order in which their bytes follow each other: by kind, then by KV group, then by index. Each with the
    /// number of its group and its place in the table.
    pub(crate) fn pages(&self) -> impl Iterator<Item = (usize, usize, &PageRecord)> {
        let of_kind = |kind| {
            let tables = self.tables.iter().enumerate();
            let pages =
                tables.flat_map(|(group, table)| table.iter().enumerate().map(move |(at, page)| (group, at, page)));
            pages.filter(move |(.., page)| page.kind == kind)
        };
        Self::kinds_of(&self.tables).into_iter().flat_map(of_kind)
    }

    /// Its lists in the order of the file, those without an element left out: the format cannot say where these lie.
    pub(super) fn lists(&self, shape: &CacheShape) -> Vec<List> {
        let kinds = Self::kinds_of(&self.tables);
        let pages = || self.tables.iter().flatten();
        let kind = |record: &PageRecord| kinds.partition_point(|kind| *kind < record.kind) as u32;
        let u32s = |name, values: Vec<u32>| List {
            name,
            dtype: Dtype::U32,
            shape: vec![values.len()],
            bytes: values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        };
        let heads = |name, part: fn(&KeyConstants) -> &[f32]| List {
            name,
            dtype: Dtype::F32,
            shape: vec![self.constants.len(), shape.head_dim],
            bytes: self.constants.iter().flat_map(part).flat_map(|value| value.to_le_bytes()).collect(),
        };
        let squares = List {
            name: "queries.squares",
            dtype: Dtype::F64,
            shape: vec![shape.num_groups(), shape.head_dim],
            bytes: self.query_squares.iter().flat_map(|value| value.to_le_bytes()).collect(),
        };
        let is_compacted = pages().any(|page| page.positions.is_some());
        let positions = pages().filter(|_| is_compacted).flat_map(|page| page.positions(shape.page_size));
        let lists = [
            squares,
            u32s("tokens", self.tokens.clone()),
            u32s("tables", self.tables.iter().map(|table| table.len() as u32).collect()),
            u32s("pages.index", pages().map(|page| page.index.0).collect()),
            u32s("pages.len", pages().map(|page| page.len).collect()),
            u32s("pages.kind", pages().map(kind).collect()),
            u32s("pages.positions", positions.collect()),
            heads("keys.centre", KeyConstants::centre),
            heads("keys.scale", KeyConstants::channel_scale),
        ];
        lists.into_iter().filter(|list| !list.bytes.is_empty()).collect()
    }
}
