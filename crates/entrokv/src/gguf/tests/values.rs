//! What is written comes back, in both versions and at every alignment; getters say what they found.

use std::{fs, path::Path};

use super::*;

#[test]
fn what_is_written_is_read() {
    for version in [2, 3] {
        for alignment in [None, Some(8), Some(32), Some(64), Some(4096)] {
            let mut file = sample();
            file.version(version);
            if let Some(alignment) = alignment {
                file.alignment(alignment);
            }
            let model = opened(bytes_of(&file));
            assert_eq!(model.version(), version);
            let names: Vec<_> = model.tensors().map(|t| t.name).collect();
            assert_eq!(names, ["vector", "matrix", "half", "k"]);
            let matrix = model.tensor("matrix").expect("it is there");
            assert_eq!((matrix.cols(), matrix.rows(), matrix.shape), (64, 5, &[64, 5][..]));
            assert_eq!(matrix.weight_type, WeightType::Q8_0);
            assert_eq!(matrix.data, (0..340).map(|i| i as u8).collect::<Vec<_>>());
            let half = model.tensor("half").expect("it is there");
            assert_eq!((half.cols(), half.rows(), half.data), (2, 8, &[7; 32][..]));
            assert_eq!(model.tensor("vector").map(|t| t.rows()), Some(1));
            assert!(model.tensor("absent").is_none());
            let address = half.data.as_ptr() as usize - model.parts[0].as_ptr() as usize;
            assert_eq!(address % alignment.unwrap_or(32) as usize, 0);
        }
    }
}

#[test]
fn getters_return_every_type() -> Result<(), MetadataError> {
    let model = opened(bytes_of(&sample()));
    let meta = model.metadata();
    assert_eq!(meta.len(), 21);
    assert_eq!(meta.str("general.architecture")?, "llama");
    assert_eq!(meta.str("a.string")?, "gr\u{fc}\u{df}e\n");
    assert_eq!(meta.byte_string("a.bytes")?, [b'x', 0xff, 0xfe]);
    assert_eq!((meta.u32("a.u8")?, meta.u32("a.u16")?, meta.u32("a.u32")?), (200, 60_000, 4_000_000_000));
    assert_eq!((meta.u64("a.u32")?, meta.u64("a.u64")?), (4_000_000_000, u64::MAX));
    assert_eq!(meta.get("a.i8"), Some(Value::I8(-100)));
    assert_eq!(meta.get("a.i16"), Some(Value::I16(-30_000)));
    assert_eq!(meta.get("a.i32"), Some(Value::I32(-2_000_000_000)));
    assert_eq!(meta.get("a.i64"), Some(Value::I64(i64::MIN)));
    assert_eq!((meta.f32("a.f32")?, meta.f32("a.f64")?), (1.5, 1e-6));
    assert!(meta.bool("a.bool")?);
    assert_eq!(meta.strings("a.tokens")?, ["one", "", "three"]);
    assert_eq!(meta.byte_strings("a.byte_tokens")?, [&b"ok"[..], b"\xc3"]);
    assert_eq!(meta.f32s("a.scores")?, [0.0, -1.0, f32::MIN]);
    assert_eq!(meta.i32s("a.types")?, [1, 3, -6]);
    assert!(meta.strings("a.empty")?.is_empty());
    let flags: Vec<_> = meta.array("a.flags")?.iter().collect();
    assert_eq!(flags, [Value::Bool(true), Value::Bool(false)]);
    let nested: Vec<_> = meta.array("a.nested")?.iter().map(|v| v.to_string()).collect();
    assert_eq!(nested, ["[1, 2]", "[\"x\"]"]);
    assert_eq!(meta.u32("a.absent").optional(), Ok(None));
    assert_eq!(meta.u32("a.u8").optional(), Ok(Some(200)));
    assert_eq!(meta.iter().next(), Some(("general.architecture", Value::String(b"llama"))));
    Ok(())
}

#[test]
fn getters_name_the_key_what_is_expected_and_what_is_there() {
    let model = opened(bytes_of(&sample()));
    let meta = model.metadata();
    let cases = [
        (meta.u32("a.absent").map(drop), "the model file has no metadata key \"a.absent\""),
        (
            meta.u32("a.string").map(drop),
            "metadata key \"a.string\" is a string: an unsigned 32-bit integer is expected",
        ),
        (
            meta.u32("a.u64").map(drop),
            "metadata key \"a.u64\" is 18446744073709551615: it does not fit an unsigned 32-bit integer",
        ),
        (meta.u64("a.i8").map(drop), "metadata key \"a.i8\" is -100: it does not fit an unsigned 64-bit integer"),
        (meta.str("a.u8").map(drop), "metadata key \"a.u8\" is an integer: a string is expected"),
        (meta.str("a.bytes").map(drop), "metadata key \"a.bytes\" is not valid UTF-8"),
        (meta.bool("a.u8").map(drop), "metadata key \"a.u8\" is an integer: a bool is expected"),
        (meta.f32("a.u8").map(drop), "metadata key \"a.u8\" is an integer: a floating-point number is expected"),
        (meta.strings("a.byte_tokens").map(drop), "metadata key \"a.byte_tokens\" is not valid UTF-8 at index 1"),
        (
            meta.strings("a.types").map(drop),
            "metadata key \"a.types\" is an array of type i32: an array of strings is expected",
        ),
        (
            meta.f32s("a.bool").map(drop),
            "metadata key \"a.bool\" is a bool: an array of floating-point numbers is expected",
        ),
        (meta.u32s("a.types").map(drop), "metadata key \"a.types\" is -6: it does not fit an unsigned 32-bit integer"),
        (meta.array("a.f64").map(drop), "metadata key \"a.f64\" is a floating-point number: an array is expected"),
    ];
    for (result, expected) in cases {
        assert_eq!(result.expect_err(expected).to_string(), expected);
    }
}

#[test]
fn values_print_on_one_short_line() {
    let long = OwnedValue::String("a\n".repeat(10_000).into_bytes());
    let many = OwnedValue::strings((0..1000).map(|i| format!("t{i}")));
    let model = opened(bytes_of(GgufWriter::new().metadata("long", long).metadata("many", many)));
    let printed: Vec<_> = model.metadata().iter().map(|(_, value)| value.to_string()).collect();
    assert_eq!(printed[0], format!("\"{}\"... (20000 bytes)", "a\\n".repeat(40)));
    assert_eq!(printed[1], "[\"t0\", \"t1\", \"t2\", \"t3\", \"t4\", \"t5\", ...] (1000 of type string)");
}

/// The fixtures are written by the `gguf` package: reading one and writing what was read gives its very bytes.
#[test]
fn files_of_the_gguf_package_survive_reading_and_writing() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/architectures");
    let paths = fs::read_dir(folder).expect("the fixtures").map(|entry| entry.expect("a readable folder").path());
    let models: Vec<_> = paths.filter(|path| path.extension().is_some_and(|ending| ending == "gguf")).collect();
    assert!(models.len() >= 10, "{models:?}");
    for path in models {
        let model = Gguf::open(&path).expect("a good file");
        let mut copy = GgufWriter::new();
        for (key, value) in model.metadata().iter() {
            copy.metadata(key, value);
        }
        for tensor in model.tensors() {
            copy.tensor(tensor.name, tensor.weight_type, tensor.shape, tensor.data.to_vec());
        }
        assert!(bytes_of(&copy) == fs::read(&path).expect("a readable file"), "{} differs", path.display());
    }
}

#[test]
fn the_writer_refuses_what_the_reader_would() {
    let one = |name: &str| GgufWriter::new().tensor(name, WeightType::F32, &[1], vec![0; 4]).clone();
    let cases: [(GgufWriter, &str); 6] = [
        (GgufWriter::new().metadata("a", 1).metadata("a", 2).clone(), "metadata key \"a\" is set twice"),
        (one("t").tensor("t", WeightType::F32, &[1], vec![0; 4]).clone(), "tensor \"t\" is added twice"),
        (GgufWriter::new().alignment(24).clone(), "alignment 24 is no power of two of 8 or more"),
        (
            one("t").tensor("u", WeightType::Q8_0, &[32, 2], vec![0; 67]).clone(),
            "tensor \"u\" of shape [32, 2] has 67 bytes of data, 68 are expected",
        ),
        (
            one("t").tensor("u", WeightType::Q8_0, &[33], vec![0; 34]).clone(),
            "tensor \"u\" of shape [33] has 34 bytes of data, none are expected",
        ),
        (
            GgufWriter::new().metadata("a", OwnedValue::Array(ValueType::U8, vec![OwnedValue::I8(0)])).clone(),
            "metadata key \"a\" is an array with an element of type i8",
        ),
    ];
    for (file, expected) in cases {
        assert_eq!(file.to_bytes().expect_err(expected).to_string(), expected);
    }
}
