//! From a file to an engine: the one way a model is opened.

use std::io;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use entrokv_cache::{CacheShape, KindShapeError, PageKind, ShapeError};
use entrokv_kernels::activations::Arithmetic;
use entrokv_kernels::compute::Compute;
use entrokv_kernels::isa::Isa;

use crate::chat_template::{ChatTemplate, TemplateError};
use crate::config::{ConfigError, ModelConfig};
use crate::engine::{Engine, EngineOptions};
use crate::gguf::{Gguf, GgufError};
use crate::kv_file::ModelId;
use crate::model::Decoder;
use crate::probe;
use crate::repeat_instruction::RepeatInstruction;
use crate::store::Store;
use crate::tokenizer::{Tokenizer, TokenizerError};
use crate::weights::{Weights, WeightsError, rope_factors};

/// How to open a model.
#[derive(Clone, Debug)]
pub struct ModelOptions {
    /// Threads of every kernel.
    pub threads: NonZeroUsize,
    /// Instruction set of every kernel.
    pub isa: Isa,
    /// How activations meet quantised weights.
    pub arithmetic: Arithmetic,
    /// Tokens a page of the cache, 1 to 256.
    pub page_size: usize,
    /// How pages are stored.
    pub page_kind: PageKind,
    /// Prompt tokens a step.
    pub chunk_size: NonZeroUsize,
    /// Most tokens a sequence may have; the model's context where `None`.
    pub context_len: Option<usize>,
    /// Cap on the bytes of all pages; one full context where `None`, as it is written and as codes.
    pub pool_bytes: Option<u64>,
    /// Pre-tokenizer to use instead of the one the file names.
    pub pre_tokenizer: Option<String>,
    /// Whether the model is identified, which KV files need.
    pub identity: Identity,
    /// Questions that a model is asked about any text, for policies of `rows=probe`; ours where `None`.
    pub probe: Option<String>,
    /// Raised to stop a forward pass between layers.
    pub interrupt: Arc<AtomicBool>,
}

/// Whether a model is identified when it is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Identity {
    /// It is not: sequences can be neither saved nor loaded.
    #[default]
    Unknown,
    /// It is, by [`ModelId::of`], which reads all weights once more.
    Hashed,
}

impl Default for ModelOptions {
    /// All cores, the best instruction set, f16 pages of 16 tokens, chunks of 512.
    fn default() -> Self {
        Self {
            threads: std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN),
            isa: Isa::detect(),
            arithmetic: Arithmetic::Int8,
            page_size: 16,
            page_kind: PageKind::F16,
            chunk_size: NonZeroUsize::new(512).expect("512 is not 0"),
            context_len: None,
            pool_bytes: None,
            pre_tokenizer: None,
            identity: Identity::Unknown,
            probe: None,
            interrupt: Arc::new(AtomicBool::new(false)),
        }
    }
}

/// An opened model.
pub struct Model {
    /// Runs it.
    pub engine: Engine,
    /// Its tokenizer, which the engine shares.
    pub tokenizer: Arc<Tokenizer>,
    /// Its chat template, where the file has one.
    pub chat_template: Option<ChatTemplate>,
    /// Its geometry and constants.
    pub config: ModelConfig,
}

/// Why a model could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// Its metadata.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Its tensors.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// Its vocabulary.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// Its chat template.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// A page size or geometry the cache cannot hold.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// A geometry whose pages cannot be of the kind asked for.
    #[error(transparent)]
    PageKind(#[from] KindShapeError),
    /// Address space for the pages.
    #[error("cannot reserve {bytes} bytes for the KV cache ({source}); a smaller --ctx-size or --kv-pool needs less")]
    Reserve {
        /// Bytes asked for.
        bytes: u64,
        /// The system's reason.
        source: io::Error,
    },
}

impl Model {
    /// Opens the GGUF file at `path`; `progress` hears the share of the weights packed so far.
    ///
    /// # Errors
    /// [`LoadError`], a line that names what is wrong.
    pub fn open(path: &Path, options: &ModelOptions, progress: &mut dyn FnMut(f32)) -> Result<Self, LoadError> {
        Self::from_gguf(&Gguf::open(path)?, options, progress)
    }

    /// The same from a file already read (tiny models, tests).
    ///
    /// # Errors
    /// [`LoadError`].
    pub fn from_gguf(gguf: &Gguf, options: &ModelOptions, progress: &mut dyn FnMut(f32)) -> Result<Self, LoadError> {
        let metadata = gguf.metadata();
        let config = ModelConfig::from_metadata(metadata, rope_factors(gguf).as_deref())?;
        let tokenizer = Arc::new(Tokenizer::from_metadata(metadata, options.pre_tokenizer.as_deref())?);
        let chat_template = ChatTemplate::from_metadata(metadata, &tokenizer)?;
        let shape = Arc::new(config.cache_shape(options.page_size)?);
        let runner = decoder(gguf, &config, options, &shape, progress)?;
        let engine_options = EngineOptions {
            page_kind: options.page_kind,
            chunk_size: options.chunk_size,
            context_len: options.context_len,
            pool_bytes: pool_bytes(options, &config, &shape),
            model_id: match options.identity {
                Identity::Unknown => None,
                Identity::Hashed => Some(ModelId::of(gguf)),
            },
            repeat: RepeatInstruction::new(&tokenizer, chat_template.as_ref())?,
            probe: probe::tokens(&tokenizer, chat_template.as_ref(), options.probe.as_deref())?,
        };
        let engine = Engine::new(Box::new(runner), shape, Some(Arc::clone(&tokenizer)), engine_options);
        Ok(Self { engine, tokenizer, chat_template, config })
    }
}

/// The CPU runner of a file, without tokenizer or engine around it.
///
/// # Errors
/// [`LoadError`].
pub fn decoder(
    gguf: &Gguf,
    config: &ModelConfig,
    options: &ModelOptions,
    shape: &CacheShape,
    progress: &mut dyn FnMut(f32),
) -> Result<Decoder, LoadError> {
    options.page_kind.check(shape)?;
    // Who asks for f32 activations or an f32 cache wants to see what roundings cost: attention adds none of its own.
    let exact = options.arithmetic == Arithmetic::F32 || options.page_kind == PageKind::F32;
    let compute = Compute::new(if exact { options.isa.in_f32() } else { options.isa }, options.threads);
    let weights = Weights::load(gguf, config, &compute, progress)?;
    let bytes = pool_bytes(options, config, shape);
    let store = Store::reserve(bytes, shape.page_size, shape.head_dim)
        .map_err(|source| LoadError::Reserve { bytes, source })?;
    let interrupt = Arc::clone(&options.interrupt);
    Ok(Decoder::new(config.clone(), weights, compute, store, options.arithmetic, interrupt))
}

/// One full context by default: what a sequence that evicts nothing can grow to, and what its codes take beside it when
/// they are made.
fn pool_bytes(options: &ModelOptions, config: &ModelConfig, shape: &CacheShape) -> u64 {
    options.pool_bytes.unwrap_or_else(|| {
        let tokens = options.context_len.map_or(config.context_len, |len| len.min(config.context_len));
        let pages = tokens.div_ceil(shape.page_size) as u64;
        let kind = options.page_kind;
        let written = kind.written_as().page_bytes(shape) * shape.num_groups() as u64;
        let coded = if kind.is_coded() { kind.page_bytes(shape) * shape.num_global_groups() as u64 } else { 0 };
        pages * (written + coded)
    })
}
