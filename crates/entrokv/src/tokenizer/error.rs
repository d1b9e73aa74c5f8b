//! What can be wrong with a tokenizer, a text or an id.

use thiserror::Error;

use super::pre_tokenizer::known_names;
use crate::gguf::MetadataError;

/// Why a tokenizer could not be built or used.
#[derive(Debug, Error)]
pub enum TokenizerError {
    /// A key of the model file is missing or of another type.
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    /// The file's tokenizer is of a kind this engine does not have.
    #[error("tokenizer model `{got}` is not supported; supported are gpt2 (byte-level BPE) and llama (SentencePiece)")]
    UnsupportedModel {
        /// The kind found.
        got: String,
    },
    /// The vocabulary is empty.
    #[error("the vocabulary has no tokens")]
    NoTokens,
    /// More tokens, or more text, than 32-bit positions reach.
    #[error("the vocabulary has {num_tokens} tokens of {bytes} bytes, more than 32-bit positions reach")]
    VocabularyTooLarge {
        /// Tokens found.
        num_tokens: usize,
        /// Bytes of their texts.
        bytes: usize,
    },
    /// A list that has one entry a token has another length.
    #[error("{got} {what} for {num_tokens} tokens")]
    LengthMismatch {
        /// The list.
        what: &'static str,
        /// Its length.
        got: usize,
        /// The length it should have.
        num_tokens: usize,
    },
    /// A score that compares with nothing.
    #[error("the score of token {id} is not a number")]
    NanScore {
        /// The token.
        id: u32,
    },
    /// The file gives a role to a token it does not have.
    #[error("the {role} token is {id}, but the vocabulary has {num_tokens} tokens")]
    RoleOutOfVocabulary {
        /// The role.
        role: &'static str,
        /// The id found.
        id: u32,
        /// One past the last id.
        num_tokens: usize,
    },
    /// The file wants a token added that it does not name.
    #[error("the file says that {role} is added to a prompt, but not which token that is")]
    MissingMarker {
        /// BOS or EOS.
        role: &'static str,
    },
    /// A merge that is not two symbols.
    #[error("merge {index} is `{got}`, not two symbols with a space between")]
    BadMerge {
        /// Its place in the list.
        index: u32,
        /// What is there.
        got: String,
    },
    /// The file does not say how text is cut.
    #[error(
        "the model file does not say how its tokenizer cuts text (no tokenizer.ggml.pre), and a guess could give ids the model \
         has never seen; name the type with --pre (known: {known})"
    )]
    MissingPre {
        /// Every known type.
        known: String,
    },
    /// The file, or the caller, names a way to cut text that is not known.
    #[error(
        "unknown pre-tokenizer type `{got}`; known are {known}; if one of them cuts text the same way, name it with --pre"
    )]
    UnknownPre {
        /// The name found.
        got: String,
        /// Every known type.
        known: String,
    },
    /// A `pre` type was given for a tokenizer that does not cut text.
    #[error("a pre-tokenizer type was given (--pre), but this model's SentencePiece tokenizer has no use for one")]
    PreWithoutUse,
    /// The special tokens could not be indexed.
    #[error("the special tokens cannot be indexed: {0}")]
    SpecialTokens(#[source] aho_corasick::BuildError),
    /// A text longer than positions reach.
    #[error("a text of {got} bytes is over the limit of {limit}")]
    TextTooLong {
        /// Its bytes.
        got: usize,
        /// The most that works.
        limit: usize,
    },
    /// A byte that no token says.
    #[error("the vocabulary has no token for the byte 0x{byte:02X} and no unknown token")]
    Unencodable {
        /// The byte.
        byte: u8,
    },
    /// An id that is no token.
    #[error("token {id} is past the end of a vocabulary of {vocab_size}")]
    UnknownToken {
        /// The id.
        id: u32,
        /// One past the last id.
        vocab_size: usize,
    },
}

impl TokenizerError {
    pub(super) fn missing_pre() -> Self {
        Self::MissingPre { known: known_names() }
    }
}
