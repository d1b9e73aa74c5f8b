//! Attention over codes, which are never decoded: products of integers, exact, and so the same bits everywhere.
//!
//! Codes between a smallest and a largest element are not among these: the scale of a key's element belongs to its channel in one
//! strip, so that a query would have to be rounded anew for every strip. The reader of tiles replaces them by what they stand for
//! (`strip.rs`), and they are plain pages from there on.
//!
//! **Scores.** A code stands for an integer `z` (its codebook's point times a multiplier `M`; for `q8_0` the code itself), a
//! key for `a / M * z` with its scale `a`, relative to a centre and, rotated, to a channel scale and a rotation. The query is
//! given the inverse once ([`queries`]): `q~ = H (s * c * q)`, then rounded to integers of 8 bits relative to its largest
//! element, `q~ = f * u` with `f = max |q~| / 127`. Then
//! ```text
//! score = (sum_i u_i z_i) * (a * (f / M)) + q . centre
//! ```
//! with the sum exact in 32 bits; `q8_0` sums `(sum_i u_i z_i) * (a * f)` over its blocks in ascending order, each with its own
//! `f`.
//!
//! **Values.** The weights of a tile, `w_t = e_t * (a_t / M)` with the exponentials `e_t`, are rounded to integers of 8 bits
//! relative to the largest of the row in the tile, `w_t = g * n_t`. What rounding leaves of a weight is added to the one 16
//! positions later, so that small weights beside a large one are not lost, however many they are. The sum
//! `g * sum_t n_t z_t` is exact in 32 bits up to the one rounding, over all rotated values of the tile, whatever their
//! codebooks. Rotated sums are kept apart from plain ones and merged by the same factors; one inverse rotation of their total
//! is added in the end. `q8_0` is quantised for each block of 32 dimensions, because each has its scale, and its sums are
//! added to the tile's plain ones.
//!
//! So a tile's sums depend on positions only. A page that is not in the list gives the bits of one that is masked: its
//! weights would be 0, which pass on what they got, and not the largest.
//!
//! What this rounds, beside the codes' own error: points to integers (0.3 % of an element at 4 bits, 0.1 at 3, none to speak
//! of at 2 and 8), queries to 1 / 254 of their largest element, weights to 1 / 508 of the
//! largest. `docs/kernels.md` has what that costs.
//!
//! A list with codes has all its pages at multiples of 16 positions, so that strips are read where they lie.

mod queries;
mod rotate_back;
mod scores;
mod unpack;
mod values;

pub(super) use queries::{CodedQueries, KeyCodes, LoadQueries};
pub(super) use rotate_back::{RotateBack, RowSums};
pub(super) use scores::ScoreStrips;
pub(super) use unpack::UnpackStrips;
pub(super) use values::{AddValues, Weights};

use crate::codes::Code;
use crate::codes::packing::StripLayout;

/// Up to how many query rows read codes where they lie. More of them share the cost of unpacking a tile to bytes.
pub(super) const MAX_DIRECT_ROWS: usize = 8;

/// Where the scales of a strip start.
fn scales_at(code: Code, head_dim: usize) -> usize {
    StripLayout { code, head_dim }.code_bytes()
}
