//! A strip's codes as the elements they stand for.

use super::MinMaxStrip;
use crate::simd::{Kernel, LANES, Simd};

/// Writes all elements of a strip in the order of a plain page, in f32.
pub(crate) struct ExpandStrip<'a> {
    pub(crate) layout: MinMaxStrip,
    /// [`MinMaxStrip::bytes`].
    pub(crate) strip: &'a [u8],
    /// `[head_dim, 16]`.
    pub(crate) out: &'a mut [f32],
}

impl Kernel for ExpandStrip<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match (self.layout.bits, self.layout.rows_per_group()) {
            (4, 1) => self.expand::<S, 4, 1>(s),
            (4, _) => self.expand::<S, 4, 2>(s),
            (_, 1) => self.expand::<S, 2, 1>(s),
            _ => self.expand::<S, 2, 2>(s),
        }
    }
}

impl ExpandStrip<'_> {
    #[inline(always)]
    fn expand<S: Simd, const BITS: usize, const ROWS_PER_GROUP: usize>(self, s: S) {
        let ExpandStrip { layout, strip, out } = self;
        assert_eq!((strip.len(), out.len()), (layout.bytes(), layout.head_dim * LANES));
        let (codes, numbers) = strip.split_at(layout.code_bytes());
        let (scales, minima) = numbers.split_at(layout.number_bytes());
        let rows_per_plane = 8 / BITS;
        // Of 16 groups at a time, so that their numbers are widened together.
        let num_rows = LANES * ROWS_PER_GROUP;
        let planes = codes.as_chunks::<LANES>().0.chunks_exact(num_rows / rows_per_plane);
        let rows = out.as_chunks_mut::<LANES>().0.chunks_exact_mut(num_rows);
        let numbers = scales.as_chunks::<{ 2 * LANES }>().0.iter().zip(minima.as_chunks::<{ 2 * LANES }>().0);
        for ((rows, planes), (scales, minima)) in rows.zip(planes).zip(numbers) {
            let (mut scale, mut minimum) = ([0.0; LANES], [0.0; LANES]);
            // SAFETY: 16 f16.
            s.store(&mut scale, unsafe { s.load_f16_ptr(scales.as_ptr().cast()) });
            // SAFETY: 16 f16.
            s.store(&mut minimum, unsafe { s.load_f16_ptr(minima.as_ptr().cast()) });
            for (i, (rows, plane)) in rows.chunks_exact_mut(rows_per_plane).zip(planes).enumerate() {
                for (j, row) in rows.iter_mut().enumerate() {
                    let group = (i * rows_per_plane + j) / ROWS_PER_GROUP;
                    let codes = plane.map(|codes| f32::from(codes >> (j * BITS) & ((1 << BITS) - 1)));
                    s.store(row, s.mul_add(s.load(&codes), s.splat(scale[group]), s.splat(minimum[group])));
                }
            }
        }
    }
}
