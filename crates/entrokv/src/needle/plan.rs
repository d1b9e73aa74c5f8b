//! What is to be measured: contexts, texts, and each recipe at each budget.

use std::sync::Arc;

use entrokv_cache::{Budget, CacheShape, PageKind, deciding_later};

use super::case::Case;
use super::chat_frame::ChatFrame;
use super::error::NeedleError;
use super::haystack::{Haystack, Hiding};
use super::recipe::Recipe;
use super::row::Row;
use super::trial::{Reading, Trial};
use crate::load::Model;
use crate::sequence::EvictionOptions;

/// Tokens after a text whose predictions are compared.
const NEXT_TOKENS: usize = 96;

/// What is measured.
#[derive(Debug)]
pub struct Plan {
    /// What is read and asked about.
    pub contexts: Contexts,
    /// Where hidden facts and texts come from.
    pub haystack: Haystack,
    /// Texts whose next tokens are predicted; none measures no divergence.
    pub texts: usize,
    /// Tokens of each that are compressed.
    pub text_tokens: usize,
    /// Ways to compress, beside the full cache, which is always measured first.
    pub recipes: Vec<Recipe>,
    /// Budgets of the recipes that evict.
    pub budgets: Vec<Budget>,
}

/// Where contexts come from.
#[derive(Debug)]
pub enum Contexts {
    /// As they are given.
    Given(Vec<Case>),
    /// Facts hidden in the haystack.
    Hidden(Hiding),
}

/// A recipe at a budget.
pub(super) struct Setting {
    pub(super) recipe: Recipe,
    budget: Option<Budget>,
}

impl Plan {
    /// Measures; `progress` hears how many tokens have been read, and of how many. The first row is the full cache's.
    ///
    /// The engine must have no sequence, and has none afterwards.
    ///
    /// # Errors
    /// [`NeedleError`]; what contexts, recipes and budgets alone can tell is told before anything is read.
    pub fn run(&self, model: &mut Model, progress: &mut dyn FnMut(u64, u64)) -> Result<Vec<Row>, NeedleError> {
        let Model { engine, tokenizer, chat_template, .. } = model;
        let frame = ChatFrame::new(tokenizer, chat_template.as_ref())?;
        let hidden;
        let cases = match &self.contexts {
            Contexts::Given(cases) => cases,
            Contexts::Hidden(hiding) => {
                hidden = self.haystack.cases(&frame, *hiding)?;
                &hidden
            }
        };
        let readings = cases.iter().map(|case| Reading::new(case, &frame)).collect::<Result<Vec<_>, _>>()?;
        let texts = self.haystack.texts(&frame, self.texts, self.text_tokens + 1 + NEXT_TOKENS)?;
        let settings = self.settings();
        let mut lens: Vec<usize> = readings.iter().map(|reading| reading.context.len()).collect();
        lens.extend((!texts.is_empty()).then_some(self.text_tokens));
        let default = engine.page_kind();
        let together = together(&settings, default);
        let read = readings.iter().map(|reading| reading.context.len()).sum::<usize>() + texts.len() * self.text_tokens;
        let asked = readings.iter().map(Reading::asked).sum::<usize>() + texts.len() * NEXT_TOKENS;
        let total = (together.len() * read + settings.len() * asked) as u64;
        let mut trial = Trial { engine, default, done: 0, total, progress };
        let longest = readings.iter().map(Reading::longest).chain(texts.iter().map(Vec::len)).max().unwrap_or(0);
        trial.check(&settings, &lens, longest)?;
        let rows = trial.rows(&settings, &together, cases, &readings, &texts, self.text_tokens);
        trial.engine.set_page_kind(default)?;
        rows
    }

    /// The full cache, and every recipe at every budget it depends on.
    fn settings(&self) -> Vec<Setting> {
        let mut settings = vec![Setting { recipe: Recipe::full(), budget: None }];
        for recipe in self.recipes.iter().filter(|recipe| !recipe.is_full()) {
            let budgets: Vec<Option<Budget>> =
                if recipe.evicts() { self.budgets.iter().copied().map(Some).collect() } else { vec![None] };
            settings.extend(budgets.into_iter().map(|budget| Setting { recipe: recipe.clone(), budget }));
        }
        settings
    }
}

/// The settings that one reading serves, by number: those that store the cache alike and whose policies are shown the same.
fn together(settings: &[Setting], default: PageKind) -> Vec<Vec<usize>> {
    let mut all: Vec<(Option<String>, Vec<usize>)> = Vec::new();
    for (number, setting) in settings.iter().enumerate() {
        let key = setting.shown(default);
        match all.iter_mut().find(|(known, _)| key.is_some() && *known == key) {
            Some((_, numbers)) => numbers.push(number),
            None => all.push((key, vec![number])),
        }
    }
    all.into_iter().map(|(_, numbers)| numbers).collect()
}

impl Setting {
    pub(super) fn row(&self) -> Row {
        let budget = self.budget.map(|budget| budget.to_string());
        Row { recipe: self.recipe.to_string(), budget, ..Row::default() }
    }

    /// The cap on a context of `num_tokens`.
    pub(super) fn cap(&self, num_tokens: usize, shape: &CacheShape, kind: PageKind) -> Option<EvictionOptions> {
        self.recipe.cap(self.budget?, num_tokens, shape, kind)
    }

    /// The same under a policy that decides when it is told to.
    pub(super) fn late_cap(&self, num_tokens: usize, shape: &CacheShape, kind: PageKind) -> Option<EvictionOptions> {
        let cap = self.cap(num_tokens, shape, kind)?;
        let policy = Arc::from(deciding_later(&*cap.policy)?);
        Some(EvictionOptions { policy, ..cap })
    }

    /// What a reading for it is like, if others like it can be served by the same one.
    fn shown(&self, default: PageKind) -> Option<String> {
        let policy = self.recipe.policy(self.budget?)?;
        let late = deciding_later(&*policy)?;
        let tiers = late.tiers().and_then(|tiers| tiers.coded()).is_some();
        Some(format!("{}, tiers: {tiers}, {}", self.recipe.kind(default), late.scoring()))
    }

    /// The error with the recipe's name, where it is the recipe's.
    pub(super) fn blame(&self, error: NeedleError) -> NeedleError {
        match error {
            NeedleError::Interrupted => error,
            error => self.refused(error.to_string()),
        }
    }

    pub(super) fn refused(&self, why: String) -> NeedleError {
        let budget = self.budget.map(|budget| format!(" at {budget}")).unwrap_or_default();
        NeedleError::Recipe { recipe: format!("{}{budget}", self.recipe), why }
    }
}
