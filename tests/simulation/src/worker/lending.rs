//! The prefill worker's side of a prompt that moves: it computes, sends blocks as they are ready, and keeps them until
//! whoever ordered has read them, has gone, or the lease is over.

use std::time::Duration;

use contract::error::RequestError;
use contract::ids::{EngineId, RequestId};
use worker::transfer::{Follower, Header, Order, Progress, WORKING_INTERVAL};

use super::fetching::header;
use super::{Worker, leaving};
use crate::event::{Blocks, Event, PeerMessage, ToWorker};
use crate::network::Network;
use crate::options::Planted;

/// What a prompt is computed as for others: ids of requests are smaller.
fn id(ticket: u64) -> RequestId {
    RequestId((1 << 64) + u128::from(ticket))
}

/// A prompt that is computed for another worker.
pub(super) struct Lent {
    peer: usize,
    fetch: u64,
    /// As the order names it.
    frame: Header,
    n_tokens: u32,
    /// Blocks that have been sent.
    sent: u32,
    /// Nothing more is to be said.
    is_told: bool,
    progress: Follower,
}

impl Worker {
    pub(super) fn hear_peer(&mut self, from: usize, message: PeerMessage, network: &mut Network) {
        match message {
            PeerMessage::Order { fetch, order, engine } => {
                if self.take_order((from, fetch), *order, &engine, network).is_err() {
                    network.tell_peer(self.index, from, PeerMessage::Failed { fetch });
                }
            }
            PeerMessage::Ack { fetch } | PeerMessage::Close { fetch } => {
                let of = |(_, lent): &(&u64, &Lent)| (lent.peer, lent.fetch) == (from, fetch);
                if let Some(ticket) = self.lent.iter().find(of).map(|(&ticket, _)| ticket) {
                    self.end_lent(ticket);
                }
            }
            PeerMessage::Working { fetch } => self.hear_of_fetch(fetch, network.now),
            PeerMessage::Done { fetch } => self.fetch_done(fetch, network),
            PeerMessage::Failed { fetch } => self.fetch_failed(fetch, network),
            PeerMessage::Closed { fetch } => self.close_fetch(fetch, network),
        }
    }

    /// What a worker that is down says: there is nobody to connect to.
    pub(super) fn refuse_peer(&self, from: usize, message: &PeerMessage, network: &mut Network) {
        if let PeerMessage::Order { fetch, .. } = *message {
            network.tell_peer(self.index, from, PeerMessage::Closed { fetch });
        }
    }

    /// The connections with a worker broke, on whichever side.
    pub(super) fn lose_peer(&mut self, peer: usize, network: &mut Network) {
        self.lose_fetches(peer, network);
        let lost: Vec<u64> = self.lent.iter().filter(|(_, lent)| lent.peer == peer).map(|(&it, _)| it).collect();
        lost.into_iter().for_each(|ticket| self.close_lent(ticket, network));
    }

    /// Whether the blocks of a ticket are kept, and their reader connected.
    pub(crate) fn lends(&self, ticket: u64) -> bool {
        self.is_up && self.lent.contains_key(&ticket)
    }

    /// Closes the connection of an order, and lets its blocks go after that.
    pub(super) fn close_lent(&mut self, ticket: u64, network: &mut Network) {
        let Some(lent) = self.lent.get(&ticket) else { return };
        network.tell_peer(self.index, lent.peer, PeerMessage::Closed { fetch: lent.fetch });
        self.end_lent(ticket);
    }

    fn end_lent(&mut self, ticket: u64) {
        self.lent.remove(&ticket);
        self.lendings.end(id(ticket), &mut self.engine);
    }

    fn take_order(
        &mut self,
        (peer, fetch): (usize, u64),
        order: Order,
        engine: &EngineId,
        network: &mut Network,
    ) -> Result<(), RequestError> {
        if *engine != self.id {
            return Err(RequestError::StalePlacement(format!("ordered from {engine}, this is {}", self.id)));
        }
        let ticket = self.n_tickets;
        self.n_tickets += 1;
        let frame = header(order.request, order.attempt, self.id.incarnation, order.first_block as usize);
        let (n_tokens, until) = (order.n_tokens(), network.now + order.deadline);
        let request = order.into_request(id(ticket));
        let (sender, progress) = Progress::channel(1);
        if self.is_draining {
            let hold = self.engine.lend_cached(request).ok_or_else(leaving)?;
            self.lendings.begin_cached(id(ticket), hold, sender, &leaving());
        } else {
            let key = self.engine.submit_prefill(request, network.now)?;
            self.lendings.begin(id(ticket), key, sender);
        }
        let sent = frame.first_block.min(n_tokens.div_ceil(self.block_size as u32));
        self.lent.insert(ticket, Lent { peer, fetch, frame, n_tokens, sent, is_told: false, progress });
        // Whoever ordered gives up then; the engine does so as well, at the next event.
        network.at(until, Event::Worker(self.index, ToWorker::Wake));
        network.at(until + self.links.lease, Event::Worker(self.index, ToWorker::LeaseOver { ticket }));
        network.after(WORKING_INTERVAL, Event::Worker(self.index, ToWorker::Working { ticket }));
        self.change(network);
        Ok(())
    }

    /// Lets whoever ordered know that this worker lives.
    pub(super) fn tell_working(&self, ticket: u64, network: &mut Network) {
        if let Some(lent) = self.lent.get(&ticket).filter(|lent| !lent.is_told) {
            network.tell_peer(self.index, lent.peer, PeerMessage::Working { fetch: lent.fetch });
            network.after(WORKING_INTERVAL, Event::Worker(self.index, ToWorker::Working { ticket }));
        }
    }

    /// Sends what was cached, or is told for another reason than a step.
    pub(super) fn send_ready(&mut self, network: &mut Network) {
        self.send(network.now, None, network);
    }

    /// Sends what a step has computed: each layer has gone while the next was computed, so that at its end the last one is
    /// left, unless the way is too narrow.
    pub(super) fn send_computed(&mut self, began: Duration, took: Duration, network: &mut Network) {
        let first_layer = began + took / self.links.n_layers.max(1);
        self.send(first_layer, Some(network.now), network);
    }

    /// Sends blocks that can go from `ready` on, the last layer of them from `computed` on.
    fn send(&mut self, ready: Duration, computed: Option<Duration>, network: &mut Network) {
        let block_size = self.block_size as u32;
        let mut early = Vec::new();
        for (&ticket, lent) in self.lent.iter_mut().filter(|(_, lent)| !lent.is_told) {
            let progress = lent.progress.borrow().clone();
            let n_ready = progress.n_ready(0, lent.n_tokens, block_size);
            if n_ready > lent.sent {
                let n_blocks = n_ready - lent.sent;
                let takes = Duration::from_secs_f64(f64::from(n_blocks * block_size) / self.links.tokens_per_s);
                let all = self.sends_until.max(ready) + takes;
                let last = computed.map_or(all, |at| at + takes / self.links.n_layers.max(1));
                self.sends_until = all.max(last);
                let header = Header { first_block: lent.sent, n_blocks, ..lent.frame };
                let table = progress.table[lent.sent as usize..n_ready as usize].to_vec();
                let blocks = Blocks { from: self.index, fetch: lent.fetch, ticket, header, table };
                network.blocks(lent.peer, self.sends_until, blocks);
                lent.sent = n_ready;
            }
            let fetch = lent.fetch;
            let last = match progress.failed {
                _ if lent.sent == lent.n_tokens.div_ceil(block_size) => PeerMessage::Done { fetch },
                Some(_) => PeerMessage::Failed { fetch },
                None => continue,
            };
            lent.is_told = true;
            network.tell_peer(self.index, lent.peer, last);
            let over = self.sends_until.max(network.now) + self.links.lease;
            network.at(over, Event::Worker(self.index, ToWorker::LeaseOver { ticket }));
            if self.planted == Some(Planted::LetGoEarly) {
                early.push(ticket);
            }
        }
        early.into_iter().for_each(|ticket| self.lendings.end(id(ticket), &mut self.engine));
    }
}
