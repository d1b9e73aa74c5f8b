//! To come: activations.
