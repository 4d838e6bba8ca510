//! HTTP clients, with TLS by ring.

use std::net::IpAddr;

/// Starts the client for `endpoint`: a proxy of the environment is used, but never to this machine itself.
pub(crate) fn client(endpoint: &str) -> reqwest::ClientBuilder {
    // Fails only when it was installed before.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let builder = reqwest::Client::builder().user_agent(concat!("tessera/", env!("CARGO_PKG_VERSION")));
    if is_loopback(endpoint) { builder.no_proxy() } else { builder }
}

fn is_loopback(endpoint: &str) -> bool {
    let Ok(url) = reqwest::Url::parse(endpoint) else { return false };
    let host = url.host_str().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    #[test]
    fn this_machine_is_recognised() {
        for own in ["http://localhost:1", "http://127.0.0.1:8080/x", "http://[::1]:80"] {
            assert!(super::is_loopback(own), "{own}");
        }
        assert!(!super::is_loopback("https://huggingface.co") && !super::is_loopback("nonsense"));
    }
}
