//! To come: model.
