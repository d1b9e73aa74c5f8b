//! What came of a recipe.

use serde::Serialize;

use super::case::Case;
use super::interval::wilson;

/// What came of one recipe at one budget.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Row {
    /// The recipe.
    pub recipe: String,
    /// The budget, where the recipe evicts.
    pub budget: Option<String>,
    /// Payload bytes of global layers when a context has been compressed; the mean over contexts.
    pub bytes_held: u64,
    /// The same of the full cache.
    pub bytes_full: u64,
    /// Questions, but for those whose answer stands at the very end.
    pub questions: usize,
    /// How many of them the full cache answers: those that count.
    pub answered_full: usize,
    /// How many of these are answered.
    pub answered: usize,
    /// Wilson's 95 % interval of `answered` of `answered_full`.
    pub interval: [f64; 2],
    /// The same counts where the answer stands at the very end, among the newest tokens.
    pub depth100: AtEnd,
    /// Mean divergence of predictions from the full cache's in nats, over all texts.
    pub kl_mean: Option<f64>,
    /// That of the text where it is largest.
    pub kl_worst: Option<f64>,
    /// Wall time of all readings, questions and texts.
    pub seconds: f64,
}

/// Questions about the end of a context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct AtEnd {
    /// How many there are.
    pub questions: usize,
    /// How many the full cache answers.
    pub answered_full: usize,
    /// How many of these are answered.
    pub answered: usize,
}

impl Row {
    /// Counts the questions of a case: those that count, since `full` has them right, and which of these are.
    pub(super) fn count(&mut self, case: &Case, full: &[bool], right: &[bool]) {
        for ((question, full), right) in case.questions.iter().zip(full).zip(right) {
            let (full, right) = (usize::from(*full), usize::from(*full && *right));
            if question.depth == Some(1.0) {
                self.depth100.questions += 1;
                self.depth100.answered_full += full;
                self.depth100.answered += right;
            } else {
                self.questions += 1;
                self.answered_full += full;
                self.answered += right;
            }
        }
    }

    /// Turns sums over so many contexts into what is reported; `kl` is that of each text.
    pub(super) fn finish(&mut self, contexts: usize, kl: &[f64]) {
        self.bytes_held /= contexts.max(1) as u64;
        self.bytes_full /= contexts.max(1) as u64;
        self.interval = wilson(self.answered, self.answered_full);
        if !kl.is_empty() {
            self.kl_mean = Some(kl.iter().sum::<f64>() / kl.len() as f64);
            self.kl_worst = kl.iter().copied().reduce(f64::max);
        }
    }
}
