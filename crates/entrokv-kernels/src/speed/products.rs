//! Matrix products: one token over more weights than the caches hold, and 512 tokens.

use super::numbers::{noise, noises};
use super::{Bound, Case, KernelSpeed, median};
use crate::activations::{Activations, Arithmetic};
use crate::compute::Compute;
use crate::dequantize::dequantize;
use crate::matmul::matmul;
use crate::matrix::{Matrix, WeightMemory};
use crate::weight_type::WeightType;

/// Columns of every matrix.
const COLS: usize = 1536;

/// Bytes of the weights that one token passes: more than a desktop's caches hold.
const DECODE_BYTES: usize = 96 << 20;

/// Rows and tokens of a prompt's products.
const PREFILL_ROWS: usize = 1536;
const PREFILL_TOKENS: usize = 512;

/// Relative error of a whole product whose activations were rounded to 8 bits, as the tests of the products explain.
const TOLERANCE: f64 = 0.0065;

/// Every type, one token and many.
pub(super) fn cases() -> impl Iterator<Item = Case> {
    WeightType::ALL.into_iter().flat_map(|ty| {
        let row_bytes = ty.row_bytes(COLS).expect("whole blocks of every type");
        [(DECODE_BYTES / row_bytes, 1), (PREFILL_ROWS, PREFILL_TOKENS)].map(|(rows, tokens)| -> Case {
            Box::new(move |compute| {
                let bytes = weights(ty, rows, row_bytes);
                let w = Matrix::pack(compute, &mut WeightMemory::new(), ty, rows, COLS, &bytes)
                    .expect("memory for a matrix of the benchmark");
                product(compute, &w, &bytes, tokens)
            })
        })
    })
}

fn product(compute: &Compute, w: &Matrix, bytes: &[u8], tokens: usize) -> KernelSpeed {
    let x = noises(tokens * COLS);
    let mut activations = Activations::new(Arithmetic::Int8);
    let mut out = vec![0.0; tokens * w.rows()];
    let time = median(|| {
        activations.load(compute, &x, COLS);
        matmul(compute, w, &activations, &mut out);
    });
    check(w, bytes, &x, &out);
    let bound = match (tokens, w.weight_type().is_quantised()) {
        (1, _) => Bound::Memory,
        (_, true) => Bound::Int8,
        (_, false) => Bound::F32,
    };
    KernelSpeed {
        kernel: format!("matmul {}", w.weight_type()),
        shape: format!("{tokens} x {COLS} -> {}", w.rows()),
        time,
        bytes: w.held_bytes() as u64,
        operations: (2 * tokens * COLS * w.rows()) as u64,
        bound,
    }
}

/// Holds some rows of the first and last token against f64.
fn check(w: &Matrix, bytes: &[u8], x: &[f32], out: &[f32]) {
    let row_bytes = bytes.len() / w.rows();
    let (mut error, mut size) = (0.0, 0.0);
    for row in (0..w.rows()).step_by(w.rows() / 61) {
        let mut weights = vec![0.0; COLS];
        dequantize(w.weight_type(), &bytes[row * row_bytes..][..row_bytes], &mut weights);
        for token in [0, x.len() / COLS - 1] {
            let x = &x[token * COLS..][..COLS];
            let expected: f64 = weights.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum();
            error += (f64::from(out[token * w.rows() + row]) - expected).powi(2);
            size += expected.powi(2);
        }
    }
    let relative = (error / size).sqrt();
    assert!(relative <= TOLERANCE, "{}: relative error {relative}", w.weight_type());
}

/// Seeded weights of about unit size in file order: 64 different rows, over and over.
fn weights(ty: WeightType, rows: usize, row_bytes: usize) -> Vec<u8> {
    let period = 64.min(rows) * row_bytes;
    let mut bytes = Vec::with_capacity(rows * row_bytes);
    let mut seed = 0;
    let mut next = || {
        seed += 1;
        noise(seed)
    };
    while bytes.len() < period {
        let start = bytes.len();
        match ty {
            WeightType::F32 => bytes.extend(next().to_le_bytes()),
            WeightType::F16 => bytes.extend(half::f16::from_f32(next()).to_le_bytes()),
            WeightType::Bf16 => bytes.extend(half::bf16::from_f32(next()).to_le_bytes()),
            _ => bytes.extend((0..ty.block_bytes()).map(|_| next().to_bits() as u8)),
        }
        // Where a block's f16 scale and minimum lie; codes and small scales may be anything.
        let (scale, min): (Option<usize>, Option<usize>) = match ty {
            WeightType::F32 | WeightType::F16 | WeightType::Bf16 => (None, None),
            WeightType::Q4_0 | WeightType::Q5_0 | WeightType::Q8_0 => (Some(0), None),
            WeightType::Q4_1 | WeightType::Q5_1 | WeightType::Q4K | WeightType::Q5K => (Some(0), Some(2)),
            WeightType::Q2K => (Some(80), Some(82)),
            WeightType::Q3K => (Some(108), None),
            WeightType::Q6K => (Some(208), None),
        };
        let sign = if ty.block_len() == 256 { 1.0 } else { -1.0 };
        for (at, value) in scale.map(|at| (at, 0.01)).into_iter().chain(min.map(|at| (at, sign * 0.075))) {
            bytes[start + at..][..2].copy_from_slice(&half::f16::from_f32(value).to_le_bytes());
        }
    }
    while bytes.len() < rows * row_bytes {
        let len = bytes.len().min(rows * row_bytes - bytes.len());
        bytes.extend_from_within(..len);
    }
    bytes
}
