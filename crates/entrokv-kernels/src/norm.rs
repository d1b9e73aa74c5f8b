//! To come: norm.
