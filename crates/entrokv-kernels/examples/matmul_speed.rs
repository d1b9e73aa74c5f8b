//! How fast the matrix products are, type by type, beside what memory and a naive loop can do.
//!
//! ```text
//! cargo run --release -p entrokv-kernels --example matmul_speed -- [ISA] [THREADS] [TYPE]
//! ```
//!
//! `decode` multiplies one token with a matrix larger than any cache: packed gigabytes read per second, to be held
//! against `read`, a sum over the same number of bytes. The other columns multiply 512 tokens with matrices of the shapes
//! that small models have (rows x columns): thousands of millions of additions and multiplications per second and thread.
//! `naive` is dequantising row by row and adding up in f32, one token. `pack` is gigabytes of the file packed per second.
//! The best of several runs counts, and every answer is checked against f64. One thread is timed by its CPU time, so that
//! a busy machine does not matter; several are timed by the clock.

#![expect(clippy::print_stdout, reason = "a program that prints a table")]

use std::error::Error;
use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use entrokv_kernels::activations::{Activations, Arithmetic};
use entrokv_kernels::compute::Compute;
use entrokv_kernels::dequantize::dequantize;
use entrokv_kernels::isa::Isa;
use entrokv_kernels::matmul::matmul;
use entrokv_kernels::matrix::{Matrix, WeightMemory};
use entrokv_kernels::weight_type::WeightType;

/// Shape for decoding: 37 MB at 4 bits a weight.
const DECODE: (usize, usize) = (48 * 1024, 1536);
/// Shapes (rows, columns) for reading a prompt. Those of 576 columns are of SmolLM2-135M, which K types cannot have.
const PREFILL: [(usize, usize); 8] =
    [(576, 576), (192, 576), (1536, 576), (576, 1536), (1536, 1536), (256, 1536), (8960, 1536), (1536, 8960)];
/// Tokens of a prompt.
const TOKENS: usize = 512;
const RUNS: usize = 15;

/// Relative error of a whole product, activations rounded to int8: the 0.6 % that the tests of the products explain.
const TOLERANCE: f64 = 0.0065;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let isa = arguments.next().map_or(Ok(Isa::detect()), |name| Isa::named(&name))?;
    let threads = arguments.next().map_or(Ok(2), |n| n.parse())?;
    let only = arguments.next();
    let compute = Compute::new(isa, NonZeroUsize::new(threads).ok_or("at least one thread")?);

    println!(
        "{isa}, {threads} threads, read {:.1} GB/s, rounding {:.2} G activations/s and thread",
        read_bandwidth(&compute),
        rounding(&compute)
    );
    print!("{:<6} {:>7} {:>7} {:>7}", "type", "decode", "naive", "pack");
    PREFILL.iter().for_each(|(rows, cols)| print!(" {:>9}", format!("{rows}x{cols}")));
    println!();
    for ty in WeightType::ALL.into_iter().filter(|ty| only.as_deref().is_none_or(|name| name == ty.name())) {
        let (rows, cols) = DECODE;
        let bytes = weights(ty, rows * cols);
        let start = Time::now(&compute);
        let w = Matrix::pack(&compute, &mut WeightMemory::new(), ty, rows, cols, &bytes)?;
        let pack = bytes.len() as f64 / start.elapsed().as_secs_f64() * 1e-9;
        let decode = w.held_bytes() as f64 / best_seconds(&compute, &w, &bytes, 1) * 1e-9;
        print!("{:<6} {decode:>7.1} {:>7.2} {pack:>7.2}", ty.name(), naive(ty, cols, &bytes[..bytes.len() / 64]));
        for (rows, cols) in PREFILL {
            if !cols.is_multiple_of(ty.block_len()) {
                print!(" {:>9}", "-");
                continue;
            }
            let bytes = &bytes[..ty.row_bytes(cols).ok_or("whole blocks")? * rows];
            let w = Matrix::pack(&compute, &mut WeightMemory::new(), ty, rows, cols, bytes)?;
            let operations = (2 * cols * rows * TOKENS) as f64;
            print!(" {:>9.0}", operations / best_seconds(&compute, &w, bytes, TOKENS) * 1e-9 / threads as f64);
        }
        println!();
    }
    Ok(())
}

/// A point in time: of this thread's CPU clock where it alone works, else of the wall's.
enum Time {
    Thread(Duration),
    Wall(Instant),
}

impl Time {
    fn now(compute: &Compute) -> Time {
        match (compute.threads.num_threads(), thread_time()) {
            (1, Some(time)) => Time::Thread(time),
            _ => Time::Wall(Instant::now()),
        }
    }

    fn elapsed(&self) -> Duration {
        match self {
            Time::Thread(start) => thread_time().unwrap_or_default().saturating_sub(*start),
            Time::Wall(start) => start.elapsed(),
        }
    }
}

/// CPU time that this thread has used.
#[cfg(unix)]
fn thread_time() -> Option<Duration> {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Some(Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32))
}

#[cfg(not(unix))]
fn thread_time() -> Option<Duration> {
    None
}

/// Activations rounded per second and thread, in thousands of millions.
fn rounding(compute: &Compute) -> f64 {
    let (tokens, cols) = (TOKENS, 1536);
    let x: Vec<f32> = (0..tokens * cols).map(|i| noise(i as u32)).collect();
    let mut activations = Activations::for_weights(Arithmetic::Int8, [WeightType::Q4_1]);
    let best = (0..4 * RUNS)
        .map(|_| {
            let start = Time::now(compute);
            activations.load(compute, &x, cols);
            start.elapsed()
        })
        .min();
    x.len() as f64 * 1e-9 / best.unwrap_or_default().as_secs_f64() / compute.threads.num_threads() as f64
}

/// Seconds of the fastest of several products, whose answer is checked.
fn best_seconds(compute: &Compute, w: &Matrix, bytes: &[u8], tokens: usize) -> f64 {
    let x: Vec<f32> = (0..tokens * w.cols()).map(|i| noise(i as u32) * 2.0).collect();
    let mut activations = Activations::new(Arithmetic::Int8);
    activations.load(compute, &x, w.cols());
    let mut out = vec![0.0; tokens * w.rows()];
    let mut best = f64::INFINITY;
    for _ in 0..RUNS {
        let start = Time::now(compute);
        matmul(compute, w, &activations, &mut out);
        best = best.min(start.elapsed().as_secs_f64());
    }
    check(w, bytes, &x, &out);
    best
}

/// Holds some rows of the first and last token against f64.
fn check(w: &Matrix, bytes: &[u8], x: &[f32], out: &[f32]) {
    let row_bytes = bytes.len() / w.rows();
    let (mut error, mut size) = (0.0, 0.0);
    for row in (0..w.rows()).step_by(w.rows().div_ceil(61)) {
        let mut weights = vec![0.0; w.cols()];
        dequantize(w.weight_type(), &bytes[row * row_bytes..][..row_bytes], &mut weights);
        for token in [0, x.len() / w.cols() - 1] {
            let x = &x[token * w.cols()..][..w.cols()];
            let expected: f64 = weights.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum();
            error += (f64::from(out[token * w.rows() + row]) - expected).powi(2);
            size += expected.powi(2);
        }
    }
    let relative = (error / size).sqrt();
    assert!(relative <= TOLERANCE, "{}: relative error {relative}", w.weight_type());
}

/// The naive product of one token, in gigabytes of the file per second.
fn naive(ty: WeightType, cols: usize, bytes: &[u8]) -> f64 {
    let x: Vec<f32> = (0..cols).map(|i| noise(i as u32)).collect();
    let mut weights = vec![0.0; cols];
    let start = Instant::now();
    let mut total = 0.0;
    for row in bytes.chunks_exact(ty.row_bytes(cols).expect("whole blocks")) {
        dequantize(ty, row, &mut weights);
        total += weights.iter().zip(&x).map(|(w, x)| w * x).sum::<f32>();
    }
    let seconds = start.elapsed().as_secs_f64();
    assert!(total.is_finite());
    bytes.len() as f64 / seconds * 1e-9
}

/// Gigabytes per second that all threads together read and add up, of more than any cache holds.
fn read_bandwidth(compute: &Compute) -> f64 {
    const CHUNK: usize = 1 << 17;
    let words = vec![1u64; 1 << 24];
    let mut sums = vec![0u64; words.len() / CHUNK];
    let mut best = f64::INFINITY;
    for _ in 0..RUNS {
        let start = Instant::now();
        compute.threads.for_each_chunk(&mut sums, 1, |index, sum| {
            sum[0] = words[index * CHUNK..][..CHUNK].iter().fold(0, |sum, &word| sum.wrapping_add(word));
        });
        best = best.min(start.elapsed().as_secs_f64());
    }
    assert_eq!(sums.iter().sum::<u64>(), words.len() as u64);
    words.len() as f64 * 8e-9 / best
}

/// Seeded weights of about unit size in file order.
fn weights(ty: WeightType, len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len / ty.block_len() * ty.block_bytes());
    let mut seed = 1;
    let mut next = || {
        seed += 1;
        seed
    };
    for _ in 0..len / ty.block_len() {
        let start = bytes.len();
        match ty {
            WeightType::F32 => bytes.extend(noise(next()).to_le_bytes()),
            WeightType::F16 => bytes.extend(half::f16::from_f32(noise(next())).to_le_bytes()),
            WeightType::Bf16 => bytes.extend(half::bf16::from_f32(noise(next())).to_le_bytes()),
            _ => bytes.extend((0..ty.block_bytes()).map(|_| noise(next()).to_bits() as u8)),
        }
        let (d, m): (&[usize], &[usize]) = match ty {
            WeightType::F32 | WeightType::F16 | WeightType::Bf16 => (&[], &[]),
            WeightType::Q4_0 | WeightType::Q5_0 | WeightType::Q8_0 => (&[0], &[]),
            WeightType::Q4_1 | WeightType::Q5_1 | WeightType::Q4K | WeightType::Q5K => (&[0], &[2]),
            WeightType::Q2K => (&[80], &[82]),
            WeightType::Q3K => (&[108], &[]),
            WeightType::Q6K => (&[208], &[]),
        };
        let sign = if ty.block_len() == 256 { 1.0 } else { -1.0 };
        for (at, value) in d.iter().map(|at| (at, 0.01)).chain(m.iter().map(|at| (at, sign * 0.075))) {
            bytes[start + at..][..2].copy_from_slice(&half::f16::from_f32(value).to_le_bytes());
        }
    }
    bytes
}

/// A hash of `i` spread over [-0.5, 0.5).
fn noise(i: u32) -> f32 {
    let z = (i ^ (i >> 16)).wrapping_mul(0x7feb_352d);
    let z = (z ^ (z >> 15)).wrapping_mul(0x846c_a68b);
    (z ^ (z >> 16)) as f32 / 4_294_967_296.0 - 0.5
}
