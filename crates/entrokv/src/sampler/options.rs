//! What a caller may ask of the sampler, and the limits of each option.

use thiserror::Error;

/// How the next token is chosen; the fields are listed in the order in which they act.
///
/// [`SamplingOptions::default`] holds llama.cpp's defaults, [`SamplingOptions::greedy`] takes the likeliest token.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingOptions {
    /// Added to the logit of each token id; minus infinity bans the token. A token listed twice gets both.
    pub logit_bias: Vec<(u32, f32)>,
    /// Divides a positive logit, multiplies another, of every token seen in the window; 1 is off, over 1 discourages.
    pub repetition_penalty: f32,
    /// Subtracted, once, from the logit of every token seen in the window; 0 is off.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit once for every time it is seen in the window; 0 is off.
    pub frequency_penalty: f32,
    /// Number of last tokens of the history, prompt included, that the penalties look at; 0 turns them off.
    pub penalty_window: usize,
    /// Keeps this many of the likeliest tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps the fewest likeliest tokens whose probabilities sum to this much, at least one; 1 keeps all.
    pub top_p: f32,
    /// Keeps the tokens at least this likely relative to the likeliest; 0 keeps all.
    pub min_p: f32,
    /// Divides the logits of the tokens kept, before one is drawn; 0 takes the likeliest, of equals the lowest id.
    pub temperature: f32,
    /// Start of the stream of random numbers; `None` picks one, which [`Sampler::seed`](super::Sampler::seed) tells.
    pub seed: Option<u64>,
}

impl Default for SamplingOptions {
    fn default() -> Self {
        Self { top_k: 40, top_p: 0.95, min_p: 0.05, temperature: 0.8, ..Self::greedy() }
    }
}

impl SamplingOptions {
    /// Options under which the likeliest token is taken, the same at every run.
    pub fn greedy() -> Self {
        Self {
            logit_bias: Vec::new(),
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            penalty_window: 64,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            temperature: 0.0,
            seed: None,
        }
    }

    /// Checks every option against its limits.
    ///
    /// # Errors
    /// [`OptionError`] for the first option outside its limits. Penalties by presence and frequency keep to the range
    /// that the OpenAI interface documents, as a number outside it is a slip (a repetition penalty, a percentage).
    pub fn validate(&self) -> Result<(), OptionError> {
        let checks = [
            ("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0.0, "finite and above 0"),
            ("presence_penalty", self.presence_penalty, self.presence_penalty.abs() <= 2.0, "from -2 to 2"),
            ("frequency_penalty", self.frequency_penalty, self.frequency_penalty.abs() <= 2.0, "from -2 to 2"),
            ("top_p", self.top_p, (0.0..=1.0).contains(&self.top_p), "from 0 to 1"),
            ("min_p", self.min_p, (0.0..=1.0).contains(&self.min_p), "from 0 to 1"),
            ("temperature", self.temperature, self.temperature >= 0.0, "finite and at least 0"),
        ];
        for (option, got, within, limit) in checks {
            // Comparisons with NaN are false, so only infinity needs its own check.
            if !within || got.is_infinite() {
                return Err(OptionError { option: option.to_owned(), got, limit });
            }
        }
        for &(id, got) in &self.logit_bias {
            if got.is_nan() || got == f32::INFINITY {
                return Err(OptionError {
                    option: format!("logit_bias of token {id}"),
                    got,
                    limit: "finite, or minus infinity to ban the token",
                });
            }
        }
        Ok(())
    }

    /// Whether any penalty changes a logit.
    pub(super) fn penalizes(&self) -> bool {
        self.penalty_window > 0
            && (self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0)
    }
}

/// A sampling option outside its limits.
#[derive(Debug, Clone, PartialEq, Error)]
#[error("{option} is {got}, but must be {limit}")]
pub struct OptionError {
    /// Name of the option, as the field of [`SamplingOptions`] is called.
    pub option: String,
    /// The value given.
    pub got: f32,
    /// The values allowed, in words.
    pub limit: &'static str,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_outside_its_limits_is_named_with_value_and_limit() {
        type Change = fn(&mut SamplingOptions);
        let cases: [(Change, &str); 14] = [
            (|o| o.temperature = -0.1, "temperature is -0.1, but must be finite and at least 0"),
            (|o| o.temperature = f32::NAN, "temperature is NaN, but must be finite and at least 0"),
            (|o| o.temperature = f32::INFINITY, "temperature is inf, but must be finite and at least 0"),
            (|o| o.top_p = 1.01, "top_p is 1.01, but must be from 0 to 1"),
            (|o| o.top_p = f32::NAN, "top_p is NaN, but must be from 0 to 1"),
            (|o| o.min_p = -1.0, "min_p is -1, but must be from 0 to 1"),
            (|o| o.repetition_penalty = 0.0, "repetition_penalty is 0, but must be finite and above 0"),
            (|o| o.repetition_penalty = f32::INFINITY, "repetition_penalty is inf, but must be finite and above 0"),
            (|o| o.presence_penalty = 2.5, "presence_penalty is 2.5, but must be from -2 to 2"),
            (|o| o.presence_penalty = f32::NAN, "presence_penalty is NaN, but must be from -2 to 2"),
            (|o| o.frequency_penalty = -3.0, "frequency_penalty is -3, but must be from -2 to 2"),
            (|o| o.frequency_penalty = f32::NEG_INFINITY, "frequency_penalty is -inf, but must be from -2 to 2"),
            (
                |o| o.logit_bias = vec![(3, 1.0), (7, f32::NAN)],
                "logit_bias of token 7 is NaN, but must be finite, or minus infinity to ban the token",
            ),
            (
                |o| o.logit_bias = vec![(7, f32::INFINITY)],
                "logit_bias of token 7 is inf, but must be finite, or minus infinity to ban the token",
            ),
        ];
        for (change, message) in cases {
            let mut options = SamplingOptions::default();
            change(&mut options);
            assert_eq!(options.validate().expect_err(message).to_string(), message);
        }
    }

    #[test]
    fn the_ends_of_every_range_are_allowed() {
        let low = SamplingOptions {
            logit_bias: vec![(0, f32::NEG_INFINITY)],
            repetition_penalty: f32::MIN_POSITIVE,
            presence_penalty: -2.0,
            frequency_penalty: -2.0,
            penalty_window: 0,
            top_k: 0,
            top_p: 0.0,
            min_p: 0.0,
            temperature: 0.0,
            seed: None,
        };
        let high = SamplingOptions {
            logit_bias: vec![(u32::MAX, f32::MAX)],
            repetition_penalty: f32::MAX,
            presence_penalty: 2.0,
            frequency_penalty: 2.0,
            penalty_window: usize::MAX,
            top_k: usize::MAX,
            top_p: 1.0,
            min_p: 1.0,
            temperature: f32::MAX,
            seed: Some(u64::MAX),
        };
        for options in [low, high, SamplingOptions::default(), SamplingOptions::greedy()] {
            assert_eq!(options.validate(), Ok(()));
        }
    }
}
