//! Rows of elements to codes between the smallest and the largest of their groups.

use half::f16;

use super::MinMaxStrip;
use crate::codes::encode::{round_to_f16, widen};
use crate::simd::{Kernel, LANES, Simd};

/// Encodes the rows of one strip of a part.
pub(crate) struct EncodeMinMax<'a> {
    pub(crate) layout: MinMaxStrip,
    /// `[head_dim]`, as [`super`] has it.
    pub(crate) rows: &'a [[f32; LANES]],
    /// [`MinMaxStrip::bytes`].
    pub(crate) strip: &'a mut [u8],
}

impl Kernel for EncodeMinMax<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let EncodeMinMax { layout, rows, strip } = self;
        let (codes, numbers) = strip.split_at_mut(layout.code_bytes());
        let (scales, minima) = numbers.split_at_mut(layout.number_bytes());
        codes.fill(0);
        let mut planes = codes
            .as_chunks_mut::<LANES>()
            .0
            .chunks_exact_mut(LANES * layout.rows_per_group() / layout.rows_per_plane());
        // Of 16 groups at a time, so that their numbers are rounded together.
        let numbers =
            scales.as_chunks_mut::<{ 2 * LANES }>().0.iter_mut().zip(minima.as_chunks_mut::<{ 2 * LANES }>().0);
        for (rows, (scales, minima)) in rows.chunks_exact(LANES * layout.rows_per_group()).zip(numbers) {
            let Some(planes) = planes.next() else { break };
            let groups = Groups::of(s, rows, layout);
            *scales = bytes(groups.scales);
            *minima = bytes(groups.minima);
            let (scale, minimum) = (widen(groups.scales), widen(groups.minima));
            for (i, row) in rows.iter().enumerate() {
                let group = i / layout.rows_per_group();
                let level = s.div(s.sub(s.load(row), s.splat(minimum[group])), s.splat(scale[group]));
                // What is stored may be rounded, so that some levels lie outside; NaN becomes 0.
                let (least, most) = (s.splat(0.0), s.splat(f32::from(layout.largest())));
                let level = s.max(level, least);
                let mut level_of_lane = [0.0; LANES];
                s.store(&mut level_of_lane, s.round(s.select_lt(level, most, level, most)));
                let shift = i % layout.rows_per_plane() * layout.bits;
                let plane = planes[i / layout.rows_per_plane()].iter_mut().zip(level_of_lane);
                plane.for_each(|(codes, level)| *codes |= (level as u8) << shift);
            }
        }
    }
}

/// The numbers of 16 groups, as stored.
struct Groups {
    scales: [f16; LANES],
    minima: [f16; LANES],
}

impl Groups {
    /// Of 16 groups of rows. Where an element is not finite, or the numbers would not be as f16, the scale is NaN.
    #[inline(always)]
    fn of<S: Simd>(s: S, rows: &[[f32; LANES]], layout: MinMaxStrip) -> Groups {
        let (mut scales, mut minima) = ([0.0; LANES], [0.0; LANES]);
        let zero = s.splat(0.0);
        let groups = rows.chunks_exact(layout.rows_per_group());
        for (rows, (scale, minimum)) in groups.zip(scales.iter_mut().zip(&mut minima)) {
            let first = s.load(&rows[0]);
            let (mut high, mut below) = (first, s.sub(zero, first));
            // 0, or NaN if an element is not finite, which `max` may lose.
            let mut poison = s.mul(first, zero);
            for row in &rows[1..] {
                let x = s.load(row);
                high = s.max(high, x);
                below = s.max(below, s.sub(zero, x));
                poison = s.add(poison, s.mul(x, zero));
            }
            // Zeros of either sign are one and the same number.
            *minimum = 0.0 - s.largest(below);
            *scale = (s.largest(high) - *minimum) / f32::from(layout.largest()) + s.sum(poison);
        }
        let (mut scales, mut minima) = (round_to_f16(scales), round_to_f16(minima));
        for (scale, minimum) in scales.iter_mut().zip(&mut minima) {
            if !(scale.is_finite() && minimum.is_finite()) {
                // Always these bits, so that every instruction set makes the same codes.
                (*scale, *minimum) = (f16::NAN, f16::ZERO);
            } else if *scale == f16::ZERO {
                *scale = f16::ONE;
            }
        }
        Groups { scales, minima }
    }
}

fn bytes(numbers: [f16; LANES]) -> [u8; 2 * LANES] {
    let mut bytes = [0; 2 * LANES];
    bytes.as_chunks_mut().0.iter_mut().zip(numbers).for_each(|(bytes, number)| *bytes = number.to_ne_bytes());
    bytes
}
