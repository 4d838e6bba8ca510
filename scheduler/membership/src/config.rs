//! Which store, where, and for how long a lease lives.

use std::time::Duration;

use daemon::address::check_peers;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::etcd;

/// Longest id of a member, in bytes.
const ID_BYTES_MAX: usize = 128;
/// Shortest lease.
const TTL_MS_MIN: u64 = 100;
/// Longest lease.
const TTL_MS_MAX: u64 = 3_600_000;

/// The kinds of store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Hosted by the scheduler, over gRPC.
    #[default]
    Embedded,
    /// An etcd cluster, API 3.4.
    Etcd,
}

/// How a process reaches membership.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MembershipConfig {
    /// Which store.
    pub kind: Kind,
    /// Where it listens. Empty means, for the embedded store, where the document says that schedulers are; else the store's usual
    /// address on this machine.
    pub endpoints: Vec<String>,
    /// Under which key etcd keeps the members.
    pub prefix: String,
    /// Life of a lease without a sign of life; etcd rounds it up to seconds and keeps none shorter than 2 s.
    pub ttl_ms: u64,
}

impl Default for MembershipConfig {
    fn default() -> Self {
        Self { kind: Kind::Embedded, endpoints: Vec::new(), prefix: "/tessera/v1/members".to_owned(), ttl_ms: 5_000 }
    }
}

impl MembershipConfig {
    /// Life of a lease without a sign of life.
    #[must_use]
    pub fn ttl(&self) -> Duration {
        Duration::from_millis(self.ttl_ms)
    }

    /// Checks what can be judged before anything is opened.
    ///
    /// # Errors
    /// The first value that cannot work.
    pub fn check(&self) -> Result<(), Error> {
        check_ttl(self.ttl())?;
        match self.kind {
            Kind::Embedded => Ok(check_peers("membership.endpoints", &self.endpoints_or_default())?),
            Kind::Etcd => etcd::check(self),
        }
    }

    /// Configured endpoints, or where the store listens by default.
    pub(crate) fn endpoints_or_default(&self) -> Vec<String> {
        match (self.endpoints.is_empty(), self.kind) {
            (false, _) => self.endpoints.clone(),
            (true, Kind::Embedded) => vec!["127.0.0.1:50050".to_owned()],
            (true, Kind::Etcd) => vec!["http://127.0.0.1:2379".to_owned()],
        }
    }
}

/// Checks that `id` can be part of a key and of a metric's label.
///
/// # Errors
/// Says what is wrong with it.
pub fn check_id(id: &str) -> Result<(), Error> {
    let reason = match id {
        "" => "is empty",
        _ if id.len() > ID_BYTES_MAX => "is longer than 128 bytes",
        _ if id.contains('/') || id.chars().any(char::is_control) => "contains '/' or a control character",
        _ if id.trim() != id => "begins or ends with a blank",
        _ => return Ok(()),
    };
    let shown = id.chars().take(ID_BYTES_MAX).collect();
    Err(Error::Id { id: shown, reason })
}

/// Checks that a lease of `ttl` can be kept.
pub(crate) fn check_ttl(ttl: Duration) -> Result<(), Error> {
    if (Duration::from_millis(TTL_MS_MIN)..=Duration::from_millis(TTL_MS_MAX)).contains(&ttl) {
        return Ok(());
    }
    Err(Error::Ttl { ttl_ms: ttl.as_millis(), min_ms: TTL_MS_MIN, max_ms: TTL_MS_MAX })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_that_would_break_a_key_are_refused() {
        for id in ["", "a/b", "a\n", " a", "a ", &"x".repeat(129)] {
            assert!(check_id(id).is_err(), "{id:?}");
        }
        check_id("worker-0.rack 7:50052").unwrap();
    }

    #[test]
    fn leases_are_neither_too_short_nor_too_long() {
        assert!(check_ttl(Duration::from_millis(99)).is_err());
        assert!(check_ttl(Duration::from_secs(3_601)).is_err());
        check_ttl(MembershipConfig::default().ttl()).unwrap();
    }
}
