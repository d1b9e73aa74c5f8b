//! To come: tokenizer.
