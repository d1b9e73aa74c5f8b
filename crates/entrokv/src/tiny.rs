//! To come: tiny.
