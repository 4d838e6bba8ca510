//! Membership without etcd: a store that the scheduler hosts, its gRPC service, and the client of it.
//!
//! The store lives in memory: a scheduler that was restarted begins with an empty one.
//! Members notice within a third of their lease and register again; watchers keep those missing for one lease.

mod client;
mod service;
mod store;
pub mod table;
#[cfg(test)]
mod tests;

pub(crate) use client::client;
pub use service::Service;
pub use store::Store;
