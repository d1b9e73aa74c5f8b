//! Cutting text into pieces before byte-pair encoding: the `pre` types and their patterns.
//!
//! A model learnt its merges inside pieces, so a wrong cut gives ids the model has never seen, and nothing but the quality
//! of its answers tells. A name this table does not know is therefore an error, never a guess.
//!
//! The patterns are those the models were trained with. Nearly all end in `\s+(?!\S)|\s+`: a run of white space leaves its
//! last character to the word behind it. That lookahead is the only thing in them that an automaton cannot do, and it is
//! done here by hand ([`Pass::whitespace`]), so that cutting takes time linear in the text whatever the text: a
//! backtracking engine can be driven into its limits by a prompt.

use regex_automata::{Input, meta::Regex};

use super::TokenizerError;

/// One way to cut text, known by the names that model files give it.
#[derive(Debug)]
struct PreType {
    /// Values of `tokenizer.ggml.pre`.
    names: &'static [&'static str],
    /// Applied in turn, each to the pieces the previous one left.
    passes: &'static [Pass],
    /// A piece that is a token is taken whole, whether or not merges lead to it.
    whole_pieces: bool,
    /// BOS is put in front when the file does not say.
    adds_bos: bool,
}

/// One pattern. What it matches becomes a piece; so does each stretch between two matches.
#[derive(Debug)]
struct Pass {
    /// Alternatives, the first that matches counts.
    words: &'static [&'static str],
    /// Then, as the last alternative: `\s+(?!\S)|\s+`.
    whitespace: Whitespace,
}

/// What becomes of white space that no alternative claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whitespace {
    /// A run is a piece, but for its last character where a word follows.
    LeaveLast,
    /// It is text like any other.
    Plain,
}

const fn words(words: &'static [&'static str]) -> Pass {
    Pass { words, whitespace: Whitespace::LeaveLast }
}

const fn isolate(words: &'static [&'static str]) -> Pass {
    Pass { words, whitespace: Whitespace::Plain }
}

const fn cut(names: &'static [&'static str], passes: &'static [Pass]) -> PreType {
    PreType { names, passes, whole_pieces: false, adds_bos: false }
}

impl PreType {
    const fn whole_pieces(self) -> Self {
        Self { whole_pieces: true, ..self }
    }

    const fn adds_bos(self) -> Self {
        Self { adds_bos: true, ..self }
    }
}

const CONTRACTION: &str = "'s|'t|'re|'ve|'m|'ll|'d";
// Spelled out, because a case-insensitive `s` also matches the long s (U+017F), which the reference splitters do not.
const CONTRACTION_ANY_CASE: &str = "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]";
const LETTERS: &str = r"[^\r\n\p{L}\p{N}]?\p{L}+";
const SYMBOLS: &str = r" ?[^\s\p{L}\p{N}]+[\r\n]*";
const SYMBOLS_AND_SLASHES: &str = r" ?[^\s\p{L}\p{N}]+[\r\n/]*";
const LINE_ENDS: &str = r"\s*[\r\n]+";
const LINE_END: &str = r"\s*[\r\n]";
const DIGIT: &str = r"\p{N}";
const UP_TO_3_DIGITS: &str = r"\p{N}{1,3}";
// Words that keep their capitals together: `HTTPServer` is `HTTPS`, `erver`; `CamelCase` is `Camel`, `Case`.
const CAPITALISED: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+";
const CAPITALS: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*";
const CAPITALISED_CONTRACTED: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?"
);
const CAPITALS_CONTRACTED: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?"
);
const HAN_AND_KANA: &str = "[一-龥぀-ゟ゠-ヿ]+";
// From U+0800 to the end of Hangul, but for a gap between the ideographs and Hangul.
const ASIAN_SCRIPTS: &str = "[\u{800}-\u{9FA5}\u{AC00}-\u{D7FF}]+";
const ASCII_SYMBOL_WORD: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"##;
const MARKED_LETTERS: &str = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+";

const GPT_2: Pass = words(&[CONTRACTION, r" ?\p{L}+", r" ?\p{N}+", r" ?[^\s\p{L}\p{N}]+"]);
const LLAMA_3: Pass = words(&[CONTRACTION_ANY_CASE, LETTERS, UP_TO_3_DIGITS, SYMBOLS, LINE_ENDS]);
const QWEN_2: Pass = words(&[CONTRACTION_ANY_CASE, LETTERS, DIGIT, SYMBOLS, LINE_ENDS]);
const DEEPSEEK_V3: Pass = words(&[ASCII_SYMBOL_WORD, MARKED_LETTERS, r" ?[\p{P}\p{S}]+[\r\n]*", LINE_ENDS]);
const NOT_SENTENCE_MARKS: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";
// Cased letters as DeepSeek-LLM lists them: those of one Unicode version, without Georgian.
const CASED_LETTERS: &str = concat!(
    "\\s?[A-Za-z\u{B5}\u{C0}-\u{D6}\u{D8}-\u{F6}\u{F8}-\u{1BA}\u{1BC}-\u{1BF}\u{1C4}-\u{293}\u{295}-\u{2AF}",
    "\u{370}-\u{373}\u{376}\u{377}\u{37B}-\u{37D}\u{37F}\u{386}\u{388}-\u{38A}\u{38C}\u{38E}-\u{3A1}",
    "\u{3A3}-\u{3F5}\u{3F7}-\u{481}\u{48A}-\u{52F}\u{531}-\u{556}\u{10A0}-\u{10C5}\u{13A0}-\u{13F5}",
    "\u{13F8}-\u{13FD}\u{1C90}-\u{1CBA}\u{1CBD}-\u{1CBF}\u{1D00}-\u{1D2B}\u{1D6B}-\u{1D77}",
    "\u{1D79}-\u{1D9A}\u{1E00}-\u{1F15}\u{1F18}-\u{1F1D}\u{1F20}-\u{1F45}\u{1F48}-\u{1F4D}",
    "\u{1F50}-\u{1F57}\u{1F59}\u{1F5B}\u{1F5D}\u{1F5F}-\u{1F7D}\u{1F80}-\u{1FB4}\u{1FB6}-\u{1FBC}\u{1FBE}",
    "\u{1FC2}-\u{1FC4}\u{1FC6}-\u{1FCC}\u{1FD0}-\u{1FD3}\u{1FD6}-\u{1FDB}\u{1FE0}-\u{1FEC}",
    "\u{1FF2}-\u{1FF4}\u{1FF6}-\u{1FFC}\u{2102}\u{2107}\u{210A}-\u{2113}\u{2115}\u{2119}-\u{211D}\u{2124}",
    "\u{2126}\u{2128}\u{212A}-\u{212D}\u{212F}-\u{2134}\u{2139}\u{213C}-\u{213F}\u{2145}-\u{2149}\u{214E}",
    "\u{2183}\u{2184}\u{2C00}-\u{2C7B}\u{2C7E}-\u{2CE4}\u{2CEB}-\u{2CEE}\u{2CF2}\u{2CF3}\u{A640}-\u{A66D}",
    "\u{A680}-\u{A69B}\u{A722}-\u{A76F}\u{A771}-\u{A787}\u{A78B}-\u{A78E}\u{AB70}-\u{ABBF}",
    "\u{FB00}-\u{FB06}\u{FB13}-\u{FB17}\u{FF21}-\u{FF3A}\u{FF41}-\u{FF5A}\u{10400}-\u{1044F}",
    "\u{104B0}-\u{104D3}\u{104D8}-\u{104FB}\u{10C80}-\u{10CB2}\u{10CC0}-\u{10CF2}\u{118A0}-\u{118DF}",
    "\u{1E900}-\u{1E943}]+"
);

/// Every `pre` type this tokenizer knows.
const PRE_TYPES: &[PreType] = &[
    cut(
        &[
            "gpt-2",
            "phi-2",
            "mpt",
            "olmo",
            "jais",
            "jina-es",
            "jina-de",
            "jina-v1-en",
            "jina-v2-es",
            "jina-v2-de",
            "jina-v2-code",
            "roberta-bpe",
            "modern-bert",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "exaone4",
            "trillion",
            "granite-docling",
        ],
        &[GPT_2],
    ),
    cut(
        &["default"],
        &[isolate(&[r"[\p{P}\$\+<=>\^~\|]+"]), GPT_2, isolate(&[r"\p{N}+"]), isolate(&["[0-9][0-9][0-9]"])],
    ),
    cut(
        &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"],
        &[isolate(&[DIGIT]), GPT_2],
    ),
    cut(&["falcon"], &[isolate(&[r"[\p{P}\$\+<=>\^~\|`]+"]), GPT_2, isolate(&["[0-9][0-9][0-9]"])]),
    cut(
        &["qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"],
        &[QWEN_2],
    ),
    cut(
        &["qwen35"],
        &[words(&[
            CONTRACTION_ANY_CASE,
            r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
            DIGIT,
            r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
            LINE_ENDS,
        ])],
    ),
    cut(&["ufakzeka"], &[words(&[LETTERS, DIGIT, SYMBOLS, LINE_ENDS])]),
    cut(&["laguna"], &[isolate(&[r"[^\n]+|[\n]+"]), QWEN_2]),
    cut(
        &["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"],
        &[LLAMA_3],
    )
    .whole_pieces()
    .adds_bos(),
    cut(&["dbrx", "smaug-bpe", "chatglm-bpe"], &[LLAMA_3]),
    cut(&["glm4", "glm5"], &[LLAMA_3]).whole_pieces(),
    cut(
        &["minicpm5"],
        &[isolate(&[UP_TO_3_DIGITS]), words(&[CONTRACTION_ANY_CASE, LETTERS, r"\p{N}+", SYMBOLS, LINE_ENDS])],
    )
    .whole_pieces(),
    cut(&["tekken"], &[words(&[CAPITALISED, CAPITALS, DIGIT, SYMBOLS_AND_SLASHES, LINE_ENDS])])
        .whole_pieces()
        .adds_bos(),
    cut(
        &["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"],
        &[words(&[CAPITALISED_CONTRACTED, CAPITALS_CONTRACTED, UP_TO_3_DIGITS, SYMBOLS_AND_SLASHES, LINE_ENDS])],
    ),
    cut(
        &["deepseek-llm"],
        &[
            isolate(&[r"[\r\n]"]),
            isolate(&[CASED_LETTERS]),
            isolate(&[r"\s?[!-/:-~！-／：-～‘-‟　-。]+"]),
            isolate(&[r"\s+$"]),
            isolate(&[ASIAN_SCRIPTS]),
            isolate(&[r"\p{N}+"]),
        ],
    ),
    cut(
        &["deepseek-coder"],
        &[
            isolate(&[r"[\r\n]"]),
            isolate(&[r"\s?\p{L}+"]),
            isolate(&[r"\s?\p{P}+"]),
            isolate(&[ASIAN_SCRIPTS]),
            isolate(&[DIGIT]),
        ],
    ),
    cut(
        &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
        &[isolate(&[UP_TO_3_DIGITS]), isolate(&[HAN_AND_KANA]), DEEPSEEK_V3],
    ),
    cut(
        &["spark2_5"],
        &[
            isolate(&[UP_TO_3_DIGITS]),
            isolate(&[HAN_AND_KANA]),
            words(&[ASCII_SYMBOL_WORD, MARKED_LETTERS, r" ?[\p{P}\p{S}]+", r"[\r\n]"]),
            isolate(&[DIGIT]),
        ],
    ),
    cut(&["bloom", "poro-chat", "gpt3-finnish"], &[isolate(&[NOT_SENTENCE_MARKS])]),
    cut(&["viking"], &[isolate(&[NOT_SENTENCE_MARKS]), isolate(&[DIGIT])]),
    cut(
        &["bailingmoe", "bailingmoe2", "llada-moe"],
        &[words(&["'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])", LETTERS, DIGIT, SYMBOLS, LINE_END])],
    ),
    cut(&["seed-coder"], &[words(&[CONTRACTION_ANY_CASE, LETTERS, DIGIT, r" ?[^\s\p{L}\p{N}\r\n]+", LINE_ENDS])]),
    cut(
        &["exaone-moe"],
        &[words(&[
            CONTRACTION_ANY_CASE,
            r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
            DIGIT,
            r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
            LINE_END,
        ])],
    ),
];

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

/// Every name in the table, for the message that lists them.
pub(super) fn known_names() -> String {
    let mut names: Vec<_> = PRE_TYPES.iter().flat_map(|pre_type| pre_type.names).copied().collect();
    names.sort_unstable();
    names.join(", ")
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

    #[test]
    fn no_name_is_in_the_table_twice() {
        let mut names: Vec<_> = PRE_TYPES.iter().flat_map(|pre_type| pre_type.names).collect();
        let num_names = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), num_names);
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
