//! A file of gates, tensor by tensor, each checked against the model before it is used.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use entrokv_kernels::compute::Compute;
use entrokv_kernels::dequantize::dequantize;
use entrokv_kernels::matrix::{Matrix, WeightMemory};
use entrokv_kernels::weight_type::WeightType;
use safetensors::{Dtype, SafeTensors};

use super::error::GatesError;

/// The tensors of a file of gates. All must be taken: one that nobody asked for means that the file is for something else.
pub(super) struct GateFile<'a> {
    path: PathBuf,
    tensors: SafeTensors<'a>,
    compute: &'a Compute,
    memory: WeightMemory,
    /// Names of the tensors not taken yet.
    left: BTreeSet<String>,
}

/// A size of a tensor.
#[derive(Clone, Copy)]
pub(super) enum Dim {
    /// So many.
    Is(usize),
    /// As many as the file has, at least one.
    Any,
}

/// A tensor in the file's own encoding.
struct Elements<'a> {
    shape: Vec<usize>,
    weight_type: WeightType,
    bytes: &'a [u8],
    values: Vec<f32>,
}

impl<'a> GateFile<'a> {
    /// Reads the header in `bytes`, which are those of `path`.
    pub(super) fn parse(path: &Path, bytes: &'a [u8], compute: &'a Compute) -> Result<Self, GatesError> {
        let path = path.to_owned();
        let tensors = match SafeTensors::deserialize(bytes) {
            Ok(tensors) => tensors,
            Err(source) => return Err(GatesError::Format { path, source }),
        };
        let left = tensors.names().into_iter().map(str::to_owned).collect();
        Ok(Self { path, tensors, compute, memory: WeightMemory::new(), left })
    }

    /// Whether there is a tensor of this name.
    pub(super) fn has(&self, name: &str) -> bool {
        self.tensors.tensor(name).is_ok()
    }

    /// Whether there is a tensor whose name begins so.
    pub(super) fn has_any(&self, stem: &str) -> bool {
        self.tensors.names().into_iter().any(|name| name.strip_prefix(stem).is_some_and(|rest| rest.starts_with('.')))
    }

    /// Leaves the tensors of `stem` out, whatever they are.
    pub(super) fn skip(&mut self, stem: &str) {
        self.left.retain(|name| !name.strip_prefix(stem).is_some_and(|rest| rest.starts_with('.')));
    }

    /// The matrix `[rows, cols]` of that name.
    pub(super) fn matrix(&mut self, name: &str, rows: Dim, cols: usize) -> Result<Matrix, GatesError> {
        let Elements { shape, weight_type, bytes, .. } = self.take(name, &[rows, Dim::Is(cols)])?;
        Matrix::pack(self.compute, &mut self.memory, weight_type, shape[0], cols, bytes)
            .map_err(|source| GatesError::Pack { path: self.path.clone(), name: name.to_owned(), source })
    }

    /// All elements of the tensor of that name.
    pub(super) fn values(&mut self, name: &str, shape: &[Dim]) -> Result<Vec<f32>, GatesError> {
        self.take(name, shape).map(|elements| elements.values)
    }

    /// That every tensor was taken.
    pub(super) fn finish(self, num_layers: usize) -> Result<(), GatesError> {
        match self.left.into_iter().next() {
            None => Ok(()),
            Some(name) => Err(GatesError::Unexpected { path: self.path, name, num_layers }),
        }
    }

    fn take(&mut self, name: &str, shape: &[Dim]) -> Result<Elements<'a>, GatesError> {
        let (path, wanted) = (|| self.path.clone(), spelled(shape));
        let Ok(tensor) = self.tensors.tensor(name) else {
            return Err(GatesError::Missing { path: path(), name: name.to_owned(), wanted });
        };
        let fits = |(dim, &got): (&Dim, &usize)| match dim {
            Dim::Is(size) => got == *size,
            Dim::Any => got > 0,
        };
        let got = tensor.shape();
        if got.len() != shape.len() || !shape.iter().zip(got).all(fits) {
            return Err(GatesError::Shape { path: path(), name: name.to_owned(), got: got.to_vec(), wanted });
        }
        let weight_type = match tensor.dtype() {
            Dtype::F32 => WeightType::F32,
            Dtype::F16 => WeightType::F16,
            Dtype::BF16 => WeightType::Bf16,
            other => {
                return Err(GatesError::Dtype { path: path(), name: name.to_owned(), got: format!("{other:?}") });
            }
        };
        let mut values = vec![0.0; got.iter().product()];
        dequantize(weight_type, tensor.data(), &mut values);
        if let Some(element) = values.iter().position(|value| !value.is_finite()) {
            let got = values[element];
            return Err(GatesError::NotFinite { path: path(), name: name.to_owned(), got, element });
        }
        self.left.remove(name);
        Ok(Elements { shape: got.to_vec(), weight_type, bytes: tensor.data(), values })
    }
}

/// A shape in words: `[3, any, 16]`.
fn spelled(shape: &[Dim]) -> String {
    let dims = shape.iter().map(|dim| match dim {
        Dim::Is(size) => size.to_string(),
        Dim::Any => "any".to_owned(),
    });
    format!("[{}]", dims.collect::<Vec<_>>().join(", "))
}
