//! The key-value part of a model file, with getters that say what is wrong when it is.

use std::{ops::Range, sync::Arc};

use super::{
    cursor::Cursor,
    error::MetadataError,
    file_bytes::FileBytes,
    value::{Array, Value, ValueType},
};

/// The metadata of a model: keys in file order, values left where they are in the file.
///
/// Integer getters take an integer of any width whose value fits, because writers differ in the widths they choose for
/// the same key; floating-point getters take both precisions. Everything else is exact: a string is no number.
#[derive(Clone, Debug)]
pub struct Metadata {
    bytes: Arc<FileBytes>,
    entries: Vec<Entry>,
    /// Indices into `entries`, sorted by key.
    by_key: Vec<usize>,
}

/// Where one value lies.
#[derive(Clone, Debug)]
struct Entry {
    key: Box<str>,
    value_type: ValueType,
    value: Range<usize>,
}

impl Metadata {
    /// Metadata without entries, to be filled by [`Metadata::push`] and closed by [`Metadata::sort`].
    pub(super) fn new(bytes: Arc<FileBytes>) -> Self {
        Self { bytes, entries: Vec::new(), by_key: Vec::new() }
    }

    /// Adds an entry whose value has been read from `value` of the same bytes.
    pub(super) fn push(&mut self, key: &str, value_type: ValueType, value: Range<usize>) {
        self.entries.push(Entry { key: key.into(), value_type, value });
    }

    /// Builds the index; the first key that appears twice is the error.
    pub(super) fn sort(&mut self) -> Result<(), String> {
        let key = |i: usize| &*self.entries[i].key;
        let mut by_key: Vec<usize> = (0..self.entries.len()).collect();
        by_key.sort_unstable_by(|&a, &b| key(a).cmp(key(b)));
        if let Some(pair) = by_key.windows(2).find(|pair| key(pair[0]) == key(pair[1])) {
            return Err(key(pair[0]).to_owned());
        }
        self.by_key = by_key;
        Ok(())
    }

    /// How many entries there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Keys and values in file order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, Value<'_>)> {
        self.entries.iter().filter_map(|entry| Some((&*entry.key, self.value(entry)?)))
    }

    /// Keys, types and values as the file encodes them, sorted by key.
    pub(crate) fn encoded(&self) -> impl Iterator<Item = (&str, ValueType, &[u8])> {
        let entries = self.by_key.iter().map(|&index| &self.entries[index]);
        entries.map(|entry| (&*entry.key, entry.value_type, &self.bytes[entry.value.clone()]))
    }

    /// The value of a key, of whatever type it is.
    pub fn get(&self, key: &str) -> Option<Value<'_>> {
        let at = self.by_key.binary_search_by(|&i| (*self.entries[i].key).cmp(key)).ok()?;
        self.value(&self.entries[self.by_key[at]])
    }

    fn value(&self, entry: &Entry) -> Option<Value<'_>> {
        // The same bytes have been read once, when the file was opened.
        Value::read(&mut Cursor::new(&self.bytes[entry.value.clone()]), entry.value_type).ok()
    }

    fn require(&self, key: &str) -> Result<Value<'_>, MetadataError> {
        self.get(key).ok_or_else(|| MetadataError::Missing { key: key.to_owned() })
    }

    /// A string that is text.
    ///
    /// # Errors
    /// The key is missing, is no string, or is not UTF-8.
    pub fn str(&self, key: &str) -> Result<&str, MetadataError> {
        str::from_utf8(self.byte_string(key)?).map_err(|_| MetadataError::NotUtf8 { key: key.to_owned(), index: None })
    }

    /// A string as the bytes it is.
    ///
    /// # Errors
    /// The key is missing or is no string.
    pub fn byte_string(&self, key: &str) -> Result<&[u8], MetadataError> {
        match self.require(key)? {
            Value::String(bytes) => Ok(bytes),
            other => Err(MetadataError::wrong_type(key, "a string", other.value_type())),
        }
    }

    /// A truth value.
    ///
    /// # Errors
    /// The key is missing or is no bool.
    pub fn bool(&self, key: &str) -> Result<bool, MetadataError> {
        match self.require(key)? {
            Value::Bool(value) => Ok(value),
            other => Err(MetadataError::wrong_type(key, "a bool", other.value_type())),
        }
    }

    /// A whole number from 0 to 2^32 - 1.
    ///
    /// # Errors
    /// The key is missing, is no integer, or does not fit.
    pub fn u32(&self, key: &str) -> Result<u32, MetadataError> {
        integer(key, self.require(key)?, "an unsigned 32-bit integer")
    }

    /// A whole number from 0 to 2^64 - 1.
    ///
    /// # Errors
    /// The key is missing, is no integer, or does not fit.
    pub fn u64(&self, key: &str) -> Result<u64, MetadataError> {
        integer(key, self.require(key)?, "an unsigned 64-bit integer")
    }

    /// A floating-point number.
    ///
    /// # Errors
    /// The key is missing or is no floating-point number.
    pub fn f32(&self, key: &str) -> Result<f32, MetadataError> {
        float(key, self.require(key)?)
    }

    /// An array, of whatever element type it is.
    ///
    /// # Errors
    /// The key is missing or is no array.
    pub fn array(&self, key: &str) -> Result<Array<'_>, MetadataError> {
        match self.require(key)? {
            Value::Array(array) => Ok(array),
            other => Err(MetadataError::wrong_type(key, "an array", other.value_type())),
        }
    }

    /// An array of strings that are all text, borrowed from the file.
    ///
    /// # Errors
    /// The key is missing, is no array of strings, or a string is not UTF-8.
    pub fn strings(&self, key: &str) -> Result<Vec<&str>, MetadataError> {
        let text = |(i, bytes)| {
            str::from_utf8(bytes).map_err(|_| MetadataError::NotUtf8 { key: key.to_owned(), index: Some(i) })
        };
        self.byte_strings(key)?.into_iter().enumerate().map(text).collect()
    }

    /// An array of strings as the bytes they are, borrowed from the file.
    ///
    /// # Errors
    /// The key is missing or is no array of strings.
    pub fn byte_strings(&self, key: &str) -> Result<Vec<&[u8]>, MetadataError> {
        self.elements(key, "an array of strings", |value| match value {
            Value::String(bytes) => Ok(bytes),
            other => Err(MetadataError::wrong_type(key, "an array of strings", other.value_type())),
        })
    }

    /// An array of floating-point numbers.
    ///
    /// # Errors
    /// The key is missing or is no array of floating-point numbers.
    pub fn f32s(&self, key: &str) -> Result<Vec<f32>, MetadataError> {
        self.elements(key, "an array of floating-point numbers", |value| float(key, value))
    }

    /// An array of signed whole numbers that fit 32 bits.
    ///
    /// # Errors
    /// The key is missing, is no array of integers, or an element does not fit.
    pub fn i32s(&self, key: &str) -> Result<Vec<i32>, MetadataError> {
        self.elements(key, "an array of integers", |value| integer(key, value, "a signed 32-bit integer"))
    }

    /// An array of whole numbers from 0 to 2^32 - 1 (some models have one number per layer where others have one).
    ///
    /// # Errors
    /// The key is missing, is no array of integers, or an element does not fit.
    pub fn u32s(&self, key: &str) -> Result<Vec<u32>, MetadataError> {
        self.elements(key, "an array of integers", |value| integer(key, value, "an unsigned 32-bit integer"))
    }

    fn elements<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        convert: impl Fn(Value<'a>) -> Result<T, MetadataError>,
    ) -> Result<Vec<T>, MetadataError> {
        let array = match self.require(key)? {
            Value::Array(array) => array,
            other => return Err(MetadataError::wrong_type(key, expected, other.value_type())),
        };
        let wrong_element = |error| match error {
            MetadataError::WrongType { key, .. } => {
                let found = format!("an array of type {}", array.element_type().name());
                MetadataError::WrongType { key, expected, found }
            }
            other => other,
        };
        array.iter().map(|value| convert(value).map_err(wrong_element)).collect()
    }
}

fn integer<T: TryFrom<i128>>(key: &str, value: Value<'_>, expected: &'static str) -> Result<T, MetadataError> {
    let got = value.as_integer().ok_or_else(|| MetadataError::wrong_type(key, expected, value.value_type()))?;
    T::try_from(got).map_err(|_| MetadataError::OutOfRange { key: key.to_owned(), got, expected })
}

fn float(key: &str, value: Value<'_>) -> Result<f32, MetadataError> {
    value.as_f32().ok_or_else(|| MetadataError::wrong_type(key, "a floating-point number", value.value_type()))
}
