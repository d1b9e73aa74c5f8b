//! Products of signed bytes in tiles: exact sums in i32, so that nobody sees in what order.

use super::Shaped;
use crate::isa::Isa;

/// Rows of both operands: tokens on one side, rows of weights on the other.
const ROWS: usize = 16;

/// Matrices of weights that meet the same activations at a time.
const PAIR: usize = 2;

/// The sums of 32 columns, `[16 tokens, 16 rows of weights]` of each of two weights.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(crate) struct StepDots(pub(crate) [[[i32; ROWS]; ROWS]; PAIR]);

impl StepDots {
    pub(crate) const ZERO: Self = Self([[[0; ROWS]; ROWS]; PAIR]);
}

/// Steps that [`ByteTiles`] has room for: their sums, and what made them, stay in the first-level cache.
pub(crate) const MAX_STEPS: usize = 6;

/// This thread's tile registers, in the shapes that [`ByteTiles::dots`] uses, and room for what comes out of them.
pub(crate) struct ByteTiles {
    #[cfg_attr(target_arch = "x86_64", expect(dead_code, reason = "held for its end"))]
    shaped: Shaped,
    dots: [StepDots; MAX_STEPS],
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::asm;

    use super::super::{Shapes, tiles_asm};
    use super::{ByteTiles, Isa, MAX_STEPS, ROWS, Shaped, StepDots};

    impl ByteTiles {
        /// Shapes this thread's tile registers, where `isa` has them.
        pub(crate) fn configure(isa: Isa) -> Option<ByteTiles> {
            // Sums are tiles 0 and 1, 16 x 16; activations tile 4, 16 x 32 bytes; weights tile 5, 8 x 16 words.
            let shapes = Shapes {
                palette: 1,
                start_row: 0,
                reserved: [0; 14],
                row_bytes: [64, 64, 0, 0, 32, 64, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
                rows: [16, 16, 0, 0, 16, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            };
            Some(ByteTiles { shaped: Shaped::new(isa, &shapes)?, dots: [StepDots::ZERO; MAX_STEPS] })
        }

        /// Of each of up to [`MAX_STEPS`] steps, `.0[i][token][row]`: the products of 32 columns of `x` and `weights[i]` summed.
        ///
        /// # Safety
        /// - `x` is to the columns of 16 tokens, one after the other, of each step; steps are `x_stride` bytes apart.
        /// - Each of the one or two `weights` is to 8 lines of 16 rows of 4 columns of each step; steps are `weight_stride` bytes apart.
        pub(crate) unsafe fn dots(
            &mut self,
            (x, x_stride): (*const u8, usize),
            (weights, weight_stride): (&[*const u8], usize),
            num_steps: usize,
        ) -> &[StepDots] {
            let dots = &mut self.dots[..num_steps];
            assert!(!dots.is_empty());
            macro_rules! products {
                ($($weights:ident = $index:literal, $store:literal;)*) => {
                    tiles_asm!(
                        "2:",
                        "tileloadd tmm4, [{x} + {half_line}]",
                        "add {x}, {x_stride}",
                        $(
                            concat!("tileloadd tmm5, [{", stringify!($weights), "} + {line}]"),
                            concat!("tilezero tmm", $index),
                            concat!("tdpbssd tmm", $index, ", tmm4, tmm5"),
                            concat!("add {", stringify!($weights), "}, {weight_stride}"),
                        )*
                        $(concat!("tilestored [{dots} + {line} + ", $store, "], tmm", $index),)*
                        "add {dots}, 2048",
                        "dec {steps}",
                        "jnz 2b"
                        ;
                        x = inout(reg) x => _,
                        half_line = in(reg) 32usize,
                        x_stride = in(reg) x_stride,
                        $($weights = inout(reg) weights[$index] => _,)*
                        weight_stride = in(reg) weight_stride,
                        line = in(reg) 64usize,
                        dots = inout(reg) dots.as_mut_ptr() => _,
                        steps = inout(reg) dots.len() => _,
                    )
                };
            }
            const { assert!(size_of::<StepDots>() == 2048 && ROWS == 16) };
            // SAFETY: the registers have their shapes (`self`); sums go to as many steps as there are, 1024 bytes of each of two
            // weights; the caller's promise covers what is read.
            unsafe {
                match weights.len() {
                    1 => products!(w0 = 0, 0;),
                    2 => products!(w0 = 0, 0; w1 = 1, 1024;),
                    n => unreachable!("{n} weights"),
                }
            }
            dots
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
impl ByteTiles {
    pub(crate) fn configure(_: Isa) -> Option<ByteTiles> {
        None
    }

    /// # Safety
    /// None: there is no `ByteTiles`.
    pub(crate) unsafe fn dots(&mut self, _: (*const u8, usize), _: (&[*const u8], usize), _: usize) -> &[StepDots] {
        match self.shaped.never {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dots_are_sums_of_products_of_signed_bytes() {
        const STEPS: usize = 3;
        const COLS: usize = 32;
        let noise = |seed: usize, i: usize| ((seed << 32 | i).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8;
        // A line more between steps than is read.
        let x: Vec<u8> = (0..STEPS * (ROWS * COLS + 64)).map(|i| noise(1, i)).collect();
        let weights = [2, 3].map(|seed| (0..STEPS * (ROWS * COLS + 128)).map(|i| noise(seed, i)).collect::<Vec<u8>>());
        let (x_stride, weight_stride) = (ROWS * COLS + 64, ROWS * COLS + 128);
        for (isa, num_weights) in Isa::available().into_iter().flat_map(|isa| [1, 2].map(|n| (isa, n))) {
            let Some(mut tiles) = ByteTiles::configure(isa) else { continue };
            let pointers: Vec<_> = weights[..num_weights].iter().map(|weights| weights.as_ptr()).collect();
            // SAFETY: both hold three steps.
            let dots = unsafe { tiles.dots((x.as_ptr(), x_stride), (&pointers, weight_stride), STEPS) };
            assert_eq!(dots.len(), STEPS);
            for (step, dots) in dots.iter().enumerate() {
                for (i, token, row) in
                    (0..PAIR).flat_map(|i| (0..ROWS).flat_map(move |token| (0..ROWS).map(move |row| (i, token, row))))
                {
                    let product = |col: usize| {
                        let x = x[step * x_stride + token * COLS + col].cast_signed();
                        let at = step * weight_stride + col / 4 * 64 + row * 4 + col % 4;
                        i32::from(x) * i32::from(weights[i][at].cast_signed())
                    };
                    let want = if i < num_weights { (0..COLS).map(product).sum() } else { 0 };
                    assert_eq!(dots.0[i][token][row], want, "step {step}, weights {i}, token {token}, row {row}");
                }
            }
        }
    }
}
