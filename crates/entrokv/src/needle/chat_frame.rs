//! What stands around a context and a question: the marks of a chat template.

use crate::chat_template::{ChatTemplate, Message, RenderOptions};
use crate::needle::NeedleError;
use crate::tokenizer::{SpecialTokens, Tokenizer};

/// Parts the context from the question.
const GAP: &str = "\n\n";

/// Tokens before a user's message, and between it and the model's answer.
pub(super) struct ChatFrame<'a> {
    tokenizer: &'a Tokenizer,
    opening: Vec<u32>,
    closing: Vec<u32>,
}

impl<'a> ChatFrame<'a> {
    /// The frame that `template` puts around a message; without a template texts stand for themselves, and the answer in a new
    /// line.
    ///
    /// # Errors
    /// [`NeedleError::NoMessage`] for a template that does not show the message, and what templates and tokenizers refuse.
    pub(super) fn new(tokenizer: &'a Tokenizer, template: Option<&ChatTemplate>) -> Result<Self, NeedleError> {
        const MESSAGE: &str = "a-message-of-the-user";
        let (opening, closing) = match template {
            None => (String::new(), "\n".to_owned()),
            Some(template) => {
                let text = template.render(&[Message::new("user", MESSAGE)], &RenderOptions::default())?;
                let parts = text.split_once(MESSAGE).ok_or(NeedleError::NoMessage)?;
                (parts.0.to_owned(), parts.1.to_owned())
            }
        };
        let mut opening = tokenizer.encode_raw(&opening, SpecialTokens::Parse)?;
        let bos = tokenizer.bos().filter(|bos| tokenizer.adds_bos() && opening.first() != Some(bos));
        opening.splice(0..0, bos);
        let closing = tokenizer.encode_raw(&closing, SpecialTokens::Parse)?;
        Ok(Self { tokenizer, opening, closing })
    }

    /// Tokens of a context at the beginning of a user's message.
    pub(super) fn context(&self, text: &str) -> Result<Vec<u32>, NeedleError> {
        let mut tokens = self.opening.clone();
        tokens.extend(self.plain(text)?);
        Ok(tokens)
    }

    /// Tokens that ask a question at the end of that message and begin the answer.
    pub(super) fn question(&self, question: &str, prefix: &str) -> Result<Vec<u32>, NeedleError> {
        let mut tokens = self.plain(&format!("{GAP}{question}"))?;
        tokens.extend(&self.closing);
        tokens.extend(self.plain(prefix)?);
        Ok(tokens)
    }

    /// Tokens of a text that is no message.
    pub(super) fn text(&self, text: &str) -> Result<Vec<u32>, NeedleError> {
        let mut tokens: Vec<u32> = self.tokenizer.bos().filter(|_| self.tokenizer.adds_bos()).into_iter().collect();
        tokens.extend(self.plain(text)?);
        Ok(tokens)
    }

    /// Tokens of a part of a text.
    pub(super) fn plain(&self, text: &str) -> Result<Vec<u32>, NeedleError> {
        Ok(self.tokenizer.encode_raw(text, SpecialTokens::Plain)?)
    }
}
