//! The kernels, compiled once for each instruction that multiplies bytes.
//!
//! Functions of one instruction set are inlined only where its features are enabled, so that the instruction cannot be a
//! type parameter: the text is one, the functions are several.

use std::arch::x86_64::*;

use super::{BlockScales, maddubs_dots, vnni_dots};
use super::{MAX_TOKENS, add_unit, load_f32, part, side_of, side_of_mut, store_f32, value};
use crate::activations::{PANEL_TOKENS, Panel, PanelStep, WIDE_PANEL_TOKENS};
use crate::matmul::layout::{Layout, Scratch, fetch_ahead};
use crate::matmul::{PanelSums, Start, Sums};
use crate::matrix::TILE_ROWS;
use crate::simd::tiles::bytes::ByteTiles;

/// Defines module `$name` with the kernels compiled for `$features`, integer sums from module `$dots`.
macro_rules! products {
    ($(#[$doc:meta])* $name:ident, $features:literal, $dots:ident) => {
        $(#[$doc])*
        pub(in crate::matmul) mod $name {
            use super::*;

            /// Adds the products of `tile` with every token in `panel` to the token's sums.
            #[target_feature(enable = $features)]
            pub(in crate::matmul) fn tokens<L: Layout>(tile: &[u8], panel: &Panel, sums: &mut [Sums; PANEL_TOKENS]) {
                for first in (0..panel.num_tokens).step_by(MAX_TOKENS) {
                    match panel.num_tokens - first {
                        1 => num_tokens::<L, 1, 2>(tile, panel, first, sums),
                        2 => num_tokens::<L, 2, 1>(tile, panel, first, sums),
                        3 => num_tokens::<L, 3, 1>(tile, panel, first, sums),
                        _ => num_tokens::<L, MAX_TOKENS, 1>(tile, panel, first, sums),
                    }
                }
            }

            /// [`tokens`] for `T` tokens from `first` on, `S` sides of the tile at a time: their sums and integer sums are registers.
            #[target_feature(enable = $features)]
            fn num_tokens<L: Layout, const T: usize, const S: usize>(
                tile: &[u8],
                panel: &Panel,
                first: usize,
                sums: &mut [Sums; PANEL_TOKENS],
            ) {
                for first_side in (0..2).step_by(S) {
                    let mut token_sums = [[_mm256_setzero_ps(); T]; S];
                    for (side, token_sums) in token_sums.iter_mut().enumerate() {
                        for (to, from) in token_sums.iter_mut().zip(&sums[first..]) {
                            *to = load_f32(side_of(from, first_side + side));
                        }
                    }
                    for (index, block) in tile.chunks_exact(L::BLOCK_BYTES).enumerate() {
                        let (scales, codes) = block.split_at(L::BLOCK_SCALE_BYTES);
                        let mut block_scales = [BlockScales::load::<L>(scales, first_side); S];
                        if S == 2 {
                            block_scales[S - 1] = BlockScales::load::<L>(scales, 1);
                        }
                        for step in 0..L::BLOCK_STEPS {
                            let codes = &codes[step * L::STEP_BYTES..][..L::STEP_BYTES];
                            let at = (index * L::BLOCK_STEPS + step) * panel.num_tokens + first;
                            let (words, x_scales): (_, &[_; T]) = (part(&panel.words, at), part(&panel.scales, at));
                            for half in 0..L::STEP_UNITS {
                                let x_sums = std::array::from_fn(|token| match L::STEP_UNITS {
                                    1 => panel.negated_sums[at + token],
                                    _ => panel.negated_half_sums[2 * (at + token) + half],
                                });
                                let at_group = |group| {
                                    // The other side reads the same lines.
                                    if first_side == 0 {
                                        fetch_ahead::<L>(block, step, group);
                                    }
                                };
                                let dots = $dots::unit_dots::<L, T, S>(codes, half, first_side, words, x_sums, at_group);
                                for (side, token_sums) in token_sums.iter_mut().enumerate() {
                                    let unit = step * L::STEP_UNITS + half;
                                    let (scale, min) = block_scales[side].unit::<L>(scales, unit, first_side + side);
                                    for (token, sum) in token_sums.iter_mut().enumerate() {
                                        let x_min = match L::STEP_UNITS {
                                            1 => panel.scaled_sums[at + token],
                                            _ => panel.scaled_half_sums[2 * (at + token) + half],
                                        };
                                        *sum = add_unit::<L>(*sum, dots[side][token], scale, x_scales[token], min, x_min);
                                    }
                                }
                            }
                        }
                    }
                    for (side, token_sums) in token_sums.into_iter().enumerate() {
                        for (to, from) in sums[first..].iter_mut().zip(token_sums) {
                            store_f32(from, side_of_mut(to, first_side + side));
                        }
                    }
                }
            }

            /// Adds the products of tiles, of which as many steps have been unpacked as `x` has, with each token of `x` to the
            /// tile's and token's sums.
            #[target_feature(enable = $features)]
            pub(in crate::matmul) fn unpacked_tokens<L: Layout>(
                _registers: Option<&mut ByteTiles>,
                scratch: &[Scratch],
                x: &[PanelStep],
                _next: &[PanelStep],
                start: Start,
                sums: &mut PanelSums,
            ) {
                if start == Start::Zero {
                    sums.as_flattened_mut().fill([0.0; TILE_ROWS]);
                }
                for (scratch, sums) in scratch.iter().zip(sums) {
                    if $dots::unpacked_sides::<L>() == 2 {
                        panel_part::<L, 0, 2>(scratch, 0, x, sums);
                        panel_part::<L, 1, 2>(scratch, 0, x, sums);
                        panel_part::<L, 2, 2>(scratch, 0, x, sums);
                        panel_part::<L, 3, 2>(scratch, 0, x, sums);
                    } else {
                        for side in 0..2 {
                            panel_part::<L, 0, 1>(scratch, side, x, sums);
                            panel_part::<L, 1, 1>(scratch, side, x, sums);
                            panel_part::<L, 2, 1>(scratch, side, x, sums);
                            panel_part::<L, 3, 1>(scratch, side, x, sums);
                        }
                    }
                }
            }

            /// [`unpacked_tokens`] for `S` sides of one tile and part `PART` of the panel's tokens.
            #[target_feature(enable = $features)]
            fn panel_part<L: Layout, const PART: usize, const S: usize>(
                scratch: &Scratch,
                first_side: usize,
                x: &[PanelStep],
                sums: &mut [Sums; WIDE_PANEL_TOKENS],
            ) {
                let first = PART * MAX_TOKENS;
                let mut token_sums = [[_mm256_setzero_ps(); MAX_TOKENS]; S];
                for side in 0..S {
                    for token in 0..MAX_TOKENS {
                        token_sums[side][token] = load_f32(side_of(&sums[first + token], first_side + side));
                    }
                }
                for (step, x) in x.iter().enumerate() {
                    let (values, codes) = scratch.step::<L>(step);
                    for half in 0..L::STEP_UNITS {
                        let x_sums = std::array::from_fn(|token| match L::STEP_UNITS {
                            1 => x.negated_sums[first + token],
                            _ => x.negated_half_sums[first + token][half],
                        });
                        let words = part(&x.words, first);
                        let dots = $dots::unit_dots::<L, MAX_TOKENS, S>(codes.as_flattened(), half, first_side, words, x_sums, |_| ());
                        for side in 0..S {
                            let scale = value(&values[half], first_side + side);
                            let min = if L::HAS_MIN { value(&values[L::MINS_AT + half], first_side + side) } else { scale };
                            for token in 0..MAX_TOKENS {
                                let x_min = match L::STEP_UNITS {
                                    1 => x.scaled_sums[first + token],
                                    _ => x.scaled_half_sums[first + token][half],
                                };
                                let (sum, x_scale) = (token_sums[side][token], x.scales[first + token]);
                                token_sums[side][token] = add_unit::<L>(sum, dots[side][token], scale, x_scale, min, x_min);
                            }
                        }
                    }
                }
                for side in 0..S {
                    for token in 0..MAX_TOKENS {
                        store_f32(token_sums[side][token], side_of_mut(&mut sums[first + token], first_side + side));
                    }
                }
            }
        }
    };
}

products! {
    /// With `vpmaddubsw`, which every AVX2 has.
    maddubs, "avx2,fma,f16c", maddubs_dots
}

products! {
    /// With `vpdpbusd` in its AVX encoding.
    vnni, "avx2,fma,f16c,avxvnni", vnni_dots
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::super::vnni_dots::evex as evex_dots;
    use super::*;
    use crate::activations::{Activations, Arithmetic, Rounding};
    use crate::compute::Compute;
    use crate::dequantize::{BlockFormat, with_block_format};
    use crate::isa::Isa;
    use crate::matmul::layout::{PAIR, Packed, Unpacked};
    use crate::matrix::{Matrix, WeightMemory};
    use crate::weight_type::WeightType;

    products! {
        /// With `vpdpbusd` in its AVX-512 encoding: stands for [`vnni`] on a CPU that has no AVX-VNNI.
        evex, "avx2,fma,f16c,avx512vl,avx512vnni", evex_dots
    }

    /// The products of `tile`, of `num_steps`, as [`maddubs`] and as [`evex`] compute them: of all steps with few tokens, of the
    /// first 8 with the second panel of many. The CPU has the instructions of both.
    fn products_of<F: BlockFormat>(
        tile: &[u8],
        num_steps: usize,
        rounding: Rounding<'_>,
        a: &mut PanelSums,
        b: &mut PanelSums,
    ) {
        match rounding {
            // SAFETY: this CPU has AVX-512 VL and VNNI, and so AVX2, as the caller knows.
            Rounding::Few(panels) => unsafe {
                maddubs::tokens::<Packed<F>>(tile, &panels[0], a[0].first_chunk_mut().unwrap());
                evex::tokens::<Packed<F>>(tile, &panels[0], b[0].first_chunk_mut().unwrap());
            },
            // SAFETY: as above.
            Rounding::Many(steps) => unsafe {
                let mut scratch = [Scratch::zeroed()];
                super::super::unpack::<Packed<F>, Unpacked<F, 1>>(tile, 0..8, &mut scratch[0]);
                let steps = &steps[num_steps..num_steps + 8];
                maddubs::unpacked_tokens::<Unpacked<F, 1>>(None, &scratch, steps, steps, Start::Zero, a);
                evex::unpacked_tokens::<Unpacked<F, 1>>(None, &scratch, steps, steps, Start::Zero, b);
            },
        }
    }

    #[test]
    fn vpdpbusd_gives_the_bits_of_vpmaddubsw() {
        let Ok(isa) = Isa::named("avx512") else { return };
        let compute = Compute::new(isa, NonZeroUsize::MIN);
        let (cols, num_steps) = (512, 16);
        let noise = |i: usize| (i as u32).wrapping_mul(2_654_435_761) >> 8;
        for weight_type in WeightType::ALL.into_iter().filter(|ty| ty.is_quantised()) {
            let num_bytes = TILE_ROWS * weight_type.row_bytes(cols).unwrap();
            // Scales of any bits but those of infinities and NaN, which need all five of an exponent's.
            let bytes: Vec<u8> = (0..num_bytes).map(|i| noise(i) as u8 & 0b1011_1111).collect();
            let w = Matrix::pack(&compute, &mut WeightMemory::new(), weight_type, TILE_ROWS, cols, &bytes).unwrap();
            for num_tokens in [1, 2, 3, 4, 5, 8, 32] {
                let x: Vec<f32> = (0..num_tokens * cols).map(|i| noise(i) as f32 * 1e-6 - 8.0).collect();
                let mut activations = Activations::new(Arithmetic::Int8);
                activations.load(&compute, &x, cols);
                let [mut a, mut b] = [[[[0.0; TILE_ROWS]; WIDE_PANEL_TOKENS]; PAIR]; 2];
                let rounding = activations.rounded().unwrap();
                with_block_format!(
                    weight_type,
                    F => products_of::<F>(w.tile(0), num_steps, rounding, &mut a, &mut b),
                    else unreachable!("quantised types only")
                );
                let bits = |sums: &PanelSums| sums.map(|sums| sums.map(|sums| sums.map(f32::to_bits)));
                assert_eq!(bits(&a), bits(&b), "{weight_type}, {num_tokens} tokens");
                assert!(a[0][0].iter().any(|&sum| sum != 0.0), "{weight_type}, {num_tokens} tokens");
            }
        }
    }
}
