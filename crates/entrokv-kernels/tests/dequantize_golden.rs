//! Dequantised values against PyPI's `gguf` package, bit for bit. The fixture names its script, version and seed.

use entrokv_kernels::dequantize::dequantize;
use entrokv_kernels::weight_type::WeightType;

#[test]
fn values_equal_the_gguf_package_bit_for_bit() {
    let fixture: serde_json::Value = serde_json::from_str(include_str!("fixtures/dequantize.json")).unwrap();
    let cases = fixture["cases"].as_array().unwrap();
    let mut seen = Vec::new();
    let mut failures = Vec::new();
    for case in cases {
        let name = case["type"].as_str().unwrap();
        let ty = WeightType::ALL.into_iter().find(|ty| ty.name() == name).expect("one of our types");
        let bytes = from_hex(case["bytes"].as_str().unwrap());
        let mut values = vec![0.0; bytes.len() / ty.block_bytes() * ty.block_len()];
        dequantize(ty, &bytes, &mut values);

        let first: Vec<u32> = from_hex(case["first_block"].as_str().unwrap())
            .chunks_exact(4)
            .map(|b| u32::from_be_bytes(b.try_into().unwrap()))
            .collect();
        for (column, (&value, &expected)) in values.iter().zip(&first).enumerate() {
            if bits(value) != expected {
                failures.push(format!("{name} column {column}: {:08x}, expected {expected:08x}", bits(value)));
            }
        }
        let hashes = case["block_fnv1a"].as_array().unwrap();
        assert_eq!(values.len() % hashes.len(), 0);
        for (block, (values, expected)) in values.chunks(values.len() / hashes.len()).zip(hashes).enumerate() {
            let got = format!("{:016x}", fnv1a(values));
            if expected.as_str() != Some(&got) {
                failures.push(format!("{name} block {block}: hash {got}, expected {expected}"));
            }
        }
        seen.push(ty);
    }
    assert_eq!(seen.len(), WeightType::ALL.len());
    assert!(WeightType::ALL.iter().all(|ty| seen.contains(ty)));
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// The bits of `value`, with one spelling of NaN: its sign and payload are the FPU's.
fn bits(value: f32) -> u32 {
    if value.is_nan() { 0x7fc0_0000 } else { value.to_bits() }
}

fn from_hex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).expect("hex digits")).collect()
}

/// FNV-1a, 64 bits, over the little-endian bytes of the values' bits.
fn fnv1a(values: &[f32]) -> u64 {
    values
        .iter()
        .flat_map(|&value| bits(value).to_le_bytes())
        .fold(0xcbf2_9ce4_8422_2325, |state, byte| (state ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
