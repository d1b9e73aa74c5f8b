//! To come: pull.
