//! A stretch of a tile, unpacked to bytes and f32 scales.

use crate::matrix::TILE_ROWS;
use crate::matrix::packing::{GROUP_BYTES, STEP_GROUPS};

/// Steps of a stretch: 1,024 columns, whose codes and scales (24 KiB) stay in the first-level cache while the tokens go
/// over them. A multiple of the steps of every block.
pub(super) const UNPACKED_STEPS: usize = 32;

/// The codes and scales of up to [`UNPACKED_STEPS`] steps of 16 rows.
#[repr(C, align(64))]
pub(super) struct Unpacked {
    /// Groups of codes, eight a step.
    pub(super) codes: [[u8; GROUP_BYTES]; UNPACKED_STEPS * STEP_GROUPS],
    /// Scales per unit, one or two a step.
    pub(super) scales: [[f32; TILE_ROWS]; UNPACKED_STEPS * 2],
    /// Minima per unit, in types that have them.
    pub(super) mins: [[f32; TILE_ROWS]; UNPACKED_STEPS * 2],
}

impl Unpacked {
    pub(super) fn zeroed() -> Self {
        Self {
            codes: [[0; GROUP_BYTES]; UNPACKED_STEPS * STEP_GROUPS],
            scales: [[0.0; TILE_ROWS]; UNPACKED_STEPS * 2],
            mins: [[0.0; TILE_ROWS]; UNPACKED_STEPS * 2],
        }
    }
}
