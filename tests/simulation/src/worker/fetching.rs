//! The decode worker's side of a prompt that moves: it orders, reads blocks into those that its engine has reserved, and
//! tells the engine once how much is there.

use std::collections::VecDeque;
use std::time::Duration;

use contract::ids::{BlockId, EngineId, RequestId};
use contract::request::GenerateRequest;
use engine::Hold;
use worker::sim::Device;
use worker::transfer::{Header, Kind, Order, Received};

use super::Worker;
use crate::checker::Violation;
use crate::event::{Blocks, Event, PeerMessage, RequestIdx, ToWorker};
use crate::network::Network;
use crate::options::Planted;

/// Longest time until the engine hears of what is filled, in milliseconds.
const FILLED_MS_MAX: f64 = 0.2;

/// A request whose prompt other workers compute.
pub(super) struct Split {
    /// Who is still to be asked, in the order of the request.
    pub(super) peers: VecDeque<(usize, EngineId)>,
    pub(super) request: GenerateRequest,
}

/// A prompt on its way.
pub(super) struct Fetch {
    peer: usize,
    request: RequestIdx,
    hold: Hold,
    /// Who is asked for the rest if this one fails.
    split: Split,
    /// The first block that it sends.
    n_first: usize,
    received: Received,
    /// All of it is given up then, whoever sends it.
    until: Duration,
    /// This worker is given up then.
    due: Duration,
    /// When anything of it was heard last.
    heard: Duration,
}

/// How the reading of a prompt ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ended {
    Whole,
    Broken,
    Cancelled,
}

impl Worker {
    /// Has blocks filled whose prompt is computed elsewhere.
    pub(super) fn fill(&mut self, hold: Hold, network: &mut Network) {
        let request = hold.request.0 as RequestIdx;
        // Who asked may have gone, or asked again.
        let live = self.live.get_mut(&request).filter(|live| live.key == hold.key);
        let begun = live.and_then(|live| live.split.take());
        let n_first = hold.n_cached / self.block_size;
        match begun {
            Some(split) => self.ask_next(split, hold, n_first, network.now + self.links.deadline, network),
            None => self.tell_filled(&hold, hold.n_cached, network),
        }
    }

    /// Orders all from block `n_first` on from the next worker that may be asked, until `until`.
    fn ask_next(&mut self, mut split: Split, hold: Hold, n_first: usize, until: Duration, network: &mut Network) {
        let Some((peer, engine)) = split.peers.pop_front() else { return };
        let (request, fetch) = (hold.request.0 as RequestIdx, self.n_fetches);
        self.n_fetches += 1;
        if let Some(live) = self.live.get_mut(&request).filter(|live| live.key == hold.key) {
            live.fetch = Some(fetch);
        }
        let left = until.saturating_sub(network.now);
        let order = Order::of(&split.request, n_first, left, self.links.lease);
        let frame = header(split.request.id, split.request.attempt, engine.incarnation, n_first);
        let end = order.n_tokens().div_ceil(self.block_size as u32).max(order.first_block);
        let received = Received::new(&frame, end, 1);
        let message = PeerMessage::Order { fetch, order: Box::new(order), engine };
        let is_reached = network.tell_peer(self.index, peer, message);
        let due = if is_reached { until } else { until.min(network.now + self.links.pairing) };
        let heard = network.now;
        self.fetches.insert(fetch, Fetch { peer, request, hold, split, n_first, received, until, due, heard });
        self.fetch_due(fetch, network);
    }

    /// Reads blocks from the pool that they were computed in; none when the connection to it is gone.
    pub(crate) fn take_blocks(
        &mut self,
        blocks: &Blocks,
        from: Option<&Device>,
        network: &mut Network,
    ) -> Result<(), Violation> {
        let Some(fetch) = self.fetches.get_mut(&blocks.fetch) else {
            self.tally.n_frames_dropped += 1;
            return Ok(());
        };
        let Some(from) = from else {
            self.close_fetch(blocks.fetch, network);
            return self.go_on(network);
        };
        fetch.heard = network.now;
        if fetch.received.check(&blocks.header).is_err() {
            self.tally.n_frames_dropped += 1;
            return Ok(());
        }
        let start = blocks.header.first_block as usize;
        let here = fetch.hold.table[start..start + blocks.table.len()].iter().copied();
        let pairs: Vec<(BlockId, BlockId)> = blocks.table.iter().copied().zip(here).collect();
        let copied = self.device.copy(from, pairs);
        copied.map_err(|error| Violation::Device { worker: self.index, error: error.to_string() })?;
        fetch.received.count(&blocks.header);
        Ok(())
    }

    /// All was sent.
    pub(super) fn fetch_done(&mut self, fetch: u64, network: &mut Network) {
        let Some(it) = self.fetches.get(&fetch) else { return };
        if !it.received.is_complete() {
            return self.close_fetch(fetch, network);
        }
        network.tell_peer(self.index, it.peer, PeerMessage::Ack { fetch });
        self.end_fetch(fetch, Ended::Whole, network);
    }

    /// The other says that it cannot go on.
    pub(super) fn fetch_failed(&mut self, fetch: u64, network: &mut Network) {
        let Some(it) = self.fetches.get(&fetch) else { return };
        network.tell_peer(self.index, it.peer, PeerMessage::Ack { fetch });
        self.end_fetch(fetch, Ended::Broken, network);
    }

    /// Gives up a prompt that is late or of which nothing is heard, or looks again when it may be.
    pub(super) fn fetch_due(&mut self, fetch: u64, network: &mut Network) {
        let Some(it) = self.fetches.get(&fetch) else { return };
        let due = it.due.min(it.heard + self.links.silence);
        if due <= network.now {
            return self.close_fetch(fetch, network);
        }
        network.at(due, Event::Worker(self.index, ToWorker::FetchDue { fetch }));
    }

    /// Whoever computes a prompt lives.
    pub(super) fn hear_of_fetch(&mut self, fetch: u64, now: Duration) {
        if let Some(it) = self.fetches.get_mut(&fetch) {
            it.heard = now;
        }
    }

    /// Gives a prompt up; what is there is used.
    pub(super) fn close_fetch(&mut self, fetch: u64, network: &mut Network) {
        let Some(it) = self.fetches.get(&fetch) else { return };
        network.tell_peer(self.index, it.peer, PeerMessage::Close { fetch });
        self.end_fetch(fetch, Ended::Broken, network);
    }

    /// Nobody wants the request any more.
    pub(super) fn cancel_fetch(&mut self, fetch: u64, network: &mut Network) {
        let Some(it) = self.fetches.get(&fetch) else { return };
        network.tell_peer(self.index, it.peer, PeerMessage::Close { fetch });
        self.end_fetch(fetch, Ended::Cancelled, network);
    }

    /// Gives up what is fetched from a worker that is gone.
    pub(super) fn lose_fetches(&mut self, peer: usize, network: &mut Network) {
        let lost: Vec<u64> =
            self.fetches.iter().filter(|(_, fetch)| fetch.peer == peer).map(|(&number, _)| number).collect();
        lost.into_iter().for_each(|fetch| self.close_fetch(fetch, network));
    }

    /// However it ended: nothing is written from now on, and the engine hears how much is there.
    fn end_fetch(&mut self, fetch: u64, ended: Ended, network: &mut Network) {
        let Some(it) = self.fetches.remove(&fetch) else { return };
        let Fetch { request, hold, split, n_first, received, until, .. } = it;
        if let Some(live) = self.live.get_mut(&request).filter(|live| live.fetch == Some(fetch)) {
            live.fetch = None;
        }
        let n_complete = received.n_complete() as usize;
        self.tally.count(ended, n_complete);
        if ended == Ended::Broken && !split.peers.is_empty() && network.now < until {
            return self.ask_next(split, hold, n_first + n_complete, until, network);
        }
        let n_complete = n_first - hold.n_cached / self.block_size + n_complete;
        let n_blocks = match (ended, self.planted) {
            (Ended::Cancelled, _) => 0,
            (_, Some(Planted::OverstateFilled)) => n_complete + 1,
            _ => n_complete,
        };
        self.tell_filled(&hold, hold.n_filled(n_blocks, self.block_size), network);
    }

    fn tell_filled(&self, hold: &Hold, n_tokens: usize, network: &mut Network) {
        let delay_ms = network.random.between(0.0, FILLED_MS_MAX);
        let filled = ToWorker::Filled { life: self.life, key: hold.key, n_tokens };
        network.after(Duration::from_secs_f64(delay_ms / 1e3), Event::Worker(self.index, filled));
    }
}

impl super::Tally {
    fn count(&mut self, ended: Ended, n_complete: usize) {
        match ended {
            Ended::Whole => self.n_whole += 1,
            Ended::Cancelled => self.n_cancelled += 1,
            Ended::Broken => {
                self.n_broken += 1;
                self.n_partial += usize::from(n_complete > 0);
            }
        }
    }
}

/// Of a frame from block `n_first` on, with nothing in it.
pub(super) fn header(
    request: RequestId,
    attempt: u32,
    incarnation: contract::ids::Incarnation,
    n_first: usize,
) -> Header {
    Header {
        kind: Kind::Ready,
        incarnation,
        pairing: 0,
        request,
        attempt,
        layer: 0,
        first_block: n_first as u32,
        n_blocks: 0,
        payload_bytes: 0,
        payload_sum: 0,
    }
}
