//! To come: activation.
