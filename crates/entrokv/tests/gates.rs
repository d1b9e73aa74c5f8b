//! Policies of gates end to end on random-weight models: gates are seeded noise, for what is checked is who is asked about what.

#![allow(clippy::unwrap_used)]

mod support;

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use entrokv::gguf::Gguf;
use entrokv::{
    EndTokens, EvictionOptions, LayerKind, Model, ModelConfig, ModelOptions, Request, SequenceId, parse_policy,
    rope_factors,
};
use entrokv_cache::KvGroup;
use entrokv_kernels::dequantize::dequantize;
use safetensors::Dtype;
use safetensors::tensor::{TensorView, serialize_to_file};
use support::{exact, gguf, options, random_tokens};

fn open(gguf: &Gguf, options: &ModelOptions) -> Model {
    Model::from_gguf(gguf, options, &mut |_| ()).unwrap()
}

fn config(gguf: &Gguf) -> ModelConfig {
    ModelConfig::from_metadata(gguf.metadata(), rope_factors(gguf).as_deref()).unwrap()
}

/// Numbers from -1 to 1.
fn noise(seed: u64, len: usize) -> Vec<f32> {
    random_tokens(seed, len, 1 << 16).into_iter().map(|x| x as f32 / (1 << 15) as f32 - 1.0).collect()
}

fn global_layers(config: &ModelConfig) -> impl Iterator<Item = usize> {
    (0..config.layers.len()).filter(|&layer| config.layers[layer] == LayerKind::Global)
}

fn write(path: &Path, tensors: &[(String, Vec<usize>, Vec<f32>)]) {
    let bytes: Vec<Vec<u8>> =
        tensors.iter().map(|(_, _, values)| values.iter().flat_map(|value| value.to_le_bytes()).collect()).collect();
    let views = tensors
        .iter()
        .zip(&bytes)
        .map(|((name, shape, _), bytes)| (name.as_str(), TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap()));
    serialize_to_file(views, None, path).unwrap();
}

/// Linear gates for every global layer.
fn write_kvzap(dir: &Path, config: &ModelConfig, seed: u64) -> PathBuf {
    let (path, heads, width) = (dir.join(format!("kvzap-{seed}")), config.num_kv_heads, config.embedding_len);
    let tensors: Vec<_> = global_layers(config)
        .flat_map(|layer| {
            let seed = seed * 1000 + 2 * layer as u64;
            [
                (format!("layers.{layer}.weight"), vec![heads, width], noise(seed, heads * width)),
                (format!("layers.{layer}.bias"), vec![heads], noise(seed + 1, heads)),
            ]
        })
        .collect();
    write(&path, &tensors);
    path
}

fn write_fast_kvzip(dir: &Path, config: &ModelConfig, seed: u64) -> PathBuf {
    let (path, heads, width) = (dir.join(format!("fast-kvzip-{seed}")), config.num_kv_heads, config.embedding_len);
    let (group_size, m, sinks) = (config.group_size(), 8, 5);
    let tensors: Vec<_> = global_layers(config)
        .flat_map(|layer| {
            [
                ("q_proj.weight", vec![heads * group_size * m, width]),
                ("q_proj.bias", vec![heads * group_size * m]),
                ("k_proj.weight", vec![heads * m, width]),
                ("q_norm.weight", vec![m]),
                ("k_norm.weight", vec![m]),
                ("k_base", vec![heads, 1, sinks, m]),
                ("b", vec![heads, 1, group_size]),
            ]
            .into_iter()
            .enumerate()
            .map(move |(index, (name, shape))| {
                let values = noise(seed * 1000 + (layer * 7 + index) as u64, shape.iter().product());
                (format!("layers.{layer}.{name}"), shape, values)
            })
        })
        .collect();
    write(&path, &tensors);
    path
}

fn request(seed: u64, len: usize, generate: usize, budget: &str, policy: &str) -> Request {
    let policy = Arc::from(parse_policy(policy).unwrap());
    Request {
        end_tokens: EndTokens::Ignore,
        eviction: Some(EvictionOptions { budget: budget.parse().unwrap(), policy }),
        ..Request::greedy(random_tokens(seed, len, 256), generate)
    }
}

/// Indices of the pages of every KV group of global layers.
fn tables(model: &Model, id: SequenceId) -> Vec<Vec<u32>> {
    let cache = model.engine.cache(id).unwrap();
    let table = |group: KvGroup| cache.table(group).iter().map(|page| page.index.0).collect();
    cache.shape().global_groups().map(table).collect()
}

/// Runs the requests side by side; the tokens of each and the pages it holds at the end. Where a budget caps something it holds
/// after every step.
fn run(model: &mut Model, requests: Vec<Request>) -> Vec<(Vec<u32>, Vec<Vec<u32>>)> {
    let ids: Vec<SequenceId> = requests.into_iter().map(|request| model.engine.submit(request).unwrap()).collect();
    while model.engine.is_busy() {
        model.engine.step().unwrap();
        for id in &ids {
            let kv = model.engine.kv_report(*id).unwrap();
            assert!(kv.bytes_held <= kv.bytes_budget.unwrap_or(u64::MAX));
        }
    }
    let outcomes = ids.iter().map(|&id| (model.engine.tokens(id).unwrap().to_vec(), tables(model, id))).collect();
    ids.into_iter().for_each(|id| model.engine.close(id));
    assert_eq!(model.engine.pool().used_bytes(), 0);
    outcomes
}

/// Requests of every policy of gates, with files in `dir`.
fn gated(dir: &Path, config: &ModelConfig) -> Vec<Request> {
    let zap = write_kvzap(dir, config, 1).display().to_string();
    let zip = write_fast_kvzip(dir, config, 2).display().to_string();
    vec![
        request(1, 260, 70, "30%", &format!("kvzap:gates={zap}")),
        request(2, 230, 70, "100%", &format!("kvzap:gates={zap},tau=7,window=20")),
        request(3, 200, 70, "8pages", &format!("kvzap:gates={zap},tau=6,window=9,allot=ada-floor:0.2")),
        request(10, 220, 70, "100%", &format!("kvzap:gates={zap},tau=3,window=20,granularity=token")),
        request(4, 290, 70, "40%", &format!("fast-kvzip:gates={zip}")),
        request(6, 250, 70, "100%", "dms:window=24,offset=-40"),
        request(7, 210, 70, "50%", &format!("dms:gates={zap},window=16,scale=1,offset=-6")),
        request(8, 240, 70, "60%", "duo-attention:sinks=4,recent=20tok"),
        request(9, 170, 70, "100%", "duo-attention:sinks=16,recent=32tok,streaming=0.5"),
        request(5, 180, 70, "7pages", &format!("fast-kvzip:gates={zip},window=40,allot=uniform")),
    ]
}

#[test]
fn sequences_of_gates_in_one_batch_are_each_as_alone() {
    for name in ["llama-tied", "gemma3"] {
        let (gguf, dir) = (gguf(name), tempfile::tempdir().unwrap());
        let requests = gated(dir.path(), &config(&gguf));
        let together = run(&mut open(&gguf, &options()), requests.clone());
        for (index, (request, together)) in requests.into_iter().zip(&together).enumerate() {
            let alone = run(&mut open(&gguf, &options()), vec![request]);
            assert_eq!(&alone[0], together, "{name}, {index}");
        }
    }
}

#[test]
fn chunks_and_threads_never_show_in_what_gates_say() {
    let (gguf, dir) = (gguf("qwen3-tied"), tempfile::tempdir().unwrap());
    let requests = gated(dir.path(), &config(&gguf));
    let whole = run(&mut open(&gguf, &options()), requests.clone());
    for (chunk, threads) in [(1, 1), (13, 2), (64, 3)] {
        let size = |n| NonZeroUsize::new(n).unwrap();
        let options = ModelOptions { chunk_size: size(chunk), threads: size(threads), ..options() };
        assert_eq!(run(&mut open(&gguf, &options), requests.clone()), whole, "chunks of {chunk}, {threads} threads");
    }
}

/// In the first layer a token's input is its embedding, normed: what the gate says there can be had from the file of the model.
#[test]
fn a_gate_is_asked_about_the_input_of_its_layer() {
    let (gguf, dir) = (gguf("llama-tied"), tempfile::tempdir().unwrap());
    let config = config(&gguf);
    let width = config.embedding_len;
    let path = write_kvzap(dir.path(), &config, 1);
    let policy = format!("kvzap:gates={}", path.display());
    let mut model = open(&gguf, &exact());
    let request = request(8, 320, 1, "6pages", &policy);
    let prompt = request.prompt.clone();
    let id = model.engine.submit(request).unwrap();
    model.engine.finish(id, &mut |_| ()).unwrap();
    let kept = tables(&model, id);

    let values = |name: &str| {
        let tensor = gguf.tensor(name).unwrap();
        let mut out = vec![0.0; tensor.shape.iter().product::<u64>() as usize];
        dequantize(tensor.weight_type, tensor.data, &mut out);
        out
    };
    let (embeddings, gains) = (values("token_embd.weight"), values("blk.0.attn_norm.weight"));
    // The gate of the first layer, as `write_kvzap` has seeded it.
    let (weights, bias) = (noise(1000, config.num_kv_heads * width), noise(1001, config.num_kv_heads));
    let input = |token: u32| -> Vec<f64> {
        let x: Vec<f64> = embeddings[token as usize * width..][..width].iter().map(|&x| f64::from(x)).collect();
        let mean = x.iter().map(|x| x * x).sum::<f64>() / width as f64;
        let inverse = 1.0 / (mean + f64::from(config.rms_epsilon)).sqrt();
        x.iter().zip(&gains).map(|(x, gain)| x * inverse * f64::from(*gain)).collect()
    };
    for head in 0..config.num_kv_heads {
        let said = |token: u32| {
            let weights = weights[head * width..][..width].iter().map(|&w| f64::from(w));
            weights.zip(input(token)).map(|(w, x)| w * x).sum::<f64>() + f64::from(bias[head])
        };
        let best = |page: usize| prompt[page * 16..][..16].iter().map(|&t| said(t)).fold(f64::MIN, f64::max);
        let mut pages: Vec<usize> = (0..20).collect();
        pages.sort_by(|&a, &b| best(b).total_cmp(&best(a)));
        assert!(best(pages[5]) - best(pages[6]) > 1e-4, "the cut is clear");
        let mut expected: Vec<u32> = pages[..6].iter().map(|&page| page as u32).collect();
        expected.sort_unstable();
        assert_eq!(kept[head], expected, "KV head {head}");
    }
}

#[test]
fn a_threshold_frees_what_a_budget_has_room_for_and_never_its_window() {
    let (gguf, dir) = (gguf("qwen3-untied"), tempfile::tempdir().unwrap());
    let path = write_kvzap(dir.path(), &config(&gguf), 3).display().to_string();
    let mut model = open(&gguf, &options());
    let mut held = Vec::new();
    for tau in ["-100", "7", "10", "100"] {
        let policy = format!("kvzap:gates={path},tau={tau},window=40");
        let id = model.engine.submit(request(4, 300, 90, "100%", &policy)).unwrap();
        model.engine.finish(id, &mut |_| ()).unwrap();
        let kv = model.engine.kv_report(id).unwrap();
        assert_eq!(kv.bytes_budget, None, "nothing is capped");
        held.push(kv.bytes_held);
        // 389 tokens; the window at the last decision, before page 24 was opened, began at 384 - 40.
        for table in tables(&model, id) {
            assert!(table.ends_with(&[21, 22, 23, 24]), "{tau}: {table:?}");
        }
        if tau == "100" {
            assert!(tables(&model, id).iter().all(|table| *table == [21, 22, 23, 24]));
            assert_eq!(kv.eviction.pages_evicted, 21 * tables(&model, id).len() as u64);
        }
        if tau == "-100" {
            assert_eq!((kv.bytes_held, kv.eviction.pages_evicted), (kv.bytes_full, 0));
        }
        model.engine.close(id);
    }
    assert!(held.is_sorted_by(|a, b| a > b), "{held:?}");
    // A page with one token worth keeping stays whole, unless tokens are decided about.
    let policy = format!("kvzap:gates={path},tau=7,window=40,granularity=token");
    let id = model.engine.submit(request(4, 300, 90, "100%", &policy)).unwrap();
    model.engine.finish(id, &mut |_| ()).unwrap();
    assert!(model.engine.kv_report(id).unwrap().bytes_held < held[1] / 2, "{held:?}");
}

#[test]
fn dms_frees_by_its_offset_and_hides_its_channel_from_attention() {
    let gguf = gguf("qwen3-untied");
    let mut model = open(&gguf, &options());
    let mut run = |request: Request| {
        let id = model.engine.submit(request).unwrap();
        model.engine.finish(id, &mut |_| ()).unwrap();
        let outcome = (model.engine.tokens(id).unwrap().to_vec(), tables(&model, id));
        model.engine.close(id);
        outcome
    };
    let full = run(Request { eviction: None, ..request(4, 300, 90, "100%", "dms") });
    // Of a large offset nothing is marked, and still the channel is hidden, prompt and answer.
    let (tokens, held) = run(request(4, 300, 90, "100%", "dms:window=40,offset=1e9"));
    assert_eq!(held, full.1);
    assert_ne!(tokens, full.0, "the channel of this model carries no decision and is missed");
    // Of a small one all is: what is left is the window.
    let (_, held) = run(request(4, 300, 90, "100%", "dms:window=40,offset=-1e9"));
    assert!(held.iter().all(|table| *table == [21, 22, 23, 24]), "{held:?}");
}

#[test]
fn a_further_turn_goes_on_with_what_gates_have_said() {
    let (gguf, dir) = (gguf("llama-tied"), tempfile::tempdir().unwrap());
    let config = config(&gguf);
    let zap = |seed| format!("kvzap:gates={}", write_kvzap(dir.path(), &config, seed).display());
    let (policy, other) = (zap(1), zap(2));
    let mut model = open(&gguf, &options());
    let prompt = random_tokens(9, 400, 256);
    let turn = |prompt: &[u32], budget: &str, policy: &str| Request {
        prompt: prompt.to_vec(),
        ..request(0, 1, 1, budget, policy)
    };
    let id = model.engine.submit(turn(&prompt[..250], "100%", &policy)).unwrap();
    let first = model.engine.finish(id, &mut |_| ()).unwrap().tokens[0];
    model.engine.extend(id, turn(&prompt[250..], "7pages", &policy)).unwrap();
    model.engine.finish(id, &mut |_| ()).unwrap();
    // The same tokens in one turn: the gates say the same of them, so the same pages stay.
    let tokens = [&prompt[..250], &[first], &prompt[250..]].concat();
    let whole = model.engine.submit(turn(&tokens, "7pages", &policy)).unwrap();
    model.engine.finish(whole, &mut |_| ()).unwrap();
    assert_eq!(tables(&model, id), tables(&model, whole));
    assert_eq!(model.engine.tokens(id), model.engine.tokens(whole));

    let refused = model.engine.extend(id, turn(&prompt[..9], "7pages", &other)).unwrap_err().to_string();
    assert_eq!(
        refused,
        "kvzap has not seen the 402 tokens before this turn; its gates must be those of every turn from the first"
    );
    model.engine.extend(id, turn(&prompt[..9], "7pages", "knorm")).unwrap();
    model.engine.finish(id, &mut |_| ()).unwrap();
    let refused = model.engine.extend(id, turn(&prompt[..9], "7pages", &policy)).unwrap_err().to_string();
    assert!(refused.starts_with("kvzap has not seen the 412 tokens"), "{refused}");
}

#[test]
fn gates_of_another_model_are_refused_and_nothing_is_held() {
    let dir = tempfile::tempdir().unwrap();
    let small = gguf("llama-tied");
    let mut other = config(&small);
    other.embedding_len += 32;
    let path = write_kvzap(dir.path(), &other, 1);
    let mut model = open(&small, &options());
    let refused = model.engine.submit(request(1, 50, 1, "50%", &format!("kvzap:gates={}", path.display())));
    let line = refused.unwrap_err().to_string();
    assert!(line.contains("tensor 'layers.0.weight' has shape") && !line.contains('\n'), "{line}");
    assert!(!model.engine.is_busy());
    assert_eq!(model.engine.pool().used_bytes(), 0);
}

/// A table that counts the heads: the first one streams first.
fn write_table(dir: &Path, config: &ModelConfig) -> PathBuf {
    let (path, heads) = (dir.join("pattern.tsv"), config.num_kv_heads);
    let num_heads = config.layers.len() * heads;
    let gate = |layer: usize, head: usize| ((layer * heads + head) as f32 / num_heads as f32).to_string();
    let line = |layer: usize| (0..heads).map(|head| gate(layer, head)).collect::<Vec<_>>().join("\t");
    std::fs::write(&path, (0..config.layers.len()).map(line).collect::<Vec<_>>().join("\n")).unwrap();
    path
}

#[test]
fn the_budget_says_how_many_heads_stream() {
    let (gguf, dir) = (gguf("qwen3-untied"), tempfile::tempdir().unwrap());
    let table = write_table(dir.path(), &config(&gguf)).display().to_string();
    let mut model = open(&gguf, &options());
    let num_groups = model.engine.shape().num_global_groups();
    // Five pages stream: one of sinks, and up to four that may hold 40 newest tokens.
    let policy = format!("duo-attention:table={table},sinks=4,recent=40tok");
    let mut last = 0;
    for budget in ["100%", "80%", "50%", "8pages", "30%"] {
        let id = model.engine.submit(request(4, 300, 90, budget, &policy)).unwrap();
        let mut streaming = Vec::new();
        while model.engine.is_busy() {
            model.engine.step().unwrap();
            let kv = model.engine.kv_report(id).unwrap();
            assert!(kv.bytes_held <= kv.bytes_budget.unwrap_or(u64::MAX), "{budget}");
            let all = model.engine.cache(id).unwrap().logical_len().div_ceil(16);
            let tables = tables(&model, id);
            // Those of the smallest gates come first, and the others hold everything.
            let count = tables.iter().take_while(|table| table.len() < all).count();
            assert!(tables[count..].iter().all(|table| table.len() == all), "{budget}: {tables:?}");
            streaming.push(count);
        }
        assert!(streaming.is_sorted(), "{budget}: who streams goes on: {streaming:?}");
        let count = streaming[streaming.len() - 1];
        assert!(count >= last && count <= num_groups, "{budget}: {count} after {last}");
        last = count;
        for table in &tables(&model, id)[..count] {
            assert_eq!(*table, [0, 21, 22, 23, 24], "{budget}: sinks and the newest");
        }
        if budget == "100%" {
            assert_eq!(count, 0);
        }
        model.engine.close(id);
    }
    assert!(last > 0);
    // Half of the heads, whatever room there is.
    let id = model.engine.submit(request(4, 300, 90, "100%", &format!("{policy},streaming=0.5"))).unwrap();
    model.engine.finish(id, &mut |_| ()).unwrap();
    let counts: Vec<usize> = tables(&model, id).iter().map(Vec::len).collect();
    let half = (num_groups as f64 / 2.0).round_ties_even() as usize;
    assert_eq!(counts, [vec![5; half], vec![25; num_groups - half]].concat());
    let kv = model.engine.kv_report(id).unwrap();
    assert_eq!(kv.bytes_held * 25 * num_groups as u64, kv.bytes_full * counts.iter().sum::<usize>() as u64);
    model.engine.close(id);
    let line = model.engine.submit(request(4, 300, 90, "4pages", &policy)).unwrap_err().to_string();
    assert!(line.contains("the smallest budget is 5pages"), "{line}");
}

#[test]
fn heads_that_streamed_go_on_in_a_further_turn() {
    let gguf = gguf("llama-tied");
    let mut model = open(&gguf, &options());
    let policy = "duo-attention:sinks=4,recent=20tok,streaming=0.5";
    let id = model.engine.submit(request(3, 200, 40, "100%", policy)).unwrap();
    model.engine.finish(id, &mut |_| ()).unwrap();
    let few = |model: &Model| -> Vec<bool> { tables(model, id).iter().map(|table| table.len() <= 4).collect() };
    let first = few(&model);
    assert!(first.contains(&true) && first.contains(&false));
    model.engine.extend(id, request(5, 150, 40, "100%", policy)).unwrap();
    model.engine.finish(id, &mut |_| ()).unwrap();
    assert_eq!(few(&model), first);
}
