//! Why gates were refused.

use std::io;
use std::path::PathBuf;

use entrokv_kernels::matrix::MatrixError;
use safetensors::SafeTensorError;

/// Why gates were refused: a line that names the file, the tensor, what it is and what it should be.
#[derive(Debug, thiserror::Error)]
pub enum GatesError {
    /// A policy of gates that was given no file.
    #[error("the policy has no gates: it needs gates=FILE")]
    NoFile,
    /// A file that cannot be read.
    #[error("gates {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// A file of another format.
    #[error("gates {}: not a safetensors file: {source}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// The reader's reason.
        source: SafeTensorError,
    },
    /// A tensor that the model's gates need.
    #[error("gates {}: tensor '{name}' is missing; the model needs it with shape {wanted}", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Its shape.
        wanted: String,
    },
    /// A tensor of another shape than the model's.
    #[error("gates {}: tensor '{name}' has shape {got:?}, the model needs {wanted}", path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Its shape.
        got: Vec<usize>,
        /// The shape it should have.
        wanted: String,
    },
    /// A tensor whose elements are none of the float types.
    #[error("gates {}: tensor '{name}' is {got}, wanted F32, F16 or BF16", path.display())]
    Dtype {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Its type.
        got: String,
    },
    /// An element that is no number.
    #[error("gates {}: tensor '{name}' holds {got} at element {element}, wanted finite numbers", path.display())]
    NotFinite {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// The value.
        got: f32,
        /// Its place.
        element: usize,
    },
    /// A tensor that no gate of the model would use: the file is another model's, or another kind of gate.
    #[error("gates {}: tensor '{name}' is none of those gates of {num_layers} layers have", path.display())]
    Unexpected {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Layers of the model.
        num_layers: usize,
    },
    /// A table of heads with a line too few or too many: another model's.
    #[error("head table {}: {got} lines, the model has {wanted} layers", path.display())]
    TableLayers {
        /// The file.
        path: PathBuf,
        /// Its lines.
        got: usize,
        /// Layers of the model.
        wanted: usize,
    },
    /// A line of another number of heads.
    #[error("head table {}: layer {layer} has {got} numbers, the model has {wanted} KV heads", path.display())]
    TableHeads {
        /// The file.
        path: PathBuf,
        /// The layer.
        layer: usize,
        /// Its numbers.
        got: usize,
        /// KV heads of the model.
        wanted: usize,
    },
    /// An entry that is no number.
    #[error("head table {}: layer {layer}, KV head {kv_head} is `{got}`, wanted a finite number", path.display())]
    TableNumber {
        /// The file.
        path: PathBuf,
        /// The layer.
        layer: usize,
        /// The KV head.
        kv_head: usize,
        /// The entry.
        got: String,
    },
    /// A matrix that cannot be packed.
    #[error("gates {}: tensor '{name}': {source}", path.display())]
    Pack {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// The kernels' reason.
        source: MatrixError,
    },
}
