//! To come: rope.
