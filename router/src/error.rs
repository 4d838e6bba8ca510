//! Why a router cannot run.

use contract::hash::HashKeyError;
use daemon::address::InvalidAddress;
use daemon::client::AddressError;
use daemon::server::{BindError, ServeError};
use thiserror::Error;

/// What ends a router, or keeps it from starting.
#[derive(Debug, Error)]
pub enum Error {
    /// The key is not of the form it must have; its value is not shown.
    #[error("router.hash_key {0}")]
    HashKey(HashKeyError),
    /// Something of the configuration is no address.
    #[error(transparent)]
    InvalidAddress(#[from] InvalidAddress),
    /// The waits before a lost watch is made anew have no range.
    #[error("router.workers.backoff_ms_min is {least}; give at most backoff_ms_max, which is {most}")]
    Backoff {
        /// The shortest.
        least: u64,
        /// The longest.
        most: u64,
    },
    /// No policy of that name.
    #[error("router.policy {name:?} is unknown; known are {known}")]
    Policy {
        /// The name given.
        name: String,
        /// The names there are.
        known: String,
    },
    /// The model's files cannot be opened.
    #[error("cannot open the model")]
    Model(#[from] models::OpenError),
    /// The model's tokenizer cannot be built.
    #[error("cannot build the tokenizer of {path}")]
    Text {
        /// The model.
        path: String,
        /// Why not.
        source: crate::text::TextError,
    },
    /// A value of the model does not fit where it goes.
    #[error("model value {what} = {value} is out of range")]
    ModelValue {
        /// Which.
        what: &'static str,
        /// Its value.
        value: usize,
    },
    /// The table of tenants cannot be used.
    #[error(transparent)]
    Tenants(#[from] crate::admission::TenantsError),
    /// A header's name is none.
    #[error("router.admission.tenant_header {name:?} is no name of a header; give one such as x-tenant")]
    TenantHeader {
        /// The name given.
        name: String,
    },
    /// An address cannot be listened on.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// A peer's address cannot be parsed.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// The servers cannot be built.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// Membership cannot be configured.
    #[error("cannot use membership")]
    Membership(#[from] membership::Error),
    /// A part of the router panicked.
    #[error("a part of the router failed")]
    Part(#[from] tokio::task::JoinError),
}
