//! To come: gguf.
