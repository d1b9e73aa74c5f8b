//! A block's queries in the forms its strips ask for.

use std::ops::Range;

use super::aligned::Aligned;
use super::{AttentionParams, ScoreArithmetic};
use crate::simd::{LANES, Pairs, Simd};

/// The queries of one block, prepared once and used by every tile.
#[derive(Default)]
pub(super) struct Queries {
    /// `[rows, head_dim]`, times the scale of the scores; where scores are computed in f32, and beside codes.
    scaled: Aligned<f32>,
    /// The same rounded to pairs of bf16, `[rows, padded_dim / 2]`; where scores are computed in them.
    pairs: Aligned<u32>,
    head_dim: usize,
    form: Form,
}

/// What plain keys are scored with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Form {
    #[default]
    Scaled,
    Pairs,
}

/// Some rows of [`Queries`].
#[derive(Clone, Copy)]
pub(super) struct QueryRows<'a> {
    /// `[rows, head_dim]`, or empty.
    pub(super) scaled: &'a [f32],
    /// `[rows, padded_dim / 2]`, or empty.
    pub(super) pairs: &'a [u32],
    pub(super) head_dim: usize,
    pub(super) num_rows: usize,
}

impl<'a> QueryRows<'a> {
    /// Some of the rows.
    pub(super) fn part(self, rows: Range<usize>) -> QueryRows<'a> {
        fn part<'a, T>(of: &'a [T], num_rows: usize, rows: &Range<usize>) -> &'a [T] {
            let stride = of.len() / num_rows;
            &of[rows.start * stride..rows.end * stride]
        }
        let QueryRows { scaled, pairs, head_dim, num_rows } = self;
        let (scaled, pairs) = (part(scaled, num_rows, &rows), part(pairs, num_rows, &rows));
        QueryRows { scaled, pairs, head_dim, num_rows: rows.len() }
    }
}

impl Queries {
    /// Prepares `rows`, each `[head_dim]`.
    #[inline(always)]
    pub(super) fn load<'q, S: Simd>(
        &mut self,
        s: S,
        params: &AttentionParams,
        rows: impl ExactSizeIterator<Item = &'q [f32]>,
    ) {
        self.head_dim = params.head_dim;
        let Some(pairs) = s.pairs().filter(|_| params.scores == ScoreArithmetic::Rounded) else {
            self.form = Form::Scaled;
            self.load_scaled(params, rows);
            return;
        };
        self.form = Form::Pairs;
        let stride = self.pair_stride();
        self.pairs.reserve(rows.len() * stride);
        let scale = s.splat(params.scale);
        for (query, row) in self.pairs.chunks_exact_mut(stride).zip(rows) {
            for (to, from) in query.as_chunks_mut::<{ LANES / 2 }>().0.iter_mut().zip(row.chunks(LANES)) {
                let x = match from.as_array() {
                    Some(from) => s.load(from),
                    None => s.load_partial(from),
                };
                // SAFETY: room for 16 bf16.
                unsafe { pairs.store_rounded_ptr(to.as_mut_ptr().cast(), s.mul(x, scale)) };
            }
        }
    }

    /// Prepares `rows` in f32, times the scale, and returns them `[rows, head_dim]`: what codes start from.
    pub(super) fn load_scaled<'q>(
        &mut self,
        params: &AttentionParams,
        rows: impl ExactSizeIterator<Item = &'q [f32]>,
    ) -> &[f32] {
        let len = rows.len() * params.head_dim;
        self.scaled.reserve(len);
        for (query, row) in self.scaled.chunks_exact_mut(params.head_dim).zip(rows) {
            query.iter_mut().zip(row).for_each(|(to, from)| *to = from * params.scale);
        }
        &self.scaled[..len]
    }

    fn pair_stride(&self) -> usize {
        self.head_dim.next_multiple_of(LANES) / 2
    }

    /// The queries of `rows`.
    pub(super) fn rows(&self, rows: Range<usize>) -> QueryRows<'_> {
        let part = |stride: usize| rows.start * stride..rows.end * stride;
        let (scaled, pairs) = match self.form {
            Form::Scaled => (&self.scaled[part(self.head_dim)], &[][..]),
            Form::Pairs => (&[][..], &self.pairs[part(self.pair_stride())]),
        };
        QueryRows { scaled, pairs, head_dim: self.head_dim, num_rows: rows.len() }
    }
}
