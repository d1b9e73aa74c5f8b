//! What a KV file says of its sequence in words: the JSON under `entrokv-kv` in the container's metadata.

use std::sync::Arc;

use entrokv_cache::{CacheShape, EvictionPolicy, LayerKind, parse_policy};
use serde::{Deserialize, Serialize};

use super::{KvFileError, ModelId, Notes};
use crate::eviction::EvictionReport;
use crate::sequence::EvictionOptions;

/// The version of the format that is written, and the only one that is read.
pub(crate) const FORMAT_VERSION: u32 = 1;

/// The key of the metadata that the header is under, and so what every file begins with.
pub(super) const METADATA_KEY: &str = "entrokv-kv";

/// A sequence in words and numbers; its lists are tensors of their own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Header {
    /// Of the format.
    pub(crate) version: u32,
    /// What wrote the file; not read.
    pub(crate) writer: String,
    /// Whose cache it is.
    pub(crate) model: SavedModel,
    /// How its pages are stored, as `--cache-type` takes it.
    pub(crate) cache_type: String,
    /// Tokens whose keys and values have been computed; the rest of the tokens wait for the next turn.
    pub(crate) computed: usize,
    /// Where the last prompt ended: the tokens before it were read or to be read, those after it are the last answer.
    pub(crate) prompt_end: usize,
    /// Kinds of page there are, by which `pages.kind` counts; ascending.
    pub(crate) kinds: Vec<String>,
    /// Whether pages that should be codes are plain, because the pool had no room.
    pub(crate) behind: bool,
    /// The cap it lived under.
    pub(crate) eviction: Option<SavedCap>,
    /// What the saver noted.
    pub(crate) notes: Notes,
}

/// A model and the geometry of its cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedModel {
    /// Its name, for people.
    pub(crate) name: String,
    /// What identifies it.
    pub(crate) id: ModelId,
    /// Tokens that each layer's queries see, 0 for all.
    pub(crate) windows: Vec<u32>,
    /// KV heads of every layer.
    pub(crate) num_kv_heads: usize,
    /// Query heads that share one.
    pub(crate) group_size: usize,
    /// Elements of a key.
    pub(crate) head_dim: usize,
    /// Tokens a page.
    pub(crate) page_size: usize,
}

/// The cap of a sequence's last turn, and what it did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedCap {
    /// As `--policy` takes it.
    pub(crate) policy: String,
    /// As `--kv-budget` takes it.
    pub(crate) budget: String,
    /// Tokens of all prompts the budget was fixed for.
    pub(crate) prompt_tokens: usize,
    /// Pages each KV group may hold; none where nothing is capped, or the prompt was not read to its end.
    pub(crate) pages_per_group: Option<usize>,
    /// Their bytes.
    pub(crate) bytes: Option<u64>,
    /// Bytes held right after the prompt.
    pub(crate) held_after_prompt: Option<u64>,
    /// What eviction did so far, all turns counted.
    pub(crate) report: EvictionReport,
}

impl SavedModel {
    /// The model `name` with a cache of `shape`.
    pub(crate) fn new(name: &str, id: ModelId, shape: &CacheShape) -> Self {
        let window = |kind: &LayerKind| match *kind {
            LayerKind::Global => 0,
            LayerKind::Window(window) => window,
        };
        Self {
            name: name.to_owned(),
            id,
            windows: shape.layers.iter().map(window).collect(),
            num_kv_heads: shape.num_kv_heads,
            group_size: shape.group_size,
            head_dim: shape.head_dim,
            page_size: shape.page_size,
        }
    }

    /// Whether a cache of this model is one of `wanted`.
    ///
    /// # Errors
    /// The first thing that differs: the geometry, which says most, then the model, then the page size, which is an option.
    pub(crate) fn check(&self, wanted: &Self) -> Result<(), KvFileError> {
        let counts = [
            ("layers", self.windows.len(), wanted.windows.len()),
            ("KV heads", self.num_kv_heads, wanted.num_kv_heads),
            ("query heads per KV head", self.group_size, wanted.group_size),
            ("elements per head", self.head_dim, wanted.head_dim),
        ];
        let model = || self.name.clone();
        if let Some((what, got, wanted)) = counts.into_iter().find(|(_, got, wanted)| got != wanted) {
            return Err(KvFileError::Geometry { model: model(), what, got, wanted });
        }
        if let Some(layer) = (0..self.windows.len()).find(|&layer| self.windows[layer] != wanted.windows[layer]) {
            let (got, wanted) = (self.windows[layer], wanted.windows[layer]);
            return Err(KvFileError::Window { model: model(), layer, got, wanted });
        }
        if self.id != wanted.id {
            let wanted = (wanted.name.clone(), wanted.id);
            return Err(KvFileError::Model { got: (model(), self.id), wanted });
        }
        if self.page_size != wanted.page_size {
            return Err(KvFileError::PageSize { got: self.page_size, wanted: wanted.page_size });
        }
        Ok(())
    }
}

impl SavedCap {
    /// The cap in words, to go on with; under the policy `asked` for, where one was.
    ///
    /// # Errors
    /// [`KvFileError::Policy`] if another was asked for, [`KvFileError::UnknownPolicy`] if none was and this one does not parse.
    pub(crate) fn options(&self, asked: Option<&Arc<dyn EvictionPolicy>>) -> Result<EvictionOptions, KvFileError> {
        let got = || self.policy.clone();
        let policy = match asked {
            Some(policy) if policy.to_string() == self.policy => Arc::clone(policy),
            Some(policy) => return Err(KvFileError::Policy { got: got(), wanted: policy.to_string() }),
            None => parse_policy(&self.policy)
                .map(Arc::from)
                .map_err(|source| KvFileError::UnknownPolicy { got: got(), source })?,
        };
        let budget = self.budget.parse().map_err(|error| KvFileError::Malformed(format!("its budget: {error}")))?;
        Ok(EvictionOptions { budget, policy })
    }
}
