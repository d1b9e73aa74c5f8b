//! Planes of packed codes as the bytes that products take.
//!
//! Everything here is inlined into functions compiled for an instruction set. A closure would not be for certain, so what is
//! done with unpacked groups is a [`Visit`].

use crate::attention::strip::Strip;
use crate::codes::packing::{AFTER_PAIRS, GROUP_BYTES, Part, STEP_GROUPS};
use crate::codes::{Code, Rotated};
use crate::simd::LANES;
use crate::simd::integers::{IntegerKernel, Integers};

/// How the codes of a step (32 dimensions of 16 slots) are packed.
pub(super) trait Packed {
    /// Bytes of a step.
    const STEP_BYTES: usize;

    /// Shows `visitor` groups `2 p` and `2 p + 1` of each of `N` steps, for `p` from 0 to 3: one side of the bytes they stand
    /// for in `table`.
    ///
    /// # Safety
    /// - `steps` are that side of the first plane of steps packed so: their planes can be read.
    unsafe fn unpack<I: Integers, const N: usize>(
        i: I,
        table: I::Bytes,
        steps: [*const u8; N],
        visitor: &mut impl Visit<I, N>,
    );
}

/// What is done with unpacked groups.
pub(super) trait Visit<I: Integers, const N: usize> {
    /// Groups `2 p` and `2 p + 1` of each step; implementations are `#[inline(always)]`.
    fn visit(&mut self, i: I, p: usize, groups: [[I::Bytes; 2]; N]);
}

/// Bytes, which stand for themselves.
pub(super) struct Bytes;

/// Codes of 4 bits.
pub(super) struct Nibbles;

/// Codes of 3 bits.
pub(super) struct PairsAndBits;

/// Codes of 2 bits.
pub(super) struct Pairs;

/// Plane `plane` of each step.
///
/// # Safety
/// It can be read.
#[inline(always)]
unsafe fn planes<I: Integers, const N: usize>(i: I, steps: [*const u8; N], plane: usize) -> [I::Bytes; N] {
    // SAFETY: the caller's promise.
    let mut planes = [unsafe { i.load(steps[0].add(plane * GROUP_BYTES)) }; N];
    for n in 1..N {
        // SAFETY: the caller's promise.
        planes[n] = unsafe { i.load(steps[n].add(plane * GROUP_BYTES)) };
    }
    planes
}

impl Packed for Bytes {
    const STEP_BYTES: usize = STEP_GROUPS * GROUP_BYTES;

    #[inline(always)]
    unsafe fn unpack<I: Integers, const N: usize>(
        i: I,
        table: I::Bytes,
        steps: [*const u8; N],
        visitor: &mut impl Visit<I, N>,
    ) {
        for p in 0..4 {
            // SAFETY: 8 planes.
            let (first, second) = unsafe { (planes(i, steps, 2 * p), planes(i, steps, 2 * p + 1)) };
            let mut groups = [[table; 2]; N];
            for n in 0..N {
                groups[n] = [first[n], second[n]];
            }
            visitor.visit(i, p, groups);
        }
    }
}

impl Packed for Nibbles {
    const STEP_BYTES: usize = 4 * GROUP_BYTES;

    #[inline(always)]
    unsafe fn unpack<I: Integers, const N: usize>(
        i: I,
        table: I::Bytes,
        steps: [*const u8; N],
        visitor: &mut impl Visit<I, N>,
    ) {
        for p in 0..4 {
            // SAFETY: 4 planes.
            let planes = unsafe { planes(i, steps, p) };
            let mut groups = [[table; 2]; N];
            for n in 0..N {
                let (low, high) = (i.field(planes[n], 0, 15), i.field(planes[n], 4, 15));
                groups[n] = [i.lookup(table, low), i.lookup(table, high)];
            }
            visitor.visit(i, p, groups);
        }
    }
}

impl Packed for Pairs {
    const STEP_BYTES: usize = 2 * GROUP_BYTES;

    #[inline(always)]
    unsafe fn unpack<I: Integers, const N: usize>(
        i: I,
        table: I::Bytes,
        steps: [*const u8; N],
        visitor: &mut impl Visit<I, N>,
    ) {
        for plane in 0..2 {
            // SAFETY: 2 planes.
            let planes = unsafe { planes(i, steps, plane) };
            for half in 0..2 {
                let shift = 4 * half as i32;
                let mut groups = [[table; 2]; N];
                for n in 0..N {
                    let (even, odd) = (i.field(planes[n], shift, 3), i.field(planes[n], shift + 2, 3));
                    groups[n] = [i.lookup(table, even), i.lookup(table, odd)];
                }
                visitor.visit(i, 2 * plane + half, groups);
            }
        }
    }
}

impl Packed for PairsAndBits {
    const STEP_BYTES: usize = 3 * GROUP_BYTES;

    #[inline(always)]
    unsafe fn unpack<I: Integers, const N: usize>(
        i: I,
        table: I::Bytes,
        steps: [*const u8; N],
        visitor: &mut impl Visit<I, N>,
    ) {
        // SAFETY: 3 planes.
        let bits = unsafe { planes(i, steps, AFTER_PAIRS / GROUP_BYTES) };
        for plane in 0..2 {
            // SAFETY: as above.
            let planes = unsafe { planes(i, steps, plane) };
            for half in 0..2 {
                let p = 2 * plane + half;
                // The high bit of group `g` is bit `g` of its plane and bit 2 of its code.
                let (shift, bit) = (4 * half as i32, 2 * p as i32 - 2);
                let mut groups = [[table; 2]; N];
                for n in 0..N {
                    let (even, odd) = (i.field(planes[n], shift, 3), i.field(planes[n], shift + 2, 3));
                    let even = i.or(even, i.field(bits[n], bit, 4));
                    let odd = i.or(odd, i.field(bits[n], bit + 1, 4));
                    groups[n] = [i.lookup(table, even), i.lookup(table, odd)];
                }
                visitor.visit(i, p, groups);
            }
        }
    }
}

/// Unpacks one part of some strips for many rows to use, to `[strips, head_dim * 16]` bytes. Parts that are not in rotated codes
/// are left out: they need no unpacking.
pub(in crate::attention) struct UnpackStrips<'a> {
    pub(in crate::attention) part: Part,
    pub(in crate::attention) head_dim: usize,
    /// The part can be read where it is coded.
    pub(in crate::attention) strips: &'a [Strip],
    pub(in crate::attention) out: &'a mut [u8],
}

impl IntegerKernel for UnpackStrips<'_> {
    #[inline(always)]
    fn run<I: Integers>(self, i: I) {
        for (strip, out) in self.strips.iter().zip(self.out.chunks_exact_mut(self.head_dim * LANES)) {
            let (format, codes) = match self.part {
                Part::Keys => (strip.key_format, strip.keys),
                Part::Values => (strip.value_format, strip.values),
            };
            let Some(Code::Rotated(code)) = format.code() else { continue };
            let table = match self.part {
                Part::Keys => &code.codebook().key_table,
                Part::Values => &code.codebook().value_table,
            };
            // SAFETY: a strip has as many steps as `out` has room for.
            unsafe {
                match code {
                    Rotated::Tq4 => unpack_steps::<I, Nibbles>(i, table, codes, out),
                    Rotated::Tq3 => unpack_steps::<I, PairsAndBits>(i, table, codes, out),
                    Rotated::Tq2 => unpack_steps::<I, Pairs>(i, table, codes, out),
                }
            }
        }
    }
}

/// # Safety
/// - As many steps can be read at `codes` as `out` has room for.
#[inline(always)]
unsafe fn unpack_steps<I: Integers, P: Packed>(i: I, table: &[u8; 16], codes: *const u8, out: &mut [u8]) {
    let table = i.table(table);
    for (step, out) in out.chunks_exact_mut(STEP_GROUPS * GROUP_BYTES).enumerate() {
        for side in 0..I::SIDES {
            let side = side * I::SIDE_BYTES;
            // SAFETY: the caller's promise.
            unsafe { P::unpack(i, table, [codes.add(step * P::STEP_BYTES + side)], &mut Store { out, side }) };
        }
    }
}

/// Stores groups where they belong in a step of bytes.
struct Store<'a> {
    out: &'a mut [u8],
    side: usize,
}

impl<I: Integers> Visit<I, 1> for Store<'_> {
    #[inline(always)]
    fn visit(&mut self, i: I, p: usize, [[even, odd]]: [[I::Bytes; 2]; 1]) {
        for (g, group) in [even, odd].into_iter().enumerate() {
            let out = &mut self.out[(2 * p + g) * GROUP_BYTES + self.side..][..I::SIDE_BYTES];
            // SAFETY: a side.
            unsafe { i.store(out.as_mut_ptr(), group) };
        }
    }
}
