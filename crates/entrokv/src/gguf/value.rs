//! Metadata values: read in place, so that a vocabulary of 250,000 strings costs one pass over its lengths.

use std::fmt;

use super::{
    cursor::Cursor,
    error::{HeaderProblem, Text},
};

/// The deepest nesting of arrays that is read. Real files have arrays of numbers and strings only.
const DEEPEST_ARRAY: usize = 4;

/// The type of a metadata value; the number is the one in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ValueType {
    /// Unsigned, 8 bits.
    U8 = 0,
    /// Signed, 8 bits.
    I8 = 1,
    /// Unsigned, 16 bits.
    U16 = 2,
    /// Signed, 16 bits.
    I16 = 3,
    /// Unsigned, 32 bits.
    U32 = 4,
    /// Signed, 32 bits.
    I32 = 5,
    /// Single precision.
    F32 = 6,
    /// One byte, 0 or 1.
    Bool = 7,
    /// A length and bytes.
    String = 8,
    /// A type, a count, and the elements.
    Array = 9,
    /// Unsigned, 64 bits.
    U64 = 10,
    /// Signed, 64 bits.
    I64 = 11,
    /// Double precision.
    F64 = 12,
}

impl ValueType {
    /// Every type, at the index that is its number.
    pub const ALL: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::Bool,
        Self::String,
        Self::Array,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    /// The type of this number, if the format defines it.
    pub fn from_id(id: u32) -> Option<Self> {
        usize::try_from(id).ok().and_then(|i| Self::ALL.get(i)).copied()
    }

    /// The number that stands for the type in a file.
    pub fn id(self) -> u32 {
        self as u32
    }

    /// The type's short name, as the `inspect` command prints it.
    pub fn name(self) -> &'static str {
        match self {
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::F32 => "f32",
            Self::Bool => "bool",
            Self::String => "string",
            Self::Array => "array",
            Self::U64 => "u64",
            Self::I64 => "i64",
            Self::F64 => "f64",
        }
    }

    /// The type with its article, for errors: "is a string: an integer is expected".
    pub(super) fn in_words(self) -> &'static str {
        match self {
            Self::U8 | Self::I8 | Self::U16 | Self::I16 | Self::U32 | Self::I32 | Self::U64 | Self::I64 => "an integer",
            Self::F32 | Self::F64 => "a floating-point number",
            Self::Bool => "a bool",
            Self::String => "a string",
            Self::Array => "an array",
        }
    }

    /// Bytes of the smallest value: what a count is divided by before anybody believes it.
    fn min_bytes(self) -> u64 {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 | Self::String => 8,
            Self::Array => 12,
        }
    }
}

/// One metadata value; strings and arrays point into the file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value<'a> {
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
    /// Bytes that are usually, but not always, UTF-8: vocabularies hold pieces of characters.
    String(&'a [u8]),
    /// Elements of one type.
    Array(Array<'a>),
}

impl<'a> Value<'a> {
    /// Reads one value and moves past it. Nothing is allocated, whatever the value claims to hold.
    pub(super) fn read(cursor: &mut Cursor<'a>, ty: ValueType) -> Result<Self, HeaderProblem> {
        Self::read_nested(cursor, ty, 0)
    }

    fn read_nested(cursor: &mut Cursor<'a>, ty: ValueType, depth: usize) -> Result<Self, HeaderProblem> {
        let what = "a value";
        Ok(match ty {
            ValueType::U8 => Self::U8(u8::from_le_bytes(cursor.array(what)?)),
            ValueType::I8 => Self::I8(i8::from_le_bytes(cursor.array(what)?)),
            ValueType::U16 => Self::U16(u16::from_le_bytes(cursor.array(what)?)),
            ValueType::I16 => Self::I16(i16::from_le_bytes(cursor.array(what)?)),
            ValueType::U32 => Self::U32(cursor.u32(what)?),
            ValueType::I32 => Self::I32(i32::from_le_bytes(cursor.array(what)?)),
            ValueType::U64 => Self::U64(cursor.u64(what)?),
            ValueType::I64 => Self::I64(i64::from_le_bytes(cursor.array(what)?)),
            ValueType::F32 => Self::F32(f32::from_le_bytes(cursor.array(what)?)),
            ValueType::F64 => Self::F64(f64::from_le_bytes(cursor.array(what)?)),
            ValueType::Bool => match cursor.array(what)? {
                [0] => Self::Bool(false),
                [1] => Self::Bool(true),
                [got] => return Err(HeaderProblem::BadBool { got }),
            },
            ValueType::String => Self::String(cursor.string("a string")?),
            ValueType::Array => Self::Array(Array::read(cursor, depth)?),
        })
    }

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
            Self::Array(_) => ValueType::Array,
        }
    }

    /// The value as a whole number, if it is of an integer type (bool and floating point are not).
    pub fn as_integer(&self) -> Option<i128> {
        Some(match *self {
            Self::U8(v) => i128::from(v),
            Self::I8(v) => i128::from(v),
            Self::U16(v) => i128::from(v),
            Self::I16(v) => i128::from(v),
            Self::U32(v) => i128::from(v),
            Self::I32(v) => i128::from(v),
            Self::U64(v) => i128::from(v),
            Self::I64(v) => i128::from(v),
            _ => return None,
        })
    }

    /// The value in single precision, if it is of a floating-point type; a double is rounded to the nearest.
    pub fn as_f32(&self) -> Option<f32> {
        match *self {
            Self::F32(v) => Some(v),
            Self::F64(v) => Some(v as f32),
            _ => None,
        }
    }
}

/// The longest string printed whole, and the most elements of an array.
const PRINTED_CHARS: usize = 80;
const PRINTED_ELEMENTS: usize = 6;

/// One line, for people: long strings and arrays are cut and say how much they hold.
impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::U8(v) => v.fmt(f),
            Self::I8(v) => v.fmt(f),
            Self::U16(v) => v.fmt(f),
            Self::I16(v) => v.fmt(f),
            Self::U32(v) => v.fmt(f),
            Self::I32(v) => v.fmt(f),
            Self::U64(v) => v.fmt(f),
            Self::I64(v) => v.fmt(f),
            Self::F32(v) => v.fmt(f),
            Self::F64(v) => v.fmt(f),
            Self::Bool(v) => v.fmt(f),
            Self::String(bytes) => {
                // A character has four bytes at most: the rest of a long string need not be looked at.
                let head = &bytes[..bytes.len().min(4 * (PRINTED_CHARS + 1))];
                let text = String::from_utf8_lossy(head);
                match text.char_indices().nth(PRINTED_CHARS) {
                    None => write!(f, "{}", Text(&text)),
                    Some((cut, _)) => write!(f, "{:?}... ({} bytes)", &text[..cut], bytes.len()),
                }
            }
            Self::Array(array) => {
                f.write_str("[")?;
                for (i, value) in array.iter().take(PRINTED_ELEMENTS).enumerate() {
                    write!(f, "{}{value}", if i == 0 { "" } else { ", " })?;
                }
                match array.len() > PRINTED_ELEMENTS {
                    true => write!(f, ", ...] ({} of type {})", array.len(), array.element_type().name()),
                    false => f.write_str("]"),
                }
            }
        }
    }
}

/// An array in place: its elements are decoded as they are asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Array<'a> {
    element_type: ValueType,
    len: usize,
    depth: usize,
    bytes: &'a [u8],
}

impl<'a> Array<'a> {
    fn read(cursor: &mut Cursor<'a>, depth: usize) -> Result<Self, HeaderProblem> {
        if depth == DEEPEST_ARRAY {
            return Err(HeaderProblem::TooDeep { limit: DEEPEST_ARRAY });
        }
        let id = cursor.u32("the type of an array's elements")?;
        let element_type = ValueType::from_id(id).ok_or(HeaderProblem::UnknownValueType { id })?;
        let count = cursor.u64("the length of an array")?;
        let needed = count.saturating_mul(element_type.min_bytes());
        if needed > cursor.left() {
            let offset = cursor.position() as u64;
            return Err(HeaderProblem::PastEnd { what: "an array", needed, offset, left: cursor.left() });
        }
        let start = cursor.position();
        match element_type {
            ValueType::String | ValueType::Array | ValueType::Bool => {
                for _ in 0..count {
                    Value::read_nested(cursor, element_type, depth + 1)?;
                }
            }
            _ => {
                cursor.take(needed, "an array")?;
            }
        }
        // Every element takes a byte or more, so the count is at most the length of a slice.
        Ok(Self { element_type, len: count as usize, depth, bytes: cursor.since(start) })
    }

    /// The type of every element.
    pub fn element_type(&self) -> ValueType {
        self.element_type
    }

    /// How many elements there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements in order.
    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let Self { element_type, len, depth, bytes } = *self;
        let mut cursor = Cursor::new(bytes);
        // Every element has been read once, so each reads again; were the file changed behind our back, the iteration
        // would end early instead of panicking.
        (0..len).map_while(move |_| Value::read_nested(&mut cursor, element_type, depth + 1).ok())
    }
}
