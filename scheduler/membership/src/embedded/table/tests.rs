//! The lease table against a naive model.

use contract::ids::Incarnation;
use contract::view::MemberKind;
use proptest::prelude::*;

use super::*;

fn member(id: u8, life: u8, epoch: u64, draining: bool) -> Member {
    Member {
        kind: MemberKind::Worker,
        id: format!("w{id}"),
        incarnation: Incarnation(u64::from(life)),
        address: format!("w{id}:1"),
        n_data_ranks: 1,
        identity: None,
        draining,
        role: None,
        epoch,
    }
}

/// Every lease ever made, as a list; who is registered is computed from it.
#[derive(Default)]
struct Naive {
    leases: Vec<NaiveLease>,
}

struct NaiveLease {
    id: u64,
    member: Member,
    ttl: u64,
    expires: u64,
}

impl Naive {
    fn find(&self, key: &MemberKey) -> Option<&NaiveLease> {
        self.leases.iter().find(|lease| lease.member.key() == *key)
    }

    fn members(&self) -> Vec<Member> {
        let mut members: Vec<Member> = self.leases.iter().map(|lease| lease.member.clone()).collect();
        members.sort_by_key(Member::key);
        members
    }
}

#[derive(Clone, Debug)]
enum Step {
    Register { id: u8, life: u8, epoch: u64, draining: bool, ttl: u64 },
    KeepAlive { lease: u64 },
    Deregister { lease: u64 },
    Advance { by: u64, expire: bool },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..4_u8, 0..2_u8, 0..4_u64, any::<bool>(), 1..50_u64)
            .prop_map(|(id, life, epoch, draining, ttl)| Step::Register { id, life, epoch, draining, ttl }),
        3 => (0..40_u64).prop_map(|lease| Step::KeepAlive { lease }),
        1 => (0..40_u64).prop_map(|lease| Step::Deregister { lease }),
        3 => (0..30_u64, any::<bool>()).prop_map(|(by, expire)| Step::Advance { by, expire }),
    ]
}

const N_MEMBERS_MAX: usize = 5;

struct Pair {
    table: LeaseTable,
    naive: Naive,
    start: Instant,
    now_ms: u64,
    next_lease: u64,
}

impl Pair {
    fn now(&self) -> Instant {
        self.start + Duration::from_millis(self.now_ms)
    }

    fn register(&mut self, member: Member, ttl: u64) -> Result<(), TestCaseError> {
        let id = self.next_lease;
        self.next_lease += 1;
        let now = self.now();
        let got = self.table.register(member.clone(), LeaseId(id), Duration::from_millis(ttl), now);
        let known = self.naive.find(&member.key()).map(|lease| lease.member.clone());
        match &known {
            Some(known) if known.epoch > member.epoch => {
                prop_assert_eq!(got, Err(TableError::OldEpoch { ours: known.epoch, theirs: member.epoch }));
                return Ok(());
            }
            None if self.naive.leases.len() == N_MEMBERS_MAX => {
                prop_assert_eq!(got, Err(TableError::Full(N_MEMBERS_MAX)));
                return Ok(());
            }
            _ => {}
        }
        let change = (known.as_ref() != Some(&member)).then(|| Change::Changed(member.clone()));
        prop_assert_eq!(got, Ok(change));
        self.naive.leases.retain(|lease| lease.member.key() != member.key());
        self.naive.leases.push(NaiveLease { id, member, ttl, expires: self.now_ms + ttl });
        Ok(())
    }

    fn keep_alive(&mut self, id: u64) -> Result<(), TestCaseError> {
        let got = self.table.keep_alive(LeaseId(id), self.now());
        let now_ms = self.now_ms;
        match self.naive.leases.iter_mut().find(|lease| lease.id == id && lease.expires > now_ms) {
            None => prop_assert_eq!(got, Err(TableError::NoLease)),
            Some(lease) => {
                lease.expires = now_ms + lease.ttl;
                prop_assert_eq!(got, Ok(Duration::from_millis(lease.ttl)));
            }
        }
        Ok(())
    }

    fn deregister(&mut self, id: u64) -> Result<(), TestCaseError> {
        let got = self.table.deregister(LeaseId(id));
        match self.naive.leases.iter().position(|lease| lease.id == id) {
            None => prop_assert_eq!(got, Err(TableError::NoLease)),
            Some(at) => {
                let lease = self.naive.leases.remove(at);
                prop_assert_eq!(got, Ok(Change::Removed(lease.member.key())));
            }
        }
        Ok(())
    }

    fn expire(&mut self) -> Result<(), TestCaseError> {
        let mut gone: Vec<(u64, u64, MemberKey)> = self
            .naive
            .leases
            .iter()
            .filter(|lease| lease.expires <= self.now_ms)
            .map(|lease| (lease.expires, lease.id, lease.member.key()))
            .collect();
        gone.sort();
        self.naive.leases.retain(|lease| lease.expires > self.now_ms);
        let expected: Vec<Change> = gone.into_iter().map(|(_, _, key)| Change::Removed(key)).collect();
        prop_assert_eq!(self.table.expire(self.now()), expected);
        Ok(())
    }

    fn check(&self) -> Result<(), TestCaseError> {
        prop_assert_eq!(self.table.members().cloned().collect::<Vec<_>>(), self.naive.members());
        let next = self.naive.leases.iter().map(|lease| lease.expires).min();
        prop_assert_eq!(self.table.next_expiry(), next.map(|ms| self.start + Duration::from_millis(ms)));
        prop_assert_eq!(self.table.leases.len(), self.table.members.len());
        prop_assert_eq!(self.table.leases.len(), self.table.expiries.len());
        Ok(())
    }
}

/// The seed that SEED names, or a random one; printed, so that a failure can be replayed.
#[expect(clippy::print_stderr, reason = "the test harness shows it with the failure")]
fn config() -> ProptestConfig {
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(daemon::random::u64);
    eprintln!("SEED={seed}");
    ProptestConfig {
        rng_seed: proptest::test_runner::RngSeed::Fixed(seed),
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn behaves_like_a_list_of_leases(steps in prop::collection::vec(step(), 1..120)) {
        let mut pair = Pair {
            table: LeaseTable::new(N_MEMBERS_MAX),
            naive: Naive::default(),
            start: daemon::clock::now(),
            now_ms: 0,
            next_lease: 0,
        };
        for step in steps {
            match step {
                Step::Register { id, life, epoch, draining, ttl } => {
                    pair.register(member(id, life, epoch, draining), ttl)?;
                }
                Step::KeepAlive { lease } => pair.keep_alive(lease)?,
                Step::Deregister { lease } => pair.deregister(lease)?,
                Step::Advance { by, expire } => {
                    pair.now_ms += by;
                    if expire {
                        pair.expire()?;
                    }
                }
            }
            pair.check()?;
        }
    }
}

#[test]
fn a_registration_that_arrives_late_does_not_undo_a_newer_one() {
    let mut table = LeaseTable::new(8);
    let (now, ttl) = (daemon::clock::now(), Duration::from_secs(1));
    table.register(member(0, 0, 2, false), LeaseId(1), ttl, now).unwrap();
    let late = table.register(member(0, 0, 1, false), LeaseId(2), ttl, now);
    assert_eq!(late, Err(TableError::OldEpoch { ours: 2, theirs: 1 }));
    table.keep_alive(LeaseId(1), now).unwrap();
}

#[test]
fn a_lease_that_was_replaced_can_neither_be_kept_nor_ended() {
    let mut table = LeaseTable::new(8);
    let (now, ttl) = (daemon::clock::now(), Duration::from_secs(1));
    table.register(member(0, 0, 1, false), LeaseId(1), ttl, now).unwrap();
    table.register(member(0, 0, 1, true), LeaseId(2), ttl, now).unwrap();
    assert_eq!(table.keep_alive(LeaseId(1), now), Err(TableError::NoLease));
    assert_eq!(table.deregister(LeaseId(1)), Err(TableError::NoLease));
    assert_eq!(table.members().count(), 1);
}
