//! What routers have in common: turns between tenants, and their quotas. Each tells what it is asked for, and hears it of
//! the others.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use contract::demand::TenantDemand;
use contract::ids::{Incarnation, TenantId};
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

use super::Service;
use crate::cluster::Demands;

/// Time between two reports of what tenants ask for.
const REPORT_INTERVAL: Duration = Duration::from_millis(250);
/// Shortest time between two reports of who waits, which go at once otherwise.
const WAITING_INTERVAL: Duration = Duration::from_millis(5);

impl Service {
    /// Tells others what this router is asked for, and keeps it to its share of quotas; never returns.
    pub(crate) async fn share(&self) {
        let (mut demands, mut n_routers) =
            (self.cluster.elsewhere.follow_demands(), self.cluster.n_routers.subscribe());
        let mut report = tokio::time::interval(REPORT_INTERVAL);
        report.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut asked, mut told) = (Vec::new(), Vec::new());
        loop {
            let is_waiting_new = tokio::select! {
                () = self.gate.tenants_changed() => true,
                _ = report.tick() => {
                    asked = self.admission.quotas().demand(daemon::clock::now());
                    false
                }
                Ok(()) = demands.changed() => false,
                Ok(()) = n_routers.changed() => false,
            };
            let demand = with_waiting(&asked, self.gate.tenants());
            if demand != told {
                self.cluster.tell_demand(demand.clone());
                told = demand;
            }
            self.take_share(demands.borrow_and_update().as_ref(), *n_routers.borrow_and_update());
            if is_waiting_new {
                tokio::time::sleep(WAITING_INTERVAL).await;
            }
        }
    }

    /// Counts what others served, and notes who waits there.
    pub(super) fn hear_others(&self, demands: &mut watch::Receiver<Option<Demands>>) {
        // Read first: what those who wait no more were served is counted by then.
        let is_new = demands.has_changed().unwrap_or(false);
        let waiting = is_new.then(|| self.waiting(demands.borrow_and_update().as_ref()));
        let served = self.cluster.elsewhere.take_served();
        if !served.is_empty() {
            let tenant = |name: &TenantId| &**self.admission.named(name);
            self.gate.charge(served.iter().map(|((by, name), &tokens)| (*by, tenant(name), tokens)));
        }
        waiting.into_iter().for_each(|tenants| self.gate.set_elsewhere(tenants));
    }

    /// Tenants that wait at other routers, and where.
    fn waiting(&self, demands: Option<&Demands>) -> BTreeMap<TenantId, BTreeSet<Incarnation>> {
        let mut waiting: BTreeMap<TenantId, BTreeSet<Incarnation>> = BTreeMap::new();
        for (&router, demand) in demands.into_iter().flatten() {
            for demand in demand.tenants.iter().filter(|demand| demand.is_waiting) {
                let tenant = self.admission.named(&demand.tenant);
                waiting.entry(tenant.name.clone()).or_default().insert(router);
            }
        }
        waiting
    }

    fn take_share(&self, others: Option<&Demands>, n_routers: u32) {
        let now = daemon::clock::now();
        let (own, demand) = self.cluster.own_demand();
        let all =
            others.map(|others| others.iter().map(|(&id, demand)| (id, demand)).chain([(own, &demand)]).collect());
        self.admission.quotas().set_shares(now, own, all.as_ref(), n_routers);
    }
}

/// What is asked for, by tenant, with who waits.
fn with_waiting(asked: &[TenantDemand], waiting: BTreeSet<TenantId>) -> Vec<TenantDemand> {
    let mut all: BTreeMap<TenantId, TenantDemand> =
        asked.iter().map(|demand| (demand.tenant.clone(), demand.clone())).collect();
    for tenant in waiting {
        all.entry(tenant).or_insert_with_key(|tenant| TenantDemand::none(tenant.clone())).is_waiting = true;
    }
    all.into_values().collect()
}
