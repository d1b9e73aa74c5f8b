//! To come: isa.
