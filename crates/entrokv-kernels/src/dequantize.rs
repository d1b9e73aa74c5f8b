//! Weights as f32, bit for bit as PyPI's `gguf` package computes them.
//!
//! What the bytes of a block mean is said once, in `block_format`; this module and the packing of [`crate::matrix`] both
//! read it there.

pub(crate) mod block_format;
mod k_blocks;
mod small_blocks;

use half::{bf16, f16};

pub(crate) use block_format::{BlockFormat, BlockScales, Scales, UnitScales, with_block_format};
pub(crate) use k_blocks::{Q2K, Q3K, Q4K, Q5K, Q6K};
pub(crate) use small_blocks::{Q4Plain, Q4WithMin, Q5Plain, Q5WithMin, Q8Plain};

use crate::weight_type::WeightType;

/// Dequantises `bytes`, whole blocks of type `ty`, into `out`.
///
/// The result equals `gguf.quants.dequantize` bit for bit (NaN as NaN: its payload is the FPU's).
///
/// # Panics
/// If `out` is not a whole number of blocks or `bytes` is not exactly their bytes.
pub fn dequantize(ty: WeightType, bytes: &[u8], out: &mut [f32]) {
    let expected = ty.row_bytes(out.len());
    assert_eq!(Some(bytes.len()), expected, "{} bytes of {ty} for {} values", bytes.len(), out.len());
    match ty {
        WeightType::F32 => convert(bytes, out, f32::from_le_bytes),
        WeightType::F16 => convert(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
        WeightType::Bf16 => convert(bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
        _ => with_block_format!(ty, F => dequantize_blocks::<F>(bytes, out), else unreachable!("floats are above")),
    }
}

/// One value per `N` bytes.
fn convert<const N: usize>(bytes: &[u8], out: &mut [f32], value: impl Fn([u8; N]) -> f32) {
    let (chunks, _) = bytes.as_chunks::<N>();
    for (out, &chunk) in out.iter_mut().zip(chunks) {
        *out = value(chunk);
    }
}

fn dequantize_blocks<F: BlockFormat>(bytes: &[u8], out: &mut [f32]) {
    let mut codes = [0u8; 256];
    for (block, out) in bytes.chunks_exact(F::BLOCK_BYTES).zip(out.chunks_exact_mut(F::BLOCK_LEN)) {
        let codes = &mut codes[..F::BLOCK_LEN];
        F::codes(block, codes);
        let scales = F::scales(block);
        let units = out.chunks_exact_mut(F::UNIT_LEN).zip(codes.chunks_exact(F::UNIT_LEN));
        for (unit, (out, codes)) in units.enumerate() {
            let unit = scales.unit::<F>(unit);
            for (out, &code) in out.iter_mut().zip(codes) {
                *out = unit.value::<F>(code);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "17 bytes of Q4_0 for 32 values")]
    fn a_wrong_length_is_refused() {
        dequantize(WeightType::Q4_0, &[0; 17], &mut [0.0; 32]);
    }

    #[test]
    fn formats_agree_with_their_weight_types() {
        for ty in WeightType::ALL {
            with_block_format!(ty, F => {
                assert_eq!(F::TYPE, ty);
                assert_eq!(F::BLOCK_LEN % F::UNIT_LEN, 0, "{ty}");
                // The greatest code is 2^bits - 1; a packed code must hold it.
                let mut codes = [0; 256];
                F::codes(&vec![0xff; F::BLOCK_BYTES], &mut codes[..F::BLOCK_LEN]);
                assert!(codes.iter().all(|&code| u32::from(code) < 1 << F::CODE_BITS), "{ty}");
            }, else assert_eq!(ty.block_len(), 1));
        }
    }
}
