//! The tokens a KV group holds, as scorers of keys and values read them.

use crate::attention_form::AttentionForm;
use crate::query_moments::QueryMoments;

/// Resident tokens of one KV group, ascending by position, at the moment of a decision.
#[derive(Clone, Copy, Debug, Default)]
pub struct ResidentTokens<'a> {
    /// Absolute positions, `[tokens]`.
    pub positions: &'a [u32],
    /// Keys after RoPE `[tokens, head_dim]`, as the cache stores them; empty unless [`TokenTap`] asks for them.
    pub keys: &'a [f32],
    /// Values `[tokens, head_dim]`; empty unless asked for.
    pub values: &'a [f32],
    /// What the policy's gate said of each token when it was read, `[tokens]`; empty unless
    /// [`Taps::gate`](crate::Taps::gate) names one that sees tokens.
    pub gates: &'a [f32],
    /// How the model's queries meet these keys.
    pub form: AttentionForm<'a>,
    /// What the value of each adds to the layer's output: the mean over the heads of a group of `|W_O^T v|_1`, `[tokens]`; empty
    /// unless [`OutputTap`] asks for them.
    pub output_norms: &'a [f32],
    /// What each received inside its block, the mean over the heads of a group, `[tokens]`; NaN for a token that no block held,
    /// empty unless [`TwoWayTap`](crate::TwoWayTap) asks for it.
    pub two_way: &'a [f32],
    /// What the scorers of the layer measured, added up; empty while they do.
    pub layer_sums: &'a [f64],
    /// Of the queries so far; none unless [`QueryTap`](crate::QueryTap) asks for them.
    pub queries: QueryMoments<'a>,
}

/// What of the resident tokens a policy reads when it decides, beside their positions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TokenTap {
    /// Nothing.
    #[default]
    None,
    /// Their keys.
    Keys,
    /// Their keys and values.
    KeysAndValues,
}

/// What of the output projection a policy is shown when it decides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OutputTap {
    /// Nothing.
    #[default]
    None,
    /// The norm of each resident token's value through it.
    Norms,
}

impl<'a> ResidentTokens<'a> {
    /// Number of tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.positions.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.positions.is_empty()
    }

    /// One past the newest position: that of the token to come.
    #[must_use]
    pub fn next_position(&self) -> u32 {
        self.positions.last().map_or(0, |newest| newest + 1)
    }

    /// The key of each token, `[head_dim]`.
    pub fn keys(&self) -> impl Iterator<Item = &'a [f32]> + use<'a> {
        rows(self.keys, self.positions.len())
    }

    /// The value of each token, `[head_dim]`.
    pub fn values(&self) -> impl Iterator<Item = &'a [f32]> + use<'a> {
        rows(self.values, self.positions.len())
    }
}

/// `elements` in so many rows; none where there are no elements.
fn rows(elements: &[f32], num_rows: usize) -> impl Iterator<Item = &[f32]> {
    elements.chunks_exact((elements.len() / num_rows.max(1)).max(1))
}
