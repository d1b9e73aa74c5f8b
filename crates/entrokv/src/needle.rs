//! The needle protocol: what a compressed cache still answers when the question comes afterwards.
//!
//! A context that states facts nobody could guess is read and compressed under a [`Recipe`], a cache type with or without a
//! policy and a budget. Then each question is put to a fork of that one cache, with nothing evicted any more, and the answer is
//! greedy. Only questions that the full cache answers count. Beside that, texts are read and compressed the same way and their
//! next tokens given: how far the predictions lie from the full cache's.
//!
//! Invariants, each a test of that name:
//! * `facts_stand_where_their_depths_say`.
//! * `generated_contexts_are_as_long_as_asked_and_their_own`: seeded, no sentence of them twice as often as chance has it.
//! * `the_full_cache_is_a_recipe_like_others`: it answers what it answers, at a divergence of 0.

mod case;
mod chat_frame;
mod dice;
mod error;
mod facts;
mod filler;
mod haystack;
mod interval;
mod plan;
mod recipe;
mod row;
mod trial;

pub use self::case::{Case, CaseError, Question};
pub use self::error::NeedleError;
pub use self::haystack::{Haystack, Hiding};
pub use self::interval::wilson;
pub use self::plan::{Contexts, Plan};
pub use self::recipe::{Recipe, RecipeError};
pub use self::row::{AtEnd, Row};
