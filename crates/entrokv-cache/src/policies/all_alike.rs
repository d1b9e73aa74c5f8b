//! Tokens of policies that free nothing.

use crate::resident_tokens::ResidentTokens;
use crate::token_policy::TokenScorer;

/// A scorer that has nothing to say of tokens: none is to go before another, since none goes.
#[derive(Clone)]
pub(super) struct AllAlike;

impl TokenScorer for AllAlike {
    fn score(&mut self, tokens: ResidentTokens<'_>, out: &mut Vec<f32>) {
        out.resize(tokens.len(), 0.0);
    }
}
