//! Pages that stay whatever their score.
//!
//! Pins are inside the budget: a pinned page takes the place of another. The newest pages include the one being filled,
//! so that a budget of two pages, the sink page and the open one, pins nothing twice and can always be kept.

use std::fmt;
use std::str::FromStr;

use crate::page::PageIndex;

/// What is pinned: the pages of the first tokens, the newest pages, and always the open page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Pins {
    /// Every page that holds one of this many first positions is pinned.
    pub sink_tokens: usize,
    /// So many of the newest pages are pinned, the open page being the newest.
    pub recent_pages: RecentPages,
}

/// How many of the newest pages are pinned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RecentPages {
    /// This many.
    Count(usize),
    /// A quarter of the budget's pages, rounded down, but one at least.
    Quarter,
    /// Half of the budget's pages, rounded down, but one at least.
    Half,
    /// As many as may hold one of this many newest tokens.
    Tokens(usize),
}

/// Where the page being filled stands among the resident pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OpenPage {
    /// The newest resident page is full and no further one is planned: the end of a prompt on a page boundary.
    None,
    /// The newest resident page is partly filled.
    Newest,
    /// The newest resident page is full and the next one is about to be opened: it will be the newest.
    Next,
}

impl Default for Pins {
    /// The paper's: four sinks, and no recent page beyond the open one.
    fn default() -> Self {
        Self { sink_tokens: 4, recent_pages: RecentPages::Count(0) }
    }
}

impl Pins {
    /// Pages that hold the sinks.
    pub fn sink_pages(&self, page_size: usize) -> usize {
        self.sink_tokens.div_ceil(page_size)
    }

    /// The smallest budget, in pages per KV group, that holds the sink pages, the newest pages asked for, and the open
    /// page, which is the newest.
    ///
    /// While a sequence is shorter than its sinks, the open page is a sink page too and less would do, but every
    /// sequence that goes on needs this much.
    pub fn smallest_pages(&self, page_size: usize) -> usize {
        let sinks = self.sink_pages(page_size);
        match self.recent_pages {
            RecentPages::Count(count) => sinks.saturating_add(count.max(1)),
            // The least k with k - max(1, floor(k / 4)) >= s. Since k - floor(k / 4) = ceil(3k / 4), that is
            // k >= s + 1 and 3k / 4 > s - 1.
            RecentPages::Quarter => {
                let by_quarter = sinks.checked_sub(1).map_or(0, |s| 4 * (s as u128) / 3 + 1);
                sinks.saturating_add(1).max(usize::try_from(by_quarter).unwrap_or(usize::MAX))
            }
            // In the same way k - floor(k / 2) = ceil(k / 2) >= s.
            RecentPages::Half => sinks.saturating_add(1).max(sinks.saturating_mul(2).saturating_sub(1)),
            RecentPages::Tokens(_) => sinks.saturating_add(self.recent_pages.under(0, page_size).max(1)),
        }
    }

    /// The pinned ones of a group's resident `pages` (ascending), as places in that list, under a budget of
    /// `budget_pages`: sink pages first, ascending, then from the newest page backwards, each once.
    ///
    /// A selection that has room for fewer takes them in this order (rule R10 of the golden files).
    pub fn pinned(&self, pages: &[PageIndex], page_size: usize, budget_pages: usize, open: OpenPage) -> Vec<usize> {
        let sink_pages = self.sink_pages(page_size);
        let num_sinks = pages.partition_point(|page| (page.0 as usize) < sink_pages);
        let num_newest = self.num_newest(page_size, budget_pages, open);
        let oldest_recent = pages.len().saturating_sub(num_newest).max(num_sinks);
        (0..num_sinks).chain((oldest_recent..pages.len()).rev()).collect()
    }

    /// How many of `num_pages` pages, all the sinks' among them, [`Pins::pinned`] lists.
    pub fn num_pinned(&self, num_pages: usize, page_size: usize, budget_pages: usize, open: OpenPage) -> usize {
        let num_sinks = self.sink_pages(page_size).min(num_pages);
        num_sinks + self.num_newest(page_size, budget_pages, open).min(num_pages - num_sinks)
    }

    /// Resident pages that are pinned for being the newest.
    fn num_newest(&self, page_size: usize, budget_pages: usize, open: OpenPage) -> usize {
        let recent = self.recent_pages.under(budget_pages, page_size);
        match open {
            OpenPage::None => recent,
            OpenPage::Newest => recent.max(1),
            OpenPage::Next => recent.saturating_sub(1),
        }
    }
}

impl Pins {
    /// As [`Pins::pinned`], where tokens are decided about one by one: the pinned ones of a group's resident tokens at
    /// `positions` (ascending), as places in that list. `open` says how many of them are in the open page, if one is open.
    ///
    /// Sinks are the tokens themselves and no neighbours in their pages; so are the newest tokens where those are counted.
    pub fn pinned_tokens(
        &self,
        positions: &[u32],
        page_size: usize,
        budget_pages: usize,
        open: OpenPage,
        num_open: usize,
    ) -> Vec<usize> {
        let num_sinks = positions.partition_point(|&position| (position as usize) < self.sink_tokens);
        let pages = self.recent_pages.under(budget_pages, page_size);
        let num_newest = match (self.recent_pages, open) {
            (RecentPages::Tokens(count), OpenPage::Next) => count.saturating_sub(1),
            (RecentPages::Tokens(count), _) => count.max(num_open),
            (_, OpenPage::None) => pages.saturating_mul(page_size),
            (_, OpenPage::Newest) => (pages.max(1) - 1).saturating_mul(page_size).saturating_add(num_open),
            (_, OpenPage::Next) => pages.saturating_sub(1).saturating_mul(page_size),
        };
        let oldest_recent = positions.len().saturating_sub(num_newest).max(num_sinks);
        (0..num_sinks).chain((oldest_recent..positions.len()).rev()).collect()
    }
}

impl RecentPages {
    /// The spellings, in words.
    pub(crate) const EXPECTED: &'static str =
        "a number of pages, 0 or more, quarter, half, or Ntok with N of 1 or more";

    /// How many that is under a budget of `budget_pages` pages of `page_size` tokens.
    pub fn under(self, budget_pages: usize, page_size: usize) -> usize {
        match self {
            RecentPages::Count(count) => count,
            RecentPages::Quarter => (budget_pages / 4).max(1),
            RecentPages::Half => (budget_pages / 2).max(1),
            // The newest token may be the first of its page.
            RecentPages::Tokens(count) => count.saturating_add(page_size - 1).div_ceil(page_size),
        }
    }
}

impl fmt::Display for RecentPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RecentPages::Count(count) => write!(f, "{count}"),
            RecentPages::Quarter => f.write_str("quarter"),
            RecentPages::Half => f.write_str("half"),
            RecentPages::Tokens(count) => write!(f, "{count}tok"),
        }
    }
}

impl FromStr for RecentPages {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let number = |text: &str| text.parse().map_err(|_| ());
        match (text, text.strip_suffix("tok")) {
            ("quarter", _) => Ok(RecentPages::Quarter),
            ("half", _) => Ok(RecentPages::Half),
            (_, Some(tokens)) => number(tokens).and_then(|n| if n > 0 { Ok(RecentPages::Tokens(n)) } else { Err(()) }),
            (pages, None) => number(pages).map(RecentPages::Count),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pages(indices: &[u32]) -> Vec<PageIndex> {
        indices.iter().copied().map(PageIndex).collect()
    }

    #[test]
    fn sinks_come_first_then_the_newest_backwards() {
        let pins = |sink_tokens, recent_pages| Pins { sink_tokens, recent_pages };
        let count = RecentPages::Count;
        let cases = [
            (Pins::default(), vec![0, 1, 2, 3], 2, OpenPage::None, vec![0]),
            (Pins::default(), vec![0, 1, 2, 3], 2, OpenPage::Newest, vec![0, 3]),
            (Pins::default(), vec![0, 1, 2, 3], 2, OpenPage::Next, vec![0]),
            (pins(4, count(2)), vec![0, 4, 7, 9], 9, OpenPage::None, vec![0, 3, 2]),
            (pins(4, count(2)), vec![0, 4, 7, 9], 9, OpenPage::Newest, vec![0, 3, 2]),
            (pins(4, count(2)), vec![0, 4, 7, 9], 9, OpenPage::Next, vec![0, 3]),
            (pins(33, count(1)), vec![0, 1, 2, 9], 9, OpenPage::None, vec![0, 1, 2, 3]),
            (pins(0, count(0)), vec![3, 5], 9, OpenPage::None, Vec::<usize>::new()),
            (pins(4, RecentPages::Quarter), vec![0, 1, 2, 3, 4], 12, OpenPage::None, vec![0, 4, 3, 2]),
            // A page that is sink and open counts once.
            (pins(4, count(3)), vec![0], 2, OpenPage::Newest, vec![0]),
        ];
        for (pins, resident, budget, open, expected) in cases {
            assert_eq!(pins.pinned(&pages(&resident), 16, budget, open), expected, "{pins:?} {resident:?} {open:?}");
        }
    }

    #[test]
    fn smallest_budgets_count_sinks_and_the_open_page() {
        let smallest = |sink_tokens, recent_pages| Pins { sink_tokens, recent_pages }.smallest_pages(16);
        assert_eq!(smallest(4, RecentPages::Count(0)), 2);
        assert_eq!(smallest(4, RecentPages::Count(1)), 2);
        assert_eq!(smallest(4, RecentPages::Count(3)), 4);
        assert_eq!(smallest(0, RecentPages::Count(0)), 1);
        assert_eq!(smallest(17, RecentPages::Count(0)), 3);
        assert_eq!(smallest(4, RecentPages::Quarter), 2);
        assert_eq!(smallest(128, RecentPages::Quarter), 10);
        assert_eq!(smallest(usize::MAX, RecentPages::Count(usize::MAX)), usize::MAX);
        assert_eq!(Pins::default().smallest_pages(1), 5);
    }

    fn recent_pages() -> impl Strategy<Value = RecentPages> {
        prop_oneof![
            Just(RecentPages::Quarter),
            Just(RecentPages::Half),
            (0..9_usize).prop_map(RecentPages::Count),
            (1..99_usize).prop_map(RecentPages::Tokens),
        ]
    }

    #[test]
    fn recent_pages_print_what_they_parse_from() {
        for text in ["0", "7", "quarter", "half", "32tok"] {
            assert_eq!(text.parse::<RecentPages>().map(|recent| recent.to_string()).as_deref(), Ok(text));
        }
        for text in ["", "-1", "0tok", "tok", "third", "1.5"] {
            assert_eq!(text.parse::<RecentPages>(), Err(()), "{text}");
        }
        // 32 tokens may lie in three pages of 16, and do not need a second page of 1 each.
        assert_eq!([1, 16, 64].map(|page_size| RecentPages::Tokens(32).under(99, page_size)), [32, 3, 2]);
    }

    proptest! {
        /// The closed form is the least fixed point: that many pages hold their own pins, one less does not.
        #[test]
        fn the_smallest_budget_holds_its_pins_and_no_smaller_one_does(
            sink_tokens in 0_usize..2000, page_size in 1_usize..257, recent_pages in recent_pages(),
        ) {
            let pins = Pins { sink_tokens, recent_pages };
            let holds = |k: usize| pins.sink_pages(page_size) + recent_pages.under(k, page_size).max(1) <= k;
            let smallest = pins.smallest_pages(page_size);
            prop_assert!(holds(smallest) && holds(smallest + 1));
            prop_assert!(!holds(smallest - 1));
        }

        /// The same for tokens: what is pinned fits the pages of the budget, those of the open page and sinks among it.
        #[test]
        fn pinned_tokens_fit_every_budget_that_is_not_refused(
            sink_tokens in 0_usize..100, recent_pages in recent_pages(), page_size in 1_usize..40,
            extra in 0_usize..30, num_pages in 0_usize..80, num_open in 0_usize..40, first in 0_u32..9,
        ) {
            let pins = Pins { sink_tokens, recent_pages };
            let budget = pins.smallest_pages(page_size) + extra;
            let num_open = num_open % page_size;
            let num_tokens = num_pages * page_size + num_open;
            let positions: Vec<u32> = (first..first + num_tokens as u32).collect();
            let (open, pages_taken) = if num_open > 0 { (OpenPage::Newest, 1) } else { (OpenPage::None, 0) };
            for (open, pages_taken) in [(open, pages_taken), (OpenPage::Next, 1)] {
                let num_open = if open == OpenPage::Newest { num_open } else { 0 };
                let mut pinned = pins.pinned_tokens(&positions, page_size, budget, open, num_open);
                pinned.sort_unstable();
                prop_assert!(pinned.is_sorted_by(|a, b| a < b));
                prop_assert!(pinned.len() <= (budget - pages_taken) * page_size + num_open);
                prop_assert!(pinned.iter().filter(|&&place| positions[place] < sink_tokens as u32).count()
                    == positions.iter().filter(|&&position| position < sink_tokens as u32).count());
                prop_assert!((num_tokens - num_open..num_tokens).all(|place| pinned.binary_search(&place).is_ok()));
            }
        }

        /// Under any budget of at least the smallest, pinned pages leave room, the page about to be opened included.
        #[test]
        fn pins_fit_every_budget_that_is_not_refused(
            sink_tokens in 0_usize..100, recent_pages in recent_pages(), page_size in 1_usize..40,
            extra in 0_usize..30, num_pages in 0_u32..80,
        ) {
            let pins = Pins { sink_tokens, recent_pages };
            let budget = pins.smallest_pages(page_size) + extra;
            let resident = pages(&(0..num_pages).collect::<Vec<_>>());
            for (open, reserved) in [(OpenPage::None, 0), (OpenPage::Newest, 0), (OpenPage::Next, 1)] {
                let mut pinned = pins.pinned(&resident, page_size, budget, open);
                prop_assert!(pinned.len() + reserved <= budget);
                prop_assert_eq!(pins.num_pinned(resident.len(), page_size, budget, open), pinned.len());
                pinned.sort_unstable();
                pinned.dedup();
                prop_assert_eq!(pinned.len(), pins.pinned(&resident, page_size, budget, open).len());
                prop_assert!(open != OpenPage::Newest || num_pages == 0 || pinned.last() == Some(&(num_pages as usize - 1)));
            }
        }
    }
}
