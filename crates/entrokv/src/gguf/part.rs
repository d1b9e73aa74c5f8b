//! One file, read from its first byte to the last: a whole model, or one part of a split one.
//!
//! The order of a file: magic, version, the counts of tensors and of metadata entries, the metadata, the tensors'
//! entries, padding to the alignment, the tensors' data.

use std::sync::Arc;

use super::{
    cursor::Cursor,
    error::{FormatError, HeaderProblem, OptionalMetadata, Text},
    file_bytes::FileBytes,
    metadata::Metadata,
    tensor::TensorInfo,
    value::{Value, ValueType},
};

/// The first four bytes of every file.
pub(super) const MAGIC: &[u8; 4] = b"GGUF";
/// The key that says at which multiples tensors start, and what holds where it is missing.
pub(super) const ALIGNMENT_KEY: &str = "general.alignment";
pub(super) const DEFAULT_ALIGNMENT: u32 = 32;
/// The smallest alignment that the format allows.
pub(super) const MIN_ALIGNMENT: u32 = 8;
/// Bytes of the smallest metadata entry: an empty key, a type, one byte.
const MIN_ENTRY_BYTES: u64 = 8 + 4 + 1;
/// The most tensors, and the most metadata entries, that are read. Real models have tens of thousands of tensors at
/// most; a sparse file, which costs its maker nothing, could hold billions and fill our memory with their names.
const MOST_ITEMS: u64 = 1 << 20;
/// How many bytes of a file that is none of ours are shown.
const SHOWN_BYTES: usize = 16;

/// What one file says, every length and offset checked.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) bytes: Arc<FileBytes>,
    pub(super) version: u32,
    pub(super) metadata: Metadata,
    /// In header order; each tensor's data lies within `bytes`.
    pub(super) tensors: Vec<TensorInfo>,
}

impl Part {
    /// Reads and checks the header, and where each tensor lies. The tensors' data is not touched.
    pub(super) fn read(bytes: FileBytes) -> Result<Self, FormatError> {
        let bytes = Arc::new(bytes);
        if bytes.is_empty() {
            return Err(FormatError::Empty);
        }
        if !bytes.starts_with(MAGIC) {
            return Err(FormatError::NotGguf { starts_with: bytes[..bytes.len().min(SHOWN_BYTES)].to_vec() });
        }
        let mut cursor = Cursor::new(&bytes);
        let header = |problem| FormatError::Header { place: "the header".to_owned(), problem };
        cursor.take(MAGIC.len() as u64, "the magic").map_err(header)?;
        let version = cursor.u32("the version").map_err(header)?;
        check_version(version)?;
        let num_tensors = cursor.u64("the number of tensors").map_err(header)?;
        let num_entries = cursor.u64("the number of metadata entries").map_err(header)?;
        check_count("tensors", num_tensors, TensorInfo::MIN_BYTES, cursor.left())?;
        check_count("metadata entries", num_entries, MIN_ENTRY_BYTES, cursor.left())?;

        // The lists grow as entries are read, so what is allocated follows the bytes that are there, not the counts.
        let mut metadata = Metadata::new(Arc::clone(&bytes));
        for index in 0..num_entries {
            read_entry(&mut cursor, &mut metadata, index, num_entries)?;
        }
        metadata.sort().map_err(|key| FormatError::DuplicateKey { key })?;
        let mut tensors = Vec::new();
        for index in 0..num_tensors {
            tensors.push(TensorInfo::read(&mut cursor, index, num_tensors)?);
        }

        let alignment = u64::from(alignment(&metadata)?);
        let data_start = (cursor.position() as u64).next_multiple_of(alignment);
        place_tensors(&mut tensors, alignment, data_start, bytes.len() as u64)?;
        Ok(Self { bytes, version, metadata, tensors })
    }
}

fn check_version(version: u32) -> Result<(), FormatError> {
    match (version, version.swap_bytes()) {
        (2 | 3, _) => Ok(()),
        // Versions are small numbers: one that is small only backwards was written backwards.
        (_, swapped @ 1..=0xffff) if version > 0xffff => Err(FormatError::BigEndian { swapped }),
        (got, _) => Err(FormatError::UnsupportedVersion { got }),
    }
}

fn check_count(what: &'static str, count: u64, min_bytes: u64, left: u64) -> Result<(), FormatError> {
    let most = left / min_bytes;
    if count > most {
        return Err(FormatError::AbsurdCount { what, count, left, most });
    }
    if count > MOST_ITEMS {
        return Err(FormatError::TooMany { what, count, limit: MOST_ITEMS });
    }
    Ok(())
}

fn read_entry(cursor: &mut Cursor<'_>, metadata: &mut Metadata, index: u64, count: u64) -> Result<(), FormatError> {
    let place = || format!("metadata entry {} of {count}", index + 1);
    let key = cursor.name("its key").map_err(|problem| FormatError::Header { place: place(), problem })?;
    let mut read = || {
        let id = cursor.u32("its type")?;
        let value_type = ValueType::from_id(id).ok_or(HeaderProblem::UnknownValueType { id })?;
        let start = cursor.position();
        Value::read(cursor, value_type)?;
        Ok((value_type, start..cursor.position()))
    };
    let (value_type, value) =
        read().map_err(|problem| FormatError::Header { place: format!("{} ({})", place(), Text(key)), problem })?;
    metadata.push(key, value_type, value);
    Ok(())
}

fn alignment(metadata: &Metadata) -> Result<u32, FormatError> {
    let got = metadata.u32(ALIGNMENT_KEY).optional()?.unwrap_or(DEFAULT_ALIGNMENT);
    match got.is_power_of_two() && got >= MIN_ALIGNMENT {
        true => Ok(got),
        false => Err(FormatError::Alignment { got }),
    }
}

/// Fills in where each tensor's data lies, once all of it is known to be aligned, inside the file, and apart.
fn place_tensors(
    tensors: &mut [TensorInfo],
    alignment: u64,
    data_start: u64,
    file_bytes: u64,
) -> Result<(), FormatError> {
    let end_of = |info: &TensorInfo| {
        let end = data_start.checked_add(info.offset).and_then(|start| start.checked_add(info.num_bytes));
        end.ok_or_else(|| FormatError::Offset { tensor: info.name.to_string(), offset: info.offset })
    };
    let mut file_end = data_start;
    for info in tensors.iter() {
        if info.offset % alignment != 0 {
            return Err(FormatError::Unaligned { tensor: info.name.to_string(), offset: info.offset, alignment });
        }
        file_end = file_end.max(end_of(info)?);
    }

    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by_key(|&i| tensors[i].offset);
    let mut before: Option<(usize, u64)> = None;
    for &i in &order {
        let (start, end) = (data_start + tensors[i].offset, end_of(&tensors[i])?);
        if let Some((first, first_end)) = before.filter(|&(_, first_end)| start < first_end) {
            return Err(FormatError::Overlap {
                first: tensors[first].name.to_string(),
                second: tensors[i].name.to_string(),
                overlap: first_end - start,
            });
        }
        if end > file_bytes {
            return Err(FormatError::TensorPastEnd { tensor: tensors[i].name.to_string(), end, file_end, file_bytes });
        }
        // Both are at most the length of a slice.
        tensors[i].data = start as usize..end as usize;
        before = Some((i, end));
    }
    Ok(())
}
