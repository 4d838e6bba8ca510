//! The worker over real loopback gRPC, with a fake executor and with tiny real checkpoints.
#![expect(clippy::print_stdout, reason = "random tests print their seed")]

mod drain;
mod failures;
mod fake;
mod generate;
mod harness;
mod kv;
mod leaving;
mod model;
mod packed;
mod sim;
mod split;
mod stall;
