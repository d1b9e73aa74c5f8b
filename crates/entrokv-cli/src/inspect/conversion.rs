//! What one budget comes to in every unit there is.

use std::io::{self, Write};

use entrokv::{Budget, CacheShape, EvictionOptions, PageKind};
use entrokv_cache::OpenPage;
use serde::Serialize;

use crate::bench::mib;
use crate::failure::Failure;

/// A budget and a policy, converted for a prompt of some length; counts are of each KV head.
#[derive(Serialize)]
pub(super) struct Conversion {
    budget: String,
    policy: String,
    prompt_tokens: u64,
    /// Whole pages it may hold, no more than the prompt has.
    pages_per_group: u64,
    /// Tokens those hold at most.
    tokens_per_group: u64,
    /// Of the pages, those the policy never evicts.
    pinned_pages: u64,
    /// Bytes of the pages of all KV heads.
    bytes: u64,
    bytes_full: u64,
    fraction_kept: f64,
    /// kvpress's compression ratio.
    fraction_evicted: f64,
    /// The least that the policy can be given.
    smallest_pages: u64,
    smallest_bytes: u64,
    /// Whether the budget was below that and was raised to it.
    raised: bool,
}

impl Conversion {
    /// What `options` come to for a prompt of so many tokens in f16 pages.
    pub(super) fn new(options: &EvictionOptions, shape: &CacheShape, prompt_tokens: u64) -> Result<Self, Failure> {
        let pins = options.policy.pins();
        let tokens = usize::try_from(prompt_tokens)?;
        let (page_size, full_pages) = (shape.page_size, shape.pages_for(tokens));
        let resolved = options.budget.resolve(shape, PageKind::F16, tokens, &pins)?;
        let pages = resolved.pages_per_group.min(full_pages);
        let open = if tokens.is_multiple_of(page_size) { OpenPage::None } else { OpenPage::Newest };
        let pinned = pins.num_pinned(pages, page_size, resolved.pages_per_group, open);
        let tokens_per_group = pages.saturating_mul(page_size).min(tokens);
        let smallest = pins.smallest_pages(page_size);
        let bytes = |pages: usize| {
            (pages as u64).saturating_mul(PageKind::F16.page_bytes(shape) * shape.num_global_groups() as u64)
        };
        // An empty prompt is kept whole.
        let fraction_kept = if tokens == 0 { 1.0 } else { tokens_per_group as f64 / tokens as f64 };
        Ok(Self {
            budget: options.budget.to_string(),
            policy: options.policy.to_string(),
            prompt_tokens,
            pages_per_group: pages as u64,
            tokens_per_group: tokens_per_group as u64,
            pinned_pages: pinned as u64,
            bytes: bytes(pages),
            bytes_full: bytes(full_pages),
            fraction_kept,
            fraction_evicted: 1.0 - fraction_kept,
            smallest_pages: smallest as u64,
            smallest_bytes: bytes(smallest),
            raised: resolved.raised,
        })
    }

    pub(super) fn print(&self, out: &mut impl Write) -> io::Result<()> {
        writeln!(out, "\nBudget {} of a prompt of {} tokens, {}", self.budget, self.prompt_tokens, self.policy)?;
        let raised = if self.raised { ": raised to the smallest" } else { "" };
        writeln!(out, "  bytes           {} ({}) of {}", mib(self.bytes), self.bytes, mib(self.bytes_full))?;
        writeln!(out, "  each KV head    {} pages, {} tokens{raised}", self.pages_per_group, self.tokens_per_group)?;
        writeln!(out, "  of them pinned  {} pages", self.pinned_pages)?;
        writeln!(out, "  kept            {:.2} %", 100.0 * self.fraction_kept)?;
        let evicted = self.fraction_evicted;
        writeln!(out, "  evicted         {:.2} % (a compression ratio of {evicted:.4} in kvpress)", 100.0 * evicted)?;
        let (pages, bytes) = (self.smallest_pages, self.smallest_bytes);
        let (least, least_bytes) = (Budget::Pages(pages), Budget::Bytes(bytes));
        writeln!(out, "  smallest        {least} each: {} ({least_bytes})", mib(bytes))
    }
}
