//! Elementwise operations: gated activations, residual sums, scaling.
//!
//! All are computed element by element, so their bits depend on nothing but the element; with the exponential of
//! `simd.rs` and no fused operation outside it, they are the same on every instruction set, too.

use crate::compute::Compute;
use crate::simd::{Kernel, LANES, Simd, dispatch, exp_nonpositive};

/// Elements are shared among threads in pieces of this many.
const ELEMENTS_PER_TASK: usize = 8 * 1024;

/// `gate_i <- gate_i * sigmoid(gate_i) * up_i`, the SwiGLU of Shazeer 2020.
///
/// # Panics
/// If `gate` and `up` differ in length.
pub fn silu_mul(compute: &Compute, gate: &mut [f32], up: &[f32]) {
    gated(compute, gate, up, Gate::Silu);
}

/// `gate_i <- gelu(gate_i) * up_i` with the tanh form of Hendrycks and Gimpel 2016,
/// `gelu(x) = x/2 (1 + tanh(u))`, `u = sqrt(2/pi) (x + 0.044715 x^3)`.
///
/// # Panics
/// If `gate` and `up` differ in length.
pub fn gelu_tanh_mul(compute: &Compute, gate: &mut [f32], up: &[f32]) {
    gated(compute, gate, up, Gate::GeluTanh);
}

/// `x_i <- x_i + y_i`.
///
/// # Panics
/// If `x` and `y` differ in length.
pub fn add(compute: &Compute, x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len(), "x and y must have one length");
    compute.threads.for_each_chunk(x, ELEMENTS_PER_TASK, |index, x| {
        let y = &y[index * ELEMENTS_PER_TASK..][..x.len()];
        x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
    });
}

/// `x_i <- x_i * factor`.
pub fn scale(compute: &Compute, x: &mut [f32], factor: f32) {
    compute.threads.for_each_chunk(x, ELEMENTS_PER_TASK, |_, x| x.iter_mut().for_each(|x| *x *= factor));
}

/// Which function of the gate.
#[derive(Clone, Copy)]
enum Gate {
    Silu,
    GeluTanh,
}

fn gated(compute: &Compute, gate: &mut [f32], up: &[f32], kind: Gate) {
    assert_eq!(gate.len(), up.len(), "gate and up must have one length");
    compute.threads.for_each_chunk(gate, ELEMENTS_PER_TASK, |index, gate| {
        let up = &up[index * ELEMENTS_PER_TASK..][..gate.len()];
        dispatch(compute.isa, Gated { gate, up, kind });
    });
}

struct Gated<'a> {
    gate: &'a mut [f32],
    up: &'a [f32],
    kind: Gate,
}

impl Kernel for Gated<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (gates, gates_rest) = self.gate.as_chunks_mut::<LANES>();
        let (ups, ups_rest) = self.up.as_chunks::<LANES>();
        for (gate, up) in gates.iter_mut().zip(ups) {
            let y = gate_vector(s, s.load(gate), s.load(up), self.kind);
            s.store(gate, y);
        }
        if !gates_rest.is_empty() {
            let y = gate_vector(s, s.load_partial(gates_rest), s.load_partial(ups_rest), self.kind);
            s.store_partial(gates_rest, y);
        }
    }
}

/// `x sigmoid(z) up` with `z = x` (SiLU) or `z = 2u` (GELU: `(1 + tanh u) / 2 = sigmoid(2u)`, without the cancellation of
/// `1 + tanh u` for negative `u`).
#[inline(always)]
fn gate_vector<S: Simd>(s: S, x: S::V, up: S::V, kind: Gate) -> S::V {
    let z = match kind {
        Gate::Silu => x,
        Gate::GeluTanh => {
            // 2 sqrt(2/pi) and 2 sqrt(2/pi) 0.044715.
            let cubic = s.mul(s.mul(x, x), s.splat(0.071_354_82));
            s.mul(x, s.add(cubic, s.splat(1.595_769)))
        }
    };
    // sigmoid(z) = 1 / (1 + e^-z) = e^z / (1 + e^z): whichever does not overflow.
    let (zero, one) = (s.splat(0.0), s.splat(1.0));
    let negated = s.sub(zero, z);
    let e = exp_nonpositive(s, s.select_lt(z, zero, z, negated));
    let numerator = s.select_lt(z, zero, e, one);
    s.mul(s.div(s.mul(x, numerator), s.add(one, e)), up)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;
    use std::num::NonZeroUsize;

    /// A few roundings; below `FLUSHED` the exponential is 0.
    const TOLERANCE: f64 = 6e-7;
    const FLUSHED: f64 = 1e-35;

    fn compute(isa: Isa) -> Compute {
        Compute::new(isa, NonZeroUsize::new(2).unwrap())
    }

    #[test]
    fn gates_equal_the_f64_oracle_and_each_other_on_every_isa() {
        let gate: Vec<f32> = (-60_000..60_001).map(|i| i as f32 / 500.0).collect();
        let up: Vec<f32> = (0..gate.len()).map(|i| ((i % 17) as f32 - 8.5) / 4.0).collect();
        let silu = |x: f64| x / (1.0 + (-x).exp());
        // tanh in the form without cancellation, so that the oracle is exact for negative x as well.
        let gelu =
            |x: f64| x / (1.0 + (-2.0 * (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).exp());
        struct Case<'a> {
            oracle: &'a dyn Fn(f64) -> f64,
            kernel: fn(&Compute, &mut [f32], &[f32]),
            tolerance: fn(f64) -> f64,
        }
        // In the tails of SiLU the error of the exponential grows with x; in those of GELU the rounding of z (up to 87) is
        // what its exponential magnifies.
        let cases = [
            Case { oracle: &silu, kernel: silu_mul, tolerance: |x| TOLERANCE + 8e-8 * x.abs() },
            Case { oracle: &gelu, kernel: gelu_tanh_mul, tolerance: |_| 3e-5 },
        ];
        for Case { oracle, kernel, tolerance } in cases {
            let mut reference = gate.clone();
            kernel(&compute(Isa::SCALAR), &mut reference, &up);
            for ((x, up), got) in gate.iter().zip(&up).zip(&reference) {
                let want = oracle(f64::from(*x)) * f64::from(*up);
                let most = tolerance(f64::from(*x)) * want.abs() + FLUSHED;
                assert!((f64::from(*got) - want).abs() <= most, "{x}: {got} {want}");
            }
            for isa in Isa::available() {
                let mut got = gate.clone();
                kernel(&compute(isa), &mut got, &up);
                assert!(got.iter().zip(&reference).all(|(a, b)| a.to_bits() == b.to_bits()), "{isa}");
            }
        }
    }

    #[test]
    fn gates_of_infinities_and_nan() {
        for isa in Isa::available() {
            let mut x = [f32::INFINITY, f32::NAN, 0.0, -1e30];
            silu_mul(&compute(isa), &mut x, &[1.0; 4]);
            assert_eq!((x[0], x[2], x[3]), (f32::INFINITY, 0.0, 0.0), "{isa}");
            assert!(x[1].is_nan());
        }
    }

    #[test]
    fn add_and_scale() {
        let compute = compute(Isa::detect());
        let mut x: Vec<f32> = (0..20_000).map(|i| i as f32).collect();
        let y = vec![0.5; x.len()];
        add(&compute, &mut x, &y);
        scale(&compute, &mut x, 2.0);
        assert!(x.iter().enumerate().all(|(i, &x)| x == 2.0 * i as f32 + 1.0));
    }
}
