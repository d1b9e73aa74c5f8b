//! What a model is asked about any text, so that its queries say what a later question may look for.

use crate::chat_template::ChatTemplate;
use crate::repeat_instruction::answer_marks;
use crate::tokenizer::{SpecialTokens, Tokenizer, TokenizerError};

/// Questions that fit any text.
const QUESTIONS: &str = "\n\nWho is named above, and what did each of them do? Which places, dates, numbers, codes and amounts are \
    given, and what do they belong to? What happened first, and what came of it? What is said only once?";

/// The tokens of `questions`, or of our own, behind a text, and of what a chat template writes before an answer.
///
/// # Errors
/// [`TokenizerError::Unencodable`] for a vocabulary that cannot say them.
pub(crate) fn tokens(
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
    questions: Option<&str>,
) -> Result<Vec<u32>, TokenizerError> {
    let answer = template.and_then(answer_marks).unwrap_or_default();
    let mut tokens = tokenizer.encode_raw(questions.unwrap_or(QUESTIONS), SpecialTokens::Plain)?;
    tokens.extend(tokenizer.encode_raw(&answer, SpecialTokens::Parse)?);
    Ok(tokens)
}
