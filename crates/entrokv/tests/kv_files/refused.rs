//! Files that are no files, or another engine's: one line, and nothing has changed.

use std::io::{self, Write};
use std::sync::Arc;

use entrokv::gguf::Gguf;
use entrokv::kv_file::Notes;
use entrokv::tiny::{TinyArchitecture, TinyModel};
use entrokv::{Engine, LoadOptions, ModelId, ModelOptions, Request, SaveError, SequenceId, parse_policy};
use entrokv_kernels::weight_type::WeightType;
use proptest::prelude::*;
use twox_hash::XxHash3_128;

use crate::recorder::recorded;
use crate::support::options;
use crate::{Cap, request, saved};

const CHECKSUM_BYTES: usize = 16;

fn tiny(change: impl FnOnce(&mut TinyModel)) -> Gguf {
    let mut model = TinyModel::new(TinyArchitecture::Gemma3);
    change(&mut model);
    Gguf::from_bytes(model.gguf().unwrap()).unwrap()
}

fn coded() -> ModelOptions {
    ModelOptions { page_kind: "q8_0".parse().unwrap(), ..options() }
}

/// An engine with a finished sequence in it, and the file of that.
fn engine(gguf: &Gguf, options: &ModelOptions, cap: Cap) -> (Engine, SequenceId, Vec<u8>) {
    let (mut engine, _) = recorded(gguf, options);
    let id = engine.submit(request(1, 120, 10, cap)).unwrap();
    engine.finish(id, &mut |_| ()).unwrap();
    let file = saved(&engine, id);
    (engine, id, file)
}

/// Why `file` is refused; fails if anything has changed by that.
fn refusal(engine: &mut Engine, file: &[u8], options: &LoadOptions) -> String {
    let before = (engine.pool().used_bytes(), engine.pool().free_bytes(), engine.is_busy());
    let error = engine.load_sequence(&mut &file[..], options).map(|loaded| loaded.id).unwrap_err().to_string();
    assert_eq!((engine.pool().used_bytes(), engine.pool().free_bytes(), engine.is_busy()), before, "{error}");
    assert!(!error.contains('\n'), "{error}");
    error
}

/// The file with `from` replaced by `to` in its header, its lengths and its checksum made right again.
fn edited(file: &[u8], from: &str, to: &str) -> Vec<u8> {
    let len = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header = String::from_utf8(file[8..8 + len].to_vec()).unwrap();
    assert!(header.contains(from), "{from} is not in {header}");
    let header = header.replacen(from, to, 1);
    let data = &file[8 + len..file.len() - CHECKSUM_BYTES];
    sealed([&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat())
}

/// The bytes with their checksum behind them.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.extend(XxHash3_128::oneshot(&bytes).to_be_bytes());
    bytes
}

#[test]
fn a_file_that_is_not_whole_is_refused_and_changes_nothing() {
    let (engine, _, file) = engine(&tiny(|_| ()), &coded(), Some(("50%", "knorm")));
    let engine = std::sync::Mutex::new(engine);
    let any = |file: &[u8]| refusal(&mut engine.lock().unwrap(), file, &LoadOptions::default());
    let is_known = |error: &str| {
        ["it is no KV file: ", "it is damaged: ", "it is cut short: ", "it has "]
            .iter()
            .any(|start| error.starts_with(start))
    };
    // Every place of the header and around the ends of lists, and some of everywhere.
    let header = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    for at in (0..header + 64).chain(file.len() - 64..file.len()) {
        let mut flipped = file.clone();
        flipped[at] ^= 1 << (at % 8);
        let error = any(&flipped);
        assert!(is_known(&error), "byte {at}: {error}");
        let error = any(&file[..at]);
        assert!(is_known(&error), "{at} bytes: {error}");
    }
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(300));
    runner
        .run(&(any_index(), 0..8_u32, 1..4_usize), |(at, bit, len)| {
            let mut flipped = file.clone();
            let at = at.index(file.len());
            flipped[at] ^= 1_u8 << bit;
            prop_assert!(is_known(&any(&flipped)));
            prop_assert!(is_known(&any(&file[..at])));
            prop_assert!(is_known(&any(&[&file[..], &vec![0; len]].concat())));
            Ok(())
        })
        .unwrap();
    assert!(any(&[&file[..], &file[..]].concat()).starts_with("it has "), "two files in one");
    // After all of this the engine still takes the file itself.
    engine.lock().unwrap().load_sequence(&mut &file[..], &LoadOptions::default()).unwrap();
}

fn any_index() -> impl Strategy<Value = prop::sample::Index> {
    any::<prop::sample::Index>()
}

#[test]
fn foreign_files_are_told_by_what_they_are_not() {
    let (mut engine, ..) = engine(&tiny(|_| ()), &options(), None);
    let gguf = TinyModel::default().gguf().unwrap();
    let safetensors = br#"9_______{"a":{}} "#.map(|byte| if byte == b'_' { 0 } else { byte });
    let cases: [(&[u8], &str); 5] = [
        (b"", "it is no KV file: it ends before a header"),
        (b"short", "it is no KV file: it ends before a header"),
        (&gguf, "it is no KV file: its first 8 bytes are no header's length"),
        (&safetensors, "it is no KV file: its header does not begin with entrokv-kv"),
        (&[0; 4000], "it is no KV file: its header does not begin with entrokv-kv"),
    ];
    for (file, message) in cases {
        assert_eq!(refusal(&mut engine, file, &LoadOptions::default()), message);
    }
}

#[test]
fn every_mismatch_has_a_line_of_its_own() {
    let gguf = tiny(|_| ());
    let (mut engine_of_file, _, file) = engine(&gguf, &options(), Some(("50%", "knorm")));
    let id = ModelId::of(&gguf);
    let model = "tiny gemma3, seed 1";
    let made = format!("it was made by {model} with ");
    let cases: [(Gguf, ModelOptions, String); 9] = [
        (tiny(|m| m.num_layers = 13), options(), format!("{made}7 layers, and this model has 13")),
        (tiny(|m| m.num_kv_heads = 2), options(), format!("{made}1 KV heads, and this model has 2")),
        (tiny(|m| m.num_heads = 2), options(), format!("{made}4 query heads per KV head, and this model has 2")),
        (tiny(|m| m.head_dim = 64), options(), format!("{made}32 elements per head, and this model has 64")),
        (
            tiny(|m| m.window = 48),
            options(),
            format!("{made}a window of 32 tokens in layer 0, and this model has 48 (0: none)"),
        ),
        (
            tiny(|m| m.seed = 2),
            options(),
            format!(
                "it was made by another model: {model} ({id}), and this one is tiny gemma3, seed 2 ({})",
                ModelId::of(&tiny(|m| m.seed = 2))
            ),
        ),
        (
            tiny(|_| ()),
            ModelOptions { page_size: 32, ..options() },
            "it has pages of 16 tokens, and this cache has pages of 32 (--page-size)".to_string(),
        ),
        (tiny(|_| ()), coded(), "it is a cache of type f16, and this one is of type q8_0 (--cache-type)".to_string()),
        (
            tiny(|_| ()),
            ModelOptions { context_len: Some(129), ..options() },
            "it has 130 tokens, the context holds 129".to_string(),
        ),
    ];
    for (gguf, options, message) in cases {
        let (mut engine, _) = recorded(&gguf, &options);
        assert_eq!(refusal(&mut engine, &file, &LoadOptions::default()), message);
    }
    let (mut small, _) = recorded(&gguf, &ModelOptions { pool_bytes: Some(40_000), ..options() });
    let error = refusal(&mut small, &file, &LoadOptions::default());
    assert!(
        error.starts_with("the page pool has no room for 2048 bytes: ") && error.ends_with("of a capacity of 40000")
    );

    let policy = |text: &str| LoadOptions { policy: Some(Arc::from(parse_policy(text).unwrap())) };
    let message = "it was written under the policy knorm, and tova was asked for";
    assert_eq!(refusal(&mut engine_of_file, &file, &policy("tova")), message);
    let message = "it was written under the policy knorm, and knorm:sinks=8 was asked for";
    assert_eq!(refusal(&mut engine_of_file, &file, &policy("knorm:sinks=8")), message);
    for good in [policy("knorm"), policy("knorm:sinks=4"), LoadOptions::default()] {
        engine_of_file.load_sequence(&mut &file[..], &good).unwrap();
    }
}

#[test]
fn the_identity_is_that_of_what_a_model_computes() {
    let id = |change: fn(&mut TinyModel)| ModelId::of(&tiny(change));
    assert_eq!(id(|_| ()), id(|_| ()));
    let changes: [fn(&mut TinyModel); 5] = [
        |m| m.seed = 2,
        |m| m.weight_type = WeightType::F16,
        |m| m.tied = false,
        |m| m.context_length = 4096,
        |m| m.window = 33,
    ];
    for (number, change) in changes.into_iter().enumerate() {
        assert_ne!(id(change), id(|_| ()), "change {number}");
    }
    let text = id(|_| ()).to_string();
    assert_eq!((text.len(), text.parse()), (32, Ok(id(|_| ()))));
    let bytes = TinyModel::new(TinyArchitecture::Gemma3).gguf().unwrap();
    let with = |from: &[u8], to: &[u8]| {
        let at = bytes.windows(from.len()).rposition(|window| window == from).unwrap();
        let mut bytes = bytes.clone();
        bytes[at..at + to.len()].copy_from_slice(to);
        ModelId::of(&Gguf::from_bytes(bytes).unwrap())
    };
    assert_eq!(with(b"tiny gemma3, seed 1", b"tiny gemma3, sold 1"), id(|_| ()), "its name is no part of it");
    let last = bytes.len() - 1;
    let mut changed = bytes.clone();
    changed[last] ^= 1;
    assert_ne!(ModelId::of(&Gguf::from_bytes(changed).unwrap()), id(|_| ()), "a single bit of a weight is");
}

#[test]
fn whole_files_that_contradict_themselves_are_refused() {
    let (mut engine, _, file) = engine(&tiny(|_| ()), &options(), Some(("50%", "knorm")));
    let cases = [
        (r#"\"version\":1"#, r#"\"version\":2"#, "it is a KV file of version 2, and only version 1 can be read"),
        (
            r#"\"computed\":129"#,
            r#"\"computed\":131"#,
            "it is whole and yet no sequence: 131 tokens are computed and 120 of prompts, of 130",
        ),
        (
            r#"\"computed\":129"#,
            r#"\"computed\":127"#,
            "it is whole and yet no sequence: layer 0, KV head 0: page 7 holds 16 tokens, and not 15",
        ),
        (
            r#"\"kinds\":[\"f16\"]"#,
            r#"\"kinds\":[\"f61\"]"#,
            r#"it is whole and yet no sequence: pages of kind "f61" in a cache of type f16"#,
        ),
        (r#"\"kinds\":[\"f16\"]"#, r#"\"kinds\":[]"#, "it is whole and yet no sequence: page kind 0 of 0"),
        (
            r#"\"kinds\":[\"f16\"]"#,
            r#"\"kinds\":[\"f16\",\"f16\"]"#,
            "it is whole and yet no sequence: it lists kinds of page that it has no page of",
        ),
        (r#"\"budget\":\"50%\""#, r#"\"budget\":\"50\""#, "it is whole and yet no sequence: its budget: "),
        (
            r#"\"policy\":\"knorm\""#,
            r#"\"policy\":\"mine\""#,
            "it was written under the policy mine, which is not known here: unknown policy `mine`; known are ",
        ),
        (
            r#""tokens":{"dtype":"U32""#,
            r#""tokens":{"dtype":"F32""#,
            r#"it is whole and yet no sequence: tensor "tokens" is F32 [130], and not U32 [130]"#,
        ),
        (
            r#""pages.len""#,
            r#""pages.new""#,
            r#"it is whole and yet no sequence: tensor "pages.len" is not where it belongs, "pages.new" is"#,
        ),
        (r#""checksum""#, r#""somewhat""#, r#"it is whole and yet no sequence: tensor "checksum" is not where it"#),
        (r#"\"notes\":{}"#, r#"\"more\":{}"#, "it is whole and yet no sequence: unknown field `more`"),
    ];
    for (from, to, message) in cases {
        let error = refusal(&mut engine, &edited(&file, from, to), &LoadOptions::default());
        assert!(error.starts_with(message), "{error}, and not {message}");
    }
    assert_eq!(edited(&file, "entrokv-kv", "entrokv-kv"), file, "the edit itself changes nothing");
    // A token that the vocabulary does not have.
    let header = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let mut bytes = file[..file.len() - CHECKSUM_BYTES].to_vec();
    bytes[header..header + 4].copy_from_slice(&u32::MAX.to_le_bytes());
    let error = refusal(&mut engine, &sealed(bytes), &LoadOptions::default());
    assert!(error.starts_with("it is whole and yet no sequence: token id 4294967295 is outside"), "{error}");
}

/// Takes so many bytes, then has no room.
struct Full(usize);

impl Write for Full {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match bytes.len().min(self.0) {
            0 => Err(io::ErrorKind::StorageFull.into()),
            len => {
                self.0 -= len;
                Ok(len)
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn policies_that_keep_more_than_the_cache_are_refused() {
    let gguf = tiny(|_| ());
    for (policy, keeps) in [
        ("expected-attention", "sums over queries"),
        ("compactor", "sums over attention"),
        ("kvzip", "what its passes said"),
        ("streaming-llm:rerotate=true", "keys of sinks"),
        ("knorm:tiers=f16", "scores of its pages"),
    ] {
        let (mut engine, _) = recorded(&gguf, &options());
        let id = engine.submit(request(1, 120, 10, Some(("50%", policy)))).unwrap();
        engine.finish(id, &mut |_| ()).unwrap();
        let message =
            |engine: &Engine| engine.save_sequence(id, &Notes::new(), &mut Vec::new()).unwrap_err().to_string();
        let expected = format!("the policy {policy} keeps {keeps} from turn to turn, which a KV file does not hold");
        assert_eq!(message(&engine), expected);
        // A turn of another policy forgets the sums; turned sinks stay turned, and pages settled.
        let next = if keeps == "scores of its pages" { None } else { Some(("50%", "knorm")) };
        engine.extend(id, request(2, 5, 5, next)).unwrap();
        engine.finish(id, &mut |_| ()).unwrap();
        match keeps {
            "keys of sinks" => assert!(message(&engine).starts_with("sequence 0 has turned its sinks")),
            "scores of its pages" => {
                let expected = "the cache of sequence 0 is stored in tiers, and a KV file holds caches of one type";
                assert_eq!(message(&engine), expected);
            }
            _ => assert!(!saved(&engine, id).is_empty()),
        }
    }
}

#[test]
fn what_cannot_be_saved_says_why() {
    let (mut engine, id, file) = engine(&tiny(|_| ()), &options(), None);
    for room in [0, 5, 2000, file.len() - 17, file.len() - 1] {
        let error = engine.save_sequence(id, &Notes::new(), &mut Full(room)).unwrap_err();
        assert!(
            matches!(&error, SaveError::Io(error) if error.kind() == io::ErrorKind::StorageFull),
            "{room}: {error}"
        );
    }
    engine.save_sequence(id, &Notes::new(), &mut Full(file.len())).unwrap();
    engine.extend(id, Request::greedy(vec![1], 4)).unwrap();
    let message = |engine: &Engine| engine.save_sequence(id, &Notes::new(), &mut Vec::new()).unwrap_err().to_string();
    assert_eq!(message(&engine), "sequence 0 is still answering; cancel it or let it finish before it is saved");
    engine.close(id);
    assert_eq!(message(&engine), "there is no sequence 0");
}
