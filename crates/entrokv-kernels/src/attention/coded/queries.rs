//! A block's queries as integers, for each kind of code among its keys.

use crate::codes::rotation::{MAX_LEN, transform};
use crate::codes::{BLOCK_LEN, Code, KEY_OFFSET, KeyConstants};
use crate::page::PageFormat;
use crate::simd::integers::{IntegerKernel, Integers, Operands};
use crate::simd::{LANES, Simd};

/// The largest integer of a query: of 8 bits, whose error is a tenth of that of codes of 4 bits.
const LARGEST: f32 = 127.0;

/// Which codes the keys of a list are in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::attention) struct KeyCodes {
    pub(in crate::attention) q8: bool,
    pub(in crate::attention) rotated: bool,
}

impl KeyCodes {
    /// These, and those of keys of a format.
    pub(in crate::attention) fn with(self, keys: PageFormat) -> KeyCodes {
        match keys.code() {
            None => self,
            Some(Code::Q8) => KeyCodes { q8: true, ..self },
            Some(Code::Rotated(_)) => KeyCodes { rotated: true, ..self },
        }
    }

    pub(in crate::attention) fn is_empty(self) -> bool {
        self == KeyCodes::default()
    }
}

/// The queries of one block.
#[derive(Default)]
pub(in crate::attention) struct CodedQueries {
    /// `[rows, head_dim / 16]`.
    pub(super) rotated: Vec<Operands>,
    /// `[rows]`.
    pub(super) rotated_terms: Vec<RotatedTerms>,
    /// `[rows, head_dim / 16]`.
    pub(super) blocks: Vec<Operands>,
    /// `[rows, head_dim / 32]`.
    pub(super) block_terms: Vec<BlockTerms>,
}

/// What the integer product of a rotated query and a key becomes a score with.
#[derive(Clone, Copy, Default)]
pub(super) struct RotatedTerms {
    /// What an integer stands for.
    pub(super) factor: f32,
    /// The query's product with the centre.
    pub(super) bias: f32,
    /// What the offset of the keys' bytes adds to the product, negated.
    pub(super) start: i32,
}

/// The same for a block of `q8_0`.
#[derive(Clone, Copy, Default)]
pub(super) struct BlockTerms {
    pub(super) factor: f32,
    pub(super) start: i32,
}

/// Prepares the queries `[rows, head_dim]`, already times the scale of the scores.
pub(in crate::attention) struct LoadQueries<'a> {
    pub(in crate::attention) queries: &'a [f32],
    pub(in crate::attention) head_dim: usize,
    pub(in crate::attention) codes: KeyCodes,
    /// Not `None` if there are rotated codes.
    pub(in crate::attention) constants: Option<&'a KeyConstants>,
    pub(in crate::attention) out: &'a mut CodedQueries,
}

impl IntegerKernel for LoadQueries<'_> {
    #[inline(always)]
    fn run<I: Integers>(self, i: I) {
        let LoadQueries { queries, head_dim, codes, constants, out } = self;
        let s = i.floats();
        let num_rows = queries.len() / head_dim;
        let num_vectors = head_dim / LANES;
        if codes.q8 {
            out.blocks.resize(num_rows * num_vectors, Operands::default());
            out.block_terms.resize(num_rows * head_dim / BLOCK_LEN, BlockTerms::default());
            let blocks = queries.as_chunks::<LANES>().0.chunks_exact(BLOCK_LEN / LANES);
            let operands = out.blocks.chunks_exact_mut(BLOCK_LEN / LANES);
            for ((block, operands), terms) in blocks.zip(operands).zip(&mut out.block_terms) {
                let (factor, start) = quantise(i, block, operands);
                *terms = BlockTerms { factor, start };
            }
        }
        if let Some(constants) = constants.filter(|_| codes.rotated) {
            out.rotated.resize(num_rows * num_vectors, Operands::default());
            out.rotated_terms.resize(num_rows, RotatedTerms::default());
            let (centre, scale) = (vectors(constants.centre()), vectors(constants.signed_scale()));
            let mut rotated = [[0.0; LANES]; MAX_LEN / LANES];
            let rotated = &mut rotated[..num_vectors];
            let rows = queries.chunks_exact(head_dim).zip(out.rotated.chunks_exact_mut(num_vectors));
            for ((query, operands), terms) in rows.zip(&mut out.rotated_terms) {
                let query = vectors(query);
                let mut bias = s.splat(0.0);
                for ((query, rotated), (centre, scale)) in query.iter().zip(&mut *rotated).zip(centre.iter().zip(scale))
                {
                    let query = s.load(query);
                    bias = s.fused_mul_add(query, s.load(centre), bias);
                    s.store(rotated, s.mul(query, s.load(scale)));
                }
                transform(s, rotated);
                let (factor, start) = quantise(i, rotated, operands);
                *terms = RotatedTerms { factor, bias: s.sum(bias), start };
            }
        }
    }
}

fn vectors(x: &[f32]) -> &[[f32; LANES]] {
    x.as_chunks().0
}

/// Rounds to integers relative to the largest magnitude; returns what an integer stands for (NaN if an element is not finite)
/// and what the integers' products with offset bytes start from.
#[inline(always)]
fn quantise<I: Integers>(i: I, x: &[[f32; LANES]], operands: &mut [Operands]) -> (f32, i32) {
    let s = i.floats();
    let zero = s.splat(0.0);
    let mut largest = zero;
    // 0, or NaN if an element is not finite, which `max` may lose.
    let mut poison = zero;
    for x in x {
        let x = s.load(x);
        largest = s.max(largest, s.max(x, s.sub(zero, x)));
        poison = s.fused_mul_add(x, zero, poison);
    }
    let largest = s.largest(largest);
    // So small a query that it cannot be scaled is nothing: its scores are below 1e-30.
    let inverse = LARGEST / largest;
    let inverse = s.splat(if inverse.is_finite() { inverse } else { 0.0 });
    let mut sums = [0i32; LANES];
    for (x, operands) in x.iter().zip(operands) {
        let integers = i.round(s.mul(s.load(x), inverse));
        *operands = i.operands(&integers);
        sums.iter_mut().zip(integers).for_each(|(sum, x)| *sum = sum.wrapping_add(x));
    }
    let sum = sums.into_iter().fold(0, i32::wrapping_add);
    (largest / LARGEST + s.sum(poison), sum.wrapping_mul(-KEY_OFFSET))
}
