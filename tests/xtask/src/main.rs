//! Setup, serve, test, tidy, ci.

fn main() {}
