//! How each process is configured, observed, secured and stopped.
//!
//! Every role links this crate and nothing in it knows a role: no model, no request and no text passes through here.
//! Time, randomness and spawned tasks enter the program only by [`clock`], [`random`] and [`task`].

pub mod address;
pub mod announce;
pub mod client;
pub mod clock;
pub mod config;
pub mod random;
pub mod server;
pub mod shutdown;
pub mod task;
pub mod telemetry;
