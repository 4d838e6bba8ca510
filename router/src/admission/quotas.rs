//! What each tenant may ask for: requests and tokens per minute, and requests at once.
//!
//! Limits hold over the cluster; a router grants its share of them. A share comes from the load ledger, and is one part
//! in the number of routers where the ledger tells nothing.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use contract::error::RequestError;
use contract::ids::TenantId;
use thiserror::Error;

use super::bucket::Bucket;
use super::share::Demand;
use super::tenants::{Tenant, TenantTable};

/// One of a tenant's limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Quota {
    /// Requests per minute.
    Requests,
    /// Tokens per minute.
    Tokens,
    /// Requests at once.
    Concurrent,
}

/// A tenant's limit is reached.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("tenant {tenant} has used its {limit} {}", .quota.unit())]
pub struct Exceeded {
    /// Whose.
    pub tenant: TenantId,
    /// Which.
    pub quota: Quota,
    /// The limit over the whole cluster.
    pub limit: u64,
    /// When there will be room; unknown for requests at once.
    pub retry_after_ms: Option<u64>,
}

/// The limits of all tenants at one router.
#[derive(Debug)]
pub struct Quotas {
    tenants: HashMap<TenantId, Account>,
    /// Of tenants that the ledger tells nothing of.
    equal_share: f64,
}

#[derive(Debug)]
struct Account {
    tenant: Arc<Tenant>,
    requests: Option<Bucket>,
    tokens: Option<Bucket>,
    n_running: u64,
    share: Option<f64>,
    demand: Demand,
}

impl Quotas {
    /// Makes the quotas of a router that is alone.
    pub fn new(table: &TenantTable, now: Instant) -> Self {
        let accounts = table.iter().map(|tenant| (tenant.name.clone(), Account::new(Arc::clone(tenant), now)));
        Self { tenants: accounts.collect(), equal_share: 1.0 }
    }

    /// Lets a request in, until [`Quotas::leave`].
    ///
    /// # Errors
    /// The limit that is reached, of requests at once or per minute; nothing was counted.
    pub fn enter(&mut self, now: Instant, tenant: &TenantId) -> Result<(), Exceeded> {
        let equal_share = self.equal_share;
        let Some(account) = self.tenants.get_mut(tenant) else { return Ok(()) };
        if account.tokens.is_none() {
            account.demand.add(now, 1.0);
        }
        let share = account.share.unwrap_or(equal_share);
        if let Some(limit) = account.tenant.limits.n_concurrent_max
            && account.n_running >= at_once(limit.get(), share)
        {
            return Err(account.exceeded(Quota::Concurrent, limit.get(), None));
        }
        if let (Some(bucket), Some(limit)) = (&mut account.requests, account.tenant.limits.requests_per_minute)
            && let Err(wait_ms) = bucket.take(now, 1.0)
        {
            return Err(account.exceeded(Quota::Requests, limit.get(), Some(wait_ms)));
        }
        account.n_running += 1;
        Ok(())
    }

    /// Ends a request that was let in.
    ///
    /// # Panics
    /// When none was.
    pub fn leave(&mut self, tenant: &TenantId) {
        if let Some(account) = self.tenants.get_mut(tenant) {
            account.n_running = account.n_running.checked_sub(1).expect("each request that was let in leaves once");
        }
    }

    /// Charges tokens before they are computed; [`Quotas::settle`] puts the number right.
    ///
    /// # Errors
    /// When the tenant's tokens per minute are used up; nothing was charged.
    pub fn charge(&mut self, now: Instant, tenant: &TenantId, tokens: u64) -> Result<(), Exceeded> {
        let Some(account) = self.tenants.get_mut(tenant) else { return Ok(()) };
        let (Some(bucket), Some(limit)) = (&mut account.tokens, account.tenant.limits.tokens_per_minute) else {
            return Ok(());
        };
        account.demand.add(now, tokens as f64);
        let taken = bucket.take(now, tokens as f64);
        taken.map_err(|wait_ms| account.exceeded(Quota::Tokens, limit.get(), Some(wait_ms)))
    }

    /// Puts right what a request was charged once its true cost is known: cached tokens come back, generated ones go.
    pub fn settle(&mut self, now: Instant, tenant: &TenantId, charged: u64, actual: u64) {
        if let Some(bucket) = self.tenants.get_mut(tenant).and_then(|account| account.tokens.as_mut()) {
            bucket.adjust(now, charged as f64 - actual as f64);
        }
    }

    /// What a tenant asks this router for in a second, by the last half second or so: tokens where they are limited, else
    /// requests. The ledger makes shares of it with [`super::divide`].
    pub fn demand_per_s(&self, now: Instant, tenant: &TenantId) -> f64 {
        self.tenants.get(tenant).map_or(0.0, |account| account.demand.per_s(now))
    }

    /// Tells how many routers share the quotas of tenants that the ledger tells nothing of; 0 counts as 1.
    pub fn set_n_routers(&mut self, now: Instant, n_routers: u32) {
        self.equal_share = 1.0 / f64::from(n_routers.max(1));
        let equal_share = self.equal_share;
        self.tenants.values_mut().for_each(|account| account.apply(now, equal_share));
    }

    /// Takes a tenant's share from the ledger, in [0, 1]; none goes back to the equal share.
    pub fn set_share(&mut self, now: Instant, tenant: &TenantId, share: Option<f64>) {
        let equal_share = self.equal_share;
        if let Some(account) = self.tenants.get_mut(tenant) {
            account.share = share.filter(|share| !share.is_nan()).map(|share| share.clamp(0.0, 1.0));
            account.apply(now, equal_share);
        }
    }

    /// Goes back to equal shares for all tenants: the ledger is gone.
    pub fn forget_shares(&mut self, now: Instant) {
        let equal_share = self.equal_share;
        for account in self.tenants.values_mut() {
            account.share = None;
            account.apply(now, equal_share);
        }
    }

    /// The share that holds for a tenant now.
    pub fn share(&self, tenant: &TenantId) -> f64 {
        self.tenants.get(tenant).and_then(|account| account.share).unwrap_or(self.equal_share)
    }

    /// Requests of a tenant that run.
    pub fn n_running(&self, tenant: &TenantId) -> u64 {
        self.tenants.get(tenant).map_or(0, |account| account.n_running)
    }
}

impl Account {
    fn new(tenant: Arc<Tenant>, now: Instant) -> Self {
        let burst_s = f64::from(tenant.limits.burst_s);
        let bucket = |per_minute: u64| {
            let rate_per_s = per_minute as f64 / 60.0;
            Bucket::new(rate_per_s, rate_per_s * burst_s, now)
        };
        let requests = tenant.limits.requests_per_minute.map(|limit| bucket(limit.get()));
        let tokens = tenant.limits.tokens_per_minute.map(|limit| bucket(limit.get()));
        Self { tenant, requests, tokens, n_running: 0, share: None, demand: Demand::new(now) }
    }

    fn apply(&mut self, now: Instant, equal_share: f64) {
        let share = self.share.unwrap_or(equal_share);
        let limits = &self.tenant.limits;
        let of = [(&mut self.requests, limits.requests_per_minute), (&mut self.tokens, limits.tokens_per_minute)];
        for (bucket, per_minute) in of {
            if let (Some(bucket), Some(per_minute)) = (bucket, per_minute) {
                let rate_per_s = per_minute.get() as f64 / 60.0 * share;
                bucket.set(now, rate_per_s, rate_per_s * f64::from(limits.burst_s));
            }
        }
    }

    fn exceeded(&self, quota: Quota, limit: u64, retry_after_ms: Option<u64>) -> Exceeded {
        Exceeded { tenant: self.tenant.name.clone(), quota, limit, retry_after_ms }
    }
}

impl Quota {
    /// What the limit counts.
    pub fn unit(self) -> &'static str {
        match self {
            Self::Requests => "requests per minute",
            Self::Tokens => "tokens per minute",
            Self::Concurrent => "requests at once",
        }
    }
}

impl Exceeded {
    /// The error that a client gets, with `retry_after_ms` where the quota does not tell a time.
    pub fn into_error(self, retry_after_ms: u64) -> RequestError {
        RequestError::QuotaExceeded {
            tenant: self.tenant.to_string(),
            quota: format!("{} {}", self.limit, self.quota.unit()),
            retry_after_ms: self.retry_after_ms.unwrap_or(retry_after_ms),
        }
    }
}

/// A router's part of the requests at once, rounded down; each lets in at least one.
fn at_once(limit: u64, share: f64) -> u64 {
    ((limit as f64 * share) as u64).max(1)
}
