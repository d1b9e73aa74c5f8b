//! The `entrokv` program.
fn main() {}
