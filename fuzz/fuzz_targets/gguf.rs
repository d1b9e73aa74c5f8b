//! Any bytes are either refused with one line or a model that can be read to its last byte.
//!
//! From this folder's parent:
//! ```text
//! cargo run --release --manifest-path fuzz/Cargo.toml --example seeds
//! cargo +nightly fuzz run gguf -- -max_total_time=600 -max_len=16384 -malloc_limit_mb=64 -rss_limit_mb=1024
//! ```
//! The limit on a single allocation is part of the test: whatever a header of a few kilobytes claims, nothing of the
//! size it claims may be asked for.
#![no_main]

use entrokv::gguf::{Gguf, Value};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    match Gguf::from_bytes(bytes.to_vec()) {
        Err(error) => assert!(!error.to_string().contains('\n'), "more than one line: {error}"),
        Ok(model) => read_everything(&model, bytes.len()),
    }
});

/// Touches every value and every tensor, and holds them against the length of the file.
fn read_everything(model: &Gguf, file_bytes: usize) {
    let metadata = model.metadata();
    for (key, value) in metadata.iter() {
        assert_eq!(metadata.get(key).map(|v| v.to_string()), Some(value.to_string()));
        if let Value::Array(array) = value {
            assert_eq!(array.iter().count(), array.len());
        }
        // Every getter either converts or says why not; none of them panics.
        let _ = (metadata.str(key), metadata.bool(key), metadata.u32(key), metadata.u64(key), metadata.f32(key));
        let _ = (metadata.strings(key), metadata.byte_strings(key), metadata.f32s(key));
        let _ = (metadata.i32s(key), metadata.u32s(key));
    }
    let mut held = 0;
    for tensor in model.tensors() {
        let row_bytes = tensor.weight_type.row_bytes(tensor.cols()).expect("the reader refuses partial blocks");
        assert_eq!(tensor.data.len(), tensor.rows() * row_bytes);
        assert_eq!(model.tensor(tensor.name).map(|t| t.data.as_ptr()), Some(tensor.data.as_ptr()));
        held += tensor.data.len();
    }
    assert!(held <= file_bytes, "tensors of {held} bytes in a file of {file_bytes}: they overlap");
}
