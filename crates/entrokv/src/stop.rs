//! To come: stop.
