//! What a worker tells of itself: its cache to routers, its occupancy to the scheduler.

use std::time::Duration;

use contract::kv::KvEvent;
use contract::occupancy::Occupancy;

use super::Worker;
use crate::event::{Event, KvMessage, ToScheduler, ToWorker};
use crate::network::Network;

/// Shortest time between two reports of occupancy.
const REPORT_INTERVAL: Duration = Duration::from_millis(10);
/// Time between two signs of life.
pub(crate) const HEARTBEAT: Duration = Duration::from_secs(1);

impl Worker {
    /// Lets a router follow the cache.
    pub(crate) fn watch(&mut self, router: usize, connection: u32) {
        self.watchers[router] = Some(connection);
    }

    pub(super) fn publish_kv(&mut self, network: &mut Network) {
        self.kv_events.clear();
        let first = self.engine.drain_kv_events(&mut self.kv_events);
        if self.kv_events.is_empty() {
            return;
        }
        if let Some(ever) = &mut self.ever_cached {
            ever.extend(self.kv_events.iter().filter_map(|event| match event {
                KvEvent::BlockStored { hash, .. } => Some(*hash),
                KvEvent::BlockRemoved { .. } | KvEvent::AllBlocksCleared => None,
            }));
        }
        let sequence = first + self.kv_events.len() as u64 - 1;
        let events = self.kv_events.as_slice().into();
        self.tell_watchers(&KvMessage::Events { sequence, events }, network);
    }

    pub(super) fn beat(&mut self, network: &mut Network) {
        self.publish_kv(network);
        let message = KvMessage::Heartbeat { sequence: self.engine.kv_sequence(), digest: self.engine.kv_digest() };
        self.tell_watchers(&message, network);
        self.change(network);
        network.after(HEARTBEAT, Event::Worker(self.index, ToWorker::Heartbeat { life: self.life }));
    }

    fn tell_watchers(&self, message: &KvMessage, network: &mut Network) {
        for (router, watcher) in self.watchers.iter().enumerate() {
            if let Some(connection) = *watcher {
                network.kv(router, self.index, connection, message.clone());
            }
        }
    }

    /// Sees to it that the scheduler hears of a change soon.
    pub(super) fn change(&mut self, network: &mut Network) {
        if !std::mem::replace(&mut self.is_report_due, true) {
            let at = network.now.max(self.reported + REPORT_INTERVAL);
            network.at(at, Event::Worker(self.index, ToWorker::Report { life: self.life }));
        }
    }

    pub(super) fn report(&mut self, network: &mut Network) {
        self.is_report_due = false;
        self.reported = network.now;
        let transfer_ms_per_token = 1e3 / self.links.tokens_per_s;
        let occupancy = Occupancy { transfer_ms_per_token, ..self.engine.occupancy(self.id.clone(), self.cost) };
        network.report(ToScheduler::Report { worker: self.index, occupancy: Box::new(occupancy) });
    }
}
