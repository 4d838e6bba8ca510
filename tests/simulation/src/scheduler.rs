//! The scheduler: its state machine over members and reports, and the relay of what routers place.

use std::sync::Arc;
use std::time::Duration;

use contract::view::{Member, MemberKind};
use membership::WatchEvent;
use scheduler::state::roles::RoleSettings;
use scheduler::state::{State, StreamId};

use crate::event::{Event, ToRouter, ToScheduler};
use crate::network::Network;
use crate::prepared::Prepared;
use crate::worker::Worker;

/// Shortest time between two views.
const VIEW_INTERVAL: Duration = Duration::from_millis(5);
/// Reports older than this do not count.
const STALE_AFTER: Duration = Duration::from_secs(5);

/// Time between two looks at the roles of workers.
const ROLES_INTERVAL: Duration = Duration::from_secs(1);

/// One scheduler.
pub(crate) struct Scheduler {
    state: State,
    roles: RoleSettings,
    n_routers: usize,
    epoch: u64,
    published: (Duration, u64),
    is_publish_due: bool,
}

impl Scheduler {
    pub(crate) fn new(n_routers: usize, roles: RoleSettings) -> Self {
        Self {
            state: State::new(1, STALE_AFTER, roles),
            roles,
            n_routers,
            epoch: 1,
            published: (Duration::ZERO, 0),
            is_publish_due: false,
        }
    }

    /// Begins, for the first time or again, with who is a member now.
    pub(crate) fn begin(&mut self, workers: &[Worker], prepared: &Prepared, network: &mut Network) {
        self.epoch += 1;
        self.state = State::new(self.epoch, STALE_AFTER, self.roles);
        self.published = (Duration::ZERO, 0);
        self.is_publish_due = false;
        let members = workers.iter().filter(|worker| worker.is_up).map(|worker| member(worker, prepared));
        self.state.member(WatchEvent::Snapshot(members.collect()));
        self.change(network);
    }

    pub(crate) fn hear(&mut self, message: ToScheduler, network: &mut Network) {
        if matches!(message, ToScheduler::GiveRoles) {
            network.after(ROLES_INTERVAL, Event::Scheduler(ToScheduler::GiveRoles));
        }
        if !network.is_scheduler_up {
            return;
        }
        match message {
            ToScheduler::Member(event) => {
                self.state.member(event);
            }
            ToScheduler::Report { worker, occupancy } => {
                // What it ignores is a report of a life that is over, or of one that it has not heard of yet.
                let _ = self.state.report(*occupancy, StreamId(worker as u64), network.instant());
            }
            ToScheduler::Ledger { from, event } => {
                for router in (0..self.n_routers).filter(|&router| router != from) {
                    network.after(Duration::ZERO, Event::Router(router, ToRouter::Ledger(event.clone())));
                }
                return;
            }
            ToScheduler::Waiting { at, tenants } => {
                for router in (0..self.n_routers).filter(|&router| router != at) {
                    let tenants = tenants.clone();
                    network.after(Duration::ZERO, Event::Router(router, ToRouter::Waiting { at, tenants }));
                }
                return;
            }
            ToScheduler::GiveRoles => {
                self.state.give_roles(network.instant());
            }
            ToScheduler::Publish => {
                self.is_publish_due = false;
                self.state.tick(network.instant());
                self.publish(network);
            }
        }
        self.change(network);
    }

    fn change(&mut self, network: &mut Network) {
        if self.state.view().version != self.published.1 && !std::mem::replace(&mut self.is_publish_due, true) {
            let at = network.now.max(self.published.0 + VIEW_INTERVAL);
            network.at(at, Event::Scheduler(ToScheduler::Publish));
        }
    }

    fn publish(&mut self, network: &mut Network) {
        let view = Arc::new(self.state.view().clone());
        self.published = (network.now, view.version);
        for router in 0..self.n_routers {
            network.view(router, Arc::clone(&view));
        }
    }
}

/// A worker's registration.
pub(crate) fn member(worker: &Worker, prepared: &Prepared) -> Member {
    Member {
        kind: MemberKind::Worker,
        id: worker.id.worker.to_string(),
        incarnation: worker.id.incarnation,
        address: String::new(),
        n_data_ranks: 1,
        identity: Some(prepared.identity().clone()),
        draining: worker.is_draining,
        role: worker.role,
        epoch: 1,
    }
}
