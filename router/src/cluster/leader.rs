//! Whose view counts while several schedulers run: of those that can be heard, the one that started last.
//!
//! Nobody is elected: schedulers decide alike from the same facts, so following one of them at a time is all it takes.

use std::collections::BTreeMap;

/// The schedulers that are heard, each with the epoch that its last view bore.
#[derive(Debug, Default)]
pub(super) struct Leader {
    epochs: BTreeMap<usize, u64>,
}

impl Leader {
    /// Takes note of a view that `scheduler` tells, and says whether it counts.
    pub(super) fn hear(&mut self, scheduler: usize, epoch: u64) -> bool {
        self.epochs.insert(scheduler, epoch);
        self.epochs.values().all(|other| *other <= epoch)
    }

    /// Forgets `scheduler` until it is heard again, so that the next one leads.
    pub(super) fn lose(&mut self, scheduler: usize) {
        self.epochs.remove(&scheduler);
    }

    /// Whether none is heard.
    pub(super) fn is_nobody(&self) -> bool {
        self.epochs.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scheduler_that_started_last_leads_until_it_is_no_longer_heard() {
        let mut leader = Leader::default();
        assert!(leader.hear(0, 10), "the only one leads");
        assert!(leader.hear(1, 20));
        assert!(!leader.hear(0, 10), "it started earlier");
        leader.lose(1);
        assert!(leader.hear(0, 10));
        assert!(leader.hear(1, 30), "it is back, and started later");
        assert!(!leader.hear(0, 10));
    }

    #[test]
    fn a_lone_scheduler_whose_clock_went_back_is_followed() {
        let mut leader = Leader::default();
        assert!(leader.hear(0, 10));
        leader.lose(0);
        assert!(leader.is_nobody());
        assert!(leader.hear(0, 5) && !leader.is_nobody());
    }
}
