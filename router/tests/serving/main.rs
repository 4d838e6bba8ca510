//! A router over loopback with workers whose tokens are known: both APIs, disconnects, losses, joins and leaves.
#![allow(clippy::unwrap_used, missing_docs, unreachable_pub, reason = "tests")]

mod admission;
mod client;
mod cluster;
mod errors;
mod grpc;
mod leaving;
mod migration;
mod openai;
mod place;
mod wish;
mod worker;
