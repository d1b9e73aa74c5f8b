//! The table of `pre` types: the patterns that models were trained with.
//!
//! As their makers wrote them, taken apart into alternatives. llama.cpp works on approximations of some: it knows no case
//! beyond ASCII in `tekken` and `gpt-4o`, and no white space beyond ASCII in the `deepseek-` types; there the makers'
//! patterns stand here. The other way round, theirs match contractions in any case by case folding, so that `'ſ` is one, as
//! it is not in llama.cpp; there llama.cpp's reading stands.

/// One way to cut text, known by the names that model files give it.
#[derive(Debug)]
pub(super) struct PreType {
    /// Values of `tokenizer.ggml.pre`.
    pub(super) names: &'static [&'static str],
    /// Applied in turn, each to the pieces the previous one left.
    pub(super) passes: &'static [Pass],
    /// A piece that is a token is taken whole, whether or not merges lead to it.
    pub(super) whole_pieces: bool,
    /// BOS is put in front when the file does not say.
    pub(super) adds_bos: bool,
}

/// One pattern. What it matches becomes a piece; so does each stretch between two matches.
#[derive(Debug)]
pub(super) struct Pass {
    /// Alternatives, the first that matches counts.
    pub(super) words: &'static [&'static str],
    /// Then, as the last alternative: `\s+(?!\S)|\s+`.
    pub(super) whitespace: Whitespace,
}

/// What becomes of white space that no alternative claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Whitespace {
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
// Spelled out: by case folding `'s` would match the long s (U+017F) as well.
const CONTRACTION_ANY_CASE: &str = "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]";
const LETTERS: &str = r"[^\r\n\p{L}\p{N}]?\p{L}+";
const SYMBOLS: &str = r" ?[^\s\p{L}\p{N}]+[\r\n]*";
const SYMBOLS_AND_SLASHES: &str = r" ?[^\s\p{L}\p{N}]+[\r\n/]*";
const LINE_ENDS: &str = r"\s*[\r\n]+";
const LINE_END: &str = r"\s*[\r\n]";
const DIGIT: &str = r"\p{N}";
const UP_TO_3_DIGITS: &str = r"\p{N}{1,3}";
// A small letter before a capital ends a word: `CamelCase` is two, `HTTPServer` one.
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
pub(super) const PRE_TYPES: &[PreType] = &[
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

/// Every name in the table, for the message that lists them.
pub(in crate::tokenizer) fn known_names() -> String {
    let mut names: Vec<_> = PRE_TYPES.iter().flat_map(|pre_type| pre_type.names).copied().collect();
    names.sort_unstable();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_name_is_in_the_table_twice() {
        let mut names: Vec<_> = PRE_TYPES.iter().flat_map(|pre_type| pre_type.names).collect();
        let num_names = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), num_names);
    }
}
