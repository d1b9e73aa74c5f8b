//! A linear map of a layer's input.

use entrokv_kernels::activations::{Activations, Arithmetic};
use entrokv_kernels::compute::Compute;
use entrokv_kernels::matmul::matmul;
use entrokv_kernels::matrix::Matrix;
use entrokv_kernels::weight_type::WeightType;

use super::error::GatesError;
use super::file::{Dim, GateFile};

/// `y = W x + b`.
#[derive(Debug)]
pub(super) struct Linear {
    /// `[out, in]`.
    matrix: Matrix,
    /// `[out]`.
    bias: Option<Vec<f32>>,
}

impl Linear {
    /// `stem.weight` and `stem.bias`, of `rows` outputs.
    pub(super) fn load(file: &mut GateFile<'_>, stem: &str, rows: Dim, cols: usize) -> Result<Self, GatesError> {
        let map = Self::without_bias(file, stem, rows, cols)?;
        let bias = file.values(&format!("{stem}.bias"), &[Dim::Is(map.num_outputs())])?;
        Ok(Self { bias: Some(bias), ..map })
    }

    /// `stem.weight` alone.
    pub(super) fn without_bias(
        file: &mut GateFile<'_>,
        stem: &str,
        rows: Dim,
        cols: usize,
    ) -> Result<Self, GatesError> {
        Ok(Self { matrix: file.matrix(&format!("{stem}.weight"), rows, cols)?, bias: None })
    }

    /// Elements of an output.
    pub(super) fn num_outputs(&self) -> usize {
        self.matrix.rows()
    }

    /// Elements of an input.
    pub(super) fn num_inputs(&self) -> usize {
        self.matrix.cols()
    }

    /// The map of every row of `x`: `[tokens, out]`.
    pub(super) fn of(&self, compute: &Compute, x: &Activations) -> Vec<f32> {
        let mut out = vec![0.0; x.num_tokens() * self.num_outputs()];
        matmul(compute, &self.matrix, x, &mut out);
        if let Some(bias) = &self.bias {
            for row in out.chunks_exact_mut(bias.len()) {
                row.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
            }
        }
        out
    }
}

/// `x` `[tokens, cols]` for maps: unrounded, since the weights are floats.
pub(super) fn inputs(compute: &Compute, x: &[f32], cols: usize) -> Activations {
    let mut inputs = Activations::for_weights(Arithmetic::F32, [WeightType::F32, WeightType::F16, WeightType::Bf16]);
    inputs.load(compute, x, cols);
    inputs
}
