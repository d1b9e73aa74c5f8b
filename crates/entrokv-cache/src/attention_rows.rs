//! What attention shows a policy: softmax rows over the tokens resident in one KV group.
//!
//! Invariants (upheld by whoever observes, relied on by every scorer):
//! 1. `positions` is ascending and holds resident tokens only; after an eviction it has gaps.
//! 2. A row's entry is the attention mass of one query head on one token; tokens after the row's query have mass 0.
//! 3. Pieces of one prompt arrive in ascending row order, and the columns of a piece end with its last row's own token.

use crate::gate_tap::GateTap;
use crate::query_moments::QueryTap;
use crate::resident_tokens::{OutputTap, TokenTap};
use crate::two_way_tap::TwoWayTap;

/// Attention rows of one KV group, as a policy asked for them in [`Taps`].
#[derive(Clone, Copy, Debug)]
pub struct AttentionRows<'a> {
    /// Where the rows come from.
    pub source: RowSource,
    /// Number of query heads that share this KV head.
    pub group_size: usize,
    /// Absolute positions of the columns, ascending, resident tokens only.
    pub positions: &'a [u32],
    /// Masses, `[num_rows, group_size, positions.len()]`, row-major.
    pub rows: &'a [f32],
}

impl<'a> AttentionRows<'a> {
    /// The masses of query head `head` in row `row`, `[positions.len()]`.
    ///
    /// # Panics
    /// When `row` or `head` is out of range.
    #[must_use]
    pub fn head(&self, row: usize, head: usize) -> &'a [f32] {
        assert!(head < self.group_size, "head {head} of a group of {}", self.group_size);
        let columns = self.positions.len();
        let start = (row * self.group_size + head) * columns;
        &self.rows[start..start + columns]
    }

    /// Number of columns that the query of row `row` sees: those up to its own token.
    ///
    /// Column sums are of many queries; all is seen by some.
    #[must_use]
    pub fn num_seen(&self, row: usize) -> usize {
        match self.source {
            RowSource::Prompt => self.positions.len() + row + 1 - self.num_rows(),
            RowSource::Step | RowSource::ColumnSums { .. } | RowSource::Probe | RowSource::Reconstruction => {
                self.positions.len()
            }
        }
    }

    /// Number of rows stored in `rows` (1 for column sums, however many queries they sum).
    #[must_use]
    pub fn num_rows(&self) -> usize {
        let row = self.group_size * self.positions.len();
        self.rows.len().checked_div(row).unwrap_or(0)
    }
}

/// What a batch of [`AttentionRows`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowSource {
    /// Rows of prompt queries, ascending.
    Prompt,
    /// Rows of decoded tokens, one per step.
    Step,
    /// One row per head: the sum over `num_rows` prompt queries.
    ColumnSums {
        /// How many query rows were summed.
        num_rows: usize,
    },
    /// Rows of the queries of a probe, which stand behind all of the columns; what they give each other is left out.
    Probe,
    /// The largest masses that queries of a [`Reconstruction`] give the tokens of one of its chunks: a row for all of its
    /// queries, or several. Chunks arrive in ascending order.
    Reconstruction,
}

/// A pass that has the model repeat a prompt that it has read, before anything is evicted, and is forgotten again: what its
/// queries look for is what reconstructs the text (KVzip, Kim et al. 2025, section 3).
///
/// The prompt comes in chunks, each behind the whole cache. A query's masses are a softmax over the sinks, the tokens of its
/// chunk and the tokens of the pass up to its own; in a further turn, as many tokens before a short chunk as make it a whole one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reconstruction {
    /// Tokens repeated at a time.
    pub chunk: usize,
    /// What its queries see of the text.
    pub view: PassView,
}

/// What of a text the queries of a pass see.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PassView {
    /// All of it: the paper's method.
    #[default]
    Text,
    /// Pages that hold a token of their softmax, so that the cost of a pass does not grow with the square of the text.
    Chunk,
}

impl PassView {
    pub(crate) const WORDS: [(&str, Self); 2] = [("text", Self::Text), ("chunk", Self::Chunk)];
}

/// Which prompt rows a policy reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RowTap {
    /// None.
    #[default]
    None,
    /// The last prompt query's row.
    Last,
    /// The rows of the last so many prompt queries (all of them when the prompt is shorter).
    Window(usize),
    /// Column sums over every prompt query.
    Accumulated,
}

/// What a policy asks attention to hand over; nothing else is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taps {
    /// Rows of the prompt.
    pub prompt: RowTap,
    /// Whether it also reads the row of every decoded token.
    pub step_rows: bool,
    /// What it reads of the resident tokens when it decides.
    pub tokens: TokenTap,
    /// The gate whose scores it reads when it decides.
    pub gate: GateTap,
    /// What it reads of queries when it decides.
    pub queries: QueryTap,
    /// What it reads of the output projection when it decides.
    pub output: OutputTap,
    /// What it reads of attention that looks both ways.
    pub two_way: TwoWayTap,
    /// The pass that is made after the prompt for the sake of its masses, if any.
    pub reconstruction: Option<Reconstruction>,
}

impl Taps {
    /// Nothing of attention; of the resident tokens `tokens`.
    #[must_use]
    pub const fn of_tokens(tokens: TokenTap) -> Taps {
        Taps {
            prompt: RowTap::None,
            step_rows: false,
            tokens,
            gate: GateTap::None,
            queries: QueryTap::None,
            output: OutputTap::None,
            two_way: TwoWayTap::None,
            reconstruction: None,
        }
    }

    /// The scores of `gate`, and nothing else.
    #[must_use]
    pub const fn of_gate(gate: GateTap) -> Taps {
        Taps { gate, ..Taps::of_tokens(TokenTap::None) }
    }

    /// What is asked for, in words; positions are there for every policy.
    #[must_use]
    pub fn words(&self) -> Vec<&'static str> {
        let rows = match self.prompt {
            RowTap::None => None,
            RowTap::Last => Some("last row"),
            RowTap::Window(_) => Some("window rows"),
            RowTap::Accumulated => Some("column sums"),
        };
        let steps = self.step_rows.then_some("step rows");
        let reconstruction = self.reconstruction.map(|_| "a reconstruction");
        let tokens = match self.tokens {
            TokenTap::None => None,
            TokenTap::Keys => Some("keys"),
            TokenTap::KeysAndValues => Some("keys and values"),
        };
        let gate = match self.gate {
            GateTap::None | GateTap::HeadTable => None,
            GateTap::FastKvzip | GateTap::Kvzap | GateTap::Projection => Some("layer inputs"),
            GateTap::QueryChannel => Some("queries before RoPE"),
            GateTap::HeadEstimate => Some("queries and keys before RoPE"),
        };
        let queries = match self.queries {
            QueryTap::None => None,
            QueryTap::Moments { .. } => Some("query moments"),
        };
        let output = match self.output {
            OutputTap::None => None,
            OutputTap::Norms => Some("output norms"),
        };
        let two_way = match self.two_way {
            TwoWayTap::None => None,
            TwoWayTap::Sums { .. } => Some("two-way sums"),
        };
        std::iter::once("positions")
            .chain([rows, steps, reconstruction, tokens, gate, queries, output, two_way].into_iter().flatten())
            .collect()
    }
}

/// The tokens of one resident page, by absolute position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageSpan {
    /// Position of the page's first token.
    pub first_position: u32,
    /// Number of filled slots.
    pub len: u32,
}

impl PageSpan {
    /// One past the position of the page's last token.
    #[must_use]
    pub fn end(&self) -> u64 {
        u64::from(self.first_position) + u64::from(self.len)
    }
}

/// Whether masses can be a head's attention row: all finite, none negative, not all 0.
pub(crate) fn is_row(masses: &[f32]) -> bool {
    // Folds without early exit, which compile to vector code; nearly every row is one.
    let in_range = masses.iter().fold(true, |good, mass| good & (*mass >= 0.0) & (*mass <= f32::MAX));
    in_range && masses.iter().fold(false, |any, mass| any | (*mass > 0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_finite_not_negative_and_not_empty() {
        assert!(is_row(&[0.0, 1e-40, -0.0]));
        for bad in [&[][..], &[0.0, -0.0], &[0.5, f32::NAN], &[f32::INFINITY, 0.0], &[0.5, -1e-9], &[f32::NEG_INFINITY]]
        {
            assert!(!is_row(bad), "{bad:?}");
        }
    }
}
