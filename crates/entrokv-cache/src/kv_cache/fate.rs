//! What a plan decides for each page, and how a cache refuses what cannot be.

use std::ops::AddAssign;

use thiserror::Error;

use crate::page::{PageIndex, PageKind};

/// What becomes of one resident page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PageFate {
    /// It stays as it is.
    Keep,
    /// It stays, stored as this kind. Its own kind means [`PageFate::Keep`]; others are not supported yet.
    Recode(PageKind),
    /// Its frame goes back to the pool, and its tokens are gone for good.
    Free,
}

/// What applying fates freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Applied {
    /// Pages given back to the pool.
    pub pages_freed: u64,
    /// Tokens they held.
    pub tokens_freed: u64,
    /// Bytes of their frames.
    pub bytes_freed: u64,
}

impl AddAssign for Applied {
    fn add_assign(&mut self, other: Self) {
        self.pages_freed += other.pages_freed;
        self.tokens_freed += other.tokens_freed;
        self.bytes_freed += other.bytes_freed;
    }
}

/// Why fates were refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum FateError {
    /// Not one fate a page.
    #[error("{got} fates were given for {resident} resident pages")]
    Count {
        /// Fates given.
        got: usize,
        /// Pages resident.
        resident: usize,
    },
    /// The page being filled must stay: the next token goes there.
    #[error("page {} is still being filled and cannot be freed", page.0)]
    OpenPage {
        /// The open page.
        page: PageIndex,
    },
    /// Layers with a window keep their window and nothing else.
    #[error("layer {layer} has a window: its pages are not freed by a policy")]
    WindowLayer {
        /// The layer.
        layer: u32,
    },
    /// A change of kind.
    #[error("re-encoding page {} from {from} to {to} is not supported yet", page.0)]
    RecodeUnsupported {
        /// The page.
        page: PageIndex,
        /// What it is.
        from: PageKind,
        /// What it was to become.
        to: PageKind,
    },
}
