//! What the pages of a KV group weigh while some are stored as they were written and the rest as codes.

use crate::page_kind::PageKind;
use crate::shape::CacheShape;

/// Kinds of the pages of a KV group, and how many of them can be of the heavier one.
///
/// A coded cache keeps the pages of its sinks, of its newest tokens and the open one as they were written; all others are
/// codes. What `n` pages weigh *at most* follows, and budgets count with that, so that they hold whatever page is where.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageCost {
    /// Kind of a page while it is written.
    pub written: PageKind,
    /// Kind of a page once it has been encoded.
    pub stored: PageKind,
    /// Most pages of a group that are of the first kind at any time; `usize::MAX` where none is encoded yet.
    pub max_written: usize,
}

impl From<PageKind> for PageCost {
    /// All pages of one kind.
    fn from(kind: PageKind) -> Self {
        Self { written: kind, stored: kind, max_written: usize::MAX }
    }
}

impl PageCost {
    /// Most bytes that `num_pages` pages of one group hold.
    pub fn bytes(&self, num_pages: usize, shape: &CacheShape) -> u64 {
        let written = num_pages.min(self.max_written);
        let of = |pages: usize, kind: PageKind| (pages as u64).saturating_mul(kind.page_bytes(shape));
        of(written, self.written).saturating_add(of(num_pages - written, self.stored))
    }

    /// Most pages of one group that never hold more than `bytes`.
    pub fn pages_within(&self, bytes: u64, shape: &CacheShape) -> usize {
        let fits = |bytes: u64, kind: PageKind| usize::try_from(bytes / kind.page_bytes(shape)).unwrap_or(usize::MAX);
        let written = fits(bytes, self.written).min(self.max_written);
        if written < self.max_written {
            return written;
        }
        written.saturating_add(fits(bytes - self.bytes(written, shape), self.stored))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::encoding::Encoding;
    use crate::shape::LayerKind;

    fn shape() -> CacheShape {
        CacheShape::new(vec![LayerKind::Global], 1, 1, 64, 16).unwrap()
    }

    #[test]
    fn pages_weigh_what_their_kinds_say() {
        let cost = PageCost { written: PageKind::F16, stored: PageKind::of(Encoding::Tq4), max_written: 4 };
        assert_eq!([0, 3, 4, 10].map(|n| cost.bytes(n, &shape())), [0, 12_288, 16_384, 16_384 + 6 * 1_088]);
        let plain = PageCost::from(PageKind::F16);
        assert_eq!((plain.bytes(10, &shape()), plain.pages_within(40_959, &shape())), (40_960, 9));
        assert_eq!(plain.pages_within(u64::MAX, &shape()), (u64::MAX / 4096) as usize);
    }

    proptest! {
        /// That many pages fit, and one more does not.
        #[test]
        fn pages_within_is_the_largest_number_that_fits(
            bytes in 0_u64..200_000, max_written in prop_oneof![0_usize..20, Just(usize::MAX)],
            stored in prop::sample::select(Encoding::ALL.to_vec()),
        ) {
            let stored = PageKind::of(stored);
            let cost = PageCost { written: stored.written_as(), stored, max_written };
            let pages = cost.pages_within(bytes, &shape());
            prop_assert!(cost.bytes(pages, &shape()) <= bytes);
            prop_assert!(cost.bytes(pages + 1, &shape()) > bytes);
        }
    }
}
