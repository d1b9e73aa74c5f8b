//! Writes GGUF files: the seeded tiny models, and the files that tests are made of.

use std::collections::HashSet;

use entrokv_kernels::weight_type::WeightType;
use thiserror::Error;

use super::{
    error::Text,
    part::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAGIC, MIN_ALIGNMENT},
    value::{Value, ValueType},
};

/// A metadata value to be written.
#[derive(Clone, Debug, PartialEq)]
pub enum OwnedValue {
    /// Unsigned, 8 bits.
    U8(u8),
    /// Signed, 8 bits.
    I8(i8),
    /// Unsigned, 16 bits.
    U16(u16),
    /// Signed, 16 bits.
    I16(i16),
    /// Unsigned, 32 bits.
    U32(u32),
    /// Signed, 32 bits.
    I32(i32),
    /// Unsigned, 64 bits.
    U64(u64),
    /// Signed, 64 bits.
    I64(i64),
    /// Single precision.
    F32(f32),
    /// Double precision.
    F64(f64),
    /// True or false.
    Bool(bool),
    /// Any bytes; text should be UTF-8.
    String(Vec<u8>),
    /// Elements that are all of the type given, which an empty array has too.
    Array(ValueType, Vec<OwnedValue>),
}

impl OwnedValue {
    /// The value's type.
    pub fn value_type(&self) -> ValueType {
        match self {
            Self::U8(_) => ValueType::U8,
            Self::I8(_) => ValueType::I8,
            Self::U16(_) => ValueType::U16,
            Self::I16(_) => ValueType::I16,
            Self::U32(_) => ValueType::U32,
            Self::I32(_) => ValueType::I32,
            Self::U64(_) => ValueType::U64,
            Self::I64(_) => ValueType::I64,
            Self::F32(_) => ValueType::F32,
            Self::F64(_) => ValueType::F64,
            Self::Bool(_) => ValueType::Bool,
            Self::String(_) => ValueType::String,
            Self::Array(..) => ValueType::Array,
        }
    }

    /// An array of strings.
    pub fn strings<S: Into<Vec<u8>>>(strings: impl IntoIterator<Item = S>) -> Self {
        Self::Array(ValueType::String, strings.into_iter().map(|s| Self::String(s.into())).collect())
    }

    /// An array of single-precision numbers.
    pub fn f32s(values: impl IntoIterator<Item = f32>) -> Self {
        Self::Array(ValueType::F32, values.into_iter().map(Self::F32).collect())
    }

    /// An array of signed 32-bit numbers.
    pub fn i32s(values: impl IntoIterator<Item = i32>) -> Self {
        Self::Array(ValueType::I32, values.into_iter().map(Self::I32).collect())
    }

    fn write(&self, out: &mut Vec<u8>) -> Result<(), ValueType> {
        match self {
            Self::U8(v) => out.extend(v.to_le_bytes()),
            Self::I8(v) => out.extend(v.to_le_bytes()),
            Self::U16(v) => out.extend(v.to_le_bytes()),
            Self::I16(v) => out.extend(v.to_le_bytes()),
            Self::U32(v) => out.extend(v.to_le_bytes()),
            Self::I32(v) => out.extend(v.to_le_bytes()),
            Self::U64(v) => out.extend(v.to_le_bytes()),
            Self::I64(v) => out.extend(v.to_le_bytes()),
            Self::F32(v) => out.extend(v.to_le_bytes()),
            Self::F64(v) => out.extend(v.to_le_bytes()),
            Self::Bool(v) => out.push(u8::from(*v)),
            Self::String(bytes) => write_string(out, bytes),
            Self::Array(element_type, elements) => {
                out.extend(element_type.id().to_le_bytes());
                out.extend((elements.len() as u64).to_le_bytes());
                for element in elements {
                    if element.value_type() != *element_type {
                        return Err(element.value_type());
                    }
                    element.write(out)?;
                }
            }
        }
        Ok(())
    }
}

/// Copies a value out of a file, to write it into another.
impl From<Value<'_>> for OwnedValue {
    fn from(value: Value<'_>) -> Self {
        match value {
            Value::U8(v) => Self::U8(v),
            Value::I8(v) => Self::I8(v),
            Value::U16(v) => Self::U16(v),
            Value::I16(v) => Self::I16(v),
            Value::U32(v) => Self::U32(v),
            Value::I32(v) => Self::I32(v),
            Value::U64(v) => Self::U64(v),
            Value::I64(v) => Self::I64(v),
            Value::F32(v) => Self::F32(v),
            Value::F64(v) => Self::F64(v),
            Value::Bool(v) => Self::Bool(v),
            Value::String(bytes) => Self::String(bytes.to_vec()),
            Value::Array(array) => Self::Array(array.element_type(), array.iter().map(Self::from).collect()),
        }
    }
}

impl From<&str> for OwnedValue {
    fn from(value: &str) -> Self {
        Self::String(value.as_bytes().to_vec())
    }
}

impl From<u32> for OwnedValue {
    fn from(value: u32) -> Self {
        Self::U32(value)
    }
}

impl From<f32> for OwnedValue {
    fn from(value: f32) -> Self {
        Self::F32(value)
    }
}

impl From<bool> for OwnedValue {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}

/// Why a file cannot be written as described.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum WriteError {
    /// Two entries with the same key; the alignment's own key is set by [`GgufWriter::alignment`].
    #[error("metadata key {} is set twice", Text(key))]
    DuplicateKey {
        /// The key.
        key: String,
    },
    /// Two tensors with the same name.
    #[error("tensor {} is added twice", Text(name))]
    DuplicateTensor {
        /// The name.
        name: String,
    },
    /// An array with an element of another type than it says.
    #[error("metadata key {} is an array with an element of type {}", Text(key), found.name())]
    MixedArray {
        /// The key.
        key: String,
        /// The type that does not belong there.
        found: ValueType,
    },
    /// Not a power of two of 8 or more.
    #[error("alignment {got} is no power of two of {MIN_ALIGNMENT} or more")]
    Alignment {
        /// The alignment asked for.
        got: u32,
    },
    /// Data that is not what the type and the shape take; `expected` is `None` where the shape itself is impossible.
    #[error("tensor {} of shape {shape:?} has {got} bytes of data, {} are expected",
        Text(name), expected.map_or_else(|| "none".to_owned(), |e| e.to_string()))]
    DataLength {
        /// The tensor.
        name: String,
        /// Its dimensions, the fastest first.
        shape: Vec<u64>,
        /// Bytes given.
        got: usize,
        /// Bytes that the type and shape take.
        expected: Option<u64>,
    },
}

/// Collects metadata and tensors and writes them in the order they were added.
#[derive(Clone, Debug)]
pub struct GgufWriter {
    version: u32,
    alignment: Option<u32>,
    metadata: Vec<(String, OwnedValue)>,
    tensors: Vec<NewTensor>,
}

#[derive(Clone, Debug)]
struct NewTensor {
    name: String,
    weight_type: WeightType,
    shape: Vec<u64>,
    data: Vec<u8>,
}

impl Default for GgufWriter {
    fn default() -> Self {
        Self::new()
    }
}

impl GgufWriter {
    /// An empty file of version 3 with the default alignment of 32.
    pub fn new() -> Self {
        Self { version: 3, alignment: None, metadata: Vec::new(), tensors: Vec::new() }
    }

    /// Sets the version that the file says; 2 and 3 differ in nothing else where bytes are little-endian.
    pub fn version(&mut self, version: u32) -> &mut Self {
        self.version = version;
        self
    }

    /// Sets the alignment of tensors and the key that says so.
    pub fn alignment(&mut self, alignment: u32) -> &mut Self {
        self.alignment = Some(alignment);
        self
    }

    /// Adds a metadata entry.
    pub fn metadata(&mut self, key: impl Into<String>, value: impl Into<OwnedValue>) -> &mut Self {
        self.metadata.push((key.into(), value.into()));
        self
    }

    /// Adds a tensor: its dimensions, the fastest first, and its rows one after the other.
    pub fn tensor(
        &mut self,
        name: impl Into<String>,
        weight_type: WeightType,
        shape: &[u64],
        data: Vec<u8>,
    ) -> &mut Self {
        self.tensors.push(NewTensor { name: name.into(), weight_type, shape: shape.to_vec(), data });
        self
    }

    /// The bytes of the file.
    ///
    /// # Errors
    /// What was added does not make a file that [`super::Gguf`] reads.
    pub fn to_bytes(&self) -> Result<Vec<u8>, WriteError> {
        let alignment = self.alignment.unwrap_or(DEFAULT_ALIGNMENT);
        if !alignment.is_power_of_two() || alignment < MIN_ALIGNMENT {
            return Err(WriteError::Alignment { got: alignment });
        }
        let alignment = alignment as usize;
        let own = self.alignment.map(|alignment| (ALIGNMENT_KEY.to_owned(), OwnedValue::U32(alignment)));
        let mut out = MAGIC.to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64 + u64::from(own.is_some())).to_le_bytes());

        let mut keys = HashSet::new();
        for (key, value) in self.metadata.iter().chain(&own) {
            if !keys.insert(key.as_str()) {
                return Err(WriteError::DuplicateKey { key: key.clone() });
            }
            write_string(&mut out, key.as_bytes());
            out.extend(value.value_type().id().to_le_bytes());
            value.write(&mut out).map_err(|found| WriteError::MixedArray { key: key.clone(), found })?;
        }

        let mut names = HashSet::new();
        let mut offset = 0_usize;
        for tensor in &self.tensors {
            if !names.insert(tensor.name.as_str()) {
                return Err(WriteError::DuplicateTensor { name: tensor.name.clone() });
            }
            tensor.check()?;
            write_string(&mut out, tensor.name.as_bytes());
            out.extend((tensor.shape.len() as u32).to_le_bytes());
            for dim in &tensor.shape {
                out.extend(dim.to_le_bytes());
            }
            out.extend(tensor.weight_type.ggml_id().to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset = (offset + tensor.data.len()).next_multiple_of(alignment);
        }

        for tensor in &self.tensors {
            out.resize(out.len().next_multiple_of(alignment), 0);
            out.extend(&tensor.data);
        }
        // The last tensor is padded too: other readers insist on it.
        out.resize(out.len().next_multiple_of(alignment), 0);
        Ok(out)
    }
}

impl NewTensor {
    fn check(&self) -> Result<(), WriteError> {
        let expected = self.expected_bytes();
        match expected == Some(self.data.len() as u64) {
            true => Ok(()),
            false => Err(WriteError::DataLength {
                name: self.name.clone(),
                shape: self.shape.clone(),
                got: self.data.len(),
                expected,
            }),
        }
    }

    fn expected_bytes(&self) -> Option<u64> {
        let (&cols, more) = self.shape.split_first().filter(|_| self.shape.len() <= 4 && !self.shape.contains(&0))?;
        let row_bytes = self.weight_type.row_bytes(usize::try_from(cols).ok()?)?;
        more.iter().try_fold(row_bytes as u64, |bytes, &dim| bytes.checked_mul(dim))
    }
}

fn write_string(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend((bytes.len() as u64).to_le_bytes());
    out.extend(bytes);
}
