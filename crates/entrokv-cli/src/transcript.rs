//! A conversation as it is noted in a KV file, so that `chat` and `generate --chat` can go on with it.

use entrokv::kv_file::Notes;
use entrokv::{Completion, FinishReason, Tokenizer};
use serde::{Deserialize, Serialize};

use crate::failure::Failure;

/// Its key among the notes.
const KEY: &str = "conversation";

/// The messages, and the text that the tokens of the sequence spell.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Transcript {
    /// Role and text, oldest first.
    pub(crate) messages: Vec<(String, String)>,
    /// What the model has read and written, template and all.
    pub(crate) text: String,
}

impl Transcript {
    /// The one in `notes`, if there is one.
    pub(crate) fn noted(notes: &Notes) -> Result<Option<Self>, Failure> {
        notes.get(KEY).map(|text| serde_json::from_str(text)).transpose().map_err(Failure::from)
    }

    /// The notes of a file.
    pub(crate) fn notes(&self) -> Result<Notes, Failure> {
        Ok(Notes::from([(KEY.to_owned(), serde_json::to_string(self)?)]))
    }
}

/// The end of `completion` as its tokens spell it, which the answer's text leaves out: the end token, or nothing. `None` where a
/// stop string ended it, for the cache then holds more than the text.
pub(crate) fn spelled_end(tokenizer: &Tokenizer, completion: &Completion) -> Option<String> {
    let last = completion.tokens.last().copied().filter(|&id| tokenizer.is_end_of_generation(id));
    let bytes = last.and_then(|id| tokenizer.token_bytes(id).ok());
    let end = bytes.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    (completion.finish_reason != FinishReason::Stop || !end.is_empty()).then_some(end)
}
