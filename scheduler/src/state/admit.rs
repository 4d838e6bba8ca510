//! Which workers may be placed on: those that agree on what their model is.
//!
//! Per model name the identity that most workers have stands, on a tie the one that stood before.
//! So one misconfigured worker keeps nobody out, also when it comes first after a restart of the scheduler, and a
//! rolling change of a model turns over when half of it is done.

use std::collections::BTreeMap;

use contract::model::{IdentityMismatch, ModelIdentity};
use contract::view::{Member, MemberKey};
use thiserror::Error;

/// More data ranks than any worker has.
const DATA_RANKS_MAX: u32 = 1_024;

/// Why a worker is kept out of the view.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Refusal {
    /// It disagrees with the other workers of its model.
    #[error("worker {worker} is refused: {mismatch}")]
    Identity {
        /// Its name.
        worker: String,
        /// What differs, with both values.
        mismatch: Box<IdentityMismatch>,
    },
    /// It does not say what it serves.
    #[error("worker {worker} is refused: it registered without a model")]
    NoIdentity {
        /// Its name.
        worker: String,
    },
    /// It names no engine, or more than there can be.
    #[error("worker {worker} is refused: it registered {n_data_ranks} data ranks, not 1 to {DATA_RANKS_MAX}")]
    DataRanks {
        /// Its name.
        worker: String,
        /// As registered.
        n_data_ranks: u32,
    },
}

impl Refusal {
    /// The reason as a metric's label.
    #[must_use]
    pub fn label(&self) -> &'static str {
        match self {
            Self::Identity { .. } => "identity",
            Self::NoIdentity { .. } | Self::DataRanks { .. } => "registration",
        }
    }
}

/// Who is in and who is out.
pub(super) struct Decided<'a> {
    pub(super) admitted: Vec<&'a Member>,
    pub(super) refused: BTreeMap<MemberKey, Refusal>,
}

/// Workers that agree on one model.
struct Class<'a> {
    identity: &'a ModelIdentity,
    members: Vec<&'a Member>,
    is_incumbent: bool,
}

/// Decides over all workers, given in the order of their keys, and the identities that stand now.
pub(super) fn decide<'a, 'b>(
    workers: impl Iterator<Item = &'a Member>,
    incumbents: impl Iterator<Item = &'b ModelIdentity>,
) -> Decided<'a> {
    let mut standing: BTreeMap<&str, &ModelIdentity> = BTreeMap::new();
    for identity in incumbents {
        standing.entry(identity.name.as_str()).or_insert(identity);
    }
    let mut decided = Decided { admitted: Vec::new(), refused: BTreeMap::new() };
    let mut models: BTreeMap<&str, Vec<Class<'a>>> = BTreeMap::new();
    for member in workers {
        match well_formed(member) {
            Err(refusal) => {
                decided.refused.insert(member.key(), refusal);
            }
            Ok(identity) => {
                let incumbent = standing.get(identity.name.as_str()).copied();
                sort_in(models.entry(identity.name.as_str()).or_default(), member, identity, incumbent);
            }
        }
    }
    for classes in models.into_values() {
        decided.elect(classes);
    }
    decided
}

fn well_formed(member: &Member) -> Result<&ModelIdentity, Refusal> {
    let worker = || member.id.clone();
    if !(1..=DATA_RANKS_MAX).contains(&member.n_data_ranks) {
        return Err(Refusal::DataRanks { worker: worker(), n_data_ranks: member.n_data_ranks });
    }
    member.identity.as_ref().ok_or_else(|| Refusal::NoIdentity { worker: worker() })
}

fn sort_in<'a>(
    classes: &mut Vec<Class<'a>>,
    member: &'a Member,
    identity: &'a ModelIdentity,
    incumbent: Option<&ModelIdentity>,
) {
    match classes.iter_mut().find(|class| class.identity.check(identity, &member.id).is_ok()) {
        Some(class) => class.members.push(member),
        None => {
            let is_incumbent = incumbent.is_some_and(|incumbent| incumbent.check(identity, &member.id).is_ok());
            classes.push(Class { identity, members: vec![member], is_incumbent });
        }
    }
}

impl<'a> Decided<'a> {
    /// Admits the largest class of one model and refuses the others.
    fn elect(&mut self, mut classes: Vec<Class<'a>>) {
        // The first class is that of the lowest key; it wins what is left undecided.
        classes.reverse();
        let Some(winner) = classes.iter().max_by_key(|class| (class.members.len(), class.is_incumbent)) else {
            return;
        };
        let elected = winner.identity;
        for class in &classes {
            for member in &class.members {
                match elected.check(class.identity, &member.id) {
                    Ok(()) => self.admitted.push(member),
                    Err(mismatch) => {
                        let refusal = Refusal::Identity { worker: member.id.clone(), mismatch: Box::new(mismatch) };
                        self.refused.insert(member.key(), refusal);
                    }
                }
            }
        }
    }
}
