//! Sixteen f32 lanes on every instruction set, and the dispatch to them.
//!
//! A kernel is written once, generic over [`Simd`], as the `run` of a [`Kernel`]; [`dispatch`] calls the copy compiled
//! for the instruction set at hand. The vector has 16 lanes everywhere (one 512-bit register, two of 256, or an array),
//! so that which lane an element falls in, and with it the order of every sum, is the same everywhere: AVX2 and AVX-512
//! give the same bits. The portable path multiplies and adds in two roundings where the CPU it is built for has no fused
//! operation, and so differs in the last bits of dot products, but not in [`exp_nonpositive`], which always fuses.
//!
//! Everything a kernel calls must be `#[inline(always)]` or go through [`Simd::vectorize`]: a function of its own would be
//! compiled without the instruction set's features.

pub(crate) use self::pairs::{NoPairs, Pairs};

use crate::isa::{Isa, Level};

/// Number of lanes of every vector.
pub(crate) const LANES: usize = 16;

/// A computation that can be compiled for any instruction set.
pub(crate) trait Kernel {
    /// What it returns.
    type Output;
    /// Whether it asks for [`Simd::pairs`]; another one is not compiled for an instruction set that adds nothing else.
    const USES_PAIRS: bool = false;
    /// The computation; implementations are `#[inline(always)]`.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// Runs `kernel` compiled for `isa`.
pub(crate) fn dispatch<K: Kernel>(isa: Isa, kernel: K) -> K::Output {
    match isa.level() {
        Level::Scalar => Scalar.vectorize(kernel),
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 | Level::AvxVnni => x86::Avx2::new(isa).vectorize(kernel),
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => x86::Avx512::new(isa).vectorize(kernel),
        #[cfg(target_arch = "x86_64")]
        Level::Avx512Bf16 if K::USES_PAIRS => x86::Avx512Bf16::new(isa).vectorize(kernel),
        #[cfg(target_arch = "x86_64")]
        Level::Amx if K::USES_PAIRS => x86::Amx::new(isa).vectorize(kernel),
        #[cfg(target_arch = "x86_64")]
        Level::Avx512Bf16 | Level::Amx => x86::Avx512::new(isa).vectorize(kernel),
    }
}

/// The vector operations of one instruction set. A value exists only if the CPU has the instruction set.
///
/// `*_ptr` functions read or write [`LANES`] elements behind a pointer of any alignment.
pub(crate) trait Simd: Copy {
    /// Sixteen f32 lanes.
    type V: Copy;
    /// Dot products of bf16.
    type Pairs: Pairs<V = Self::V>;
    /// How many rows a matrix-like kernel of many rows keeps in registers at a time.
    const ROWS: usize;
    /// How many vectors of each of up to `ROWS` rows it keeps, so that the accumulators fit the registers.
    const COLUMNS: usize;
    /// How many rows it can keep at most: so few are better one block, e.g. all heads of a decode step.
    const MAX_ROWS: usize;
    /// How many vectors of each of more than `ROWS` rows it keeps.
    const MAX_ROWS_COLUMNS: usize;

    /// Whether sums of dot products of bf16 are to be those of tiles (see [`tiles`]): blocks of 16 pairs, each summed from 0, first
    /// and second elements apart.
    const SUMS_OF_TILES: bool = false;

    /// The dot products of bf16 that attention is to use here, if any.
    fn pairs(self) -> Option<Self::Pairs>;

    /// Runs `kernel` in a function of its own, compiled with this instruction set's features.
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output;

    fn splat(self, x: f32) -> Self::V;
    /// # Safety
    /// 16 f32 (64 bytes) can be read at `p`.
    unsafe fn load_ptr(self, p: *const f32) -> Self::V;
    /// # Safety
    /// 16 f32 (64 bytes) can be written at `p`.
    unsafe fn store_ptr(self, p: *mut f32, v: Self::V);
    /// Loads 16 f16 and widens them (exactly).
    ///
    /// # Safety
    /// 16 f16 (32 bytes) can be read at `p`.
    unsafe fn load_f16_ptr(self, p: *const u16) -> Self::V;
    /// Loads the first of each of 16 pairs of bf16 and widens them (exactly).
    ///
    /// # Safety
    /// 16 pairs of bf16 (64 bytes) can be read at `p`.
    unsafe fn load_bf16_first_ptr(self, p: *const u32) -> Self::V;
    /// The second ones.
    ///
    /// # Safety
    /// As [`Simd::load_bf16_first_ptr`].
    unsafe fn load_bf16_second_ptr(self, p: *const u32) -> Self::V;
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, in one rounding where the instruction set has that.
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `a * b + c` in one rounding.
    fn fused_mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `if a > b { a } else { b }` per lane: `b` where either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// `if a < b { x } else { y }` per lane.
    fn select_lt(self, a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V;
    /// Nearest integer, ties to even.
    fn round(self, a: Self::V) -> Self::V;
    /// `a * 2^n` for integral `n`, exact where `n` is -126 to 127 and the result is normal; anything elsewhere.
    fn mul_exp2(self, a: Self::V, n: Self::V) -> Self::V;
    /// `v` in the lanes whose bit is set, `other` elsewhere.
    fn keep(self, v: Self::V, mask: u16, other: Self::V) -> Self::V;
    /// All lanes, 8 apart, 4 apart, 2 apart, neighbours: one order on every instruction set.
    fn sum(self, v: Self::V) -> f32;
    /// The largest lane; anything if a lane is NaN.
    fn largest(self, v: Self::V) -> f32;
    /// Asks for the cache line at `p`, any address, into the second-level cache; never faults.
    fn prefetch(self, p: *const u8);

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::V {
        // SAFETY: a reference to 16 f32.
        unsafe { self.load_ptr(x.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, x: &mut [f32; LANES], v: Self::V) {
        // SAFETY: a reference to 16 f32.
        unsafe { self.store_ptr(x.as_mut_ptr(), v) }
    }

    /// Up to 16 elements; the remaining lanes are 0.
    #[inline(always)]
    fn load_partial(self, x: &[f32]) -> Self::V {
        let mut lanes = [0.0; LANES];
        lanes[..x.len()].copy_from_slice(x);
        self.load(&lanes)
    }

    /// The first `x.len()` (at most 16) lanes.
    #[inline(always)]
    fn store_partial(self, x: &mut [f32], v: Self::V) {
        let mut lanes = [0.0; LANES];
        self.store(&mut lanes, v);
        x.copy_from_slice(&lanes[..x.len()]);
    }
}

/// Below this, `e^x` is returned as 0: the results would be denormal (`e^-87.336` is the smallest normal f32).
const EXP_FLUSH: f32 = -87.336;

/// `2^r` on [-0.5, 0.5], highest power first: minimax for the relative error (9.1e-8), the last coefficient held at 1.
#[expect(clippy::approx_constant, reason = "beside ln 2, as minimax wants it")]
const EXP2: [f32; 6] = [1.326_472_7e-3, 9.671_513e-3, 5.550_733_6e-2, 0.240_222_42, 0.693_147, 1.0];

/// `e^x` for `x <= 0`, the same bits on every instruction set.
///
/// Relative error under `2e-7 + 8e-8 |x|`, so that of 1 it is never more than 2e-7: `x log2 e` is rounded once, as a softmax
/// rounded it when it subtracted the largest score. Exactly 1 at 0, exactly 0 below -87.336 and at minus infinity; NaN stays
/// NaN. `x log2 e = n + r` with an integer `n`, a polynomial of degree 5 in `r`, times `2^n`: 6 of its operations run where
/// an x86 core multiplies, 6 elsewhere.
#[inline(always)]
pub(crate) fn exp_nonpositive<S: Simd>(s: S, x: S::V) -> S::V {
    let y = s.mul(x, s.splat(std::f32::consts::LOG2_E));
    let n = s.round(y);
    let r = s.sub(y, n);
    let mut p = s.splat(EXP2[0]);
    for c in &EXP2[1..] {
        p = s.fused_mul_add(p, r, s.splat(*c));
    }
    // What is below has any `n`.
    s.select_lt(x, s.splat(EXP_FLUSH), s.splat(0.0), s.mul_exp2(p, n))
}

/// The portable implementation, which the compiler vectorises as far as the build's baseline allows.
#[derive(Clone, Copy)]
pub(crate) struct Scalar;

/// One lane after another.
#[inline(always)]
fn lanes(f: impl FnMut(usize) -> f32) -> [f32; LANES] {
    std::array::from_fn(f)
}

impl Simd for Scalar {
    type V = [f32; LANES];
    type Pairs = NoPairs<Self::V>;
    const ROWS: usize = 2;
    const COLUMNS: usize = 1;
    const MAX_ROWS: usize = 2;
    const MAX_ROWS_COLUMNS: usize = 1;

    #[inline(always)]
    fn pairs(self) -> Option<Self::Pairs> {
        None
    }
    #[inline(always)]
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output {
        kernel.run(self)
    }
    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load_ptr(self, p: *const f32) -> Self::V {
        // SAFETY: the caller's promise; `read_unaligned` needs no alignment.
        unsafe { p.cast::<[f32; LANES]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store_ptr(self, p: *mut f32, v: Self::V) {
        // SAFETY: the caller's promise; `write_unaligned` needs no alignment.
        unsafe { p.cast::<[f32; LANES]>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn load_f16_ptr(self, p: *const u16) -> Self::V {
        // SAFETY: the caller's promise; `read_unaligned` needs no alignment.
        let halves = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        lanes(|i| half::f16::from_bits(halves[i]).to_f32_const())
    }
    #[inline(always)]
    unsafe fn load_bf16_first_ptr(self, p: *const u32) -> Self::V {
        // SAFETY: the caller's promise; `read_unaligned` needs no alignment.
        let pairs = unsafe { p.cast::<[[u16; 2]; LANES]>().read_unaligned() };
        lanes(|i| f32::from_bits(u32::from(pairs[i][0]) << 16))
    }
    #[inline(always)]
    unsafe fn load_bf16_second_ptr(self, p: *const u32) -> Self::V {
        // SAFETY: the caller's promise; `read_unaligned` needs no alignment.
        let pairs = unsafe { p.cast::<[[u16; 2]; LANES]>().read_unaligned() };
        lanes(|i| f32::from_bits(u32::from(pairs[i][1]) << 16))
    }
    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        lanes(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        lanes(|i| a[i] - b[i])
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        lanes(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        lanes(|i| a[i] / b[i])
    }
    #[inline(always)]
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        lanes(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    fn fused_mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        lanes(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        lanes(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn select_lt(self, a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V {
        lanes(|i| if a[i] < b[i] { x[i] } else { y[i] })
    }
    #[inline(always)]
    fn round(self, a: Self::V) -> Self::V {
        lanes(|i| a[i].round_ties_even())
    }
    #[inline(always)]
    fn mul_exp2(self, a: Self::V, n: Self::V) -> Self::V {
        lanes(|i| a[i] * f32::from_bits(((n[i] as i32).wrapping_add(127) as u32) << 23))
    }
    #[inline(always)]
    fn keep(self, v: Self::V, mask: u16, other: Self::V) -> Self::V {
        lanes(|i| if mask >> i & 1 == 1 { v[i] } else { other[i] })
    }
    #[inline(always)]
    fn sum(self, mut v: Self::V) -> f32 {
        for apart in [8, 4, 2, 1] {
            for i in 0..apart {
                v[i] += v[i + apart];
            }
        }
        v[0]
    }
    #[inline(always)]
    fn largest(self, v: Self::V) -> f32 {
        v.into_iter().fold(f32::NEG_INFINITY, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn prefetch(self, _: *const u8) {}
}

pub(crate) mod integers;
mod pairs;
pub(crate) mod tiles;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(test)]
mod tests {
    use super::*;

    struct Exp<'a>(&'a [f32], &'a mut [f32]);
    impl Kernel for Exp<'_> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            for (x, y) in self.0.chunks(LANES).zip(self.1.chunks_mut(LANES)) {
                s.store_partial(y, exp_nonpositive(s, s.load_partial(x)));
            }
        }
    }

    fn exp(isa: Isa, x: &[f32]) -> Vec<f32> {
        let mut y = vec![f32::NAN; x.len()];
        dispatch(isa, Exp(x, &mut y));
        y
    }

    /// Stated in the documentation of `exp_nonpositive`: relative, and relative to the largest value, 1.
    fn exp_tolerances(x: f64) -> [f64; 2] {
        [2e-7 - 8e-8 * x, 2e-7 / x.exp()]
    }

    #[test]
    fn exp_is_within_its_tolerance_and_the_same_on_every_isa() {
        // Every 1009th float from -0 to the flush, so that all exponents are covered.
        let x: Vec<f32> = (0x8000_0000..=EXP_FLUSH.to_bits()).step_by(1009).map(f32::from_bits).collect();
        let reference = exp(Isa::SCALAR, &x);
        for (x, y) in x.iter().zip(&reference) {
            let want = f64::from(*x).exp();
            let error = ((f64::from(*y) - want) / want).abs();
            assert!(exp_tolerances(f64::from(*x)).iter().all(|most| error <= *most), "e^{x}: {error:e}");
        }
        for isa in Isa::available() {
            let got = exp(isa, &x);
            assert!(got.iter().zip(&reference).all(|(a, b)| a.to_bits() == b.to_bits()), "{}", isa.name());
        }
    }

    #[test]
    fn exp_at_its_edges() {
        for isa in Isa::available() {
            let y = exp(isa, &[0.0, -0.0, f32::NEG_INFINITY, -88.0, -1e30, f32::NAN]);
            assert_eq!(y[..5], [1.0, 1.0, 0.0, 0.0, 0.0], "{}", isa.name());
            assert!(y[5].is_nan());
        }
    }

    /// Every operation on a few vectors, as bits.
    struct Operations;
    impl Kernel for Operations {
        type Output = Vec<u32>;
        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> Vec<u32> {
            let a: [f32; LANES] = std::array::from_fn(|i| (i as f32 - 7.3) * 1.7);
            let b: [f32; LANES] = std::array::from_fn(|i| ((i * 7 % 16) as f32 - 3.1) * 0.9);
            let (a, b, c) = (s.load(&a), s.load(&b), s.splat(0.1));
            let halves: [u16; LANES] = std::array::from_fn(|i| half::f16::from_f32(i as f32 * 0.37 - 2.0).to_bits());
            let pairs: [[u16; 2]; LANES] =
                std::array::from_fn(|i| [i as f32 * 0.37, 2.0 - i as f32].map(|x| half::bf16::from_f32(x).to_bits()));
            let vectors = [
                s.add(a, b),
                s.sub(a, b),
                s.mul(a, b),
                s.div(a, b),
                s.fused_mul_add(a, b, c),
                s.max(a, b),
                s.max(s.splat(f32::NAN), b),
                s.select_lt(a, b, a, c),
                s.round(a),
                s.mul_exp2(b, s.round(a)),
                s.keep(a, 0b1010_0000_1111_0001, b),
                // SAFETY: 16 f16.
                unsafe { s.load_f16_ptr(halves.as_ptr()) },
                // SAFETY: 16 pairs.
                unsafe { s.load_bf16_first_ptr(pairs.as_ptr().cast()) },
                // SAFETY: 16 pairs.
                unsafe { s.load_bf16_second_ptr(pairs.as_ptr().cast()) },
            ];
            let mut bits = vec![s.sum(a).to_bits(), s.largest(a).to_bits(), s.largest(b).to_bits()];
            for v in vectors {
                let mut lanes = [0.0; LANES];
                s.store(&mut lanes, v);
                bits.extend(lanes.map(f32::to_bits));
            }
            bits
        }
    }

    #[test]
    fn every_isa_agrees_with_the_portable_one_bit_for_bit() {
        let want = dispatch(Isa::SCALAR, Operations);
        for isa in Isa::available() {
            assert_eq!(dispatch(isa, Operations), want, "{}", isa.name());
        }
    }

    #[test]
    fn partial_loads_and_stores_touch_their_elements_only() {
        struct Partial;
        impl Kernel for Partial {
            type Output = ();
            #[inline(always)]
            fn run<S: Simd>(self, s: S) {
                let v = s.load_partial(&[1.0, 2.0, 3.0]);
                assert_eq!(s.sum(v), 6.0);
                let mut out = [9.0; 5];
                s.store_partial(&mut out[1..3], v);
                assert_eq!(out, [9.0, 1.0, 2.0, 9.0, 9.0]);
            }
        }
        Isa::available().into_iter().for_each(|isa| dispatch(isa, Partial));
    }
}
