//! Who is in the cluster, and what the scheduler says of them.

use serde::{Deserialize, Serialize};

use crate::ids::{EngineId, Incarnation};
use crate::model::ModelIdentity;
use crate::occupancy::Occupancy;

/// What a member of the cluster is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemberKind {
    /// Runs a model.
    Worker,
    /// Takes requests.
    Router,
    /// Watches pools, decides roles.
    Scheduler,
}

/// A registration: kept while its lease lives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// What it is.
    pub kind: MemberKind,
    /// Its lasting name.
    pub id: String,
    /// Its present life.
    pub incarnation: Incarnation,
    /// host:port of its gRPC server.
    pub address: String,
    /// Data-parallel engines behind that address; 0 for routers and schedulers.
    pub n_data_ranks: u32,
    /// The served model, of workers.
    pub identity: Option<ModelIdentity>,
    /// Takes no new work.
    pub draining: bool,
    /// What it does of a request, of workers that were told; none leaves it to the scheduler.
    pub role: Option<Role>,
    /// One more for each lease that this life made.
    pub epoch: u64,
}

/// Names one life of one member.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MemberKey {
    /// What it is.
    pub kind: MemberKind,
    /// Its lasting name.
    pub id: String,
    /// Its life.
    pub incarnation: Incarnation,
}

impl Member {
    /// The key this registration is kept under.
    pub fn key(&self) -> MemberKey {
        MemberKey { kind: self.kind, id: self.id.clone(), incarnation: self.incarnation }
    }
}

/// What a worker does of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Both halves.
    #[default]
    Mixed,
    /// Prompts, for others to go on with.
    Prefill,
    /// Tokens after a prompt computed elsewhere.
    Decode,
}

/// Why an engine takes no new work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DrainReason {
    /// Its worker leaves.
    Leaving,
    /// It stands still; the scheduler wishes it to be left alone until it steps again.
    Stalled,
}

/// One engine as the scheduler sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineView {
    /// Which engine.
    pub engine: EngineId,
    /// host:port of its worker.
    pub address: String,
    /// The served model.
    pub identity: ModelIdentity,
    /// Its role; none where the scheduler has not seen enough to say, and whatever was said before holds.
    pub role: Option<Role>,
    /// Why it takes no new work, none where it does.
    pub draining: Option<DrainReason>,
    /// Its last report, none before the first.
    pub occupancy: Option<Occupancy>,
}

/// All engines at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ClusterView {
    /// The scheduler's epoch; a reader refuses one lower than it has seen.
    pub epoch: u64,
    /// Counts changes within the epoch.
    pub version: u64,
    /// Sorted by engine id.
    pub engines: Vec<EngineView>,
}

impl ClusterView {
    /// Where it says nothing of an engine's role, lets that be what was `known` before.
    pub fn keep_roles(&mut self, known: impl Fn(&EngineId) -> Option<Role>) {
        for view in self.engines.iter_mut().filter(|view| view.role.is_none()) {
            view.role = known(&view.engine);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{DataRank, Incarnation};
    use crate::model::Fingerprint;

    #[test]
    fn roles_that_a_view_says_nothing_of_are_those_known_before() {
        let engine = |life| EngineId { worker: "w".into(), incarnation: Incarnation(life), data_rank: DataRank(0) };
        let view = |life, role| EngineView {
            engine: engine(life),
            address: String::new(),
            identity: ModelIdentity {
                name: "m".into(),
                block_size: 16,
                context_length: 64,
                vocab_size: 8,
                model: Fingerprint::default(),
                tokenizer: Fingerprint::default(),
                hash_key: Fingerprint::default(),
                numerics: Fingerprint::default(),
            },
            role,
            draining: None,
            occupancy: None,
        };
        let engines = vec![view(1, None), view(2, Some(Role::Mixed)), view(3, None)];
        let mut seen = ClusterView { epoch: 2, version: 1, engines };
        seen.keep_roles(|known| (*known != engine(3)).then_some(Role::Prefill));
        let roles: Vec<Option<Role>> = seen.engines.iter().map(|view| view.role).collect();
        assert_eq!(roles, [Some(Role::Prefill), Some(Role::Mixed), None]);
    }
}
