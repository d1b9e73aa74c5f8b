//! The cap of a sequence at rest, on its way into a KV file and back.
//!
//! Scorers are not part of it: every turn of a sequence begins with fresh ones, and between turns they decide nothing.
//! A policy that carries on more than that ([`Eviction::carry_on`]) is refused before it gets here.

use std::sync::Arc;

use entrokv_cache::{BudgetError, CacheShape, PageCost, ResolvedBudget};

use super::Eviction;
use crate::kv_file::SavedCap;
use crate::sequence::EvictionOptions;

impl Eviction {
    /// What a file keeps of it.
    pub(crate) fn saved(&self) -> SavedCap {
        let resolved = self.resolved.as_ref().filter(|resolved| !resolved.unlimited);
        SavedCap {
            policy: self.policy.to_string(),
            budget: self.budget.to_string(),
            prompt_tokens: self.prompt_tokens,
            pages_per_group: resolved.map(|resolved| resolved.pages_per_group),
            bytes: resolved.map(|resolved| resolved.bytes),
            held_after_prompt: self.held_after_prompt,
            report: self.report(),
        }
    }

    /// The cap of a sequence that comes from a file, `options` being its own in words: what it reports, and where the counts of
    /// the next turn go on.
    ///
    /// # Errors
    /// As [`Eviction::new`].
    pub(crate) fn resting(
        saved: &SavedCap,
        options: &EvictionOptions,
        shape: &Arc<CacheShape>,
        cost: PageCost,
        logit_scale: f32,
    ) -> Result<Self, BudgetError> {
        let raised = saved.report.budget_raised;
        let resolved = saved.pages_per_group.zip(saved.bytes);
        Ok(Self {
            prompt_tokens: saved.prompt_tokens,
            resolved: resolved.map(|(pages_per_group, bytes)| ResolvedBudget {
                pages_per_group,
                bytes,
                raised,
                unlimited: false,
            }),
            held_after_prompt: saved.held_after_prompt,
            report: saved.report,
            // What gates said of its tokens is not in a file: a further turn under gates is refused.
            ..Self::new(options, shape, cost, None, logit_scale)?
        })
    }
}
