//! How fast the kernels are here, beside what the machine can do: `entrokv bench --kernels`.
//!
//! Every row is one kernel on one shape, timed on the real code path, and its answer is checked before its time counts. A
//! kernel is held against its bound: the read bandwidth where it streams more bytes than the caches hold, the rate of its
//! dot-product instruction where operands are used many times. Both are measured in the same run ([`Machine::measure`]).

mod attending;
mod machine;
mod numbers;
mod products;
mod rows;

use std::time::{Duration, Instant};

pub use machine::Machine;

use crate::compute::Compute;

/// How often a kernel runs; the median counts.
const RUNS: usize = 7;

/// One kernel, timed.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelSpeed {
    /// What was run: `matmul Q4_K`, `attention f16`, ...
    pub kernel: String,
    /// On what: rows, columns, tokens.
    pub shape: String,
    /// Median wall time of a run.
    pub time: Duration,
    /// Bytes that a run must read from memory (weights, pages) or, for what stays in the caches, reads and writes.
    pub bytes: u64,
    /// Multiplications and additions of a run; 0 where they are not the point.
    pub operations: u64,
    /// What bounds it.
    pub bound: Bound,
}

/// What a kernel cannot be faster than.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// Reading its operands from memory.
    Memory,
    /// 8-bit dot products.
    Int8,
    /// bf16 dot products, f32 ones where the instruction set has none.
    Bf16,
    /// f32 multiply-adds.
    F32,
    /// Reading codes from memory, or 8-bit dot products of them: whichever takes longer.
    Codes,
    /// Nothing of these: operands are in the caches, or conversions and exponentials rule.
    Caches,
}

impl KernelSpeed {
    /// 10^9 bytes a second.
    pub fn gb_per_s(&self) -> f64 {
        self.bytes as f64 * 1e-9 / self.time.as_secs_f64()
    }

    /// 10^9 operations a second.
    pub fn gop_per_s(&self) -> f64 {
        self.operations as f64 * 1e-9 / self.time.as_secs_f64()
    }

    /// The share of its bound that it reaches on `machine`; `None` where it has none.
    pub fn share(&self, machine: &Machine) -> Option<f64> {
        match self.bound {
            Bound::Memory => Some(self.gb_per_s() / machine.read_gb_per_s),
            Bound::Int8 => Some(self.gop_per_s() / machine.int8_gop_per_s),
            Bound::Bf16 => Some(self.gop_per_s() / machine.bf16_gop_per_s.unwrap_or(machine.f32_gop_per_s)),
            Bound::F32 => Some(self.gop_per_s() / machine.f32_gop_per_s),
            Bound::Codes => {
                Some((self.gb_per_s() / machine.read_gb_per_s).max(self.gop_per_s() / machine.int8_gop_per_s))
            }
            Bound::Caches => None,
        }
    }
}

impl Bound {
    /// Its name in tables and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Bound::Memory => "memory",
            Bound::Int8 => "int8",
            Bound::Bf16 => "bf16",
            Bound::F32 => "f32",
            Bound::Codes => "codes",
            Bound::Caches => "caches",
        }
    }
}

/// A kernel on a shape, ready to be timed.
pub type Case = Box<dyn Fn(&Compute) -> KernelSpeed>;

/// Every kernel, in the order of a table.
///
/// A case panics if its kernel's answer is wrong: a speed without an answer is not one.
pub fn cases() -> Vec<Case> {
    products::cases().chain(attending::cases()).chain(rows::cases()).collect()
}

/// Median wall time of `run` after one run to warm up.
fn median(mut run: impl FnMut()) -> Duration {
    run();
    let mut times: Vec<Duration> = (0..RUNS)
        .map(|_| {
            let start = Instant::now();
            run();
            start.elapsed()
        })
        .collect();
    times.sort();
    times[RUNS / 2]
}
