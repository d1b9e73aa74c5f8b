//! SentencePiece's byte-pair encoding: characters merge by the score of what they become, and what the vocabulary cannot
//! say is spelled in bytes.

use super::{
    Place, TokenizerError,
    merge::{Merged, Merger},
    token_table::TokenTable,
    vocabulary::TokenType,
};

/// Stands for a space in token texts: U+2581, three bytes.
const SPACE: &str = "\u{2581}";

/// Scores as costs, and the tokens of single bytes.
#[derive(Debug)]
pub(super) struct SentencePiece {
    /// One a token: the lower, the sooner it is made.
    costs: Vec<u32>,
    byte_tokens: Box<[Option<u32>; 256]>,
    unknown: Option<u32>,
    space_prefix: bool,
}

/// Marks a symbol that is no token: it stands for itself, byte by byte.
const NO_TOKEN: u32 = u32::MAX;

impl SentencePiece {
    /// Prepares a vocabulary whose scores hold no NaN.
    pub(super) fn new(table: &TokenTable, scores: &[f32], space_prefix: bool, unknown: Option<u32>) -> Self {
        let mut byte_tokens = Box::new([None; 256]);
        for byte in 0..=u8::MAX {
            // Old files type them as ordinary tokens.
            let accepts = |token_type| token_type == TokenType::Byte || token_type == TokenType::Normal;
            byte_tokens[usize::from(byte)] = table.id_of_type(format!("<0x{byte:02X}>").as_bytes(), accepts);
        }
        Self { costs: scores.iter().map(|&score| cost(score)).collect(), byte_tokens, unknown, space_prefix }
    }

    /// Whether text gets a space in front.
    pub(super) fn space_prefix(&self) -> bool {
        self.space_prefix
    }

    /// Appends the tokens of `text`; at `place`, which may need its space.
    ///
    /// # Errors
    /// [`TokenizerError::Unencodable`] for a byte that the vocabulary cannot say, if it has no unknown token either.
    pub(super) fn encode(
        &self,
        table: &TokenTable,
        text: &str,
        place: Place,
        ids: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        let prefix = if place == Place::TextBegins && self.space_prefix { SPACE } else { "" };
        let mut escaped = String::with_capacity(prefix.len() + text.len() * 2);
        escaped.push_str(prefix);
        for (i, word) in text.split(' ').enumerate() {
            escaped.push_str(if i == 0 { "" } else { SPACE });
            escaped.push_str(word);
        }
        let token = |text: &[u8]| table.id_of_type(text, TokenType::is_mergeable);
        let mut merger = Merger::default();
        for character in escaped.chars() {
            let id = token(character.encode_utf8(&mut [0; 4]).as_bytes());
            merger.push(id.unwrap_or(NO_TOKEN), character.len_utf8() as u32);
        }
        let bytes = escaped.as_bytes();
        merger.merge(|left, right| {
            let id = token(&bytes[left.start as usize..right.end as usize])?;
            Some(Merged { cost: self.costs[id as usize], id })
        });
        for symbol in merger.symbols() {
            if symbol.id != NO_TOKEN {
                ids.push(symbol.id);
                continue;
            }
            for &byte in &bytes[symbol.start as usize..symbol.end as usize] {
                ids.push(
                    self.byte_tokens[usize::from(byte)].or(self.unknown).ok_or(TokenizerError::Unencodable { byte })?,
                );
            }
        }
        Ok(())
    }

    /// Appends the bytes that the text of an ordinary token stands for.
    pub(super) fn decode(token: &[u8], bytes: &mut Vec<u8>) {
        let mut rest = token;
        while let Some(at) = rest.windows(SPACE.len()).position(|window| window == SPACE.as_bytes()) {
            bytes.extend_from_slice(&rest[..at]);
            bytes.push(b' ');
            rest = &rest[at + SPACE.len()..];
        }
        bytes.extend_from_slice(rest);
    }
}

/// A number that grows as the score falls; equal scores, the two zeros among them, cost the same.
fn cost(score: f32) -> u32 {
    let bits = (score + 0.0).to_bits();
    let ascending = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    !ascending
}
