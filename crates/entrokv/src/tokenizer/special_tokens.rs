//! Finding the tokens that are matched in the text before anything else is done with it.

use aho_corasick::{AhoCorasick, MatchKind};

use super::{
    TokenizerError,
    vocabulary::{TokenType, Vocabulary},
};

/// Names by which models end an answer. A file that types such a token as ordinary text has a slip in it, as llama.cpp
/// found; wherever the name stands it is a control token.
pub(super) const END_OF_ANSWER: &[&str] = &[
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "[e~[",
    "<eos>",
    "</s>",
];

/// Names of control tokens that end what fills a gap in a text: the padding, and the boundaries between files.
pub(super) const END_OF_FILL: &[&str] = &[
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
];

/// A stretch of text, or a special token found in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fragment<'a> {
    /// Ordinary text.
    Text(&'a str),
    /// A token by its id.
    Token(u32),
}

/// The special tokens of a vocabulary, looked for in one pass over the text; of several that match at a place the longest.
#[derive(Debug)]
pub(super) struct SpecialTokenFinder {
    /// User-defined tokens: part of the text as the user means it.
    always: Finder,
    /// These and control tokens, for text that is a prompt and not just text.
    when_parsing: Finder,
}

#[derive(Debug)]
struct Finder {
    /// `None` when there is nothing to look for.
    automaton: Option<AhoCorasick>,
    ids: Vec<u32>,
}

impl SpecialTokenFinder {
    /// Builds both automata.
    ///
    /// # Errors
    /// [`TokenizerError::SpecialTokens`] if they grow past what the automaton can hold, which takes gigabytes of text.
    pub(super) fn new(vocabulary: &Vocabulary<'_>) -> Result<Self, TokenizerError> {
        let (mut always, mut when_parsing) = (Vec::new(), Vec::new());
        for (id, &text) in (0..).zip(&vocabulary.tokens) {
            let ends_an_answer = || END_OF_ANSWER.iter().any(|name| name.as_bytes() == text);
            match vocabulary.token_type(id) {
                _ if text.is_empty() => {}
                TokenType::Control | TokenType::Unknown => when_parsing.push((id, text)),
                TokenType::UserDefined | TokenType::Normal if ends_an_answer() => when_parsing.push((id, text)),
                TokenType::UserDefined => {
                    always.push((id, text));
                    when_parsing.push((id, text));
                }
                TokenType::Normal | TokenType::Unused | TokenType::Byte => {}
            }
        }
        Ok(Self { always: Finder::new(&always)?, when_parsing: Finder::new(&when_parsing)? })
    }

    /// The fragments of text in which only user-defined tokens count.
    pub(super) fn split_plain<'a>(&self, text: &'a str) -> Vec<Fragment<'a>> {
        self.always.split(text)
    }

    /// The fragments of a prompt, in which control tokens count as well.
    pub(super) fn split_parsing<'a>(&self, text: &'a str) -> Vec<Fragment<'a>> {
        self.when_parsing.split(text)
    }
}

impl Finder {
    fn new(tokens: &[(u32, &[u8])]) -> Result<Self, TokenizerError> {
        let automaton = if tokens.is_empty() {
            None
        } else {
            let texts = tokens.iter().map(|(_, text)| text);
            Some(
                AhoCorasick::builder()
                    .match_kind(MatchKind::LeftmostLongest)
                    .build(texts)
                    .map_err(TokenizerError::SpecialTokens)?,
            )
        };
        Ok(Self { automaton, ids: tokens.iter().map(|(id, _)| *id).collect() })
    }

    fn split<'a>(&self, text: &'a str) -> Vec<Fragment<'a>> {
        let mut fragments = Vec::new();
        let mut position = 0;
        for found in self.automaton.iter().flat_map(|automaton| automaton.find_iter(text)) {
            // A token that is not UTF-8 could match inside a character; such a match is none.
            if !text.is_char_boundary(found.start()) || !text.is_char_boundary(found.end()) {
                continue;
            }
            if position < found.start() {
                fragments.push(Fragment::Text(&text[position..found.start()]));
            }
            fragments.push(Fragment::Token(self.ids[found.pattern().as_usize()]));
            position = found.end();
        }
        if position < text.len() {
            fragments.push(Fragment::Text(&text[position..]));
        }
        fragments
    }
}
