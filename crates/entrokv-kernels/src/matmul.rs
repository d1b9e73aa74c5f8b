//! To come: matmul.
