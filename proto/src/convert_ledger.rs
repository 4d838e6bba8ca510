//! Conversions between wire and contract types of the load ledger.

use contract::demand::{RouterDemand, TenantDemand};
use contract::ids::Incarnation;
use contract::ledger::{LedgerEvent, PlacedWork, PlacementKey};
use contract::placements::{LedgerBatch, LedgerNews};

use crate::cluster::v1 as wire;
use crate::convert::{WireError, required};

impl From<&PlacedWork> for wire::PlacedWork {
    fn from(work: &PlacedWork) -> Self {
        Self {
            engine: Some((&work.engine).into()),
            tenant: work.tenant.to_string(),
            tokens_new: work.tokens_new,
            tokens_prompt: work.tokens_prompt,
            prefill_us: work.prefill_us,
        }
    }
}

impl TryFrom<wire::PlacedWork> for PlacedWork {
    type Error = WireError;

    fn try_from(work: wire::PlacedWork) -> Result<Self, WireError> {
        Ok(Self {
            engine: required("engine", work.engine)?.into(),
            tenant: work.tenant.into(),
            tokens_new: work.tokens_new,
            tokens_prompt: work.tokens_prompt,
            prefill_us: work.prefill_us,
        })
    }
}

impl From<&RouterDemand> for wire::RouterDemand {
    fn from(demand: &RouterDemand) -> Self {
        let tenant = |demand: &TenantDemand| wire::TenantDemand {
            tenant: demand.tenant.to_string(),
            requests_per_s: demand.requests_per_s,
            tokens_per_s: demand.tokens_per_s,
            n_running: demand.n_running,
            waiting: demand.is_waiting,
        };
        Self { number: demand.number, tenants: demand.tenants.iter().map(tenant).collect() }
    }
}

impl From<wire::RouterDemand> for RouterDemand {
    fn from(demand: wire::RouterDemand) -> Self {
        let tenant = |demand: wire::TenantDemand| TenantDemand {
            tenant: demand.tenant.into(),
            requests_per_s: demand.requests_per_s,
            tokens_per_s: demand.tokens_per_s,
            n_running: demand.n_running,
            is_waiting: demand.waiting,
        };
        Self { number: demand.number, tenants: demand.tenants.into_iter().map(tenant).collect() }
    }
}

/// An event of the batch's router; that a router is gone is news, not an event of its own.
fn event(event: &LedgerEvent) -> Option<wire::LedgerEvent> {
    use wire::LedgerEventKind as Kind;
    let (kind, key, work) = match event {
        LedgerEvent::Placed(key, work) => (Kind::Placed, key, Some(work.into())),
        LedgerEvent::FirstToken(key) => (Kind::FirstToken, key, None),
        LedgerEvent::Finished(key) => (Kind::Finished, key, None),
        LedgerEvent::RouterGone(_) => return None,
    };
    Some(wire::LedgerEvent { kind: kind.into(), number: key.number, work })
}

fn event_of(router: Incarnation, event: wire::LedgerEvent) -> Result<LedgerEvent, WireError> {
    let key = PlacementKey { router, number: event.number };
    match wire::LedgerEventKind::try_from(event.kind) {
        Ok(wire::LedgerEventKind::Placed) => Ok(LedgerEvent::Placed(key, required("work", event.work)?.try_into()?)),
        Ok(wire::LedgerEventKind::FirstToken) => Ok(LedgerEvent::FirstToken(key)),
        Ok(wire::LedgerEventKind::Finished) => Ok(LedgerEvent::Finished(key)),
        Ok(wire::LedgerEventKind::Unspecified) | Err(_) => {
            Err(WireError::UnknownEnum { field: "kind", value: event.kind })
        }
    }
}

impl From<&LedgerBatch> for wire::LedgerBatch {
    fn from(batch: &LedgerBatch) -> Self {
        let told = Self { router: batch.router.0, ..Self::default() };
        let events = |events: &[LedgerEvent]| events.iter().filter_map(event).collect();
        match &batch.news {
            LedgerNews::Snapshot { sequence, events: all } => {
                Self { sequence: *sequence, snapshot: true, events: events(all), ..told }
            }
            LedgerNews::Events { sequence, events: new } => Self { sequence: *sequence, events: events(new), ..told },
            LedgerNews::Demand(demand) => Self { demand: Some(demand.into()), ..told },
            LedgerNews::Gone => Self { gone: true, ..told },
        }
    }
}

impl TryFrom<wire::LedgerBatch> for LedgerBatch {
    type Error = WireError;

    fn try_from(batch: wire::LedgerBatch) -> Result<Self, WireError> {
        let router = Incarnation(batch.router);
        let (sequence, events) = (batch.sequence, batch.events.into_iter());
        let events = events.map(|event| event_of(router, event)).collect::<Result<_, _>>()?;
        let news = match (batch.gone, batch.demand, batch.snapshot) {
            (true, _, _) => LedgerNews::Gone,
            (false, Some(demand), _) => LedgerNews::Demand(demand.into()),
            (false, None, true) => LedgerNews::Snapshot { sequence, events },
            (false, None, false) => LedgerNews::Events { sequence, events },
        };
        Ok(Self { router, news })
    }
}

#[cfg(test)]
mod tests {
    use contract::ids::{DataRank, EngineId};

    use super::*;

    fn demand() -> RouterDemand {
        let tenant =
            TenantDemand { tenant: "t".into(), requests_per_s: 0.5, tokens_per_s: 1e6, n_running: 3, is_waiting: true };
        RouterDemand { number: 2, tenants: vec![tenant] }
    }

    #[test]
    fn batches_survive_the_wire_and_broken_ones_are_refused() {
        let router = Incarnation(4);
        let key = PlacementKey { router, number: 9 };
        let engine = EngineId { worker: "w".into(), incarnation: Incarnation(5), data_rank: DataRank(1) };
        let work = PlacedWork { engine, tenant: "t".into(), tokens_new: 1, tokens_prompt: 2, prefill_us: 3 };
        let events = vec![LedgerEvent::Placed(key, work), LedgerEvent::FirstToken(key), LedgerEvent::Finished(key)];
        let all = [
            LedgerNews::Snapshot { sequence: 7, events: events.clone() },
            LedgerNews::Events { sequence: 8, events },
            LedgerNews::Demand(demand()),
            LedgerNews::Gone,
        ];
        for news in all {
            let batch = LedgerBatch { router, news };
            assert_eq!(LedgerBatch::try_from(wire::LedgerBatch::from(&batch)), Ok(batch));
        }
        for (kind, complaint) in [(0, "kind"), (1, "work"), (9, "kind")] {
            let event = wire::LedgerEvent { kind, number: 1, work: None };
            let batch = wire::LedgerBatch { events: vec![event], ..wire::LedgerBatch::default() };
            let error = LedgerBatch::try_from(batch).unwrap_err().to_string();
            assert!(error.contains(complaint), "{error}");
        }
    }
}
