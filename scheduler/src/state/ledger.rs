//! The relay of the load ledger, pure: what a router tells goes to all others at once, and is kept for later ones.
//!
//! A router whose stream ends keeps its placements for a grace, in which it may come back.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use contract::ids::Incarnation;
use contract::placements::{LedgerBatch, LedgerNews, MissedEvents, Placements};
use thiserror::Error;

use super::StreamId;

/// A batch that is to go to a router.
#[derive(Clone, Debug, PartialEq)]
pub struct Delivery {
    /// On which stream.
    pub to: StreamId,
    /// What.
    pub batch: Arc<LedgerBatch>,
}

/// Why a router must begin anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Refused {
    /// The stream does not begin with a snapshot, or another has taken its place.
    #[error("the stream speaks for no router: a snapshot must come first")]
    NoSnapshot,
    /// The stream speaks for another router.
    #[error("the stream of router {expected} tells of router {found}")]
    OtherRouter {
        /// Whom it speaks for.
        expected: Incarnation,
        /// Whom it told of.
        found: Incarnation,
    },
    /// Events are missing.
    #[error(transparent)]
    Missed(#[from] MissedEvents),
}

/// What all routers run, and who is to hear of it.
#[derive(Debug)]
pub struct LedgerRelay {
    grace: Duration,
    routers: BTreeMap<Incarnation, Router>,
    streams: HashMap<StreamId, Incarnation>,
}

#[derive(Debug)]
struct Router {
    placements: Placements,
    link: Link,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Link {
    On(StreamId),
    LostUntil(Instant),
}

impl LedgerRelay {
    /// Starts with nobody; a router whose stream ended is gone after `grace`.
    #[must_use]
    pub fn new(grace: Duration) -> Self {
        Self { grace, routers: BTreeMap::new(), streams: HashMap::new() }
    }

    /// Takes a batch that came on `stream`; the first must be a snapshot and says whom the stream speaks for.
    ///
    /// # Errors
    /// Why the stream must end; nothing has changed then.
    pub fn take(&mut self, stream: StreamId, batch: LedgerBatch) -> Result<Vec<Delivery>, Refused> {
        let found = batch.router;
        let deliveries = match self.streams.get(&stream) {
            Some(&expected) if expected != found => return Err(Refused::OtherRouter { expected, found }),
            Some(_) => Vec::new(),
            None => match batch.news {
                LedgerNews::Snapshot { .. } => self.begin(stream, found),
                _ => return Err(Refused::NoSnapshot),
            },
        };
        let router = self.routers.get_mut(&found).expect("a stream speaks for a router that is known");
        router.placements.take(&batch.news)?;
        if batch.news == LedgerNews::Gone {
            self.routers.remove(&found);
            self.streams.remove(&stream);
        }
        Ok(self.tell_others(batch).chain(deliveries).collect())
    }

    /// Gives the router of a stream that ended at `now` its grace.
    pub fn ended(&mut self, stream: StreamId, now: Instant) {
        if let Some(router) = self.streams.remove(&stream) {
            let router = self.routers.get_mut(&router).expect("a stream speaks for a router that is known");
            router.link = Link::LostUntil(now + self.grace);
        }
    }

    /// Forgets routers whose grace is over at `now`.
    pub fn tick(&mut self, now: Instant) -> Vec<Delivery> {
        let is_over = |router: &Router| matches!(router.link, Link::LostUntil(until) if until <= now);
        let over: Vec<Incarnation> =
            self.routers.iter().filter(|(_, router)| is_over(router)).map(|(&id, _)| id).collect();
        self.routers.retain(|_, router| !is_over(router));
        over.into_iter().flat_map(|router| self.tell_others(LedgerBatch { router, news: LedgerNews::Gone })).collect()
    }

    /// When [`Self::tick`] has something to do next.
    #[must_use]
    pub fn next_tick(&self) -> Option<Instant> {
        let until = |router: &Router| match router.link {
            Link::On(_) => None,
            Link::LostUntil(until) => Some(until),
        };
        self.routers.values().filter_map(until).min()
    }

    /// Routers that share the ledger, those in their grace among them.
    #[must_use]
    pub fn n_routers(&self) -> usize {
        self.routers.len()
    }

    /// Placements of all routers that have not ended.
    #[must_use]
    pub fn n_placements(&self) -> usize {
        self.routers.values().map(|router| router.placements.len()).sum()
    }

    /// Lets a stream speak for a router from now on, and tells it what the others run.
    fn begin(&mut self, stream: StreamId, id: Incarnation) -> Vec<Delivery> {
        let others = self.routers.iter().filter(|(other, _)| **other != id);
        let tell = |(&router, other): (&Incarnation, &Router)| {
            let delivery = move |news| Delivery { to: stream, batch: Arc::new(LedgerBatch { router, news }) };
            other.placements.all().map(delivery)
        };
        let deliveries = others.flat_map(tell).collect();
        self.streams.insert(stream, id);
        let link = Link::On(stream);
        let router = self.routers.entry(id).or_insert_with(|| Router { placements: Placements::default(), link });
        if let Link::On(before) = std::mem::replace(&mut router.link, link)
            && before != stream
        {
            self.streams.remove(&before);
        }
        deliveries
    }

    fn tell_others(&self, batch: LedgerBatch) -> impl Iterator<Item = Delivery> + use<> {
        let about = batch.router;
        let batch = Arc::new(batch);
        let others = self.streams.iter().filter(|(_, router)| **router != about).map(|(&to, _)| to);
        let others: Vec<StreamId> = others.collect();
        others.into_iter().map(move |to| Delivery { to, batch: Arc::clone(&batch) })
    }
}

#[cfg(test)]
mod tests;
