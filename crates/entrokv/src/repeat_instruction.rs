//! How a model is asked to repeat what it has read.

use std::ops::Range;

use crate::chat_template::{ChatTemplate, Message, RenderOptions};
use crate::tokenizer::{SpecialTokens, Tokenizer, TokenizerError};

/// Asks for the text from its beginning on.
const FROM_START: &str = "\n\nWrite the text above once more, word for word, from its first word on.";

/// Asks for a later part; the tokens before that part follow.
const FROM_WORDS: &str = "\n\nWrite the text above once more, word for word, going on from where it says:";

/// Tokens before a part that say where it begins (KVzip, Kim et al. 2025, section 3).
const OVERLAP: usize = 8;

/// The tokens that ask a model to repeat a stretch of its prompt. Empty ones ask by the stretch itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RepeatInstruction {
    /// Asks for the text from its beginning on.
    pub from_start: Vec<u32>,
    /// Asks for a later part, whose preceding tokens follow.
    pub from_words: Vec<u32>,
    /// Ends the user's message and begins the model's, where the model has a chat template.
    pub answer: Vec<u32>,
}

impl RepeatInstruction {
    /// The instruction in the words of this file, and in the form of the model's chat template if it has one.
    ///
    /// # Errors
    /// [`TokenizerError::Unencodable`] for a vocabulary that cannot say it.
    pub fn new(tokenizer: &Tokenizer, template: Option<&ChatTemplate>) -> Result<Self, TokenizerError> {
        let answer = template.and_then(answer_marks).unwrap_or_default();
        Ok(Self {
            from_start: tokenizer.encode_raw(FROM_START, SpecialTokens::Plain)?,
            from_words: tokenizer.encode_raw(FROM_WORDS, SpecialTokens::Plain)?,
            answer: tokenizer.encode_raw(&answer, SpecialTokens::Parse)?,
        })
    }

    /// What the model reads to repeat the tokens of `text` in `part`: the instruction, the words before, the part itself.
    pub(crate) fn tokens(&self, text: &[u32], part: &Range<usize>) -> Vec<u32> {
        let (ask, words) = match part.start {
            0 => (&self.from_start, &[][..]),
            start => (&self.from_words, &text[start.saturating_sub(OVERLAP)..start]),
        };
        [ask, words, &self.answer, &text[part.clone()]].concat()
    }

    /// Most tokens that [`RepeatInstruction::tokens`] puts before a part.
    pub(crate) fn longest(&self) -> usize {
        self.from_start.len().max(self.from_words.len() + OVERLAP) + self.answer.len()
    }
}

/// What a template writes between a user's message and the model's answer; `None` if it does not show the message.
pub(crate) fn answer_marks(template: &ChatTemplate) -> Option<String> {
    const MESSAGE: &str = "a-message-of-the-user";
    let text = template.render(&[Message::new("user", MESSAGE)], &RenderOptions::default()).ok()?;
    text.split_once(MESSAGE).map(|(_, after)| after.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instruction() -> RepeatInstruction {
        RepeatInstruction { from_start: vec![100], from_words: vec![200, 201], answer: vec![300] }
    }

    #[test]
    fn a_part_follows_the_instruction_and_the_words_before_it() {
        let text: Vec<u32> = (0..20).collect();
        assert_eq!(instruction().tokens(&text, &(0..3)), [100, 300, 0, 1, 2]);
        assert_eq!(instruction().tokens(&text, &(3..5)), [200, 201, 0, 1, 2, 300, 3, 4]);
        assert_eq!(instruction().tokens(&text, &(18..20)), [200, 201, 10, 11, 12, 13, 14, 15, 16, 17, 300, 18, 19]);
        assert_eq!(RepeatInstruction::default().tokens(&text, &(0..2)), [0, 1]);
        for start in 0..20 {
            let extra = instruction().tokens(&text, &(start..20)).len() - (20 - start);
            assert!(extra <= instruction().longest(), "{extra} before a part at {start}");
        }
    }

    #[test]
    fn the_marks_are_what_the_template_puts_after_a_message() {
        let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}\
                      {% if add_generation_prompt %}<assistant>{% endif %}";
        let template = ChatTemplate::new(source, Default::default()).unwrap();
        assert_eq!(answer_marks(&template).unwrap(), "</user><assistant>");
        assert_eq!(answer_marks(&ChatTemplate::new("nothing", Default::default()).unwrap()), None);
    }
}
