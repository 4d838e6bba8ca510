//! The loop that owns the state: events in, views out, at its own pace.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use contract::ids::EngineId;
use contract::occupancy::Occupancy;
use contract::view::{ClusterView, DrainReason};
use daemon::clock;
use daemon::shutdown::Shutdown;
use membership::WatchStream;
use tokio::sync::{mpsc, watch};
use tokio::time::MissedTickBehavior;

use crate::state::{State, StreamId};
use crate::telemetry::Telemetry;

/// Time between two looks at the roles of workers.
const ROLES_INTERVAL: Duration = Duration::from_secs(1);

/// Reports that may wait; beyond it their streams are not read.
pub(crate) const EVENTS_MAX: usize = 1_024;

/// What reports bring; membership has a stream of its own.
#[derive(Debug)]
pub(crate) enum Event {
    /// An engine reports.
    Report {
        /// On which stream.
        stream: StreamId,
        /// What.
        occupancy: Box<Occupancy>,
    },
    /// A stream of reports ended.
    StreamEnded(StreamId),
}

/// The latest view; none before membership was reached for the first time.
pub(crate) type Latest = Option<Arc<ClusterView>>;

/// Owns the state.
pub(crate) struct Publisher {
    pub(crate) state: State,
    pub(crate) telemetry: Telemetry,
    /// Shortest time between two views.
    pub(crate) interval: Duration,
    pub(crate) views: watch::Sender<Latest>,
    /// Engines that the last view wishes to drain since they stand still.
    pub(crate) stalled: BTreeSet<EngineId>,
}

impl Publisher {
    /// Runs until `shutdown`, or until nobody can send events any more.
    pub(crate) async fn run(mut self, mut events: mpsc::Receiver<Event>, mut members: WatchStream, shutdown: Shutdown) {
        let mut published: Option<Instant> = None;
        let mut roles = tokio::time::interval(ROLES_INTERVAL);
        roles.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let now = clock::now();
            let is_due = self.is_changed();
            let due = is_due
                .then(|| published.map_or(Duration::ZERO, |at| (at + self.interval).saturating_duration_since(now)));
            if due == Some(Duration::ZERO) {
                self.publish();
                published = Some(now);
                continue;
            }
            let stale = self.state.next_tick().map(|at| at.saturating_duration_since(now) + Duration::from_millis(1));
            let wait = due.into_iter().chain(stale).min();
            tokio::select! {
                () = shutdown.triggered() => return,
                event = members.next() => match event {
                    Some(event) => self.member(event),
                    None => return,
                },
                event = events.recv() => match event {
                    Some(event) => self.event(event),
                    None => return,
                },
                () = sleep_or_never(wait) => self.state.tick(clock::now()),
                _ = roles.tick() => self.give_roles(),
            }
        }
    }

    fn member(&mut self, event: membership::WatchEvent) {
        for refusal in self.state.member(event) {
            tracing::error!("{refusal}");
            self.telemetry.refused(&refusal);
        }
        // The first snapshot is a view even when it is empty.
        if self.views.borrow().is_none() {
            self.publish();
        }
        self.telemetry.observe(&self.state);
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Report { stream, occupancy } => {
                let engine = occupancy.engine.clone();
                if let Err(ignored) = self.state.report(*occupancy, stream, clock::now()) {
                    tracing::debug!(%engine, reason = %ignored, "occupancy report ignored");
                    self.telemetry.ignored(ignored);
                }
            }
            Event::StreamEnded(stream) => self.state.stream_ended(stream),
        }
    }

    fn give_roles(&mut self) {
        if self.state.give_roles(clock::now()) {
            for view in &self.state.view().engines {
                tracing::info!(engine = %view.engine, role = ?view.role, "roles have changed");
            }
        }
    }

    fn is_changed(&self) -> bool {
        self.views.borrow().as_ref().is_some_and(|view| view.version != self.state.view().version)
    }

    fn publish(&mut self) {
        self.tell_wishes();
        self.views.send_replace(Some(Arc::new(self.state.view().clone())));
        self.telemetry.observe(&self.state);
    }

    fn tell_wishes(&mut self) {
        let views = self.state.view().engines.iter();
        let is_stalled = views.filter(|view| view.draining == Some(DrainReason::Stalled));
        let stalled: BTreeSet<EngineId> = is_stalled.map(|view| view.engine.clone()).collect();
        for engine in stalled.difference(&self.stalled) {
            tracing::warn!(%engine, "stands still: it gets no new work until it steps again");
        }
        for engine in self.stalled.difference(&stalled) {
            tracing::info!(%engine, "is no longer known to stand still");
        }
        self.stalled = stalled;
    }
}

/// Sleeps for so long, or for ever.
pub(crate) async fn sleep_or_never(duration: Option<Duration>) {
    match duration {
        Some(duration) => tokio::time::sleep(duration).await,
        None => std::future::pending().await,
    }
}
