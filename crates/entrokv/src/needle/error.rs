//! Why nothing was measured.

use thiserror::Error;

use crate::chat_template::TemplateError;
use crate::engine::{ForkError, PageKindRefused, SubmitError};
use crate::forced_answer::AnswerError;
use crate::tokenizer::TokenizerError;

/// Why nothing was measured, in one line.
#[derive(Debug, Error)]
pub enum NeedleError {
    /// A template without a place for the context.
    #[error("the chat template does not show the user's message")]
    NoMessage,
    /// A case without a context, a question or an answer.
    #[error("{0}")]
    Case(&'static str),
    /// More facts than can be told apart.
    #[error("{got} facts a context were asked for; there are {limit}")]
    Facts {
        /// Facts asked for.
        got: usize,
        /// Facts there are.
        limit: usize,
    },
    /// Contexts of facts and nothing else.
    #[error("a context of {got} tokens has no room beside its facts, which are {needed}")]
    Crowded {
        /// Tokens of a context.
        got: usize,
        /// Tokens of its facts.
        needed: usize,
    },
    /// A text that is too short to be cut from.
    #[error("the text has {got} tokens; {needed} are needed")]
    Short {
        /// Tokens it has.
        got: usize,
        /// Tokens of a stretch.
        needed: usize,
    },
    /// A context shorter than a page, of which nothing can be compressed.
    #[error("a context has {got} tokens; a page of {needed} is the least that can be compressed")]
    BelowPage {
        /// Its tokens.
        got: usize,
        /// Tokens a page.
        needed: usize,
    },
    /// More than the model's context holds.
    #[error("a context, its longest question and the answer come to {got} tokens, the model's context holds {limit}")]
    TooLong {
        /// Tokens needed.
        got: usize,
        /// Context length.
        limit: usize,
    },
    /// A recipe that cannot be run.
    #[error("{recipe}: {why}")]
    Recipe {
        /// Which, and at which budget.
        recipe: String,
        /// Why.
        why: String,
    },
    /// A cache type the model cannot have.
    #[error(transparent)]
    PageKind(#[from] PageKindRefused),
    /// A prompt or a budget was refused.
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// No room for a fork.
    #[error(transparent)]
    Fork(#[from] ForkError),
    /// A given text was not read.
    #[error(transparent)]
    Answer(#[from] AnswerError),
    /// The tokenizer's refusal.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The template's refusal.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// A sequence failed on the way.
    #[error("{0}")]
    Failed(String),
    /// The interrupt flag was raised.
    #[error("interrupted")]
    Interrupted,
}
