//! Token ids to text as they come, whole characters at a time.
//!
//! A character can be spread over tokens: an emoji is four bytes, and a tokenizer that has not seen it gives one token a
//! byte. Decoding each token by itself would print four replacement characters; here bytes wait until they are a character,
//! or can no longer become one. What is emitted, put together, is what decoding all the tokens at once gives.

use std::sync::Arc;

use crate::tokenizer::{Place, Tokenizer, TokenizerError};

/// Decodes one stream of tokens.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    place: Place,
    /// The beginning of a character: at most three bytes between calls.
    pending: Vec<u8>,
}

impl Detokenizer {
    /// For tokens that are a text of their own.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        Self { tokenizer, place: Place::TextBegins, pending: Vec::new() }
    }

    /// For tokens that continue a text, such as those generated after a prompt: a space in front is kept.
    pub fn continuing(tokenizer: Arc<Tokenizer>) -> Self {
        Self { place: Place::Inside, ..Self::new(tokenizer) }
    }

    /// Takes one token and returns the characters that are whole by now, perhaps none. Control tokens add nothing.
    ///
    /// # Errors
    /// [`TokenizerError::UnknownToken`] for an id past the end of the vocabulary; the stream goes on as if it had not come.
    pub fn push(&mut self, id: u32) -> Result<String, TokenizerError> {
        self.tokenizer.decode_into(id, &mut self.place, &mut self.pending)?;
        let mut text = String::new();
        let mut taken = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            taken += chunk.valid().len();
            // The last bytes may still become a character; anything else that is no character never will.
            let at_end = taken + chunk.invalid().len() == self.pending.len();
            if chunk.invalid().is_empty() || at_end && is_beginning_of_character(chunk.invalid()) {
                continue;
            }
            text.push(char::REPLACEMENT_CHARACTER);
            taken += chunk.invalid().len();
        }
        self.pending.drain(..taken);
        Ok(text)
    }

    /// Ends the stream: the replacement character if it stops inside a character, else nothing.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}

/// Whether more bytes could make these a character.
fn is_beginning_of_character(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::{Algorithm, SpecialIds, TokenType, Vocabulary};

    /// Ids 0 to 255 are the bytes; 256 is ` a`, 257 a control token.
    fn tokenizer() -> Arc<Tokenizer> {
        let mut texts: Vec<String> = (0..=u8::MAX).map(|byte| format!("<0x{byte:02X}>")).collect();
        let mut token_types = vec![TokenType::Byte; 256];
        texts.extend(["\u{2581}a", "<end_of_turn>"].map(str::to_owned));
        token_types.extend([TokenType::Normal, TokenType::Control]);
        let vocabulary = Vocabulary {
            tokens: texts.iter().map(String::as_bytes).collect(),
            algorithm: Algorithm::SentencePiece { scores: vec![0.0; texts.len()], space_prefix: true },
            token_types,
            special: SpecialIds::default(),
            add_bos: Some(false),
            add_eos: None,
        };
        Arc::new(Tokenizer::new(&vocabulary, None).expect("the vocabulary fits together"))
    }

    /// What each id emits, then what the end does.
    fn stream(mut stream: Detokenizer, ids: &[u32]) -> Vec<String> {
        let mut emitted: Vec<_> = ids.iter().map(|&id| stream.push(id).expect("an id of the vocabulary")).collect();
        emitted.push(stream.finish());
        emitted
    }

    #[test]
    fn bytes_wait_until_they_are_a_character_or_cannot_become_one() {
        struct Case {
            ids: &'static [u32],
            emitted: &'static [&'static str],
        }
        let cases = [
            Case { ids: &[], emitted: &[""] },
            Case { ids: &[0x61, 0x62], emitted: &["a", "b", ""] },
            Case { ids: &[0xF0, 0x9F, 0x98, 0x80], emitted: &["", "", "", "😀", ""] },
            // Cut off: one replacement character, at the end.
            Case { ids: &[0xF0, 0x9F, 0x98], emitted: &["", "", "", "\u{FFFD}"] },
            // Broken off by another character, or by a byte that begins none.
            Case { ids: &[0xF0, 0x9F, 0x61], emitted: &["", "", "\u{FFFD}a", ""] },
            Case { ids: &[0xC3, 0xC3, 0xA9], emitted: &["", "\u{FFFD}", "é", ""] },
            Case { ids: &[0xFF, 0x61], emitted: &["\u{FFFD}", "a", ""] },
            Case { ids: &[0x80], emitted: &["\u{FFFD}", ""] },
            // A surrogate in UTF-8: no character ever begins so.
            Case { ids: &[0xED, 0xA0, 0x80], emitted: &["", "\u{FFFD}\u{FFFD}", "\u{FFFD}", ""] },
            // A control token in between adds nothing and breaks nothing.
            Case { ids: &[0xC3, 257, 0xA9], emitted: &["", "", "é", ""] },
        ];
        for Case { ids, emitted } in cases {
            assert_eq!(stream(Detokenizer::new(tokenizer()), ids), emitted, "{ids:x?}");
        }
    }

    #[test]
    fn the_space_in_front_is_dropped_where_the_text_begins_and_nowhere_else() {
        assert_eq!(stream(Detokenizer::new(tokenizer()), &[256, 256]), ["a", " a", ""]);
        assert_eq!(stream(Detokenizer::new(tokenizer()), &[257, 256, 257, 256]), ["", "a", "", " a", ""]);
        assert_eq!(stream(Detokenizer::continuing(tokenizer()), &[256, 256]), [" a", " a", ""]);
    }

    #[test]
    fn a_stream_goes_on_after_an_id_that_is_no_token() {
        let mut stream = Detokenizer::new(tokenizer());
        stream.push(0xC3).expect("a byte");
        assert!(matches!(stream.push(258), Err(TokenizerError::UnknownToken { id: 258, vocab_size: 258 })));
        assert_eq!(stream.push(0xA9).expect("a byte"), "é");
    }
}
