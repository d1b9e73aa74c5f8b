//! To come: compute.
