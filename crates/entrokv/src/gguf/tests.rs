//! What must hold for every file: those we write, those others write, and those that somebody made up.

use super::*;
use entrokv_kernels::weight_type::WeightType;

mod hostile;
mod parts;
mod real;
mod values;

/// A file with one entry of every value type, a nested array, and four tensors of different types.
pub(super) fn sample() -> GgufWriter {
    let mut file = GgufWriter::new();
    file.metadata("general.architecture", "llama")
        .metadata("a.u8", OwnedValue::U8(200))
        .metadata("a.i8", OwnedValue::I8(-100))
        .metadata("a.u16", OwnedValue::U16(60_000))
        .metadata("a.i16", OwnedValue::I16(-30_000))
        .metadata("a.u32", 4_000_000_000)
        .metadata("a.i32", OwnedValue::I32(-2_000_000_000))
        .metadata("a.u64", OwnedValue::U64(u64::MAX))
        .metadata("a.i64", OwnedValue::I64(i64::MIN))
        .metadata("a.f32", 1.5_f32)
        .metadata("a.f64", OwnedValue::F64(1e-6))
        .metadata("a.bool", true)
        .metadata("a.string", "gr\u{fc}\u{df}e\n")
        .metadata("a.bytes", OwnedValue::String(vec![b'x', 0xff, 0xfe]))
        .metadata("a.tokens", OwnedValue::strings(["one", "", "three"]))
        .metadata("a.byte_tokens", OwnedValue::strings([&b"ok"[..], b"\xc3"]))
        .metadata("a.scores", OwnedValue::f32s([0.0, -1.0, f32::MIN]))
        .metadata("a.types", OwnedValue::i32s([1, 3, -6]))
        .metadata("a.flags", OwnedValue::Array(ValueType::Bool, vec![true.into(), false.into()]))
        .metadata("a.empty", OwnedValue::Array(ValueType::String, vec![]))
        .metadata(
            "a.nested",
            OwnedValue::Array(ValueType::Array, vec![OwnedValue::i32s([1, 2]), OwnedValue::strings(["x"])]),
        );
    file.tensor("vector", WeightType::F32, &[3], (0..12).collect());
    file.tensor("matrix", WeightType::Q8_0, &[64, 5], (0..5 * 68).map(|i| i as u8).collect());
    file.tensor("half", WeightType::F16, &[2, 2, 2, 2], vec![7; 32]);
    file.tensor("k", WeightType::Q4K, &[256, 2], vec![9; 288]);
    file
}

/// The file's bytes.
pub(super) fn bytes_of(file: &GgufWriter) -> Vec<u8> {
    file.to_bytes().expect("the test describes a possible file")
}

/// The one line with which the bytes are refused.
pub(super) fn refusal(bytes: Vec<u8>) -> String {
    let message = Gguf::from_bytes(bytes).expect_err("the file must be refused").to_string();
    assert!(!message.contains('\n'), "more than one line: {message}");
    message
}

/// The model in `bytes`, which must be a good one.
pub(super) fn opened(bytes: Vec<u8>) -> Gguf {
    Gguf::from_bytes(bytes).expect("the file is good")
}
