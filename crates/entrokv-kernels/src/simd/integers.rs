//! Products of codes with integers, exact on every instruction set, and the dispatch to them.
//!
//! A *group* is 64 codes of one byte, 16 lanes of 4, and meets 4 integers of one byte, which are the same for all lanes: the
//! *operand*. Either side is signed and the other is not: codes of keys are unsigned (their value plus an offset) and meet
//! signed queries, those of values are signed and meet weights. Sums are 32 bits wide and wrap; the callers' numbers are small
//! enough not to. A group is handled in one piece or in two *sides* of 8 lanes each, and how an operand is spelled is an
//! instruction set's own business:
//!
//! | instruction set | product                                                                | sides | operand                |
//! |-----------------|------------------------------------------------------------------------|-------|------------------------|
//! | AVX-512 VNNI    | `vpdpbusd`                                                             | 1     | 4 bytes                |
//! | AVX-VNNI        | `vpdpbusd`                                                             | 2     | 4 bytes                |
//! | AVX2            | bytes widened to 16 bits, even ones and odd ones apart, two `vpmaddwd` | 2     | 0, 2, 1, 3, of 16 bits |
//! | portable        | one after another                                                      | 1     | 0, 1, 2, 3, of 16 bits |
//!
//! AVX2's own product of bytes, `vpmaddubsw`, saturates: two products of weights up to 255 do not fit 16 bits.

use super::{LANES, Scalar, Simd};
use crate::isa::{Isa, Level};

/// Bytes of a group.
pub(crate) const GROUP_BYTES: usize = 64;

/// Sixteen integers as the operands of four groups.
pub(crate) type Operands = [u64; 4];

/// A computation on codes that can be compiled for any instruction set.
pub(crate) trait IntegerKernel {
    /// The computation; implementations are `#[inline(always)]`.
    fn run<I: Integers>(self, integers: I);
}

/// Runs `kernel` compiled for `isa`.
pub(crate) fn dispatch_integers<K: IntegerKernel>(isa: Isa, kernel: K) {
    match isa.level() {
        Level::Scalar => Integers::vectorize(Scalar, kernel),
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => x86::Madd::new(isa).vectorize(kernel),
        #[cfg(target_arch = "x86_64")]
        Level::AvxVnni => x86::Vnni::new(isa).vectorize(kernel),
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 | Level::Avx512Bf16 | Level::Amx => x86::Vnni512::new(isa).vectorize(kernel),
    }
}

/// The operations on codes of one instruction set. A value exists only if the CPU has the instruction set.
pub(crate) trait Integers: Copy {
    /// What its lanes of f32 are.
    type Floats: Simd;
    /// One side of a group, or of a plane of packed codes.
    type Bytes: Copy;
    /// One operand, in registers.
    type Operand: Copy;
    /// The sums of the lanes of a side.
    type Sums: Copy;
    /// Sides of a group.
    const SIDES: usize;
    /// Bytes of a side.
    const SIDE_BYTES: usize = GROUP_BYTES / Self::SIDES;
    /// Lanes of a side.
    const SIDE_LANES: usize = LANES / Self::SIDES;
    /// Rows whose sums, two sides each, stay in registers.
    const ROWS: usize;

    /// Runs `kernel` in a function of its own, compiled with this instruction set's features.
    fn vectorize<K: IntegerKernel>(self, kernel: K);
    fn floats(self) -> Self::Floats;
    /// # Safety
    /// [`Integers::SIDE_BYTES`] can be read at `p`.
    unsafe fn load(self, p: *const u8) -> Self::Bytes;
    /// # Safety
    /// [`Integers::SIDE_BYTES`] can be written at `p`.
    unsafe fn store(self, p: *mut u8, bytes: Self::Bytes);
    /// A table for [`Integers::lookup`].
    fn table(self, entries: &[u8; 16]) -> Self::Bytes;
    /// The entry of each code; codes are below 16.
    fn lookup(self, table: Self::Bytes, codes: Self::Bytes) -> Self::Bytes;
    /// Each byte's bits moved right by `shift` (left if negative), then masked. `mask` leaves no bit that the shift could have
    /// brought in from a neighbouring byte.
    fn field(self, bytes: Self::Bytes, shift: i32, mask: u8) -> Self::Bytes;
    fn or(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    fn zero(self) -> Self::Sums;
    /// # Safety
    /// 8 bytes can be read at `p`; they are an operand that this instruction set spelled.
    unsafe fn operand(self, p: *const u64) -> Self::Operand;
    /// Adds the products of a side of unsigned codes and an operand within 127.
    fn add_unsigned(self, sums: Self::Sums, codes: Self::Bytes, operand: Self::Operand) -> Self::Sums;
    /// Adds the products of a side of signed codes and an operand from 0 to 255.
    fn add_signed(self, sums: Self::Sums, codes: Self::Bytes, operand: Self::Operand) -> Self::Sums;
    /// Adds the sums to [`Integers::SIDE_LANES`] integers.
    ///
    /// # Safety
    /// They can be read and written at `p`.
    unsafe fn add_to(self, p: *mut i32, sums: Self::Sums);
    /// Spells integers from -127 to 255 as operands.
    fn operands(self, x: &[i32; LANES]) -> Operands;
    /// The nearest integers, ties to even.
    fn round(self, x: <Self::Floats as Simd>::V) -> [i32; LANES];
    /// The nearest f32 of each.
    fn widen(self, x: &[i32; LANES]) -> <Self::Floats as Simd>::V;
}

impl Integers for Scalar {
    type Floats = Scalar;
    type Bytes = [u8; GROUP_BYTES];
    type Operand = [i16; 4];
    type Sums = [i32; LANES];
    const SIDES: usize = 1;
    const ROWS: usize = 2;

    #[inline(always)]
    fn vectorize<K: IntegerKernel>(self, kernel: K) {
        kernel.run(self);
    }
    #[inline(always)]
    fn floats(self) -> Scalar {
        self
    }
    #[inline(always)]
    unsafe fn load(self, p: *const u8) -> Self::Bytes {
        // SAFETY: the caller's promise.
        unsafe { p.cast::<Self::Bytes>().read() }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut u8, bytes: Self::Bytes) {
        // SAFETY: the caller's promise.
        unsafe { p.cast::<Self::Bytes>().write(bytes) }
    }
    #[inline(always)]
    fn table(self, entries: &[u8; 16]) -> Self::Bytes {
        std::array::from_fn(|i| entries[i % 16])
    }
    #[inline(always)]
    fn lookup(self, table: Self::Bytes, codes: Self::Bytes) -> Self::Bytes {
        codes.map(|code| table[usize::from(code & 15)])
    }
    #[inline(always)]
    fn field(self, bytes: Self::Bytes, shift: i32, mask: u8) -> Self::Bytes {
        bytes.map(|byte| if shift < 0 { byte << -shift } else { byte >> shift } & mask)
    }
    #[inline(always)]
    fn or(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes {
        std::array::from_fn(|i| a[i] | b[i])
    }
    #[inline(always)]
    fn zero(self) -> Self::Sums {
        [0; LANES]
    }
    #[inline(always)]
    unsafe fn operand(self, p: *const u64) -> Self::Operand {
        // SAFETY: the caller's promise.
        unsafe { p.cast::<Self::Operand>().read() }
    }
    #[inline(always)]
    fn add_unsigned(self, mut sums: Self::Sums, codes: Self::Bytes, operand: Self::Operand) -> Self::Sums {
        for (sum, codes) in sums.iter_mut().zip(codes.as_chunks::<4>().0) {
            for (code, x) in codes.iter().zip(operand) {
                *sum = sum.wrapping_add(i32::from(*code) * i32::from(x));
            }
        }
        sums
    }
    #[inline(always)]
    fn add_signed(self, mut sums: Self::Sums, codes: Self::Bytes, operand: Self::Operand) -> Self::Sums {
        for (sum, codes) in sums.iter_mut().zip(codes.as_chunks::<4>().0) {
            for (code, x) in codes.iter().zip(operand) {
                *sum = sum.wrapping_add(i32::from(code.cast_signed()) * i32::from(x));
            }
        }
        sums
    }
    #[inline(always)]
    unsafe fn add_to(self, p: *mut i32, sums: Self::Sums) {
        for (i, sum) in sums.into_iter().enumerate() {
            // SAFETY: the caller's promise: 16 integers.
            unsafe { *p.add(i) = (*p.add(i)).wrapping_add(sum) };
        }
    }
    #[inline(always)]
    fn operands(self, x: &[i32; LANES]) -> Operands {
        std::array::from_fn(|i| {
            (0..4).fold(0, |operand, j| operand | u64::from(x[4 * i + j] as i16 as u16) << (16 * j))
        })
    }
    #[inline(always)]
    fn round(self, x: [f32; LANES]) -> [i32; LANES] {
        x.map(|x| x.round_ties_even() as i32)
    }
    #[inline(always)]
    fn widen(self, x: &[i32; LANES]) -> [f32; LANES] {
        x.map(|x| x as f32)
    }
}

#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(test)]
mod tests {
    use super::*;

    /// Every operation on bytes and numbers of all sizes; `out` gets sums, unpacked bytes and rounded numbers.
    struct Operations<'a> {
        bytes: &'a [u8; GROUP_BYTES],
        signed: &'a [i32; LANES],
        unsigned: &'a [i32; LANES],
        out: &'a mut Vec<i32>,
    }

    impl IntegerKernel for Operations<'_> {
        #[inline(always)]
        fn run<I: Integers>(self, i: I) {
            let entries: [u8; 16] = std::array::from_fn(|i| (i * 17 + 3) as u8);
            let table = i.table(&entries);
            let (signed, unsigned) = (i.operands(self.signed), i.operands(self.unsigned));
            let mut sums = [[7i32; LANES]; 2];
            let mut unpacked = [[0u8; GROUP_BYTES]; 5];
            for side in 0..I::SIDES {
                // SAFETY: a side of 64 bytes.
                let bytes = unsafe { i.load(self.bytes.as_ptr().add(side * I::SIDE_BYTES)) };
                let (mut a, mut b) = (i.zero(), i.zero());
                for group in 0..4 {
                    // SAFETY: operands spelled here.
                    unsafe {
                        a = i.add_unsigned(a, bytes, i.operand(&signed[group]));
                        b = i.add_signed(b, bytes, i.operand(&unsigned[group]));
                    }
                }
                let fields = [
                    i.field(bytes, 4, 15),
                    i.field(bytes, 0, 15),
                    i.field(bytes, -2, 0xfc),
                    i.or(i.field(bytes, 6, 3), i.field(bytes, -1, 4)),
                    i.lookup(table, i.field(bytes, 3, 7)),
                ];
                // SAFETY: sides of arrays of 16 integers and 64 bytes.
                unsafe {
                    i.add_to(sums[0].as_mut_ptr().add(side * I::SIDE_LANES), a);
                    i.add_to(sums[1].as_mut_ptr().add(side * I::SIDE_LANES), b);
                    for (unpacked, field) in unpacked.iter_mut().zip(fields) {
                        i.store(unpacked.as_mut_ptr().add(side * I::SIDE_BYTES), field);
                    }
                }
            }
            self.out.extend(sums.as_flattened());
            self.out.extend(unpacked.as_flattened().iter().map(|byte| i32::from(*byte)));
            let floats: [f32; LANES] = std::array::from_fn(|i| (i as f32 - 7.5) * 1000.5);
            self.out.extend(i.round(i.floats().load(&floats)));
            let mut wide = [0.0; LANES];
            i.floats().store(&mut wide, i.widen(&std::array::from_fn(|i| (i as i32 - 8) * 123_456_789)));
            self.out.extend(wide.map(|x| x.to_bits().cast_signed()));
        }
    }

    #[test]
    fn every_instruction_set_does_the_same_as_the_portable_one() {
        let mut seed = 1u32;
        let mut next = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 8) as i32
        };
        for round in 0..200 {
            let mut bytes: [u8; GROUP_BYTES] = std::array::from_fn(|_| next() as u8);
            let mut signed: [i32; LANES] = std::array::from_fn(|_| next() % 255 - 127);
            let mut unsigned: [i32; LANES] = std::array::from_fn(|_| next() % 256);
            match round {
                0 => (bytes, signed, unsigned) = ([255; 64], [127; 16], [255; 16]),
                1 => (bytes, signed, unsigned) = ([128; 64], [-127; 16], [255; 16]),
                _ => {}
            }
            let run = |isa| {
                let mut out = Vec::new();
                let kernel = Operations { bytes: &bytes, signed: &signed, unsigned: &unsigned, out: &mut out };
                dispatch_integers(isa, kernel);
                out
            };
            let want = run(Isa::SCALAR);
            let lane: i32 = (0..4)
                .flat_map(|g| (0..4).map(move |j| (g, j)))
                .fold(7, |sum, (g, j)| sum + i32::from(bytes[j]) * signed[4 * g + j]);
            assert_eq!(want[0], lane);
            for isa in Isa::available() {
                assert_eq!(run(isa), want, "{isa}, round {round}");
            }
            #[cfg(target_arch = "x86_64")]
            if let Some(evex) = x86::EvexVnni::new_if_available() {
                let mut out = Vec::new();
                Integers::vectorize(
                    evex,
                    Operations { bytes: &bytes, signed: &signed, unsigned: &unsigned, out: &mut out },
                );
                assert_eq!(out, want, "256 bits of VNNI, round {round}");
            }
        }
    }
}
