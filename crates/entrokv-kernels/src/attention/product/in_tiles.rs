//! The two products in tiles of bf16, for up to 16 rows at a time.
//!
//! Everything lies as a tile reads it: queries and weights row after row in pairs, keys `[pairs, 16]`, values `[8, stride]` of a strip.

use super::super::queries::QueryRows;
use super::super::strip::Strip;
use super::{PAIR_STRIDE, SCORE_STRIDE, Start};
use crate::page::PageFormat;
use crate::simd::LANES;
use crate::simd::tiles::{BLOCK_PAIRS, COLUMNS, Tiles};

/// Strips of a whole tile of positions.
const MAX_STRIPS: usize = SCORE_STRIDE / LANES;

/// Whether [`scores`] can be had in tiles.
pub(super) fn can_score(tiles: &Tiles, queries: QueryRows<'_>, strips: &[Strip]) -> bool {
    let whole = queries.num_rows == tiles.num_rows() && queries.head_dim.is_multiple_of(2 * BLOCK_PAIRS);
    whole && !queries.pairs.is_empty() && strips.iter().all(|strip| strip.key_format == PageFormat::Bf16)
}

/// As [`super::scores`], where [`can_score`].
///
/// # Safety
/// - As for [`super::scores`].
pub(super) unsafe fn scores(tiles: &Tiles, queries: QueryRows<'_>, strips: &[Strip], out: &mut [f32]) {
    let (num_rows, num_pairs) = (queries.num_rows, queries.head_dim / 2);
    assert!(num_rows == tiles.num_rows() && queries.pairs.len() == num_rows * num_pairs && strips.len() <= COLUMNS);
    assert!(out.len() >= (num_rows - 1) * SCORE_STRIDE + strips.len() * LANES);
    let mut keys = [std::ptr::null(); COLUMNS];
    keys.iter_mut().zip(strips).for_each(|(keys, strip)| *keys = strip.keys);
    let keys = &keys[..strips.len()];
    let queries = (queries.pairs.as_ptr(), num_pairs);
    // SAFETY: lengths are asserted; the caller's promise covers the keys.
    unsafe { tiles.scores(queries, num_pairs / BLOCK_PAIRS, keys, (out.as_mut_ptr(), SCORE_STRIDE)) }
}

/// Whether [`add_values`] can be had in tiles.
pub(super) fn can_add_values(tiles: &Tiles, strips: &[Strip], sums: &[f32]) -> bool {
    sums.len() == tiles.num_rows() * strips[0].value_stride
        && strips.iter().all(|strip| strip.value_format == PageFormat::Bf16)
}

/// As [`super::add_values`] from `weights` in pairs, rows [`PAIR_STRIDE`] apart, where [`can_add_values`].
///
/// # Safety
/// - The strips' values can be read: those of 16 lanes, `value_stride` elements each.
pub(super) unsafe fn add_values(tiles: &Tiles, weights: &[u32], strips: &[Strip], (start, sums): (Start, &mut [f32])) {
    let stride = strips[0].value_stride;
    let num_rows = tiles.num_rows();
    assert!(sums.len() == num_rows * stride && stride.is_multiple_of(LANES) && strips.len() <= MAX_STRIPS);
    assert!(weights.len() >= (num_rows - 1) * PAIR_STRIDE + strips.len() * LANES / 2);
    assert!(strips.iter().all(|strip| strip.value_stride == stride));
    // The next rows begin again with the first strip.
    let mut values = [strips[0].values; MAX_STRIPS + 1];
    values.iter_mut().zip(strips).for_each(|(values, strip)| *values = strip.values);
    let values = &values[..strips.len()];
    for column in (0..stride).step_by(COLUMNS * LANES) {
        let num_tiles = ((stride - column) / LANES).min(COLUMNS);
        let sums = (sums[column..].as_mut_ptr(), stride);
        // SAFETY: lengths are asserted; a column of pairs is 4 bytes, and the caller's promise covers the values.
        unsafe {
            tiles.add_values(
                (weights.as_ptr(), PAIR_STRIDE),
                values,
                (4 * column, num_tiles),
                (start == Start::Sums, sums),
            );
        };
    }
}
