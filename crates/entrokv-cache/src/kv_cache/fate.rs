//! What a plan decides for each page, and how a cache refuses what cannot be.

use std::ops::{AddAssign, Range};

use thiserror::Error;

use crate::page::PageIndex;
use crate::page_kind::PageKind;
use crate::pool::PoolExhausted;

/// What becomes of one resident page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PageFate {
    /// It stays as it is.
    Keep,
    /// It stays, stored as this kind in a frame of its size. Its own kind means [`PageFate::Keep`].
    Recode(PageKind),
    /// Its frame goes back to the pool, and its tokens are gone for good.
    Free,
}

/// A page on its way to another kind or into a frame of its own: whoever keeps the bytes encodes or copies those of one place
/// into the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageMove {
    /// Which page of its KV group it is.
    pub page: PageIndex,
    /// Tokens filled.
    pub len: u32,
    /// Where it lies; these bytes are the pool's again afterwards.
    pub from: PagePlace,
    /// Where it will lie: a new frame, its bytes undefined.
    pub to: PagePlace,
}

/// A page's frame and what its bytes mean.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PagePlace {
    /// How the page is stored there.
    pub kind: PageKind,
    /// Bytes of the frame.
    pub range: Range<u64>,
}

/// Moves tokens of one KV group together: those at the places given last, ascending and counted through the pages given first,
/// to the places from 0 on, counted through the pages given second. A page of both may lie in a frame of both.
pub type MoveTokens<'a> = dyn FnMut(&[PagePlace], &[PagePlace], &[u32]) + 'a;

/// What applying fates did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Applied {
    /// Pages given back to the pool.
    pub pages_freed: u64,
    /// Tokens they held.
    pub tokens_freed: u64,
    /// Bytes of their frames.
    pub bytes_freed: u64,
    /// Pages that are stored as another kind now.
    pub pages_recoded: u64,
}

impl AddAssign for Applied {
    fn add_assign(&mut self, other: Self) {
        self.pages_freed += other.pages_freed;
        self.tokens_freed += other.tokens_freed;
        self.bytes_freed += other.bytes_freed;
        self.pages_recoded += other.pages_recoded;
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
    #[error("page {} is still being filled and can be neither freed nor re-encoded", page.0)]
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
    /// Tokens that cannot be moved together.
    #[error(
        "{got} tokens cannot be kept of {closed} in full pages of {page_size}: different ones, of whole pages' worth, can"
    )]
    Tokens {
        /// Tokens that were to be kept.
        got: usize,
        /// Tokens there are, but for those of the open page.
        closed: usize,
        /// Tokens a page.
        page_size: usize,
    },
    /// Tokens of pages that are codes, or not all of one kind.
    #[error("tokens of layer {layer} cannot be moved together: pages of them are codes")]
    CodedTokens {
        /// The layer.
        layer: u32,
    },
    /// Codes that were to be encoded again.
    #[error("page {} cannot be re-encoded from {from} to {to}: codes stay what they are", page.0)]
    Coded {
        /// The page.
        page: PageIndex,
        /// What it is.
        from: PageKind,
        /// What it was to become.
        to: PageKind,
    },
    /// No room for the new frames beside the old ones.
    #[error(transparent)]
    Pool(#[from] PoolExhausted),
}
