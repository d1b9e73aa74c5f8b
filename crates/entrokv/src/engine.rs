//! To come: engine.
