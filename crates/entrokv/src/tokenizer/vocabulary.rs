//! What a model file says about its tokenizer, before anything is built from it.

use super::TokenizerError;
use crate::gguf::{Metadata, OptionalMetadata};

/// What kind of token an id is, as model files number them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenType {
    /// A piece of ordinary text.
    Normal,
    /// Stands for what the vocabulary cannot say.
    Unknown,
    /// Steers the model and is no text: BOS, end of turn.
    Control,
    /// Text that the model's maker wants matched whole, before anything else.
    UserDefined,
    /// An id without a meaning, there to pad the vocabulary.
    Unused,
    /// One byte, written `<0x0A>`.
    Byte,
}

impl TokenType {
    /// The type with this number in `tokenizer.ggml.token_type`; numbers without a meaning are ordinary tokens.
    pub fn from_ggml(number: i32) -> Self {
        match number {
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => Self::Normal,
        }
    }

    /// Whether the token is text, or part of a character, for the reader of an answer.
    pub(super) fn is_text(self) -> bool {
        matches!(self, Self::Normal | Self::UserDefined | Self::Byte)
    }

    /// Whether merging may lead to the token. Control tokens are reached by name only, or text could forge them.
    pub(super) fn is_mergeable(self) -> bool {
        matches!(self, Self::Normal | Self::UserDefined | Self::Unused)
    }
}

/// How text becomes tokens.
#[derive(Clone, Debug, PartialEq)]
pub enum Algorithm<'a> {
    /// Byte-pair encoding over bytes (`gpt2`).
    ByteLevelBpe {
        /// Pairs of symbols in the order they merge, each two symbols with a space between, in the byte alphabet.
        merges: Vec<&'a [u8]>,
        /// How text is cut before: one of the `pre` types.
        pre: Option<&'a str>,
    },
    /// SentencePiece: byte-pair encoding over characters, by score (`llama`).
    SentencePiece {
        /// One a token; of two pairs the one with the higher score merges first.
        scores: Vec<f32>,
        /// Whether text gets a space in front, so that its first word looks like every other.
        space_prefix: bool,
    },
}

/// The ids with a role, where the file names them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialIds {
    /// Begins a text.
    pub bos: Option<u32>,
    /// Ends a text.
    pub eos: Option<u32>,
    /// Stands for what cannot be said.
    pub unknown: Option<u32>,
    /// Others after which nothing is generated: end of turn, end of message, the separators of fill-in-the-middle.
    pub end_of_generation: Vec<u32>,
}

/// A vocabulary as a model file holds it; texts stay where they are.
#[derive(Clone, Debug, PartialEq)]
pub struct Vocabulary<'a> {
    /// Token texts by id. Empty ones are holes.
    pub tokens: Vec<&'a [u8]>,
    /// One a token; empty if the file does not say, and then all are ordinary.
    pub token_types: Vec<TokenType>,
    /// How text becomes tokens.
    pub algorithm: Algorithm<'a>,
    /// The ids with a role.
    pub special: SpecialIds,
    /// Whether BOS is put in front; `None` leaves it to the algorithm and the `pre` type.
    pub add_bos: Option<bool>,
    /// Whether EOS is put behind; `None` means no.
    pub add_eos: Option<bool>,
}

impl<'a> Vocabulary<'a> {
    /// Reads what a model file says about its tokenizer; texts stay in the file.
    ///
    /// # Errors
    /// A key is missing or of another type; the tokenizer is of a kind this engine does not have.
    pub fn from_metadata(metadata: &'a Metadata) -> Result<Self, TokenizerError> {
        let algorithm = match metadata.str("tokenizer.ggml.model")? {
            "gpt2" => Algorithm::ByteLevelBpe {
                merges: metadata.byte_strings("tokenizer.ggml.merges")?,
                pre: metadata.str("tokenizer.ggml.pre").optional()?,
            },
            "llama" => Algorithm::SentencePiece {
                scores: metadata.f32s("tokenizer.ggml.scores")?,
                space_prefix: metadata.bool("tokenizer.ggml.add_space_prefix").optional()?.unwrap_or(true),
            },
            other => return Err(TokenizerError::UnsupportedModel { got: other.to_owned() }),
        };
        let token_types = metadata.i32s("tokenizer.ggml.token_type").optional()?.unwrap_or_default();
        let id = |role: &str| metadata.u32(&format!("tokenizer.ggml.{role}_token_id")).optional();
        let mut end_of_generation = Vec::new();
        for role in ["eot", "eom", "fim_pad", "fim_rep", "fim_sep"] {
            end_of_generation.extend(id(role)?);
        }
        Ok(Self {
            tokens: metadata.byte_strings("tokenizer.ggml.tokens")?,
            token_types: token_types.into_iter().map(TokenType::from_ggml).collect(),
            algorithm,
            special: SpecialIds { bos: id("bos")?, eos: id("eos")?, unknown: id("unknown")?, end_of_generation },
            add_bos: metadata.bool("tokenizer.ggml.add_bos_token").optional()?,
            add_eos: metadata.bool("tokenizer.ggml.add_eos_token").optional()?,
        })
    }

    /// The type of token `id`, which must be in the vocabulary.
    pub(super) fn token_type(&self, id: u32) -> TokenType {
        self.token_types.get(id as usize).copied().unwrap_or(TokenType::Normal)
    }

    /// Checks that the parts fit together.
    pub(super) fn check(&self) -> Result<(), TokenizerError> {
        let num_tokens = self.tokens.len();
        let total: usize = self.tokens.iter().map(|token| token.len()).sum();
        if num_tokens == 0 {
            return Err(TokenizerError::NoTokens);
        }
        if u32::try_from(num_tokens).is_err() || u32::try_from(total).is_err() {
            return Err(TokenizerError::VocabularyTooLarge { num_tokens, bytes: total });
        }
        let per_token = |what, got: usize| match got == num_tokens {
            true => Ok(()),
            false => Err(TokenizerError::LengthMismatch { what, got, num_tokens }),
        };
        if !self.token_types.is_empty() {
            per_token("token types", self.token_types.len())?;
        }
        if let Algorithm::SentencePiece { scores, .. } = &self.algorithm {
            per_token("scores", scores.len())?;
            if let Some(id) = scores.iter().position(|score| score.is_nan()) {
                return Err(TokenizerError::NanScore { id: id as u32 });
            }
        }
        let SpecialIds { bos, eos, unknown, end_of_generation } = &self.special;
        let roles = [("BOS", bos), ("EOS", eos), ("unknown", unknown)];
        let named = roles.into_iter().filter_map(|(role, id)| id.map(|id| (role, id)));
        for (role, id) in named.chain(end_of_generation.iter().map(|&id| ("end-of-generation", id))) {
            if id as usize >= num_tokens {
                return Err(TokenizerError::RoleOutOfVocabulary { role, id, num_tokens });
            }
        }
        Ok(())
    }
}

/// The byte that a token written `<0x0A>` stands for.
pub(super) fn byte_token(token: &[u8]) -> Option<u8> {
    match token.strip_prefix(b"<0x")?.strip_suffix(b">")? {
        digits @ [_, _] if digits.iter().all(u8::is_ascii_hexdigit) => {
            u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
        }
        _ => None,
    }
}
