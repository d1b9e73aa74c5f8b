//! [`Simd`] on AVX2 (two 256-bit registers a vector) and AVX-512 (one register).
//!
//! Every method is a line of intrinsics. They are called in `unsafe` blocks because a trait's method cannot carry
//! `#[target_feature]`; each is sound for one and the same reason: `self` exists, so the CPU has the instruction set
//! ([`Avx2::new`] and [`Avx512::new`] take an [`Isa`] that proves it).

use std::arch::x86_64::*;
use std::mem::transmute;

use super::{Kernel, NoPairs, Pairs, Simd};
use crate::isa::{Isa, Level};

/// The proof that this CPU has AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

/// The proof that this CPU has AVX-512 F, BW, DQ, VL and VNNI.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

/// The proof that this CPU has all of [`Avx512`] and AVX-512 BF16.
#[derive(Clone, Copy)]
pub(crate) struct Avx512Bf16(());

/// The proof that this CPU has all of [`Avx512Bf16`] and tiles ([`super::tiles`]), whose sums its kernels have.
#[derive(Clone, Copy)]
pub(crate) struct Amx(Avx512Bf16);

impl Avx2 {
    /// # Panics
    /// If `isa` does not include AVX2.
    pub(crate) fn new(isa: Isa) -> Avx2 {
        assert!(isa.level() >= Level::Avx2, "{} is not AVX2", isa.name());
        Avx2(())
    }
}

impl Avx512 {
    /// # Panics
    /// If `isa` does not include AVX-512.
    pub(crate) fn new(isa: Isa) -> Avx512 {
        assert!(isa.level() >= Level::Avx512, "{} is not AVX-512", isa.name());
        Avx512(())
    }
}

impl Avx512Bf16 {
    /// # Panics
    /// If `isa` does not include AVX-512 BF16.
    pub(crate) fn new(isa: Isa) -> Avx512Bf16 {
        assert!(isa.level() >= Level::Avx512Bf16, "{} is not AVX-512 BF16", isa.name());
        Avx512Bf16(())
    }
}

impl Amx {
    /// # Panics
    /// If `isa` does not include AMX.
    pub(crate) fn new(isa: Isa) -> Amx {
        assert!(isa.level() >= Level::Amx, "{} is not AMX", isa.name());
        Amx(Avx512Bf16::new(isa))
    }
}

/// The bits of the second bf16 of a pair in 32 bits, which are those of an f32 with the same value.
const SECOND_OF_PAIR: i32 = !0xffff;

/// One `Simd` method whose body is intrinsics.
macro_rules! op {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $ty:ty),*) -> $out:ty = $body:expr;)*) => {$(
        #[inline(always)]
        fn $name(self, $($arg: $ty),*) -> $out {
            // SAFETY: `self` proves the instruction set; the operation touches registers only (`prefetch` only hints).
            unsafe { $body }
        }
    )*};
}

/// `Simd` on one 512-bit register a vector, for a type that proves AVX-512, with its features, its pairs and where they come
/// from.
macro_rules! avx512 {
    ($isa:ident, $features:literal, $pairs:ty, |$simd:ident| $get_pairs:expr, $sums_of_tiles:literal) => {
impl Simd for $isa {
    type V = __m512;
    type Pairs = $pairs;
    // 24 accumulators of 32 registers, 4 (3) for the shared operand and 1 for the broadcast one. Sums of tiles have two
    // accumulators each.
    const ROWS: usize = 6;
    const COLUMNS: usize = 4;
    const MAX_ROWS: usize = 8;
    const MAX_ROWS_COLUMNS: usize = if $sums_of_tiles { 1 } else { 3 };
    const SUMS_OF_TILES: bool = $sums_of_tiles;

    #[inline(always)]
    fn pairs(self) -> Option<$pairs> {
        let $simd = self;
        $get_pairs
    }
    #[inline(always)]
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = $features)]
        fn run<K: Kernel>(kernel: K, simd: $isa) -> K::Output {
            kernel.run(simd)
        }
        // SAFETY: `self` proves the features.
        unsafe { run(kernel, self) }
    }
    #[inline(always)]
    unsafe fn load_ptr(self, p: *const f32) -> __m512 {
        // SAFETY: the caller's promise; unaligned load.
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store_ptr(self, p: *mut f32, v: __m512) {
        // SAFETY: the caller's promise; unaligned store.
        unsafe { _mm512_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn load_f16_ptr(self, p: *const u16) -> __m512 {
        // SAFETY: the caller's promise; unaligned load.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16_first_ptr(self, p: *const u32) -> __m512 {
        // SAFETY: the caller's promise; unaligned load.
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_loadu_si512(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_bf16_second_ptr(self, p: *const u32) -> __m512 {
        // SAFETY: the caller's promise; unaligned load.
        unsafe {
            let high = _mm512_set1_epi32(SECOND_OF_PAIR);
            _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p.cast()), high))
        }
    }
    op! {
        splat(x: f32) -> __m512 = _mm512_set1_ps(x);
        add(a: __m512, b: __m512) -> __m512 = _mm512_add_ps(a, b);
        sub(a: __m512, b: __m512) -> __m512 = _mm512_sub_ps(a, b);
        mul(a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
        div(a: __m512, b: __m512) -> __m512 = _mm512_div_ps(a, b);
        mul_add(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
        fused_mul_add(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
        max(a: __m512, b: __m512) -> __m512 = _mm512_max_ps(a, b);
        select_lt(a: __m512, b: __m512, x: __m512, y: __m512) -> __m512 =
            _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), y, x);
        round(a: __m512) -> __m512 = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a);
        mul_exp2(a: __m512, n: __m512) -> __m512 = _mm512_scalef_ps(a, n);
        keep(v: __m512, mask: u16, other: __m512) -> __m512 = _mm512_mask_blend_ps(mask, other, v);
        sum(v: __m512) -> f32 = sum8(_mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v)));
        prefetch(p: *const u8) -> () = _mm_prefetch::<_MM_HINT_T1>(p.cast());
        largest(v: __m512) -> f32 = max8(_mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v)));
    }
}
    };
}

avx512!(Avx512, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c", NoPairs<__m512>, |_simd| None, false);
avx512!(
    Avx512Bf16,
    "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c",
    Avx512Bf16,
    |simd| Some(simd),
    false
);
avx512!(Amx, "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c", Avx512Bf16, |simd| Some(simd.0), true);

impl Pairs for Avx512Bf16 {
    type V = __m512;
    type P = __m512i;
    const EXIST: bool = true;

    #[inline(always)]
    unsafe fn load_ptr(self, p: *const u32) -> __m512i {
        // SAFETY: the caller's promise; unaligned load.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store_ptr(self, p: *mut u32, v: __m512i) {
        // SAFETY: the caller's promise; unaligned store.
        unsafe { _mm512_storeu_si512(p.cast(), v) }
    }
    #[inline(always)]
    unsafe fn store_rounded_ptr(self, p: *mut u16, v: __m512) {
        // SAFETY: the caller's promise; unaligned store; the bits of 16 bf16 are 32 bytes.
        unsafe { _mm256_storeu_si256(p.cast(), transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(v))) }
    }
    op! {
        splat(pair: u32) -> __m512i = _mm512_set1_epi32(pair.cast_signed());
        round(first: __m512, second: __m512) -> __m512i = {
            // All first elements, then all second ones; then side by side.
            let rounded = transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(second, first));
            _mm512_permutexvar_epi16(transmute::<[u16; 32], __m512i>(INTERLEAVE), rounded)
        };
        round_in_order(low: __m512, high: __m512) -> __m512i =
            transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
        dot(a: __m512i, b: __m512i, sums: __m512) -> __m512 =
            _mm512_dpbf16_ps(sums, transmute::<__m512i, __m512bh>(a), transmute::<__m512i, __m512bh>(b));
        first(pairs: __m512i) -> __m512 = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs));
        second(pairs: __m512i) -> __m512 =
            _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(SECOND_OF_PAIR)));
        exp2(x: __m512) -> __m512 = {
            // x - floor(x), in [0, 1).
            let f = _mm512_reduce_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(x);
            let mut p = _mm512_set1_ps(EXP2[0]);
            for c in &EXP2[1..] {
                p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(*c));
            }
            // Times 2^floor(x), exactly, down to 0.
            _mm512_scalef_ps(p, x)
        };
    }
}

/// The elements of two halves of 16, taken in turns.
const INTERLEAVE: [u16; 32] = {
    let mut order = [0; 32];
    let mut i = 0;
    while i < 32 {
        order[i] = (i / 2 + i % 2 * 16) as u16;
        i += 1;
    }
    order
};

/// `2^x` on [0, 1), highest power first: minimax for the relative error (3.0e-6), the last coefficient held at 1.
const EXP2: [f32; 5] = [0.013_426_684, 0.052_242_473, 0.241_280_2, 0.693_044_84, 1.0];

impl Simd for Avx2 {
    type V = (__m256, __m256);
    type Pairs = NoPairs<Self::V>;
    // 12 accumulators of 16 registers, 2 for the shared operand and 1 for the broadcast one.
    const ROWS: usize = 6;
    const COLUMNS: usize = 1;
    const MAX_ROWS: usize = 6;
    const MAX_ROWS_COLUMNS: usize = 1;

    #[inline(always)]
    fn pairs(self) -> Option<Self::Pairs> {
        None
    }
    #[inline(always)]
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn run<K: Kernel>(kernel: K, simd: Avx2) -> K::Output {
            kernel.run(simd)
        }
        // SAFETY: `self` proves the features.
        unsafe { run(kernel, self) }
    }
    #[inline(always)]
    unsafe fn load_ptr(self, p: *const f32) -> Self::V {
        // SAFETY: the caller's promise; unaligned loads.
        unsafe { (_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))) }
    }
    #[inline(always)]
    unsafe fn store_ptr(self, p: *mut f32, v: Self::V) {
        // SAFETY: the caller's promise; unaligned stores.
        unsafe {
            _mm256_storeu_ps(p, v.0);
            _mm256_storeu_ps(p.add(8), v.1);
        }
    }
    #[inline(always)]
    unsafe fn load_f16_ptr(self, p: *const u16) -> Self::V {
        // SAFETY: the caller's promise; unaligned loads.
        unsafe {
            let (low, high) = (_mm_loadu_si128(p.cast()), _mm_loadu_si128(p.add(8).cast()));
            (_mm256_cvtph_ps(low), _mm256_cvtph_ps(high))
        }
    }
    #[inline(always)]
    unsafe fn load_bf16_first_ptr(self, p: *const u32) -> Self::V {
        // SAFETY: the caller's promise; unaligned loads.
        unsafe {
            let (low, high) = (_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(8).cast()));
            let first = |pairs| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs));
            (first(low), first(high))
        }
    }
    #[inline(always)]
    unsafe fn load_bf16_second_ptr(self, p: *const u32) -> Self::V {
        // SAFETY: the caller's promise; unaligned loads.
        unsafe {
            let (low, high) = (_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(8).cast()));
            let second = |pairs| _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(SECOND_OF_PAIR)));
            (second(low), second(high))
        }
    }
    op! {
        splat(x: f32) -> Self::V = (_mm256_set1_ps(x), _mm256_set1_ps(x));
        add(a: Self::V, b: Self::V) -> Self::V = (_mm256_add_ps(a.0, b.0), _mm256_add_ps(a.1, b.1));
        sub(a: Self::V, b: Self::V) -> Self::V = (_mm256_sub_ps(a.0, b.0), _mm256_sub_ps(a.1, b.1));
        mul(a: Self::V, b: Self::V) -> Self::V = (_mm256_mul_ps(a.0, b.0), _mm256_mul_ps(a.1, b.1));
        div(a: Self::V, b: Self::V) -> Self::V = (_mm256_div_ps(a.0, b.0), _mm256_div_ps(a.1, b.1));
        mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V =
            (_mm256_fmadd_ps(a.0, b.0, c.0), _mm256_fmadd_ps(a.1, b.1, c.1));
        fused_mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V =
            (_mm256_fmadd_ps(a.0, b.0, c.0), _mm256_fmadd_ps(a.1, b.1, c.1));
        max(a: Self::V, b: Self::V) -> Self::V = (_mm256_max_ps(a.0, b.0), _mm256_max_ps(a.1, b.1));
        select_lt(a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V = (
            _mm256_blendv_ps(y.0, x.0, _mm256_cmp_ps::<_CMP_LT_OQ>(a.0, b.0)),
            _mm256_blendv_ps(y.1, x.1, _mm256_cmp_ps::<_CMP_LT_OQ>(a.1, b.1)),
        );
        round(a: Self::V) -> Self::V = (
            _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a.0),
            _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a.1),
        );
        mul_exp2(a: Self::V, n: Self::V) -> Self::V = (mul_exp2_8(a.0, n.0), mul_exp2_8(a.1, n.1));
        keep(v: Self::V, mask: u16, other: Self::V) -> Self::V =
            (keep8(v.0, mask & 0xff, other.0), keep8(v.1, mask >> 8, other.1));
        sum(v: Self::V) -> f32 = sum8(_mm256_add_ps(v.0, v.1));
        prefetch(p: *const u8) -> () = _mm_prefetch::<_MM_HINT_T1>(p.cast());
        largest(v: Self::V) -> f32 = max8(_mm256_max_ps(v.0, v.1));
    }
}

/// Lanes 4 apart, 2 apart, neighbours.
#[inline]
#[target_feature(enable = "avx2")]
fn sum8(v: __m256) -> f32 {
    let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
}

/// The largest of 8 lanes.
#[inline]
#[target_feature(enable = "avx2")]
fn max8(v: __m256) -> f32 {
    let v = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)))
}

/// `a * 2^n` in 8 lanes.
#[inline]
#[target_feature(enable = "avx2")]
fn mul_exp2_8(a: __m256, n: __m256) -> __m256 {
    let biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased)))
}

/// `v` where the lane's bit of `mask` is set, else `other`.
#[inline]
#[target_feature(enable = "avx2")]
fn keep8(v: __m256, mask: u16, other: __m256) -> __m256 {
    let bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    let set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(i32::from(mask)), bit), bit);
    _mm256_blendv_ps(other, v, _mm256_castsi256_ps(set))
}
