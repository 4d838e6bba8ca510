//! Mistakes that no retry cures.

use contract::view::MemberKey;
use daemon::address::InvalidAddress;
use thiserror::Error;

/// Why membership cannot be used as asked; an unreachable store is none of these.
#[derive(Debug, Error)]
pub enum Error {
    /// An endpoint that no client can be made for: correct it.
    #[error("membership endpoint {endpoint:?}: {reason}")]
    Endpoint {
        /// As configured.
        endpoint: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A scheduler's address that is none: correct it.
    #[error(transparent)]
    InvalidAddress(#[from] InvalidAddress),
    /// A prefix under which no key can be kept: correct it.
    #[error("membership prefix {prefix:?} must start with '/' and not end with it")]
    Prefix {
        /// As configured.
        prefix: String,
    },
    /// An id that cannot name a member: choose another.
    #[error("member id {id:?}: {reason}")]
    Id {
        /// The id.
        id: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A time to live that no store keeps: choose another.
    #[error("ttl_ms, the life of a lease, is {ttl_ms}; give {min_ms} to {max_ms}")]
    Ttl {
        /// Asked for.
        ttl_ms: u128,
        /// Shortest.
        min_ms: u64,
        /// Longest.
        max_ms: u64,
    },
    /// A lease belongs to one life of one member: register the other.
    #[error("the lease of {ours:?} cannot hold {theirs:?}")]
    OtherMember {
        /// Whom the lease is for.
        ours: MemberKey,
        /// Whom it was asked to hold.
        theirs: MemberKey,
    },
}
