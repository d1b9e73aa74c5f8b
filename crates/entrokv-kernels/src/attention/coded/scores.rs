//! Scores of queries and coded keys.
//!
//! Registers hold a block of rows times strips, so that an unpacked group is used by every row and an operand by every strip.
//! Integer sums do not depend on the block's size; everything after them is done for each score in one order.

use std::marker::PhantomData;

use super::queries::CodedQueries;
use super::scales_at;
use super::unpack::{Bytes, Nibbles, Packed, Pairs, PairsAndBits, Visit};
use crate::attention::product::SCORE_STRIDE;
use crate::attention::strip::Strip;
use crate::codes::codebook::Codebook;
use crate::codes::packing::{GROUP_BYTES, STEP_GROUPS};
use crate::codes::{BLOCK_LEN, Code, Rotated};
use crate::simd::integers::{IntegerKernel, Integers, Operands};
use crate::simd::{LANES, Simd};

/// Strips of a register block.
const STRIPS: usize = 2;

/// Operands of a step.
const STEP_OPERANDS: usize = BLOCK_LEN / LANES;

/// Writes the scores `[rows, 16 * strips]` of some rows and strips whose keys have one coded format to `out`, whose rows are
/// [`SCORE_STRIDE`] apart; those of lanes that are not resident are anything.
pub(in crate::attention) struct ScoreStrips<'a> {
    pub(in crate::attention) queries: &'a CodedQueries,
    pub(in crate::attention) first_row: usize,
    pub(in crate::attention) num_rows: usize,
    pub(in crate::attention) head_dim: usize,
    /// Their keys can be read: a strip of their format.
    pub(in crate::attention) strips: &'a [Strip],
    /// What [`super::UnpackStrips`] made of these strips' keys, if it did.
    pub(in crate::attention) unpacked: Option<&'a [u8]>,
    pub(in crate::attention) out: &'a mut [f32],
}

impl IntegerKernel for ScoreStrips<'_> {
    #[inline(always)]
    fn run<I: Integers>(self, i: I) {
        let format = self.strips[0].key_format;
        let strip_len = self.head_dim * LANES;
        assert!(self.strips.iter().all(|strip| strip.key_format == format));
        assert!(self.out.len() >= (self.num_rows - 1) * SCORE_STRIDE + self.strips.len() * LANES);
        assert!(self.unpacked.is_none_or(|bytes| bytes.len() >= self.strips.len() * strip_len));
        let Some(code) = format.code() else { unreachable!("{format:?} has no codes") };
        match (code, self.unpacked) {
            (Code::Q8, _) => self.blocks::<I, Bytes>(i, code),
            (Code::Rotated(_), Some(_)) => self.blocks::<I, Bytes>(i, code),
            (Code::Rotated(Rotated::Tq4), None) => self.blocks::<I, Nibbles>(i, code),
            (Code::Rotated(Rotated::Tq3), None) => self.blocks::<I, PairsAndBits>(i, code),
            (Code::Rotated(Rotated::Tq2), None) => self.blocks::<I, Pairs>(i, code),
        }
    }
}

impl ScoreStrips<'_> {
    /// Block after block of rows.
    #[inline(always)]
    fn blocks<I: Integers, P: Packed>(mut self, i: I, code: Code) {
        let num_blocks = self.num_rows.div_ceil(I::ROWS);
        for block in 0..num_blocks {
            let rows = self.num_rows * block / num_blocks..self.num_rows * (block + 1) / num_blocks;
            macro_rules! block {
                ($($m:literal)*) => {
                    match rows.len() {
                        $($m if $m <= I::ROWS => self.block::<I, P, $m>(i, code, rows.start),)*
                        other => unreachable!("a block of {other}"),
                    }
                };
            }
            block!(1 2 3 4 5 6 7 8);
        }
    }

    #[inline(always)]
    fn block<I: Integers, P: Packed, const M: usize>(&mut self, i: I, code: Code, row: usize) {
        i.vectorize(ScoreBlock::<P, M> {
            queries: self.queries,
            row: self.first_row + row,
            head_dim: self.head_dim,
            code,
            strips: self.strips,
            unpacked: self.unpacked.filter(|_| code != Code::Q8),
            out: &mut self.out[row * SCORE_STRIDE..],
            packed: PhantomData,
        });
    }
}

/// Scores of `M` rows and some strips. Made by [`ScoreStrips`] only, which has checked the lengths.
struct ScoreBlock<'a, P, const M: usize> {
    queries: &'a CodedQueries,
    row: usize,
    head_dim: usize,
    code: Code,
    strips: &'a [Strip],
    unpacked: Option<&'a [u8]>,
    out: &'a mut [f32],
    packed: PhantomData<P>,
}

impl<P: Packed, const M: usize> IntegerKernel for ScoreBlock<'_, P, M> {
    #[inline(always)]
    fn run<I: Integers>(self, i: I) {
        let strip_len = self.head_dim * LANES;
        let keys = |index: usize, strip: &Strip| match self.unpacked {
            Some(bytes) => bytes.as_ptr().wrapping_add(index.wrapping_mul(strip_len)),
            None => strip.keys,
        };
        let out = self.out.as_mut_ptr();
        let (pairs, last) = self.strips.as_chunks::<STRIPS>();
        for (pair, strips) in pairs.iter().enumerate() {
            let first = pair * STRIPS;
            let keys = [keys(first, &strips[0]), keys(first + 1, &strips[1])];
            let block = Registers::<P, M, STRIPS> { rows: &self, strips, keys, out: out.wrapping_add(first * LANES) };
            block.score(i);
        }
        if let [strip] = last {
            let first = pairs.len() * STRIPS;
            let out = out.wrapping_add(first * LANES);
            Registers::<P, M, 1> { rows: &self, strips: &[*strip], keys: [keys(first, strip)], out }.score(i);
        }
    }
}

/// What is in registers at a time: `M` rows and `N` strips.
struct Registers<'a, P, const M: usize, const N: usize> {
    rows: &'a ScoreBlock<'a, P, M>,
    strips: &'a [Strip; N],
    /// Codes of each strip, packed as `P` says.
    keys: [*const u8; N],
    out: *mut f32,
}

impl<P: Packed, const M: usize, const N: usize> Registers<'_, P, M, N> {
    #[inline(always)]
    fn score<I: Integers>(self, i: I) {
        match self.rows.code {
            Code::Q8 => self.q8(i),
            Code::Rotated(rotated) => self.rotated(i, rotated.codebook()),
        }
    }

    #[inline(always)]
    fn rotated<I: Integers>(self, i: I, book: &Codebook) {
        let s = i.floats();
        let num_steps = self.rows.head_dim / BLOCK_LEN;
        let row_len = self.rows.head_dim / LANES;
        let terms = &self.rows.queries.rotated_terms[self.rows.row..self.rows.row + M];
        let operands = &self.rows.queries.rotated[self.rows.row * row_len..(self.rows.row + M) * row_len];
        let mut totals: [_; M] = std::array::from_fn(|m| [[terms[m].start; LANES]; N]);
        self.add_products(i, &book.key_table, (0, num_steps), (operands, row_len), &mut totals);
        let scales = self.scales(i, 0);
        for (m, totals) in totals.iter().enumerate() {
            let (factor, bias) = (s.splat(terms[m].factor * book.unit), s.splat(terms[m].bias));
            for (n, total) in totals.iter().enumerate() {
                let score = s.fused_mul_add(i.widen(total), s.mul(scales[n], factor), bias);
                // SAFETY: `out` has `M` rows of at least `16 * N` elements.
                unsafe { s.store_ptr(self.out.add(m * SCORE_STRIDE + n * LANES), score) };
            }
        }
    }

    #[inline(always)]
    fn q8<I: Integers>(self, i: I) {
        let s = i.floats();
        let num_steps = self.rows.head_dim / BLOCK_LEN;
        let row_len = self.rows.head_dim / LANES;
        let terms = &self.rows.queries.block_terms[self.rows.row * num_steps..(self.rows.row + M) * num_steps];
        let operands = &self.rows.queries.blocks[self.rows.row * row_len..(self.rows.row + M) * row_len];
        let mut scores = [[s.splat(0.0); N]; M];
        for step in 0..num_steps {
            let terms: [_; M] = std::array::from_fn(|m| terms[m * num_steps + step]);
            let mut totals = terms.map(|terms| [[terms.start; LANES]; N]);
            let operands = (&operands[step * STEP_OPERANDS..], row_len);
            self.add_products(i, &[0; 16], (step, 1), operands, &mut totals);
            let scales = self.scales(i, step);
            for ((scores, totals), terms) in scores.iter_mut().zip(&totals).zip(terms) {
                let factor = s.splat(terms.factor);
                for ((score, total), scale) in scores.iter_mut().zip(totals).zip(scales) {
                    *score = s.fused_mul_add(i.widen(total), s.mul(scale, factor), *score);
                }
            }
        }
        for (m, scores) in scores.iter().enumerate() {
            for (n, score) in scores.iter().enumerate() {
                // SAFETY: `out` has `M` rows of at least `16 * N` elements.
                unsafe { s.store_ptr(self.out.add(m * SCORE_STRIDE + n * LANES), *score) };
            }
        }
    }

    /// The strips' scales number `index`.
    #[inline(always)]
    fn scales<I: Integers>(&self, i: I, index: usize) -> [<I::Floats as Simd>::V; N] {
        let at = scales_at(self.rows.code, self.rows.head_dim) + index * LANES * size_of::<u16>();
        self.strips.iter().for_each(|strip| i.floats().prefetch(strip.ahead_of_keys.wrapping_add(at)));
        // SAFETY: a strip's scales follow its codes.
        std::array::from_fn(|n| unsafe { i.floats().load_f16_ptr(self.strips[n].keys.add(at).cast()) })
    }

    /// Adds the products of `num_steps` steps from `first` on. Rows of `operands`, which start with those of the first step,
    /// are `row_len` apart.
    #[inline(always)]
    fn add_products<I: Integers>(
        &self,
        i: I,
        table: &[u8; 16],
        (first, num_steps): (usize, usize),
        (operands, row_len): (&[Operands], usize),
        totals: &mut [[[i32; LANES]; N]; M],
    ) {
        assert!(operands.len() >= (M - 1) * row_len + num_steps * STEP_OPERANDS);
        let s = i.floats();
        let table = i.table(table);
        let first_operands: [*const u64; M] = std::array::from_fn(|m| operands[m * row_len..].as_flattened().as_ptr());
        for side in 0..I::SIDES {
            let mut sums = [[i.zero(); N]; M];
            let at = first * P::STEP_BYTES;
            let mut steps = self.keys.map(|keys| keys.wrapping_add(at + side * I::SIDE_BYTES));
            let mut ahead: [*const u8; N] = std::array::from_fn(|n| self.strips[n].ahead_of_keys.wrapping_add(at));
            let mut operands = first_operands;
            for _ in 0..num_steps {
                if side == 0 {
                    for line in (0..P::STEP_BYTES).step_by(GROUP_BYTES) {
                        ahead.iter().for_each(|ahead| s.prefetch(ahead.wrapping_add(line)));
                    }
                }
                let mut visitor = AddProducts { sums, operands };
                // SAFETY: the strips' keys are packed so, and these are steps of theirs.
                unsafe { P::unpack(i, table, steps, &mut visitor) };
                sums = visitor.sums;
                for n in 0..N {
                    steps[n] = steps[n].wrapping_add(P::STEP_BYTES);
                    ahead[n] = ahead[n].wrapping_add(P::STEP_BYTES);
                }
                for operands in &mut operands {
                    *operands = operands.wrapping_add(STEP_GROUPS);
                }
            }
            for (sums, totals) in sums.iter().zip(totals.iter_mut()) {
                for (sum, total) in sums.iter().zip(totals) {
                    // SAFETY: one side of 16 lanes.
                    unsafe { i.add_to(total.as_mut_ptr().add(side * I::SIDE_LANES), *sum) };
                }
            }
        }
    }
}

/// Adds the products of a step's groups.
struct AddProducts<S, const M: usize, const N: usize> {
    sums: [[S; N]; M],
    /// The step's operands of each row, 8 each: made in [`Registers::add_products`] only.
    operands: [*const u64; M],
}

impl<I: Integers, const M: usize, const N: usize> Visit<I, N> for AddProducts<I::Sums, M, N> {
    #[inline(always)]
    fn visit(&mut self, i: I, p: usize, groups: [[I::Bytes; 2]; N]) {
        for g in [0, 1] {
            for (sums, operands) in self.sums.iter_mut().zip(self.operands) {
                // SAFETY: `2 p + g < 8`.
                let operand = unsafe { i.operand(operands.add(2 * p + g)) };
                for (sum, groups) in sums.iter_mut().zip(groups) {
                    *sum = i.add_unsigned(*sum, groups[g], operand);
                }
            }
        }
    }
}
