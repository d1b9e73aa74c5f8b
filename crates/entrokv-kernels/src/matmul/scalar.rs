//! The int8 kernels in plain Rust: what the vector ones must equal, and what runs where there is no other.

use std::ops::Range;

use super::layout::{Layout, ScaleLayout, Scratch, UNIT_SCALE_BYTES, blocks_of};
use super::{PanelSums, Start, Sums};
use crate::activations::{PANEL_TOKENS, Panel, PanelStep};
use crate::dequantize::{BlockFormat, UnitScales};
use crate::matrix::TILE_ROWS;
use crate::matrix::packing::{AFTER_NIBBLES, AFTER_PAIRS, GROUP_BYTES, STEP_GROUPS, scales_of};
use crate::simd::tiles::bytes::ByteTiles;

/// Adds the products of `tile` with every token in `panel` to the token's sums.
pub(super) fn tokens<L: Layout>(tile: &[u8], panel: &Panel, sums: &mut [Sums; PANEL_TOKENS]) {
    let mut at = 0;
    for_each_step::<L>(tile, |codes, units| {
        for sums in &mut sums[..panel.num_tokens] {
            let x = match units.len() {
                1 => [(panel.negated_sums[at], panel.scaled_sums[at]); 2],
                _ => [0, 1].map(|half| (panel.negated_half_sums[2 * at + half], panel.scaled_half_sums[2 * at + half])),
            };
            add_step::<L>(codes, units, &panel.words[at], panel.scales[at], x, sums);
            at += 1;
        }
    });
}

/// Adds the products of tiles, of which as many steps have been unpacked as `x` has, with each token of `x` to the tile's
/// and token's sums.
pub(super) fn unpacked_tokens<L: Layout>(
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
        let mut steps = x.iter();
        for_each_step::<L>(&scratch.bytes()[..x.len() * L::BLOCK_BYTES], |codes, units| {
            let step = steps.next().expect("as many steps as the tile has");
            for (token, sums) in sums.iter_mut().enumerate() {
                let x = match units.len() {
                    1 => [(step.negated_sums[token], step.scaled_sums[token]); 2],
                    _ => [0, 1].map(|half| (step.negated_half_sums[token][half], step.scaled_half_sums[token][half])),
                };
                add_step::<L>(codes, units, &step.words[token], step.scales[token], x, sums);
            }
        });
    }
}

/// A step of a tile with its bits apart.
type Codes = [[u8; GROUP_BYTES]; STEP_GROUPS];

/// Hands the codes and units of each step of `tile` to `step`.
fn for_each_step<L: Layout>(tile: &[u8], mut step: impl FnMut(&Codes, &[[UnitScales; TILE_ROWS]])) {
    let mut codes = [[0; GROUP_BYTES]; STEP_GROUPS];
    let mut units = [[UnitScales { scale: 0.0, min: 0.0 }; TILE_ROWS]; 16];
    for block in tile.chunks_exact(L::BLOCK_BYTES) {
        let (scales, packed) = block.split_at(L::BLOCK_SCALE_BYTES);
        unpack_scales::<L>(scales, &mut units);
        for (packed, units) in packed.chunks_exact(L::STEP_BYTES).zip(units.chunks_exact(L::STEP_UNITS)) {
            for (g, group) in codes.iter_mut().enumerate() {
                unpack_group::<L>(packed, g, group);
            }
            step(&codes, units);
        }
    }
}

/// Adds a step's products with one token; `unit_sums` are the negated and the scaled sum of the activations of each unit.
fn add_step<L: Layout>(
    codes: &Codes,
    units: &[[UnitScales; TILE_ROWS]],
    words: &[i32; STEP_GROUPS],
    x_scale: f32,
    unit_sums: [(i32, f32); 2],
    sums: &mut Sums,
) {
    let x = words.map(i32::to_le_bytes);
    for (half, (units, (negated_sum, scaled_sum))) in units.iter().zip(unit_sums).enumerate() {
        let groups = half * L::UNIT_GROUPS..(half + 1) * L::UNIT_GROUPS;
        for (lane, (sum, unit)) in sums.iter_mut().zip(units).enumerate() {
            let mut dot = negated_sum * i32::from(L::Format::OFFSET);
            for g in groups.clone() {
                for (&code, x) in codes[g][lane * 4..][..4].iter().zip(x[g]) {
                    dot += i32::from(code) * i32::from(x.cast_signed());
                }
            }
            *sum = (dot as f32).mul_add(unit.scale * x_scale, *sum);
            if L::HAS_MIN {
                *sum = unit.min.mul_add(scaled_sum, *sum);
            }
        }
    }
}

/// Unpacks `steps` of a packed tile, whole blocks, into `To`'s layout.
pub(super) fn unpack<L: Layout, To: Layout>(tile: &[u8], steps: Range<usize>, scratch: &mut Scratch) {
    let mut units = [[UnitScales { scale: 0.0, min: 0.0 }; TILE_ROWS]; 16];
    let mut to = scratch.steps_mut::<To>();
    for block in blocks_of::<L>(tile, steps) {
        let (scales, codes) = block.split_at(L::BLOCK_SCALE_BYTES);
        unpack_scales::<L>(scales, &mut units);
        let steps = codes.chunks_exact(L::STEP_BYTES).zip(units.chunks_exact(L::STEP_UNITS));
        for ((packed, units), (scales, groups)) in steps.zip(&mut to) {
            for (g, group) in groups.iter_mut().enumerate() {
                unpack_group::<L>(packed, g, group);
            }
            for (half, units) in units.iter().enumerate() {
                for (lane, unit) in units.iter().enumerate() {
                    scales[half][4 * lane..][..4].copy_from_slice(&unit.scale.to_le_bytes());
                    if L::HAS_MIN {
                        scales[To::MINS_AT + half][4 * lane..][..4].copy_from_slice(&unit.min.to_le_bytes());
                    }
                }
            }
        }
    }
}

/// Group `g` of a packed step.
fn unpack_group<L: Layout>(packed: &[u8], g: usize, group: &mut [u8; GROUP_BYTES]) {
    let part = |at: usize, index: usize| &packed[at + index * GROUP_BYTES..][..GROUP_BYTES];
    let mut set = |bytes: &[u8], shift: usize, mask: u8| {
        for (code, &byte) in group.iter_mut().zip(bytes) {
            *code = byte >> shift & mask;
        }
    };
    match L::STORED_BITS {
        2 | 3 => set(part(0, g / 4), 2 * (g % 4), 3),
        4..=6 => set(part(0, g % 4), 4 * (g / 4), 15),
        _ => set(part(0, g), 0, 255),
    }
    let mut add = |bytes: &[u8], shift: usize, mask: u8, to: u32| {
        for (code, &byte) in group.iter_mut().zip(bytes) {
            *code |= (byte >> shift & mask) << to;
        }
    };
    match L::STORED_BITS {
        3 => add(part(AFTER_PAIRS, 0), g, 1, 2),
        5 => add(part(AFTER_NIBBLES, 0), g, 1, 4),
        6 => add(part(AFTER_NIBBLES, g / 4), 2 * (g % 4), 3, 4),
        _ => {}
    }
}

/// The scales of the units of one block, lane by lane.
fn unpack_scales<L: Layout>(packed: &[u8], units: &mut [[UnitScales; TILE_ROWS]; 16]) {
    for lane in 0..TILE_ROWS {
        match L::SCALES {
            ScaleLayout::Packed(_) => {
                let scales = scales_of::<L::Format>(lane, packed);
                for (unit, lanes) in units[..L::BLOCK_UNITS].iter_mut().enumerate() {
                    lanes[lane] = scales.unit::<L::Format>(unit);
                }
            }
            ScaleLayout::Float => {
                let value = |unit: usize| {
                    let bytes = &packed[unit * UNIT_SCALE_BYTES + 4 * lane..];
                    f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
                };
                for (unit, lanes) in units[..L::BLOCK_UNITS].iter_mut().enumerate() {
                    let min = if L::HAS_MIN { value(L::BLOCK_UNITS + unit) } else { 0.0 };
                    lanes[lane] = UnitScales { scale: value(unit), min };
                }
            }
        }
    }
}
