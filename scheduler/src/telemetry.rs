//! The scheduler's own metrics.

use contract::view::{DrainReason, MemberKind};
use daemon::telemetry::metrics::{Counter, Gauge, Scope, scope};
use daemon::telemetry::names;

use crate::state::ledger::LedgerRelay;
use crate::state::{Ignored, Refusal, State};

/// Shows the state.
#[derive(Debug)]
pub(crate) struct Telemetry {
    scope: Scope,
    workers: Gauge,
    routers: Gauge,
    schedulers: Gauge,
    engines: [Gauge; 5],
    blocks: [Gauge; 4],
}

impl Telemetry {
    pub(crate) fn new() -> Self {
        let scope = scope("scheduler", "");
        let members = |kind| scope.gauge(&names::CLUSTER_MEMBERS, &[kind]);
        let engines = |state| scope.gauge(&names::CLUSTER_ENGINES, &[state]);
        let blocks = |state| scope.gauge(&names::KV_CACHE_BLOCKS, &[state]);
        Self {
            workers: members("worker"),
            routers: members("router"),
            schedulers: members("scheduler"),
            engines: ["reporting", "silent", "draining", "stalled", "refused"].map(engines),
            blocks: ["total", "allocated", "cached", "free"].map(blocks),
            scope,
        }
    }

    /// Counts a report that changed nothing.
    pub(crate) fn ignored(&self, ignored: Ignored) {
        self.counter(&names::OCCUPANCY_IGNORED, ignored.label()).inc();
    }

    /// Counts a worker that was kept out.
    pub(crate) fn refused(&self, refusal: &Refusal) {
        self.counter(&names::CLUSTER_REFUSALS, refusal.label()).inc();
    }

    fn counter(&self, metric: &'static names::Metric, reason: &'static str) -> Counter {
        self.scope.counter(metric, &[reason])
    }

    /// Shows what the state holds now.
    pub(crate) fn observe(&self, state: &State) {
        let mut members = [0_i64; 3];
        for member in state.members() {
            members[match member.kind {
                MemberKind::Worker => 0,
                MemberKind::Router => 1,
                MemberKind::Scheduler => 2,
            }] += 1;
        }
        for (gauge, n) in [&self.workers, &self.routers, &self.schedulers].into_iter().zip(members) {
            gauge.set(n);
        }
        let mut engines = [0_i64; 5];
        let mut blocks = [0_i64; 4];
        for engine in &state.view().engines {
            let reported = engine.occupancy.as_ref();
            engines[match (engine.draining, reported) {
                (Some(DrainReason::Leaving), _) => 2,
                (Some(DrainReason::Stalled), _) => 3,
                (None, Some(_)) => 0,
                (None, None) => 1,
            }] += 1;
            if let Some(counts) = reported.map(|occupancy| occupancy.blocks) {
                let counts = [counts.total, counts.allocated, counts.cached, counts.free];
                blocks.iter_mut().zip(counts).for_each(|(sum, n)| *sum += i64::from(n));
            }
        }
        engines[4] = i64::try_from(state.refused().len()).unwrap_or(i64::MAX);
        for (gauge, n) in self.engines.iter().chain(&self.blocks).zip(engines.into_iter().chain(blocks)) {
            gauge.set(n);
        }
    }
}

/// Shows the load ledger.
#[derive(Debug)]
pub(crate) struct LedgerTelemetry {
    placements: Gauge,
    routers: Gauge,
}

impl LedgerTelemetry {
    pub(crate) fn new() -> Self {
        let scope = scope("scheduler", "");
        let (placements, routers) = (&names::LEDGER_PLACEMENTS, &names::LEDGER_ROUTERS);
        Self { placements: scope.gauge(placements, &[]), routers: scope.gauge(routers, &[]) }
    }

    /// Shows what the relay holds now.
    pub(crate) fn observe(&self, relay: &LedgerRelay) {
        self.placements.set(i64::try_from(relay.n_placements()).unwrap_or(i64::MAX));
        self.routers.set(i64::try_from(relay.n_routers()).unwrap_or(i64::MAX));
    }
}
