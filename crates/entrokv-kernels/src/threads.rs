//! To come: threads.
