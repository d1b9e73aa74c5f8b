//! To come: arena.
