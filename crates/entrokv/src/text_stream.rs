//! The text of an answer as it is generated: whole characters only, cut at the first stop string.

use std::sync::Arc;

use crate::detokenizer::Detokenizer;
use crate::stop::{StopError, StopStrings};
use crate::tokenizer::Tokenizer;

/// Detokenizer and stop strings of one answer.
pub(crate) struct TextStream {
    /// `None` once the answer has ended.
    detokenizer: Option<Detokenizer>,
    stops: StopStrings,
}

/// What one token added.
pub(crate) struct TextPiece {
    /// Text that is safe to show.
    pub(crate) text: String,
    /// Whether a stop string was completed; nothing follows then.
    pub(crate) stopped: bool,
}

impl TextStream {
    /// The text of an answer that continues a prompt.
    pub(crate) fn new(tokenizer: &Arc<Tokenizer>, stops: &[String]) -> Result<Self, StopError> {
        let detokenizer = Some(Detokenizer::continuing(Arc::clone(tokenizer)));
        Ok(Self { detokenizer, stops: StopStrings::new(stops.iter().cloned())? })
    }

    /// The text `token` adds; a token the vocabulary does not spell adds none.
    pub(crate) fn push(&mut self, token: u32) -> TextPiece {
        let text = self.detokenizer.as_mut().and_then(|d| d.push(token).ok()).unwrap_or_default();
        let outcome = self.stops.push(&text);
        TextPiece { text: outcome.emit, stopped: outcome.hit }
    }

    /// What was held back, when the answer ends for another reason than a stop string.
    pub(crate) fn finish(&mut self) -> String {
        let tail = self.detokenizer.take().map(Detokenizer::finish).unwrap_or_default();
        let outcome = self.stops.push(&tail);
        let mut text = outcome.emit;
        if !outcome.hit {
            text.push_str(&self.stops.finish());
        }
        text
    }
}
