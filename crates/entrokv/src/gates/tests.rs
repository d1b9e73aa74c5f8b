//! Gates against an independent numpy implementation, and files that are refused.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use entrokv_kernels::isa::Isa;
use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::{TensorView, serialize_to_file};
use serde_json::Value;

use super::*;

/// A tensor of a file that a test writes.
#[derive(Clone)]
struct Written {
    name: String,
    shape: Vec<usize>,
    dtype: Dtype,
    bytes: Vec<u8>,
}

fn tensor(name: &str, shape: &[usize], values: &[f32]) -> Written {
    let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    Written { name: name.to_owned(), shape: shape.to_vec(), dtype: Dtype::F32, bytes }
}

/// The numbers of nested lists, and the lengths of the lists.
pub(super) fn array(value: &Value) -> (Vec<usize>, Vec<f32>) {
    match value {
        Value::Array(items) => {
            let inner: Vec<(Vec<usize>, Vec<f32>)> = items.iter().map(array).collect();
            let shape = std::iter::once(items.len()).chain(inner[0].0.iter().copied()).collect();
            (shape, inner.into_iter().flat_map(|(_, values)| values).collect())
        }
        number => (Vec::new(), vec![number.as_f64().unwrap() as f32]),
    }
}

pub(super) fn golden(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../entrokv-cache/tests/golden/policies");
    serde_json::from_str(&fs::read_to_string(path.join(format!("{name}.json"))).unwrap()).unwrap()
}

/// A layer of the golden tensors: 2 KV heads, 3 query heads for each.
const SIZES: GateSizes = GateSizes { hidden: 24, num_kv_heads: 2, group_size: 3 };

fn compute(threads: usize) -> Compute {
    Compute::new(Isa::detect(), NonZeroUsize::new(threads).unwrap())
}

fn write(dir: &Path, tensors: &[Written]) -> PathBuf {
    let path = dir.join("gates.safetensors");
    let views = tensors.iter().map(|tensor| {
        (tensor.name.as_str(), TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.bytes).unwrap())
    });
    serialize_to_file(views, None, &path).unwrap();
    path
}

fn read(tap: GateTap, tensors: &[Written]) -> Result<Gates, GatesError> {
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), tensors);
    Gates::read(tap, Some(&path), &[LayerKind::Window(8), LayerKind::Global], SIZES, &compute(1))
}

/// The tensors of a gate of the second layer, whose names and numbers are in a golden file.
fn fast_kvzip() -> Vec<Written> {
    let gate = &golden("fast-kvzip")["gate"];
    let tensors = [
        ("q_proj.weight", "wq"),
        ("q_proj.bias", "bq"),
        ("k_proj.weight", "wk"),
        ("q_norm.weight", "query_gain"),
        ("k_norm.weight", "key_gain"),
        ("k_base", "base"),
        ("b", "bias"),
    ];
    let of = |(name, key): (&str, &str)| {
        let (mut shape, values) = array(&gate[key]);
        if matches!(name, "k_base" | "b") {
            shape.insert(1, 1);
        }
        tensor(&format!("layers.1.{name}"), &shape, &values)
    };
    tensors.map(of).to_vec()
}

fn kvzap(form: &str) -> Vec<Written> {
    let gate = &golden("kvzap")["gate"][form];
    let tensors: &[(&str, &str)] = match form {
        "linear" => &[("weight", "weight"), ("bias", "bias")],
        _ => &[("0.weight", "weight_in"), ("0.bias", "bias_in"), ("2.weight", "weight_out"), ("2.bias", "bias_out")],
    };
    let of = |(name, key): &(&str, &str)| {
        let (shape, values) = array(&gate[*key]);
        tensor(&format!("layers.1.{name}"), &shape, &values)
    };
    tensors.iter().map(of).collect()
}

#[test]
fn gates_say_what_the_reference_says() {
    let (shape, x) = array(&golden("inputs")["x"]);
    assert_eq!(shape, [46, SIZES.hidden]);
    let cases = [
        (GateTap::FastKvzip, fast_kvzip(), "fast-kvzip", "gate"),
        (GateTap::Kvzap, kvzap("linear"), "kvzap", "linear"),
        (GateTap::Kvzap, kvzap("mlp"), "kvzap", "mlp"),
    ];
    for (tap, tensors, file, name) in cases {
        let gates = read(tap, &tensors).unwrap();
        assert_eq!((gates.input(0), gates.input(1)), (GateInput::None, GateInput::Normed));
        let scores = gates.scores(&compute(1), 1, &x);
        let case = golden(file)["cases"].as_array().unwrap().iter().find(|case| case["name"] == name).unwrap().clone();
        let mut compared = 0;
        for (head, expected) in case["scores"].as_array().unwrap().iter().enumerate() {
            for (token, expected) in expected.as_array().unwrap().iter().enumerate() {
                let Some(expected) = expected.as_f64() else { continue };
                let got = f64::from(scores[token * SIZES.num_kv_heads + head]);
                assert!((got - expected).abs() <= 2e-6 * expected.abs().max(1.0), "{name}: {got} for {expected}");
                compared += 1;
            }
        }
        assert!(compared > 60, "{name}: {compared}");
        // A token's score is its own affair.
        for (threads, tokens) in [(3, 46), (1, 1), (2, 7)] {
            let pieces: Vec<f32> =
                x.chunks(tokens * SIZES.hidden).flat_map(|x| gates.scores(&compute(threads), 1, x)).collect();
            let bits = |scores: &[f32]| -> Vec<u32> { scores.iter().map(|score| score.to_bits()).collect() };
            assert_eq!(bits(&pieces), bits(&scores), "{name}, {threads} threads, {tokens} tokens at a time");
        }
    }
}

#[test]
fn either_name_of_the_list_of_modules_is_read() {
    let (_, x) = array(&golden("inputs")["x"]);
    for form in ["linear", "mlp"] {
        let expected = read(GateTap::Kvzap, &kvzap(form)).unwrap().scores(&compute(1), 1, &x);
        let mut tensors = kvzap(form);
        for tensor in &mut tensors {
            tensor.name = tensor.name.replace("layers.", "module_list.");
        }
        assert_eq!(read(GateTap::Kvzap, &tensors).unwrap().scores(&compute(1), 1, &x), expected, "{form}");
        // One of them, not both; and FastKVzip's have one name.
        let line = read(GateTap::FastKvzip, &tensors).unwrap_err().to_string();
        assert!(line.contains("'layers.1.q_norm.weight' is missing"), "{line}");
        tensors[1].name = kvzap(form)[1].name.clone();
        let line = read(GateTap::Kvzap, &tensors).unwrap_err().to_string();
        assert!(line.contains("tensor 'module_list.1.") && line.contains("is missing"), "{line}");
    }
}

#[test]
fn halves_are_read_as_what_they_are() {
    let (_, x) = array(&golden("inputs")["x"]);
    let full = read(GateTap::Kvzap, &kvzap("linear")).unwrap().scores(&compute(1), 1, &x);
    let narrow = |dtype: Dtype, narrow: fn(f32) -> [u8; 2]| {
        let mut tensors = kvzap("linear");
        for tensor in &mut tensors {
            tensor.dtype = dtype;
            let values = tensor.bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
            tensor.bytes = values.flat_map(narrow).collect();
        }
        read(GateTap::Kvzap, &tensors).unwrap().scores(&compute(1), 1, &x)
    };
    let largest = full.iter().fold(0.0_f32, |largest, score| largest.max(score.abs()));
    for (scores, tolerance) in [
        (narrow(Dtype::F16, |x| f16::from_f32(x).to_le_bytes()), 1e-3),
        (narrow(Dtype::BF16, |x| bf16::from_f32(x).to_le_bytes()), 1e-2),
    ] {
        let distance = scores.iter().zip(&full).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(distance > 0.0 && distance <= tolerance * largest, "{distance} of {largest}");
    }
}

#[test]
fn what_does_not_fit_the_model_is_refused_in_one_line() {
    let renamed = |mut tensors: Vec<Written>, from: &str, to: &str| {
        tensors.iter_mut().filter(|tensor| tensor.name == from).for_each(|tensor| tensor.name = to.to_owned());
        tensors
    };
    let reshaped = |mut tensors: Vec<Written>, name: &str, shape: &[usize]| {
        let place = tensors.iter().position(|tensor| tensor.name == name).unwrap();
        tensors[place] = tensor(name, shape, &vec![0.5; shape.iter().product()]);
        tensors
    };
    let typed = |mut tensors: Vec<Written>| {
        tensors[1].dtype = Dtype::I32;
        tensors
    };
    let spoilt = |mut tensors: Vec<Written>| {
        tensors[1].bytes[4..8].copy_from_slice(&f32::NAN.to_le_bytes());
        tensors
    };
    let with = |mut tensors: Vec<Written>, more: Written| {
        tensors.push(more);
        tensors
    };
    let (linear, mlp) = (kvzap("linear"), kvzap("mlp"));
    let cases = [
        (
            GateTap::Kvzap,
            renamed(linear.clone(), "layers.1.bias", "layers.2.bias"),
            "tensor 'layers.1.bias' is missing; the model needs it with shape [2]",
        ),
        (
            GateTap::Kvzap,
            reshaped(linear.clone(), "layers.1.weight", &[3, 24]),
            "tensor 'layers.1.weight' has shape [3, 24], the model needs [2, 24]",
        ),
        (
            GateTap::Kvzap,
            reshaped(mlp.clone(), "layers.1.0.weight", &[12, 32]),
            "tensor 'layers.1.0.weight' has shape [12, 32], the model needs [any, 24]",
        ),
        (
            GateTap::Kvzap,
            reshaped(mlp, "layers.1.2.weight", &[2, 13]),
            "tensor 'layers.1.2.weight' has shape [2, 13], the model needs [2, 12]",
        ),
        (GateTap::Kvzap, typed(linear.clone()), "tensor 'layers.1.bias' is I32, wanted F32, F16 or BF16"),
        (
            GateTap::Kvzap,
            spoilt(linear.clone()),
            "tensor 'layers.1.bias' holds NaN at element 1, wanted finite numbers",
        ),
        (
            GateTap::Kvzap,
            with(linear.clone(), tensor("layers.2.weight", &[2, 24], &[0.0; 48])),
            "tensor 'layers.2.weight' is none of those gates of 2 layers have",
        ),
        (GateTap::FastKvzip, linear, "tensor 'layers.1.q_norm.weight' is missing; the model needs it with shape [any]"),
        (
            GateTap::FastKvzip,
            reshaped(fast_kvzip(), "layers.1.k_base", &[2, 3, 4]),
            "tensor 'layers.1.k_base' has shape [2, 3, 4], the model needs [2, 1, any, 4]",
        ),
        (
            GateTap::FastKvzip,
            reshaped(fast_kvzip(), "layers.1.b", &[2, 1, 2]),
            "tensor 'layers.1.b' has shape [2, 1, 2], the model needs [2, 1, 3]",
        ),
        (
            GateTap::FastKvzip,
            reshaped(fast_kvzip(), "layers.1.q_proj.weight", &[16, 24]),
            "tensor 'layers.1.q_proj.weight' has shape [16, 24], the model needs [24, 24]",
        ),
    ];
    for (tap, tensors, expected) in cases {
        let line = read(tap, &tensors).unwrap_err().to_string();
        let (file, line) = line.split_once(": ").unwrap();
        assert!(file.starts_with("gates ") && file.ends_with("gates.safetensors"), "{file}");
        assert_eq!(line, expected);
    }
    // What layers of windows have is left alone.
    let more = with(kvzap("linear"), tensor("layers.0.weight", &[1], &[0.0]));
    assert!(read(GateTap::Kvzap, &more).is_ok());
}

#[test]
fn what_is_no_such_file_is_refused_in_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), &kvzap("linear"));
    let refused = |path: Option<&Path>| {
        let gates = Gates::read(GateTap::Kvzap, path, &[LayerKind::Global], SIZES, &compute(1));
        gates.unwrap_err().to_string()
    };
    let whole = fs::read(&path).unwrap();
    for bytes in [&whole[..whole.len() - 1], &whole[..40], &whole[..0], b"not a gate"] {
        fs::write(&path, bytes).unwrap();
        let line = refused(Some(&path));
        assert!(line.contains("gates.safetensors: not a safetensors file: ") && !line.contains('\n'), "{line}");
    }
    let line = refused(Some(&dir.path().join("none")));
    assert!(line.contains("No such file"), "{line}");
    assert_eq!(refused(None), "the policy has no gates: it needs gates=FILE");
}

#[test]
fn a_table_of_another_model_is_refused_in_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pattern.tsv");
    let read = |text: &str| {
        fs::write(&path, text).unwrap();
        Gates::read(GateTap::HeadTable, Some(&path), &[LayerKind::Window(8), LayerKind::Global], SIZES, &compute(1))
    };
    let cases = [
        ("0.1\t0.2\n", "1 lines, the model has 2 layers"),
        ("0.1\t0.2\n0.3\t0.4\n0.5\t0.6\n", "3 lines, the model has 2 layers"),
        ("0.1\t0.2\n0.3\n", "layer 1 has 1 numbers, the model has 2 KV heads"),
        ("0.1\t0.2\n0.3\thigh\n", "layer 1, KV head 1 is `high`, wanted a finite number"),
        ("0.1\tinf\n0.3\t0.4\n", "layer 0, KV head 1 is `inf`, wanted a finite number"),
    ];
    for (text, expected) in cases {
        let line = read(text).unwrap_err().to_string();
        assert_eq!(line, format!("head table {}: {expected}", path.display()));
    }
    // Layers of windows have no gates; what is beyond 0 to 1 counts as the end it is beyond.
    let Some(HeadGates::Given(gates)) = read("0.1 0.2\n -0.5\t1.5\n").unwrap().heads() else { panic!("given") };
    assert_eq!(gates, [0.0, 1.0]);
}
