//! What can be wrong with a GGUF file, each in one line that says what was found and what was expected.

use std::{fmt, io, path::PathBuf};

use thiserror::Error;

use super::{tensor::ggml_type_name, value::ValueType};

/// A model file that cannot be opened: which file, and why.
#[derive(Debug, Error)]
pub enum GgufError {
    /// The operating system refuses to open or map the file.
    #[error("cannot open {}: {source}", path.display())]
    Io {
        /// The file asked for.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The file opens, but is no GGUF file that we can read.
    #[error("{file}: {problem}")]
    Format {
        /// The file's path, or a name for bytes that come from memory.
        file: String,
        /// What is wrong with it.
        problem: FormatError,
    },
    /// The parts of a split model do not form a whole.
    #[error("{file}: {problem}")]
    Split {
        /// The part that was opened.
        file: String,
        /// What is wrong with the set of parts.
        problem: SplitError,
    },
}

/// What is wrong inside one file.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum FormatError {
    /// A file of zero bytes.
    #[error("not a GGUF file: it is empty")]
    Empty,
    /// The file begins with something other than the magic bytes.
    #[error("not a GGUF file: starts with {} instead of \"GGUF\"", Bytes(starts_with))]
    NotGguf {
        /// The first bytes of the file, 16 at most.
        starts_with: Vec<u8>,
    },
    /// Written on or for a machine of the other byte order.
    #[error("a big-endian GGUF file (its version reads as {swapped}): only little-endian ones are supported")]
    BigEndian {
        /// The version as it reads with its bytes swapped.
        swapped: u32,
    },
    /// A version of the format that we do not know.
    #[error("GGUF version {got} is not supported: only versions 2 and 3 are")]
    UnsupportedVersion {
        /// The version in the file.
        got: u32,
    },
    /// A header count that cannot be true, found before anything is allocated for it.
    #[error("the header counts {count} {what}, but the {left} bytes after it hold {most} at most")]
    AbsurdCount {
        /// What is counted.
        what: &'static str,
        /// The count in the file.
        count: u64,
        /// Bytes between the header and the end of the file.
        left: u64,
        /// How many of the smallest possible ones fit there.
        most: u64,
    },
    /// A header count that a (sparse) file might hold, but that no model has.
    #[error("the header counts {count} {what}: {limit} at most are read")]
    TooMany {
        /// What is counted.
        what: &'static str,
        /// The count in the file.
        count: u64,
        /// The most that we read.
        limit: u64,
    },
    /// Something in the header, before the tensors' data, does not read.
    #[error("{place}: {problem}")]
    Header {
        /// Which entry: its number and, where it is known, its name.
        place: String,
        /// What is wrong with it.
        problem: HeaderProblem,
    },
    /// Two metadata entries with the same key.
    #[error("metadata key {} appears twice", Text(key))]
    DuplicateKey {
        /// The key.
        key: String,
    },
    /// Two tensors with the same name, in one file or in two parts of a split model.
    #[error("tensor {} appears twice", Text(name))]
    DuplicateTensor {
        /// The tensor.
        name: String,
    },
    /// A metadata value that the reader itself needs has the wrong type or is out of range.
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    /// `general.alignment` is not a power of two of 8 or more.
    #[error("general.alignment is {got}: it must be a power of two, 8 or more")]
    Alignment {
        /// The alignment in the file.
        got: u32,
    },
    /// A tensor whose elements are of a kind that no kernel reads.
    #[error(
        "tensor {} has type {}, which is not supported: only {} are",
        Text(tensor),
        ggml_type_name(*id),
        supported_types()
    )]
    UnsupportedTensorType {
        /// The tensor.
        tensor: String,
        /// The type's number in the file.
        id: u32,
    },
    /// A number of dimensions other than 1 to 4.
    #[error("tensor {} has {got} dimensions: 1 to 4 are possible", Text(tensor))]
    Dimensions {
        /// The tensor.
        tensor: String,
        /// The count in the file.
        got: u32,
    },
    /// A dimension of zero, or dimensions whose product does not fit any memory.
    #[error("tensor {} has the impossible shape {shape:?}", Text(tensor))]
    Shape {
        /// The tensor.
        tensor: String,
        /// Its dimensions, the fastest first.
        shape: Vec<u64>,
    },
    /// Rows that are no whole number of quantisation blocks.
    #[error(
        "tensor {} of type {type_name} has rows of {cols} elements: they must be a multiple of {block_len}",
        Text(tensor)
    )]
    RowLength {
        /// The tensor.
        tensor: String,
        /// Its type.
        type_name: &'static str,
        /// Elements in a row.
        cols: u64,
        /// Elements in a block of the type.
        block_len: u64,
    },
    /// A tensor that does not start at a multiple of the alignment.
    #[error("tensor {} starts at offset {offset}, which is no multiple of the alignment {alignment}", Text(tensor))]
    Unaligned {
        /// The tensor.
        tensor: String,
        /// Its offset within the data section.
        offset: u64,
        /// The file's alignment.
        alignment: u64,
    },
    /// A tensor that ends after the file does: an interrupted copy or download, or an invented offset.
    #[error(
        "truncated: tensor {} ends at byte {end}, the file at byte {file_bytes} \
         ({} bytes missing for this tensor, {} for the file)",
        Text(tensor), end - file_bytes, file_end - file_bytes
    )]
    TensorPastEnd {
        /// The first tensor, by offset, that is not whole.
        tensor: String,
        /// Where it ends.
        end: u64,
        /// Where the last tensor ends.
        file_end: u64,
        /// Bytes in the file.
        file_bytes: u64,
    },
    /// A tensor whose end does not even fit 64 bits.
    #[error("tensor {} has the impossible offset {offset}", Text(tensor))]
    Offset {
        /// The tensor.
        tensor: String,
        /// Its offset within the data section.
        offset: u64,
    },
    /// Two tensors that share bytes.
    #[error(
        "tensors {} and {} overlap: the second starts {overlap} bytes before the first ends",
        Text(first),
        Text(second)
    )]
    Overlap {
        /// The tensor with the lower offset.
        first: String,
        /// The tensor that starts inside it.
        second: String,
        /// How many bytes before its end.
        overlap: u64,
    },
}

/// Why one entry of the header does not read.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum HeaderProblem {
    /// More bytes are announced than the file has left.
    #[error("truncated or corrupt: {what} needs {needed} bytes at byte {offset}, {left} are left")]
    PastEnd {
        /// What was being read.
        what: &'static str,
        /// Bytes it needs (saturating).
        needed: u64,
        /// Where it starts.
        offset: u64,
        /// Bytes from there to the end of the file.
        left: u64,
    },
    /// A value type that the format does not define.
    #[error("unknown value type {id}: 0 to 12 exist")]
    UnknownValueType {
        /// The number in the file.
        id: u32,
    },
    /// Arrays of arrays of arrays, deeper than anything real.
    #[error("arrays nested more than {limit} deep")]
    TooDeep {
        /// The deepest nesting that is read.
        limit: usize,
    },
    /// A truth value other than 0 and 1.
    #[error("a bool of value {got}: 0 and 1 are possible")]
    BadBool {
        /// The byte in the file.
        got: u8,
    },
    /// A name that is not text.
    #[error("the name is not valid UTF-8")]
    NameNotUtf8,
}

/// Why a set of parts is no whole model.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum SplitError {
    /// One part, handed over as bytes: there is no folder to look for the others in.
    #[error("part {} of {count} of a split model: open it by its path, so that the other parts are found", no + 1)]
    PartInMemory {
        /// The part's number, from 0.
        no: u32,
        /// How many parts there are.
        count: u32,
    },
    /// A part whose file name does not say which one it is, so that the names of the others are unknown.
    #[error("part {} of {count} of a split model: its file name must end in {expected}", no + 1)]
    Name {
        /// The part's number, from 0.
        no: u32,
        /// How many parts there are.
        count: u32,
        /// The ending that this part must have.
        expected: String,
    },
    /// A part that is not beside the one that was opened.
    #[error("part {} of {count} is missing: {} does not exist", no + 1, path.display())]
    MissingPart {
        /// The part's number, from 0.
        no: u32,
        /// How many parts there are.
        count: u32,
        /// Where it should be.
        path: PathBuf,
    },
    /// A part that says it is another one, or one of another number of parts.
    #[error(
        "{} calls itself part {} of {found_count}: part {} of {count} is expected",
        path.display(), found_no + 1, no + 1
    )]
    WrongPart {
        /// The file.
        path: PathBuf,
        /// What it says it is, from 0.
        found_no: u32,
        /// How many parts it says there are.
        found_count: u32,
        /// What it must be, from 0.
        no: u32,
        /// How many parts there are.
        count: u32,
    },
    /// `split.no` does not lie below `split.count`.
    #[error("split.no is {no}, but split.count is {count}")]
    Numbering {
        /// The part's number, from 0.
        no: u32,
        /// How many parts there are.
        count: u32,
    },
    /// The parts together do not hold as many tensors as they say.
    #[error("the {count} parts hold {found} tensors together: split.tensors.count says {expected}")]
    TensorCount {
        /// How many parts there are.
        count: u32,
        /// Tensors found.
        found: u64,
        /// Tensors announced.
        expected: u64,
    },
}

/// A metadata value that is not what the caller needs.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum MetadataError {
    /// No such key.
    #[error("the model file has no metadata key {}", Text(key))]
    Missing {
        /// The key asked for.
        key: String,
    },
    /// The value is of another type.
    #[error("metadata key {} is {found}: {expected} is expected", Text(key))]
    WrongType {
        /// The key asked for.
        key: String,
        /// The type asked for, in words.
        expected: &'static str,
        /// The type in the file, in words.
        found: String,
    },
    /// A number of the right kind that does not fit the type asked for.
    #[error("metadata key {} is {got}: it does not fit {expected}", Text(key))]
    OutOfRange {
        /// The key asked for.
        key: String,
        /// The value in the file.
        got: i128,
        /// The type asked for, in words.
        expected: &'static str,
    },
    /// Bytes that are no text.
    #[error(
        "metadata key {} is not valid UTF-8{}",
        Text(key), index.map_or(String::new(), |i| format!(" at index {i}"))
    )]
    NotUtf8 {
        /// The key asked for.
        key: String,
        /// Which string of an array.
        index: Option<usize>,
    },
}

/// Turns "the key is not there" into `None` and leaves every other error: `meta.u32(KEY).optional()?`.
pub trait OptionalMetadata<T> {
    /// `Ok(None)` where the key is missing.
    ///
    /// # Errors
    /// Every [`MetadataError`] but [`MetadataError::Missing`].
    fn optional(self) -> Result<Option<T>, MetadataError>;
}

impl<T> OptionalMetadata<T> for Result<T, MetadataError> {
    fn optional(self) -> Result<Option<T>, MetadataError> {
        match self {
            Ok(value) => Ok(Some(value)),
            Err(MetadataError::Missing { .. }) => Ok(None),
            Err(other) => Err(other),
        }
    }
}

/// A name out of a file, quoted, escaped (so that an error stays one line whatever the file holds) and cut.
pub(super) struct Text<'a>(pub(super) &'a str);

/// The longest name printed whole, in characters; real ones have 64 at most.
const LONGEST_NAME: usize = 80;

impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.char_indices().nth(LONGEST_NAME) {
            None => write!(f, "{:?}", self.0),
            Some((cut, _)) => write!(f, "{:?} (cut, {} bytes)", &self.0[..cut], self.0.len()),
        }
    }
}

/// Bytes out of a file, quoted and escaped.
struct Bytes<'a>(&'a [u8]);

impl fmt::Display for Bytes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.0.escape_ascii())
    }
}

/// The names of the tensor types that can be read, for the error about one that cannot.
fn supported_types() -> String {
    entrokv_kernels::weight_type::WeightType::ALL.iter().map(|ty| ty.name()).collect::<Vec<_>>().join(", ")
}

impl MetadataError {
    pub(super) fn wrong_type(key: &str, expected: &'static str, found: ValueType) -> Self {
        Self::WrongType { key: key.to_owned(), expected, found: found.in_words().to_owned() }
    }
}
