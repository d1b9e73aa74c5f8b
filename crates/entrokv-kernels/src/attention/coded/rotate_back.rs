//! The end of rotated sums: one inverse rotation a row.

use crate::codes::rotation::{MAX_LEN, signs, transform};
use crate::simd::{Kernel, LANES, Simd};

/// Adds what rotated sums stand for to plain ones; all but `out` are `[head_dim]`.
pub(in crate::attention) struct RotateBack<'a> {
    pub(in crate::attention) rotated: &'a [f32],
    pub(in crate::attention) plain: &'a [f32],
    pub(in crate::attention) out: &'a mut RowSums,
}

/// Room for the sums of a row.
pub(in crate::attention) type RowSums = [[f32; LANES]; MAX_LEN / LANES];

impl Kernel for RotateBack<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (rotated, _) = self.rotated.as_chunks::<LANES>();
        let sums = &mut self.out[..rotated.len()];
        sums.copy_from_slice(rotated);
        transform(s, sums);
        let plain = self.plain.as_chunks::<LANES>().0.iter().zip(signs(self.rotated.len()).as_chunks::<LANES>().0);
        for (sum, (plain, sign)) in sums.iter_mut().zip(plain) {
            let v = s.add(s.mul(s.load(sum), s.load(sign)), s.load(plain));
            s.store(sum, v);
        }
    }
}
