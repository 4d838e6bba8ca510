//! Binding a port, with errors that say what to do.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::time::Duration;

use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use tokio::net::{TcpListener, TcpStream};

/// Connections that the kernel holds until they are accepted.
pub(super) const BACKLOG: i32 = 4_096;

/// TCP counts keepalive in whole seconds.
const KEEPALIVE_MIN: Duration = Duration::from_secs(1);

/// Longest keepalive time that Linux takes.
const KEEPALIVE_MAX: Duration = Duration::from_secs(32_767);

/// A bound port.
#[derive(Debug)]
pub struct Listener {
    inner: TcpListener,
    address: SocketAddr,
}

/// Why an address cannot be listened on, and the way out.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Someone else listens there.
    #[error("{address} is in use; stop the other process or give {option} another address")]
    InUse {
        /// The address as given.
        address: String,
        /// What decides the address.
        option: String,
    },
    /// The system does not allow it.
    #[error("{address} may not be listened on by this user; give {option} a port of 1024 or above")]
    Denied {
        /// The address as given.
        address: String,
        /// What decides the address.
        option: String,
    },
    /// It is no address of this machine, or none at all.
    #[error("{address:?} is not an address of this machine; give {option} HOST:PORT, such as 127.0.0.1:0")]
    NotAnAddress {
        /// The address as given.
        address: String,
        /// What decides the address.
        option: String,
        /// What the system said.
        source: io::Error,
    },
    /// Anything else.
    #[error("cannot listen on {address}")]
    Other {
        /// The address as given.
        address: String,
        /// What the system said.
        source: io::Error,
    },
}

impl Listener {
    /// Binds `address` (`HOST:PORT`; port 0 takes any free one).
    ///
    /// # Errors
    /// Says what is wrong with the address and what to do.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn bind(address: &str) -> Result<Self, BindError> {
        Self::bind_for("the configuration", address)
    }

    /// Binds `address`; errors name `option` (`"--http"`, `"router.http"`) as the place to change it.
    ///
    /// # Errors
    /// As [`Self::bind`].
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn bind_for(option: &str, address: &str) -> Result<Self, BindError> {
        let listen = |resolved| {
            let inner = listen(resolved)?;
            let address = inner.local_addr()?;
            Ok(Self { inner, address })
        };
        let mut last = io::Error::new(io::ErrorKind::InvalidInput, "the name has no address");
        let resolved = address.to_socket_addrs().map_err(|source| BindError::NotAnAddress {
            address: address.to_owned(),
            option: option.to_owned(),
            source,
        })?;
        for resolved in resolved {
            match listen(resolved) {
                Ok(listener) => return Ok(listener),
                Err(error) => last = error,
            }
        }
        Err(bind_error(option, address, last))
    }

    /// The address that is listened on, with its real port.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Accepts a connection, without Nagle's delay and with keepalive as given.
    pub(super) async fn accept(
        &self,
        keepalive_interval: Duration,
        keepalive_timeout: Duration,
    ) -> io::Result<TcpStream> {
        let (stream, _) = self.inner.accept().await?;
        if let Err(error) = tune(&stream, keepalive_interval, keepalive_timeout) {
            tracing::debug!(%error, "a socket keeps the system's options");
        }
        Ok(stream)
    }
}

/// Sets a connection's options; intervals beyond what TCP takes (1 to 32767 s) become the nearest that it does.
fn tune(stream: &TcpStream, keepalive_interval: Duration, keepalive_timeout: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let interval = keepalive_interval.clamp(KEEPALIVE_MIN, KEEPALIVE_MAX);
    let socket = SockRef::from(stream);
    socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(interval).with_interval(interval).with_retries(3))?;
    // Bytes that nobody acknowledges for this long end the connection.
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(interval + keepalive_timeout.min(KEEPALIVE_MAX)))?;
    #[cfg(not(target_os = "linux"))]
    let _ = keepalive_timeout;
    Ok(())
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    // A restarted process takes its port back at once.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}

fn bind_error(option: &str, address: &str, source: io::Error) -> BindError {
    let (address, option) = (address.to_owned(), option.to_owned());
    match source.kind() {
        io::ErrorKind::AddrInUse => BindError::InUse { address, option },
        io::ErrorKind::PermissionDenied => BindError::Denied { address, option },
        io::ErrorKind::AddrNotAvailable | io::ErrorKind::InvalidInput => {
            BindError::NotAnAddress { address, option, source }
        }
        _ => BindError::Other { address, source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_port_in_use_is_named_with_the_way_out() {
        let first = Listener::bind("127.0.0.1:0").unwrap();
        let address = first.local_addr().to_string();
        let error = Listener::bind_for("--http", &address).unwrap_err();
        let expected = format!("{address} is in use; stop the other process or give --http another address");
        assert_eq!(error.to_string(), expected);
        drop(first);
        Listener::bind(&address).unwrap();
    }

    #[tokio::test]
    async fn nonsense_and_foreign_addresses_are_refused() {
        for bad in ["", "127.0.0.1", "127.0.0.1:99999", "192.0.2.1:0"] {
            let error = Listener::bind(bad).unwrap_err();
            assert!(matches!(error, BindError::NotAnAddress { .. }), "{bad}: {error:?}");
        }
    }

    #[tokio::test]
    async fn accepted_sockets_have_no_delay_and_notice_dead_peers() {
        let listener = Listener::bind("127.0.0.1:0").unwrap();
        let (accepted, client) = tokio::join!(
            listener.accept(Duration::from_secs(7), Duration::from_secs(5)),
            TcpStream::connect(listener.local_addr())
        );
        let (accepted, _client) = (accepted.unwrap(), client.unwrap());
        assert!(accepted.nodelay().unwrap());
        let socket = SockRef::from(&accepted);
        assert!(socket.keepalive().unwrap());
        #[cfg(target_os = "linux")]
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(Duration::from_secs(12)));
    }

    #[tokio::test]
    async fn keepalive_beyond_what_tcp_takes_is_the_nearest_that_it_does() {
        let listener = Listener::bind("127.0.0.1:0").unwrap();
        for (asked, set) in [(0, 1), (999, 1), (32_768_000, 32_767), (u64::MAX, 32_767)] {
            let asked = Duration::from_millis(asked);
            let (accepted, client) =
                tokio::join!(listener.accept(asked, asked), TcpStream::connect(listener.local_addr()));
            let (accepted, _client) = (accepted.unwrap(), client.unwrap());
            let socket = SockRef::from(&accepted);
            assert!(accepted.nodelay().unwrap() && socket.keepalive().unwrap());
            assert_eq!(socket.tcp_keepalive_time().unwrap(), Duration::from_secs(set));
            #[cfg(target_os = "linux")]
            assert!(socket.tcp_user_timeout().unwrap().is_some());
        }
    }
}
