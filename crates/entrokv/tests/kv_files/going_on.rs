//! What comes after a file: the same as if there had been none.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use entrokv::gguf::Gguf;
use entrokv::kv_file::Notes;
use entrokv::{Engine, Identity, KvBytes, KvReport, LoadOptions, ModelOptions, Request, SequenceId, SpecialTokens};
use safetensors::SafeTensors;

use crate::recorder::{Rows, recorded};
use crate::support::{count, model_path, open, options, shared};
use crate::{Cap, gguf, request, saved};

/// Lengths of the prompts of a conversation, and of its answers: with the constants of codes taken in the first prompt, and in
/// the second; answers that open pages, and one of a single token.
const CONVERSATIONS: [[(usize, usize); 3]; 2] = [[(190, 50), (7, 1), (40, 70)], [(33, 40), (100, 60), (1, 60)]];

const CAPS: [Cap; 8] = [
    None,
    Some(("30%", "page-entro-kv:preset=serving")),
    Some(("64tok", "snapkv:window=8")),
    Some(("50%", "h2o:allot=global")),
    Some(("40%", "keydiff:share=layer,schedule=once")),
    Some(("5pages", "tova")),
    Some(("50%", "knorm:granularity=token")),
    Some(("96tok", "h2o:granularity=token,schedule=per_chunk:64")),
];

/// Answers `request` on `id`, holding the cache to its cap after every step that follows the prompt.
fn answer(engine: &mut Engine, id: SequenceId, what: &str) {
    let rolling = |kv: &KvReport| kv.bytes_held - kv.bytes_appended;
    while engine.is_busy() {
        let outputs = engine.step().unwrap();
        let kv = engine.kv_report(id).unwrap();
        if outputs.iter().any(|output| output.id == id && output.token.is_some()) {
            assert!(rolling(&kv) <= kv.bytes_budget.unwrap_or(u64::MAX), "{what}: {kv:?}");
        }
    }
}

/// A conversation that lives in one engine: the logits, and the file of its end.
fn unsaved(gguf: &Gguf, options: &ModelOptions, turns: &[Request], what: &str) -> (Rows, Vec<u8>) {
    let (mut engine, rows) = recorded(gguf, options);
    let id = engine.submit(turns[0].clone()).unwrap();
    answer(&mut engine, id, what);
    for turn in &turns[1..] {
        engine.extend(id, turn.clone()).unwrap();
        answer(&mut engine, id, what);
    }
    let file = saved(&engine, id);
    (rows, file)
}

/// The same, moved through a file into another engine after each turn, where its pages lie elsewhere.
fn moved(gguf: &Gguf, options: &ModelOptions, turns: &[Request], what: &str) -> (Rows, Vec<u8>) {
    let all = Rows::default();
    let mut file: Option<Vec<u8>> = None;
    for (number, turn) in turns.iter().enumerate() {
        let (mut engine, rows) = recorded(gguf, options);
        let neighbour = engine.submit(request(77, 20 + 30 * number, 3, None)).unwrap();
        answer(&mut engine, neighbour, what);
        rows.lock().unwrap().clear();
        let id = match &file {
            None => engine.submit(turn.clone()).unwrap(),
            Some(file) => {
                let loaded = engine.load_sequence(&mut &file[..], &LoadOptions::default()).unwrap();
                let saved_cap = loaded.eviction.map(|cap| (cap.budget, cap.policy.to_string()));
                assert_eq!(saved_cap, turn.eviction.as_ref().map(|cap| (cap.budget, cap.policy.to_string())));
                let kv = engine.kv_report(loaded.id).unwrap();
                assert!(kv.bytes_held - kv.bytes_appended <= kv.bytes_budget.unwrap_or(u64::MAX), "{what}: {kv:?}");
                assert_eq!(&saved(&engine, loaded.id), file, "{what}: saved again");
                engine.extend(loaded.id, turn.clone()).unwrap();
                loaded.id
            }
        };
        answer(&mut engine, id, what);
        all.lock().unwrap().append(&mut rows.lock().unwrap());
        file = Some(saved(&engine, id));
        engine.close(neighbour);
        engine.close(id);
        assert_eq!(engine.pool().used_bytes(), 0, "{what}");
    }
    (all, file.unwrap())
}

#[test]
fn loading_goes_on_as_if_never_saved() {
    for (model, kinds) in [
        ("llama-tied", &["f16", "f32"][..]),
        ("qwen3-tied", &["f16", "bf16", "q8_0", "tq3v2", "f16/tq2", "kivi4/kivi2"]),
        ("gemma3", &["f16", "tq4"]),
    ] {
        let gguf = gguf(model);
        for kind in kinds {
            for cap in CAPS {
                for conversation in CONVERSATIONS {
                    let what = format!("{model}, {kind}, {cap:?}, {conversation:?}");
                    let options = ModelOptions { page_kind: kind.parse().unwrap(), ..options() };
                    let turns: Vec<Request> = (1..)
                        .zip(conversation)
                        .map(|(seed, (prompt, answer))| request(seed, prompt, answer, cap))
                        .collect();
                    let (rows, file) = unsaved(&gguf, &options, &turns, &what);
                    let (moved_rows, moved_file) = moved(&gguf, &options, &turns, &what);
                    assert!(*rows.lock().unwrap() == *moved_rows.lock().unwrap(), "{what}: other logits");
                    assert!(file == moved_file, "{what}: another end");
                }
            }
        }
    }
}

#[test]
fn what_was_interrupted_goes_on_too() {
    for model in ["llama-tied", "gemma3"] {
        let gguf = gguf(model);
        for cap in [None, Some(("40%", "knorm"))] {
            let interrupt = Arc::new(AtomicBool::new(false));
            let options = ModelOptions { interrupt: Arc::clone(&interrupt), chunk_size: count(48), ..options() };
            let (mut engine, rows) = recorded(&gguf, &options);
            let id = engine.submit(request(1, 150, 90, cap)).unwrap();
            // In the middle of the prompt: pages are open for a chunk that was never computed.
            engine.step().unwrap();
            interrupt.store(true, Ordering::Relaxed);
            engine.step().unwrap_err();
            interrupt.store(false, Ordering::Relaxed);
            engine.cancel(id);
            let file = saved(&engine, id);
            rows.lock().unwrap().clear();
            engine.extend(id, request(2, 20, 60, cap)).unwrap();
            answer(&mut engine, id, model);

            let (mut other, other_rows) = recorded(&gguf, &options);
            let loaded = other.load_sequence(&mut &file[..], &LoadOptions::default()).unwrap();
            other.extend(loaded.id, request(2, 20, 60, cap)).unwrap();
            answer(&mut other, loaded.id, model);
            assert!(*rows.lock().unwrap() == *other_rows.lock().unwrap(), "{model}, {cap:?}");
            assert_eq!(saved(&engine, id), saved(&other, loaded.id), "{model}, {cap:?}");
        }
    }
}

#[test]
fn equal_sequences_give_equal_files() {
    let gguf = gguf("gemma3");
    let options = ModelOptions { page_kind: "tq4".parse().unwrap(), ..options() };
    let turn = || request(3, 201, 30, Some(("50%", "page-entro-kv")));
    let (mut engine, _) = recorded(&gguf, &options);
    let id = engine.submit(turn()).unwrap();
    answer(&mut engine, id, "alone");
    let (mut crowded, _) = recorded(&gguf, &ModelOptions { chunk_size: count(7), threads: count(1), ..options });
    // Frames that others have used lie under the open page.
    let others: Vec<_> = (10..14).map(|seed| crowded.submit(request(seed, 90, 5, None)).unwrap()).collect();
    answer(&mut crowded, others[0], "others");
    others[1..].iter().for_each(|&id| crowded.close(id));
    let other = crowded.submit(turn()).unwrap();
    answer(&mut crowded, other, "in company");
    assert!(saved(&engine, id) == saved(&crowded, other));
}

#[test]
fn a_file_is_a_safetensors_file_with_what_it_says() {
    let (mut engine, _) =
        recorded(&gguf("qwen3-tied"), &ModelOptions { page_kind: "tq4".parse().unwrap(), ..options() });
    let id = engine.submit(request(5, 210, 20, Some(("150tok", "knorm")))).unwrap();
    answer(&mut engine, id, "qwen3");
    let notes = Notes::from([("who".to_string(), "a \"test\"\n".to_string())]);
    let mut file = Vec::new();
    engine.save_sequence(id, &notes, &mut file).unwrap();
    let (header_len, metadata) = SafeTensors::read_metadata(&file).unwrap();
    assert!(header_len.is_multiple_of(8));
    let header: serde_json::Value = serde_json::from_str(&metadata.metadata().as_ref().unwrap()["entrokv-kv"]).unwrap();
    let cache = engine.cache(id).unwrap();
    assert_eq!(header["version"], 1);
    assert_eq!(header["computed"], cache.logical_len());
    assert_eq!(header["eviction"]["policy"], "knorm");
    assert_eq!(header["eviction"]["budget"], "150tok");
    assert_eq!(header["notes"]["who"], "a \"test\"\n");
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let u32s = |name: &str| -> Vec<u32> {
        tensors.tensor(name).unwrap().data().as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect()
    };
    assert_eq!(u32s("tokens"), engine.tokens(id).unwrap());
    let groups: Vec<_> = cache.shape().groups().collect();
    let lens: Vec<u32> = groups.iter().map(|&group| cache.table(group).len() as u32).collect();
    assert_eq!(u32s("tables"), lens);
    assert!(tensors.tensor("pages.positions").is_err(), "they follow from the pages");
    let index: Vec<u32> = groups.iter().flat_map(|&group| cache.table(group)).map(|page| page.index.0).collect();
    assert_eq!(u32s("pages.index"), index);
    let payload = ["f16", "tq4"].map(|kind| tensors.tensor(&format!("payload.{kind}")).unwrap().data().len() as u64);
    let kv = engine.kv_report(id).unwrap();
    assert_eq!(payload.iter().sum::<u64>(), kv.bytes_held + kv.bytes_window);
    let loaded = engine.load_sequence(&mut &file[..], &LoadOptions::default()).unwrap();
    assert_eq!(loaded.notes, notes);
    let again = engine.kv_report(loaded.id).unwrap();
    // A policy's scores are made anew, so its memory is not theirs; nor are the peaks of a sequence that has not run here.
    let KvReport { bytes_metadata, bytes_policy_state, peak, .. } = kv.clone();
    assert_eq!(KvReport { bytes_metadata, bytes_policy_state, peak, ..again }, kv);
    let answers = [id, loaded.id].map(|id| engine.finish(id, &mut |_| ()).unwrap().tokens);
    assert_eq!(answers[0].len(), 20);
    assert_eq!(answers[0], answers[1]);
}

/// A question about a text, with and without a file in between, and with what the file costs.
#[test]
fn a_real_model_answers_from_a_file() {
    let (Some(path), Some(shared)) = (model_path(entrokv::pull::DEFAULT_MODEL), shared()) else { return };
    let text: String = std::fs::read_to_string(shared.join("data/moby-dick.txt")).unwrap().chars().take(3000).collect();
    for (kind, cap) in
        [("f16", None), ("f16", Some(("20%", "page-entro-kv:preset=serving"))), ("tq4", Some(("40%", "snapkv")))]
    {
        let options = ModelOptions { page_kind: kind.parse().unwrap(), identity: Identity::Hashed, ..options() };
        let mut model = open(&path, &options);
        let ask = |tokens: Vec<u32>| Request { eviction: crate::eviction(cap), ..Request::greedy(tokens, 24) };
        let book = ask(model.tokenizer.encode(&text, SpecialTokens::Parse).unwrap());
        let question = ask(model.tokenizer.encode_raw("\n\nThe narrator's name is", SpecialTokens::Parse).unwrap());
        let id = model.engine.submit(book).unwrap();
        model.engine.finish(id, &mut |_| ()).unwrap();
        let file = saved(&model.engine, id);
        model.engine.extend(id, question.clone()).unwrap();
        let expected = model.engine.finish(id, &mut |_| ()).unwrap();

        let mut other = open(&path, &options);
        let loaded = other.engine.load_sequence(&mut &file[..], &LoadOptions::default()).unwrap();
        println!(
            "{kind}, {cap:?}: a file of {} bytes for {} tokens",
            file.len(),
            other.engine.tokens(loaded.id).unwrap().len()
        );
        other.engine.extend(loaded.id, question).unwrap();
        let answer = other.engine.finish(loaded.id, &mut |_| ()).unwrap();
        assert_eq!((answer.tokens, answer.text), (expected.tokens, expected.text), "{kind}, {cap:?}");
        // The peaks are those of what ran here, and what was loaded never held the whole text.
        assert!(answer.kv.peak.held <= expected.kv.peak.held, "{kind}, {cap:?}");
        let without_history = |kv: KvReport| KvReport { bytes_metadata: 0, peak: KvBytes::default(), ..kv };
        assert_eq!(without_history(answer.kv), without_history(expected.kv), "{kind}, {cap:?}");
    }
}
