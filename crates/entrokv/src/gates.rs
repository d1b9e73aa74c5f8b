//! Gates: learned maps that say of every token, from what the model feeds a layer, whether it will be needed.
//!
//! A gate has the model's width, so it is here and not with the policies: those see one number a token and KV head, which is
//! computed once, when the token is read, and is all that is kept (`GateScores`). A number depends on its token's input alone:
//! the same bits whatever the batch, the chunk and the threads.
//!
//! Files are of the safetensors format, with the tensors that the published modules have (`docs/policies.md`, "Gates"). Layers of
//! windows have no gate.

mod error;
mod fast_kvzip;
mod file;
mod head_gates;
mod head_table;
mod kvzap;
mod linear;
mod scores;

use std::path::Path;

use entrokv_cache::{GateTap, LayerKind};
use entrokv_kernels::compute::Compute;

pub use self::error::GatesError;
use self::fast_kvzip::FastKvzipGate;
use self::file::GateFile;
pub(crate) use self::head_gates::HeadGates;
use self::kvzap::KvzapGate;
pub(crate) use self::scores::GateScores;
use crate::config::ModelConfig;

/// The gates of a model's layers.
#[derive(Debug)]
pub struct Gates {
    /// Which they are.
    tap: GateTap,
    /// One a layer; none of window layers, and none at all where a channel of the queries is the gate.
    layers: Vec<Option<Gate>>,
    /// Gates of heads: known, or to be estimated by each sequence.
    heads: Option<HeadGates>,
}

#[derive(Debug)]
enum Gate {
    FastKvzip(FastKvzipGate),
    Kvzap(KvzapGate),
}

/// What of a layer a gate is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateInput {
    /// Nothing.
    None,
    /// The residual stream before the norm of the attention block.
    Residual,
    /// The same after it: what queries, keys and values are made of.
    Normed,
}

/// The sizes of a model that its gates must have.
#[derive(Clone, Copy, Debug)]
struct GateSizes {
    /// Width of the residual stream.
    hidden: usize,
    num_kv_heads: usize,
    group_size: usize,
}

impl Gates {
    /// The gates `tap` of the model of `config`, read from `path`.
    ///
    /// # Errors
    /// [`GatesError`] naming the tensor that does not fit the model.
    pub(crate) fn load(
        tap: GateTap,
        path: Option<&Path>,
        config: &ModelConfig,
        compute: &Compute,
    ) -> Result<Self, GatesError> {
        let sizes = GateSizes {
            hidden: config.embedding_len,
            num_kv_heads: config.num_kv_heads,
            group_size: config.group_size(),
        };
        Self::read(tap, path, &config.layers, sizes, compute)
    }

    fn read(
        tap: GateTap,
        path: Option<&Path>,
        kinds: &[LayerKind],
        sizes: GateSizes,
        compute: &Compute,
    ) -> Result<Self, GatesError> {
        let none = Self { tap, layers: Vec::new(), heads: None };
        if matches!(tap, GateTap::None | GateTap::QueryChannel) {
            return Ok(none);
        }
        if tap == GateTap::HeadEstimate {
            let num_layers = kinds.iter().filter(|kind| **kind == LayerKind::Global).count();
            return Ok(Self { heads: Some(HeadGates::to_be_read(num_layers)), ..none });
        }
        let path = path.ok_or(GatesError::NoFile)?;
        let read = |source| GatesError::Read { path: path.to_owned(), source };
        if tap == GateTap::HeadTable {
            let text = std::fs::read_to_string(path).map_err(read)?;
            let table = head_table::parse(path, &text, kinds.len(), sizes)?;
            return Ok(Self { heads: Some(HeadGates::given(&table, kinds)), ..none });
        }
        let bytes = std::fs::read(path).map_err(read)?;
        let mut file = GateFile::parse(path, &bytes, compute)?;
        let mut layers = Vec::with_capacity(kinds.len());
        // KVzap's modules are in a list that has had either name.
        let list = if tap != GateTap::FastKvzip && file.has_any("module_list") { "module_list" } else { "layers" };
        for (layer, kind) in kinds.iter().enumerate() {
            let stem = format!("{list}.{layer}");
            layers.push(match (kind, tap) {
                (LayerKind::Window(_), _) => {
                    file.skip(&stem);
                    None
                }
                (LayerKind::Global, GateTap::FastKvzip) => {
                    Some(Gate::FastKvzip(FastKvzipGate::load(&mut file, &stem, sizes)?))
                }
                (LayerKind::Global, _) => Some(Gate::Kvzap(KvzapGate::load(&mut file, &stem, sizes)?)),
            });
        }
        file.finish(kinds.len())?;
        Ok(Self { layers, ..none })
    }

    /// What the gate of `layer` is to be shown.
    pub(crate) fn input(&self, layer: usize) -> GateInput {
        match (self.layers.get(layer), self.tap) {
            (None | Some(None), _) => GateInput::None,
            (Some(Some(_)), GateTap::Projection) => GateInput::Residual,
            (Some(Some(_)), _) => GateInput::Normed,
        }
    }

    /// What the gate of `layer` says of tokens whose inputs are `x` `[tokens, hidden]`: `[tokens, num_kv_heads]`, and nothing
    /// where the layer has no gate.
    pub(crate) fn scores(&self, compute: &Compute, layer: usize, x: &[f32]) -> Vec<f32> {
        match self.layers.get(layer) {
            Some(Some(Gate::FastKvzip(gate))) => gate.scores(compute, x),
            Some(Some(Gate::Kvzap(gate))) => gate.scores(compute, x),
            None | Some(None) => Vec::new(),
        }
    }

    /// Whether they have a number for each token, which they must see to have.
    pub(crate) fn see_tokens(&self) -> bool {
        self.tap.sees_tokens()
    }

    /// Gates of heads, as a sequence begins with them.
    pub(crate) fn heads(&self) -> Option<HeadGates> {
        self.heads.clone()
    }

    /// Whether the last channel of the first query head of each KV head is the gate, and not the model's.
    pub(crate) fn is_query_channel(&self) -> bool {
        self.tap == GateTap::QueryChannel
    }
}

#[cfg(test)]
mod tests;
