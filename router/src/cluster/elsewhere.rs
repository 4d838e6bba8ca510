//! What this router hears of the others that it shares tenants with.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use contract::demand::RouterDemand;
use contract::ids::{Incarnation, TenantId};
use contract::ledger::PlacedWork;
use tokio::sync::watch;

/// What each router is asked for.
pub(crate) type Demands = BTreeMap<Incarnation, RouterDemand>;

/// Tokens by router and tenant.
type Served = BTreeMap<(Incarnation, TenantId), u64>;

/// News of other routers that wait to be looked at.
#[derive(Default)]
pub(crate) struct Elsewhere {
    /// None where no scheduler tells.
    pub(super) demands: watch::Sender<Option<Demands>>,
    served: Mutex<Served>,
}

impl Elsewhere {
    /// Follows what each of the others is asked for; none where no scheduler tells.
    pub(crate) fn follow_demands(&self) -> watch::Receiver<Option<Demands>> {
        self.demands.subscribe()
    }

    /// Tokens that others placed since this was last asked, by router and tenant.
    pub(crate) fn take_served(&self) -> Served {
        std::mem::take(&mut self.served.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Another router has placed a request.
    pub(super) fn placed(&self, by: Incarnation, work: &PlacedWork) {
        // Further choices of a prompt compute nothing of it.
        if work.tokens_new > 0 {
            let mut served = self.served.lock().unwrap_or_else(PoisonError::into_inner);
            *served.entry((by, work.tenant.clone())).or_default() += u64::from(work.tokens_new);
        }
    }
}
