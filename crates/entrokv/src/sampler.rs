//! From logits to the next token.
//!
//! The steps and their order are llama.cpp's default chain, so that settings carried over from there mean the same:
//!
//! 1. logits that are no numbers are banned (below);
//! 2. logit bias;
//! 3. penalties over the last [`SamplingOptions::penalty_window`] tokens: repetition, then presence and frequency;
//! 4. temperature 0 ends here, with the likeliest token, of equals the lowest id;
//! 5. top-k, top-p, min-p, each on what the one before kept, the probabilities of top-p renormalised over it;
//! 6. temperature, then one draw.
//!
//! Temperature comes last: top-p and min-p cut the model's own distribution, and a high temperature cannot let in
//! tokens that the model thinks impossible. (Engines in the style of Hugging Face scale first.)
//!
//! **Broken logits.** NaN and plus infinity are no logits: each is counted, as [`Sampler::num_broken_logits`] tells,
//! and its token banned for this draw. If nothing is left, sampling is an error and never a silent token 0.
//!
//! **Determinism.** One ChaCha12 stream per sampler, one number per draw (none when greedy), weights summed in f64 in
//! a fixed order: equal seeds, logits and histories give equal tokens. The exponential is the platform's, so across
//! platforms a draw could differ if it fell within an ulp of a boundary.
//!
//! **Cost.** O(vocabulary) a token. Greedy choice and top-k read the logits in vectors and rank no more of them than could
//! be kept; top-p ranks only as far as its mass reaches, but weighs every token that top-k left.

mod candidates;
mod options;

use std::hash::{BuildHasher, RandomState};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha12Rng;
use thiserror::Error;

use self::candidates::{BLOCK, Candidates, largest};
pub use self::options::{OptionError, SamplingOptions};

/// Chooses tokens for one sequence.
#[derive(Debug, Clone)]
pub struct Sampler {
    options: SamplingOptions,
    seed: u64,
    random: ChaCha12Rng,
    num_broken_logits: u64,
    candidates: Candidates,
    /// The penalty window, sorted; kept for its allocation.
    recent: Vec<u32>,
}

impl Sampler {
    /// Makes a sampler at the start of its seed's stream.
    ///
    /// # Errors
    /// [`OptionError`] for the first option outside its limits.
    pub fn new(options: SamplingOptions) -> Result<Self, OptionError> {
        options.validate()?;
        let seed = options.seed.unwrap_or_else(random_seed);
        Ok(Self {
            options,
            seed,
            random: ChaCha12Rng::seed_from_u64(seed),
            num_broken_logits: 0,
            candidates: Candidates::default(),
            recent: Vec::new(),
        })
    }

    /// Returns the seed in use: the one asked for, or the one picked.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Returns the options in use.
    pub fn options(&self) -> &SamplingOptions {
        &self.options
    }

    /// Returns the number of logits so far that were NaN or plus infinity.
    pub fn num_broken_logits(&self) -> u64 {
        self.num_broken_logits
    }

    /// Chooses the next token from `logits` (one per token of the vocabulary), which end up biased and penalised.
    ///
    /// `history` is the sequence so far, prompt included; penalties look at its end and skip ids outside the
    /// vocabulary.
    ///
    /// # Errors
    /// [`SampleError::BiasOutsideVocabulary`] for a bias on a token that has no logit, [`SampleError::NothingLeft`]
    /// when every token is banned.
    pub fn sample(&mut self, logits: &mut [f32], history: &[u32]) -> Result<u32, SampleError> {
        let num_broken = ban_broken(logits);
        self.num_broken_logits += num_broken as u64;
        self.bias(logits)?;
        self.penalize(logits, history);
        let nothing_left = SampleError::NothingLeft { num_logits: logits.len(), num_broken };
        if self.options.temperature == 0.0 {
            return likeliest(logits).ok_or(nothing_left);
        }
        match self.options.top_k {
            0 => self.candidates.load(logits),
            k => self.candidates.load_top_k(logits, k),
        }
        if self.candidates.is_empty() {
            return Err(nothing_left);
        }
        if self.options.top_p < 1.0 {
            self.candidates.keep_top_p(self.options.top_p);
        }
        if self.options.min_p > 0.0 {
            self.candidates.keep_min_p(self.options.min_p);
        }
        Ok(self.candidates.draw(self.options.temperature, unit_interval(self.random.next_u64())))
    }

    fn bias(&self, logits: &mut [f32]) -> Result<(), SampleError> {
        let num_logits = logits.len();
        for &(id, bias) in &self.options.logit_bias {
            let logit = logits.get_mut(id as usize).ok_or(SampleError::BiasOutsideVocabulary { id, num_logits })?;
            *logit = if bias == f32::NEG_INFINITY { bias } else { unless_banned(*logit, |logit| logit + bias) };
        }
        Ok(())
    }

    fn penalize(&mut self, logits: &mut [f32], history: &[u32]) {
        if !self.options.penalizes() {
            return;
        }
        self.recent.clear();
        self.recent.extend_from_slice(&history[history.len().saturating_sub(self.options.penalty_window)..]);
        self.recent.sort_unstable();
        for same in self.recent.chunk_by(PartialEq::eq) {
            let Some(logit) = logits.get_mut(same[0] as usize) else { continue };
            let counted = same.len() as f32 * self.options.frequency_penalty + self.options.presence_penalty;
            *logit = unless_banned(*logit, |logit| {
                // Dividing a negative logit would encourage: multiply it.
                let repetition = self.options.repetition_penalty;
                (if logit > 0.0 { logit / repetition } else { logit * repetition }) - counted
            });
        }
    }
}

/// Sets NaN and plus infinity to minus infinity and returns how many there were.
///
/// Every logit is written, broken or not: without a branch the compiler makes vectors of it.
fn ban_broken(logits: &mut [f32]) -> usize {
    let mut num_broken = 0;
    for block in logits.chunks_mut(BLOCK) {
        let mut num_broken_here = 0u32;
        for logit in block {
            let is_logit = *logit < f32::INFINITY;
            *logit = if is_logit { *logit } else { f32::NEG_INFINITY };
            num_broken_here += u32::from(!is_logit);
        }
        num_broken += num_broken_here as usize;
    }
    num_broken
}

/// Changes a logit, keeping it finite: only a ban makes minus infinity, and nothing lifts it.
fn unless_banned(logit: f32, change: impl Fn(f32) -> f32) -> f32 {
    if logit == f32::NEG_INFINITY { logit } else { change(logit).clamp(f32::MIN, f32::MAX) }
}

/// Returns the token with the largest logit above minus infinity, of equals the lowest. Logits are not NaN.
fn likeliest(logits: &[f32]) -> Option<u32> {
    // The first block that holds the largest, then the largest's first place in it.
    let mut best = (f32::NEG_INFINITY, &logits[..0], 0);
    for (number, block) in logits.chunks(BLOCK).enumerate() {
        let largest = largest(block);
        if largest > best.0 {
            best = (largest, block, number * BLOCK);
        }
    }
    let (largest, block, first) = best;
    block.iter().position(|logit| *logit == largest).map(|at| (first + at) as u32)
}

/// Maps 64 random bits to [0, 1): the upper 53, every f64 step equally likely.
fn unit_interval(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// Picks a seed that differs from run to run and from call to call.
///
/// The standard library keys its hash maps from the system's entropy, anew for each state: a hash under such a key is
/// as random as a seed needs to be, without a dependency for it.
fn random_seed() -> u64 {
    RandomState::new().hash_one(0u8)
}

/// Why no token could be chosen.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SampleError {
    /// A logit bias names a token that the vocabulary does not have.
    #[error("logit_bias names token {id}, but the vocabulary has {num_logits} tokens")]
    BiasOutsideVocabulary {
        /// The token named.
        id: u32,
        /// Size of the vocabulary.
        num_logits: usize,
    },
    /// Every token is banned.
    #[error("no token left to choose from {num_logits} logits, {num_broken} of them not numbers")]
    NothingLeft {
        /// Number of logits given.
        num_logits: usize,
        /// How many of them were NaN or plus infinity.
        num_broken: usize,
    },
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BAN: f32 = f32::NEG_INFINITY;

    /// Plain sampling at temperature 1 with a seed: no cut, no penalty.
    fn plain(seed: u64) -> SamplingOptions {
        SamplingOptions { temperature: 1.0, seed: Some(seed), ..SamplingOptions::greedy() }
    }

    fn greedy(logits: &[f32]) -> Result<u32, SampleError> {
        Sampler::new(SamplingOptions::greedy()).unwrap().sample(&mut logits.to_vec(), &[])
    }

    fn draws(options: SamplingOptions, logits: &[f32], num_draws: usize) -> Vec<u32> {
        let mut sampler = Sampler::new(options).unwrap();
        (0..num_draws).map(|_| sampler.sample(&mut logits.to_vec(), &[]).unwrap()).collect()
    }

    /// Pearson's statistic of `drawn` against `expected` probabilities.
    fn chi_square(drawn: &[u32], expected: &[f64]) -> f64 {
        let mut counts = vec![0f64; expected.len()];
        drawn.iter().for_each(|id| counts[*id as usize] += 1.0);
        let expect = expected.iter().map(|p| p * drawn.len() as f64);
        counts.iter().zip(expect).map(|(got, want)| (got - want).powi(2) / want).sum()
    }

    fn softmax(logits: &[f32], temperature: f64) -> Vec<f64> {
        let weights: Vec<f64> = logits.iter().map(|logit| (f64::from(*logit) / temperature).exp()).collect();
        let sum: f64 = weights.iter().sum();
        weights.iter().map(|weight| weight / sum).collect()
    }

    #[test]
    fn greedy_takes_the_largest_and_of_equals_the_lowest_id() {
        assert_eq!(greedy(&[1.0, 3.0, 2.0]), Ok(1));
        assert_eq!(greedy(&[1.0, 3.0, 3.0]), Ok(1));
        assert_eq!(greedy(&[-0.0, 0.0]), Ok(0));
        assert_eq!(greedy(&[BAN, f32::MIN]), Ok(1));
        // Equals in several blocks and in one.
        let mut many = vec![0.0; 3 * BLOCK + 5];
        for at in [3 * BLOCK + 1, 2 * BLOCK + 9, 2 * BLOCK + 7] {
            many[at] = 1.0;
            assert_eq!(greedy(&many), Ok(at as u32));
        }
    }

    #[test]
    fn broken_logits_are_banned_and_counted() {
        for options in [SamplingOptions::greedy(), plain(1)] {
            let mut sampler = Sampler::new(options).unwrap();
            let mut logits = [f32::NAN, 1.0, f32::INFINITY, BAN];
            assert_eq!(sampler.sample(&mut logits, &[]), Ok(1));
            assert_eq!(sampler.num_broken_logits(), 2);
            assert_eq!(
                sampler.sample(&mut [f32::NAN; 2], &[]),
                Err(SampleError::NothingLeft { num_logits: 2, num_broken: 2 })
            );
            assert_eq!(sampler.num_broken_logits(), 4);
        }
    }

    #[test]
    fn nothing_to_choose_from_is_an_error() {
        for logits in [&[][..], &[BAN, BAN]] {
            for options in [SamplingOptions::greedy(), plain(1), SamplingOptions::default()] {
                let got = Sampler::new(options).unwrap().sample(&mut logits.to_vec(), &[]);
                assert_eq!(got, Err(SampleError::NothingLeft { num_logits: logits.len(), num_broken: 0 }));
            }
        }
    }

    #[test]
    fn bias_adds_bans_and_is_checked_against_the_vocabulary() {
        let sample = |bias: &[(u32, f32)]| {
            let options = SamplingOptions { logit_bias: bias.to_vec(), ..SamplingOptions::greedy() };
            Sampler::new(options).unwrap().sample(&mut [1.0, 3.0, 2.0], &[])
        };
        assert_eq!(sample(&[(0, 2.5)]), Ok(0));
        assert_eq!(sample(&[(1, BAN)]), Ok(2));
        assert_eq!(sample(&[(1, BAN), (2, BAN)]), Ok(0));
        assert_eq!(sample(&[(0, 1.5), (0, 1.0)]), Ok(0), "a token listed twice gets both");
        assert_eq!(sample(&[(0, f32::MAX), (0, f32::MAX)]), Ok(0), "an overflow upwards breaks no logit");
        assert_eq!(sample(&[(0, f32::MIN), (0, f32::MIN), (1, BAN), (2, BAN)]), Ok(0), "nor does one downwards ban");
        assert_eq!(sample(&[(1, BAN), (1, f32::MAX)]), Ok(2), "nothing lifts a ban");
        assert_eq!(sample(&[(3, 1.0)]), Err(SampleError::BiasOutsideVocabulary { id: 3, num_logits: 3 }));
        assert_eq!(
            sample(&[(3, 1.0)]).unwrap_err().to_string(),
            "logit_bias names token 3, but the vocabulary has 3 tokens"
        );
    }

    #[test]
    fn penalties_follow_the_formula_within_their_window() {
        let options = SamplingOptions {
            repetition_penalty: 2.0,
            presence_penalty: 0.25,
            frequency_penalty: 0.5,
            penalty_window: 4,
            ..SamplingOptions::greedy()
        };
        let mut logits = [4.0, -4.0, 4.0, BAN, 4.0];
        let mut sampler = Sampler::new(options).unwrap();
        // Token 4 lies outside the window, id 99 outside the vocabulary.
        assert_eq!(sampler.sample(&mut logits, &[4, 4, 0, 99, 1, 0]), Ok(2));
        assert_eq!(logits, [4.0 / 2.0 - 2.0 * 0.5 - 0.25, -4.0 * 2.0 - 0.5 - 0.25, 4.0, BAN, 4.0]);
    }

    #[test]
    fn a_window_of_zero_or_an_empty_history_penalizes_nothing() {
        for (penalty_window, history) in [(0, &[0u32, 1][..]), (64, &[])] {
            let options = SamplingOptions { repetition_penalty: 2.0, penalty_window, ..SamplingOptions::greedy() };
            let mut logits = [4.0, 3.0];
            assert_eq!(Sampler::new(options).unwrap().sample(&mut logits, history), Ok(0));
            assert_eq!(logits, [4.0, 3.0]);
        }
    }

    #[test]
    fn a_seed_fixes_the_stream_and_without_one_it_is_reported() {
        let logits: Vec<f32> = (0..50).map(|i| (i * 7 % 11) as f32 / 4.0).collect();
        let first = draws(plain(7), &logits, 200);
        assert_eq!(first, draws(plain(7), &logits, 200));
        assert_ne!(first, draws(plain(8), &logits, 200));
        let sampler = Sampler::new(SamplingOptions { seed: None, ..plain(0) }).unwrap();
        let other = Sampler::new(SamplingOptions { seed: None, ..plain(0) }).unwrap();
        assert_ne!(sampler.seed(), other.seed());
        let picked = sampler.seed();
        let mut sampler = sampler;
        let again: Vec<_> = (0..200).map(|_| sampler.sample(&mut logits.clone(), &[]).unwrap()).collect();
        assert_eq!(again, draws(plain(picked), &logits, 200));
    }

    #[test]
    fn the_stream_of_a_seed_never_changes() {
        // These are promises to whoever stored a seed: a change here is a breaking change.
        let logits = [0.0; 1000];
        assert_eq!(draws(plain(42), &logits, 6), [526, 542, 636, 405, 34, 414]);
    }

    #[test]
    fn frequencies_match_the_softmax_at_any_temperature() {
        let logits = [2.0, 1.0, 0.0, -1.0, 0.5, 1.5, 0.0, -0.5];
        for temperature in [0.5, 1.0, 1.7] {
            let drawn = draws(SamplingOptions { temperature, ..plain(11) }, &logits, 50_000);
            let statistic = chi_square(&drawn, &softmax(&logits, f64::from(temperature)));
            // 7 degrees of freedom: exceeded once in 1,000 seeds; the seed is fixed.
            assert!(statistic < 24.32, "temperature {temperature}: {statistic}");
        }
    }

    #[test]
    fn the_ruler_of_the_frequencies_sees_a_small_error() {
        let logits = [2.0, 1.0, 0.0, -1.0, 0.5, 1.5, 0.0, -0.5];
        let drawn = draws(plain(11), &logits, 50_000);
        assert!(chi_square(&drawn, &softmax(&logits, 1.05)) > 24.32);
    }

    #[test]
    fn cuts_apply_in_order_and_before_the_temperature() {
        // Probabilities 0.5 0.3 0.15 0.05: of top-k 3, renormalised to 0.526 0.316 0.158, top-p 0.8 keeps two.
        let logits = [0.5f32, 0.3, 0.15, 0.05].map(f32::ln);
        let options = SamplingOptions { top_k: 3, top_p: 0.8, temperature: 100.0, ..plain(3) };
        let drawn = draws(options, &logits, 4_000);
        let tempered = softmax(&logits[..2], 100.0);
        assert!(drawn.iter().all(|id| *id < 2));
        // 1 degree of freedom, once in 1,000 seeds.
        assert!(chi_square(&drawn, &tempered) < 10.83);
        // Over the whole vocabulary the first two have 0.8: a mass of 0.81 lets in the third.
        let third = draws(SamplingOptions { top_p: 0.81, ..plain(3) }, &logits, 4_000);
        assert!(third.contains(&2) && !third.contains(&3));
    }

    #[test]
    fn a_tiny_temperature_is_greedy() {
        let logits = [1.0, 1.001, 0.5];
        assert!(draws(SamplingOptions { temperature: 1e-30, ..plain(5) }, &logits, 100).iter().all(|id| *id == 1));
    }

    proptest! {
        #[test]
        fn penalties_are_monotone(
            logit in -10f32..10.0,
            (less, more) in (1f32..2.0, 0f32..1.0).prop_map(|(less, step)| (less, less + step)),
            times in 1usize..5,
        ) {
            let penalized = |repetition, additive| {
                let options = SamplingOptions {
                    repetition_penalty: repetition,
                    presence_penalty: additive,
                    frequency_penalty: additive,
                    ..SamplingOptions::greedy()
                };
                let mut logits = [logit, 0.0];
                Sampler::new(options).unwrap().sample(&mut logits, &vec![0; times]).unwrap();
                logits[0]
            };
            // A stronger penalty never helps, a penalty over the neutral value never helps, and seeing more hurts more.
            prop_assert!(penalized(less, 0.0) <= logit);
            prop_assert!(penalized(more, 0.0) <= penalized(less, 0.0));
            prop_assert!(penalized(1.0, less - 1.0) <= logit);
            prop_assert!(penalized(1.0, more - 1.0) <= penalized(1.0, less - 1.0));
        }

        #[test]
        fn a_draw_is_always_allowed_by_every_cut(
            logits in prop::collection::vec(prop_oneof![9 => -8f32..8.0, 1 => Just(BAN)], 1..300),
            (top_k, top_p, min_p, temperature) in (0usize..50, 0f32..=1.0, 0f32..=1.0, 0.1f32..3.0),
            seed: u64,
        ) {
            prop_assume!(logits.iter().any(|logit| *logit > BAN));
            let options = SamplingOptions { top_k, top_p, min_p, temperature, ..plain(seed) };
            let id = draws(options, &logits, 1)[0] as usize;
            let largest = logits.iter().copied().fold(BAN, f32::max);
            let num_likelier = logits.iter().filter(|logit| **logit > logits[id]).count();
            prop_assert!(logits[id] > BAN);
            prop_assert!(top_k == 0 || num_likelier < top_k);
            prop_assert!(f64::from(logits[id] - largest).exp() >= f64::from(min_p) * (1.0 - 1e-5));
        }
    }
}
