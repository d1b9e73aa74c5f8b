//! What the bytes of a quantised block mean, one type each.
//!
//! All of them say the same thing in different words. A block holds unsigned codes of a few bits. A *unit* of 16 or 32
//! consecutive columns shares one scale and, in some types, one minimum:
//!
//! ```text
//! weight = scale * (code - OFFSET)      types without minima
//! weight = scale * code + min           types with minima
//! ```
//!
//! with every operation rounded to f32. The scale of a unit is the block's f16 `d`, or `d` times a small integer; the
//! product is exact in f32 (11 + 8 bits), so it may be formed at any time, on any path.

use half::f16;

use crate::weight_type::WeightType;

/// How the scales and minima of a block's units are spelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scales {
    /// One unit a block: scale `d`.
    Plain,
    /// One unit a block: scale `d`, minimum `m`.
    WithMin,
    /// Many units: scale `d * sub`, `sub` signed.
    Sub,
    /// Many units: scale `d * sub`, minimum `-(m * sub_min)`.
    SubWithMin,
}

/// A quantised type: where in a block its codes and scales are.
pub(crate) trait BlockFormat {
    /// The type this describes.
    const TYPE: WeightType;
    /// Columns of a block.
    const BLOCK_LEN: usize = Self::TYPE.block_len();
    /// Bytes of a block.
    const BLOCK_BYTES: usize = Self::TYPE.block_bytes();
    /// Columns that share a scale.
    const UNIT_LEN: usize;
    /// Bits of a code.
    const CODE_BITS: u32;
    /// Code of weight zero, where there are no minima: `2^(CODE_BITS - 1)`.
    const OFFSET: u8 = if Self::HAS_MIN { 0 } else { 1 << (Self::CODE_BITS - 1) };
    /// How its scales are spelled.
    const SCALES: Scales;
    /// Whether its units have minima.
    const HAS_MIN: bool = matches!(Self::SCALES, Scales::WithMin | Scales::SubWithMin);

    /// Writes the codes of `block` in column order; `codes` is [`Self::BLOCK_LEN`] long.
    fn codes(block: &[u8], codes: &mut [u8]);

    /// Its scales.
    fn scales(block: &[u8]) -> BlockScales;
}

/// The scales of one block as stored: f16 bits and small integers, so that nothing is lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BlockScales {
    /// f16 bits of the scale (of scales).
    pub(crate) d: u16,
    /// f16 bits of the minimum, or of the scale of minima; 0 where there are none.
    pub(crate) m: u16,
    /// Per unit, for [`Scales::Sub`] and [`Scales::SubWithMin`].
    pub(crate) sub: [i8; 16],
    /// Per unit, for [`Scales::SubWithMin`].
    pub(crate) sub_min: [u8; 16],
}

impl BlockScales {
    /// The scale and minimum of unit `unit`.
    pub(crate) fn unit<F: BlockFormat>(&self, unit: usize) -> UnitScales {
        let (d, m) = (f16::from_bits(self.d).to_f32(), f16::from_bits(self.m).to_f32());
        match F::SCALES {
            Scales::Plain => UnitScales { scale: d, min: 0.0 },
            Scales::WithMin => UnitScales { scale: d, min: m },
            Scales::Sub => UnitScales { scale: d * f32::from(self.sub[unit]), min: 0.0 },
            Scales::SubWithMin => {
                UnitScales { scale: d * f32::from(self.sub[unit]), min: -(m * f32::from(self.sub_min[unit])) }
            }
        }
    }
}

/// The scale and minimum of one unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct UnitScales {
    /// What a code is multiplied by.
    pub(crate) scale: f32,
    /// What is added then; 0 in types without minima.
    pub(crate) min: f32,
}

impl UnitScales {
    /// The weight that `code` stands for.
    pub(crate) fn value<F: BlockFormat>(self, code: u8) -> f32 {
        if F::HAS_MIN {
            self.scale * f32::from(code) + self.min
        } else {
            self.scale * f32::from(i16::from(code) - i16::from(F::OFFSET))
        }
    }
}

/// Evaluates an expression with `$format` standing for the [`BlockFormat`] of a [`WeightType`], or the `else` one for
/// the float types, which have no blocks.
macro_rules! with_block_format {
    ($ty:expr, $format:ident => $body:expr, else $otherwise:expr) => {{
        use $crate::dequantize as formats;
        use $crate::weight_type::WeightType;
        macro_rules! with {
            ($f:ty) => {{
                type $format = $f;
                $body
            }};
        }
        match $ty {
            WeightType::F32 | WeightType::F16 | WeightType::Bf16 => $otherwise,
            WeightType::Q4_0 => with!(formats::Q4Plain),
            WeightType::Q4_1 => with!(formats::Q4WithMin),
            WeightType::Q5_0 => with!(formats::Q5Plain),
            WeightType::Q5_1 => with!(formats::Q5WithMin),
            WeightType::Q8_0 => with!(formats::Q8Plain),
            WeightType::Q2K => with!(formats::Q2K),
            WeightType::Q3K => with!(formats::Q3K),
            WeightType::Q4K => with!(formats::Q4K),
            WeightType::Q5K => with!(formats::Q5K),
            WeightType::Q6K => with!(formats::Q6K),
        }
    }};
}
pub(crate) use with_block_format;
