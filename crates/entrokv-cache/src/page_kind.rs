//! Kinds of page: how its keys and its values are stored, each for itself.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::encoding::Encoding;
use crate::shape::CacheShape;

/// Coded heads are whole blocks of so many elements.
const CODED_HEAD_MULTIPLE: usize = 32;
/// Elements of a coded head at most: the integer sums of attention must fit.
const MAX_CODED_HEAD_DIM: usize = 512;
/// Coded pages are whole strips of so many tokens.
const CODED_PAGE_MULTIPLE: usize = 16;

/// How the keys and values of a page are stored.
///
/// It is written `tq4` where both are alike, `tq3v2` for rotated codes of 3 bits for keys and 2 bits for values, and
/// `KEYS/VALUES` for any other pair, such as `q8_0/tq4`.
///
/// ```
/// use entrokv_cache::{Encoding, PageKind};
///
/// let kind: PageKind = "tq3v2".parse()?;
/// assert_eq!(kind, PageKind { keys: Encoding::Tq3, values: Encoding::Tq2 });
/// assert_eq!("tq3/tq2".parse(), Ok(kind));
/// assert_eq!(kind.written_as(), PageKind::F16);
/// # Ok::<(), entrokv_cache::PageKindError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageKind {
    /// How keys are stored.
    pub keys: Encoding,
    /// How values are stored.
    pub values: Encoding,
}

impl PageKind {
    /// 32-bit floats.
    pub const F32: PageKind = PageKind::of(Encoding::F32);
    /// 16-bit floats: the default.
    pub const F16: PageKind = PageKind::of(Encoding::F16);

    /// Keys and values stored alike.
    pub const fn of(encoding: Encoding) -> Self {
        Self { keys: encoding, values: encoding }
    }

    /// Whether keys or values are codes, so that tokens are written as another kind first.
    pub const fn is_coded(self) -> bool {
        self.keys.is_coded() || self.values.is_coded()
    }

    /// Whether keys must have a centre and a channel scale before they can be encoded.
    pub const fn needs_constants(self) -> bool {
        self.keys.is_rotated()
    }

    /// Kind of a page while tokens are written into it: itself where it is plain.
    pub const fn written_as(self) -> Self {
        Self { keys: self.keys.written_as(), values: self.values.written_as() }
    }

    /// Whether a page of this kind may be stored as `to`: codes stay what they are.
    pub const fn can_become(self, to: Self) -> bool {
        self.keys.can_become(to.keys) && self.values.can_become(to.values)
    }

    /// Payload bytes of one page: keys and values of `page_size` tokens of one KV head.
    pub const fn page_bytes(self, shape: &CacheShape) -> u64 {
        self.keys.key_bytes(shape) + self.values.value_bytes(shape)
    }

    /// Whether pages of `shape` can be of this kind.
    ///
    /// # Errors
    /// [`KindShapeError`] for codes whose head dimension is above 512 or no multiple of 32, or whose pages are not of a
    /// multiple of 16 tokens.
    pub fn check(self, shape: &CacheShape) -> Result<(), KindShapeError> {
        if !self.is_coded() {
            return Ok(());
        }
        if !shape.head_dim.is_multiple_of(CODED_HEAD_MULTIPLE) || shape.head_dim > MAX_CODED_HEAD_DIM {
            return Err(KindShapeError::HeadDim { kind: self, got: shape.head_dim });
        }
        if !shape.page_size.is_multiple_of(CODED_PAGE_MULTIPLE) {
            return Err(KindShapeError::PageSize { kind: self, got: shape.page_size });
        }
        Ok(())
    }
}

impl fmt::Display for PageKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { keys, values } = *self;
        if keys == values {
            f.pad(keys.name())
        } else if keys.is_rotated() && values.is_rotated() {
            f.pad(&format!("{keys}v{}", values.name().trim_start_matches("tq")))
        } else {
            f.pad(&format!("{keys}/{values}"))
        }
    }
}

impl FromStr for PageKind {
    type Err = PageKindError;

    fn from_str(text: &str) -> Result<Self, PageKindError> {
        let pair = |keys: &str, values: &str| Some(Self { keys: keys.parse().ok()?, values: values.parse().ok()? });
        let kind = if let Some((keys, values)) = text.split_once('/') {
            pair(keys, values)
        } else {
            // A name may have a `v` in it too.
            let short = |(keys, bits): (&str, &str)| pair(keys, &format!("tq{bits}"));
            let short = || text.split_once('v').and_then(short).filter(|kind| kind.keys.is_rotated());
            pair(text, text).or_else(short)
        };
        kind.ok_or_else(|| PageKindError { got: text.to_owned() })
    }
}

/// The name of no kind of page.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "unknown cache type {got:?}: the types are {}, and pairs of keys and values such as tq3v2 or q8_0/tq4",
    Encoding::ALL.map(Encoding::name).join(", ")
)]
pub struct PageKindError {
    /// The name given.
    pub got: String,
}

/// Why the pages of a geometry cannot be of a kind.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum KindShapeError {
    /// Heads that are no whole blocks, or too wide.
    #[error(
        "cache type {kind} needs a head dimension that is a multiple of {CODED_HEAD_MULTIPLE} and at most \
         {MAX_CODED_HEAD_DIM}, got {got}"
    )]
    HeadDim {
        /// The kind.
        kind: PageKind,
        /// The head dimension.
        got: usize,
    },
    /// Pages that are no whole strips.
    #[error("cache type {kind} needs pages of a multiple of {CODED_PAGE_MULTIPLE} tokens, got {got}")]
    PageSize {
        /// The kind.
        kind: PageKind,
        /// The page size.
        got: usize,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::LayerKind;

    fn shape(head_dim: usize, page_size: usize) -> CacheShape {
        CacheShape::new(vec![LayerKind::Global], 1, 1, head_dim, page_size).unwrap()
    }

    #[test]
    fn page_bytes_are_those_of_the_specification() {
        // Kind, bytes of a 16-token page for head dimensions of 64, 128 and 256.
        let cases = [
            ("f32", [8192, 16384, 32768]),
            ("f16", [4096, 8192, 16384]),
            ("bf16", [4096, 8192, 16384]),
            ("q8_0", [2176, 4352, 8704]),
            ("tq4", [1088, 2112, 4160]),
            ("tq3", [832, 1600, 3136]),
            ("tq2", [576, 1088, 2112]),
            ("kivi4", [1408, 2816, 5632]),
            ("kivi2", [896, 1792, 3584]),
            ("tq3v2", [704, 1344, 2624]),
            ("f16/tq4", [2592, 5152, 10272]),
            ("kivi4/kivi2", [1152, 2304, 4608]),
            ("q8_0/kivi4", [1728, 3456, 6912]),
        ];
        for (name, bytes) in cases {
            let kind: PageKind = name.parse().unwrap();
            assert_eq!([64, 128, 256].map(|head_dim| kind.page_bytes(&shape(head_dim, 16))), bytes, "{name}");
        }
    }

    #[test]
    fn every_pair_has_a_name_that_parses_back() {
        let mut names = std::collections::HashSet::new();
        for keys in Encoding::ALL {
            for values in Encoding::ALL {
                let kind = PageKind { keys, values };
                assert_eq!(kind.to_string().parse(), Ok(kind));
                assert_eq!(format!("{keys}/{values}").parse(), Ok(kind));
                assert!(names.insert(kind.to_string()));
                assert_eq!(kind.is_coded(), keys.is_coded() || values.is_coded());
                assert!(!kind.written_as().is_coded() && kind.written_as().can_become(kind));
            }
        }
        assert_eq!("tq4v2".parse(), Ok(PageKind { keys: Encoding::Tq4, values: Encoding::Tq2 }));
        assert_eq!(format!("{:<6}|", PageKind::F16), "f16   |");
    }

    #[test]
    fn what_is_no_kind_lists_the_kinds() {
        for got in [
            "",
            "kivi3",
            "kivi4v2",
            "tq5",
            "F16",
            "f16/",
            "/f16",
            "tq3v",
            "tq3v9",
            "f16v2",
            "q8_0v4",
            "tq3/tq2/tq2",
            "tq3vtq2",
            "q4_0",
        ] {
            assert_eq!(got.parse::<PageKind>(), Err(PageKindError { got: got.to_string() }), "{got}");
        }
        let message = r#"unknown cache type "q4_0": the types are f32, f16, bf16, q8_0, tq4, tq3, tq2, kivi4, kivi2, and pairs of keys and values such as tq3v2 or q8_0/tq4"#;
        assert_eq!("q4_0".parse::<PageKind>().unwrap_err().to_string(), message);
    }

    #[test]
    fn codes_need_whole_blocks_and_strips() {
        let check = |name: &str, head_dim, page_size| {
            name.parse::<PageKind>().unwrap().check(&shape(head_dim, page_size)).map_err(|error| error.to_string())
        };
        assert_eq!(check("f16", 80, 5), Ok(()));
        for head_dim in [32, 64, 96, 256] {
            assert_eq!(check("tq3v2", head_dim, 48), Ok(()));
        }
        let refused = |text: &str| Err(text.to_string());
        for head_dim in [80, 544] {
            let message = "cache type tq4 needs a head dimension that is a multiple of 32 and at most 512, got ";
            assert_eq!(check("tq4", head_dim, 16), refused(&format!("{message}{head_dim}")));
        }
        assert_eq!(
            check("f16/q8_0", 64, 20),
            refused("cache type f16/q8_0 needs pages of a multiple of 16 tokens, got 20")
        );
        assert_eq!(check("kivi4/kivi2", 96, 48), Ok(()));
        assert_eq!(check("kivi4", 64, 24), refused("cache type kivi4 needs pages of a multiple of 16 tokens, got 24"));
        assert_eq!(
            check("q8_0/kivi2", 48, 16),
            refused("cache type q8_0/kivi2 needs a head dimension that is a multiple of 32 and at most 512, got 48")
        );
    }
}
