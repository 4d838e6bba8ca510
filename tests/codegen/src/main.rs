//! Regenerates the committed wire code.

fn main() {}
