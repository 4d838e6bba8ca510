//! Requests that wait for room, in an order that is fair to tenants by the tokens they cost.
//!
//! Deficit round robin (Shreedhar and Varghese, 1995) with a quantum that goes to nothing, which is start-time fair
//! queueing (Goyal, Vin and Cheng, 1996): each tenant has a count of what it was served, in tokens by weight, and the one
//! with the least is next. A tenant that comes back joins at the present round: it has saved up nothing, but what it was
//! served beyond the round it still owes. Costs may be put right after the fact.
//!
//! Several routers have a queue each and share the workers. Service at others counts here as if it had been had here, and
//! who waits at others keeps its place in the round as if it waited here: so what a tenant lags behind is not forgotten
//! where it has no request, and whoever was served more can give way to it. Among routers at which the same tenant waits,
//! the one that placed anything longest ago is next.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Instant;

use contract::ids::{Incarnation, TenantId};
use daemon::config::at_least_one;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::order::{Order, Rank};

/// Bounds of a queue and of a search in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct QueueBounds {
    /// Requests over all tenants.
    #[serde(deserialize_with = "at_least_one")]
    pub n_requests_max: usize,
    /// Uncached tokens over all tenants; a request that is alone may have more.
    #[serde(deserialize_with = "at_least_one")]
    pub tokens_max: u64,
    /// Requests of one tenant.
    #[serde(deserialize_with = "at_least_one")]
    pub n_requests_per_tenant_max: usize,
    /// Uncached tokens of one tenant; a request that is alone may have more.
    #[serde(deserialize_with = "at_least_one")]
    pub tokens_per_tenant_max: u64,
    /// Requests that one search looks at.
    #[serde(deserialize_with = "at_least_one")]
    pub n_scan_max: usize,
    /// Requests of one tenant that one search looks at.
    #[serde(deserialize_with = "at_least_one")]
    pub n_scan_per_tenant_max: usize,
    /// Times that others may be placed before a request whose turn it was; then it must take any room there is, and
    /// nothing goes before it.
    pub n_overtakes_max: u32,
}

/// What waits.
#[derive(Clone, Debug)]
pub struct Ask {
    /// Whose it is.
    pub tenant: TenantId,
    /// The tenant's share of service against others'; the last one told counts, 0 as 1.
    pub weight: u32,
    /// Prompt tokens that are to be computed, as far as is known.
    pub tokens: u64,
    /// Lower is more urgent.
    pub priority: i32,
    /// When it is of no use any more.
    pub deadline: Option<Instant>,
    /// Predicted prefill in milliseconds, for orders that look at it.
    pub prefill_ms: f64,
}

/// Names a request in its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(u64);

/// What a search tells of the request that it offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Requests that this search has passed over.
    pub n_passed: usize,
    /// It was passed over too often: any room will do, and if there is none the search ends.
    pub is_overdue: bool,
    /// Tenants that wait only at other routers and come before its tenant, and routers that come before this one, counted
    /// up to five.
    pub n_before: u32,
}

/// Which bound keeps a request out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Refused {
    /// Of requests over all tenants.
    #[error("{0} requests are waiting")]
    Requests(usize),
    /// Of tokens over all tenants.
    #[error("{0} prompt tokens are waiting")]
    Tokens(u64),
    /// Of the tenant's requests.
    #[error("{0} requests of this tenant are waiting")]
    TenantRequests(usize),
    /// Of the tenant's tokens.
    #[error("{0} prompt tokens of this tenant are waiting")]
    TenantTokens(u64),
}

/// A bounded queue that is fair between tenants and ordered by [`Order`] inside each.
#[derive(Debug)]
pub struct FairQueue<T> {
    bounds: QueueBounds,
    order: Order,
    epoch: Instant,
    flows: HashMap<TenantId, Flow<T>>,
    /// Tenants with requests, the next first.
    active: BTreeSet<Seat>,
    /// Tenants that wait at other routers and where, and of these the seats of who does not wait here.
    elsewhere: BTreeMap<TenantId, BTreeSet<Incarnation>>,
    rivals: BTreeSet<Seat>,
    /// When this router last placed anything, and those at which someone waits, by what was charged until then.
    placed: u64,
    placed_elsewhere: HashMap<Incarnation, u64>,
    /// Tenants that wait nowhere and were served beyond the round.
    indebted: BTreeSet<Seat>,
    /// What a tenant that was served last had been served before.
    round: u128,
    places: HashMap<Ticket, Place>,
    by_deadline: BTreeSet<(Instant, Ticket)>,
    tokens: u64,
    n_made: u64,
}

/// One tenant.
#[derive(Debug)]
struct Flow<T> {
    seat: Seat,
    weight: u32,
    tokens: u64,
    entries: BTreeMap<Rank, Entry<T>>,
    waits_elsewhere: bool,
}

/// A tenant's place in the round; of equals, one that just came goes first.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Seat {
    /// Tokens by weight, times [`SCALE`].
    served: u128,
    is_old: bool,
    since: u64,
    tenant: TenantId,
}

#[derive(Debug)]
struct Entry<T> {
    item: T,
    ticket: Ticket,
    tokens: u64,
    n_overtaken: u32,
}

#[derive(Debug)]
struct Place {
    tenant: TenantId,
    rank: Rank,
    deadline: Option<Instant>,
}

/// More that come before than this count as this.
pub(super) const N_BEFORE_MAX: u32 = 5;
/// Keeps the fractions of a token that a weight makes.
const SCALE: u128 = 1 << 32;
/// Tenants without requests whose debt is remembered.
const N_INDEBTED_MAX: usize = 4_096;

impl Default for QueueBounds {
    fn default() -> Self {
        Self {
            n_requests_max: 4_096,
            tokens_max: 64 << 20,
            n_requests_per_tenant_max: 2_048,
            tokens_per_tenant_max: 32 << 20,
            n_scan_max: 64,
            n_scan_per_tenant_max: 32,
            n_overtakes_max: 256,
        }
    }
}

impl<T> FairQueue<T> {
    /// Makes an empty queue.
    pub fn new(bounds: QueueBounds, order: Order, now: Instant) -> Self {
        Self {
            bounds,
            order,
            epoch: now,
            flows: HashMap::new(),
            active: BTreeSet::new(),
            elsewhere: BTreeMap::new(),
            rivals: BTreeSet::new(),
            placed: 0,
            placed_elsewhere: HashMap::new(),
            indebted: BTreeSet::new(),
            round: 0,
            places: HashMap::new(),
            by_deadline: BTreeSet::new(),
            tokens: 0,
            n_made: 0,
        }
    }

    /// Puts a request in.
    ///
    /// # Errors
    /// The bound that is reached; the queue is as it was and the item is dropped.
    pub fn push(&mut self, now: Instant, ask: Ask, item: T) -> Result<Ticket, Refused> {
        let Ask { tenant, weight, tokens, priority, deadline, prefill_ms } = ask;
        let tokens = tokens.max(1);
        self.check(&tenant, tokens)?;
        self.n_made += 1;
        let (since, ticket) = (self.n_made, Ticket(self.n_made));
        let rank = (self.order.rank_us(self.epoch, now, priority, deadline, prefill_ms), since);
        let round = self.round;
        self.change(&tenant, |flow| {
            flow.join(round, since);
            flow.weight = weight.max(1);
            flow.tokens += tokens;
            flow.entries.insert(rank, Entry { item, ticket, tokens, n_overtaken: 0 });
        });
        self.tokens += tokens;
        self.by_deadline.extend(deadline.map(|deadline| (deadline, ticket)));
        self.places.insert(ticket, Place { tenant, rank, deadline });
        Ok(ticket)
    }

    /// Takes the next request in fair order that `try_place` can place: it answers with the tokens that are truly to be
    /// computed, or none for "not now".
    ///
    /// The search is bounded, and what it passes over often enough goes before all others.
    pub fn pop_where(&mut self, mut try_place: impl FnMut(&T, Turn) -> Option<u64>) -> Option<T> {
        let mut passed = Vec::new();
        let (ticket, tokens) = self.search(&mut passed, &mut try_place)?;
        for ticket in passed {
            let place = &self.places[&ticket];
            let flow = self.flows.get_mut(&place.tenant).expect("a tenant with a request has a flow");
            let entry = flow.entries.get_mut(&place.rank).expect("a place names an entry");
            entry.n_overtaken = entry.n_overtaken.saturating_add(1);
        }
        let tenant = self.places[&ticket].tenant.clone();
        // Charged while it still has the request, so that its weight and what it lags behind the round are known.
        self.serve(&tenant, None, tokens);
        self.placed = self.n_made;
        self.remove(ticket)
    }

    /// Takes the next request in fair order.
    pub fn pop(&mut self) -> Option<T> {
        let tokens = self.active.first().map(|seat| {
            let (_, entry) = self.flows[&seat.tenant].entries.first_key_value().expect("an active tenant has requests");
            entry.tokens
        })?;
        self.pop_where(|_, _| Some(tokens))
    }

    /// Takes a request out, of a client that went away; the tenant is charged nothing.
    pub fn remove(&mut self, ticket: Ticket) -> Option<T> {
        let Place { tenant, rank, deadline } = self.places.remove(&ticket)?;
        if let Some(deadline) = deadline {
            self.by_deadline.remove(&(deadline, ticket));
        }
        let entry = self.change(&tenant, |flow| {
            let entry = flow.entries.remove(&rank).expect("a place names an entry");
            flow.tokens -= entry.tokens;
            entry
        });
        self.tokens -= entry.tokens;
        Some(entry.item)
    }

    /// Takes a request whose deadline is not after `now`, if any.
    pub fn pop_expired(&mut self, now: Instant) -> Option<T> {
        let &(deadline, ticket) = self.by_deadline.first()?;
        if deadline > now { None } else { self.remove(ticket) }
    }

    /// The earliest deadline of all.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.by_deadline.first().map(|&(deadline, _)| deadline)
    }

    /// Counts service that a tenant got without waiting here: at once, or from another router, which is told then, so that
    /// fairness holds over all of it.
    pub fn charge(&mut self, by: Option<Incarnation>, tenant: &TenantId, weight: u32, tokens: u64) {
        self.serve(tenant, Some(weight), tokens);
        match by {
            None => self.placed = self.n_made,
            Some(router) => drop(self.placed_elsewhere.insert(router, self.n_made)),
        }
    }

    /// Tells who waits at which other routers, which replaces what was known.
    pub fn set_elsewhere(&mut self, tenants: BTreeMap<TenantId, BTreeSet<Incarnation>>) {
        let gone: Vec<TenantId> =
            self.elsewhere.keys().filter(|known| !tenants.contains_key(*known)).cloned().collect();
        for tenant in gone {
            self.change(&tenant, |flow| flow.waits_elsewhere = false);
        }
        let came: Vec<TenantId> = tenants.keys().filter(|new| !self.elsewhere.contains_key(*new)).cloned().collect();
        let round = self.round;
        for tenant in came {
            self.n_made += 1;
            let since = self.n_made;
            self.change(&tenant, |flow| {
                flow.join(round, since);
                flow.waits_elsewhere = true;
            });
        }
        self.placed_elsewhere.retain(|router, _| tenants.values().any(|routers| routers.contains(router)));
        self.elsewhere = tenants;
    }

    /// What a new request of a tenant would be told if it was next here.
    pub fn newcomer(&self, tenant: &TenantId) -> Turn {
        let known = self.flows.get(tenant).filter(|flow| flow.is_present());
        let seat = known.map_or_else(
            || {
                let owed = self.flows.get(tenant).map_or(self.round, |flow| flow.seat.served.max(self.round));
                Seat { served: owed, is_old: owed > self.round, since: u64::MAX, tenant: tenant.clone() }
            },
            |flow| flow.seat.clone(),
        );
        Turn { n_passed: 0, is_overdue: false, n_before: self.n_before(&seat) }
    }

    /// Puts right what a tenant was charged when its request was placed, once the true cost is known.
    pub fn correct(&mut self, tenant: &TenantId, weight: u32, charged: u64, actual: u64) {
        let (charged, actual) = (charged.max(1), actual.max(1));
        self.change(tenant, |flow| {
            flow.weight = weight.max(1);
            flow.seat.served += by_weight(actual, flow.weight);
            flow.seat.served = flow.seat.served.saturating_sub(by_weight(charged, flow.weight));
        });
    }

    /// Tokens that will be served before a new request of `tokens` would be, at most: the tenant's own that wait, and of
    /// each other tenant's its share over that time. Looks at every tenant that waits.
    pub fn tokens_ahead(&self, tenant: &TenantId, weight: u32, tokens: u64) -> u64 {
        let own = self.backlog(tenant).1;
        let until = own.saturating_add(tokens.max(1));
        let others = self.active.iter().filter(|seat| seat.tenant != *tenant).map(|seat| {
            let flow = &self.flows[&seat.tenant];
            let share = u128::from(until) * u128::from(flow.weight) / u128::from(weight.max(1));
            flow.tokens.min(u64::try_from(share).unwrap_or(u64::MAX))
        });
        others.fold(own, u64::saturating_add)
    }

    /// Requests and tokens of one tenant that wait.
    pub fn backlog(&self, tenant: &TenantId) -> (usize, u64) {
        self.flows.get(tenant).map_or((0, 0), |flow| (flow.entries.len(), flow.tokens))
    }

    /// Tenants that wait.
    pub fn tenants(&self) -> impl ExactSizeIterator<Item = &TenantId> {
        self.active.iter().map(|seat| &seat.tenant)
    }

    /// Requests that wait.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether none waits.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Uncached tokens that wait.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    fn check(&self, tenant: &TenantId, tokens: u64) -> Result<(), Refused> {
        let QueueBounds { n_requests_max, tokens_max, n_requests_per_tenant_max, tokens_per_tenant_max, .. } =
            self.bounds;
        let (n_own, own) = self.backlog(tenant);
        let is_over = |waiting: u64, most: u64| waiting > 0 && waiting.saturating_add(tokens) > most;
        if n_own >= n_requests_per_tenant_max {
            return Err(Refused::TenantRequests(n_own));
        }
        if is_over(own, tokens_per_tenant_max) {
            return Err(Refused::TenantTokens(own));
        }
        if self.len() >= n_requests_max {
            return Err(Refused::Requests(self.len()));
        }
        if is_over(self.tokens, tokens_max) {
            return Err(Refused::Tokens(self.tokens));
        }
        Ok(())
    }

    /// Finds a request that can be placed, and its cost; notes those it passed over.
    fn search(
        &self,
        passed: &mut Vec<Ticket>,
        try_place: &mut impl FnMut(&T, Turn) -> Option<u64>,
    ) -> Option<(Ticket, u64)> {
        let mut n_before = 0;
        let offers = self.active.iter().flat_map(|seat| {
            // Who comes after one that gives way does so too.
            n_before = n_before.max(self.n_before(seat));
            let n_before = n_before;
            let entries = self.flows[&seat.tenant].entries.values().take(self.bounds.n_scan_per_tenant_max.max(1));
            entries.map(move |entry| (entry, n_before))
        });
        for (entry, n_before) in offers.take(self.bounds.n_scan_max.max(1)) {
            let is_overdue = entry.n_overtaken >= self.bounds.n_overtakes_max;
            let turn = Turn { n_passed: passed.len(), is_overdue, n_before };
            if let Some(tokens) = try_place(&entry.item, turn) {
                return Some((entry.ticket, tokens));
            }
            if turn.is_overdue {
                return None;
            }
            passed.push(entry.ticket);
        }
        None
    }

    /// Who elsewhere comes before a tenant of this router.
    fn n_before(&self, seat: &Seat) -> u32 {
        let rivals = self.rivals.iter().take_while(|rival| *rival < seat);
        let placed = |router: &Incarnation| self.placed_elsewhere.get(router).copied().unwrap_or(0);
        let routers = self.elsewhere.get(&seat.tenant).into_iter().flatten();
        let before = routers.filter(|&router| placed(router) < self.placed);
        (rivals.map(drop).chain(before.map(drop)).take(N_BEFORE_MAX as usize).count()) as u32
    }

    /// Charges a tenant and moves the round on.
    fn serve(&mut self, tenant: &TenantId, weight: Option<u32>, tokens: u64) {
        self.n_made += 1;
        let (since, round) = (self.n_made, self.round);
        let before = self.change(tenant, |flow| {
            flow.weight = weight.map_or(flow.weight, |weight| weight.max(1));
            if !flow.is_present() {
                flow.seat.served = flow.seat.served.max(round);
            }
            let before = flow.seat.served;
            flow.seat = Seat {
                served: before + by_weight(tokens.max(1), flow.weight),
                is_old: true,
                since,
                tenant: flow.seat.tenant.clone(),
            };
            before
        });
        self.round = self.round.max(before);
        while let Some(seat) = self.indebted.first()
            && (seat.served <= self.round || self.indebted.len() > N_INDEBTED_MAX)
        {
            let seat = self.indebted.pop_first().expect("it was just seen");
            self.flows.remove(&seat.tenant);
        }
    }

    /// Changes a tenant and seats it anew; one that waits nowhere and owes nothing is forgotten.
    fn change<R>(&mut self, tenant: &TenantId, change: impl FnOnce(&mut Flow<T>) -> R) -> R {
        let mut flow = self.flows.remove(tenant).unwrap_or_else(|| Flow::new(tenant.clone(), self.round));
        for seats in [&mut self.active, &mut self.rivals, &mut self.indebted] {
            seats.remove(&flow.seat);
        }
        let result = change(&mut flow);
        let seats = match (flow.entries.is_empty(), flow.waits_elsewhere) {
            (false, _) => &mut self.active,
            (true, true) => &mut self.rivals,
            (true, false) => &mut self.indebted,
        };
        if flow.is_present() || flow.seat.served > self.round {
            seats.insert(flow.seat.clone());
            self.flows.insert(tenant.clone(), flow);
        }
        result
    }
}

impl<T> Flow<T> {
    fn new(tenant: TenantId, round: u128) -> Self {
        let seat = Seat { served: round, is_old: false, since: 0, tenant };
        Self { seat, weight: 1, tokens: 0, entries: BTreeMap::new(), waits_elsewhere: false }
    }

    /// Whether it waits anywhere, and so keeps what it lags behind.
    fn is_present(&self) -> bool {
        self.waits_elsewhere || !self.entries.is_empty()
    }

    /// Begins to wait, at the present round unless it owes more, if it did not wait before.
    fn join(&mut self, round: u128, since: u64) {
        if !self.is_present() {
            self.seat.served = self.seat.served.max(round);
            self.seat.is_old = self.seat.served > round;
            self.seat.since = since;
        }
    }
}

fn by_weight(tokens: u64, weight: u32) -> u128 {
    u128::from(tokens) * SCALE / u128::from(weight)
}
