//! To come: store.
