//! Models split into several files, `NAME-00001-of-00003.gguf` and so on: opening any part opens them all.
//!
//! Every part counts itself from 0 (`split.no`), says how many parts there are (`split.count`) and how many tensors all
//! of them hold (`split.tensors.count`); the model's own metadata is in the first.

use std::path::{Path, PathBuf};

use super::error::{MetadataError, OptionalMetadata, SplitError};
use super::metadata::Metadata;

/// What a part says about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SplitPlace {
    /// The part's number, from 0.
    pub(super) no: u32,
    /// How many parts there are, 2 or more.
    pub(super) count: u32,
    /// Tensors in all parts together.
    pub(super) num_tensors: Option<u64>,
}

impl SplitPlace {
    /// `None` for a model in one file.
    pub(super) fn of(metadata: &Metadata) -> Result<Option<Self>, MetadataError> {
        match metadata.u32("split.count").optional()? {
            None | Some(0 | 1) => Ok(None),
            Some(count) => {
                let num_tensors = metadata.u64("split.tensors.count").optional()?;
                Ok(Some(Self { no: metadata.u32("split.no")?, count, num_tensors }))
            }
        }
    }

    /// The paths of all parts, derived from the path of this one.
    ///
    /// # Errors
    /// The number is out of range, or the file's name does not end as the name of this part must.
    pub(super) fn paths(self, path: &Path) -> Result<impl Fn(u32) -> PathBuf + use<>, SplitError> {
        let Self { no, count, .. } = self;
        if no >= count {
            return Err(SplitError::Numbering { no, count });
        }
        let expected = name_ending(no, count);
        let stem = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_suffix(&expected));
        let Some(stem) = stem.map(str::to_owned) else {
            return Err(SplitError::Name { no, count, expected });
        };
        let path = path.to_owned();
        Ok(move |no| path.with_file_name(format!("{stem}{}", name_ending(no, count))))
    }

    /// Checks what the file at `path` says about itself against the place in which it was found.
    pub(super) fn check(self, found: Option<Self>, path: &Path) -> Result<(), SplitError> {
        let (found_no, found_count) = found.map_or((0, 1), |found| (found.no, found.count));
        if (found_no, found_count) == (self.no, self.count) {
            return Ok(());
        }
        Err(SplitError::WrongPart { path: path.to_owned(), found_no, found_count, no: self.no, count: self.count })
    }
}

/// How the file name of a part ends; names count from 1.
fn name_ending(no: u32, count: u32) -> String {
    format!("-{:05}-of-{count:05}.gguf", u64::from(no) + 1)
}
