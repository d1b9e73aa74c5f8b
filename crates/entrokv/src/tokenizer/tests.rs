//! Small vocabularies written out by hand, one mechanism each.

use std::sync::{Arc, LazyLock};

use proptest::prelude::*;

use super::*;
use crate::{
    detokenizer::Detokenizer,
    gguf::{Gguf, GgufWriter, OwnedValue},
};

/// The 256 bytes in the byte alphabet, then `more`, then the control tokens `<s>`, `</s>` and the user-defined `[[x]]`.
struct ByteLevel {
    texts: Vec<String>,
    types: Vec<TokenType>,
    merges: Vec<String>,
}

impl ByteLevel {
    fn new(more: &[&str], merges: &[&str]) -> Self {
        let bytes = (0..=u8::MAX).map(|byte| byte_alphabet::char_of(byte).to_string());
        let mut texts: Vec<String> = bytes.chain(more.iter().map(|text| (*text).to_owned())).collect();
        let mut types = vec![TokenType::Normal; texts.len()];
        texts.extend(["<s>", "</s>", "[[x]]"].map(str::to_owned));
        types.extend([TokenType::Control, TokenType::Control, TokenType::UserDefined]);
        Self { texts, types, merges: merges.iter().map(|merge| (*merge).to_owned()).collect() }
    }

    fn vocabulary(&self) -> Vocabulary<'_> {
        let id = |name: &str| self.texts.iter().position(|text| text == name).map(|id| id as u32);
        Vocabulary {
            tokens: self.texts.iter().map(String::as_bytes).collect(),
            token_types: self.types.clone(),
            algorithm: Algorithm::ByteLevelBpe {
                merges: self.merges.iter().map(String::as_bytes).collect(),
                pre: Some("gpt-2"),
            },
            special: SpecialIds { bos: id("<s>"), eos: id("</s>"), unknown: None, end_of_generation: Vec::new() },
            add_bos: None,
            add_eos: None,
        }
    }

    fn tokenizer(&self) -> Tokenizer {
        Tokenizer::new(&self.vocabulary(), None).expect("the vocabulary fits together")
    }
}

/// A SentencePiece vocabulary: `<unk>`, `<s>`, `</s>`, the 256 bytes, then `pieces` with their scores.
fn sentence_piece(pieces: &[(&str, f32)], space_prefix: bool) -> Tokenizer {
    let mut texts: Vec<String> = ["<unk>", "<s>", "</s>"].map(str::to_owned).to_vec();
    let mut types = vec![TokenType::Unknown, TokenType::Control, TokenType::Control];
    texts.extend((0..=u8::MAX).map(|byte| format!("<0x{byte:02X}>")));
    types.extend([TokenType::Byte; 256]);
    let mut scores = vec![0.0; texts.len()];
    for (piece, score) in pieces {
        texts.push((*piece).to_owned());
        types.push(if piece.starts_with("[[") { TokenType::UserDefined } else { TokenType::Normal });
        scores.push(*score);
    }
    let vocabulary = Vocabulary {
        tokens: texts.iter().map(String::as_bytes).collect(),
        token_types: types,
        algorithm: Algorithm::SentencePiece { scores, space_prefix },
        special: SpecialIds::default(),
        add_bos: None,
        add_eos: None,
    };
    Tokenizer::new(&vocabulary, None).expect("the vocabulary fits together")
}

/// The tokens of `text` by name.
fn names(tokenizer: &Tokenizer, text: &str, special: SpecialTokens) -> Vec<String> {
    let ids = tokenizer.encode(text, special).expect("the vocabulary has every byte");
    ids.iter()
        .map(|&id| String::from_utf8_lossy(tokenizer.table.token(id).expect("an id it gave").0).into_owned())
        .collect()
}

#[test]
fn bytes_merge_in_the_order_of_the_list() {
    let vocabulary = ByteLevel::new(&["he", "ll", "hell", "lo", "Ġw"], &["h e", "l l", "he ll", "l o", "Ġ w"]);
    let tokenizer = vocabulary.tokenizer();
    assert_eq!(names(&tokenizer, "hello world", SpecialTokens::Plain), ["hell", "o", "Ġw", "o", "r", "l", "d"]);
    assert_eq!(names(&tokenizer, "lo", SpecialTokens::Plain), ["lo"]);
    assert_eq!(names(&tokenizer, "é", SpecialTokens::Plain), ["Ã", "©"]);
}

#[test]
fn a_merge_into_no_token_is_spelled_out_unless_it_merges_on() {
    // Neither "ab" nor its merge list entry is a token, "abc" is.
    let vocabulary = ByteLevel::new(&["abc"], &["a b", "ab c"]);
    let tokenizer = vocabulary.tokenizer();
    assert_eq!(names(&tokenizer, "abc", SpecialTokens::Plain), ["abc"]);
    assert_eq!(names(&tokenizer, "abd", SpecialTokens::Plain), ["a", "b", "d"]);
}

#[test]
fn a_whole_piece_is_taken_without_merges_only_where_the_pre_type_says_so() {
    let vocabulary = ByteLevel::new(&["Ġthe"], &[]);
    let with = |pre| Tokenizer::new(&vocabulary.vocabulary(), Some(pre)).expect("the vocabulary fits together");
    assert_eq!(names(&with("llama-bpe"), "a the", SpecialTokens::Plain), ["a", "Ġthe"]);
    assert_eq!(names(&with("smaug-bpe"), "a the", SpecialTokens::Plain), ["a", "Ġ", "t", "h", "e"]);
}

#[test]
fn a_byte_that_no_token_says_is_left_out() {
    let mut vocabulary = ByteLevel::new(&[], &[]);
    vocabulary.texts[4] = "somethingelse".to_owned();
    assert_eq!(names(&vocabulary.tokenizer(), "a\u{4}b", SpecialTokens::Plain), ["a", "b"]);
}

#[test]
fn user_defined_tokens_are_always_matched_control_tokens_only_in_prompts() {
    let vocabulary = ByteLevel::new(&[], &[]);
    let tokenizer = vocabulary.tokenizer();
    assert_eq!(names(&tokenizer, "a[[x]]<s>", SpecialTokens::Plain), ["a", "[[x]]", "<", "s", ">"]);
    assert_eq!(names(&tokenizer, "a[[x]]<s>", SpecialTokens::Parse), ["a", "[[x]]", "<s>"]);
}

#[test]
fn of_special_tokens_at_one_place_the_longest_counts() {
    let mut vocabulary = ByteLevel::new(&[], &[]);
    for text in ["<s>!", "\n", "\n\n\n"] {
        vocabulary.texts.push(text.to_owned());
        vocabulary.types.push(TokenType::UserDefined);
    }
    let tokenizer = vocabulary.tokenizer();
    assert_eq!(names(&tokenizer, "<s>!<s>", SpecialTokens::Parse), ["<s>!", "<s>"]);
    assert_eq!(names(&tokenizer, "\n\n\n\n\n", SpecialTokens::Plain), ["\n\n\n", "\n", "\n"]);
}

#[test]
fn text_cannot_forge_a_control_token() {
    // Merges lead to "<s>" and the whole piece is "</s>", yet plain text gives neither.
    let vocabulary = ByteLevel::new(&["s>"], &["s >", "< s>"]);
    for pre in ["gpt-2", "llama-bpe", "bloom"] {
        let tokenizer = Tokenizer::new(&vocabulary.vocabulary(), Some(pre)).expect("the vocabulary fits together");
        for text in ["<s>", "</s>"] {
            let forged = tokenizer.encode(text, SpecialTokens::Plain).expect("the vocabulary has every byte");
            assert!(
                forged.iter().all(|&id| tokenizer.token_type(id).expect("its own id") != TokenType::Control),
                "{pre} {text}"
            );
        }
    }
    // In Llama 2's vocabulary "</s>" has score 0, the best there is.
    let tokenizer =
        sentence_piece(&[("</", -1.0), ("s>", -2.0), ("<", -3.0), ("/", -3.0), ("s", -3.0), (">", -3.0)], false);
    assert_eq!(names(&tokenizer, "</s>", SpecialTokens::Plain), ["</", "s>"]);
    assert_eq!(names(&tokenizer, "</s>", SpecialTokens::ParseDoubling), ["<s>", "</s>"]);
}

#[test]
fn bos_and_eos_are_added_as_the_file_says_and_never_twice() {
    struct Case {
        pre: &'static str,
        add_bos: Option<bool>,
        add_eos: Option<bool>,
        text: &'static str,
        parse: &'static [&'static str],
        doubling: &'static [&'static str],
    }
    let none = Case { pre: "gpt-2", add_bos: None, add_eos: None, text: "a", parse: &["a"], doubling: &["a"] };
    let bos = Case { add_bos: Some(true), parse: &["<s>", "a"], doubling: &["<s>", "a"], ..none };
    let cases = [
        Case { ..none },
        Case { text: "", parse: &[], doubling: &[], ..none },
        Case { ..bos },
        Case { text: "", parse: &["<s>"], doubling: &["<s>"], ..bos },
        Case { text: "<s>a", doubling: &["<s>", "<s>", "a"], ..bos },
        Case { text: "<s>a</s>", parse: &["<s>", "a", "</s>"], doubling: &["<s>", "<s>", "a", "</s>"], ..bos },
        // Llama 3 files need not say that BOS is added; they can say that it is not.
        Case { pre: "llama-bpe", ..bos },
        Case { pre: "llama-bpe", add_bos: None, ..bos },
        Case { pre: "llama-bpe", add_bos: Some(false), ..none },
        Case { add_eos: Some(true), parse: &["a", "</s>"], doubling: &["a", "</s>"], ..none },
        Case { add_eos: Some(true), text: "a</s>", parse: &["a", "</s>"], doubling: &["a", "</s>", "</s>"], ..none },
        Case { add_eos: Some(true), text: "", parse: &["<s>", "</s>"], doubling: &["<s>", "</s>"], ..bos },
    ];
    let vocabulary = ByteLevel::new(&[], &[]);
    for Case { pre, add_bos, add_eos, text, parse, doubling } in cases {
        let vocabulary = Vocabulary { add_bos, add_eos, ..vocabulary.vocabulary() };
        let tokenizer = Tokenizer::new(&vocabulary, Some(pre)).expect("the vocabulary fits together");
        let case = format!("{pre} {add_bos:?} {add_eos:?} {text:?}");
        assert_eq!(names(&tokenizer, text, SpecialTokens::Parse), parse, "{case}");
        assert_eq!(names(&tokenizer, text, SpecialTokens::ParseDoubling), doubling, "{case}");
        let raw = tokenizer.encode_raw(text, SpecialTokens::Parse).expect("the vocabulary has every byte");
        assert!(
            doubling.len() - raw.len() == usize::from(tokenizer.adds_bos()) + usize::from(add_eos == Some(true)),
            "{case}"
        );
    }
}

#[test]
fn sentence_piece_merges_the_best_score_and_the_leftmost_among_equals() {
    let pieces =
        [("\u{2581}", -9.0), ("a", -9.0), ("b", -9.0), ("ab", -2.0), ("ba", -2.0), ("\u{2581}a", -1.0), ("aba", 0.0)];
    let tokenizer = sentence_piece(&pieces, false);
    assert_eq!(names(&tokenizer, "bab", SpecialTokens::Plain), ["ba", "b"]);
    assert_eq!(names(&tokenizer, "aba", SpecialTokens::Plain), ["aba"]);
    assert_eq!(names(&tokenizer, " ab", SpecialTokens::Plain), ["\u{2581}a", "b"]);
}

#[test]
fn what_the_vocabulary_cannot_say_is_spelled_in_bytes() {
    let tokenizer = sentence_piece(&[("\u{2581}", -1.0), ("a", -1.0)], false);
    assert_eq!(names(&tokenizer, "aé\n", SpecialTokens::Plain), ["a", "<0xC3>", "<0xA9>", "<0x0A>"]);
    assert_eq!(tokenizer.decode(&tokenizer.encode("aé\n", SpecialTokens::Plain).expect("bytes")).expect("ids"), "aé\n");
    // A byte token that is typed out is text.
    assert_eq!(
        names(&tokenizer, "<0x0A>", SpecialTokens::Plain),
        ["<0x3C>", "<0x30>", "<0x78>", "<0x30>", "<0x41>", "<0x3E>"]
    );
}

#[test]
fn without_byte_tokens_the_unknown_token_stands_in_and_without_that_it_is_an_error() {
    let vocabulary = |unknown| Vocabulary {
        tokens: vec![b"a", b"<unk>"],
        token_types: Vec::new(),
        algorithm: Algorithm::SentencePiece { scores: vec![0.0; 2], space_prefix: false },
        special: SpecialIds { unknown, ..SpecialIds::default() },
        add_bos: Some(false),
        add_eos: None,
    };
    let tokenizer = Tokenizer::new(&vocabulary(Some(1)), None).expect("the vocabulary fits together");
    assert_eq!(tokenizer.encode("ab", SpecialTokens::Plain).expect("an unknown token"), [0, 1]);
    let byte_level = ByteLevel::new(&[], &[]).tokenizer();
    assert_eq!(byte_level.encode("\u{10FFFF}", SpecialTokens::Plain).expect("bytes").len(), 4);
}

#[test]
fn a_text_gets_its_space_in_front_and_gives_it_back() {
    let pieces = [("\u{2581}", -2.0), ("a", -2.0), ("\u{2581}a", -1.0), ("[[x]]", 0.0)];
    let tokenizer = sentence_piece(&pieces, true);
    assert_eq!(names(&tokenizer, "", SpecialTokens::Plain), [""; 0]);
    assert_eq!(names(&tokenizer, "aa", SpecialTokens::Plain), ["\u{2581}a", "a"]);
    assert_eq!(names(&tokenizer, " a", SpecialTokens::Plain), ["\u{2581}", "\u{2581}a"]);
    assert_eq!(names(&tokenizer, "a[[x]]a", SpecialTokens::Plain), ["\u{2581}a", "[[x]]", "\u{2581}a"]);
    assert_eq!(names(&tokenizer, "a<s>a", SpecialTokens::Parse), ["<s>", "\u{2581}a", "<s>", "\u{2581}a"]);
    for text in ["", "a", " a", "  a", "a a", "b", " ", "\u{2581}"] {
        let ids = tokenizer.encode(text, SpecialTokens::Parse).expect("bytes");
        // U+2581 in a text cannot be told from a space, in any SentencePiece.
        assert_eq!(tokenizer.decode(&ids).expect("its own ids"), text.replace('\u{2581}', " "), "{text:?}");
    }
    assert_eq!(names(&sentence_piece(&pieces, false), "aa", SpecialTokens::Plain), ["a", "a"]);
}

#[test]
fn generation_ends_at_the_ids_of_the_file_and_at_control_tokens_of_known_name() {
    let mut vocabulary = ByteLevel::new(&["<|im_end|>"], &[]);
    vocabulary.texts.extend(["<|eot_id|>", "<|file_sep|>", "<|start|>"].map(str::to_owned));
    vocabulary.types.extend([TokenType::Control; 3]);
    let mut built = vocabulary.vocabulary();
    built.special.end_of_generation = vec![65];
    let tokenizer = Tokenizer::new(&built, None).expect("the vocabulary fits together");
    let ends: Vec<_> =
        ["<|eot_id|>", "</s>", "<|file_sep|>"].map(|name| tokenizer.token_id(name).expect("a token")).to_vec();
    for id in 0..tokenizer.vocab_size() as u32 {
        assert_eq!(tokenizer.is_end_of_generation(id), id == 65 || ends.contains(&id), "{id}");
    }
    assert!(!tokenizer.is_end_of_generation(u32::MAX));
    // Typed as text by a slip of the converter: no end, but a token a prompt can name.
    assert_eq!(names(&tokenizer, "<|im_end|>", SpecialTokens::Parse), ["<|im_end|>"]);
    assert_ne!(names(&tokenizer, "<|im_end|>", SpecialTokens::Plain), ["<|im_end|>"]);
}

#[test]
fn control_tokens_are_no_text_but_have_bytes() {
    let tokenizer = ByteLevel::new(&["Ġhi"], &[]).tokenizer();
    let id = |name| tokenizer.token_id(name).expect("a token");
    assert_eq!(tokenizer.decode(&[id("<s>"), id("Ġhi"), id("[[x]]"), id("</s>")]).expect("ids"), " hi[[x]]");
    assert_eq!(&*tokenizer.token_bytes(id("<s>")).expect("an id"), b"<s>");
    assert_eq!(&*tokenizer.token_bytes(id("Ġhi")).expect("an id"), b" hi");
    assert_eq!(&*tokenizer.token_bytes(id("Ã")).expect("an id"), [0xC3]);
}

#[test]
fn an_id_past_the_vocabulary_is_an_error() {
    let tokenizer = Arc::new(ByteLevel::new(&[], &[]).tokenizer());
    for error in [
        tokenizer.decode(&[0, 259]).expect_err("259 tokens"),
        tokenizer.token_bytes(259).expect_err("259 tokens"),
        tokenizer.token_type(u32::MAX).map(|_| ()).expect_err("259 tokens"),
        Detokenizer::new(Arc::clone(&tokenizer)).push(259).expect_err("259 tokens"),
    ] {
        assert!(matches!(error, TokenizerError::UnknownToken { vocab_size: 259, .. }), "{error}");
    }
}

#[test]
fn what_does_not_fit_together_is_refused_with_the_numbers() {
    let good = ByteLevel::new(&[], &[]);
    let refused = |change: fn(&mut Vocabulary<'_>), pre: Option<&str>| {
        let mut vocabulary = good.vocabulary();
        change(&mut vocabulary);
        Tokenizer::new(&vocabulary, pre).expect_err("the vocabulary does not fit together").to_string()
    };
    let spm = |scores| Algorithm::SentencePiece { scores, space_prefix: true };
    let bpe = |merges, pre| Algorithm::ByteLevelBpe { merges, pre };
    struct Case {
        message: String,
        says: &'static [&'static str],
    }
    let cases = [
        Case { message: refused(|v| v.tokens.clear(), None), says: &["no tokens"] },
        Case { message: refused(|v| v.token_types.truncate(3), None), says: &["3 token types for 259 tokens"] },
        Case { message: refused(|v| v.special.bos = Some(259), None), says: &["BOS", "259"] },
        Case {
            message: refused(|v| v.special.end_of_generation.push(7000), None),
            says: &["end-of-generation", "7000"],
        },
        Case {
            message: refused(|v| (v.add_bos, v.special.bos) = (Some(true), None), None),
            says: &["BOS is added", "not which token"],
        },
        Case { message: refused(|_| (), Some("nonsense")), says: &["`nonsense`", "qwen2", "llama-bpe", "--pre"] },
    ];
    let more = [
        (bpe(vec![], None), &["tokenizer.ggml.pre", "smollm", "--pre"][..]),
        (bpe(vec![], Some("superbpe")), &["`superbpe`", "known are"]),
        (bpe(vec![b"a b", b"ab"], Some("gpt-2")), &["merge 1 is `ab`"]),
        (bpe(vec![b"a "], Some("gpt-2")), &["merge 0"]),
        (bpe(vec![b" a"], Some("gpt-2")), &["merge 0"]),
        (spm(vec![0.0; 2]), &["2 scores for 259 tokens"]),
        (spm([vec![0.0; 258], vec![f32::NAN]].concat()), &["score of token 258"]),
    ];
    let more = more.map(|(algorithm, says)| {
        let vocabulary = Vocabulary { algorithm, ..good.vocabulary() };
        let message = Tokenizer::new(&vocabulary, None).expect_err("the vocabulary does not fit together").to_string();
        Case { message, says }
    });
    for Case { message, says } in cases.into_iter().chain(more) {
        for words in says {
            assert!(message.contains(words), "{message:?} does not say {words:?}");
        }
    }
}

#[test]
fn a_pre_type_given_by_hand_stands_in_for_a_missing_one() {
    let good = ByteLevel::new(&["12"], &["1 2"]);
    let vocabulary =
        Vocabulary { algorithm: Algorithm::ByteLevelBpe { merges: vec![b"1 2"], pre: None }, ..good.vocabulary() };
    let with = |pre| Tokenizer::new(&vocabulary, Some(pre)).expect("a known type");
    assert_eq!(names(&with("gpt-2"), "12", SpecialTokens::Plain), ["12"]);
    assert_eq!(names(&with("smollm"), "12", SpecialTokens::Plain), ["1", "2"]);
    let spm = Vocabulary {
        algorithm: Algorithm::SentencePiece { scores: vec![0.0; 260], space_prefix: true },
        ..good.vocabulary()
    };
    assert!(matches!(Tokenizer::new(&spm, Some("gpt-2")), Err(TokenizerError::PreWithoutUse)));
}

#[test]
fn a_file_is_read_as_it_says() {
    let file = |keys: &[(&str, OwnedValue)]| {
        let mut writer = GgufWriter::new();
        for (key, value) in keys {
            writer.metadata(format!("tokenizer.ggml.{key}"), value.clone());
        }
        Gguf::from_bytes(writer.to_bytes().expect("small")).expect("what the writer wrote")
    };
    let text = |text: &str| OwnedValue::String(text.as_bytes().to_vec());
    let mut keys = vec![
        ("model", text("gpt2")),
        ("pre", text("qwen2")),
        ("tokens", OwnedValue::strings(["a", "b", "ab", "<e>"])),
        ("token_type", OwnedValue::i32s([1, 1, 1, 3])),
        ("merges", OwnedValue::strings(["a b"])),
        ("eos_token_id", OwnedValue::U32(3)),
        ("add_eos_token", OwnedValue::Bool(true)),
    ];
    let gguf = file(&keys);
    let tokenizer = Tokenizer::from_metadata(gguf.metadata(), None).expect("a whole file");
    assert_eq!(tokenizer.encode("aba", SpecialTokens::Parse).expect("short"), [2, 0, 3]);
    assert_eq!((tokenizer.bos(), tokenizer.eos(), tokenizer.end_of_generation()), (None, Some(3), &[3][..]));

    let error = |keys: &[(&str, OwnedValue)]| {
        Tokenizer::from_metadata(file(keys).metadata(), None).expect_err("a broken file").to_string()
    };
    assert!(error(&keys[1..]).contains("tokenizer.ggml.model"));
    assert!(error(&keys[..4]).contains("tokenizer.ggml.merges"));
    keys[0].1 = text("bert");
    assert!(error(&keys).contains("`bert` is not supported; supported are gpt2"), "{}", error(&keys));
    keys[0].1 = text("llama");
    assert!(error(&keys).contains("tokenizer.ggml.scores"));
    keys.push(("scores", OwnedValue::f32s([0.0, 0.0, 1.0, 0.0])));
    keys.push(("add_bos_token", OwnedValue::Bool(false)));
    let gguf = file(&keys);
    let tokenizer = Tokenizer::from_metadata(gguf.metadata(), None).expect("a whole file");
    assert_eq!(tokenizer.encode("ab", SpecialTokens::Parse).expect("an unknown token"), [0, 0, 0, 2, 3]);
}

/// A byte-level and a SentencePiece tokenizer that can say every byte.
fn both() -> [Tokenizer; 2] {
    let merges = ["a b", "ab c", "Ġ a", "Ã ©", "ð Ł", "ðŁ ĺ"];
    let more = ["ab", "abc", "Ġa", "Ã©", "ðŁ", "ðŁĺ"];
    let pieces = [("\u{2581}", -5.0), ("a", -5.0), ("b", -5.0), ("ab", -1.0), ("\u{2581}a", -2.0), ("é", -3.0)];
    [ByteLevel::new(&more, &merges).tokenizer(), sentence_piece(&pieces, true)]
}

/// Text with what tokenizers trip over in it.
fn any_text() -> impl Strategy<Value = String> {
    let parts = prop_oneof![
        "[ab c\\t\\n\\r]{0,8}",
        "[0-9'.,!<>\\[\\]x/s]{0,6}",
        "\\PC{0,6}",
        any::<String>(),
        prop_oneof![Just("😀"), Just("👩\u{200D}👧"), Just("é"), Just("日本"), Just("[[x]]"), Just("<s>")]
            .prop_map(str::to_owned),
    ];
    prop::collection::vec(parts, 0..8).prop_map(|parts| parts.concat())
}

/// Every `pre` type, compiled once: that takes longer than cutting a short text.
static ALL_PRE_TYPES: LazyLock<Vec<PreTokenizer>> = LazyLock::new(PreTokenizer::all);

proptest! {
    #[test]
    fn decoding_gives_the_text_back(text in any_text()) {
        let [byte_level, sentence_piece] = both();
        let round_trip = |tokenizer: &Tokenizer| {
            let ids = tokenizer.encode(&text, SpecialTokens::Plain).expect("every byte can be said");
            tokenizer.decode(&ids).expect("its own ids")
        };
        prop_assert_eq!(round_trip(&byte_level), text.clone());
        prop_assert_eq!(round_trip(&sentence_piece), text.replace('\u{2581}', " "));
    }

    #[test]
    fn every_pre_type_cuts_without_losing_anything(text in any_text()) {
        for pre_tokenizer in ALL_PRE_TYPES.iter() {
            let pieces = pre_tokenizer.split(&text);
            prop_assert_eq!(pieces.concat(), text.clone(), "{:?}", pre_tokenizer);
            prop_assert!(pieces.iter().all(|piece| !piece.is_empty()), "{:?}", pre_tokenizer);
        }
    }

    #[test]
    fn a_stream_gives_whole_characters_that_add_up(ids in prop::collection::vec(0..262u32, 0..40)) {
        for tokenizer in both().map(Arc::new) {
            let mut stream = Detokenizer::new(Arc::clone(&tokenizer));
            let mut text = String::new();
            for &id in &ids {
                text.push_str(&stream.push(id).expect("an id of the vocabulary"));
            }
            text.push_str(&stream.finish());
            prop_assert_eq!(text, tokenizer.decode(&ids).expect("ids of the vocabulary"));
        }
    }

    #[test]
    fn a_stream_of_text_never_gives_a_replacement_character(text in any_text()) {
        for tokenizer in both().map(Arc::new) {
            let mut stream = Detokenizer::new(Arc::clone(&tokenizer));
            for id in tokenizer.encode(&text, SpecialTokens::Plain).expect("every byte can be said") {
                let emitted = stream.push(id).expect("its own id");
                prop_assert!(text.contains('\u{FFFD}') || !emitted.contains('\u{FFFD}'), "{:?}", emitted);
            }
            prop_assert_eq!(stream.finish(), "");
        }
    }
}
