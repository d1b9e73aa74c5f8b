//! Cutting text into pieces before byte-pair encoding: the `pre` types and their patterns.
//!
//! A model learnt its merges inside pieces, so a wrong cut gives ids the model has never seen, and nothing but the quality
//! of its answers tells. A name this table does not know is therefore an error, never a guess.
//!
//! The patterns are those the models were trained with. Nearly all end in `\s+(?!\S)|\s+`: a run of white space leaves its
//! last character to the word behind it. That lookahead is the only thing in them that an automaton cannot do, and it is
//! done here by hand ([`Pass::whitespace`]), so that cutting takes time linear in the text whatever the text: a
//! backtracking engine can be driven into its limits by a prompt.

mod pre_type;

use regex_automata::{Input, meta::Regex};

use super::TokenizerError;
pub(super) use pre_type::known_names;
use pre_type::{PRE_TYPES, Pass, PreType, Whitespace};

/// A `pre` type ready to cut.
#[derive(Debug)]
pub(super) struct PreTokenizer {
    pre_type: &'static PreType,
    passes: Vec<CompiledPass>,
}

#[derive(Debug)]
struct CompiledPass {
    /// Pattern 0: the alternatives; pattern 1, where white space is special: `\s+`.
    regex: Regex,
}

impl PreTokenizer {
    /// The `pre` type called `name`.
    ///
    /// # Errors
    /// [`TokenizerError::UnknownPre`] for a name that is not in the table.
    pub(super) fn named(name: &str) -> Result<Self, TokenizerError> {
        let pre_type = PRE_TYPES
            .iter()
            .find(|pre_type| pre_type.names.contains(&name))
            .ok_or_else(|| TokenizerError::UnknownPre { got: name.to_owned(), known: known_names() })?;
        Ok(Self::new(pre_type))
    }

    /// One of every kind.
    #[cfg(test)]
    pub(super) fn all() -> Vec<Self> {
        PRE_TYPES.iter().map(Self::new).collect()
    }

    fn new(pre_type: &'static PreType) -> Self {
        Self { pre_type, passes: pre_type.passes.iter().map(CompiledPass::new).collect() }
    }

    /// Whether a piece that is a token is taken whole, whether or not merges lead to it.
    pub(super) fn takes_whole_pieces(&self) -> bool {
        self.pre_type.whole_pieces
    }

    /// Whether BOS is put in front when the file does not say.
    pub(super) fn adds_bos(&self) -> bool {
        self.pre_type.adds_bos
    }

    /// Cuts `text` into pieces; together they are the text.
    pub(super) fn split<'a>(&self, text: &'a str) -> Vec<&'a str> {
        if text.is_empty() {
            return Vec::new();
        }
        let mut pieces = vec![text];
        let mut finer = Vec::new();
        for pass in &self.passes {
            for piece in pieces.drain(..) {
                pass.split(piece, &mut finer);
            }
            std::mem::swap(&mut pieces, &mut finer);
        }
        pieces
    }
}

impl CompiledPass {
    fn new(pass: &Pass) -> Self {
        let words = pass.words.join("|");
        let patterns = match pass.whitespace {
            Whitespace::LeaveLast => vec![words.as_str(), r"\s+"],
            Whitespace::Plain => vec![words.as_str()],
        };
        Self { regex: Regex::new_many(&patterns).expect("the patterns of the table are tested one by one") }
    }

    fn split<'a>(&self, text: &'a str, pieces: &mut Vec<&'a str>) {
        let (mut piece_start, mut position) = (0, 0);
        while position < text.len() {
            let Some(found) = self.regex.search(&Input::new(text).range(position..)) else { break };
            let is_whitespace = found.pattern().as_usize() == 1;
            let end = if is_whitespace { whitespace_end(text, found.start(), found.end()) } else { found.end() };
            if piece_start < found.start() {
                pieces.push(&text[piece_start..found.start()]);
            }
            pieces.push(&text[found.start()..end]);
            (piece_start, position) = (end, end);
        }
        if piece_start < text.len() {
            pieces.push(&text[piece_start..]);
        }
    }
}

/// Where the piece ends that a run of white space gives: `\s+(?!\S)|\s+`.
///
/// At the end of the text the run is one piece; before a word it leaves its last character, unless that is all there is.
fn whitespace_end(text: &str, start: usize, end: usize) -> usize {
    if end == text.len() {
        return end;
    }
    match text[start..end].char_indices().next_back() {
        Some((last, _)) if last > 0 => start + last,
        _ => end,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_common_types_cut_as_their_models_were_trained() {
        struct Case {
            pre: &'static str,
            text: &'static str,
            pieces: &'static [&'static str],
        }
        let cases = [
            Case {
                pre: "gpt-2",
                text: "I'll  say 1234 things!\n",
                pieces: &["I", "'ll", " ", " say", " 1234", " things", "!", "\n"],
            },
            Case { pre: "gpt-2", text: "CAN'T", pieces: &["CAN", "'", "T"] },
            Case { pre: "gpt-2", text: "a \n\n b  ", pieces: &["a", " \n\n", " b", "  "] },
            Case { pre: "smollm", text: "a 123", pieces: &["a", " ", "1", "2", "3"] },
            Case { pre: "smollm", text: "a  1", pieces: &["a", "  ", "1"] },
            Case { pre: "qwen2", text: "CAN'T (x)\n\n 12", pieces: &["CAN", "'T", " (", "x", ")\n\n", " ", "1", "2"] },
            Case { pre: "qwen2", text: "\t\tfoo", pieces: &["\t", "\tfoo"] },
            Case { pre: "qwen2", text: "  \n  \n x", pieces: &["  \n  \n", " x"] },
            Case { pre: "llama-bpe", text: "12345 a", pieces: &["123", "45", " a"] },
            Case { pre: "default", text: "a+b 12345", pieces: &["a", "+", "b", " ", "123", "45"] },
            Case { pre: "falcon", text: "x`y` 1234", pieces: &["x", "`", "y", "`", " ", "123", "4"] },
            Case { pre: "tekken", text: "CamelCase HTTPServer", pieces: &["Camel", "Case", " HTTPServer"] },
            Case { pre: "gpt-4o", text: "It's 1234", pieces: &["It's", " ", "123", "4"] },
            Case { pre: "deepseek-v3", text: "中文x 1", pieces: &["中文", "x", " ", "1"] },
            Case { pre: "bloom", text: "one, two", pieces: &["one", ",", " two"] },
            // The long s is no contraction, though it folds to an s.
            Case { pre: "llama-bpe", text: "a'ſb", pieces: &["a", "'ſb"] },
            // White space beyond ASCII is white space.
            Case { pre: "qwen2", text: "a\u{3000}\u{A0}1", pieces: &["a", "\u{3000}", "\u{A0}", "1"] },
        ];
        for Case { pre, text, pieces } in cases {
            assert_eq!(PreTokenizer::named(pre).expect("a known name").split(text), pieces, "{pre} on {text:?}");
        }
    }

    /// What `tools/golden/pre_types.py` wrote.
    #[derive(serde::Deserialize)]
    struct Golden {
        texts: Vec<String>,
        /// By `pre` type, by text: the lengths of the pieces, in bytes.
        pieces: std::collections::BTreeMap<String, Vec<Vec<usize>>>,
    }

    #[test]
    fn the_tokenizers_package_cuts_in_the_same_places() {
        let golden = include_str!("../../tests/fixtures/tokenizer/pre-types.json");
        let golden: Golden = serde_json::from_str(golden).expect("a committed file");
        assert_eq!((golden.texts.len(), golden.pieces.len()), (70, 9));
        for (pre, pieces) in &golden.pieces {
            let pre_tokenizer = PreTokenizer::named(pre).expect("a known name");
            for (text, lengths) in golden.texts.iter().zip(pieces) {
                let cut: Vec<_> = pre_tokenizer.split(text).iter().map(|piece| piece.len()).collect();
                assert_eq!(cut, *lengths, "{pre} on {text:?}");
            }
        }
    }

    #[test]
    fn a_long_run_of_white_space_takes_linear_time() {
        // A million spaces overflow the stack of a backtracking engine.
        let text = format!("{}x", " ".repeat(1 << 20));
        for pre in ["gpt-2", "qwen2", "llama-bpe", "tekken"] {
            let pieces = PreTokenizer::named(pre).expect("a known name").split(&text);
            assert_eq!(pieces.iter().map(|piece| piece.len()).collect::<Vec<_>>(), [(1 << 20) - 1, 2], "{pre}");
        }
    }
}
