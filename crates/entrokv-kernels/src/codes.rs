//! Codes: keys and values in 8, 4, 3 or 2 bits an element, and how vectors become codes and codes vectors again.
//!
//! - **`q8_0`**: blocks of 32 elements, each with its own f16 scale: `x = scale * code`, codes from -127 to 127.
//! - **`tq4`, `tq3`, `tq2`**: *rotated codes*. A vector is rotated by random signs and a Walsh-Hadamard transform
//!   (`rotation`), after which its elements are close to normal whatever they were before, and every element is replaced
//!   by the nearest point of the Lloyd-Max quantiser of a normal variable (`codebook`). One f16 scale a vector, chosen by
//!   least squares: `y = scale * point(code)`. Keys are centred and divided by a channel scale first ([`KeyConstants`]);
//!   values are not. The scheme is EDEN's (Vargaftik et al., 2022) with deterministic codes, as in HIGGS (Malinovskii et
//!   al., 2024) and TurboQuant (Zandieh et al., 2025).
//! - **`kivi4`, `kivi2`**: codes between the smallest and the largest element of a group, of a channel's tokens in keys and of a
//!   token's channels in values (`min_max`). Attention multiplies the codes of all others; these it reads as what they stand for.
//!
//! Codes are made for 16 tokens at a time, which lie in the lanes of a vector, so that a rotation is additions of whole
//! vectors; `packing` and `min_max` say how they lie in a page. Every instruction set makes the same codes.
//!
//! Numbers that are not finite: a vector with one in it (a group of `kivi4` and `kivi2`, so of keys 16 tokens), or (rotated) with a
//! root mean square of 65,520 and more, gets a scale that is not finite. Whatever is computed from it is NaN, as it would be without codes.

pub(crate) mod codebook;
mod constants;
pub(crate) mod encode;
pub(crate) mod min_max;
#[cfg(test)]
mod naive;
pub(crate) mod packing;
pub(crate) mod rotation;
#[cfg(test)]
mod tests;

pub use constants::KeyConstants;

use codebook::{Codebook, TQ2, TQ3, TQ4};

/// Elements of a block of `q8_0`, and what the head dimension must be a multiple of for any code.
pub(crate) const BLOCK_LEN: usize = 32;

/// What codes of 8 bits and points of codebooks are multiplied as among keys: their integer plus this, so that it is not
/// negative.
pub(crate) const KEY_OFFSET: i32 = 128;

/// The largest head dimension of coded pages: up to here the integer dot product of codes and a query fits 32 bits.
pub const MAX_CODED_HEAD_DIM: usize = rotation::MAX_LEN;

/// A kind of code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Code {
    /// 8 bits, a scale for each block of 32 elements.
    Q8,
    /// Points of a codebook in the rotated space, a scale for each vector.
    Rotated(Rotated),
}

/// The codebooks there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rotated {
    Tq4,
    Tq3,
    Tq2,
}

impl Rotated {
    #[inline]
    pub(crate) fn codebook(self) -> &'static Codebook {
        match self {
            Rotated::Tq4 => &TQ4,
            Rotated::Tq3 => &TQ3,
            Rotated::Tq2 => &TQ2,
        }
    }
}

impl Code {
    /// Bits of a code.
    #[inline]
    pub(crate) fn bits(self) -> usize {
        match self {
            Code::Q8 => 8,
            Code::Rotated(rotated) => rotated.codebook().bits,
        }
    }

    /// f16 scales of one vector of `head_dim` elements.
    #[inline]
    pub(crate) fn num_scales(self, head_dim: usize) -> usize {
        match self {
            Code::Q8 => head_dim / BLOCK_LEN,
            Code::Rotated(_) => 1,
        }
    }
}
