//! A weight as the file describes it: name, type, shape, and where its bytes lie.

use std::ops::Range;

use entrokv_kernels::weight_type::WeightType;

use super::{
    cursor::Cursor,
    error::{FormatError, HeaderProblem},
};

/// The most dimensions that the format knows.
const MAX_DIMS: usize = 4;

/// One tensor of a model file.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    /// The name by which the architecture knows it, such as `blk.0.attn_q.weight`.
    pub name: &'a str,
    /// How its elements are encoded.
    pub weight_type: WeightType,
    /// Its dimensions, the fastest first: `[cols]`, `[cols, rows]` and so on; none is zero.
    pub shape: &'a [u64],
    /// Its rows one after the other, each `weight_type.row_bytes(cols)` long.
    pub data: &'a [u8],
}

impl Tensor<'_> {
    /// Elements in a row: the input features of a weight matrix.
    pub fn cols(&self) -> usize {
        // The reader has checked that all elements fit the file, which fits memory.
        self.shape[0] as usize
    }

    /// How many rows there are, over all other dimensions: the output features of a weight matrix, 1 for a vector.
    pub fn rows(&self) -> usize {
        self.shape[1..].iter().product::<u64>() as usize
    }
}

/// A tensor's entry in the header.
#[derive(Clone, Debug)]
pub(super) struct TensorInfo {
    pub(super) name: Box<str>,
    pub(super) weight_type: WeightType,
    shape: [u64; MAX_DIMS],
    num_dims: usize,
    /// From the start of the data section, unchecked.
    pub(super) offset: u64,
    /// Bytes of all rows.
    pub(super) num_bytes: u64,
    /// The bytes within the file, once they are known to lie in it.
    pub(super) data: Range<usize>,
}

impl TensorInfo {
    /// Bytes of the smallest entry: an empty name, one dimension, the type and the offset.
    pub(super) const MIN_BYTES: u64 = 8 + 4 + 8 + 4 + 8;

    /// Reads entry `index` of `count` and checks everything that needs no other entry.
    pub(super) fn read(cursor: &mut Cursor<'_>, index: u64, count: u64) -> Result<Self, FormatError> {
        let place = || format!("tensor {} of {count}", index + 1);
        let name = cursor.name("its name").map_err(|problem| FormatError::Header { place: place(), problem })?;
        let tensor = || name.to_owned();
        let cut = |problem: HeaderProblem| FormatError::Header {
            place: format!("{} ({})", place(), super::error::Text(name)),
            problem,
        };

        let num_dims = cursor.u32("its number of dimensions").map_err(cut)?;
        if !(1..=MAX_DIMS as u32).contains(&num_dims) {
            return Err(FormatError::Dimensions { tensor: tensor(), got: num_dims });
        }
        let num_dims = num_dims as usize;
        let mut shape = [1; MAX_DIMS];
        for dim in &mut shape[..num_dims] {
            *dim = cursor.u64("a dimension").map_err(cut)?;
        }
        let type_id = cursor.u32("its type").map_err(cut)?;
        let offset = cursor.u64("its offset").map_err(cut)?;

        let weight_type = WeightType::from_ggml(type_id)
            .ok_or_else(|| FormatError::UnsupportedTensorType { tensor: tensor(), id: type_id })?;
        let impossible = || FormatError::Shape { tensor: tensor(), shape: shape[..num_dims].to_vec() };
        if shape.contains(&0) {
            return Err(impossible());
        }
        let [cols, more @ ..] = shape;
        let block_len = weight_type.block_len() as u64;
        if cols % block_len != 0 {
            let type_name = weight_type.name();
            return Err(FormatError::RowLength { tensor: tensor(), type_name, cols, block_len });
        }
        let row_bytes = (cols / block_len).checked_mul(weight_type.block_bytes() as u64);
        let num_bytes = more
            .iter()
            .try_fold(row_bytes.ok_or_else(impossible)?, |bytes, &dim| bytes.checked_mul(dim))
            .ok_or_else(impossible)?;
        Ok(Self { name: name.into(), weight_type, shape, num_dims, offset, num_bytes, data: 0..0 })
    }

    /// The dimensions, the fastest first.
    pub(super) fn shape(&self) -> &[u64] {
        &self.shape[..self.num_dims]
    }
}

/// The tensor types that exist elsewhere: their names, for errors that name what we do not read.
const FOREIGN_TYPES: [(u32, &str); 24] = [
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (31, "Q4_0_4_4"),
    (32, "Q4_0_4_8"),
    (33, "Q4_0_8_8"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (40, "NVFP4"),
    (41, "Q1_0"),
];

/// The name of a tensor type that we do not read, with its number.
pub(super) fn ggml_type_name(id: u32) -> String {
    match FOREIGN_TYPES.iter().find(|(known, _)| *known == id) {
        Some((_, name)) => format!("{name} (number {id})"),
        None => format!("number {id}, which is unknown"),
    }
}
