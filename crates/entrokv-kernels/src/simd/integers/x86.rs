//! [`Integers`] on AVX2, AVX-VNNI and AVX-512 VNNI.
//!
//! As in [`crate::simd`], intrinsics are called in `unsafe` blocks because a trait's method cannot carry
//! `#[target_feature]`, and are sound because `self` exists: its constructor took an [`Isa`] that proves the features.

use std::arch::x86_64::*;

use super::{IntegerKernel, Integers, LANES, Operands};
use crate::isa::{Isa, Level};
use crate::simd::x86::{Avx2, Avx512};

/// The proof that this CPU has AVX2.
#[derive(Clone, Copy)]
pub(super) struct Madd(Avx2);

/// The proof that this CPU has AVX2 and AVX-VNNI.
#[derive(Clone, Copy)]
pub(super) struct Vnni(Avx2);

/// The 256-bit `vpdpbusd` of AVX-512, which computes what AVX-VNNI's does: for tests on CPUs without the latter.
#[cfg(test)]
#[derive(Clone, Copy)]
pub(super) struct EvexVnni(Avx2);

/// The proof that this CPU has AVX-512 VNNI.
#[derive(Clone, Copy)]
pub(super) struct Vnni512(Avx512);

impl Madd {
    pub(super) fn new(isa: Isa) -> Self {
        Madd(Avx2::new(isa))
    }
}

impl Vnni {
    /// # Panics
    /// If `isa` is not AVX-VNNI.
    pub(super) fn new(isa: Isa) -> Self {
        assert_eq!(isa.level(), Level::AvxVnni, "{isa}");
        Vnni(Avx2::new(isa))
    }
}

#[cfg(test)]
impl EvexVnni {
    pub(super) fn new_if_available() -> Option<Self> {
        Isa::named("avx512").ok().map(|isa| EvexVnni(Avx2::new(isa)))
    }
}

impl Vnni512 {
    pub(super) fn new(isa: Isa) -> Self {
        Vnni512(Avx512::new(isa))
    }
}

/// [`Integers::vectorize`] with an instruction set's features.
macro_rules! vectorize {
    ($isa:ident, $features:literal) => {
        #[inline(always)]
        fn vectorize<K: IntegerKernel>(self, kernel: K) {
            #[target_feature(enable = $features)]
            fn run<K: IntegerKernel>(kernel: K, integers: $isa) {
                kernel.run(integers)
            }
            // SAFETY: `self` proves the features.
            unsafe { run(kernel, self) }
        }
    };
}

/// Methods that are one expression of intrinsics.
macro_rules! op {
    ($($name:ident($($arg:ident: $ty:ty),*) -> $out:ty = $body:expr;)*) => {$(
        #[inline(always)]
        fn $name(self, $($arg: $ty),*) -> $out {
            // SAFETY: `self` proves the features; see the module's documentation.
            unsafe { $body }
        }
    )*};
}

impl Integers for Vnni512 {
    type Floats = Avx512;
    type Bytes = __m512i;
    type Operand = __m512i;
    type Sums = __m512i;
    const SIDES: usize = 1;
    // 16 sums of 32 registers, 4 for codes, 1 for an operand, 2 for the table and a mask.
    const ROWS: usize = 8;

    vectorize!(Vnni512, "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c");
    #[inline(always)]
    fn floats(self) -> Avx512 {
        self.0
    }
    #[inline(always)]
    unsafe fn load(self, p: *const u8) -> __m512i {
        // SAFETY: the caller's promise; unaligned load.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut u8, bytes: __m512i) {
        // SAFETY: the caller's promise; unaligned store.
        unsafe { _mm512_storeu_si512(p.cast(), bytes) }
    }
    #[inline(always)]
    unsafe fn operand(self, p: *const u64) -> Self::Operand {
        // SAFETY: the caller's promise.
        unsafe { _mm512_set1_epi32(*p.cast()) }
    }
    #[inline(always)]
    unsafe fn add_to(self, p: *mut i32, sums: __m512i) {
        // SAFETY: the caller's promise: 16 integers; unaligned accesses.
        unsafe { _mm512_storeu_si512(p.cast(), _mm512_add_epi32(_mm512_loadu_si512(p.cast()), sums)) };
    }
    op! {
        table(entries: &[u8; 16]) -> __m512i = _mm512_broadcast_i32x4(_mm_loadu_si128(entries.as_ptr().cast()));
        lookup(table: __m512i, codes: __m512i) -> __m512i = _mm512_shuffle_epi8(table, codes);
        field(bytes: __m512i, shift: i32, mask: u8) -> __m512i = {
            let moved = match shift {
                0 => bytes,
                ..0 => _mm512_sll_epi16(bytes, _mm_cvtsi32_si128(-shift)),
                _ => _mm512_srl_epi16(bytes, _mm_cvtsi32_si128(shift)),
            };
            _mm512_and_si512(moved, _mm512_set1_epi8(mask.cast_signed()))
        };
        or(a: __m512i, b: __m512i) -> __m512i = _mm512_or_si512(a, b);
        zero() -> __m512i = _mm512_setzero_si512();
        add_unsigned(sums: __m512i, codes: __m512i, operand: __m512i) -> __m512i =
            _mm512_dpbusd_epi32(sums, codes, operand);
        add_signed(sums: __m512i, codes: __m512i, operand: __m512i) -> __m512i =
            _mm512_dpbusd_epi32(sums, operand, codes);
        operands(x: &[i32; LANES]) -> Operands = {
            let bytes = _mm512_cvtepi32_epi8(_mm512_loadu_si512(x.as_ptr().cast()));
            let mut operands = [0; 4];
            _mm256_storeu_si256(operands.as_mut_ptr().cast(), _mm256_cvtepu32_epi64(bytes));
            operands
        };
        round(x: __m512) -> [i32; LANES] = {
            let mut rounded = [0; LANES];
            _mm512_storeu_si512(rounded.as_mut_ptr().cast(), _mm512_cvtps_epi32(x));
            rounded
        };
        widen(x: &[i32; LANES]) -> __m512 = _mm512_cvtepi32_ps(_mm512_loadu_si512(x.as_ptr().cast()));
    }
}

/// `Integers` on 256-bit registers, with what is an instruction set's own: operands, their products with codes, and rows whose
/// sums fit the registers.
macro_rules! integers256 {
    ($isa:ident, $features:literal, rows $rows:literal, $operand:ty, {$($products:item)*}, {$($ops:tt)*}) => {
        impl Integers for $isa {
            type Floats = Avx2;
            type Bytes = __m256i;
            type Operand = $operand;
            type Sums = __m256i;
            const SIDES: usize = 2;
            const ROWS: usize = $rows;

            vectorize!($isa, $features);
            #[inline(always)]
            fn floats(self) -> Avx2 {
                self.0
            }
            #[inline(always)]
            unsafe fn load(self, p: *const u8) -> __m256i {
                // SAFETY: the caller's promise; unaligned load.
                unsafe { _mm256_loadu_si256(p.cast()) }
            }
            #[inline(always)]
            unsafe fn store(self, p: *mut u8, bytes: __m256i) {
                // SAFETY: the caller's promise; unaligned store.
                unsafe { _mm256_storeu_si256(p.cast(), bytes) }
            }
            #[inline(always)]
            unsafe fn add_to(self, p: *mut i32, sums: __m256i) {
                // SAFETY: the caller's promise: 8 integers; unaligned accesses.
                unsafe { _mm256_storeu_si256(p.cast(), _mm256_add_epi32(_mm256_loadu_si256(p.cast()), sums)) };
            }
            op! {
                table(entries: &[u8; 16]) -> __m256i =
                    _mm256_broadcastsi128_si256(_mm_loadu_si128(entries.as_ptr().cast()));
                lookup(table: __m256i, codes: __m256i) -> __m256i = _mm256_shuffle_epi8(table, codes);
                field(bytes: __m256i, shift: i32, mask: u8) -> __m256i = {
                    let moved = match shift {
                        0 => bytes,
                        ..0 => _mm256_sll_epi16(bytes, _mm_cvtsi32_si128(-shift)),
                        _ => _mm256_srl_epi16(bytes, _mm_cvtsi32_si128(shift)),
                    };
                    _mm256_and_si256(moved, _mm256_set1_epi8(mask.cast_signed()))
                };
                or(a: __m256i, b: __m256i) -> __m256i = _mm256_or_si256(a, b);
                zero() -> __m256i = _mm256_setzero_si256();
                round(x: (__m256, __m256)) -> [i32; LANES] = {
                    let mut rounded = [0; LANES];
                    _mm256_storeu_si256(rounded.as_mut_ptr().cast(), _mm256_cvtps_epi32(x.0));
                    _mm256_storeu_si256(rounded.as_mut_ptr().add(8).cast(), _mm256_cvtps_epi32(x.1));
                    rounded
                };
                widen(x: &[i32; LANES]) -> (__m256, __m256) = (
                    _mm256_cvtepi32_ps(_mm256_loadu_si256(x.as_ptr().cast())),
                    _mm256_cvtepi32_ps(_mm256_loadu_si256(x.as_ptr().add(8).cast())),
                );
            }
            op! { $($ops)* }
            $($products)*
        }
    };
}

/// `sums + a * b`, 8 lanes of two products each.
#[inline]
#[target_feature(enable = "avx2")]
fn multiply_and_add(sums: __m256i, a: __m256i, b: __m256i) -> __m256i {
    _mm256_add_epi32(sums, _mm256_madd_epi16(a, b))
}

// 6 sums of 16 registers, 4 for widened codes, 2 for an operand, 1 for products, 2 for the table and a mask.
integers256!(Madd, "avx2,fma,f16c", rows 3, (__m256i, __m256i), {
    #[inline(always)]
    unsafe fn operand(self, p: *const u64) -> Self::Operand {
        // SAFETY: the caller's promise.
        unsafe { (_mm256_set1_epi32(*p.cast()), _mm256_set1_epi32(*p.cast::<i32>().add(1))) }
    }
    #[inline(always)]
    fn operands(self, x: &[i32; LANES]) -> Operands {
        std::array::from_fn(|i| {
            let word = |j: usize| u64::from(x[4 * i + j] as u16);
            word(0) | word(2) << 16 | word(1) << 32 | word(3) << 48
        })
    }
}, {
    add_unsigned(sums: __m256i, codes: __m256i, operand: Self::Operand) -> __m256i = {
        let even = _mm256_and_si256(codes, _mm256_set1_epi16(0xff));
        let sums = multiply_and_add(sums, even, operand.0);
        multiply_and_add(sums, _mm256_srli_epi16::<8>(codes), operand.1)
    };
    add_signed(sums: __m256i, codes: __m256i, operand: Self::Operand) -> __m256i = {
        let even = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(codes));
        let sums = multiply_and_add(sums, even, operand.0);
        multiply_and_add(sums, _mm256_srai_epi16::<8>(codes), operand.1)
    };
});

/// [`integers256!`] with an instruction that adds products of unsigned and signed bytes.
macro_rules! vnni256 {
    ($isa:ident, $features:literal, $dot:path) => {
        // 8 sums of 16 registers, 4 for codes, 1 for an operand, 2 for the table and a mask.
        integers256!($isa, $features, rows 4, __m256i, {
            #[inline(always)]
            unsafe fn operand(self, p: *const u64) -> __m256i {
                // SAFETY: the caller's promise.
                unsafe { _mm256_set1_epi32(*p.cast()) }
            }
            #[inline(always)]
            fn operands(self, x: &[i32; LANES]) -> Operands {
                std::array::from_fn(|i| (0..4).fold(0, |bytes, j| bytes | u64::from(x[4 * i + j] as u8) << (8 * j)))
            }
        }, {
            add_unsigned(sums: __m256i, codes: __m256i, operand: __m256i) -> __m256i = $dot(sums, codes, operand);
            add_signed(sums: __m256i, codes: __m256i, operand: __m256i) -> __m256i = $dot(sums, operand, codes);
        });
    };
}

vnni256!(Vnni, "avx2,fma,f16c,avxvnni", _mm256_dpbusd_avx_epi32);
#[cfg(test)]
vnni256!(EvexVnni, "avx2,fma,f16c,avx512f,avx512vl,avx512vnni", _mm256_dpbusd_epi32);
