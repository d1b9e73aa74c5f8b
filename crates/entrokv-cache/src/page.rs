//! Pages: how one is numbered, and how its elements are stored.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::shape::CacheShape;

/// A page of one KV group: page `p` holds the positions `p * page_size` to `(p + 1) * page_size - 1`.
///
/// The number is the page's for the life of its sequence; evicting other pages does not change it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageIndex(pub u32);

impl PageIndex {
    /// Absolute position of the page's first token.
    pub fn first_position(self, page_size: usize) -> u32 {
        self.0 * page_size as u32
    }
}

/// How the keys and values of a page are stored.
///
/// Coded kinds join this enum when they work; everything that depends on a page's kind asks here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PageKind {
    /// 32-bit floats.
    F32,
    /// 16-bit floats: the default.
    F16,
}

impl PageKind {
    /// Every kind, in the order of [`PageKind::ordinal`].
    pub const ALL: [PageKind; 2] = [PageKind::F32, PageKind::F16];

    /// Position of this kind in [`PageKind::ALL`].
    pub const fn ordinal(self) -> usize {
        self as usize
    }

    /// The name it goes by on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            PageKind::F32 => "f32",
            PageKind::F16 => "f16",
        }
    }

    /// Payload bytes of one page: keys and values of `page_size` tokens of one KV head (`2 B d b_el`).
    pub fn page_bytes(self, shape: &CacheShape) -> u64 {
        let element_bytes = match self {
            PageKind::F32 => 4,
            PageKind::F16 => 2,
        };
        2 * shape.page_size as u64 * shape.head_dim as u64 * element_bytes
    }
}

impl fmt::Display for PageKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for PageKind {
    type Err = PageKindError;

    fn from_str(text: &str) -> Result<Self, PageKindError> {
        Self::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(|| PageKindError { got: text.to_owned() })
    }
}

/// The name of no kind of page.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("unknown kind of page {got:?}: the kinds are {}", PageKind::ALL.map(PageKind::name).join(", "))]
pub struct PageKindError {
    /// The name given.
    pub got: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::LayerKind;

    #[test]
    fn page_bytes_are_those_of_the_specification() {
        // Section 2 of the specification, B = 16: head dimension, f16 bytes, f32 bytes.
        for (head_dim, f16, f32) in [(64, 4096, 8192), (128, 8192, 16384), (256, 16384, 32768)] {
            let shape = CacheShape::new(vec![LayerKind::Global], 1, 1, head_dim, 16).unwrap();
            assert_eq!((PageKind::F16.page_bytes(&shape), PageKind::F32.page_bytes(&shape)), (f16, f32));
        }
    }

    #[test]
    fn names_parse_back_and_unknown_ones_list_the_known() {
        for (ordinal, kind) in PageKind::ALL.into_iter().enumerate() {
            assert_eq!(kind.name().parse(), Ok(kind));
            assert_eq!(kind.ordinal(), ordinal);
        }
        let error = "tq4".parse::<PageKind>().unwrap_err();
        assert_eq!(error.to_string(), r#"unknown kind of page "tq4": the kinds are f32, f16"#);
    }
}
