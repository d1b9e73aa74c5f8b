//! To come: weight_type.
