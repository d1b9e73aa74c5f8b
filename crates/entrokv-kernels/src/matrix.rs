//! Weight matrices, repacked when they are loaded into the order in which the kernels read them.
//!
//! A matrix is cut into *tiles* of 16 rows whose data are interleaved, so that one vector register holds the
//! same columns of 16 rows and a dot product needs no sum across lanes. What that costs and the order of the bytes:
//! `packing`. Nothing is lost: [`Matrix::dequantize_row`] gives back the bits that the file's bytes stand for.

mod memory;
pub(crate) mod packing;

use thiserror::Error;

use crate::compute::Compute;
use crate::dequantize::{BlockFormat, dequantize, with_block_format};
use crate::weight_type::WeightType;

use memory::Memory;
pub use memory::WeightMemory;
use packing::Packing;

/// Rows that a tile interleaves: the f32 lanes of the widest vector.
pub(crate) const TILE_ROWS: usize = 16;

/// What tiles are aligned to.
pub(crate) const CACHE_LINE: usize = 64;

/// The weights of one linear layer, [rows = output features, cols = input features], ready to be multiplied with.
#[derive(Debug)]
pub struct Matrix {
    weight_type: WeightType,
    rows: usize,
    cols: usize,
    /// Bytes of a tile.
    tile_bytes: usize,
    /// Bytes from one tile to the next, a multiple of 64.
    tile_stride: usize,
    memory: Memory,
}

impl Matrix {
    /// Packs `bytes`, `rows` rows of `cols` weights of type `weight_type` as a GGUF file stores them, into `memory`.
    ///
    /// # Errors
    /// [`MatrixError`] when the matrix is empty, `cols` is not a whole number of blocks, `bytes` has another length than
    /// the shape asks for, or the memory cannot be had.
    pub fn pack(
        compute: &Compute,
        memory: &mut WeightMemory,
        weight_type: WeightType,
        rows: usize,
        cols: usize,
        bytes: &[u8],
    ) -> Result<Matrix, MatrixError> {
        if rows == 0 || cols == 0 {
            return Err(MatrixError::Empty { rows, cols });
        }
        let too_large = MatrixError::TooLarge { rows, cols };
        if !cols.is_multiple_of(weight_type.block_len()) {
            return Err(MatrixError::PartialBlock { weight_type, cols, block_len: weight_type.block_len() });
        }
        let Some(row_bytes) = weight_type.row_bytes(cols) else { return Err(too_large) };
        let Some(expected) = row_bytes.checked_mul(rows) else { return Err(too_large) };
        if bytes.len() != expected {
            return Err(MatrixError::WrongLength { weight_type, rows, cols, got: bytes.len(), expected });
        }

        let tile_bytes = with_block_format!(
            weight_type,
            F => (cols / F::BLOCK_LEN).checked_mul(F::BLOCK_PACKED_BYTES),
            else cols.checked_mul(TILE_ROWS * weight_type.block_bytes())
        );
        let tile_stride = tile_bytes.and_then(|bytes| bytes.checked_next_multiple_of(CACHE_LINE));
        let held_bytes = tile_stride.and_then(|stride| stride.checked_mul(rows.div_ceil(TILE_ROWS)));
        let (Some(tile_bytes), Some(tile_stride), Some(held_bytes)) = (tile_bytes, tile_stride, held_bytes) else {
            return Err(too_large);
        };
        let mut memory =
            memory.take(held_bytes).map_err(|source| MatrixError::OutOfMemory { bytes: held_bytes, source })?;

        compute.threads.for_each_chunk(memory.bytes_mut(), tile_stride, |tile, packed| {
            let rows = bytes[tile * TILE_ROWS * row_bytes..].chunks_exact(row_bytes).take(TILE_ROWS);
            for (lane, row) in rows.enumerate() {
                with_block_format!(
                    weight_type,
                    F => packing::put_row::<F>(lane, row, packed),
                    else packing::put_float_row(lane, weight_type.block_bytes(), row, packed)
                );
            }
        });
        Ok(Matrix { weight_type, rows, cols, tile_bytes, tile_stride, memory })
    }

    /// The type its weights came in.
    pub fn weight_type(&self) -> WeightType {
        self.weight_type
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes of memory that the packed weights hold, the padding of the last tile included.
    pub fn held_bytes(&self) -> usize {
        self.memory.bytes().len()
    }

    /// Its packed weights, for [`Threads::read_ahead`](crate::threads::Threads::read_ahead).
    pub fn bytes(&self) -> &[u8] {
        self.memory.bytes()
    }

    /// Writes row `row` as f32: the bits that [`dequantize`] gives for the row's bytes in the file.
    ///
    /// # Panics
    /// If there is no such row or `out` is not [`Matrix::cols`] long.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        assert_eq!(out.len(), self.cols, "a row has as many values as the matrix has columns");
        let (tile, lane) = (self.tile(row / TILE_ROWS), row % TILE_ROWS);
        with_block_format!(
            self.weight_type,
            F => packing::dequantize_lane::<F>(tile, lane, out),
            else {
                let width = self.weight_type.block_bytes();
                for (elements, out) in tile.chunks_exact(TILE_ROWS * width).zip(out.chunks_exact_mut(1)) {
                    dequantize(self.weight_type, &elements[lane * width..][..width], out);
                }
            }
        );
    }

    /// Tiles it is cut into.
    pub(crate) fn num_tiles(&self) -> usize {
        self.rows.div_ceil(TILE_ROWS)
    }

    /// Bytes of tile `index`, rows `16 * index ..`, in the order of [`packing`].
    pub(crate) fn tile(&self, index: usize) -> &[u8] {
        &self.memory.bytes()[index * self.tile_stride..][..self.tile_bytes]
    }
}

/// Why weights cannot be packed.
#[derive(Debug, Error)]
pub enum MatrixError {
    /// No row or no column.
    #[error("a matrix of {rows} rows and {cols} columns has no weights")]
    Empty {
        /// Rows asked for.
        rows: usize,
        /// Columns asked for.
        cols: usize,
    },
    /// The columns are no whole number of blocks.
    #[error("{cols} columns are not a multiple of the {block_len} that a block of {weight_type} holds")]
    PartialBlock {
        /// Type of the weights.
        weight_type: WeightType,
        /// Columns asked for.
        cols: usize,
        /// Columns of a block.
        block_len: usize,
    },
    /// Another number of bytes than the shape asks for.
    #[error("{rows} rows of {cols} columns of {weight_type} take {expected} bytes, got {got}")]
    WrongLength {
        /// Type of the weights.
        weight_type: WeightType,
        /// Rows asked for.
        rows: usize,
        /// Columns asked for.
        cols: usize,
        /// Bytes given.
        got: usize,
        /// Bytes that the shape takes.
        expected: usize,
    },
    /// Its size in bytes does not fit the address space.
    #[error("a matrix of {rows} rows and {cols} columns does not fit the address space")]
    TooLarge {
        /// Rows asked for.
        rows: usize,
        /// Columns asked for.
        cols: usize,
    },
    /// The OS refuses the memory.
    #[error("no memory for {bytes} bytes of packed weights: {source}")]
    OutOfMemory {
        /// Bytes asked for.
        bytes: usize,
        /// What the OS says.
        source: std::io::Error,
    },
}
