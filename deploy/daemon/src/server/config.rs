//! The bounds of a server, and which of them make sense.

use serde::{Deserialize, Serialize};

use crate::config::at_least_one;

/// The bounds of a server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ServerConfig {
    /// Connections open at once; beyond it new ones are closed.
    #[serde(deserialize_with = "at_least_one")]
    pub n_connections_max: usize,
    /// Calls that run at once on one HTTP/2 connection; clients wait beyond it.
    #[serde(deserialize_with = "at_least_one")]
    pub n_streams_per_connection_max: u32,
    /// Calls and requests that run at once, streams included; beyond it they are refused with RESOURCE_EXHAUSTED or
    /// 503.
    #[serde(deserialize_with = "at_least_one")]
    pub n_requests_max: usize,
    /// Largest body of a plain HTTP request.
    pub body_bytes_max: usize,
    /// Longest wait for the head of a request, for the first piece of its body, and for each further piece of a gRPC
    /// call's first message or of a plain HTTP body.
    #[serde(deserialize_with = "at_least_one")]
    pub read_timeout_ms: u64,
    /// Time between HTTP/2 pings and TCP keepalive probes; TCP rounds it to seconds from 1 to 32767.
    #[serde(deserialize_with = "at_least_one")]
    pub keepalive_interval_ms: u64,
    /// A peer that is silent for this long after a ping is gone.
    #[serde(deserialize_with = "at_least_one")]
    pub keepalive_timeout_ms: u64,
    /// After the shutdown, time for which connections are still accepted while `/readyz` already says no.
    pub drain_delay_ms: u64,
    /// After that, longest time for running calls to end by themselves.
    pub grace_ms: u64,
}

/// A bound under which a server could do nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key} = {value} is out of range: give 1 or more")]
pub struct OutOfRange {
    /// Which bound.
    pub key: &'static str,
    /// What it was.
    pub value: u64,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            n_connections_max: 8_192,
            // One peer alone must not be able to take all the places.
            n_streams_per_connection_max: 1_024,
            n_requests_max: 16_384,
            body_bytes_max: 8 << 20,
            read_timeout_ms: 15_000,
            keepalive_interval_ms: 15_000,
            keepalive_timeout_ms: 15_000,
            drain_delay_ms: 0,
            grace_ms: 30_000,
        }
    }
}

impl ServerConfig {
    /// Checks the bounds; those read from a document were checked with it.
    ///
    /// # Errors
    /// Names the first bound that lets nothing through.
    pub fn validate(&self) -> Result<(), OutOfRange> {
        let count = |n| u64::try_from(n).unwrap_or(u64::MAX);
        let bounds = [
            ("n_connections_max", count(self.n_connections_max)),
            ("n_streams_per_connection_max", u64::from(self.n_streams_per_connection_max)),
            ("n_requests_max", count(self.n_requests_max)),
            ("read_timeout_ms", self.read_timeout_ms),
            ("keepalive_interval_ms", self.keepalive_interval_ms),
            ("keepalive_timeout_ms", self.keepalive_timeout_ms),
        ];
        match bounds.into_iter().find(|(_, value)| *value == 0) {
            Some((key, value)) => Err(OutOfRange { key, value }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;
    use crate::config::Document;

    #[derive(Debug, Default, Deserialize)]
    #[serde(default)]
    struct Role {
        server: ServerConfig,
    }

    #[test]
    fn bounds_that_starve_a_server_are_refused_with_their_key() {
        for key in [
            "n_connections_max",
            "n_streams_per_connection_max",
            "n_requests_max",
            "read_timeout_ms",
            "keepalive_interval_ms",
            "keepalive_timeout_ms",
        ] {
            let document = Document::load(None, &[format!("role.server.{key}=0")]).unwrap();
            let source = document.section::<Role>("role").unwrap_err().source().unwrap().to_string();
            assert!(source.contains(key) && source.contains("0 is out of range: give 1 or more"), "{source}");
        }
        for fine in ["drain_delay_ms=0", "grace_ms=0", "body_bytes_max=0", "read_timeout_ms=1"] {
            let document = Document::load(None, &[format!("role.server.{fine}")]).unwrap();
            document.section::<Role>("role").unwrap().value.server.validate().unwrap();
        }
        let error = ServerConfig { read_timeout_ms: 0, ..ServerConfig::default() }.validate().unwrap_err();
        assert_eq!(error.to_string(), "read_timeout_ms = 0 is out of range: give 1 or more");
    }

    #[test]
    fn one_connection_cannot_take_most_places() {
        let config = ServerConfig::default();
        assert!(config.n_streams_per_connection_max as usize * 8 <= config.n_requests_max);
    }
}
