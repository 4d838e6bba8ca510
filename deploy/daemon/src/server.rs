//! The one server of every role: gRPC and HTTP on one port, bounded, observed, drained at the end.

mod admin;
mod admission;
mod config;
mod connection;
mod listener;
mod metrics;
mod opening;
mod readiness;
mod stack;

use std::time::Duration;

use tonic::service::Routes;

pub use config::{OutOfRange, ServerConfig};
pub use listener::{BindError, Listener};
pub use readiness::Readiness;

use self::stack::Stack;
use crate::shutdown::Shutdown;

/// A server that was given its services but no listener yet.
#[derive(Debug)]
pub struct Server {
    role: &'static str,
    config: ServerConfig,
    grpc: Option<Routes>,
    http: axum::Router,
    descriptors: Option<&'static [u8]>,
    service_names: Vec<&'static str>,
    readiness: Option<Readiness>,
}

/// Why a server could not serve.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The descriptor set given to [`Server::reflection`] is broken.
    #[error("cannot serve reflection")]
    Reflection(#[from] tonic_reflection::server::Error),
    /// A bound lets nothing through.
    #[error("cannot serve within these bounds")]
    Config(#[from] OutOfRange),
}

impl Server {
    /// Makes a server with nothing but health, `/livez`, `/readyz` and `/metrics`.
    #[must_use]
    pub fn new(role: &'static str, config: ServerConfig) -> Self {
        Self {
            role,
            config,
            grpc: None,
            http: axum::Router::new(),
            descriptors: None,
            service_names: Vec::new(),
            readiness: None,
        }
    }

    /// Serves these gRPC services.
    #[must_use]
    pub fn grpc(mut self, routes: Routes) -> Self {
        self.grpc = Some(routes);
        self
    }

    /// Serves these HTTP routes; `/livez`, `/readyz` and `/metrics` are the server's own.
    #[must_use]
    pub fn http(mut self, router: axum::Router) -> Self {
        self.http = router;
        self
    }

    /// Serves reflection (v1 and v1alpha) from this encoded `FileDescriptorSet`.
    #[must_use]
    pub fn reflection(mut self, descriptor_set_bytes: &'static [u8]) -> Self {
        self.descriptors = Some(descriptor_set_bytes);
        self
    }

    /// Names the gRPC services that reflection lists and health answers for by name; without it reflection lists
    /// the whole descriptor set.
    #[must_use]
    pub fn service_names(mut self, names: &[&'static str]) -> Self {
        self.service_names = names.to_vec();
        self
    }

    /// Ties `/readyz` and gRPC health to `readiness`; without it the server is ready as soon as it serves.
    #[must_use]
    pub fn ready(mut self, readiness: Readiness) -> Self {
        self.readiness = Some(readiness);
        self
    }

    /// Serves until `shutdown`, then lets running calls end, for the configured grace at most.
    ///
    /// No timeout cuts a response: a stream ends when its handler ends it, its peer goes or the grace is over.
    /// Handlers of endless streams watch `shutdown` themselves.
    ///
    /// # Errors
    /// When the server cannot be built; what happens to single connections is no error of the server.
    pub async fn serve(self, listener: Listener, shutdown: Shutdown) -> Result<(), ServeError> {
        self.config.validate()?;
        let readiness = self.readiness.clone().unwrap_or_else(|| {
            let readiness = Readiness::new();
            readiness.set(true, "");
            readiness
        });
        let metrics = metrics::Metrics::new(self.role, &listener.local_addr().to_string());
        let config = self.config.clone();
        let stack = Stack::new(self, &readiness, &metrics)?;
        connection::serve_until(listener, stack, connection::Settings { config, readiness, metrics }, shutdown).await;
        Ok(())
    }
}

/// Milliseconds of a configuration as a duration.
fn ms(value: u64) -> Duration {
    Duration::from_millis(value)
}

#[cfg(test)]
mod tests;
