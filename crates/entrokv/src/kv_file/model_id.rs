//! What identifies a model: a hash of everything that decides its keys and values.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use thiserror::Error;
use twox_hash::XxHash3_128;

use crate::gguf::Gguf;

/// The identity of a model, the same for every file that computes the same keys and values.
///
/// It is XXH3 (128 bits) over `general.architecture`, the architecture's own metadata, and name, type, shape and *all*
/// bytes of every tensor, the entries sorted by name. So a fine-tune and another quantisation differ, also where they differ
/// in one number; a renamed file, a split one or one with another chat template does not.
///
/// It is a hash of accidents, not of malice: whoever wants two models of one identity can make them.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ModelId(u128);

impl ModelId {
    /// The identity of the model in `gguf`; reads every byte of it once, at several gigabytes a second.
    pub fn of(gguf: &Gguf) -> Self {
        let metadata = gguf.metadata();
        let architecture = metadata.str("general.architecture").unwrap_or_default();
        let decides = |key: &str| {
            key == "general.architecture" || key.strip_prefix(architecture).is_some_and(|rest| rest.starts_with('.'))
        };
        let mut hasher = Fields(XxHash3_128::new());
        for (key, value_type, value) in metadata.encoded().filter(|(key, ..)| decides(key)) {
            hasher.field(key.as_bytes());
            hasher.field(value_type.name().as_bytes());
            hasher.field(value);
        }
        // No key is empty here: where the tensors begin is beyond doubt.
        hasher.field(&[]);
        let mut tensors: Vec<_> = gguf.tensors().collect();
        tensors.sort_unstable_by_key(|tensor| tensor.name);
        for tensor in tensors {
            hasher.field(tensor.name.as_bytes());
            hasher.field(tensor.weight_type.name().as_bytes());
            hasher.count(tensor.shape.len());
            tensor.shape.iter().for_each(|&dim| hasher.count(dim as usize));
            hasher.field(tensor.data);
        }
        Self(hasher.0.finish_128())
    }
}

/// Hashes fields with their lengths, so that no two lists of fields are hashed alike.
struct Fields(XxHash3_128);

impl Fields {
    fn count(&mut self, count: usize) {
        self.0.write(&(count as u64).to_le_bytes());
    }

    fn field(&mut self, bytes: &[u8]) {
        self.count(bytes.len());
        self.0.write(bytes);
    }
}

/// 32 hexadecimal digits.
impl fmt::Display for ModelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for ModelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ModelId({self})")
    }
}

/// A text that is no identity.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("a model's identity is 32 hexadecimal digits, got {got:?}")]
pub struct ModelIdError {
    /// The text.
    pub got: String,
}

impl FromStr for ModelId {
    type Err = ModelIdError;

    fn from_str(text: &str) -> Result<Self, ModelIdError> {
        let digits = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let id = u128::from_str_radix(text, 16).ok().filter(|_| digits);
        id.map(Self).ok_or_else(|| ModelIdError { got: text.to_owned() })
    }
}

impl Serialize for ModelId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ModelId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}
