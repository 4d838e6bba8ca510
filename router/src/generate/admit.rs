//! Lets requests in: a bound on how many run, and the quotas of whoever asks.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use contract::error::RequestError;
use contract::ids::TenantId;
use daemon::telemetry::metrics::Counter;
use http::{HeaderMap, HeaderName, header};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::admission::{AdmissionSettings, Quotas, Tenant, TenantTable};
use crate::config::Limits;
use crate::error::Error;
use crate::metrics::Metrics;

/// Knows tenants and what each has used.
pub(crate) struct Admission {
    tenants: TenantTable,
    /// Header that may name a tenant.
    header: Option<HeaderName>,
    quotas: Mutex<Quotas>,
    slots: Arc<Semaphore>,
    limits: Limits,
    /// Tokens charged, by tenant.
    tokens: HashMap<TenantId, Counter>,
}

/// A request that was let in, until it is dropped.
pub(crate) struct Permit {
    admission: Arc<Admission>,
    tenant: Arc<Tenant>,
    /// Tokens that it was charged and that are not settled.
    charged: Option<u64>,
    _slot: OwnedSemaphorePermit,
}

impl Admission {
    /// Reads the tenants.
    ///
    /// # Errors
    /// When they cannot be told apart, or the header's name is none.
    pub(crate) fn new(settings: &AdmissionSettings, limits: &Limits, metrics: &Metrics) -> Result<Self, Error> {
        let tenants = TenantTable::new(settings)?;
        let name = |name: &String| name.parse::<HeaderName>().map_err(|_| Error::TenantHeader { name: name.clone() });
        Ok(Self {
            header: settings.tenant_header.as_ref().map(name).transpose()?,
            quotas: Mutex::new(Quotas::new(&tenants, daemon::clock::now())),
            slots: Arc::new(Semaphore::new(limits.n_in_flight_max.min(Semaphore::MAX_PERMITS))),
            limits: limits.clone(),
            tokens: tenants.iter().map(|tenant| (tenant.name.clone(), metrics.tenant_tokens(tenant.label()))).collect(),
            tenants,
        })
    }

    /// Finds out who asks.
    pub(crate) fn tenant(&self, headers: &HeaderMap) -> Arc<Tenant> {
        let key = headers.get(header::AUTHORIZATION).and_then(|value| bearer(value.to_str().ok()?));
        let name = self.header.as_ref().and_then(|name| headers.get(name)?.to_str().ok());
        Arc::clone(self.tenants.find(key, name))
    }

    /// The tenant of a name, else the default one.
    pub(crate) fn named(&self, name: &TenantId) -> &Arc<Tenant> {
        self.tenants.named(name)
    }

    /// Lets a request in until the result is dropped.
    ///
    /// # Errors
    /// `Overloaded` when too many run, `QuotaExceeded` when the tenant has asked for too much.
    pub(crate) fn admit(self: &Arc<Self>, tenant: &Arc<Tenant>) -> Result<Permit, RequestError> {
        let slot = Arc::clone(&self.slots).try_acquire_owned().map_err(|_| RequestError::Overloaded {
            reason: format!("{} requests are in flight", self.limits.n_in_flight_max),
            retry_after_ms: self.limits.retry_after_ms,
        })?;
        let entered = self.quotas().enter(daemon::clock::now(), &tenant.name);
        entered.map_err(|exceeded| exceeded.into_error(self.limits.retry_after_ms))?;
        Ok(Permit { admission: Arc::clone(self), tenant: Arc::clone(tenant), charged: None, _slot: slot })
    }

    /// What tenants have used, for whoever splits quotas between routers; hold it briefly.
    pub(crate) fn quotas(&self) -> MutexGuard<'_, Quotas> {
        self.quotas.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Permit {
    /// Charges the tenant for a prompt before it is computed.
    ///
    /// # Errors
    /// `QuotaExceeded` when it has no tokens left.
    pub(super) fn charge(&mut self, tokens: u64) -> Result<(), RequestError> {
        let charged = self.admission.quotas().charge(daemon::clock::now(), &self.tenant.name, tokens);
        charged.map_err(|exceeded| exceeded.into_error(self.admission.limits.retry_after_ms))?;
        self.charged = Some(tokens);
        Ok(())
    }

    /// Replaces the charge by the tokens that were computed, once.
    pub(super) fn settle(&mut self, tokens: u64) {
        if let Some(charged) = self.charged.take() {
            self.admission.quotas().settle(daemon::clock::now(), &self.tenant.name, charged, tokens);
            self.admission.tokens[&self.tenant.name].inc_by(tokens);
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.admission.quotas().leave(&self.tenant.name);
    }
}

/// The key of an `Authorization: Bearer KEY`.
fn bearer(value: &str) -> Option<&str> {
    let (scheme, key) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| key.trim()).filter(|key| !key.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_what_follows_the_scheme() {
        assert_eq!(bearer("Bearer sk-1"), Some("sk-1"));
        assert_eq!(bearer("bearer  sk-1 "), Some("sk-1"));
        for none in ["", "Bearer", "Bearer ", "Basic sk-1", "sk-1"] {
            assert_eq!(bearer(none), None, "{none:?}");
        }
    }
}
