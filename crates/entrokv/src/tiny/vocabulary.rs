//! The vocabularies of tiny models: all 256 bytes, some merges, and the special tokens of the model family.

use super::TinyArchitecture;
use crate::gguf::{GgufWriter, OwnedValue};

/// Token types as files number them.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const BYTE: i32 = 6;

/// Merges of a byte-level vocabulary, the first the strongest; a space is spelled as the stand-in for it.
const MERGES: [(&str, &str); 16] = [
    ("t", "h"),
    ("th", "e"),
    ("\u{120}", "t"),
    ("\u{120}t", "he"),
    ("\u{120}", "a"),
    ("i", "n"),
    ("e", "r"),
    ("o", "n"),
    ("\u{120}", "w"),
    ("\u{120}", "s"),
    ("in", "g"),
    ("e", "s"),
    ("\u{120}", "o"),
    ("o", "u"),
    ("\u{120}", "the"),
    ("\u{c3}", "\u{a9}"),
];

/// Pieces of the SentencePiece vocabulary, the likeliest first; a space is spelled as U+2581.
const PIECES: [&str; 13] = [
    "\u{2581}the",
    "\u{2581}t",
    "the",
    "ing",
    "th",
    "in",
    "er",
    "on",
    "\u{2581}a",
    "\u{2581}w",
    "\u{2581}s",
    "\u{2581}o",
    "\u{e9}",
];

/// What families of byte-level models differ in.
struct Family {
    pre: &'static str,
    specials: &'static [&'static str],
    /// Put before every text.
    bos: Option<&'static str>,
    eos: &'static str,
    chat_template: &'static str,
}

const CHAT_ML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + \
    '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

const LLAMA3_CHAT: &str = "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + \
    '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}\
    {{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}";

const GEMMA_CHAT: &str = "{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' + \
    ('model' if message['role'] == 'assistant' else message['role']) + '\n' + message['content'] | trim + \
    '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}";

const CHAT_ML_SPECIALS: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

/// Writes the tokenizer's keys and the chat template; the number of tokens.
pub(super) fn write(file: &mut GgufWriter, architecture: TinyArchitecture) -> usize {
    let chat_ml =
        |pre| Family { pre, specials: &CHAT_ML_SPECIALS, bos: None, eos: "<|im_end|>", chat_template: CHAT_ML };
    match architecture {
        TinyArchitecture::Llama => write_byte_level(file, &chat_ml("smollm")),
        TinyArchitecture::Qwen2 | TinyArchitecture::Qwen3 => write_byte_level(file, &chat_ml("qwen2")),
        TinyArchitecture::LlamaRopeFactors => write_byte_level(
            file,
            &Family {
                pre: "llama-bpe",
                specials: &[
                    "<|begin_of_text|>",
                    "<|end_of_text|>",
                    "<|start_header_id|>",
                    "<|end_header_id|>",
                    "<|eot_id|>",
                ],
                bos: Some("<|begin_of_text|>"),
                eos: "<|eot_id|>",
                chat_template: LLAMA3_CHAT,
            },
        ),
        TinyArchitecture::Gemma3 => write_sentence_piece(file),
    }
}

/// Bytes in the order of their value, merged pieces, special tokens.
fn write_byte_level(file: &mut GgufWriter, family: &Family) -> usize {
    let mut tokens: Vec<String> = (0..=u8::MAX).map(|byte| byte_to_char(byte).to_string()).collect();
    for (left, right) in MERGES {
        let merged = format!("{left}{right}");
        // "Ġthe" comes about in two ways.
        if !tokens.contains(&merged) {
            tokens.push(merged);
        }
    }
    let num_normal = tokens.len();
    tokens.extend(family.specials.iter().map(|&special| special.to_owned()));
    let types = (0..tokens.len()).map(|i| if i < num_normal { NORMAL } else { CONTROL });
    let id = |token: &str| tokens.iter().position(|t| t == token).expect("one of the family's special tokens") as u32;

    file.metadata("tokenizer.ggml.model", "gpt2")
        .metadata("tokenizer.ggml.pre", family.pre)
        .metadata("tokenizer.ggml.token_type", OwnedValue::i32s(types))
        .metadata("tokenizer.ggml.merges", OwnedValue::strings(MERGES.map(|(left, right)| format!("{left} {right}"))))
        .metadata("tokenizer.ggml.bos_token_id", id(family.bos.unwrap_or("<|endoftext|>")))
        .metadata("tokenizer.ggml.eos_token_id", id(family.eos))
        .metadata("tokenizer.ggml.add_bos_token", family.bos.is_some())
        .metadata("tokenizer.chat_template", family.chat_template);
    let vocab_size = tokens.len();
    file.metadata("tokenizer.ggml.tokens", OwnedValue::strings(tokens));
    vocab_size
}

/// GPT-2's printable stand-in for a byte: itself where it prints, else the next free character from U+0100 on.
fn byte_to_char(byte: u8) -> char {
    let prints = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..);
    if prints(byte) {
        return char::from(byte);
    }
    let nth = (0..byte).filter(|&other| !prints(other)).count() as u32;
    char::from_u32(0x100 + nth).expect("68 bytes do not print, and U+0100 to U+0143 are letters")
}

/// Special tokens, the 256 bytes as fallback, pieces and single letters, each less likely than the one before.
fn write_sentence_piece(file: &mut GgufWriter) -> usize {
    let mut tokens: Vec<(String, i32)> = [
        ("<pad>", CONTROL),
        ("<eos>", CONTROL),
        ("<bos>", CONTROL),
        ("<unk>", UNKNOWN),
        ("<start_of_turn>", CONTROL),
        ("<end_of_turn>", CONTROL),
    ]
    .map(|(token, kind)| (token.to_owned(), kind))
    .to_vec();
    tokens.extend((0..=u8::MAX).map(|byte| (format!("<0x{byte:02X}>"), BYTE)));
    tokens.extend(PIECES.map(|piece| (piece.to_owned(), NORMAL)));
    tokens.extend(
        "\u{2581}\n"
            .chars()
            .chain('a'..='z')
            .chain('A'..='Z')
            .chain(",.:!?'0123456789".chars())
            .map(|c| (c.to_string(), NORMAL)),
    );

    let scores = (0..tokens.len()).map(|i| -(i as f32));
    file.metadata("tokenizer.ggml.model", "llama")
        .metadata("tokenizer.ggml.pre", "default")
        .metadata("tokenizer.ggml.scores", OwnedValue::f32s(scores))
        .metadata("tokenizer.ggml.token_type", OwnedValue::i32s(tokens.iter().map(|(_, kind)| *kind)))
        .metadata("tokenizer.ggml.bos_token_id", 2)
        .metadata("tokenizer.ggml.eos_token_id", 1)
        .metadata("tokenizer.ggml.unknown_token_id", 3)
        .metadata("tokenizer.ggml.padding_token_id", 0)
        .metadata("tokenizer.ggml.eot_token_id", 5)
        .metadata("tokenizer.ggml.add_bos_token", true)
        .metadata("tokenizer.ggml.add_eos_token", false)
        .metadata("tokenizer.ggml.add_space_prefix", false)
        .metadata("tokenizer.chat_template", GEMMA_CHAT);
    let vocab_size = tokens.len();
    file.metadata("tokenizer.ggml.tokens", OwnedValue::strings(tokens.into_iter().map(|(token, _)| token)));
    vocab_size
}
