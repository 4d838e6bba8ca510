//! What holds of an engine between any two calls; for tests.

use std::collections::HashSet;

use crate::engine::{Engine, PLANS_IN_FLIGHT_MAX};
use crate::sequence::{Sequence, State};

impl Engine {
    /// Checks that no block, slot or request is lost or counted twice; takes time in proportion to the pool.
    ///
    /// # Panics
    /// When one is.
    pub fn check_invariants(&self) {
        assert!(self.in_flight.len() <= PLANS_IN_FLIGHT_MAX);
        self.check_slots();
        self.check_lists();
        let mut references = vec![0; self.config.n_blocks as usize];
        let tables = self.sequences.iter().flat_map(|(_, sequence)| sequence.table.iter().chain(&sequence.shadows));
        let releases = self.in_flight.iter().flat_map(|record| &record.releases);
        tables.chain(releases).for_each(|block| references[block.0 as usize] += 1);
        self.pool.check_invariants(&references);
        for (idx, sequence) in self.sequences.iter() {
            let named = self.in_flight.iter().flat_map(|record| &record.sequences).filter(|planned| planned.idx == idx);
            assert_eq!(named.count(), sequence.n_in_flight as usize, "plans that name {:?}", sequence.rank);
            self.check_sequence(sequence);
        }
    }

    fn check_slots(&self) {
        let held = self.sequences.iter().filter_map(|(_, sequence)| sequence.slot);
        let all: HashSet<_> = held.chain(self.free_slots.iter().copied()).collect();
        let n_held = self.sequences.iter().filter(|(_, sequence)| sequence.slot.is_some()).count();
        assert_eq!(n_held + self.free_slots.len(), self.config.max_running as usize, "slots held and free");
        assert_eq!(all.len(), self.config.max_running as usize, "slots, each once");
    }

    fn check_lists(&self) {
        let count = |state| self.sequences.iter().filter(|(_, sequence)| sequence.state == state).count();
        let (n_preempted, n_ended) = (count(State::Preempted), count(State::Ended));
        assert_eq!(count(State::Waiting), self.waiting.len());
        assert_eq!(count(State::Running), self.running.len());
        assert_eq!(n_preempted + n_ended, self.n_draining);
        assert_eq!(self.by_id.len(), self.waiting.len() + self.running.len() + count(State::Receiving) + n_preempted);
        let n_held = self.sequences.iter().filter(|(_, sequence)| sequence.is_held).count();
        assert_eq!(n_held, self.held.len());
        assert!(self.running.is_sorted(), "running requests are in order");
        let timed = self.by_id.values().filter(|&&idx| self.sequences[idx].deadline.is_some()).count();
        assert_eq!(timed, self.deadlines.len());
    }

    fn check_sequence(&self, sequence: &Sequence) {
        let block_size = self.block_size();
        assert!(sequence.n_computed <= sequence.n_planned);
        assert!(sequence.n_planned <= sequence.table.len() * block_size, "KV has a block to go to");
        assert!(sequence.n_sent <= sequence.table.len());
        assert!(sequence.n_committed * block_size <= sequence.n_computed);
        let is_drained = sequence.n_in_flight == 0;
        match sequence.state {
            State::Waiting => assert!(sequence.slot.is_none() && sequence.table.is_empty() && is_drained),
            State::Running => assert!(sequence.slot.is_some() && sequence.tokens.len() < sequence.length_max),
            State::Receiving => assert!(sequence.slot.is_some() && sequence.is_held && is_drained),
            State::Lent => assert!(sequence.slot.is_none() && sequence.is_held && is_drained),
            State::Preempted | State::Ended => assert!(!is_drained, "{:?} is to be retired", sequence.rank),
        }
        if is_drained && sequence.state != State::Lent {
            assert_eq!((sequence.n_pending, sequence.n_computed), (0, sequence.n_planned));
        }
    }
}
