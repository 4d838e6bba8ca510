//! What a server counts.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;

use crate::telemetry::metrics::{Scope, scope};
use crate::telemetry::names;

/// The metrics of one server, under its role and the address it listens on.
#[derive(Clone, Debug)]
pub(super) struct Metrics {
    pub(super) connections: Gauge,
    pub(super) requests: Gauge,
    pub(super) refused_connections: Counter,
    pub(super) refused_requests: Counter,
    pub(super) panics: Counter,
    scope: Scope,
}

/// Counts one thing for as long as it lives.
#[derive(Debug)]
pub(super) struct Counted(Gauge);

impl Metrics {
    pub(super) fn new(role: &'static str, address: &str) -> Self {
        let scope = scope(role, address);
        Self {
            connections: scope.gauge(&names::SERVER_CONNECTIONS, &[]),
            requests: scope.gauge(&names::SERVER_REQUESTS, &[]),
            refused_connections: scope.counter(&names::SERVER_REFUSALS, &["connections"]),
            refused_requests: scope.counter(&names::SERVER_REFUSALS, &["requests"]),
            panics: scope.counter(&names::SERVER_PANICS, &[]),
            scope,
        }
    }

    /// Takes the series out when the listener is gone.
    pub(super) fn retire(&self) {
        self.scope.retire();
    }
}

impl Counted {
    pub(super) fn new(gauge: &Gauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.dec();
    }
}
