//! The two products in pairs of bf16: half the instructions of f32.
//!
//! Differences from the f32 kernels, besides the rounding of every operand:
//! 1. A sum takes two elements a step: successive elements of a key (scores), successive positions (values).
//! 2. Values of lanes that are not resident are read, so the reader has made them 0.
//! 3. Where sums are to be those of tiles ([`Simd::SUMS_OF_TILES`]), they are summed as tiles sum: widened elements in f32, the first
//!    and the second ones of up to 16 pairs (scores) or of a strip (values) apart and from 0.
//! 4. f16 is rounded to pairs as it is loaded, to the same bits as the copies that [`super::super::pack`] makes for many rows.

use std::marker::PhantomData;

use super::super::queries::QueryRows;
use super::super::strip::Strip;
use super::{SCORE_STRIDE, columns_in_registers};
use crate::page::PageFormat;
use crate::simd::{Kernel, LANES, Pairs, Simd, tiles};

/// Pairs from one row of weights to the next: a whole tile's.
pub(in crate::attention) const PAIR_STRIDE: usize = SCORE_STRIDE / 2;

/// Pairs of lanes of a strip.
const LANE_PAIRS: usize = LANES / 2;

/// Bytes of 16 pairs, and of what they are rounded from.
const PAIR_BYTES: usize = 4 * LANES;

/// The pairs of an instruction set whose kernels are in this file.
#[inline(always)]
fn pairs_of<S: Simd>(simd: S) -> S::Pairs {
    simd.pairs().expect("called where `Pairs::EXIST` only")
}

/// Adds the products of first elements to the first sum, those of second ones to the second.
#[inline(always)]
fn add_apart<S: Simd>(s: S, a: <S::Pairs as Pairs>::P, b: <S::Pairs as Pairs>::P, sums: &mut [S::V; 2]) {
    let pairs = pairs_of(s);
    sums[0] = s.fused_mul_add(pairs.first(a), pairs.first(b), sums[0]);
    sums[1] = s.fused_mul_add(pairs.second(a), pairs.second(b), sums[1]);
}

/// Adds what was summed apart to the sums.
#[inline(always)]
fn add_blocks<S: Simd, const M: usize, const N: usize>(s: S, apart: &[[[S::V; 2]; N]; M], sums: &mut [[S::V; N]; M]) {
    for (sum, [first, second]) in sums.as_flattened_mut().iter_mut().zip(apart.as_flattened()) {
        *sum = s.add(*sum, s.add(*first, *second));
    }
}

/// How a kernel loads pairs from a strip.
trait PairElement {
    /// Elements `2 i` and `2 i + 1` of the strip's 16 keys.
    ///
    /// # Safety
    /// The strip's key elements from `keys` on can be read, more than `2 i + 1` of each key.
    unsafe fn key_pair<S: Simd>(s: S, keys: *const u8, i: usize) -> <S::Pairs as Pairs>::P;

    /// The elements of the values of lanes `2 pair` and `2 pair + 1` at 16 columns from `column` on.
    ///
    /// # Safety
    /// The strip's values of those lanes, `stride` elements each, can be read from `values` on.
    unsafe fn value_pair<S: Simd>(
        s: S,
        values: *const u8,
        stride: usize,
        pair: usize,
        column: usize,
    ) -> <S::Pairs as Pairs>::P;
}

/// bf16 in pairs.
struct Brain;

/// f16, rounded as it is loaded.
struct Half;

impl PairElement for Brain {
    #[inline(always)]
    unsafe fn key_pair<S: Simd>(s: S, keys: *const u8, i: usize) -> <S::Pairs as Pairs>::P {
        // SAFETY: the caller's promise: keys are `[head_dim / 2, 16, 2]`.
        unsafe { pairs_of(s).load_ptr(keys.cast::<u32>().add(i.wrapping_mul(LANES))) }
    }

    #[inline(always)]
    unsafe fn value_pair<S: Simd>(
        s: S,
        values: *const u8,
        stride: usize,
        pair: usize,
        column: usize,
    ) -> <S::Pairs as Pairs>::P {
        // SAFETY: the caller's promise: values are `[8, stride, 2]`.
        unsafe { pairs_of(s).load_ptr(values.cast::<u32>().add(pair.wrapping_mul(stride).wrapping_add(column))) }
    }
}

impl PairElement for Half {
    #[inline(always)]
    unsafe fn key_pair<S: Simd>(s: S, keys: *const u8, i: usize) -> <S::Pairs as Pairs>::P {
        // SAFETY: the caller's promise: keys are `[head_dim, 16]`.
        unsafe {
            let first = keys.cast::<u16>().add((2 * i).wrapping_mul(LANES));
            pairs_of(s).round(s.load_f16_ptr(first), s.load_f16_ptr(first.add(LANES)))
        }
    }

    #[inline(always)]
    unsafe fn value_pair<S: Simd>(
        s: S,
        values: *const u8,
        stride: usize,
        pair: usize,
        column: usize,
    ) -> <S::Pairs as Pairs>::P {
        let row = (2 * pair).wrapping_mul(stride).wrapping_add(column);
        // SAFETY: the caller's promise: values are `[16, stride]`.
        unsafe {
            let first = values.cast::<u16>().add(row);
            pairs_of(s).round(s.load_f16_ptr(first), s.load_f16_ptr(first.add(stride)))
        }
    }
}

/// Evaluates `$body` with `$element` a type for loading pairs of elements of `$format`.
macro_rules! with_pair_element {
    ($element:ident = $format:expr, $body:expr) => {
        match $format {
            PageFormat::F16 => {
                type $element = Half;
                $body
            }
            PageFormat::Bf16 => {
                type $element = Brain;
                $body
            }
            other => unreachable!("the reader makes pairs of {other:?}"),
        }
    };
}

/// As [`super::scores`], from the queries' pairs.
///
/// # Safety
/// - The strips' keys can be read: `16 * head_dim` elements, `head_dim` rounded up to an even number.
pub(super) unsafe fn scores<S: Simd>(
    simd: S,
    QueryRows { pairs: queries, num_rows, head_dim, .. }: QueryRows<'_>,
    strips: &[Strip],
    out: &mut [f32],
) {
    let query_stride = queries.len() / num_rows;
    let num_pairs = head_dim.div_ceil(2);
    assert!(num_rows * query_stride == queries.len() && num_pairs <= query_stride);
    assert!(strips.iter().all(|strip| strip.key_format == strips[0].key_format));
    assert!(num_rows <= S::MAX_ROWS && strips.len() <= columns_in_registers::<S>(num_rows));
    assert!(out.len() >= (num_rows - 1) * SCORE_STRIDE + strips.len() * LANES);
    let (queries, out) = (queries.as_ptr(), out.as_mut_ptr());
    with_block!(num_rows, strips.len(), {
        let keys: [_; N] = std::array::from_fn(|i| strips[i].keys);
        let ahead: [_; N] = std::array::from_fn(|i| strips[i].ahead_of_keys);
        with_pair_element!(E = strips[0].key_format, {
            let element = PhantomData::<(E, [(); M])>;
            simd.vectorize(Scores { queries, query_stride, num_pairs, keys, ahead, out, element });
        });
    });
}

/// Scores of `M` rows and `N` strips. Made by [`scores`] only, which has checked the lengths.
struct Scores<E, const M: usize, const N: usize> {
    queries: *const u32,
    query_stride: usize,
    num_pairs: usize,
    keys: [*const u8; N],
    /// What will be read soon, as long as `keys`.
    ahead: [*const u8; N],
    out: *mut f32,
    element: PhantomData<(E, [(); M])>,
}

impl<E: PairElement, const M: usize, const N: usize> Kernel for Scores<E, M, N> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let pairs = pairs_of(s);
        let mut sums = [[s.splat(0.0); N]; M];
        let mut keys = [pairs.splat(0); N];
        let rows: [*const u32; M] = std::array::from_fn(|m| self.queries.wrapping_add(m * self.query_stride));
        let block_len = if S::SUMS_OF_TILES { tiles::BLOCK_PAIRS } else { self.num_pairs };
        let mut start = 0;
        while start < self.num_pairs {
            let end = self.num_pairs.min(start.wrapping_add(block_len));
            let mut apart = [[[s.splat(0.0); 2]; N]; M];
            for i in start..end {
                for (key, start) in keys.iter_mut().zip(self.keys) {
                    // SAFETY: `i` is a pair of the strips' keys.
                    *key = unsafe { E::key_pair(s, start, i) };
                }
                self.ahead.iter().for_each(|ahead| s.prefetch(ahead.wrapping_add(i.wrapping_mul(PAIR_BYTES))));
                for m in 0..M {
                    // SAFETY: `queries` has `M` rows of at least `num_pairs`.
                    let query = pairs.splat(unsafe { *rows[m].add(i) });
                    for n in 0..N {
                        if S::SUMS_OF_TILES {
                            add_apart(s, query, keys[n], &mut apart[m][n]);
                        } else {
                            sums[m][n] = pairs.dot(query, keys[n], sums[m][n]);
                        }
                    }
                }
            }
            if S::SUMS_OF_TILES {
                add_blocks(s, &apart, &mut sums);
            }
            start = end;
        }
        for (m, sums) in sums.iter().enumerate() {
            for (n, sum) in sums.iter().enumerate() {
                // SAFETY: `out` has `M` rows of at least `16 * N` elements.
                unsafe { s.store_ptr(self.out.add(m * SCORE_STRIDE + n * LANES), *sum) };
            }
        }
    }
}

/// As [`super::add_values`], from `weights` in pairs, rows [`PAIR_STRIDE`] apart: the values of all lanes are added.
///
/// # Safety
/// - The strips' values can be read: those of 16 lanes, `value_stride` elements each.
pub(super) unsafe fn add_values<S: Simd>(simd: S, weights: &[u32], strips: &[Strip], sums: &mut [f32]) {
    let stride = strips[0].value_stride;
    let num_rows = sums.len() / stride;
    assert!(num_rows * stride == sums.len() && stride.is_multiple_of(LANES));
    assert!(weights.len() >= (num_rows - 1) * PAIR_STRIDE + strips.len() * LANE_PAIRS);
    assert!(strips.iter().all(|s| s.value_format == strips[0].value_format && s.value_stride == stride));
    assert!(num_rows <= S::MAX_ROWS);
    let weights = weights.as_ptr();
    let vectors = stride / LANES;
    let num_blocks = vectors.div_ceil(columns_in_registers::<S>(num_rows));
    for block in 0..num_blocks {
        let columns = vectors * block / num_blocks..vectors * (block + 1) / num_blocks;
        let column = columns.start * LANES;
        let sums = sums[column..].as_mut_ptr();
        with_block!(num_rows, columns.len(), {
            with_pair_element!(E = strips[0].value_format, {
                let block = PhantomData::<(E, [[(); N]; M])>;
                simd.vectorize(AddValues { weights, strips, stride, column, sums, block });
            });
        });
    }
}

/// `N` vectors of `M` rows of weighted sums. Made by [`add_values`] only, which has checked the lengths.
struct AddValues<'a, E, const M: usize, const N: usize> {
    weights: *const u32,
    strips: &'a [Strip],
    stride: usize,
    column: usize,
    sums: *mut f32,
    block: PhantomData<(E, [[(); N]; M])>,
}

impl<E: PairElement, const M: usize, const N: usize> Kernel for AddValues<'_, E, M, N> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let pairs = pairs_of(s);
        let mut sums = [[s.splat(0.0); N]; M];
        for (m, sums) in sums.iter_mut().enumerate() {
            for (n, sum) in sums.iter_mut().enumerate() {
                // SAFETY: `sums` is `[M, stride]` from `column` on, and `column + 16 N <= stride`.
                *sum = unsafe { s.load_ptr(self.sums.add(m * self.stride + n * LANES)) };
            }
        }
        for (i, strip) in self.strips.iter().enumerate() {
            let weights = self.weights.wrapping_add(i * LANE_PAIRS);
            let mut apart = [[[s.splat(0.0); 2]; N]; M];
            for pair in 0..LANE_PAIRS {
                let mut values = [pairs.splat(0); N];
                for (n, value) in values.iter_mut().enumerate() {
                    let column = self.column.wrapping_add(n * LANES);
                    // SAFETY: a pair of the strip's lanes.
                    *value = unsafe { E::value_pair(s, strip.values, self.stride, pair, column) };
                    // As many bytes as have been read, a line a vector.
                    let at = pair.wrapping_mul(self.stride).wrapping_add(column).wrapping_mul(4);
                    s.prefetch(strip.ahead_of_values.wrapping_add(at));
                }
                for m in 0..M {
                    // SAFETY: `weights` has `M` rows of 8 pairs a strip.
                    let weight = pairs.splat(unsafe { *weights.add(m * PAIR_STRIDE + pair) });
                    for n in 0..N {
                        if S::SUMS_OF_TILES {
                            add_apart(s, weight, values[n], &mut apart[m][n]);
                        } else {
                            sums[m][n] = pairs.dot(weight, values[n], sums[m][n]);
                        }
                    }
                }
            }
            if S::SUMS_OF_TILES {
                add_blocks(s, &apart, &mut sums);
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
