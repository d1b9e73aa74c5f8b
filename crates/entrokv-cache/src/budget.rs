//! How much of a cache may stay: stated by a user, resolved once, in integers.
//!
//! A budget caps the pages of each KV group of global layers; window layers keep their window and are outside it.
//! Everything rounds down, so that what is held never exceeds what was asked, except that a fraction is raised to the
//! smallest budget there is ([`Pins::smallest_pages`]) and says so.
//!
//! Invariants, each a test of that name:
//!
//! * `budgets_print_what_they_parse_from`.
//! * `a_resolved_budget_never_exceeds_what_was_asked`, unless raised; for coded caches its bytes are the most that so many
//!   pages can weigh, whichever of them are still as they were written ([`PageCost`]).
//! * `absolute_budgets_below_the_pins_are_refused`, naming both numbers.
//! * `fractions_below_the_pins_are_raised`.
//! * `a_hundred_percent_is_unlimited`.

mod parse;
mod ratio;

use std::fmt;

use thiserror::Error;

use crate::page_cost::PageCost;
use crate::page_kind::PageKind;
use crate::pins::Pins;
use crate::shape::CacheShape;

pub use self::parse::BudgetParseError;
use self::parse::EVICT_PREFIX;
pub use self::ratio::{Ratio, RatioError};

/// A cap on a sequence's cache, as stated.
///
/// It parses from
/// * `64MiB`, `1.5GB`, `4096B`: bytes of the whole sequence (KiB, MiB, GiB, TiB are powers of 1,024; kB, MB, GB, TB of
///   1,000), split evenly over the KV groups of global layers;
/// * `512tok`, `512 tokens`: tokens per KV group;
/// * `40pages`: pages per KV group;
/// * `20%`, `12.5%`, `0.2`, `1/5`: an exact fraction of the prompt's tokens, 100 % and more keeping everything;
/// * `evict:0.9`, `evict:90%`, `evict:9/10`: the part given up, which kvpress calls its compression ratio.
///
/// Units may be in any case and set off by spaces. A bare integer is refused, since it does not say what it counts.
///
/// ```
/// use entrokv_cache::{Budget, CacheShape, LayerKind, PageKind, Pins};
///
/// let shape = CacheShape::new(vec![LayerKind::Global; 30], 3, 3, 64, 16)?;
/// let budget: Budget = "20%".parse()?;
/// let resolved = budget.resolve(&shape, PageKind::F16, 1024, &Pins::default())?;
/// // floor(0.2 * 1,024) = 204 tokens, 12 pages in each of 90 groups.
/// assert_eq!((resolved.pages_per_group, resolved.bytes), (12, 12 * 90 * 4096));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Budget {
    /// Payload bytes of the whole sequence.
    Bytes(u64),
    /// Pages per KV group.
    Pages(u64),
    /// Tokens per KV group.
    Tokens(u64),
    /// A part of the prompt's tokens, fixed when the prompt has been read.
    Fraction(Ratio),
    /// The part of the prompt's tokens that goes, below one; what stays is fixed when the prompt has been read.
    Evict(Ratio),
}

/// What a budget comes to for one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResolvedBudget {
    /// Pages each KV group of a global layer may hold (`k_pages`); `usize::MAX` where unlimited.
    pub pages_per_group: usize,
    /// Most payload bytes of that many pages in all those groups; `u64::MAX` where unlimited.
    pub bytes: u64,
    /// Whether a fraction was raised to the smallest budget there is.
    pub raised: bool,
    /// Whether nothing is ever to be evicted, while reading or while decoding: a fraction of 100 % or more.
    pub unlimited: bool,
}

impl Budget {
    /// What the budget comes to once a prompt of `prompt_tokens` has been read into pages that weigh `cost`: a
    /// [`PageKind`] where all are alike.
    ///
    /// For fractions `k = floor(rho T)` tokens and `max(smallest, floor(k / B))` pages (specification, sections 2 and
    /// 10); 100 % and more is unlimited. For a part evicted `k` is [`Ratio::rest_of`] `T`. Bytes are divided among groups, rounding down, and then come to as many pages as
    /// never weigh more.
    ///
    /// # Errors
    /// As [`Budget::check`].
    pub fn resolve(
        &self,
        shape: &CacheShape,
        cost: impl Into<PageCost>,
        prompt_tokens: usize,
        pins: &Pins,
    ) -> Result<ResolvedBudget, BudgetError> {
        let cost = cost.into();
        let smallest = pins.smallest_pages(shape.page_size);
        let tokens = match self {
            Budget::Fraction(_) if self.is_everything() => {
                let pages_per_group = usize::MAX;
                return Ok(ResolvedBudget { pages_per_group, bytes: u64::MAX, raised: false, unlimited: true });
            }
            Budget::Fraction(fraction) => fraction.floor_of(prompt_tokens as u64),
            Budget::Evict(part) => part.rest_of(prompt_tokens as u64),
            Budget::Bytes(_) | Budget::Pages(_) | Budget::Tokens(_) => {
                let pages = self.checked_pages(shape, &cost, pins)?;
                return Ok(ResolvedBudget::of(pages, shape, &cost));
            }
        };
        // No more than all of a usize, which is a usize.
        let pages = tokens as usize / shape.page_size;
        let resolved = ResolvedBudget::of(pages.max(smallest), shape, &cost);
        Ok(ResolvedBudget { raised: pages < smallest, ..resolved })
    }

    /// As [`Budget::resolve`], where bytes and not pages are shared out: for pages written as `kind` and then stored as others.
    /// What a part of the prompt's tokens, or a number of tokens, weighs as written is counted to the token, and bytes to the byte.
    ///
    /// # Errors
    /// As [`Budget::check`].
    pub fn resolve_in_bytes(
        &self,
        shape: &CacheShape,
        kind: PageKind,
        prompt_tokens: usize,
        pins: &Pins,
    ) -> Result<ResolvedBudget, BudgetError> {
        let resolved = self.resolve(shape, kind, prompt_tokens, pins)?;
        let tokens = match *self {
            Budget::Bytes(bytes) => return Ok(ResolvedBudget { bytes: bytes.max(resolved.bytes), ..resolved }),
            Budget::Tokens(tokens) => tokens,
            Budget::Fraction(_) if resolved.unlimited => return Ok(resolved),
            Budget::Fraction(part) => part.floor_of(prompt_tokens as u64),
            Budget::Evict(part) => part.rest_of(prompt_tokens as u64),
            Budget::Pages(_) => return Ok(resolved),
        };
        let token_bytes = kind.page_bytes(shape) / shape.page_size as u64 * shape.num_global_groups() as u64;
        Ok(ResolvedBudget { bytes: tokens.saturating_mul(token_bytes).max(resolved.bytes), ..resolved })
    }

    /// The same as the part that it is of the full cache of a prompt of `prompt_tokens` in pages of `kind`, for what goes by parts; as
    /// it stands where it is one, or there is nothing to be a part of.
    #[must_use]
    pub fn of_prompt(&self, shape: &CacheShape, kind: PageKind, prompt_tokens: usize) -> Self {
        let (tokens, page_size) = (prompt_tokens as u64, shape.page_size as u64);
        let page_bytes = kind.page_bytes(shape).saturating_mul(shape.num_global_groups() as u64);
        let (part, whole) = match *self {
            Budget::Fraction(_) | Budget::Evict(_) => return *self,
            Budget::Tokens(kept) => (kept, tokens),
            Budget::Pages(kept) => (kept.saturating_mul(page_size), tokens),
            Budget::Bytes(kept) => (kept, page_bytes.saturating_mul(tokens) / page_size),
        };
        Ratio::new(part, whole).map_or(*self, Budget::Fraction)
    }

    /// Whether it caps nothing, whatever the prompt: a fraction of 100 % or more.
    #[must_use]
    pub fn is_everything(&self) -> bool {
        matches!(self, Budget::Fraction(fraction) if fraction.is_whole())
    }

    /// Whether the budget can be kept, as far as can be told before a prompt is read.
    ///
    /// # Errors
    /// [`BudgetError::BelowPins`] for an absolute budget smaller than what must stay resident;
    /// [`BudgetError::NothingToCap`] for one in bytes where no layer is global.
    pub fn check(&self, shape: &CacheShape, cost: impl Into<PageCost>, pins: &Pins) -> Result<(), BudgetError> {
        match self {
            Budget::Fraction(_) | Budget::Evict(_) => Ok(()),
            Budget::Bytes(_) | Budget::Pages(_) | Budget::Tokens(_) => {
                self.checked_pages(shape, &cost.into(), pins).map(drop)
            }
        }
    }

    /// Pages per group of an absolute budget, if it is not below the pins.
    fn checked_pages(&self, shape: &CacheShape, cost: &PageCost, pins: &Pins) -> Result<usize, BudgetError> {
        let num_groups = shape.num_global_groups() as u64;
        let whole = |pages: u64| usize::try_from(pages).unwrap_or(usize::MAX);
        let pages = match *self {
            Budget::Bytes(bytes) => {
                let bytes = bytes.checked_div(num_groups).ok_or(BudgetError::NothingToCap { budget: *self })?;
                cost.pages_within(bytes, shape)
            }
            Budget::Pages(pages) => whole(pages),
            Budget::Tokens(tokens) => whole(tokens / shape.page_size as u64),
            Budget::Fraction(_) | Budget::Evict(_) => unreachable!("the callers resolve fractions themselves"),
        };
        let smallest_pages = pins.smallest_pages(shape.page_size);
        if pages >= smallest_pages {
            return Ok(pages);
        }
        let smallest = match *self {
            Budget::Bytes(_) => Budget::Bytes(bytes_of(smallest_pages, shape, cost)),
            Budget::Tokens(_) => Budget::Tokens((smallest_pages as u64).saturating_mul(shape.page_size as u64)),
            Budget::Pages(_) | Budget::Fraction(_) | Budget::Evict(_) => Budget::Pages(smallest_pages as u64),
        };
        Err(BudgetError::BelowPins { budget: *self, pages, smallest, smallest_pages })
    }
}

impl ResolvedBudget {
    fn of(pages_per_group: usize, shape: &CacheShape, cost: &PageCost) -> Self {
        Self { pages_per_group, bytes: bytes_of(pages_per_group, shape, cost), raised: false, unlimited: false }
    }
}

/// Bytes of so many pages in every global KV group.
fn bytes_of(pages_per_group: usize, shape: &CacheShape, cost: &PageCost) -> u64 {
    cost.bytes(pages_per_group, shape).saturating_mul(shape.num_global_groups() as u64)
}

impl fmt::Display for Budget {
    /// In a form that parses to the same budget.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = |count: u64| if count == 1 { "" } else { "s" };
        match *self {
            Budget::Bytes(bytes) => {
                let shift = (bytes.trailing_zeros() / 10 * 10).min(40);
                let unit = ["B", "KiB", "MiB", "GiB", "TiB"][shift as usize / 10];
                if bytes == 0 { f.write_str("0B") } else { write!(f, "{}{unit}", bytes >> shift) }
            }
            Budget::Pages(pages) => write!(f, "{pages}page{}", plural(pages)),
            Budget::Tokens(tokens) => write!(f, "{tokens}tok"),
            Budget::Fraction(fraction) => fraction.fmt(f),
            Budget::Evict(part) => write!(f, "{EVICT_PREFIX}{part}"),
        }
    }
}

/// Why a budget cannot be kept.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BudgetError {
    /// Less than must stay resident.
    #[error(
        "a KV budget of {budget} is {pages} page(s) per KV head, but the sink, recent and open pages need \
         {smallest_pages}: the smallest budget is {smallest}"
    )]
    BelowPins {
        /// The budget.
        budget: Budget,
        /// Pages per KV group it comes to.
        pages: usize,
        /// The smallest budget, in the same unit.
        smallest: Budget,
        /// Pages per KV group that must stay.
        smallest_pages: usize,
    },
    /// Less than everything, for a policy that frees nothing.
    #[error("the policy frees nothing, so that a KV budget of {budget} cannot be kept: the smallest budget is 100%")]
    NothingFreed {
        /// The budget.
        budget: Budget,
    },
    /// Bytes to split over no groups.
    #[error("a KV budget of {budget} has nothing to cap: no layer of the model is global")]
    NothingToCap {
        /// The budget.
        budget: Budget,
    },
}

#[cfg(test)]
mod tests;
