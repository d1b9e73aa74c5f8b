//! The texts of a vocabulary, packed, and the way back from a text to its id.

use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashTable};

/// All token texts in one allocation, indexed by id and by text.
///
/// A vocabulary of 262,144 tokens is two allocations and one hash table, not half a million strings: loading it is a copy
/// and one hash a token.
#[derive(Debug)]
pub(super) struct TokenTable {
    bytes: Vec<u8>,
    /// Where each token ends in `bytes`.
    ends: Vec<u32>,
    ids: HashTable<u32>,
    hasher: DefaultHashBuilder,
}

impl TokenTable {
    /// Packs `tokens`; their total length must fit `u32`, which the caller checks. Of equal texts the lowest id is found.
    pub(super) fn new(tokens: &[&[u8]]) -> Self {
        let mut table = Self {
            bytes: Vec::with_capacity(tokens.iter().map(|token| token.len()).sum()),
            ends: Vec::with_capacity(tokens.len()),
            ids: HashTable::with_capacity(tokens.len()),
            hasher: DefaultHashBuilder::default(),
        };
        for (id, token) in (0..).zip(tokens) {
            table.bytes.extend_from_slice(token);
            table.ends.push(table.bytes.len() as u32);
            // An empty text (some converters leave holes) matches nothing.
            if !token.is_empty() && table.id(token).is_none() {
                let Self { bytes, ends, ids, hasher } = &mut table;
                ids.insert_unique(hasher.hash_one(token), id, |&other| hasher.hash_one(text(bytes, ends, other)));
            }
        }
        table
    }

    /// Number of tokens.
    pub(super) fn len(&self) -> u32 {
        self.ends.len() as u32
    }

    /// The text of a token, `None` past the end of the vocabulary.
    pub(super) fn text(&self, id: u32) -> Option<&[u8]> {
        (id < self.len()).then(|| text(&self.bytes, &self.ends, id))
    }

    /// The token of exactly this text.
    pub(super) fn id(&self, token: &[u8]) -> Option<u32> {
        self.ids.find(self.hasher.hash_one(token), |&id| text(&self.bytes, &self.ends, id) == token).copied()
    }
}

fn text<'a>(bytes: &'a [u8], ends: &[u32], id: u32) -> &'a [u8] {
    let start = if id == 0 { 0 } else { ends[id as usize - 1] };
    &bytes[start as usize..ends[id as usize] as usize]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_and_ids_lead_to_each_other() {
        let tokens: Vec<String> = (0..5000).map(|i| format!("token {i}")).collect();
        let table = TokenTable::new(&tokens.iter().map(String::as_bytes).collect::<Vec<_>>());
        assert_eq!(table.len(), 5000);
        for (id, token) in (0..).zip(&tokens) {
            assert_eq!(table.text(id), Some(token.as_bytes()));
            assert_eq!(table.id(token.as_bytes()), Some(id));
        }
        assert_eq!((table.text(5000), table.id(b"token")), (None, None));
    }

    #[test]
    fn of_equal_texts_the_first_counts_and_an_empty_one_is_never_found() {
        let table = TokenTable::new(&[b"", b"a", b"", b"a"]);
        assert_eq!((table.id(b"a"), table.id(b"")), (Some(1), None));
        assert_eq!((table.text(2), table.text(3)), (Some(&b""[..]), Some(&b"a"[..])));
    }
}
