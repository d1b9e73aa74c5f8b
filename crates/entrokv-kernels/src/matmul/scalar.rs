//! The int8 kernels in plain Rust: what the vector ones must equal, and what runs where there is no other.

use std::ops::Range;

use super::Sums;
use super::unpacked::{UNPACKED_STEPS, Unpacked};
use crate::activations::{PANEL_TOKENS, Panel};
use crate::dequantize::BlockFormat;
use crate::matrix::packing::{AFTER_NIBBLES, AFTER_PAIRS, GROUP_BYTES, Packing, STEP_COLS, STEP_GROUPS, scales_of};
use crate::matrix::{TILE_ROWS, Tile};

/// All columns, one token, by way of [`unpack`].
pub(super) fn one_token<F: BlockFormat>(tile: Tile<'_>, panel: &Panel, sums: &mut Sums) {
    let num_steps = panel.scales.len();
    let mut unpacked = Unpacked::zeroed();
    let mut all_sums = [[0.0; TILE_ROWS]; PANEL_TOKENS];
    all_sums[0] = *sums;
    for first in (0..num_steps).step_by(UNPACKED_STEPS) {
        let steps = first..num_steps.min(first + UNPACKED_STEPS);
        unpack::<F>(tile, steps.clone(), &mut unpacked);
        tokens::<F>(&unpacked, steps, panel, &mut all_sums);
    }
    *sums = all_sums[0];
}

/// Unpacks `steps`, whole blocks.
pub(super) fn unpack<F: BlockFormat>(tile: Tile<'_>, steps: Range<usize>, unpacked: &mut Unpacked) {
    let codes = &tile.codes[steps.start * F::STEP_BYTES..steps.end * F::STEP_BYTES];
    for (packed, groups) in codes.chunks_exact(F::STEP_BYTES).zip(unpacked.codes.chunks_exact_mut(STEP_GROUPS)) {
        for (g, group) in groups.iter_mut().enumerate() {
            unpack_group::<F>(packed, g, group);
        }
    }
    let blocks = steps.start / F::BLOCK_STEPS..steps.end / F::BLOCK_STEPS;
    let units_per_block = F::BLOCK_LEN / F::UNIT_LEN;
    for (at, block) in blocks.enumerate() {
        let packed = &tile.scales[block * F::BLOCK_SCALE_BYTES..][..F::BLOCK_SCALE_BYTES];
        for lane in 0..TILE_ROWS {
            let scales = scales_of::<F>(lane, packed);
            for unit in 0..units_per_block {
                let values = scales.unit::<F>(unit);
                unpacked.scales[at * units_per_block + unit][lane] = values.scale;
                unpacked.mins[at * units_per_block + unit][lane] = values.min;
            }
        }
    }
}

/// Group `g` of a packed step.
fn unpack_group<F: BlockFormat>(packed: &[u8], g: usize, group: &mut [u8; GROUP_BYTES]) {
    let part = |at: usize, index: usize| &packed[at + index * GROUP_BYTES..][..GROUP_BYTES];
    let mut set = |bytes: &[u8], shift: usize, mask: u8| {
        for (code, &byte) in group.iter_mut().zip(bytes) {
            *code = byte >> shift & mask;
        }
    };
    match F::CODE_BITS {
        2 | 3 => set(part(0, g / 4), 2 * (g % 4), 3),
        4..=6 => set(part(0, g % 4), 4 * (g / 4), 15),
        _ => set(part(0, g), 0, 255),
    }
    let mut add = |bytes: &[u8], shift: usize, mask: u8, to: u32| {
        for (code, &byte) in group.iter_mut().zip(bytes) {
            *code |= (byte >> shift & mask) << to;
        }
    };
    match F::CODE_BITS {
        3 => add(part(AFTER_PAIRS, 0), g, 1, 2),
        5 => add(part(AFTER_NIBBLES, 0), g, 1, 4),
        6 => add(part(AFTER_NIBBLES, g / 4), 2 * (g % 4), 3, 4),
        _ => {}
    }
}

/// `steps`, unpacked, with every token of the panel.
pub(super) fn tokens<F: BlockFormat>(
    unpacked: &Unpacked,
    steps: Range<usize>,
    panel: &Panel,
    sums: &mut [Sums; PANEL_TOKENS],
) {
    for (index, step) in steps.enumerate() {
        for (token, sums) in sums[..panel.num_tokens].iter_mut().enumerate() {
            let at = step * panel.num_tokens + token;
            let x = panel.words[at].map(i32::to_le_bytes);
            for half in 0..F::STEP_UNITS {
                let unit = index * F::STEP_UNITS + half;
                let groups = half * STEP_GROUPS / F::STEP_UNITS..(half + 1) * STEP_GROUPS / F::STEP_UNITS;
                let (negated_sum, scaled_sum) = match F::STEP_UNITS {
                    1 => (panel.negated_sums[at], panel.scaled_sums[at]),
                    _ => (panel.negated_half_sums[2 * at + half], panel.scaled_half_sums[2 * at + half]),
                };
                for (lane, sum) in sums.iter_mut().enumerate() {
                    let mut dot = negated_sum * i32::from(F::OFFSET);
                    for g in groups.clone() {
                        let codes = &unpacked.codes[index * STEP_GROUPS + g][lane * 4..][..4];
                        for (&code, x) in codes.iter().zip(x[g]) {
                            dot += i32::from(code) * i32::from(x.cast_signed());
                        }
                    }
                    *sum = (dot as f32).mul_add(unpacked.scales[unit][lane] * panel.scales[at], *sum);
                    if F::HAS_MIN {
                        *sum = unpacked.mins[unit][lane].mul_add(scaled_sum, *sum);
                    }
                }
            }
        }
    }
}

const _: () = assert!(STEP_COLS == 4 * STEP_GROUPS);
