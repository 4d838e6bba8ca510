//! Who holds a lease until when: pure, time is an argument.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use contract::view::{Member, MemberKey};
use thiserror::Error;

/// Names a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LeaseId(pub u64);

/// What a registration changed for watchers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Someone joined, or its registration changed.
    Changed(Member),
    /// Someone's lease ended.
    Removed(MemberKey),
}

/// Why the table did not do it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TableError {
    /// The lease ran out, was replaced or never was: register again.
    #[error("there is no such lease; register again")]
    NoLease,
    /// A newer registration of the same life came first: this one was late.
    #[error("epoch {theirs} is older than the registered {ours}")]
    OldEpoch {
        /// Registered.
        ours: u64,
        /// Asked for.
        theirs: u64,
    },
    /// The lease id is in use: draw another.
    #[error("the lease id is in use")]
    LeaseInUse,
    /// As many members as fit.
    #[error("{0} members are registered, which is the limit")]
    Full(usize),
}

/// All leases.
#[derive(Debug)]
pub struct LeaseTable {
    n_members_max: usize,
    leases: BTreeMap<LeaseId, Lease>,
    members: BTreeMap<MemberKey, (LeaseId, Member)>,
    expiries: BTreeSet<(Instant, LeaseId)>,
}

#[derive(Debug)]
struct Lease {
    key: MemberKey,
    ttl: Duration,
    expires: Instant,
}

impl LeaseTable {
    /// Makes an empty table for at most `n_members_max` members.
    #[must_use]
    pub fn new(n_members_max: usize) -> Self {
        Self { n_members_max, leases: BTreeMap::new(), members: BTreeMap::new(), expiries: BTreeSet::new() }
    }

    /// Gives `member` the lease `id` until `now + ttl`, in place of the one it had; tells whether watchers see a change.
    ///
    /// # Errors
    /// When the member is registered with a higher epoch, the id is in use or the table is full.
    pub fn register(
        &mut self,
        member: Member,
        id: LeaseId,
        ttl: Duration,
        now: Instant,
    ) -> Result<Option<Change>, TableError> {
        let key = member.key();
        if self.leases.contains_key(&id) {
            return Err(TableError::LeaseInUse);
        }
        let known = self.members.get(&key);
        match known {
            Some((_, known)) if known.epoch > member.epoch => {
                return Err(TableError::OldEpoch { ours: known.epoch, theirs: member.epoch });
            }
            None if self.members.len() >= self.n_members_max => return Err(TableError::Full(self.n_members_max)),
            Some(_) | None => {}
        }
        let is_change = known.is_none_or(|(_, known)| *known != member);
        if let Some((old, _)) = known {
            let old = *old;
            self.drop_lease(old);
        }
        let expires = now + ttl;
        self.leases.insert(id, Lease { key: key.clone(), ttl, expires });
        self.expiries.insert((expires, id));
        self.members.insert(key, (id, member.clone()));
        Ok(is_change.then_some(Change::Changed(member)))
    }

    /// Prolongs the lease to `now` plus its time to live, which is returned.
    ///
    /// # Errors
    /// When there is no such lease; one that ran out by `now` is over even if nobody expired it yet.
    pub fn keep_alive(&mut self, id: LeaseId, now: Instant) -> Result<Duration, TableError> {
        let lease = self.leases.get_mut(&id).filter(|lease| lease.expires > now).ok_or(TableError::NoLease)?;
        self.expiries.remove(&(lease.expires, id));
        lease.expires = now + lease.ttl;
        self.expiries.insert((lease.expires, id));
        Ok(lease.ttl)
    }

    /// Ends the lease.
    ///
    /// # Errors
    /// When there is no such lease.
    pub fn deregister(&mut self, id: LeaseId) -> Result<Change, TableError> {
        let key = self.drop_lease(id).ok_or(TableError::NoLease)?;
        self.members.remove(&key);
        Ok(Change::Removed(key))
    }

    /// Ends every lease that ran out by `now`, the earliest first.
    pub fn expire(&mut self, now: Instant) -> Vec<Change> {
        let mut changes = Vec::new();
        while let Some(&(expires, id)) = self.expiries.first() {
            if expires > now {
                break;
            }
            let key = self.drop_lease(id).expect("every expiry belongs to a lease");
            self.members.remove(&key);
            changes.push(Change::Removed(key));
        }
        changes
    }

    /// When the next lease runs out.
    #[must_use]
    pub fn next_expiry(&self) -> Option<Instant> {
        self.expiries.first().map(|(expires, _)| *expires)
    }

    /// All members in the order of their keys.
    pub fn members(&self) -> impl Iterator<Item = &Member> {
        self.members.values().map(|(_, member)| member)
    }

    fn drop_lease(&mut self, id: LeaseId) -> Option<MemberKey> {
        let lease = self.leases.remove(&id)?;
        self.expiries.remove(&(lease.expires, id));
        Some(lease.key)
    }
}

#[cfg(test)]
mod tests;
