//! Transfers between mock pools whose every byte is known.
#![expect(clippy::print_stdout, reason = "random tests print their seed")]

mod cancel;
mod faults;
mod interleavings;
mod pair;
mod pool;
mod processes;
mod proxy;
mod random;
mod reshard;
mod source;
