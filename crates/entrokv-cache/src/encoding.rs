//! Encodings: how the keys, or the values, of a page are stored.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::shape::CacheShape;

/// How one part of a page, its keys or its values, is stored.
///
/// Plain encodings are written a token at a time; coded ones are made from a whole page of plain ones, once, and are never
/// written again. What the codes mean is the kernels' business; this crate knows what they weigh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Encoding {
    /// 32-bit floats.
    F32,
    /// 16-bit floats: the default.
    F16,
    /// The upper halves of 32-bit floats.
    Bf16,
    /// Codes of 8 bits in blocks of 32 along the head, each with a 16-bit scale.
    Q8_0,
    /// Rotated codes of 4 bits, with a 16-bit scale a token.
    Tq4,
    /// Rotated codes of 3 bits, with a 16-bit scale a token.
    Tq3,
    /// Rotated codes of 2 bits, with a 16-bit scale a token.
    Tq2,
    /// Codes of 4 bits between a smallest and a largest element (KIVI, Liu et al. 2024), with a scale and a minimum of 16 bits each for
    /// 16 tokens of a key's channel and for 32 elements of a value.
    Kivi4,
    /// The same of 2 bits.
    Kivi2,
}

/// Elements that share a scale in [`Encoding::Q8_0`].
const Q8_0_BLOCK: u64 = 32;
/// Tokens of a key's channel that share a scale and a minimum in KIVI's encodings.
const KIVI_TOKENS: u64 = 16;
/// Elements of a value that do.
const KIVI_ELEMENTS: u64 = 32;
/// Bytes of a scale, and of a minimum.
const SCALE_BYTES: u64 = 2;

impl Encoding {
    /// Every encoding: plain ones, then codes, from the largest to the smallest, then KIVI's.
    pub const ALL: [Encoding; 9] = [
        Encoding::F32,
        Encoding::F16,
        Encoding::Bf16,
        Encoding::Q8_0,
        Encoding::Tq4,
        Encoding::Tq3,
        Encoding::Tq2,
        Encoding::Kivi4,
        Encoding::Kivi2,
    ];

    /// The name it goes by on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Encoding::F32 => "f32",
            Encoding::F16 => "f16",
            Encoding::Bf16 => "bf16",
            Encoding::Q8_0 => "q8_0",
            Encoding::Tq4 => "tq4",
            Encoding::Tq3 => "tq3",
            Encoding::Tq2 => "tq2",
            Encoding::Kivi4 => "kivi4",
            Encoding::Kivi2 => "kivi2",
        }
    }

    /// Whether it is made from whole pages rather than written a token at a time.
    pub const fn is_coded(self) -> bool {
        !matches!(self, Encoding::F32 | Encoding::F16 | Encoding::Bf16)
    }

    /// Whether its codes are rotated: keys then need a centre and a channel scale first.
    pub const fn is_rotated(self) -> bool {
        matches!(self, Encoding::Tq4 | Encoding::Tq3 | Encoding::Tq2)
    }

    /// What tokens are written as until a page can be stored like this: itself where it is plain, else 16-bit floats.
    pub const fn written_as(self) -> Encoding {
        if self.is_coded() { Encoding::F16 } else { self }
    }

    /// Whether what is stored like this may be stored as `to`: codes are never encoded again, for their error would grow.
    pub const fn can_become(self, to: Encoding) -> bool {
        !self.is_coded() || self as u8 == to as u8
    }

    /// Bytes of the keys of a page of one KV head, if they are stored like this: exact for a geometry that
    /// [`PageKind::check`](crate::PageKind::check) accepts.
    pub const fn key_bytes(self, shape: &CacheShape) -> u64 {
        self.part_bytes(shape, (shape.page_size as u64).div_ceil(KIVI_TOKENS) * shape.head_dim as u64)
    }

    /// Bytes of its values, likewise.
    pub const fn value_bytes(self, shape: &CacheShape) -> u64 {
        self.part_bytes(shape, shape.page_size as u64 * (shape.head_dim as u64).div_ceil(KIVI_ELEMENTS))
    }

    /// Bytes of a part in which `num_groups` groups share a scale and a minimum, where they do.
    const fn part_bytes(self, shape: &CacheShape, num_groups: u64) -> u64 {
        let head_dim = shape.head_dim as u64;
        let token_bytes = match self {
            Encoding::F32 => 4 * head_dim,
            Encoding::F16 | Encoding::Bf16 => 2 * head_dim,
            Encoding::Q8_0 => head_dim + head_dim.div_ceil(Q8_0_BLOCK) * SCALE_BYTES,
            Encoding::Tq4 => head_dim.div_ceil(2) + SCALE_BYTES,
            Encoding::Tq3 => (3 * head_dim).div_ceil(8) + SCALE_BYTES,
            Encoding::Tq2 => head_dim.div_ceil(4) + SCALE_BYTES,
            Encoding::Kivi4 => head_dim.div_ceil(2),
            Encoding::Kivi2 => head_dim.div_ceil(4),
        };
        let group_bytes = match self {
            Encoding::Kivi4 | Encoding::Kivi2 => num_groups * 2 * SCALE_BYTES,
            _ => 0,
        };
        shape.page_size as u64 * token_bytes + group_bytes
    }
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Encoding {
    type Err = EncodingError;

    fn from_str(text: &str) -> Result<Self, EncodingError> {
        let found = Self::ALL.into_iter().find(|encoding| encoding.name() == text);
        found.ok_or_else(|| EncodingError { got: text.to_owned() })
    }
}

/// The name of no encoding.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("unknown cache type {got:?}: the types are {}", Encoding::ALL.map(Encoding::name).join(", "))]
pub struct EncodingError {
    /// The name given.
    pub got: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back_and_unknown_ones_list_the_known() {
        for encoding in Encoding::ALL {
            assert_eq!(encoding.name().parse(), Ok(encoding));
        }
        let error = "q4_0".parse::<Encoding>().unwrap_err();
        assert_eq!(
            error.to_string(),
            r#"unknown cache type "q4_0": the types are f32, f16, bf16, q8_0, tq4, tq3, tq2, kivi4, kivi2"#
        );
    }

    #[test]
    fn codes_come_from_plain_encodings_and_stay() {
        use Encoding::{Bf16, F16, F32, Kivi2, Kivi4, Q8_0, Tq2, Tq3, Tq4};
        for from in [F32, F16, Bf16] {
            assert!(!from.is_coded() && from.written_as() == from);
            assert!(Encoding::ALL.into_iter().all(|to| from.can_become(to)));
        }
        for from in [Q8_0, Tq4, Tq3, Tq2, Kivi4, Kivi2] {
            assert!(from.is_coded() && from.written_as() == F16);
            assert_eq!(from.is_rotated(), ![Q8_0, Kivi4, Kivi2].contains(&from));
            assert!(Encoding::ALL.into_iter().all(|to| from.can_become(to) == (from == to)));
        }
    }
}
