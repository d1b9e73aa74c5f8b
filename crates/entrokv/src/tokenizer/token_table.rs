//! The texts and types of a vocabulary, packed, and the way back from a text to its id.

use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashTable};

use super::vocabulary::{TokenType, Vocabulary};

/// All token texts in one allocation, indexed by id and by text, and what kind of token each is.
///
/// A vocabulary of 262,144 tokens is three allocations and one hash table, not half a million strings: loading it is a
/// copy and one hash a token.
#[derive(Debug)]
pub(super) struct TokenTable {
    bytes: Vec<u8>,
    /// Where each token ends in `bytes`.
    ends: Vec<u32>,
    types: Vec<TokenType>,
    ids: HashTable<u32>,
    hasher: DefaultHashBuilder,
}

impl TokenTable {
    /// Packs a vocabulary that fits together. Of equal texts the lowest id is found.
    pub(super) fn new(vocabulary: &Vocabulary<'_>) -> Self {
        let tokens = &vocabulary.tokens;
        let mut table = Self {
            bytes: Vec::with_capacity(tokens.iter().map(|token| token.len()).sum()),
            ends: Vec::with_capacity(tokens.len()),
            types: (0..tokens.len() as u32).map(|id| vocabulary.token_type(id)).collect(),
            ids: HashTable::with_capacity(tokens.len()),
            hasher: DefaultHashBuilder::default(),
        };
        for (id, token) in (0..).zip(tokens) {
            table.bytes.extend_from_slice(token);
            table.ends.push(table.bytes.len() as u32);
            // An empty text (some converters leave holes) matches nothing.
            if !token.is_empty() && table.id(token).is_none() {
                let Self { bytes, ends, ids, hasher, .. } = &mut table;
                ids.insert_unique(hasher.hash_one(token), id, |&other| hasher.hash_one(text(bytes, ends, other)));
            }
        }
        table
    }

    /// Number of tokens.
    pub(super) fn len(&self) -> u32 {
        self.ends.len() as u32
    }

    /// The text and the type of a token, `None` past the end of the vocabulary.
    pub(super) fn token(&self, id: u32) -> Option<(&[u8], TokenType)> {
        (id < self.len()).then(|| (text(&self.bytes, &self.ends, id), self.types[id as usize]))
    }

    /// The token of exactly this text.
    pub(super) fn id(&self, token: &[u8]) -> Option<u32> {
        self.ids.find(self.hasher.hash_one(token), |&id| text(&self.bytes, &self.ends, id) == token).copied()
    }

    /// The token of exactly this text and one of the types that `accepts`.
    pub(super) fn id_of_type(&self, token: &[u8], accepts: impl Fn(TokenType) -> bool) -> Option<u32> {
        self.id(token).filter(|&id| accepts(self.types[id as usize]))
    }
}

fn text<'a>(bytes: &'a [u8], ends: &[u32], id: u32) -> &'a [u8] {
    let start = if id == 0 { 0 } else { ends[id as usize - 1] };
    &bytes[start as usize..ends[id as usize] as usize]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::{Algorithm, SpecialIds};

    fn table(tokens: &[&str], token_types: &[TokenType]) -> TokenTable {
        TokenTable::new(&Vocabulary {
            tokens: tokens.iter().map(|token| token.as_bytes()).collect(),
            token_types: token_types.to_vec(),
            algorithm: Algorithm::ByteLevelBpe { merges: Vec::new(), pre: None },
            special: SpecialIds::default(),
            add_bos: None,
            add_eos: None,
        })
    }

    #[test]
    fn texts_and_ids_lead_to_each_other() {
        let tokens: Vec<String> = (0..5000).map(|i| format!("token {i}")).collect();
        let table = table(&tokens.iter().map(String::as_str).collect::<Vec<_>>(), &[]);
        assert_eq!(table.len(), 5000);
        for (id, token) in (0..).zip(&tokens) {
            assert_eq!(table.token(id), Some((token.as_bytes(), TokenType::Normal)));
            assert_eq!(table.id(token.as_bytes()), Some(id));
        }
        assert_eq!((table.token(5000), table.id(b"token")), (None, None));
    }

    #[test]
    fn of_equal_texts_the_first_counts_and_an_empty_one_is_never_found() {
        let table = table(&["", "a", "", "a"], &[]);
        assert_eq!((table.id(b"a"), table.id(b"")), (Some(1), None));
        assert_eq!(table.token(2), Some((&b""[..], TokenType::Normal)));
        assert_eq!(table.token(3), Some((&b"a"[..], TokenType::Normal)));
    }

    #[test]
    fn a_token_of_another_type_is_not_found() {
        let table = table(&["a", "b"], &[TokenType::Control, TokenType::Byte]);
        assert_eq!(table.id_of_type(b"a", |token_type| token_type == TokenType::Control), Some(0));
        assert_eq!(table.id_of_type(b"b", |token_type| token_type == TokenType::Control), None);
    }
}
