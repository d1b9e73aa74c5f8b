//! To come: eviction.
