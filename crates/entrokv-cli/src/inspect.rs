//! `entrokv inspect`: what a model is, what its cache costs, and what each budget keeps.

mod conversion;

use std::collections::BTreeMap;
use std::io::{self, Write};

use clap::Args;
use clap::builder::FalseyValueParser;
use entrokv::{Budget, CacheShape, Gguf, LayerKind, ModelConfig, PageKind, Question, rope_factors};
use serde::Serialize;

use crate::bench::mib;
use crate::cli::CacheDir;
use crate::failure::Failure;
use crate::model_args::{EvictionArgs, Fit, resolve};

use self::conversion::Conversion;

/// Budgets of the table.
const FRACTIONS: [&str; 5] = ["50%", "30%", "20%", "10%", "5%"];

/// Kinds of page whose bytes are shown, where the model's heads allow them.
const KINDS: [&str; 10] = ["f16", "f32", "bf16", "q8_0", "tq4", "tq3", "tq3v2", "tq2", "kivi4", "kivi2"];

const EXAMPLES: &str = "\
Examples:
  entrokv inspect smollm2-135m
  entrokv inspect model.gguf --prompt 4000,100000     what budgets keep of prompts of these lengths
  entrokv inspect model.gguf --kv-budget evict:0.9 --tokens 4096    one budget in every unit";

/// Which model.
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct InspectArgs {
    /// A GGUF file, or the name of a pulled model
    #[arg(env = "ENTROKV_MODEL", value_name = "MODEL")]
    model: String,
    /// Prompt lengths of the budget table, comma separated
    #[arg(
        short,
        long,
        env = "ENTROKV_PROMPT_TOKENS",
        value_name = "N,N",
        value_delimiter = ',',
        default_value = "1024,8192,32768"
    )]
    prompt: Vec<u64>,
    /// Length of the prompt that --kv-budget is converted for [default: those of --prompt]
    #[arg(long, env = "ENTROKV_TOKENS", value_name = "N", requires = "kv_budget")]
    tokens: Option<u64>,
    /// Tokens a page
    #[arg(long, env = "ENTROKV_PAGE_SIZE", value_name = "TOKENS", default_value = "16", value_parser = clap::value_parser!(u16).range(1..=256))]
    page_size: u16,
    /// Print one JSON object
    #[arg(long, env = "ENTROKV_JSON", value_parser = FalseyValueParser::new())]
    json: bool,
    #[command(flatten)]
    eviction: EvictionArgs,
}

#[derive(Serialize)]
struct Report {
    name: String,
    architecture: &'static str,
    file_bytes: u64,
    parameters: u64,
    layers: usize,
    global_layers: usize,
    window: Option<u32>,
    embedding_len: usize,
    ffn_len: usize,
    query_heads: usize,
    kv_heads: usize,
    group_size: usize,
    head_dim: usize,
    vocab_size: u64,
    context_len: usize,
    tied_output: bool,
    tensor_types: BTreeMap<&'static str, TypeRow>,
    kv: Vec<KvRow>,
    budgets: Vec<BudgetRow>,
    /// The budget asked about.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    conversions: Vec<Conversion>,
}

#[derive(Default, Serialize)]
struct TypeRow {
    tensors: u64,
    bytes: u64,
}

/// Cache bytes of one kind of page.
#[derive(Serialize)]
struct KvRow {
    kind: String,
    /// Of a page of one KV head.
    page_bytes: u64,
    /// Of a token in all global layers.
    bytes_per_token: u64,
    /// Most that window layers hold, whatever the length.
    window_bytes: u64,
}

#[derive(Serialize)]
struct BudgetRow {
    prompt_tokens: u64,
    budget: String,
    pages_per_group: u64,
    bytes: u64,
    bytes_full: u64,
}

/// Runs the command.
pub(crate) fn run(args: &InspectArgs, cache: &CacheDir) -> Result<(), Failure> {
    args.eviction.check(Question::Seen)?;
    let path = resolve(&args.model, cache)?;
    let gguf = Gguf::open(&path)?;
    let config = ModelConfig::from_metadata(gguf.metadata(), rope_factors(&gguf).as_deref())
        .map_err(|error| Failure::while_doing(path.display(), error))?;
    let shape = config.cache_shape(usize::from(args.page_size))?;
    let mut report = report(args, &gguf, &config, &shape)?;
    if let Some(options) = args.eviction.options(Question::Seen, Fit::Pages)? {
        let lengths = args.tokens.as_ref().map_or(args.prompt.as_slice(), std::slice::from_ref);
        for &tokens in lengths {
            report.conversions.push(Conversion::new(&options, &shape, tokens)?);
        }
    }
    let mut out = io::stdout().lock();
    if args.json {
        serde_json::to_writer(&mut out, &report)?;
        writeln!(out)?;
        return Ok(());
    }
    print(&mut out, &report)
}

fn report(args: &InspectArgs, gguf: &Gguf, config: &ModelConfig, shape: &CacheShape) -> Result<Report, Failure> {
    let mut tensor_types: BTreeMap<&'static str, TypeRow> = BTreeMap::new();
    let mut parameters = 0;
    for tensor in gguf.tensors() {
        let row = tensor_types.entry(tensor.weight_type.name()).or_default();
        row.tensors += 1;
        row.bytes += tensor.data.len() as u64;
        parameters += tensor.shape.iter().product::<u64>();
    }
    let window = config.layers.iter().find_map(|layer| match layer {
        LayerKind::Window(window) => Some(*window),
        LayerKind::Global => None,
    });
    let global_layers = config.layers.iter().filter(|layer| matches!(layer, LayerKind::Global)).count();
    let window_groups = ((config.layers.len() - global_layers) * config.num_kv_heads) as u64;
    let global_groups = (global_layers * config.num_kv_heads) as u64;
    let kinds = KINDS.map(|name| name.parse::<PageKind>());
    let kinds = kinds.into_iter().flatten().filter(|kind| kind.check(shape).is_ok());
    let kv = kinds.map(|kind| {
        let page_bytes = kind.page_bytes(shape);
        let pages = window.map_or(0, |window| u64::from(window).div_ceil(shape.page_size as u64) + 1);
        KvRow {
            kind: kind.to_string(),
            page_bytes,
            bytes_per_token: page_bytes / shape.page_size as u64 * global_groups,
            window_bytes: pages * kind.written_as().page_bytes(shape) * window_groups,
        }
    });
    let mut budgets = Vec::new();
    for &prompt_tokens in &args.prompt {
        for text in FRACTIONS {
            let budget: Budget = text.parse()?;
            let page_bytes = PageKind::F16.page_bytes(shape);
            let resolved = budget.resolve(shape, PageKind::F16, prompt_tokens as usize, &Default::default())?;
            budgets.push(BudgetRow {
                prompt_tokens,
                budget: text.to_string(),
                pages_per_group: resolved.pages_per_group as u64,
                bytes: resolved.bytes,
                bytes_full: prompt_tokens.div_ceil(shape.page_size as u64) * page_bytes * global_groups,
            });
        }
    }
    Ok(Report {
        name: config.name.clone(),
        architecture: config.architecture.name(),
        file_bytes: gguf.file_bytes(),
        parameters,
        layers: config.layers.len(),
        global_layers,
        window,
        embedding_len: config.embedding_len,
        ffn_len: config.ffn_len,
        query_heads: config.num_heads,
        kv_heads: config.num_kv_heads,
        group_size: config.group_size(),
        head_dim: config.head_dim,
        vocab_size: gguf.tensor("token_embd.weight").map_or(0, |tensor| tensor.rows() as u64),
        context_len: config.context_len,
        tied_output: gguf.tensor("output.weight").is_none(),
        tensor_types,
        kv: kv.collect(),
        budgets,
        conversions: Vec::new(),
    })
}

fn print(out: &mut impl Write, r: &Report) -> Result<(), Failure> {
    writeln!(
        out,
        "{} ({}), {:.1} M parameters, {}",
        r.name,
        r.architecture,
        r.parameters as f64 / 1e6,
        mib(r.file_bytes)
    )?;
    writeln!(
        out,
        "  layers          {} ({} global{})",
        r.layers,
        r.global_layers,
        r.window.map_or(String::new(), |w| format!(", the others see {w} tokens"))
    )?;
    writeln!(
        out,
        "  heads           {} query, {} KV (group size {}), {} wide",
        r.query_heads, r.kv_heads, r.group_size, r.head_dim
    )?;
    writeln!(out, "  widths          embedding {}, feed-forward {}", r.embedding_len, r.ffn_len)?;
    let tied = if r.tied_output { "tied output" } else { "untied output" };
    writeln!(out, "  vocabulary      {} tokens, {tied}", r.vocab_size)?;
    writeln!(out, "  context         {} tokens", r.context_len)?;
    for (name, row) in &r.tensor_types {
        writeln!(out, "  tensors {name:<8}{} ({})", row.tensors, mib(row.bytes))?;
    }
    writeln!(out, "\nKV cache")?;
    for row in &r.kv {
        let window = if row.window_bytes == 0 {
            String::new()
        } else {
            format!(", window layers at most {}", mib(row.window_bytes))
        };
        writeln!(
            out,
            "  {:<5} {} bytes a token, {} a page of one KV head{window}",
            row.kind, row.bytes_per_token, row.page_bytes
        )?;
    }
    if !r.conversions.is_empty() {
        return Ok(r.conversions.iter().try_for_each(|conversion| conversion.print(out))?);
    }
    writeln!(out, "\nBudgets (f16 pages, whole pages for each of the KV heads)")?;
    writeln!(out, "  {:>8} {:>12} {:>8} {:>16} {:>14}", "prompt", "full", "budget", "pages each", "bytes")?;
    for row in &r.budgets {
        let (full, bytes) = (mib(row.bytes_full), mib(row.bytes));
        writeln!(
            out,
            "  {:>8} {full:>12} {:>8} {:>16} {bytes:>14}",
            row.prompt_tokens, row.budget, row.pages_per_group
        )?;
    }
    Ok(())
}
