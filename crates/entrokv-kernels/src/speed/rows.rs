//! What else is on a token's path: norms, rotations, gates, rounding of activations.

use super::numbers::noises;
use super::{Bound, Case, KernelSpeed, median};
use crate::activation::{add, gelu_tanh_mul, silu_mul};
use crate::activations::{Activations, Arithmetic};
use crate::compute::Compute;
use crate::norm::RmsNorm;
use crate::rope::{RopeAngles, RopeLayout, rope};
use crate::weight_type::WeightType;

/// Tokens and elements of a row: a chunk of a prompt of a small model, in the caches of two cores.
const TOKENS: usize = 128;
const COLS: usize = 1536;
/// Elements of a rotated head.
const HEAD_DIM: usize = 64;

/// Every kernel on `[128, 1536]`.
pub(super) fn cases() -> impl Iterator<Item = Case> {
    let cases: [Case; 7] = [
        Box::new(norm),
        Box::new(rounding),
        Box::new(|compute| rotation(compute, "rope, halves", RopeLayout::Halves)),
        Box::new(|compute| rotation(compute, "rope, interleaved", RopeLayout::Interleaved)),
        Box::new(|compute| gate("silu_mul", |gate, zeros| silu_mul(compute, gate, zeros))),
        Box::new(|compute| gate("gelu_tanh_mul", |gate, zeros| gelu_tanh_mul(compute, gate, zeros))),
        Box::new(sum),
    ];
    cases.into_iter()
}

/// Times `run`, which reads or writes the rows `passes` times.
fn timed(kernel: &str, passes: usize, run: impl FnMut()) -> KernelSpeed {
    KernelSpeed {
        kernel: kernel.to_owned(),
        shape: format!("{TOKENS} x {COLS}"),
        time: median(run),
        bytes: (passes * TOKENS * COLS * size_of::<f32>()) as u64,
        operations: 0,
        bound: Bound::Caches,
    }
}

fn norm(compute: &Compute) -> KernelSpeed {
    let (x, zeros, weight) = (noises(TOKENS * COLS), vec![0.0; TOKENS * COLS], vec![1.0; COLS]);
    let (mut sums, mut input) = (x.clone(), Activations::for_weights(Arithmetic::Int8, [WeightType::Q8_0]));
    let norm = RmsNorm { weight: &weight, eps: 1e-5 };
    let speed = timed("add, rms_norm, to int8", 3, || norm.load_sum(compute, &mut sums, &zeros, &mut input));
    assert_eq!((sums, input.num_tokens()), (x, TOKENS), "anything plus 0");
    speed
}

fn rounding(compute: &Compute) -> KernelSpeed {
    let x = noises(TOKENS * COLS);
    let mut input = Activations::for_weights(Arithmetic::Int8, [WeightType::Q8_0]);
    let speed = timed("activations to int8", 1, || input.load(compute, &x, COLS));
    assert_eq!(input.num_tokens(), TOKENS);
    speed
}

fn rotation(compute: &Compute, name: &str, layout: RopeLayout) -> KernelSpeed {
    let x = noises(TOKENS * COLS);
    let positions: Vec<u32> = (0..TOKENS as u32).collect();
    let frequencies: Vec<f64> = (0..HEAD_DIM / 2).map(|i| 1e4f64.powf(-2.0 * i as f64 / HEAD_DIM as f64)).collect();
    let angles = RopeAngles::new(&positions, &frequencies);
    let mut rotated = x.clone();
    let speed = timed(name, 2, || rope(compute, &mut rotated, HEAD_DIM, &angles, layout));
    let size = |x: &[f32]| x.iter().map(|x| f64::from(x * x)).sum::<f64>();
    assert!((size(&rotated) / size(&x) - 1.0).abs() < 1e-4, "rotation keeps lengths");
    speed
}

fn gate(name: &str, mut run: impl FnMut(&mut [f32], &[f32])) -> KernelSpeed {
    let (mut gate, zeros) = (noises(TOKENS * COLS), vec![0.0; TOKENS * COLS]);
    let speed = timed(name, 3, || run(&mut gate, &zeros));
    assert!(gate.iter().all(|&x| x == 0.0), "anything times 0");
    speed
}

fn sum(compute: &Compute) -> KernelSpeed {
    let (x, zeros) = (noises(TOKENS * COLS), vec![0.0; TOKENS * COLS]);
    let mut sum = x.clone();
    let speed = timed("add", 3, || add(compute, &mut sum, &zeros));
    assert_eq!(sum, x, "anything plus 0");
    speed
}
