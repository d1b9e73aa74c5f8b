//! GGUF model files: metadata and tensors, mapped and read in place.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let file = entrokv::gguf::Gguf::open("model.gguf".as_ref())?;
//! println!("{}", file.metadata().str("general.architecture")?);
//! for tensor in file.tensors() {
//!     println!("{} {} {:?}", tensor.name, tensor.weight_type.name(), tensor.shape);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! A file is input from outside, often a gigabyte from a stranger. Invariants, each with a test of its name:
//! 1. Every length, count and offset is compared with the file before anything is allocated or sliced for it.
//! 2. Every file that is refused is refused with one line that names the entry at fault; nothing panics.
//! 3. Opening costs time and memory in proportion to the header: tensors are not touched, strings are not copied.

use std::{fs, path::Path, sync::Arc};

mod cursor;
mod error;
mod file_bytes;
mod metadata;
mod part;
mod split;
mod tensor;
mod value;
mod writer;

pub use error::{FormatError, GgufError, HeaderProblem, MetadataError, OptionalMetadata, SplitError};
pub use metadata::Metadata;
pub use tensor::Tensor;
pub use value::{Array, Value, ValueType};
pub use writer::{GgufWriter, OwnedValue, WriteError};

use file_bytes::FileBytes;
use part::Part;
use split::SplitPlace;
use tensor::TensorInfo;

/// An open model: one file, or all parts of a split one.
#[derive(Debug)]
pub struct Gguf {
    parts: Vec<Arc<FileBytes>>,
    version: u32,
    metadata: Metadata,
    tensors: Vec<(usize, TensorInfo)>,
    /// Indices into `tensors`, sorted by name.
    by_name: Vec<usize>,
}

impl Gguf {
    /// Maps the model at `path` and checks its header; for a part of a split model, that of every part.
    ///
    /// The files must not be written to or shortened while the model is in use (renaming another file over one of them
    /// is fine): a shortened map ends the process.
    ///
    /// # Errors
    /// A file does not open, is no GGUF file of a kind we read, or a part is missing.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let opened = open_part(path)?;
        let in_file = |problem: FormatError| GgufError::Format { file: path.display().to_string(), problem };
        let Some(place) = SplitPlace::of(&opened.metadata).map_err(|e| in_file(e.into()))? else {
            return Self::join(vec![opened]).map_err(in_file);
        };

        let in_split = |problem| GgufError::Split { file: path.display().to_string(), problem };
        let path_of = place.paths(path).map_err(in_split)?;
        let mut opened = Some(opened);
        let mut parts = Vec::new();
        for no in 0..place.count {
            if let Some(this) = opened.take_if(|_| no == place.no) {
                parts.push(this);
                continue;
            }
            let part_path = path_of(no);
            if !fs::exists(&part_path).unwrap_or(true) {
                return Err(in_split(SplitError::MissingPart { no, count: place.count, path: part_path }));
            }
            let part = open_part(&part_path)?;
            let found = SplitPlace::of(&part.metadata)
                .map_err(|e| GgufError::Format { file: part_path.display().to_string(), problem: e.into() })?;
            SplitPlace { no, ..place }.check(found, &part_path).map_err(in_split)?;
            parts.push(part);
        }
        let whole = Self::join(parts).map_err(in_file)?;
        let found = whole.tensors.len() as u64;
        match place.num_tensors {
            Some(expected) if expected != found => {
                Err(in_split(SplitError::TensorCount { count: place.count, found, expected }))
            }
            _ => Ok(whole),
        }
    }

    /// Reads a model that is in memory already.
    ///
    /// # Errors
    /// The bytes are no GGUF file of a kind we read, or one part of a split model.
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self, GgufError> {
        let in_memory = |problem| GgufError::Format { file: IN_MEMORY.to_owned(), problem };
        let part = Part::read(FileBytes::Owned(bytes)).map_err(in_memory)?;
        match SplitPlace::of(&part.metadata).map_err(|e| in_memory(e.into()))? {
            None => Self::join(vec![part]).map_err(in_memory),
            Some(SplitPlace { no, count, .. }) => {
                Err(GgufError::Split { file: IN_MEMORY.to_owned(), problem: SplitError::PartInMemory { no, count } })
            }
        }
    }

    fn join(parts: Vec<Part>) -> Result<Self, FormatError> {
        let mut metadata = None;
        let mut version = None;
        let (mut files, mut tensors) = (Vec::new(), Vec::new());
        for part in parts {
            version.get_or_insert(part.version);
            metadata.get_or_insert(part.metadata);
            tensors.extend(part.tensors.into_iter().map(|info| (files.len(), info)));
            files.push(part.bytes);
        }
        let name = |i: usize| -> &str { &tensors[i].1.name };
        let mut by_name: Vec<usize> = (0..tensors.len()).collect();
        by_name.sort_unstable_by(|&a, &b| name(a).cmp(name(b)));
        if let Some(pair) = by_name.windows(2).find(|pair| name(pair[0]) == name(pair[1])) {
            return Err(FormatError::DuplicateTensor { name: name(pair[0]).to_owned() });
        }
        let some = "a model has at least the part that was opened";
        Ok(Self { parts: files, version: version.expect(some), metadata: metadata.expect(some), tensors, by_name })
    }

    /// The model's metadata; of a split model, that of the first part.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Every tensor, in the order of the header, part after part.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = Tensor<'_>> {
        self.tensors.iter().map(|(part, info)| self.view(*part, info))
    }

    /// The tensor of this name, from whichever part it is in.
    pub fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        let at = self.by_name.binary_search_by(|&i| (*self.tensors[i].1.name).cmp(name)).ok()?;
        let (part, info) = &self.tensors[self.by_name[at]];
        Some(self.view(*part, info))
    }

    fn view<'a>(&'a self, part: usize, info: &'a TensorInfo) -> Tensor<'a> {
        Tensor {
            name: &info.name,
            weight_type: info.weight_type,
            shape: info.shape(),
            data: &self.parts[part][info.data.clone()],
        }
    }

    /// The version of the format, 2 or 3; of a split model, that of the first part.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// How many files the model is in.
    pub fn num_files(&self) -> usize {
        self.parts.len()
    }

    /// Bytes of all files together.
    pub fn file_bytes(&self) -> u64 {
        self.parts.iter().map(|bytes| bytes.len() as u64).sum()
    }
}

/// What errors call bytes that come from no file.
const IN_MEMORY: &str = "the model in memory";

fn open_part(path: &Path) -> Result<Part, GgufError> {
    let bytes = FileBytes::map(path).map_err(|source| GgufError::Io { path: path.to_owned(), source })?;
    Part::read(bytes).map_err(|problem| GgufError::Format { file: path.display().to_string(), problem })
}

#[cfg(test)]
mod tests;
