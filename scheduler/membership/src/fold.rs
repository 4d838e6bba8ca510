//! Last known membership: what a store says, without forgetting those whom only the store forgot.
//!
//! A snapshot after a reconnect may come from a store that was restarted empty.
//! Members it lacks are therefore kept for a grace of one lease, in which a living one registers again.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use contract::view::{Member, MemberKey};

use crate::watch::WatchEvent;

/// Folds a store's events into what a watcher sees.
#[derive(Debug)]
pub(crate) struct Fold {
    grace: Duration,
    members: BTreeMap<MemberKey, Member>,
    /// Members that the store lacks since a snapshot, with the time at which they are given up.
    missing: BTreeMap<MemberKey, Instant>,
}

impl Fold {
    /// Starts with nobody; members missing in a snapshot are kept for `grace`.
    pub(crate) fn new(grace: Duration) -> Self {
        Self { grace, members: BTreeMap::new(), missing: BTreeMap::new() }
    }

    /// Takes what the store said at `now` and returns what the watcher should hear.
    pub(crate) fn apply(&mut self, event: WatchEvent, now: Instant) -> Vec<WatchEvent> {
        match event {
            WatchEvent::Snapshot(members) => vec![self.snapshot(members, now)],
            WatchEvent::Changed(member) => self.change(member),
            WatchEvent::Removed(key) => {
                self.missing.remove(&key);
                self.members.remove(&key).map(|_| WatchEvent::Removed(key)).into_iter().collect()
            }
        }
    }

    /// Gives up the members whose grace is over at `now`.
    pub(crate) fn expire(&mut self, now: Instant) -> Vec<WatchEvent> {
        let over: Vec<MemberKey> =
            self.missing.iter().filter(|(_, until)| **until <= now).map(|(key, _)| key.clone()).collect();
        over.into_iter().flat_map(|key| self.apply(WatchEvent::Removed(key), now)).collect()
    }

    /// When the next grace is over.
    pub(crate) fn next_expiry(&self) -> Option<Instant> {
        self.missing.values().min().copied()
    }

    fn snapshot(&mut self, members: Vec<Member>, now: Instant) -> WatchEvent {
        let known = std::mem::take(&mut self.members);
        let missing = std::mem::take(&mut self.missing);
        self.members = members.into_iter().map(|member| (member.key(), member)).collect();
        for (key, old) in known {
            if let Some(new) = self.members.get_mut(&key) {
                if new.epoch < old.epoch {
                    *new = old;
                }
            } else if !self.has_other_life(&key) {
                let until = missing.get(&key).copied().unwrap_or(now + self.grace);
                self.missing.insert(key.clone(), until);
                self.members.insert(key, old);
            }
        }
        WatchEvent::Snapshot(self.members.values().cloned().collect())
    }

    fn change(&mut self, member: Member) -> Vec<WatchEvent> {
        let key = member.key();
        self.missing.remove(&key);
        if self.members.get(&key).is_some_and(|known| known.epoch > member.epoch || *known == member) {
            return Vec::new();
        }
        // Someone who was only kept by grace, and now lives another life, is gone for certain.
        let earlier: Vec<MemberKey> = self.missing.keys().filter(|other| is_other_life(other, &key)).cloned().collect();
        self.members.insert(key, member.clone());
        let mut events = vec![WatchEvent::Changed(member)];
        for key in earlier {
            self.missing.remove(&key);
            self.members.remove(&key);
            events.push(WatchEvent::Removed(key));
        }
        events
    }

    /// Whether the store itself knows another life of that member.
    fn has_other_life(&self, key: &MemberKey) -> bool {
        self.members.keys().any(|other| is_other_life(other, key) && !self.missing.contains_key(other))
    }
}

fn is_other_life(one: &MemberKey, two: &MemberKey) -> bool {
    one.kind == two.kind && one.id == two.id && one.incarnation != two.incarnation
}

#[cfg(test)]
mod tests {
    use contract::ids::Incarnation;
    use contract::view::MemberKind;

    use super::*;

    fn member(id: &str, life: u64, epoch: u64) -> Member {
        Member {
            kind: MemberKind::Worker,
            id: id.to_owned(),
            incarnation: Incarnation(life),
            address: format!("{id}:1"),
            n_data_ranks: 1,
            identity: None,
            draining: false,
            role: None,
            epoch,
        }
    }

    const GRACE: Duration = Duration::from_secs(5);

    fn with(members: &[Member]) -> (Fold, Instant) {
        let now = daemon::clock::now();
        let mut fold = Fold::new(GRACE);
        assert_eq!(fold.apply(WatchEvent::Snapshot(members.to_vec()), now), [WatchEvent::Snapshot(members.to_vec())]);
        (fold, now)
    }

    #[test]
    fn a_store_restarted_empty_removes_nobody_who_returns_within_the_grace() {
        let all = [member("a", 1, 1), member("b", 2, 1)];
        let (mut fold, now) = with(&all);
        assert_eq!(fold.apply(WatchEvent::Snapshot(vec![]), now), [WatchEvent::Snapshot(all.to_vec())]);
        assert_eq!(fold.next_expiry(), Some(now + GRACE));
        let again = member("a", 1, 2);
        assert_eq!(fold.apply(WatchEvent::Changed(again.clone()), now), [WatchEvent::Changed(again)]);
        assert_eq!(fold.expire(now + GRACE - Duration::from_millis(1)), []);
        assert_eq!(fold.expire(now + GRACE), [WatchEvent::Removed(all[1].key())]);
        assert_eq!(fold.next_expiry(), None);
    }

    #[test]
    fn a_second_reconnect_does_not_prolong_the_grace() {
        let (mut fold, now) = with(&[member("a", 1, 1)]);
        fold.apply(WatchEvent::Snapshot(vec![]), now);
        fold.apply(WatchEvent::Snapshot(vec![]), now + GRACE / 2);
        assert_eq!(fold.expire(now + GRACE).len(), 1);
    }

    #[test]
    fn a_lease_that_ran_out_in_a_reachable_store_is_gone_at_once() {
        let (mut fold, now) = with(&[member("a", 1, 1)]);
        let key = member("a", 1, 1).key();
        assert_eq!(fold.apply(WatchEvent::Removed(key.clone()), now), [WatchEvent::Removed(key.clone())]);
        assert_eq!(fold.apply(WatchEvent::Removed(key), now), []);
    }

    #[test]
    fn another_life_ends_the_grace_of_the_earlier() {
        let (mut fold, now) = with(&[member("a", 1, 1), member("b", 7, 1)]);
        let new = member("a", 2, 1);
        let events = fold.apply(WatchEvent::Snapshot(vec![new.clone()]), now);
        assert_eq!(events, [WatchEvent::Snapshot(vec![new, member("b", 7, 1)])]);
        let events = fold.apply(WatchEvent::Changed(member("b", 8, 1)), now);
        assert_eq!(events, [WatchEvent::Changed(member("b", 8, 1)), WatchEvent::Removed(member("b", 7, 1).key())]);
    }

    #[test]
    fn a_store_restored_from_an_old_backup_cannot_turn_an_epoch_back() {
        let (mut fold, now) = with(&[member("a", 1, 3)]);
        assert_eq!(fold.apply(WatchEvent::Changed(member("a", 1, 2)), now), []);
        let events = fold.apply(WatchEvent::Snapshot(vec![member("a", 1, 2)]), now);
        assert_eq!(events, [WatchEvent::Snapshot(vec![member("a", 1, 3)])]);
    }
}
