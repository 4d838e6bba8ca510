//! The scheduler's decisions, pure: membership and occupancy in, cluster view out, time as an argument.

mod admit;
mod demand;
pub mod ledger;
pub mod roles;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use contract::ids::{DataRank, EngineId, ModelName, WorkerId};
use contract::model::{Fingerprint, ModelIdentity};
use contract::occupancy::Occupancy;
use contract::view::{ClusterView, DrainReason, EngineView, Member, MemberKey, MemberKind};
use membership::WatchEvent;
use thiserror::Error;

pub use admit::Refusal;
use roles::{RoleSettings, Roles};

/// Names one stream of reports, so that its end says nothing about a newer one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamId(pub u64);

/// Why a report changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Ignored {
    /// No such worker is registered, or it has no such data rank.
    #[error("the engine is unknown")]
    Unknown,
    /// The worker lives another life by now, or is not yet known to live this one.
    #[error("the worker is registered with another incarnation")]
    OtherIncarnation,
    /// The worker is registered and kept out of the view.
    #[error("the worker is refused")]
    Refused,
    /// A report of a later step came first.
    #[error("a later step was reported before")]
    OldStep,
    /// The blocks do not add up.
    #[error("allocated, cached and free blocks do not add up to the total")]
    BlocksNotConserved,
}

impl Ignored {
    /// The reason as a metric's label.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::OtherIncarnation => "incarnation",
            Self::Refused => "refused",
            Self::OldStep => "order",
            Self::BlocksNotConserved => "blocks",
        }
    }
}

/// Everything the scheduler knows.
#[derive(Debug)]
pub struct State {
    stale_after: Duration,
    members: BTreeMap<MemberKey, Member>,
    refused: BTreeMap<MemberKey, Refusal>,
    reports: BTreeMap<EngineId, Report>,
    role_settings: RoleSettings,
    /// Of each model and numerics that were seen: only such engines take over from each other what they computed, and they
    /// have their own demand.
    roles: BTreeMap<Kind, Roles>,
    view: ClusterView,
}

#[derive(Debug)]
struct Report {
    stream: StreamId,
    at: Instant,
    /// Kept after the report went stale, so that an older one cannot follow.
    step: u64,
}

impl State {
    /// Starts with nobody.
    ///
    /// Reports count for `stale_after`. `epoch` must exceed that of every scheduler before this one.
    #[must_use]
    pub fn new(epoch: u64, stale_after: Duration, role_settings: RoleSettings) -> Self {
        Self {
            stale_after,
            members: BTreeMap::new(),
            refused: BTreeMap::new(),
            reports: BTreeMap::new(),
            role_settings,
            roles: BTreeMap::new(),
            view: ClusterView { epoch, ..ClusterView::default() },
        }
    }

    /// What routers should see; its version grows with each change.
    #[must_use]
    pub fn view(&self) -> &ClusterView {
        &self.view
    }

    /// All members, whatever they are.
    pub fn members(&self) -> impl Iterator<Item = &Member> {
        self.members.values()
    }

    /// Workers that are registered and kept out of the view.
    #[must_use]
    pub fn refused(&self) -> &BTreeMap<MemberKey, Refusal> {
        &self.refused
    }

    /// Takes a change of membership and returns who is refused from now on.
    pub fn member(&mut self, event: WatchEvent) -> Vec<Refusal> {
        match event {
            WatchEvent::Snapshot(members) => {
                self.members = members.into_iter().map(|member| (member.key(), member)).collect();
            }
            WatchEvent::Changed(member) => {
                self.members.insert(member.key(), member);
            }
            WatchEvent::Removed(key) => {
                self.members.remove(&key);
            }
        }
        self.admit()
    }

    /// Takes an engine's report, received at `now` on `stream`.
    ///
    /// # Errors
    /// Why it was ignored; the view is as before.
    pub fn report(&mut self, occupancy: Occupancy, stream: StreamId, now: Instant) -> Result<(), Ignored> {
        if !occupancy.blocks.is_conserved() {
            return Err(Ignored::BlocksNotConserved);
        }
        let Some(index) = self.find(&occupancy.engine) else { return Err(self.why_unknown(&occupancy.engine)) };
        let step = occupancy.step;
        if self.reports.get(&occupancy.engine).is_some_and(|last| last.step > step) {
            return Err(Ignored::OldStep);
        }
        self.reports.insert(occupancy.engine.clone(), Report { stream, at: now, step });
        if !is_told(&self.members, &occupancy.engine) {
            let roles = self.roles.get_mut(&kind_of(&self.view.engines[index].identity));
            roles.expect("engines in the view have roles").observe(&occupancy, now);
        }
        self.set_occupancy(index, Some(occupancy));
        Ok(())
    }

    /// Forgets what was last reported on `stream`: nobody keeps it up to date.
    pub fn stream_ended(&mut self, stream: StreamId) {
        self.forget(|report| report.stream == stream);
    }

    /// Forgets what is out of date at `now`.
    pub fn tick(&mut self, now: Instant) {
        let stale_after = self.stale_after;
        self.forget(|report| report.at + stale_after <= now);
    }

    /// Gives engines that were not told a role another at `now`, if that promises enough; true when any changed.
    pub fn give_roles(&mut self, now: Instant) -> bool {
        let mut is_changed = false;
        for (kind, roles) in &mut self.roles {
            let is_free = |view: &EngineView| kind_of(&view.identity) == *kind && !is_told(&self.members, &view.engine);
            let stays = |view: &&EngineView| view.draining.is_none() && is_free(view);
            let engines: Vec<&EngineView> = self.view.engines.iter().filter(stays).collect();
            if !roles.decide(&engines, now) {
                continue;
            }
            for view in self.view.engines.iter_mut().filter(|view| is_free(view)) {
                view.role = roles.of(&view.engine);
            }
            is_changed = true;
        }
        self.view.version += u64::from(is_changed);
        is_changed
    }

    /// When [`Self::tick`] has something to do next, if no report comes.
    #[must_use]
    pub fn next_tick(&self) -> Option<Instant> {
        let fresh = self.view.engines.iter().filter(|view| view.occupancy.is_some());
        fresh.filter_map(|view| Some(self.reports.get(&view.engine)?.at + self.stale_after)).min()
    }

    fn forget(&mut self, is_over: impl Fn(&Report) -> bool) {
        for index in 0..self.view.engines.len() {
            if self.reports.get(&self.view.engines[index].engine).is_some_and(&is_over) {
                self.set_occupancy(index, None);
            }
        }
    }

    fn set_occupancy(&mut self, index: usize, occupancy: Option<Occupancy>) {
        let view = &mut self.view.engines[index];
        if view.occupancy != occupancy {
            view.occupancy = occupancy;
            view.draining = drain_reason(view);
            self.view.version += 1;
        }
    }

    fn find(&self, engine: &EngineId) -> Option<usize> {
        self.view.engines.binary_search_by(|view| view.engine.cmp(engine)).ok()
    }

    fn why_unknown(&self, engine: &EngineId) -> Ignored {
        let key = key_of(engine);
        if self.refused.contains_key(&key) {
            Ignored::Refused
        } else if self.members.contains_key(&key) {
            Ignored::Unknown
        } else if self.members.keys().any(|other| other.kind == key.kind && other.id == key.id) {
            Ignored::OtherIncarnation
        } else {
            Ignored::Unknown
        }
    }

    /// Decides anew who is in the view, and keeps what its engines reported.
    fn admit(&mut self) -> Vec<Refusal> {
        let workers = self.members.values().filter(|member| member.kind == MemberKind::Worker);
        let incumbents = self.view.engines.iter().map(|view| &view.identity);
        let decided = admit::decide(workers, incumbents);
        for identity in decided.admitted.iter().filter_map(|member| member.identity.as_ref()) {
            self.roles.entry(kind_of(identity)).or_insert_with(|| Roles::new(self.role_settings));
        }
        let roles = &self.roles;
        let mut engines: Vec<EngineView> =
            decided.admitted.iter().flat_map(|member| engines_of(member, roles)).collect();
        engines.sort_by(|one, two| one.engine.cmp(&two.engine));
        for view in &mut engines {
            if let Some(index) = self.find(&view.engine) {
                view.occupancy = self.view.engines[index].occupancy.take();
                view.draining = drain_reason(view);
            }
        }
        self.reports.retain(|engine, _| engines.binary_search_by(|view| view.engine.cmp(engine)).is_ok());
        let new = decided.refused.iter().filter(|(key, refusal)| self.refused.get(*key) != Some(*refusal));
        let new = new.map(|(_, refusal)| refusal.clone()).collect();
        // Occupancy was taken out above, so what is left tells whether anything else changed.
        let is_change = engines.len() != self.view.engines.len()
            || engines.iter().zip(&self.view.engines).any(|(new, old)| !is_same_engine(new, old));
        self.view.engines = engines;
        self.view.version += u64::from(is_change);
        self.refused = decided.refused;
        new
    }
}

/// Engines that can take over from each other what they computed.
type Kind = (ModelName, Fingerprint);

fn kind_of(identity: &ModelIdentity) -> Kind {
    (identity.name.clone(), identity.numerics)
}

fn key_of(engine: &EngineId) -> MemberKey {
    MemberKey { kind: MemberKind::Worker, id: engine.worker.to_string(), incarnation: engine.incarnation }
}

/// Whether that engine's worker was told a role for good.
fn is_told(members: &BTreeMap<MemberKey, Member>, engine: &EngineId) -> bool {
    members.get(&key_of(engine)).is_some_and(|member| member.role.is_some())
}

fn engines_of(member: &Member, roles: &BTreeMap<Kind, Roles>) -> Vec<EngineView> {
    let identity = member.identity.as_ref().expect("only workers with an identity are admitted");
    let engine_of = |rank| {
        let worker = WorkerId::from(member.id.as_str());
        let engine = EngineId { worker, incarnation: member.incarnation, data_rank: DataRank(rank) };
        EngineView {
            role: member.role.or_else(|| roles.get(&kind_of(identity))?.of(&engine)),
            engine,
            address: member.address.clone(),
            identity: identity.clone(),
            draining: member.draining.then_some(DrainReason::Leaving),
            occupancy: None,
        }
    };
    (0..member.n_data_ranks).map(engine_of).collect()
}

/// Why an engine is to get no new work: its worker leaves, or it says that it stands still, until it says otherwise or
/// nothing any more.
fn drain_reason(view: &EngineView) -> Option<DrainReason> {
    let is_stalled = view.occupancy.as_ref().is_some_and(|occupancy| occupancy.is_stalled);
    view.draining.filter(|reason| *reason == DrainReason::Leaving).or(is_stalled.then_some(DrainReason::Stalled))
}

/// Whether nothing but the occupancy may differ.
fn is_same_engine(one: &EngineView, two: &EngineView) -> bool {
    one.engine == two.engine
        && one.address == two.address
        && one.identity == two.identity
        && one.role == two.role
        && one.draining == two.draining
}

#[cfg(test)]
mod tests;
