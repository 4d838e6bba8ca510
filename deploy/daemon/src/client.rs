//! Channels to other roles: no Nagle, bounded connect time, dead peers noticed.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tonic::transport::{Channel, Endpoint};

/// How a channel connects and notices that its peer is gone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ChannelOptions {
    /// Longest time to make a connection.
    pub connect_timeout_ms: u64,
    /// Time between HTTP/2 pings, also while no call runs.
    pub keepalive_interval_ms: u64,
    /// A ping unanswered for this long ends the connection and every call on it.
    pub keepalive_timeout_ms: u64,
}

impl Default for ChannelOptions {
    fn default() -> Self {
        Self { connect_timeout_ms: 2_000, keepalive_interval_ms: 5_000, keepalive_timeout_ms: 5_000 }
    }
}

/// An address no channel can be made for.
#[derive(Debug, thiserror::Error)]
#[error("{address:?} is not an address: give HOST:PORT or http://HOST:PORT")]
pub struct AddressError {
    address: String,
    source: tonic::transport::Error,
}

/// Makes a channel to `address` (`HOST:PORT` or a URL) that connects with its first call and reconnects by itself.
///
/// # Errors
/// When `address` cannot be parsed; whether someone listens there is seen by the first call.
pub fn channel(address: &str, options: &ChannelOptions) -> Result<Channel, AddressError> {
    let url = if address.contains("://") { address.to_owned() } else { format!("http://{address}") };
    let endpoint = Endpoint::from_shared(url).map_err(|source| AddressError { address: address.to_owned(), source })?;
    let keepalive_interval = Duration::from_millis(options.keepalive_interval_ms);
    Ok(endpoint
        .tcp_nodelay(true)
        .tcp_keepalive(Some(keepalive_interval))
        .connect_timeout(Duration::from_millis(options.connect_timeout_ms))
        .http2_keep_alive_interval(keepalive_interval)
        .keep_alive_timeout(Duration::from_millis(options.keepalive_timeout_ms))
        .keep_alive_while_idle(true)
        .connect_lazy())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn takes_host_and_port_or_a_url_and_refuses_nonsense() {
        let options = ChannelOptions::default();
        channel("127.0.0.1:1", &options).unwrap();
        channel("http://[::1]:1", &options).unwrap();
        let error = channel("not an address", &options).unwrap_err();
        assert!(error.to_string().contains("not an address"), "{error}");
    }
}
