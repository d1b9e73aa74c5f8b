//! The gate of KVzap: a linear map, or a network of one hidden layer.

use entrokv_kernels::compute::Compute;

use super::GateSizes;
use super::error::GatesError;
use super::file::{Dim, GateFile};
use super::linear::{Linear, inputs};

/// `f(x)` with one output a KV head (Jegou and Jeblick 2026): `W x + b`, or `W_2 gelu(W_1 x + b_1) + b_2` with the exact GELU.
#[derive(Debug)]
pub(super) enum KvzapGate {
    /// `layers.N.weight`, `layers.N.bias`; or `module_list.N` in place of `layers.N`.
    Linear(Linear),
    /// `layers.N.0.*` and `layers.N.2.*`; 512 wide where published.
    Mlp {
        /// `[width, hidden]`.
        inner: Linear,
        /// `[num_kv_heads, width]`.
        outer: Linear,
    },
}

impl KvzapGate {
    pub(super) fn load(file: &mut GateFile<'_>, stem: &str, sizes: GateSizes) -> Result<Self, GatesError> {
        let (heads, inner) = (Dim::Is(sizes.num_kv_heads), format!("{stem}.0"));
        if !file.has(&format!("{inner}.weight")) {
            return Linear::load(file, stem, heads, sizes.hidden).map(Self::Linear);
        }
        let inner = Linear::load(file, &inner, Dim::Any, sizes.hidden)?;
        let outer = Linear::load(file, &format!("{stem}.2"), heads, inner.num_outputs())?;
        Ok(Self::Mlp { inner, outer })
    }

    /// `[tokens, num_kv_heads]`.
    pub(super) fn scores(&self, compute: &Compute, x: &[f32]) -> Vec<f32> {
        match self {
            Self::Linear(map) => map.of(compute, &inputs(compute, x, map.num_inputs())),
            Self::Mlp { inner, outer } => {
                let mut wide = inner.of(compute, &inputs(compute, x, inner.num_inputs()));
                compute.threads.for_each_chunk(&mut wide, outer.num_inputs(), |_, row| row.iter_mut().for_each(gelu));
                outer.of(compute, &inputs(compute, &wide, outer.num_inputs()))
            }
        }
    }
}

/// `x (1 + erf(x / sqrt 2)) / 2`: not its approximation by tanh.
fn gelu(x: &mut f32) {
    let wide = f64::from(*x);
    *x = (0.5 * wide * (1.0 + libm::erf(wide * std::f64::consts::FRAC_1_SQRT_2))) as f32;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gelu_is_the_exact_one() {
        // x Phi(x) from tables of the normal distribution; the approximation by tanh gives 0.84119 for 1.
        for (x, expected) in [(0.0, 0.0), (1.0, 0.841_344_8), (-1.0, -0.158_655_3), (2.0, 1.954_499_7), (-40.0, 0.0)] {
            let mut y = x;
            gelu(&mut y);
            assert!((y - expected).abs() <= 1e-7, "{x}: {y} for {expected}");
        }
    }
}
