//! To come: config.
