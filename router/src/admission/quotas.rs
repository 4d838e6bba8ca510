//! What each tenant may ask for: requests and tokens per minute, and requests at once.
//!
//! Limits hold over the cluster; a router grants its share of them. A share follows from what all routers told each other
//! that they are asked for, and is one part in the number of routers where nothing is told.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;

use contract::demand::{RouterDemand, TenantDemand};
use contract::error::RequestError;
use contract::ids::{Incarnation, TenantId};
use thiserror::Error;

use super::bucket::Bucket;
use super::share::{Asked, Demand, Share};
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
}

#[derive(Debug)]
struct Account {
    tenant: Arc<Tenant>,
    requests: Option<Bucket>,
    tokens: Option<Bucket>,
    n_running: u64,
    share: Share,
    /// Requests and tokens that were asked for.
    demand: [Demand; 2],
}

/// Demand below this, in a second, is none.
const DEMAND_MIN: f64 = 0.01;

impl Quotas {
    /// Makes the quotas of a router that is alone.
    pub fn new(table: &TenantTable, now: Instant) -> Self {
        let accounts = table.iter().map(|tenant| (tenant.name.clone(), Account::new(Arc::clone(tenant), now)));
        Self { tenants: accounts.collect() }
    }

    /// Lets a request in, until [`Quotas::leave`].
    ///
    /// # Errors
    /// The limit that is reached, of requests at once or per minute; nothing was counted.
    pub fn enter(&mut self, now: Instant, tenant: &TenantId) -> Result<(), Exceeded> {
        let Some(account) = self.tenants.get_mut(tenant) else { return Ok(()) };
        account.demand[0].add(now, 1.0);
        if let Some(limit) = account.tenant.limits.n_concurrent_max
            && account.n_running >= account.share.at_once(account.n_running)
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
        account.demand[1].add(now, tokens as f64);
        let taken = bucket.take(now, tokens as f64);
        taken.map_err(|wait_ms| account.exceeded(Quota::Tokens, limit.get(), Some(wait_ms)))
    }

    /// Puts right what a request was charged once its true cost is known: cached tokens come back, generated ones go.
    pub fn settle(&mut self, now: Instant, tenant: &TenantId, charged: u64, actual: u64) {
        if let Some(bucket) = self.tenants.get_mut(tenant).and_then(|account| account.tokens.as_mut()) {
            bucket.adjust(now, charged as f64 - actual as f64);
        }
    }

    /// What tenants with limits ask this router for, lately, by name.
    pub fn demand(&self, now: Instant) -> Vec<TenantDemand> {
        let mut all: Vec<TenantDemand> = self.tenants.values().filter_map(|account| account.demand(now)).collect();
        all.sort_unstable_by(|one, two| one.tenant.cmp(&two.tenant));
        all
    }

    /// Takes the share that follows from what `told` says each router is asked for, `own` being this one; an equal one,
    /// where nothing is told, of the `n_routers` that there are.
    pub fn set_shares(
        &mut self,
        now: Instant,
        own: Incarnation,
        told: Option<&BTreeMap<Incarnation, &RouterDemand>>,
        n_routers: u32,
    ) {
        let told = told.and_then(|told| Some((told, told.keys().position(|router| *router == own)?)));
        for account in self.tenants.values_mut().filter(|account| account.is_limited()) {
            let (name, limits) = (&account.tenant.name, &account.tenant.limits);
            let share = match told {
                Some((told, own)) => {
                    let demands: Vec<_> = told.values().map(|demand| find(demand, name)).collect();
                    Share::by_demand(&Asked { demands: &demands, own, n_routers }, limits)
                }
                None => Share::equal(n_routers, limits),
            };
            account.apply(now, share);
        }
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
        let share = Share::equal(1, &tenant.limits);
        Self { tenant, requests, tokens, n_running: 0, share, demand: [(); 2].map(|()| Demand::new(now)) }
    }

    fn apply(&mut self, now: Instant, share: Share) {
        if self.share == share {
            return;
        }
        self.share = share;
        let limits = &self.tenant.limits;
        let of = [
            (&mut self.requests, limits.requests_per_minute, share.requests),
            (&mut self.tokens, limits.tokens_per_minute, share.tokens),
        ];
        for (bucket, per_minute, share) in of {
            if let (Some(bucket), Some(per_minute)) = (bucket, per_minute) {
                let rate_per_s = per_minute.get() as f64 / 60.0 * share;
                bucket.set(now, rate_per_s, rate_per_s * f64::from(limits.burst_s));
            }
        }
    }

    /// What others need to know; none where there is nothing to share or nothing is asked for.
    fn demand(&self, now: Instant) -> Option<TenantDemand> {
        let [requests_per_s, tokens_per_s] = [0, 1].map(|index| self.demand[index].per_s(now));
        let is_any = requests_per_s > DEMAND_MIN || tokens_per_s > DEMAND_MIN || self.n_running > 0;
        (self.is_limited() && is_any).then(|| TenantDemand {
            tenant: self.tenant.name.clone(),
            requests_per_s: requests_per_s as f32,
            tokens_per_s: tokens_per_s as f32,
            n_running: u32::try_from(self.n_running).unwrap_or(u32::MAX),
            is_waiting: false,
        })
    }

    fn is_limited(&self) -> bool {
        self.requests.is_some() || self.tokens.is_some() || self.tenant.limits.n_concurrent_max.is_some()
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

fn find<'a>(demand: &'a RouterDemand, tenant: &TenantId) -> Option<&'a TenantDemand> {
    let found = demand.tenants.binary_search_by(|known| known.tenant.cmp(tenant));
    found.ok().map(|index| &demand.tenants[index])
}
