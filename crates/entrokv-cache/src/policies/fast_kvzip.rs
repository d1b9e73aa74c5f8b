//! FastKVzip: a learned gate says what a reconstruction of the text would look at.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::allotment::Allotment;
use crate::attention_rows::Taps;
use crate::gate_tap::GateTap;
use crate::policy::{EvictionPolicy, PolicyError, Schedule};
use crate::policy_options::{OptionKey, OptionSet, file, file_text};
use crate::resident_tokens::ResidentTokens;
use crate::shape::{CacheShape, KvGroup};
use crate::token_policy::{Axes, Options, TokenMethod, TokenScorer};

/// The policy `fast-kvzip` (Kim et al. 2026): the score is the probability of a token itself against learned sinks, as the gate of
/// its layer gives it. The sinks and the newest tokens stay; the budget is pooled over all layers and heads.
///
/// The gate sees a token once, as it is read, so prompts and decoded tokens are alike. While decoding the authors keep the newest
/// 8 tokens; here the window is the same at every decision. The authors give tokens of the window a score of 1; here the newer of
/// them scores higher, so that a window too large for the budget loses its oldest tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FastKvzip {
    /// `gates`: the file of the gates; a policy without one scores nothing.
    pub gates: Option<PathBuf>,
    /// `window`: newest tokens that stay.
    pub window: KeptWindow,
}

/// How many of the newest tokens stay whatever the gate says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KeptWindow {
    /// `floor(0.02 n)` of `n` tokens, 4,096 from 32,000 tokens on. Of fewer than 50 tokens that is none (and not, as in the code
    /// of kvpress, all of them).
    #[default]
    Paper,
    /// So many.
    Tokens(u32),
}

impl KeptWindow {
    const EXPECTED: &'static str = "auto (2 % of the tokens, 4096 from 32000 on) or a number of tokens";

    /// Of a sequence of `len` tokens.
    #[must_use]
    pub fn of(self, len: u32) -> u32 {
        match self {
            Self::Paper if len < 32_000 => len / 50,
            Self::Paper => 4096,
            Self::Tokens(tokens) => tokens,
        }
    }
}

impl fmt::Display for KeptWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Paper => f.write_str("auto"),
            Self::Tokens(tokens) => tokens.fmt(f),
        }
    }
}

impl FromStr for KeptWindow {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        if text == "auto" { Ok(Self::Paper) } else { text.parse().map(Self::Tokens).map_err(|_| ()) }
    }
}

const OPTIONS: OptionSet<Options<FastKvzip>> = OptionSet {
    policy: FastKvzip::NAME,
    keys: &[
        &[
            OptionKey {
                key: "gates",
                expected: "a file",
                read: |options, text| file(text).map(|gates| options.method.gates = Some(gates)),
                show: |options| file_text(options.method.gates.as_deref()),
            },
            OptionKey {
                key: "window",
                expected: KeptWindow::EXPECTED,
                read: |options, text| text.parse().ok().map(|window| options.method.window = window),
                show: |options| options.method.window.to_string(),
            },
        ],
        Options::AXES,
    ],
    without: &[],
    presets: &[],
    default: || Options {
        method: FastKvzip::default(),
        axes: Axes { allotment: Allotment::Global, ..Axes::default() },
    },
};

impl FastKvzip {
    /// The policy's name on a command line.
    pub const NAME: &'static str = "fast-kvzip";

    pub(crate) fn parse(options: Option<&str>) -> Result<Box<dyn EvictionPolicy>, PolicyError> {
        OPTIONS.parse(options).map(|options| OPTIONS.policy(options))
    }
}

impl TokenMethod for FastKvzip {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn needs(&self, _schedule: Schedule) -> Taps {
        Taps::of_gate(GateTap::FastKvzip)
    }

    fn file(&self) -> Option<&Path> {
        self.gates.as_deref()
    }

    fn scorer(&self, _shape: &CacheShape, _group: KvGroup) -> Box<dyn TokenScorer> {
        Box::new(FastKvzipScorer { window: self.window })
    }
}

#[derive(Clone)]
struct FastKvzipScorer {
    window: KeptWindow,
}

impl TokenScorer for FastKvzipScorer {
    fn score(&mut self, tokens: ResidentTokens<'_>, out: &mut Vec<f32>) {
        let len = tokens.next_position();
        let window = len.saturating_sub(self.window.of(len));
        // Probabilities are at most 1, which every position of the window is added to.
        out.extend(
            tokens
                .positions
                .iter()
                .zip(tokens.gates)
                .map(|(&position, &gate)| if position >= window { 1.0 + position as f32 } else { gate }),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_is_two_percent_and_nothing_of_a_short_text() {
        let paper = [0, 49, 50, 99, 100, 31_999, 32_000, 100_000].map(|len| KeptWindow::Paper.of(len));
        assert_eq!(paper, [0, 0, 1, 1, 2, 639, 4096, 4096]);
        assert_eq!(KeptWindow::Tokens(8).of(5), 8);
        for text in ["auto", "0", "12"] {
            assert_eq!(text.parse::<KeptWindow>().map(|window| window.to_string()).as_deref(), Ok(text));
        }
        for text in ["", "-1", "2%"] {
            assert_eq!(text.parse::<KeptWindow>(), Err(()), "{text}");
        }
    }

    #[test]
    fn newer_tokens_of_the_window_stay_longer_and_all_longer_than_others() {
        let mut scorer = FastKvzipScorer { window: KeptWindow::Tokens(2) };
        let mut scores = Vec::new();
        let tokens =
            ResidentTokens { positions: &[0, 3, 8, 9], gates: &[0.5, 1.0, 0.1, 0.2], ..ResidentTokens::default() };
        scorer.score(tokens, &mut scores);
        assert_eq!(scores, [0.5, 1.0, 9.0, 10.0]);
    }
}
