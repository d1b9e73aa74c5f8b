//! Flags that open a model and cap its cache, shared by every command that runs one.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, ValueEnum};
use entrokv::Isa;
use entrokv::{
    AUTO, Arithmetic, Budget, CacheShape, Encoding, Engine, EvictionOptions, EvictionPolicy, Identity, KvReport,
    LeastBudget, LoadError, LoadOptions, Model, ModelOptions, PageKind, Question, Ratio, StepReads, parse_policy,
    recipe, recipe_fits,
};

use crate::bench::mib;
use crate::cli::CacheDir;
use crate::failure::Failure;
use crate::interrupt;
use crate::progress::Progress;

/// Name of the policy used when only a budget is given for a cache that cannot be stored as the recipe says.
const DEFAULT_POLICY: &str = "page-entro-kv:preset=serving";

/// Resolution of the loading bar.
const LOADING_STEPS: u64 = 100;

/// Which model, and how to run it.
#[derive(Args, Clone, Debug)]
pub(crate) struct ModelArgs {
    /// A GGUF file, or the name of a pulled model
    #[arg(short, long, env = "ENTROKV_MODEL", value_name = "MODEL")]
    pub(crate) model: String,
    #[command(flatten)]
    pub(crate) run: RunArgs,
}

/// How to run a model.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Running the model")]
pub(crate) struct RunArgs {
    /// Threads [default: all cores]
    #[arg(short, long, env = "ENTROKV_THREADS", value_name = "N", value_parser = parse_threads)]
    pub(crate) threads: Option<NonZeroUsize>,
    /// Most tokens of a sequence [default: the model's context]
    #[arg(short, long, env = "ENTROKV_CTX_SIZE", value_name = "TOKENS", visible_alias = "max-model-len")]
    pub(crate) ctx_size: Option<NonZeroUsize>,
    /// Prompt tokens read in one step; any number gives the same answer, to the bit
    #[arg(
        short = 'b',
        long,
        env = "ENTROKV_CHUNK_SIZE",
        value_name = "TOKENS",
        default_value = "512",
        visible_alias = "batch-size"
    )]
    pub(crate) chunk_size: NonZeroUsize,
    /// Tokens a page of the cache, 1 to 256
    #[arg(long, env = "ENTROKV_PAGE_SIZE", value_name = "TOKENS", default_value = "16", visible_alias = "block-size", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) page_size: u16,
    /// How the cache is stored: f32, f16, bf16; q8_0, tq4, tq3, tq2, kivi4, kivi2 (codes of about so many bits); pairs of keys and values such as tq3v2 or q8_0/tq4
    #[arg(long, env = "ENTROKV_CACHE_TYPE", value_name = "TYPE", default_value = "f16", visible_alias = "kv-cache-dtype", value_parser = parse_kind)]
    pub(crate) cache_type: PageKind,
    /// How keys are stored [default: as --cache-type says]
    #[arg(short = 'k', long, env = "ENTROKV_CACHE_TYPE_K", value_name = "TYPE", value_parser = parse_encoding)]
    pub(crate) cache_type_k: Option<Encoding>,
    /// How values are stored [default: as --cache-type says]
    #[arg(short = 'v', long, env = "ENTROKV_CACHE_TYPE_V", value_name = "TYPE", value_parser = parse_encoding)]
    pub(crate) cache_type_v: Option<Encoding>,
    /// Cap on the bytes of all pages, such as 512MiB [default: one full context]
    #[arg(long, env = "ENTROKV_KV_POOL", value_name = "BYTES", visible_alias = "kv-cache-memory-bytes", value_parser = parse_bytes)]
    pub(crate) kv_pool: Option<u64>,
    /// Questions that any text may be asked, for policies of rows=probe and auto:pass=probe: a text file [default: a few of our own]
    #[arg(long, env = "ENTROKV_KV_PROBE", value_name = "FILE", value_parser = read_probe)]
    kv_probe: Option<String>,
    /// Pre-tokenizer to use instead of the one the file names
    #[arg(long, env = "ENTROKV_PRE", value_name = "NAME")]
    pub(crate) pre: Option<String>,
    /// Instruction set of the kernels: scalar, avx2, avxvnni, avx512, avx512bf16, amx [default: the best this CPU has]
    #[arg(long, env = "ENTROKV_ISA", value_name = "ISA", value_parser = parse_isa)]
    pub(crate) isa: Option<Isa>,
    /// How activations meet quantised weights
    #[arg(long, env = "ENTROKV_ACTIVATIONS", value_enum, default_value = "int8")]
    pub(crate) activations: Activations,
}

/// Spelling of [`Arithmetic`] on the command line.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Activations {
    /// Rounded to 8 bits per block of 32: fast
    Int8,
    /// As they are: slow, and exact but for the weights
    F32,
}

/// More threads than any machine this runs on has cores; beyond it a typing error would exhaust the system.
const MAX_THREADS: usize = 1024;

fn parse_threads(text: &str) -> Result<NonZeroUsize, String> {
    let threads = text.parse::<NonZeroUsize>().ok().filter(|threads| threads.get() <= MAX_THREADS);
    threads.ok_or_else(|| format!("expected 1 to {MAX_THREADS} threads"))
}

pub(crate) fn parse_kind(text: &str) -> Result<PageKind, String> {
    text.parse().map_err(|error| format!("{error}"))
}

fn parse_encoding(text: &str) -> Result<Encoding, String> {
    text.parse().map_err(|error| format!("{error}"))
}

/// Reads the questions in the file at `path`.
fn read_probe(path: &str) -> Result<String, String> {
    let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
    if text.trim().is_empty() { Err("there are no questions in it".to_string()) } else { Ok(text) }
}

fn parse_isa(text: &str) -> Result<Isa, String> {
    Isa::named(text).map_err(|error| error.to_string())
}

/// Reads a number of bytes with the suffixes budgets use.
pub(crate) fn parse_bytes(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(Budget::Bytes(bytes)) => Ok(bytes),
        Ok(_) => Err("expected bytes, such as 64MiB or 2GiB".to_string()),
        Err(error) => Err(format!("{error}")),
    }
}

impl ModelArgs {
    /// Opens the model, with a progress bar when that takes over a second.
    pub(crate) fn open(&self, cache: &CacheDir) -> Result<Model, Failure> {
        self.run.open(&self.path(cache)?)
    }

    /// The model's file.
    pub(crate) fn path(&self, cache: &CacheDir) -> Result<PathBuf, Failure> {
        resolve(&self.model, cache)
    }
}

/// The file of a path or a pulled name.
pub(crate) fn resolve(model: &str, cache: &CacheDir) -> Result<PathBuf, Failure> {
    Ok(entrokv::pull::resolve(model, &cache.path()?)?)
}

impl RunArgs {
    /// The library's options.
    pub(crate) fn options(&self) -> ModelOptions {
        let defaults = ModelOptions::default();
        ModelOptions {
            threads: self.threads.unwrap_or(defaults.threads),
            isa: self.isa.unwrap_or(defaults.isa),
            arithmetic: match self.activations {
                Activations::Int8 => Arithmetic::Int8,
                Activations::F32 => Arithmetic::F32,
            },
            page_size: usize::from(self.page_size),
            page_kind: PageKind {
                keys: self.cache_type_k.unwrap_or(self.cache_type.keys),
                values: self.cache_type_v.unwrap_or(self.cache_type.values),
            },
            chunk_size: self.chunk_size,
            context_len: self.ctx_size.map(NonZeroUsize::get),
            pool_bytes: self.kv_pool,
            pre_tokenizer: self.pre.clone(),
            identity: Identity::Unknown,
            probe: self.kv_probe.clone(),
            interrupt: interrupt::flag(),
        }
    }

    /// Opens the file at `path`.
    pub(crate) fn open(&self, path: &Path) -> Result<Model, Failure> {
        self.identified(path, Identity::Unknown)
    }

    /// The same, identified where KV files need that.
    pub(crate) fn identified(&self, path: &Path, identity: Identity) -> Result<Model, Failure> {
        let options = ModelOptions { identity, ..self.options() };
        let bar = Progress::steps("loading", LOADING_STEPS);
        let mut progress = |share: f32| bar.set((share * LOADING_STEPS as f32) as u64);
        Model::open(path, &options, &mut progress).map_err(|error| match error {
            // It names the file itself, which may be another part of a split model.
            LoadError::Gguf(error) => error.into(),
            error => Failure::while_doing(path.display(), error),
        })
    }
}

/// The cap on a sequence's cache.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Capping the KV cache")]
pub(crate) struct EvictionArgs {
    /// Most the cache may hold once the prompt is read: 20% or 1/5 (of the prompt's full cache; 100% and more caps nothing), 64MiB (whole sequence), 512tok or 40pages (each KV head), evict:0.8 (what goes, as kvpress counts)
    #[arg(long, env = "ENTROKV_KV_BUDGET", value_name = "BUDGET", value_parser = parse_budget)]
    pub(crate) kv_budget: Option<Budget>,
    /// What decides which pages stay: none, or one that `entrokv policies` lists, with options such as page-entro-kv:tau=0.5,row=window:32,schedule=once auto is a recipe by budget that codes, packs and evicts (docs/small-caches.md) [default: auto when a budget is given; page-entro-kv:preset=serving for caches that auto cannot code, and those saved as KV files]
    #[arg(long, env = "ENTROKV_POLICY", value_name = "POLICY", value_parser = parse_policy_flag)]
    pub(crate) policy: Option<PolicyFlag>,
}

pub(crate) fn parse_budget(text: &str) -> Result<Budget, String> {
    text.parse().map_err(|error| format!("{error}"))
}

/// What the default policy may do with a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fit {
    /// Store its pages as the recipe says.
    Tiers,
    /// Evict pages as they are.
    Pages,
}

impl Fit {
    /// For caches of `shape`, written as `kind`.
    pub(crate) fn of(shape: &CacheShape, kind: PageKind) -> Self {
        if recipe_fits(shape, kind) { Self::Tiers } else { Self::Pages }
    }

    /// For sequences of `engine`.
    pub(crate) fn of_engine(engine: &Engine) -> Self {
        Self::of(engine.shape(), engine.page_kind())
    }
}

/// A policy by name, already known to parse.
#[derive(Clone, Debug)]
pub(crate) enum PolicyFlag {
    /// Keep everything.
    None,
    /// The recipe, with what is to be replaced in it.
    Auto(String),
    /// The text of a policy.
    Named(String),
}

fn parse_policy_flag(text: &str) -> Result<PolicyFlag, String> {
    if text == "none" {
        return Ok(PolicyFlag::None);
    }
    if text.split(':').next() == Some(AUTO) {
        let budget = Budget::Fraction(Ratio::ONE);
        // Options are those of either policy it may stand for; which, each command says.
        let policy_for = |question| recipe(text, budget, question).and_then(|policy| parse_policy(&policy));
        let policy = policy_for(Question::Seen).or_else(|_| policy_for(Question::Later));
        return policy.map(|_| PolicyFlag::Auto(text.to_string())).map_err(|error| error.to_string());
    }
    parse_policy(text).map(|_| PolicyFlag::Named(text.to_string())).map_err(|error| error.to_string())
}

impl EvictionArgs {
    /// Refuses flags that go together with no model.
    pub(crate) fn check(&self, question: Question) -> Result<(), Failure> {
        self.options(question, Fit::Tiers).map(drop)
    }

    /// The library's options; `None` keeps the whole cache. `question` says what a recipe may score by, `fit` what the default is.
    pub(crate) fn options(&self, question: Question, fit: Fit) -> Result<Option<EvictionOptions>, Failure> {
        self.continuing(None, question, fit)
    }

    /// The same for a prompt of so many tokens in `engine`: a recipe goes by the part of its cache that the budget is.
    pub(crate) fn for_prompt(
        &self,
        question: Question,
        fit: Fit,
        engine: &Engine,
        tokens: usize,
    ) -> Result<Option<EvictionOptions>, Failure> {
        let Some(budget) = self.kv_budget else { return self.options(question, fit) };
        let part = budget.of_prompt(engine.shape(), engine.page_kind(), tokens);
        let options = Self { kv_budget: Some(part), policy: self.policy.clone() }.options(question, fit)?;
        Ok(options.map(|options| EvictionOptions { budget, ..options }))
    }

    /// The same for a sequence that lived under the cap `saved`: what no flag says stays.
    pub(crate) fn continuing(
        &self,
        saved: Option<&EvictionOptions>,
        question: Question,
        fit: Fit,
    ) -> Result<Option<EvictionOptions>, Failure> {
        let budget = self.kv_budget.or(saved.map(|saved| saved.budget));
        let policy = match (budget, &self.policy) {
            (None, None | Some(PolicyFlag::None)) => return Ok(None),
            (None, Some(PolicyFlag::Auto(name))) => {
                return Err(Failure::Usage(format!("--policy {name} needs --kv-budget, such as --kv-budget 20%")));
            }
            (None, Some(PolicyFlag::Named(name))) => {
                let policy = named(name)?;
                if policy.least_budget() == LeastBudget::Everything {
                    return Ok(Some(EvictionOptions { budget: Budget::Fraction(Ratio::ONE), policy }));
                }
                return Err(Failure::Usage(format!("--policy {name} needs --kv-budget, such as --kv-budget 20%")));
            }
            (Some(budget), Some(PolicyFlag::None)) => {
                return Err(Failure::Usage(format!(
                    "--policy none keeps everything and cannot keep a budget of {budget}"
                )));
            }
            (Some(budget), None) => match saved {
                Some(saved) => Arc::clone(&saved.policy),
                // A cache of which everything may stay is left as it is written.
                None if fit == Fit::Tiers && !budget.is_everything() => named(&expanded(AUTO, budget, question)?)?,
                None => named(DEFAULT_POLICY)?,
            },
            (Some(_), Some(PolicyFlag::Named(name))) => named(name)?,
            (Some(budget), Some(PolicyFlag::Auto(text))) => named(&expanded(text, budget, question)?)?,
        };
        Ok(budget.map(|budget| EvictionOptions { budget, policy }))
    }

    /// Says on stderr what a recipe has come to.
    pub(crate) fn announce(&self, eviction: Option<&EvictionOptions>) {
        let Some(EvictionOptions { budget, policy }) = eviction else { return };
        let is_recipe = match &self.policy {
            Some(PolicyFlag::Auto(_)) => true,
            Some(_) => false,
            None => policy.tiers().is_some(),
        };
        if is_recipe {
            eprintln!("auto under {budget}: {policy}");
        }
    }

    /// What these flags ask of a KV file.
    pub(crate) fn load_options(&self) -> Result<LoadOptions, Failure> {
        let policy = match &self.policy {
            None | Some(PolicyFlag::None) => None,
            Some(PolicyFlag::Named(name)) => Some(named(name)?),
            Some(PolicyFlag::Auto(text)) => {
                let budget = self.kv_budget.unwrap_or(Budget::Fraction(Ratio::ONE));
                Some(named(&expanded(text, budget, Question::Seen)?)?)
            }
        };
        Ok(LoadOptions { policy })
    }
}

/// What the recipe `text` comes to.
fn expanded(text: &str, budget: Budget, question: Question) -> Result<String, Failure> {
    recipe(text, budget, question).map_err(|error| Failure::Usage(error.to_string()))
}

fn named(policy: &str) -> Result<Arc<dyn EvictionPolicy>, Failure> {
    parse_policy(policy).map(Arc::from).map_err(|error| Failure::Usage(error.to_string()))
}

/// What to tell of a policy that has a step read some of the pages, or frees nothing.
pub(crate) fn policy_note(policy: &dyn EvictionPolicy, reads: Option<StepReads>) -> Option<String> {
    let reads = reads.map(|StepReads { pages_read, pages_held }| format!("reads {pages_read} of {pages_held} pages"));
    let frees = (policy.least_budget() == LeastBudget::Everything).then(|| "frees nothing".to_owned());
    let said: Vec<String> = reads.into_iter().chain(frees).collect();
    (!said.is_empty()).then(|| format!("note: {} {}", policy.name(), said.join(", ")))
}

/// What to tell when a budget was below what the policy's options pin.
pub(crate) fn raised_note(kv: &KvReport) -> String {
    let budget = kv.bytes_budget.unwrap_or(kv.bytes_held);
    format!("note: the budget was below the pinned pages and was raised to {}", mib(budget))
}
