//! Text to token ids and back, from what a model file says about its own tokenizer.
//!
//! Two families cover the models this engine runs: byte-level byte-pair encoding (`gpt2`: SmolLM2, Qwen, Llama 3) and
//! SentencePiece with byte fallback (`llama`: Gemma, Llama 2). Both give the ids that llama.cpp gives on the same file;
//! where the reference implementations of the models themselves disagree with it, the code says so.
//!
//! Invariants:
//! - text cannot forge a control token: [`SpecialTokens::Plain`] gives none, whatever the text;
//! - a text never begins with two BOS, nor ends with two EOS, unless [`SpecialTokens::ParseDoubling`] is asked for;
//! - a `pre` type that is not known is an error, never a guess.

mod byte_alphabet;
mod byte_level;
mod error;
mod merge;
mod pre_tokenizer;
mod sentence_piece;
mod special_tokens;
mod token_table;
mod vocabulary;

use std::borrow::Cow;

pub use error::TokenizerError;
pub use vocabulary::{Algorithm, SpecialIds, TokenType, Vocabulary};

use byte_level::ByteLevelBpe;
use pre_tokenizer::PreTokenizer;
use sentence_piece::SentencePiece;
use special_tokens::{Fragment, SpecialTokenFinder};
use token_table::TokenTable;
use vocabulary::byte_token;

use crate::gguf::Metadata;

/// What special tokens mean in a text, and whether BOS and EOS are added to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialTokens {
    /// The text is just text: control tokens written in it are spelled out. Nothing is added.
    Plain,
    /// The text is a prompt: special tokens written in it count, and BOS and EOS are added where the file says so, unless
    /// they are there already.
    Parse,
    /// As `Parse`, but BOS and EOS are added even where they are there already: the form of llama.cpp's tokenizer, for
    /// comparison with it.
    ParseDoubling,
}

/// The tokenizer of one model.
#[derive(Debug)]
pub struct Tokenizer {
    table: TokenTable,
    model: Model,
    finder: SpecialTokenFinder,
    special: SpecialIds,
    added_bos: Option<u32>,
    added_eos: Option<u32>,
    /// Sorted.
    end_of_generation: Vec<u32>,
}

#[derive(Debug)]
enum Model {
    ByteLevelBpe(ByteLevelBpe),
    SentencePiece(SentencePiece),
}

/// Where the tokens to be decoded stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// No text has come before: the space that SentencePiece puts in front of a text is not part of it.
    TextBegins,
    /// Text has come before.
    Inside,
}

impl Tokenizer {
    /// Builds the tokenizer of a model file; `pre_override` stands in for the file's `tokenizer.ggml.pre`.
    ///
    /// # Errors
    /// As [`Vocabulary::from_metadata`] and [`Tokenizer::new`].
    pub fn from_metadata(metadata: &Metadata, pre_override: Option<&str>) -> Result<Self, TokenizerError> {
        Self::new(&Vocabulary::from_metadata(metadata)?, pre_override)
    }

    /// Builds the tokenizer of a vocabulary; `pre_override` stands in for its `pre` type.
    ///
    /// # Errors
    /// Every way in which the parts do not fit together, each with what was found and what was expected; a `pre` type that
    /// is missing or unknown.
    pub fn new(vocabulary: &Vocabulary<'_>, pre_override: Option<&str>) -> Result<Self, TokenizerError> {
        vocabulary.check()?;
        let table = TokenTable::new(vocabulary);
        let mut special = vocabulary.special.clone();
        let (model, adds_bos) = match &vocabulary.algorithm {
            Algorithm::ByteLevelBpe { merges, pre } => {
                let pre_tokenizer =
                    PreTokenizer::named(pre_override.or(*pre).ok_or_else(TokenizerError::missing_pre)?)?;
                let adds_bos = pre_tokenizer.adds_bos();
                (Model::ByteLevelBpe(ByteLevelBpe::new(&table, merges, pre_tokenizer)?), adds_bos)
            }
            Algorithm::SentencePiece { .. } if pre_override.is_some() => return Err(TokenizerError::PreWithoutUse),
            Algorithm::SentencePiece { scores, space_prefix } => {
                // The ids SentencePiece itself gives these roles, which old files leave unsaid.
                let default = |id: u32| (id < table.len()).then_some(id);
                special.unknown = special.unknown.or(default(0));
                special.bos = special.bos.or(default(1));
                special.eos = special.eos.or(default(2));
                (Model::SentencePiece(SentencePiece::new(&table, scores, *space_prefix, special.unknown)), true)
            }
        };
        let marker = |added: bool, id: Option<u32>, role| match (added, id) {
            (false, _) => Ok(None),
            (true, Some(id)) => Ok(Some(id)),
            (true, None) => Err(TokenizerError::MissingMarker { role }),
        };
        let added_bos = marker(vocabulary.add_bos.unwrap_or(adds_bos), special.bos, "BOS")?;
        let added_eos = marker(vocabulary.add_eos.unwrap_or(false), special.eos, "EOS")?;
        let end_of_generation = end_of_generation(&table, &special);
        Ok(Self {
            finder: SpecialTokenFinder::new(vocabulary)?,
            table,
            model,
            special,
            added_bos,
            added_eos,
            end_of_generation,
        })
    }

    /// The ids of `text`.
    ///
    /// # Errors
    /// [`TokenizerError::TextTooLong`] from 4 GiB on; [`TokenizerError::Unencodable`] if the vocabulary cannot say a byte.
    pub fn encode(&self, text: &str, special: SpecialTokens) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = self.encode_raw(text, special)?;
        let (bos, eos) = match special {
            SpecialTokens::Plain => (None, None),
            SpecialTokens::Parse => (
                self.added_bos.filter(|bos| ids.first() != Some(bos)),
                self.added_eos.filter(|eos| ids.last() != Some(eos)),
            ),
            SpecialTokens::ParseDoubling => (self.added_bos, self.added_eos),
        };
        if let Some(bos) = bos {
            ids.insert(0, bos);
        }
        ids.extend(eos);
        Ok(ids)
    }

    /// The ids of `text` and nothing else: no BOS or EOS is added, whatever the file says.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_raw(&self, text: &str, special: SpecialTokens) -> Result<Vec<u32>, TokenizerError> {
        if text.len() > MAX_TEXT_BYTES {
            return Err(TokenizerError::TextTooLong { got: text.len(), limit: MAX_TEXT_BYTES });
        }
        let fragments = match special {
            SpecialTokens::Plain => self.finder.split_plain(text),
            SpecialTokens::Parse | SpecialTokens::ParseDoubling => self.finder.split_parsing(text),
        };
        let mut ids = Vec::with_capacity(text.len() / 3);
        let mut place = Place::TextBegins;
        for fragment in fragments {
            match fragment {
                Fragment::Token(id) => {
                    ids.push(id);
                    place = Place::TextBegins;
                }
                Fragment::Text(text) => {
                    match &self.model {
                        Model::ByteLevelBpe(bpe) => bpe.encode(&self.table, text, &mut ids),
                        Model::SentencePiece(model) => model.encode(&self.table, text, place, &mut ids)?,
                    }
                    place = Place::Inside;
                }
            }
        }
        Ok(ids)
    }

    /// The text of `ids`, without control tokens; bytes that are no UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// [`TokenizerError::UnknownToken`] for an id past the end of the vocabulary.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        let mut place = Place::TextBegins;
        for &id in ids {
            self.decode_into(id, &mut place, &mut bytes)?;
        }
        Ok(match String::from_utf8(bytes) {
            Ok(text) => text,
            Err(invalid) => String::from_utf8_lossy(invalid.as_bytes()).into_owned(),
        })
    }

    /// Appends the bytes that `id` adds to a text, and moves `place` on.
    pub(crate) fn decode_into(&self, id: u32, place: &mut Place, bytes: &mut Vec<u8>) -> Result<(), TokenizerError> {
        let (token, token_type) = self.token(id)?;
        if !token_type.is_text() || self.is_end_of_generation(id) {
            return Ok(());
        }
        let start = bytes.len();
        self.append_bytes(token, token_type, bytes);
        let prefixed = matches!(&self.model, Model::SentencePiece(model) if model.space_prefix());
        if *place == Place::TextBegins
            && prefixed
            && token_type == TokenType::Normal
            && bytes[start..].starts_with(b" ")
        {
            bytes.remove(start);
        }
        *place = Place::Inside;
        Ok(())
    }

    /// The bytes a token stands for: part of a character, perhaps; the name of the token, if it is a control token.
    ///
    /// # Errors
    /// [`TokenizerError::UnknownToken`] for an id past the end of the vocabulary.
    pub fn token_bytes(&self, id: u32) -> Result<Cow<'_, [u8]>, TokenizerError> {
        let (token, token_type) = self.token(id)?;
        if !matches!(token_type, TokenType::Normal | TokenType::Byte) {
            return Ok(Cow::Borrowed(token));
        }
        let mut bytes = Vec::with_capacity(token.len());
        self.append_bytes(token, token_type, &mut bytes);
        Ok(Cow::Owned(bytes))
    }

    /// The token of exactly this name, as the file writes it: `<|im_end|>`, `Ġthe`.
    pub fn token_id(&self, name: &str) -> Option<u32> {
        self.table.id(name.as_bytes())
    }

    /// What kind of token `id` is.
    ///
    /// # Errors
    /// [`TokenizerError::UnknownToken`] for an id past the end of the vocabulary.
    pub fn token_type(&self, id: u32) -> Result<TokenType, TokenizerError> {
        Ok(self.token(id)?.1)
    }

    /// Number of tokens.
    pub fn vocab_size(&self) -> usize {
        self.table.len() as usize
    }

    /// The token that begins a text, whether or not it is added.
    pub fn bos(&self) -> Option<u32> {
        self.special.bos
    }

    /// The token that ends a text, whether or not it is added.
    pub fn eos(&self) -> Option<u32> {
        self.special.eos
    }

    /// Whether [`Tokenizer::encode`] puts BOS in front of a prompt.
    pub fn adds_bos(&self) -> bool {
        self.added_bos.is_some()
    }

    /// Whether nothing is to be generated after `id`: EOS, end of turn, end of message.
    pub fn is_end_of_generation(&self, id: u32) -> bool {
        self.end_of_generation.binary_search(&id).is_ok()
    }

    /// Every token after which nothing is to be generated, ascending.
    pub fn end_of_generation(&self) -> &[u32] {
        &self.end_of_generation
    }

    fn token(&self, id: u32) -> Result<(&[u8], TokenType), TokenizerError> {
        self.table.token(id).ok_or(TokenizerError::UnknownToken { id, vocab_size: self.vocab_size() })
    }

    fn append_bytes(&self, token: &[u8], token_type: TokenType, bytes: &mut Vec<u8>) {
        match (token_type, &self.model) {
            (TokenType::Byte, _) => match byte_token(token) {
                Some(byte) => bytes.push(byte),
                None => bytes.extend_from_slice(token),
            },
            (TokenType::Normal, Model::ByteLevelBpe(_)) => ByteLevelBpe::decode(token, bytes),
            (TokenType::Normal, Model::SentencePiece(_)) => SentencePiece::decode(token, bytes),
            // The others are written as they are.
            _ => bytes.extend_from_slice(token),
        }
    }
}

/// A text becomes at most three times longer inside (a space is three bytes there), and positions are 32 bits.
const MAX_TEXT_BYTES: usize = (u32::MAX / 4) as usize;

/// The ids the file names, and control tokens whose name says so.
fn end_of_generation(table: &TokenTable, special: &SpecialIds) -> Vec<u32> {
    let named = special_tokens::END_OF_ANSWER.iter().chain(special_tokens::END_OF_FILL);
    let is_control = |token_type| token_type == TokenType::Control;
    let by_name = named.filter_map(|name| table.id_of_type(name.as_bytes(), is_control));
    let mut ids: Vec<_> = by_name.chain(special.eos).chain(special.end_of_generation.iter().copied()).collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

#[cfg(test)]
mod tests;
