//! How a tenant's cluster-wide quotas are split between routers: by what each is asked for.

use std::time::Instant;

use contract::demand::TenantDemand;

use super::settings::TenantLimits;

/// What is split evenly whatever is asked for, so that a router that nobody asked lately can begin at once.
const EVEN: f64 = 0.05;
/// Demand falls to a part in e in this time; after two seconds under a fiftieth of it is left.
const MEMORY_S: f64 = 0.5;

/// One router's part of a tenant's quotas.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Share {
    /// Of requests per minute, in [0, 1].
    pub(super) requests: f64,
    /// Of tokens per minute, in [0, 1].
    pub(super) tokens: f64,
    /// Requests at once.
    n_at_once: u64,
    /// Requests that may be let in where none runs, because nobody asked before and there is room.
    n_first: u64,
}

/// What routers told of one tenant.
pub(super) struct Asked<'a> {
    /// By router, in an order that all agree on; none of those that told nothing of the tenant.
    pub(super) demands: &'a [Option<&'a TenantDemand>],
    /// The router whose share it is.
    pub(super) own: usize,
    /// Routers there are: those that told nothing at all keep an equal share.
    pub(super) n_routers: u32,
}

/// A demand per second that forgets.
#[derive(Clone, Debug)]
pub(super) struct Demand {
    recent: f64,
    at: Instant,
}

impl Share {
    /// The share of each of `n_routers`, 0 counting as 1, that know nothing of each other; each may run one request.
    pub(super) fn equal(n_routers: u32, limits: &TenantLimits) -> Self {
        let part = 1.0 / f64::from(n_routers.max(1));
        let n_at_once = ((at_once_max(limits) as f64 * part) as u64).max(1);
        Self { requests: part, tokens: part, n_at_once, n_first: 0 }
    }

    /// The share by demand; those of all routers together are at most the whole.
    pub(super) fn by_demand(asked: &Asked<'_>, limits: &TenantLimits) -> Self {
        let &Asked { demands, own, n_routers } = asked;
        let n_known = demands.len() as f64;
        let part = n_known / n_known.max(f64::from(n_routers));
        let divided = |per_minute: Option<u64>, what: fn(&TenantDemand) -> f32| {
            let demand = demands.iter().map(|demand| demand.map_or(0.0, |demand| f64::from(what(demand))));
            // Where nothing is limited, shares still split the requests at once.
            divide(&demand.collect::<Vec<_>>(), per_minute.map_or(0.0, |limit| limit as f64 / 60.0 * part))
        };
        let requests = divided(limits.requests_per_minute.map(|n| n.get()), |demand| demand.requests_per_s);
        let tokens = divided(limits.tokens_per_minute.map(|n| n.get()), |demand| demand.tokens_per_s);
        let most = (at_once_max(limits) as f64 * part) as u64;
        let running: Vec<u64> =
            demands.iter().map(|demand| demand.map_or(0, |demand| demand.n_running.into())).collect();
        let is_new = demands[own].is_none_or(|demand| demand.requests_per_s == 0.0);
        let is_room = running.iter().sum::<u64>() < most;
        Self {
            requests: requests[own] * part,
            tokens: tokens[own] * part,
            n_at_once: divide_at_once(most, &running, &divided(None, |demand| demand.requests_per_s))[own],
            n_first: u64::from(is_new && is_room),
        }
    }

    /// How many requests may run here when `n_running` do.
    pub(super) fn at_once(&self, n_running: u64) -> u64 {
        if n_running == 0 { self.n_at_once.max(self.n_first) } else { self.n_at_once }
    }
}

impl Demand {
    pub(super) fn new(now: Instant) -> Self {
        Self { recent: 0.0, at: now }
    }

    pub(super) fn add(&mut self, now: Instant, n: f64) {
        self.recent = self.left(now) + n;
        self.at = self.at.max(now);
    }

    pub(super) fn per_s(&self, now: Instant) -> f64 {
        self.left(now) / MEMORY_S
    }

    fn left(&self, now: Instant) -> f64 {
        self.recent * (-now.saturating_duration_since(self.at).as_secs_f64() / MEMORY_S).exp()
    }
}

/// Splits a quota by demand (in its unit): one fraction for each router, in order; together they are 1.
///
/// Demand beyond the quota is met in proportion; what it leaves over is split evenly.
pub(super) fn divide(demand: &[f64], quota: f64) -> Vec<f64> {
    let equal = 1.0 / demand.len() as f64;
    let known = |demand: f64| if demand.is_finite() { demand.max(0.0) } else { 0.0 };
    let whole: f64 = demand.iter().copied().map(known).sum();
    let of = |&demand: &f64| {
        let met = if whole > quota { known(demand) / whole } else { (known(demand) - whole * equal) / quota + equal };
        EVEN * equal + (1.0 - EVEN) * if met.is_finite() { met } else { equal }
    };
    demand.iter().map(of).collect()
}

/// Splits `most` requests at once between routers that run so many, by demand; the parts are `most` together, and less as
/// long as a router runs more than its part.
///
/// While a quarter is free, nobody is kept from what it runs, and what is free is split. Else each has a goal by demand:
/// who runs more than that lets nothing in until others could take theirs, and these share what becomes free.
fn divide_at_once(most: u64, running: &[u64], wanted: &[f64]) -> Vec<u64> {
    let free = most.saturating_sub(running.iter().sum());
    if free * 4 >= most {
        return running.iter().zip(apportion(free, wanted)).map(|(running, free)| running + free).collect();
    }
    let goals = apportion(most, wanted);
    let missing: Vec<f64> =
        goals.iter().zip(running).map(|(goal, &running)| goal.saturating_sub(running) as f64).collect();
    let whole = missing.iter().sum::<f64>().max(1.0);
    let parts = apportion(free, &missing.iter().map(|missing| missing / whole).collect::<Vec<_>>());
    goals.iter().zip(running).zip(parts).map(|((&goal, &running), part)| goal.min(running + part)).collect()
}

/// Splits `n` by shares that are 1 together, into whole parts that are `n` together: rounded down, and what is left goes
/// to those who lost most.
fn apportion(n: u64, shares: &[f64]) -> Vec<u64> {
    let exact = |share: &f64| n as f64 * share;
    let mut parts: Vec<u64> = shares.iter().map(|share| exact(share) as u64).collect();
    let mut order: Vec<usize> = (0..shares.len()).collect();
    order.sort_by(|&a, &b| exact(&shares[b]).fract().total_cmp(&exact(&shares[a]).fract()));
    let left = n.saturating_sub(parts.iter().sum());
    order.into_iter().take(usize::try_from(left).unwrap_or(usize::MAX)).for_each(|index| parts[index] += 1);
    parts
}

fn at_once_max(limits: &TenantLimits) -> u64 {
    limits.n_concurrent_max.map_or(0, |limit| limit.get())
}
