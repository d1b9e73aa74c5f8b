//! To come: matrix.
