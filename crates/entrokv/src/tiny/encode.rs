//! Weights to bytes: the plain rounding for each type that tiny models can have.

use entrokv_kernels::weight_type::WeightType;
use half::{bf16, f16};

/// Elements in a block of every 32-wide type.
const BLOCK: usize = 32;

/// Encodes rows one after the other; `None` for a type that has no encoder here. A row that is no whole number of
/// blocks gives too few bytes, which the writer refuses.
pub(super) fn encode(ty: WeightType, values: &[f32]) -> Option<Vec<u8>> {
    Some(match ty {
        WeightType::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        WeightType::F16 => values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
        WeightType::Bf16 => values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
        WeightType::Q8_0 => values.as_chunks::<BLOCK>().0.iter().flat_map(q8_0).collect(),
        WeightType::Q4_1 => values.as_chunks::<BLOCK>().0.iter().flat_map(q4_1).collect(),
        _ => return None,
    })
}

/// x = d q: f16 d, then 32 signed bytes.
fn q8_0(block: &[f32; BLOCK]) -> [u8; 34] {
    let largest = block.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    let d = f16::from_f32(largest / 127.0);
    let mut out = [0; 34];
    out[..2].copy_from_slice(&d.to_le_bytes());
    for (q, x) in out[2..].iter_mut().zip(block) {
        *q = (ratio(*x, d).round().clamp(-127.0, 127.0) as i8).cast_unsigned();
    }
    out
}

/// x = d q + m: f16 d and m, then 16 bytes of two nibbles, the low ones the first half.
fn q4_1(block: &[f32; BLOCK]) -> [u8; 20] {
    let (least, most) = block.iter().fold((f32::MAX, f32::MIN), |(low, high), &x| (low.min(x), high.max(x)));
    let (d, m) = (f16::from_f32((most - least) / 15.0), f16::from_f32(least));
    let code = |x: f32| ratio(x - m.to_f32(), d).round().clamp(0.0, 15.0) as u8;
    let mut out = [0; 20];
    out[..2].copy_from_slice(&d.to_le_bytes());
    out[2..4].copy_from_slice(&m.to_le_bytes());
    for (i, byte) in out[4..].iter_mut().enumerate() {
        *byte = code(block[i]) | code(block[i + BLOCK / 2]) << 4;
    }
    out
}

/// x / d, and 0 for a block without spread.
fn ratio(x: f32, d: f16) -> f32 {
    if d == f16::ZERO { 0.0 } else { x / d.to_f32() }
}
