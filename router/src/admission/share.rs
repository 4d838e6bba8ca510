//! How a tenant's cluster-wide quota is split between routers: by what each was asked for lately.

use std::time::Instant;

/// What is split evenly, so that a router that nobody asked lately can begin at once.
const EVEN: f64 = 0.05;
/// Demand falls to a part in e in this time; after two seconds under a fiftieth of it is left.
const MEMORY_S: f64 = 0.5;

/// A demand per second that forgets.
#[derive(Clone, Debug)]
pub(super) struct Demand {
    recent: f64,
    at: Instant,
}

/// Splits a quota by demand (any unit): one fraction for each router, in order; together they are 1.
///
/// Equal where nobody asks for anything, as each router's is when it knows of no demand.
pub fn divide(demand: &[f64]) -> Vec<f64> {
    let equal = 1.0 / demand.len() as f64;
    let known = |demand: f64| if demand.is_finite() { demand.max(0.0) } else { 0.0 };
    let whole: f64 = demand.iter().copied().map(known).sum();
    let of = |&demand: &f64| {
        if whole > 0.0 { EVEN * equal + (1.0 - EVEN) * known(demand) / whole } else { equal }
    };
    demand.iter().map(of).collect()
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
