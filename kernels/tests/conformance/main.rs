//! One suite judges every implementation: scalar against formulas, all others against scalar.
#![allow(clippy::unwrap_used, clippy::print_stderr, missing_docs, unreachable_pub, reason = "tests")]

mod attention;
mod errors;
mod matmul;
mod operators;
mod quantised;
mod support;
