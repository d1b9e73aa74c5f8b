//! To come: sequence.
