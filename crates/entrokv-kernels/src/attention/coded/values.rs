//! Weighted sums of coded values.
//!
//! Registers hold two dimension blocks of 16 of a few rows; they run over all strips of a tile, so that a sum is written once.
//! Sums of strips of different codebooks are of the same integers and are added up before they become f32.

use std::ops::Range;

use super::scales_at;
use super::unpack::{Bytes, Nibbles, Packed, Pairs, PairsAndBits, Visit};
use crate::attention::product::SCORE_STRIDE;
use crate::attention::strip::Strip;
use crate::codes::packing::GROUP_BYTES;
use crate::codes::{BLOCK_LEN, Code, Rotated};
use crate::simd::integers::{IntegerKernel, Integers, Operands};
use crate::simd::{LANES, Simd};

/// What the largest weight becomes. With what rounding those before it left, half a unit at most, it fits a byte.
const LARGEST: f32 = 254.0;

/// Dimension blocks of a step.
const STEP_BLOCKS: usize = BLOCK_LEN / LANES;

/// Operands of a row's weights in a tile.
const ROW_OPERANDS: usize = SCORE_STRIDE / LANES;

/// A thread's memory for weights as integers and for sums of them.
#[derive(Default)]
pub(in crate::attention) struct Weights {
    /// The scales of each strip.
    scales: Vec<[f32; LANES]>,
    /// Weights of some rows' strips as f32: `[ROW_OPERANDS, rows]`.
    exact: Vec<[f32; LANES]>,
    /// `[rows, ROW_OPERANDS]`: operands of each row's strips.
    operands: Vec<Operands>,
    /// What an integer stands for: `[rows]`.
    factors: Vec<f32>,
    /// `[rows, head_dim / 16]`.
    sums: Vec<[i32; LANES]>,
}

/// Adds the coded values of a tile, weighted, to the sums `[rows, head_dim]` of a few rows.
pub(in crate::attention) struct AddValues<'a> {
    /// `[rows, SCORE_STRIDE]`: exponentials, 0 where nothing is seen; the first column belongs to the first strip.
    pub(in crate::attention) exponentials: &'a [f32],
    pub(in crate::attention) num_rows: usize,
    pub(in crate::attention) head_dim: usize,
    /// Strips of any formats; those whose values are coded can be read.
    pub(in crate::attention) strips: &'a [Strip],
    /// What [`super::UnpackStrips`] made of these strips' values, if it did.
    pub(in crate::attention) unpacked: Option<&'a [u8]>,
    pub(in crate::attention) weights: &'a mut Weights,
    pub(in crate::attention) sums: &'a mut [f32],
    /// Empty if no strip has rotated values.
    pub(in crate::attention) rotated: &'a mut [f32],
}

impl IntegerKernel for AddValues<'_> {
    #[inline(always)]
    fn run<I: Integers>(self, i: I) {
        let AddValues { exponentials, num_rows, head_dim, strips, unpacked, weights, sums, rotated } = self;
        assert!(exponentials.len() >= (num_rows - 1) * SCORE_STRIDE + strips.len() * LANES);
        assert!(unpacked.is_none_or(|bytes| bytes.len() >= strips.len() * head_dim * LANES));
        weights.scales.resize(ROW_OPERANDS, [0.0; LANES]);
        weights.exact.resize(ROW_OPERANDS * MAX_ROWS, [0.0; LANES]);
        weights.operands.resize(num_rows * ROW_OPERANDS, Operands::default());
        weights.factors.resize(num_rows, 0.0);
        weights.sums.resize(num_rows * head_dim / LANES, [0; LANES]);
        let has = |code: fn(Code) -> bool| strips.iter().any(|strip| strip.value_format.code().is_some_and(code));
        let tile = Tile { exponentials, num_rows, head_dim, strips, unpacked };
        if has(|code| code == Code::Q8) {
            for block in 0..head_dim / BLOCK_LEN {
                tile.quantise(i, Kind::Block(block), weights);
                tile.add_products(i, Kind::Block(block), weights);
                tile.add_sums(i, block * STEP_BLOCKS..(block + 1) * STEP_BLOCKS, weights, sums);
            }
        }
        if has(|code| code != Code::Q8) {
            tile.quantise(i, Kind::Rotated, weights);
            tile.add_products(i, Kind::Rotated, weights);
            tile.add_sums(i, 0..head_dim / LANES, weights, rotated);
        }
    }
}

/// Which of the values are summed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// All rotated ones.
    Rotated,
    /// One block of 32 dimensions of `q8_0`.
    Block(usize),
}

impl Kind {
    /// Whether `strip` is of this kind, and its code.
    fn code_of(self, strip: &Strip) -> Option<Code> {
        let code = strip.value_format.code()?;
        ((code == Code::Q8) == (self != Kind::Rotated)).then_some(code)
    }
}

#[derive(Clone, Copy)]
struct Tile<'a> {
    exponentials: &'a [f32],
    num_rows: usize,
    head_dim: usize,
    strips: &'a [Strip],
    unpacked: Option<&'a [u8]>,
}

impl Tile<'_> {
    /// Rounds each row's weights to integers relative to the largest.
    #[inline(always)]
    fn quantise<I: Integers>(self, i: I, kind: Kind, weights: &mut Weights) {
        i.vectorize(Quantise { tile: self, kind, weights });
    }

    /// Sums the products of weights and codes.
    #[inline(always)]
    fn add_products<I: Integers>(self, i: I, kind: Kind, weights: &mut Weights) {
        let steps = match kind {
            Kind::Rotated => 0..self.head_dim / BLOCK_LEN,
            Kind::Block(block) => block..block + 1,
        };
        let row_len = self.head_dim / LANES;
        for sums in weights.sums.chunks_exact_mut(row_len) {
            sums[steps.start * STEP_BLOCKS..steps.end * STEP_BLOCKS].fill([0; LANES]);
        }
        let num_blocks = self.num_rows.div_ceil(I::ROWS);
        let mut first = 0;
        for run in self.strips.chunk_by(|a, b| a.value_format == b.value_format) {
            let strips = first..first + run.len();
            first = strips.end;
            let Some(code) = kind.code_of(&run[0]) else { continue };
            for block in 0..num_blocks {
                let rows = self.num_rows * block / num_blocks..self.num_rows * (block + 1) / num_blocks;
                let block = Block { tile: self, rows, strips: strips.clone(), steps: steps.clone() };
                match (code, self.unpacked) {
                    (Code::Q8, _) | (Code::Rotated(_), Some(_)) => block.add::<I, Bytes>(i, &[0; 16], weights),
                    (Code::Rotated(rotated), None) => {
                        let table = &rotated.codebook().value_table;
                        match rotated {
                            Rotated::Tq4 => block.add::<I, Nibbles>(i, table, weights),
                            Rotated::Tq3 => block.add::<I, PairsAndBits>(i, table, weights),
                            Rotated::Tq2 => block.add::<I, Pairs>(i, table, weights),
                        }
                    }
                }
            }
        }
    }

    /// Adds the sums of products of some dimension blocks of each row to `to`.
    #[inline(always)]
    fn add_sums<I: Integers>(self, i: I, blocks: Range<usize>, weights: &Weights, to: &mut [f32]) {
        let s = i.floats();
        let row_len = self.head_dim / LANES;
        let rows = weights.sums.chunks_exact(row_len).zip(to.as_chunks_mut::<LANES>().0.chunks_exact_mut(row_len));
        for ((sums, to), factor) in rows.zip(&weights.factors).take(self.num_rows) {
            // Nothing is seen: adding 0 would turn -0 into 0.
            if *factor == 0.0 {
                continue;
            }
            let factor = s.splat(*factor);
            for (sum, to) in sums[blocks.clone()].iter().zip(&mut to[blocks.clone()]) {
                let sum = s.add(s.load(to), s.mul(i.widen(sum), factor));
                s.store(to, sum);
            }
        }
    }
}

/// [`Tile::quantise`].
struct Quantise<'a, 'b> {
    tile: Tile<'a>,
    kind: Kind,
    weights: &'b mut Weights,
}

impl IntegerKernel for Quantise<'_, '_> {
    #[inline(always)]
    fn run<I: Integers>(self, i: I) {
        let Quantise { tile, kind, weights } = self;
        let s = i.floats();
        let scales = &mut weights.scales[..tile.strips.len()];
        let mut scales_left = scales.iter_mut();
        for run in tile.strips.chunk_by(|a, b| a.value_format == b.value_format) {
            // In this order the end of the run takes no scale.
            let scales = run.iter().zip(scales_left.by_ref());
            let (index, code, unit) = match (kind, kind.code_of(&run[0])) {
                (Kind::Block(block), Some(code)) => (block, code, 1.0),
                (Kind::Rotated, Some(code @ Code::Rotated(rotated))) => (0, code, rotated.codebook().unit),
                // So are their weights.
                (_, None) | (Kind::Rotated, Some(Code::Q8)) => {
                    scales.for_each(|(_, scale)| *scale = [0.0; LANES]);
                    continue;
                }
            };
            let at = scales_at(code, tile.head_dim) + index * LANES * size_of::<u16>();
            let unit = s.splat(unit);
            for (strip, scale) in scales {
                s.prefetch(strip.ahead_of_values.wrapping_add(at));
                // SAFETY: a strip's scales follow its codes.
                s.store(scale, s.mul(unsafe { s.load_f16_ptr(strip.values.add(at).cast()) }, unit));
            }
        }
        let mut rows = tile.exponentials.chunks(SCORE_STRIDE);
        let mut operands = weights.operands.chunks_exact_mut(ROW_OPERANDS);
        let mut factors = &mut weights.factors[..tile.num_rows];
        while !factors.is_empty() {
            macro_rules! rows {
                ($m:literal) => {{
                    let exponentials: [_; $m] = std::array::from_fn(|_| rows.next().unwrap_or_default().as_chunks().0);
                    let operands: [_; $m] = std::array::from_fn(|_| operands.next().unwrap_or_default());
                    let factors_here;
                    (factors_here, factors) = factors.split_at_mut($m);
                    quantise_rows::<I, $m>(i, scales, exponentials, &mut weights.exact, operands, factors_here);
                }};
            }
            match factors.len() {
                1 => rows!(1),
                2 => rows!(2),
                3 => rows!(3),
                _ => rows!(4),
            }
        }
    }
}

/// Rows that are quantised side by side.
const MAX_ROWS: usize = 4;

/// [`Quantise`] of `M` rows, side by side so that none waits for another's largest weight.
#[inline(always)]
fn quantise_rows<I: Integers, const M: usize>(
    i: I,
    scales: &[[f32; LANES]],
    exponentials: [&[[f32; LANES]]; M],
    weights: &mut [[f32; LANES]],
    operands: [&mut [Operands]; M],
    factors: &mut [f32],
) {
    let s = i.floats();
    let zero = s.splat(0.0);
    let num_strips = scales.len();
    // Checked here, not for every strip.
    let exponentials = exponentials.map(|row| row[..num_strips].as_ptr());
    let operands = operands.map(|row| row[..num_strips].as_mut_ptr());
    let weights = &mut weights.as_chunks_mut::<M>().0[..num_strips];
    let mut largest = [zero; M];
    // Not finite if a weight is not, which `max` may lose.
    let mut sums = [zero; M];
    for (n, (scale, weights)) in scales.iter().zip(&mut *weights).enumerate() {
        let scale = s.load(scale);
        for (m, weight) in weights.iter_mut().enumerate() {
            // SAFETY: a row has as many as there are strips.
            let e = unsafe { s.load_ptr(exponentials[m].add(n).cast()) };
            // The scale of what is not seen may be anything.
            let w = s.select_lt(zero, e, s.mul(e, scale), zero);
            largest[m] = s.max(largest[m], w);
            sums[m] = s.add(sums[m], w);
            s.store(weight, w);
        }
    }
    let mut inverses = [zero; M];
    for (m, factor) in factors.iter_mut().enumerate() {
        let largest = s.largest(largest[m]);
        // So small weights that they cannot be scaled are nothing.
        let inverse = LARGEST / largest;
        inverses[m] = s.splat(if inverse.is_finite() { inverse } else { 0.0 });
        // NaN if a weight is not finite.
        *factor = largest / LARGEST + s.sum(sums[m]) * 0.0;
    }
    let mut left = [zero; M];
    for (n, weights) in weights.iter().enumerate() {
        for (m, weight) in weights.iter().enumerate() {
            let exact = s.fused_mul_add(s.load(weight), inverses[m], left[m]);
            // 0 for a weight of 0: a half is rounded to even.
            let rounded = s.round(exact);
            left[m] = s.sub(exact, rounded);
            // SAFETY: as above.
            unsafe { operands[m].add(n).write(i.operands(&i.round(rounded))) };
        }
    }
}

/// Some rows, a run of strips whose values have one format, and steps of their dimensions.
struct Block<'a> {
    tile: Tile<'a>,
    rows: Range<usize>,
    strips: Range<usize>,
    steps: Range<usize>,
}

impl<'a> Block<'a> {
    /// The bytes that the run's codes were unpacked to.
    fn unpacked(&self) -> Option<&'a [u8]> {
        let strip_len = self.tile.head_dim * LANES;
        let rotated = self.tile.strips[self.strips.start].value_format.is_rotated();
        let bytes = self.tile.unpacked.filter(|_| rotated)?;
        Some(&bytes[self.strips.start * strip_len..self.strips.end * strip_len])
    }

    #[inline(always)]
    fn add<I: Integers, P: Packed>(self, i: I, table: &[u8; 16], weights: &mut Weights) {
        macro_rules! block {
            ($($m:literal)*) => {
                match self.rows.len() {
                    $($m if $m <= I::ROWS => i.vectorize(AddBlock::<P, $m>::new(&self, table, weights)),)*
                    other => unreachable!("a block of {other}"),
                }
            };
        }
        block!(1 2 3 4 5 6 7 8);
    }
}

/// [`Block`] of `M` rows whose codes are packed as `P` says.
struct AddBlock<'a, P, const M: usize> {
    strips: &'a [Strip],
    /// The strips' codes as bytes, one after the other, if they were unpacked.
    unpacked: Option<&'a [u8]>,
    steps: Range<usize>,
    table: &'a [u8; 16],
    /// The operands of the first strip for each row; those of the other strips follow.
    operands: [*const u64; M],
    /// Each row's sums, `[head_dim / 16]`.
    sums: [*mut i32; M],
    packed: std::marker::PhantomData<P>,
}

impl<'a, P: Packed, const M: usize> AddBlock<'a, P, M> {
    #[inline(always)]
    fn new(block: &Block<'a>, table: &'a [u8; 16], weights: &mut Weights) -> Self {
        let row_len = block.tile.head_dim / LANES;
        assert!(block.steps.end * STEP_BLOCKS <= row_len && block.strips.end <= ROW_OPERANDS);
        let operands = |m: usize| {
            let row = &weights.operands[(block.rows.start + m) * ROW_OPERANDS..][..ROW_OPERANDS];
            row[block.strips.start..].as_flattened().as_ptr()
        };
        let operands = std::array::from_fn(operands);
        let sums =
            |m: usize| weights.sums[(block.rows.start + m) * row_len..][..row_len].as_flattened_mut().as_mut_ptr();
        AddBlock {
            strips: &block.tile.strips[block.strips.clone()],
            unpacked: block.unpacked(),
            steps: block.steps.clone(),
            table,
            operands,
            sums: std::array::from_fn(sums),
            packed: std::marker::PhantomData,
        }
    }
}

impl<P: Packed, const M: usize> IntegerKernel for AddBlock<'_, P, M> {
    #[inline(always)]
    fn run<I: Integers>(self, i: I) {
        let s = i.floats();
        let table = i.table(self.table);
        for step in self.steps {
            let at = step * P::STEP_BYTES;
            for side in 0..I::SIDES {
                let mut visitor = AddProducts { sums: [[i.zero(); STEP_BLOCKS]; M], operands: self.operands };
                for (n, strip) in self.strips.iter().enumerate() {
                    let codes = match self.unpacked {
                        Some(bytes) => bytes.as_ptr().wrapping_add(n.wrapping_mul(bytes.len() / self.strips.len())),
                        None => strip.values,
                    };
                    if side == 0 && self.unpacked.is_none() {
                        for line in (0..P::STEP_BYTES).step_by(GROUP_BYTES) {
                            s.prefetch(strip.ahead_of_values.wrapping_add(at.wrapping_add(line)));
                        }
                    }
                    let from = codes.wrapping_add(at.wrapping_add(side * I::SIDE_BYTES));
                    // SAFETY: a step of the strip's values.
                    unsafe { P::unpack(i, table, [from], &mut visitor) };
                    for operands in &mut visitor.operands {
                        *operands = operands.wrapping_add(LANES / 4);
                    }
                }
                for (sums, to) in visitor.sums.iter().zip(self.sums) {
                    for (block, sum) in sums.iter().enumerate() {
                        let at = (step * STEP_BLOCKS + block) * LANES + side * I::SIDE_LANES;
                        // SAFETY: one side of a block of a row's sums.
                        unsafe { i.add_to(to.add(at), *sum) };
                    }
                }
            }
        }
    }
}

/// Adds the products of a step's groups: groups `2 p` and `2 p + 1` are two dimension blocks of slots `4 p..4 p + 4`.
struct AddProducts<S, const M: usize> {
    sums: [[S; STEP_BLOCKS]; M],
    /// The strip's operands of each row, 4 each: made in [`AddBlock`] only.
    operands: [*const u64; M],
}

impl<I: Integers, const M: usize> Visit<I, 1> for AddProducts<I::Sums, M> {
    #[inline(always)]
    fn visit(&mut self, i: I, p: usize, [groups]: [[I::Bytes; 2]; 1]) {
        for (sums, operands) in self.sums.iter_mut().zip(self.operands) {
            // SAFETY: `p < 4`.
            let operand = unsafe { i.operand(operands.add(p)) };
            for (sum, group) in sums.iter_mut().zip(groups) {
                *sum = i.add_signed(*sum, group, operand);
            }
        }
    }
}
