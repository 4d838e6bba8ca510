//! Transfers between mock pools whose every byte is known.
#![expect(clippy::print_stdout, reason = "random tests print their seed")]

mod pair;
mod pool;
mod random;
mod source;
