//! The two products of attention, on a few rows and a few strips at a time.
//!
//! Departures from two plain loops, and why they keep the order of the sums:
//! 1. Registers hold a block of rows times columns, so that a loaded key or value is used by every row and a broadcast
//!    query element by every column. Every sum still runs over `head_dim` (scores) or over positions (values) from first to
//!    last in one accumulator, so the block's size never shows in the bits.
//! 2. Values start from the sums in memory, so that strips of different formats can be added one call after another.
//! 3. Every load asks for a line of a later page. Pages lie anywhere, so the hardware cannot guess the next one; and it asks
//!    for the second-level cache, because the few line buffers of the first one would be the limit (on a Zen 4 core, reading
//!    scattered pages of 4 KiB: 10 GB/s without asking, 11 asking for the first level, 16 for the second; in order: 22).
//! 4. Indices wrap: checking them for overflow in the inner loop would cost as much as a tenth of it.
//! 5. Lanes that are not resident are skipped, not multiplied by 0: what they hold may be anything.

use std::marker::PhantomData;
use std::ops::Range;

use super::queries::QueryRows;
use super::strip::Strip;
use crate::page::PageFormat;
use crate::simd::tiles::{self, Tiles};
use crate::simd::{Kernel, LANES, Pairs, Simd};

/// Elements from one row of scores to the next: a whole tile's.
pub(super) const SCORE_STRIDE: usize = super::TILE as usize;

/// How a kernel loads 16 elements of a strip.
trait Element: Copy {
    /// Bytes of 16 elements.
    const VECTOR_BYTES: usize;

    /// Element `i` of the strip's 16 keys.
    ///
    /// # Safety
    /// The strip's key elements from `keys` on can be read, more than `i` of each key.
    unsafe fn load_key<S: Simd>(s: S, keys: *const u8, i: usize) -> S::V;

    /// 16 elements of the value of `lane`, from `column` (a multiple of 16) on.
    ///
    /// # Safety
    /// The lane's value, `stride` elements, can be read in the strip's from `values` on.
    unsafe fn load_value<S: Simd>(s: S, values: *const u8, stride: usize, lane: usize, column: usize) -> S::V;
}

#[derive(Clone, Copy)]
struct Single;

#[derive(Clone, Copy)]
struct Half;

/// bf16 in pairs, see `page.rs`.
#[derive(Clone, Copy)]
struct Brain;

impl Element for Single {
    const VECTOR_BYTES: usize = 64;

    #[inline(always)]
    unsafe fn load_key<S: Simd>(s: S, keys: *const u8, i: usize) -> S::V {
        // SAFETY: the caller's promise: keys are `[head_dim, 16]`.
        unsafe { s.load_ptr(keys.cast::<f32>().add(i.wrapping_mul(LANES))) }
    }

    #[inline(always)]
    unsafe fn load_value<S: Simd>(s: S, values: *const u8, stride: usize, lane: usize, column: usize) -> S::V {
        // SAFETY: the caller's promise: values are `[16, stride]`.
        unsafe { s.load_ptr(values.cast::<f32>().add(lane.wrapping_mul(stride).wrapping_add(column))) }
    }
}

impl Element for Half {
    const VECTOR_BYTES: usize = 32;

    #[inline(always)]
    unsafe fn load_key<S: Simd>(s: S, keys: *const u8, i: usize) -> S::V {
        // SAFETY: the caller's promise: keys are `[head_dim, 16]`.
        unsafe { s.load_f16_ptr(keys.cast::<u16>().add(i.wrapping_mul(LANES))) }
    }

    #[inline(always)]
    unsafe fn load_value<S: Simd>(s: S, values: *const u8, stride: usize, lane: usize, column: usize) -> S::V {
        // SAFETY: the caller's promise: values are `[16, stride]`.
        unsafe { s.load_f16_ptr(values.cast::<u16>().add(lane.wrapping_mul(stride).wrapping_add(column))) }
    }
}

impl Element for Brain {
    const VECTOR_BYTES: usize = 32;

    #[inline(always)]
    unsafe fn load_key<S: Simd>(s: S, keys: *const u8, i: usize) -> S::V {
        // SAFETY: the caller's promise: keys are `[head_dim / 2, 16, 2]`.
        unsafe { load_half(s, keys.cast::<u32>().add((i / 2).wrapping_mul(LANES)), i % 2) }
    }

    #[inline(always)]
    unsafe fn load_value<S: Simd>(s: S, values: *const u8, stride: usize, lane: usize, column: usize) -> S::V {
        // SAFETY: the caller's promise: values are `[8, stride, 2]`.
        unsafe {
            load_half(s, values.cast::<u32>().add((lane / 2).wrapping_mul(stride).wrapping_add(column)), lane % 2)
        }
    }
}

/// The first (0) or second (1) elements of 16 pairs of bf16.
///
/// # Safety
/// 16 pairs can be read at `p`.
#[inline(always)]
unsafe fn load_half<S: Simd>(s: S, p: *const u32, half: usize) -> S::V {
    // SAFETY: the caller's promise.
    unsafe { if half == 0 { s.load_bf16_first_ptr(p) } else { s.load_bf16_second_ptr(p) } }
}

/// Bytes of a cache line.
const LINE: usize = 64;

/// Rows of a block out of `num_rows`: of registers, or of tiles where there are.
pub(super) fn rows_per_block<S: Simd>(num_rows: usize) -> usize {
    match num_rows {
        few if few <= S::MAX_ROWS => few,
        many if S::SUMS_OF_TILES => many.min(tiles::ROWS),
        _ => S::ROWS,
    }
}

/// Columns of a block of `num_rows` rows.
pub(super) fn columns_per_block<S: Simd>(num_rows: usize) -> usize {
    if S::SUMS_OF_TILES && num_rows > S::MAX_ROWS { tiles::COLUMNS } else { columns_in_registers::<S>(num_rows) }
}

/// Columns of `num_rows` rows that registers hold.
fn columns_in_registers<S: Simd>(num_rows: usize) -> usize {
    match num_rows {
        many if many > S::ROWS => S::MAX_ROWS_COLUMNS,
        // Two accumulators each.
        some if S::SUMS_OF_TILES && some > S::ROWS / 2 => S::COLUMNS / 2,
        _ => S::COLUMNS,
    }
}

/// The rows of a block as blocks that registers hold.
fn register_rows<S: Simd>(num_rows: usize) -> impl Iterator<Item = Range<usize>> {
    let step = if num_rows <= S::MAX_ROWS { num_rows } else { S::ROWS };
    (0..num_rows).step_by(step).map(move |start| start..num_rows.min(start + step))
}

/// Evaluates `$body` with the constant `$name` equal to the run-time `$value`, at most `$limit` (a constant of the
/// instruction set: blocks it has no registers for are not compiled).
macro_rules! with_const {
    ($name:ident = $value:expr, up to $limit:expr, of [$($n:literal),*], $body:expr) => {
        match $value {
            $($n if $n <= $limit => {
                const $name: usize = $n;
                $body
            })*
            other => unreachable!("a block of {other}"),
        }
    };
}

/// Evaluates `$body` with the constants `M` and `N` equal to the run-time numbers of rows and columns.
macro_rules! with_block {
    ($num_rows:expr, $num_columns:expr, $body:expr) => {
        if $num_rows <= S::ROWS {
            with_const!(M = $num_rows, up to S::ROWS, of [1, 2, 3, 4, 5, 6], {
                with_const!(N = $num_columns, up to S::COLUMNS, of [1, 2, 3, 4], $body)
            })
        } else if S::MAX_ROWS > S::ROWS {
            with_const!(M = $num_rows, up to S::MAX_ROWS, of [7, 8], {
                with_const!(N = $num_columns, up to S::MAX_ROWS_COLUMNS, of [1, 2, 3], $body)
            })
        }
    };
}

mod in_tiles;
mod pairs;

pub(super) use pairs::PAIR_STRIDE;

/// Evaluates `$body` with `$element` a type parameter for the elements of `$format`.
macro_rules! with_element {
    ($element:ident = $format:expr, $body:expr) => {
        match $format {
            PageFormat::F32 => {
                type $element = Single;
                $body
            }
            PageFormat::F16 => {
                type $element = Half;
                $body
            }
            PageFormat::Bf16 => {
                type $element = Brain;
                $body
            }
            coded => unreachable!("{coded:?} has no elements"),
        }
    };
}

/// Writes the scores `[rows, 16 * strips.len()]` of a block of queries and strips whose keys have one format to `out`, whose
/// rows are [`SCORE_STRIDE`] apart; those of lanes that are not resident are anything.
///
/// # Safety
/// - The strips' keys can be read: `16 * head_dim` elements, `head_dim` rounded up to an even number.
pub(super) unsafe fn scores<S: Simd>(
    simd: S,
    tiles: Option<&Tiles>,
    queries: QueryRows<'_>,
    strips: &[Strip],
    out: &mut [f32],
) {
    if let Some(tiles) = tiles.filter(|tiles| in_tiles::can_score(tiles, queries, strips)) {
        // SAFETY: the caller's promise.
        return unsafe { in_tiles::scores(tiles, queries, strips, out) };
    }
    for rows in register_rows::<S>(queries.num_rows) {
        let columns = columns_in_registers::<S>(rows.len());
        for (i, strips) in strips.chunks(columns).enumerate() {
            let out = &mut out[rows.start * SCORE_STRIDE + i * columns * LANES..];
            // SAFETY: the caller's promise.
            unsafe {
                if S::Pairs::EXIST && !queries.pairs.is_empty() {
                    pairs::scores(simd, queries.part(rows.clone()), strips, out);
                } else {
                    scores_in_f32(simd, queries.part(rows.clone()), strips, out);
                }
            }
        }
    }
}

/// [`scores`] of as many rows and strips as registers hold.
///
/// # Safety
/// - As for [`scores`].
unsafe fn scores_in_f32<S: Simd>(simd: S, queries: QueryRows<'_>, strips: &[Strip], out: &mut [f32]) {
    let QueryRows { scaled: queries, num_rows, head_dim, .. } = queries;
    assert_eq!(num_rows * head_dim, queries.len());
    assert!(strips.iter().all(|strip| strip.key_format == strips[0].key_format));
    assert!(num_rows <= S::MAX_ROWS && strips.len() <= columns_in_registers::<S>(num_rows));
    assert!(out.len() >= (num_rows - 1) * SCORE_STRIDE + strips.len() * LANES);
    let (queries, out) = (queries.as_ptr(), out.as_mut_ptr());
    with_block!(num_rows, strips.len(), {
        let keys: [_; N] = std::array::from_fn(|i| strips[i].keys);
        let ahead: [_; N] = std::array::from_fn(|i| strips[i].ahead_of_keys);
        with_element!(E = strips[0].key_format, {
            let element = PhantomData::<(E, [(); M])>;
            simd.vectorize(Scores { queries, head_dim, keys, ahead, out, element });
        });
    });
}

/// Scores of `M` rows and `N` strips. Made by [`scores_in_f32`] only, which has checked the lengths.
struct Scores<E, const M: usize, const N: usize> {
    queries: *const f32,
    head_dim: usize,
    keys: [*const u8; N],
    /// What will be read soon, as long as `keys`.
    ahead: [*const u8; N],
    out: *mut f32,
    element: PhantomData<(E, [(); M])>,
}

impl<E: Element, const M: usize, const N: usize> Kernel for Scores<E, M, N> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut sums = [[s.splat(0.0); N]; M];
        let mut keys = [s.splat(0.0); N];
        let rows: [*const f32; M] = std::array::from_fn(|m| self.queries.wrapping_add(m * self.head_dim));
        for i in 0..self.head_dim {
            for (key, start) in keys.iter_mut().zip(self.keys) {
                // SAFETY: `i < head_dim`, and a strip has `16 * head_dim` key elements.
                *key = unsafe { E::load_key(s, start, i) };
            }
            // Once a line.
            if E::VECTOR_BYTES >= LINE || i % 2 == 0 {
                self.ahead.iter().for_each(|ahead| s.prefetch(ahead.wrapping_add(i.wrapping_mul(E::VECTOR_BYTES))));
            }
            for (m, sums) in sums.iter_mut().enumerate() {
                // SAFETY: `queries` is `[M, head_dim]`.
                let query = s.splat(unsafe { *rows[m].add(i) });
                for (sum, key) in sums.iter_mut().zip(keys) {
                    *sum = s.mul_add(query, key, *sum);
                }
            }
        }
        for (m, sums) in sums.iter().enumerate() {
            for (n, sum) in sums.iter().enumerate() {
                // SAFETY: `out` has `M` rows of at least `16 * N` elements.
                unsafe { s.store_ptr(self.out.add(m * SCORE_STRIDE + n * LANES), *sum) };
            }
        }
    }
}

/// What values are weighted with: the exponentials of the scores.
#[derive(Clone, Copy)]
pub(super) struct Weights<'a> {
    /// Rows are [`SCORE_STRIDE`] apart.
    pub(super) exact: &'a [f32],
    /// Pairs of bf16, rows are [`PAIR_STRIDE`] apart; only where attention is computed in them.
    pub(super) rounded: &'a [u32],
}

/// What weighted values are added to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// 0, whatever the sums were.
    Zero,
    /// What the sums are.
    Sums,
}

/// Adds the strips' values, weighted, to the sums `[rows, value_stride]` of a block's rows, or to 0:
/// `sums[m] += weights[m, strip, lane] * value[strip, lane]` over the resident lanes in ascending order.
///
/// The first column of the weights belongs to the first strip.
///
/// # Safety
/// - The strips' values can be read: those of all resident lanes (bf16: and of their pairs), `value_stride` elements each.
pub(super) unsafe fn add_values<S: Simd>(
    simd: S,
    tiles: Option<&Tiles>,
    weights: Weights<'_>,
    strips: &[Strip],
    (start, sums): (Start, &mut [f32]),
) {
    let stride = strips[0].value_stride;
    if let Some(tiles) = tiles.filter(|tiles| in_tiles::can_add_values(tiles, strips, sums)) {
        // SAFETY: the caller's promise.
        return unsafe { in_tiles::add_values(tiles, weights.rounded, strips, (start, sums)) };
    }
    if start == Start::Zero {
        sums.fill(0.0);
    }
    for rows in register_rows::<S>(sums.len() / stride) {
        let sums = &mut sums[rows.start * stride..rows.end * stride];
        // SAFETY: the caller's promise.
        unsafe {
            if S::Pairs::EXIST {
                pairs::add_values(simd, &weights.rounded[rows.start * PAIR_STRIDE..], strips, sums);
            } else {
                add_values_in_f32(simd, &weights.exact[rows.start * SCORE_STRIDE..], strips, sums);
            }
        }
    }
}

/// [`add_values`] of as many rows as registers hold.
///
/// # Safety
/// - As for [`add_values`].
unsafe fn add_values_in_f32<S: Simd>(simd: S, weights: &[f32], strips: &[Strip], sums: &mut [f32]) {
    let stride = strips[0].value_stride;
    let num_rows = sums.len() / stride;
    assert!(num_rows * stride == sums.len() && stride.is_multiple_of(LANES));
    assert!(weights.len() >= (num_rows - 1) * SCORE_STRIDE + strips.len() * LANES);
    assert!(strips.iter().all(|strip| strip.value_format == strips[0].value_format && strip.value_stride == stride));
    let weights = weights.as_ptr();
    assert!(num_rows <= S::MAX_ROWS);
    let vectors = stride / LANES;
    // Equal blocks: 2 and 2 columns rather than 3 and 1, whose last one would wait for its few additions.
    let num_blocks = vectors.div_ceil(columns_in_registers::<S>(num_rows));
    for block in 0..num_blocks {
        let columns = vectors * block / num_blocks..vectors * (block + 1) / num_blocks;
        let column = columns.start * LANES;
        let sums = sums[column..].as_mut_ptr();
        with_block!(num_rows, columns.len(), {
            with_element!(E = strips[0].value_format, {
                let block = PhantomData::<(E, [[(); N]; M])>;
                simd.vectorize(AddValues { weights, strips, stride, column, sums, block });
            });
        });
    }
}

/// `N` vectors of `M` rows of weighted sums. Made by [`add_values_in_f32`] only, which has checked the lengths.
struct AddValues<'a, E, const M: usize, const N: usize> {
    weights: *const f32,
    strips: &'a [Strip],
    stride: usize,
    column: usize,
    sums: *mut f32,
    block: PhantomData<(E, [[(); N]; M])>,
}

impl<E: Element, const M: usize, const N: usize> Kernel for AddValues<'_, E, M, N> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut sums = [[s.splat(0.0); N]; M];
        for (m, sums) in sums.iter_mut().enumerate() {
            for (n, sum) in sums.iter_mut().enumerate() {
                // SAFETY: `sums` is `[M, stride]` from `column` on, and `column + 16 N <= stride`.
                *sum = unsafe { s.load_ptr(self.sums.add(m * self.stride + n * LANES)) };
            }
        }
        for (i, strip) in self.strips.iter().enumerate() {
            let weights = self.weights.wrapping_add(i * LANES);
            let mut lanes = strip.resident;
            while lanes != 0 {
                let lane = lanes.trailing_zeros() as usize;
                lanes &= lanes - 1;
                let row = lane.wrapping_mul(self.stride).wrapping_add(self.column);
                let mut values = [s.splat(0.0); N];
                for (n, value) in values.iter_mut().enumerate() {
                    // SAFETY: the lane is resident, so its row can be read.
                    *value = unsafe {
                        E::load_value(s, strip.values, self.stride, lane, self.column.wrapping_add(n * LANES))
                    };
                }
                // The block's part of the row, once a line.
                for at in (0..N * E::VECTOR_BYTES).step_by(LINE) {
                    let start = row.wrapping_mul(E::VECTOR_BYTES / LANES);
                    s.prefetch(strip.ahead_of_values.wrapping_add(start).wrapping_add(at));
                }
                for (m, sums) in sums.iter_mut().enumerate() {
                    // SAFETY: `weights` has `M` rows of 16 elements a strip.
                    let weight = s.splat(unsafe { *weights.add(m * SCORE_STRIDE + lane) });
                    for (sum, value) in sums.iter_mut().zip(values) {
                        *sum = s.mul_add(weight, value, *sum);
                    }
                }
            }
        }
        for (m, sums) in sums.iter().enumerate() {
            for (n, sum) in sums.iter().enumerate() {
                // SAFETY: as for the load.
                unsafe { s.store_ptr(self.sums.add(m * self.stride + n * LANES), *sum) };
            }
        }
    }
}
