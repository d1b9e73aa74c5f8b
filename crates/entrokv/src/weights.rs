//! To come: weights.
