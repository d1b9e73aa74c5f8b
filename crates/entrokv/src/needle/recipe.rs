//! How a context's cache is compressed, in one word.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use entrokv_cache::{AUTO, Budget, CacheShape, EvictionPolicy, PageKind, PolicyError, Question, parse_policy, recipe};
use thiserror::Error;

use crate::sequence::EvictionOptions;

/// A cache type, a policy, or both: `tq4`, `snapkv:window=64`, `tq3v2/kvzip`; `full` compresses nothing.
#[derive(Clone)]
pub struct Recipe {
    name: String,
    kind: Option<PageKind>,
    /// The text of its policy, which may be another for each budget ([`recipe`]).
    policy: Option<String>,
}

/// Not a recipe.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("unknown recipe {got:?}: a recipe is full, a cache type, a policy, or CACHE-TYPE/POLICY ({why})")]
pub struct RecipeError {
    /// What was given.
    pub got: String,
    /// Why its policy is none.
    pub why: String,
}

impl Recipe {
    /// The name of the recipe that compresses nothing.
    const FULL: &'static str = "full";

    /// The full cache: as tokens are written, all of them.
    pub fn full() -> Self {
        Self { name: Self::FULL.to_owned(), kind: None, policy: None }
    }

    /// Whether it compresses nothing, whatever caches are stored as by default.
    pub fn is_full(&self) -> bool {
        self.name == Self::FULL
    }

    /// Whether it depends on a budget.
    pub fn evicts(&self) -> bool {
        self.policy.is_some()
    }

    /// How it stores the cache, `default` where it does not say.
    pub fn kind(&self, default: PageKind) -> PageKind {
        if self.is_full() { default.written_as() } else { self.kind.unwrap_or(default) }
    }

    /// What decides which pages stay under `budget`.
    pub(super) fn policy(&self, budget: Budget) -> Option<Arc<dyn EvictionPolicy>> {
        let text = self.policy.as_ref()?;
        Some(policy(text, budget).expect("the recipe was checked under budgets of all sizes"))
    }

    /// The cap on a context of `num_tokens`: a fraction is one of the bytes of its full cache of `full` pages.
    pub(super) fn cap(
        &self,
        budget: Budget,
        num_tokens: usize,
        shape: &CacheShape,
        kind: PageKind,
    ) -> Option<EvictionOptions> {
        let policy = self.policy(budget)?;
        let bytes = full_bytes(num_tokens, shape, kind);
        let budget = match budget {
            // Of a plain cache so many tokens are so many bytes.
            Budget::Fraction(part) if kind.is_coded() && !part.is_whole() => Budget::Bytes(part.floor_of(bytes)),
            Budget::Evict(part) if kind.is_coded() => Budget::Bytes(part.rest_of(bytes)),
            budget => budget,
        };
        Some(EvictionOptions { budget, policy })
    }
}

/// Bytes of the cache of `num_tokens` in the global layers as it is written before it becomes `kind`.
fn full_bytes(num_tokens: usize, shape: &CacheShape, kind: PageKind) -> u64 {
    let pages = (shape.pages_for(num_tokens) * shape.num_global_groups()) as u64;
    pages * kind.written_as().page_bytes(shape)
}

impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl fmt::Debug for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Recipe").field(&self.name).finish()
    }
}

impl FromStr for Recipe {
    type Err = RecipeError;

    fn from_str(text: &str) -> Result<Self, RecipeError> {
        let text = text.trim();
        let name = text.to_owned();
        if text == Self::FULL {
            return Ok(Self::full());
        }
        if let Ok(kind) = text.parse() {
            return Ok(Self { name, kind: Some(kind), policy: None });
        }
        // Pairs of types have a slash of their own, and so have files among a policy's options: the longest type counts.
        let cuts = text.match_indices('/').map(|(at, _)| (&text[..at], &text[at + 1..]));
        let typed = cuts.filter_map(|(kind, policy)| Some((kind.parse().ok()?, policy))).next_back();
        let (kind, policy) = typed.map_or((None, text), |(kind, policy)| (Some(kind), policy));
        if policy == "none" {
            return Ok(Self { name, kind, policy: None });
        }
        // Of the policies that `auto` stands for, too: each is that of one of these budgets.
        let budgets = ["40%", "20%", "5%"].map(|budget| budget.parse().expect("a percentage is a budget"));
        match budgets.into_iter().try_for_each(|budget| self::policy(policy, budget).map(drop)) {
            Ok(()) => Ok(Self { name, kind, policy: Some(policy.to_owned()) }),
            Err(error) => Err(RecipeError { got: name, why: error.to_string() }),
        }
    }
}

/// The policy that `text` says under `budget`, where the question comes later.
fn policy(text: &str, budget: Budget) -> Result<Arc<dyn EvictionPolicy>, PolicyError> {
    let is_auto = text.split(':').next() == Some(AUTO);
    let text = if is_auto { recipe(text, budget, Question::Later)? } else { text.to_owned() };
    parse_policy(&text).map(Arc::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use entrokv_cache::LayerKind;

    #[test]
    fn recipes_are_types_policies_or_both() {
        let parts = |text: &str| -> (Option<String>, Option<String>) {
            let recipe: Recipe = text.parse().unwrap();
            assert_eq!(recipe.to_string(), text);
            (recipe.kind.map(|kind| kind.to_string()), recipe.policy)
        };
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(parts("full"), (None, None));
        assert_eq!(parts("tq4"), (some("tq4"), None));
        assert_eq!(parts("q8_0/tq4"), (some("q8_0/tq4"), None));
        assert_eq!(parts("f16/streaming-llm"), (some("f16"), some("streaming-llm")));
        assert_eq!(parts("tq3v2/none"), (some("tq3v2"), None));
        assert_eq!(parts("f16/auto:weight=0.5"), (some("f16"), some("auto:weight=0.5")));
        assert_eq!(parts("q8_0/tq4/snapkv:window=8"), (some("q8_0/tq4"), some("snapkv:window=8")));
        assert_eq!(parts("kvzap:gates=a/b"), (None, some("kvzap:gates=a/b")));
        assert_eq!(parts("tq4/kvzap:gates=f16/b"), (some("tq4"), some("kvzap:gates=f16/b")));
        for text in ["", "tq5", "lru", "f16/lru", "tq4/", "/snapkv", "snapkv/tq4", "snapkv:windw=3", "auto:pass=twice"]
        {
            let error = text.parse::<Recipe>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("unknown recipe {text:?}: ")) && error.lines().count() == 1, "{error}");
        }
    }

    #[test]
    fn a_fraction_is_one_of_the_bytes_of_the_full_cache() {
        let shape = CacheShape::new(vec![LayerKind::Global; 2], 3, 3, 64, 16).unwrap();
        let cap = |recipe: &str, budget: &str| {
            let recipe: Recipe = recipe.parse().unwrap();
            recipe.cap(budget.parse().unwrap(), 160, &shape, recipe.kind(PageKind::F16)).map(|cap| cap.budget)
        };
        let full = 10 * 6 * 4096;
        assert_eq!(cap("tq4", "20%"), None);
        assert_eq!(cap("knorm", "20%"), Some("20%".parse().unwrap()));
        assert_eq!(cap("tq4/knorm", "20%"), Some(Budget::Bytes(full / 5)));
        assert_eq!(cap("tq4/knorm", "evict:0.9"), Some(Budget::Bytes(full / 10)));
        assert_eq!(cap("tq4/knorm", "100%"), Some("100%".parse().unwrap()));
        assert_eq!(cap("tq4/knorm", "48tok"), Some(Budget::Tokens(48)));
    }
}
