//! To come: attention.
