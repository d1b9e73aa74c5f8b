//! Dot products of pairs of bf16, for the instruction sets whose attention computes with them.
//!
//! A vector of pairs holds two bf16 in each of 16 lanes of 32 bits; a dot product adds both products of a lane to its f32
//! sum. Two products an instruction are twice the speed of f32; an operand keeps 8 significant bits.

/// The operations on pairs of one instruction set. A value exists only if the CPU has it and attention is to use it.
///
/// `*_ptr` functions read or write behind a pointer of any alignment.
pub(crate) trait Pairs: Copy {
    /// Sixteen f32 lanes: those of [`super::Simd::V`].
    type V: Copy;
    /// Sixteen pairs of bf16.
    type P: Copy;
    /// Whether the instruction set has them, for code that should not be compiled where it does not.
    const EXIST: bool;

    /// The same pair in every lane; its first element in the low half.
    fn splat(self, pair: u32) -> Self::P;
    /// # Safety
    /// 16 pairs (64 bytes) can be read at `p`.
    unsafe fn load_ptr(self, p: *const u32) -> Self::P;
    /// # Safety
    /// 16 pairs (64 bytes) can be written at `p`.
    unsafe fn store_ptr(self, p: *mut u32, v: Self::P);
    /// Pairs of the lanes of `first` and `second`, rounded to nearest even; denormals become 0.
    fn round(self, first: Self::V, second: Self::V) -> Self::P;
    /// Rounds as [`Pairs::round`] and stores the lanes one after the other.
    ///
    /// # Safety
    /// 16 bf16 (32 bytes) can be written at `p`.
    unsafe fn store_rounded_ptr(self, p: *mut u16, v: Self::V);
    /// Rounds as [`Pairs::round`]: the lanes of `low`, then those of `high`, one after the other.
    fn round_in_order(self, low: Self::V, high: Self::V) -> Self::P;
    /// Adds both products of every lane to `sums`: the second elements' first, each fused with its addition; denormal
    /// operands and results become 0.
    fn dot(self, a: Self::P, b: Self::P, sums: Self::V) -> Self::V;
    /// The first elements, widened (exactly).
    fn first(self, pairs: Self::P) -> Self::V;
    /// The second elements, widened (exactly).
    fn second(self, pairs: Self::P) -> Self::V;
    /// `2^x` for `x <= 0` with a relative error under 3.1e-6, far below that of rounding it to bf16; exactly 1 at 0, exactly
    /// 0 at minus infinity, NaN at NaN.
    fn exp2(self, x: Self::V) -> Self::V;
}

/// The pairs of an instruction set without them: there is no value.
pub(crate) struct NoPairs<V> {
    never: std::convert::Infallible,
    vector: std::marker::PhantomData<V>,
}

impl<V> Clone for NoPairs<V> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<V> Copy for NoPairs<V> {}

impl<V: Copy> Pairs for NoPairs<V> {
    type V = V;
    type P = ();
    const EXIST: bool = false;

    fn splat(self, _: u32) {
        match self.never {}
    }
    unsafe fn load_ptr(self, _: *const u32) {
        match self.never {}
    }
    unsafe fn store_ptr(self, _: *mut u32, (): ()) {
        match self.never {}
    }
    fn round(self, _: V, _: V) {
        match self.never {}
    }
    unsafe fn store_rounded_ptr(self, _: *mut u16, _: V) {
        match self.never {}
    }
    fn round_in_order(self, _: V, _: V) {
        match self.never {}
    }
    fn dot(self, (): (), (): (), _: V) -> V {
        match self.never {}
    }
    fn first(self, (): ()) -> V {
        match self.never {}
    }
    fn second(self, (): ()) -> V {
        match self.never {}
    }
    fn exp2(self, _: V) -> V {
        match self.never {}
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::isa::Isa;
    use crate::simd::{Kernel, LANES, Simd, dispatch};

    /// Runs a closure's worth of operations where pairs exist.
    struct Operations<'a> {
        a: &'a [[f32; LANES]; 2],
        b: &'a [[f32; LANES]; 2],
        sums: &'a [f32; LANES],
    }

    /// Pairs of `a`, its two vectors in order, `b`'s splat pair, the dot product of both with `sums`.
    struct Results {
        round: [u32; LANES],
        in_order: [u32; LANES],
        stored: [u32; LANES / 2],
        splat: [u32; LANES],
        dot: [f32; LANES],
        exp2: [f32; LANES],
    }

    impl Kernel for Operations<'_> {
        type Output = Option<Results>;
        const USES_PAIRS: bool = true;
        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> Option<Results> {
            let pairs = s.pairs()?;
            let [first, second] = [s.load(&self.a[0]), s.load(&self.a[1])];
            let a = pairs.round(first, second);
            let b = pairs.round(s.load(&self.b[0]), s.load(&self.b[1]));
            let mut results = Results {
                round: [0; LANES],
                in_order: [0; LANES],
                stored: [0; LANES / 2],
                splat: [0; LANES],
                dot: [0.0; LANES],
                exp2: [0.0; LANES],
            };
            // SAFETY: each has room for what is stored.
            unsafe {
                pairs.store_ptr(results.round.as_mut_ptr(), a);
                pairs.store_ptr(results.in_order.as_mut_ptr(), pairs.round_in_order(first, second));
                pairs.store_rounded_ptr(results.stored.as_mut_ptr().cast(), first);
                pairs.store_ptr(results.splat.as_mut_ptr(), pairs.splat(0x3f80_4000));
                assert_eq!(results.round, {
                    let mut again = [0; LANES];
                    pairs.store_ptr(again.as_mut_ptr(), pairs.load_ptr(results.round.as_ptr()));
                    again
                });
            }
            s.store(&mut results.dot, pairs.dot(a, b, s.load(self.sums)));
            s.store(&mut results.exp2, pairs.exp2(s.load(&self.a[0])));
            Some(results)
        }
    }

    fn pair(first: f32, second: f32) -> u32 {
        u32::from(bf16::from_f32(first).to_bits()) | u32::from(bf16::from_f32(second).to_bits()) << 16
    }

    fn widen(x: f32) -> f32 {
        bf16::from_f32(x).to_f32()
    }

    #[test]
    fn every_operation_is_what_its_documentation_says() {
        for seed in 0..200 {
            let number = |i: usize, k: usize| {
                let bits = (seed * 64 + i * 4 + k).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                -((bits >> 40) as f32) / (1 << 20) as f32
            };
            let a = [0, 1].map(|k| std::array::from_fn(|i| number(i, k)));
            let b = [2, 3].map(|k| std::array::from_fn(|i| 8.0 + number(i, k)));
            let sums = std::array::from_fn(|i| number(i, 0) * 3.0);
            for isa in Isa::available() {
                let Some(got) = dispatch(isa, Operations { a: &a, b: &b, sums: &sums }) else { continue };
                let both = a.concat();
                assert_eq!(got.round, std::array::from_fn(|i| pair(a[0][i], a[1][i])));
                assert_eq!(got.in_order, std::array::from_fn(|i| pair(both[2 * i], both[2 * i + 1])));
                assert_eq!(got.stored, std::array::from_fn(|i| pair(a[0][2 * i], a[0][2 * i + 1])));
                assert_eq!(got.splat, [0x3f80_4000; LANES]);
                for i in 0..LANES {
                    let second = widen(a[1][i]).mul_add(widen(b[1][i]), sums[i]);
                    assert_eq!(got.dot[i], widen(a[0][i]).mul_add(widen(b[0][i]), second), "lane {i}");
                    let want = f64::from(a[0][i]).exp2();
                    assert!((f64::from(got.exp2[i]) - want).abs() <= 3.1e-6 * want, "2^{}: {}", a[0][i], got.exp2[i]);
                }
            }
        }
    }

    #[test]
    fn exp2_and_rounding_at_their_edges() {
        let mut a = [[0.0; LANES]; 2];
        a[0][1..6].copy_from_slice(&[f32::NEG_INFINITY, f32::NAN, -1000.0, -126.0, -1.0]);
        // Ties to even, and a denormal.
        a[1][..3].copy_from_slice(&[1.003_906_3, 1.011_718_8, 1e-39]);
        for isa in Isa::available() {
            let Some(got) = dispatch(isa, Operations { a: &a, b: &a, sums: &[0.0; LANES] }) else { continue };
            assert_eq!([got.exp2[0], got.exp2[1], got.exp2[3], got.exp2[5]], [1.0, 0.0, 0.0, 0.5]);
            assert!(got.exp2[2].is_nan() && got.exp2[4] == f32::MIN_POSITIVE);
            let second = |i: usize| f32::from_bits(got.round[i] & 0xffff_0000);
            assert_eq!([second(0), second(1), second(2)], [1.0, 1.015_625, 0.0]);
        }
    }
}
