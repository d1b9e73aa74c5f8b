//! Matrix products: every weight type on every instruction set against an f64 oracle of the dequantised weights, and the
//! promise that bits do not depend on batch, threads or instruction set.

use std::num::NonZeroUsize;

use entrokv_kernels::activations::{Activations, Arithmetic};
use entrokv_kernels::compute::Compute;
use entrokv_kernels::dequantize::dequantize;
use entrokv_kernels::isa::Isa;
use entrokv_kernels::matmul::{matmul, matmul_each};
use entrokv_kernels::matrix::{Matrix, MatrixError, WeightMemory};
use entrokv_kernels::weight_type::WeightType;

/// Allowed error of a sum, in units of 2^-24 of the sum of its terms' magnitudes, per 32 columns of it. A unit of 16 or
/// 32 columns costs at most three roundings; the terms of types with minima cancel, so that what is rounded exceeds the
/// magnitudes that the oracle adds up, hence not 6 but 16.
const ROUNDINGS_PER_STEP: f64 = 16.0;

/// Error that rounding normally distributed activations to int8 may cause, as a fraction of the root mean square of the
/// exact products. The step is max|x| / 127 with max about 2.45 sigma (rms) in 32 columns, rounded up to 4 significant bits,
/// which makes it 5 % larger (rms); its error is step / sqrt(12) = 0.0058, the same for every type, as weights are not
/// rounded.
const INT8_RELATIVE_ERROR: f64 = 0.0065;

/// splitmix64.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In [0, 1).
    fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn normal(&mut self) -> f32 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        (radius * (std::f64::consts::TAU * self.uniform()).cos()) as f32
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.bits() % limit as u64) as usize
    }
}

/// Offsets of the f16 fields in a block.
fn f16_fields(ty: WeightType) -> &'static [usize] {
    match ty {
        WeightType::F32 | WeightType::Bf16 => &[],
        WeightType::F16 | WeightType::Q4_0 | WeightType::Q5_0 | WeightType::Q8_0 => &[0],
        WeightType::Q4_1 | WeightType::Q5_1 | WeightType::Q4K | WeightType::Q5K => &[0, 2],
        WeightType::Q2K => &[80, 82],
        WeightType::Q3K => &[108],
        WeightType::Q6K => &[208],
    }
}

/// How large the weights are.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Scale {
    Sane,
    /// f16 denormals.
    Tiny,
    /// The greatest f16.
    Huge,
    Zero,
}

/// Rows of random weights in file order.
fn random_weights(random: &mut Random, ty: WeightType, rows: usize, cols: usize, scale: Scale) -> Vec<u8> {
    let blocks = rows * (cols / ty.block_len());
    let mut bytes = Vec::with_capacity(blocks * ty.block_bytes());
    for _ in 0..blocks {
        let value = match scale {
            Scale::Sane => random.normal() * 0.02,
            Scale::Tiny => f32::from_bits(0x3300_0000 + random.below(0x0200_0000) as u32),
            Scale::Huge => 65_504.0,
            Scale::Zero => 0.0,
        };
        match ty {
            WeightType::F32 => bytes.extend(value.to_le_bytes()),
            WeightType::Bf16 => bytes.extend(half::bf16::from_f32(value).to_le_bytes()),
            _ => {
                let start = bytes.len();
                bytes.extend((0..ty.block_bytes()).map(|_| random.bits() as u8));
                for (index, field) in f16_fields(ty).iter().enumerate() {
                    // A minimum that centres the codes, as real files have it.
                    let value = if index == 0 { value } else { (value * -7.5).max(-65_504.0) };
                    let value = if matches!(ty, WeightType::Q2K | WeightType::Q4K | WeightType::Q5K) {
                        value.abs() / 16.0
                    } else {
                        value
                    };
                    bytes[start + field..][..2].copy_from_slice(&half::f16::from_f32(value).to_le_bytes());
                }
            }
        }
    }
    bytes
}

fn normals(random: &mut Random, len: usize) -> Vec<f32> {
    (0..len).map(|_| random.normal()).collect()
}

fn compute(isa: Isa, threads: usize) -> Compute {
    Compute::new(isa, NonZeroUsize::new(threads).expect("not zero"))
}

fn product(compute: &Compute, arithmetic: Arithmetic, w: &Matrix, x: &[f32]) -> Vec<f32> {
    let mut activations = Activations::new(arithmetic);
    activations.load(compute, x, w.cols());
    let mut out = vec![f32::NAN; activations.num_tokens() * w.rows()];
    matmul(compute, w, &activations, &mut out);
    out
}

/// What the int8 path sees instead of `x`: multiples of max|x| / 127, rounded up to 4 significant bits, per 32 columns.
fn rounded(x: &[f32], cols: usize) -> Vec<f64> {
    let mut out = Vec::with_capacity(x.len());
    for row in x.chunks(cols) {
        for step in row.chunks(32) {
            let max = step.iter().fold(0.0, |max: f32, x| max.max(x.abs()));
            let scale = f32::from_bits(((max / 127.0).to_bits() + 0xf_ffff) & !0xf_ffff);
            for x in step {
                let code = if scale > 0.0 { (x * (1.0 / scale)).round_ties_even() } else { 0.0 };
                out.push(f64::from(code) * f64::from(scale));
            }
        }
    }
    out
}

/// Sums and sums of magnitudes [tokens, rows] in f64.
fn oracle(weights: &[f32], x: &[f64], rows: usize, cols: usize) -> Vec<(f64, f64)> {
    let mut out = Vec::new();
    for x in x.chunks(cols) {
        for row in weights.chunks(cols).take(rows) {
            let terms = row.iter().zip(x).map(|(&w, &x)| f64::from(w) * x);
            out.push(terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs())));
        }
    }
    out
}

struct Case {
    ty: WeightType,
    rows: usize,
    cols: usize,
    tokens: usize,
    scale: Scale,
}

/// A matrix in memory of its own.
fn pack(compute: &Compute, ty: WeightType, rows: usize, cols: usize, bytes: &[u8]) -> Result<Matrix, MatrixError> {
    Matrix::pack(compute, &mut WeightMemory::new(), ty, rows, cols, bytes)
}

/// Shapes with every remainder: rows of partial tiles, panels of 1 to 8 tokens and more, stretches of more than 1,024
/// columns, and for float types columns that are no multiple of anything.
fn cases(random: &mut Random) -> Vec<Case> {
    let mut cases = Vec::new();
    for ty in WeightType::ALL {
        let blocks = |n: usize| if ty.block_len() == 1 { n * 37 - 3 } else { n * ty.block_len() };
        for tokens in 1..=9 {
            cases.push(Case {
                ty,
                rows: 1 + random.below(40),
                cols: blocks(1 + tokens % 3),
                tokens,
                scale: Scale::Sane,
            });
        }
        let long = if ty.block_len() == 256 { 1280 + 256 * random.below(4) } else { 1056 + 32 * random.below(40) };
        cases.push(Case { ty, rows: 17, cols: long, tokens: 1, scale: Scale::Sane });
        cases.push(Case { ty, rows: 16, cols: long, tokens: 19, scale: Scale::Sane });
        cases.push(Case { ty, rows: 5, cols: blocks(2), tokens: 600, scale: Scale::Sane });
        for scale in [Scale::Tiny, Scale::Huge, Scale::Zero] {
            cases.push(Case { ty, rows: 3, cols: blocks(3), tokens: 1, scale });
            cases.push(Case { ty, rows: 18, cols: blocks(1), tokens: 3, scale });
        }
    }
    cases
}

#[test]
fn every_type_on_every_isa_equals_the_oracle_and_each_other() {
    let mut random = Random(7);
    let mut failures = Vec::new();
    for Case { ty, rows, cols, tokens, scale } in cases(&mut random) {
        let bytes = random_weights(&mut random, ty, rows, cols, scale);
        let x = normals(&mut random, tokens * cols);
        let mut weights = vec![0.0; rows * cols];
        dequantize(ty, &bytes, &mut weights);
        let exact: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
        for arithmetic in [Arithmetic::Int8, Arithmetic::F32] {
            let is_rounded = arithmetic == Arithmetic::Int8 && ty.is_quantised();
            let expected = oracle(&weights, &if is_rounded { rounded(&x, cols) } else { exact.clone() }, rows, cols);
            let mut first: Option<Vec<f32>> = None;
            for isa in Isa::available() {
                let name = format!("{ty} {rows}x{cols}, {tokens} tokens, {scale:?}, {arithmetic:?}, {isa}");
                let compute = compute(isa, 1);
                let w = pack(&compute, ty, rows, cols, &bytes).expect("a valid matrix");
                let got = product(&compute, arithmetic, &w, &x);
                for (at, (&got, (sum, size))) in got.iter().zip(&expected).enumerate() {
                    let tolerance = ROUNDINGS_PER_STEP * (cols.div_ceil(32) as f64) * size * 2f64.powi(-24);
                    let error = (f64::from(got) - sum).abs();
                    if error.is_nan() || error > tolerance {
                        failures.push(format!("{name}: [{at}] is {got}, expected {sum} within {tolerance:e}"));
                        break;
                    }
                }
                match &first {
                    None => first = Some(got),
                    Some(first) if !same_bits(first, &got) => failures.push(format!("{name}: other bits than scalar")),
                    Some(_) => {}
                }
            }
        }
    }
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn bits_depend_on_neither_batch_nor_threads_nor_place() {
    let mut random = Random(11);
    for ty in WeightType::ALL {
        let (rows, cols, tokens) = (70, if ty.block_len() == 1 { 300 } else { 1536 }, 21);
        let bytes = random_weights(&mut random, ty, rows, cols, Scale::Sane);
        let x = normals(&mut random, tokens * cols);
        for arithmetic in [Arithmetic::Int8, Arithmetic::F32] {
            for isa in Isa::available() {
                let one = compute(isa, 1);
                let w = pack(&one, ty, rows, cols, &bytes).expect("a valid matrix");
                let together = product(&one, arithmetic, &w, &x);
                for threads in [2, 3] {
                    let several = compute(isa, threads);
                    let w = pack(&several, ty, rows, cols, &bytes).expect("a valid matrix");
                    assert!(
                        same_bits(&product(&several, arithmetic, &w, &x), &together),
                        "{ty} {isa} {threads} threads"
                    );
                }
                for chunk in [1, 2, 5, 8, 13] {
                    let apart: Vec<f32> =
                        x.chunks(chunk * cols).flat_map(|x| product(&one, arithmetic, &w, x)).collect();
                    assert!(same_bits(&apart, &together), "{ty} {isa} {arithmetic:?} {chunk} at a time");
                }
            }
        }
    }
}

#[test]
fn products_with_several_matrices_are_those_with_each() {
    let mut random = Random(17);
    for threads in [1, 2] {
        let compute = compute(Isa::detect(), threads);
        for tokens in [1, 11] {
            let cols = 512;
            let x = normals(&mut random, tokens * cols);
            let shapes = [(WeightType::Q4K, 100), (WeightType::F16, 3), (WeightType::Q6K, 40)];
            let matrices = shapes.map(|(ty, rows)| {
                let bytes = random_weights(&mut random, ty, rows, cols, Scale::Sane);
                pack(&compute, ty, rows, cols, &bytes).expect("a valid matrix")
            });
            let mut activations = Activations::new(Arithmetic::Int8);
            activations.load(&compute, &x, cols);
            let [mut a, mut b, mut c] = matrices.each_ref().map(|w| vec![f32::NAN; tokens * w.rows()]);
            let [first, second, third] = &matrices;
            let products = [(first, &mut a[..]), (second, &mut b[..]), (third, &mut c[..])];
            matmul_each(&compute, &activations, products);
            for (w, got) in matrices.iter().zip([a, b, c]) {
                assert!(same_bits(&got, &product(&compute, Arithmetic::Int8, w, &x)), "{}", w.weight_type());
            }
        }
    }
}

#[test]
fn int8_activations_cost_six_tenths_of_a_percent_whatever_the_type() {
    let mut random = Random(3);
    for ty in WeightType::ALL.into_iter().filter(|ty| ty.is_quantised()) {
        let (rows, cols, tokens) = (64, 1024, 8);
        let bytes = random_weights(&mut random, ty, rows, cols, Scale::Sane);
        let x = normals(&mut random, tokens * cols);
        let compute = compute(Isa::detect(), 1);
        let w = pack(&compute, ty, rows, cols, &bytes).expect("a valid matrix");
        let rounded = product(&compute, Arithmetic::Int8, &w, &x);
        let exact = product(&compute, Arithmetic::F32, &w, &x);
        let square = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>();
        let error = square(&mut rounded.iter().zip(&exact).map(|(a, b)| a - b));
        let relative = (error / square(&mut exact.iter().copied())).sqrt();
        assert!(relative <= INT8_RELATIVE_ERROR, "{ty}: {relative}");
        println!("{ty}: int8 activations change products by {:.3} % (rms)", relative * 100.0);
    }
}

#[test]
fn rows_come_back_as_the_files_bytes_dequantise() {
    let mut random = Random(5);
    for ty in WeightType::ALL {
        for scale in [Scale::Sane, Scale::Tiny, Scale::Huge, Scale::Zero] {
            let (rows, cols) = (37, if ty.block_len() == 1 { 51 } else { 2 * ty.block_len() });
            let bytes = random_weights(&mut random, ty, rows, cols, scale);
            let mut expected = vec![0.0; rows * cols];
            dequantize(ty, &bytes, &mut expected);
            let w = pack(&compute(Isa::detect(), 2), ty, rows, cols, &bytes).expect("a valid matrix");
            for (row, expected) in expected.chunks(cols).enumerate() {
                let mut got = vec![f32::NAN; cols];
                w.dequantize_row(row, &mut got);
                assert!(same_bits(&got, expected), "{ty} {scale:?} row {row}");
            }
        }
    }
}

#[test]
fn zeros_give_zero_and_bad_activations_nan() {
    let mut random = Random(13);
    for isa in Isa::available() {
        for ty in WeightType::ALL {
            let (rows, cols) = (20, 512);
            let compute = compute(isa, 1);
            let bytes = random_weights(&mut random, ty, rows, cols, Scale::Sane);
            let w = pack(&compute, ty, rows, cols, &bytes).expect("a valid matrix");
            let mut x = vec![0.0; 3 * cols];
            assert!(product(&compute, Arithmetic::Int8, &w, &x).iter().all(|&y| y == 0.0), "{ty} {isa}");
            x[cols + 40] = f32::NAN;
            let y = product(&compute, Arithmetic::Int8, &w, &x);
            // Only the token that has it.
            let nan: Vec<bool> = y.chunks(rows).map(|y| y.iter().all(|y| y.is_nan())).collect();
            assert_eq!(nan, [false, true, false], "{ty} {isa}");
            assert!(y[..rows].iter().chain(&y[2 * rows..]).all(|&y| y == 0.0), "{ty} {isa}");
        }
    }
}

#[test]
fn a_scale_that_is_not_finite_spoils_its_row_alone() {
    let mut random = Random(19);
    for ty in WeightType::ALL.into_iter().filter(|ty| ty.is_quantised()) {
        for bad in [half::f16::INFINITY, half::f16::NEG_INFINITY, half::f16::NAN] {
            let (rows, cols, bad_row) = (35, 512, 20);
            let mut bytes = random_weights(&mut random, ty, rows, cols, Scale::Sane);
            let row_bytes = bytes.len() / rows;
            bytes[bad_row * row_bytes + f16_fields(ty)[0]..][..2].copy_from_slice(&bad.to_le_bytes());
            let x = normals(&mut random, 9 * cols);
            let mut first: Option<Vec<f32>> = None;
            for isa in Isa::available() {
                let compute = compute(isa, 1);
                let w = pack(&compute, ty, rows, cols, &bytes).expect("a valid matrix");
                let y = product(&compute, Arithmetic::Int8, &w, &x);
                for (at, y) in y.iter().enumerate() {
                    assert_eq!(y.is_finite(), at % rows != bad_row, "{ty} {isa} {bad} [{at}]");
                }
                assert!(first.as_ref().is_none_or(|first| same_bits(first, &y)), "{ty} {isa} {bad}");
                first = Some(y);
            }
        }
    }
}

#[test]
fn bad_matrices_are_refused_with_figures() {
    let compute = compute(Isa::SCALAR, 1);
    let error = |ty, rows, cols, len: usize| pack(&compute, ty, rows, cols, &vec![0; len]).unwrap_err();
    assert!(matches!(error(WeightType::F32, 0, 4, 0), MatrixError::Empty { rows: 0, cols: 4 }));
    let partial = error(WeightType::Q4K, 2, 576, 0);
    assert!(matches!(partial, MatrixError::PartialBlock { cols: 576, block_len: 256, .. }));
    assert_eq!(partial.to_string(), "576 columns are not a multiple of the 256 that a block of Q4_K holds");
    let length = error(WeightType::Q8_0, 2, 64, 135);
    assert!(matches!(length, MatrixError::WrongLength { got: 135, expected: 136, .. }));
    assert!(matches!(error(WeightType::F16, usize::MAX, 2, 0), MatrixError::TooLarge { .. }));
}

#[test]
fn packed_weights_hold_little_more_than_the_file() {
    let compute = compute(Isa::detect(), 1);
    for ty in WeightType::ALL {
        let (rows, cols) = (160, 2048);
        let file_bytes = rows * ty.row_bytes(cols).expect("whole blocks");
        let w = pack(&compute, ty, rows, cols, &vec![0; file_bytes]).expect("a valid matrix");
        let per_block = w.held_bytes() as f64 / (rows * cols / ty.block_len()) as f64;
        let expected = match ty {
            WeightType::Q2K => 100.0,
            WeightType::Q3K => 114.0,
            WeightType::Q4K => 148.0,
            WeightType::Q5K => 180.0,
            _ => ty.block_bytes() as f64,
        };
        assert_eq!(per_block, expected, "{ty}");
    }
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan())
}
