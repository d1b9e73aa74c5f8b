//! To come: detokenizer.
