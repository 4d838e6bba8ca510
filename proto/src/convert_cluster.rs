//! Conversions between wire and contract types of the cluster protocol.

use contract::cost::{CostCoefficients, StepLoad};
use contract::ids::Incarnation;
use contract::occupancy::{BlockCounts, Occupancy};
use contract::view::{ClusterView, DrainReason, EngineView, Member, MemberKey, MemberKind, Role};

use crate::cluster::v1 as wire;
use crate::convert::{WireError, required};

impl From<MemberKind> for wire::MemberKind {
    fn from(kind: MemberKind) -> Self {
        match kind {
            MemberKind::Worker => Self::Worker,
            MemberKind::Router => Self::Router,
            MemberKind::Scheduler => Self::Scheduler,
        }
    }
}

fn member_kind(value: i32) -> Result<MemberKind, WireError> {
    match wire::MemberKind::try_from(value) {
        Ok(wire::MemberKind::Worker) => Ok(MemberKind::Worker),
        Ok(wire::MemberKind::Router) => Ok(MemberKind::Router),
        Ok(wire::MemberKind::Scheduler) => Ok(MemberKind::Scheduler),
        Ok(wire::MemberKind::Unspecified) | Err(_) => Err(WireError::UnknownEnum { field: "kind", value }),
    }
}

impl From<&Member> for wire::Member {
    fn from(member: &Member) -> Self {
        Self {
            kind: wire::MemberKind::from(member.kind).into(),
            id: member.id.clone(),
            incarnation: member.incarnation.0,
            address: member.address.clone(),
            n_data_ranks: member.n_data_ranks,
            identity: member.identity.as_ref().map(Into::into),
            draining: member.draining,
            role: wire::Role::from(member.role).into(),
            epoch: member.epoch,
        }
    }
}

impl TryFrom<wire::Member> for Member {
    type Error = WireError;

    fn try_from(member: wire::Member) -> Result<Self, WireError> {
        Ok(Self {
            kind: member_kind(member.kind)?,
            id: member.id,
            incarnation: Incarnation(member.incarnation),
            address: member.address,
            n_data_ranks: member.n_data_ranks,
            identity: member.identity.map(TryInto::try_into).transpose()?,
            draining: member.draining,
            role: role(member.role)?,
            epoch: member.epoch,
        })
    }
}

impl From<&MemberKey> for wire::MemberKey {
    fn from(key: &MemberKey) -> Self {
        Self { kind: wire::MemberKind::from(key.kind).into(), id: key.id.clone(), incarnation: key.incarnation.0 }
    }
}

impl TryFrom<wire::MemberKey> for MemberKey {
    type Error = WireError;

    fn try_from(key: wire::MemberKey) -> Result<Self, WireError> {
        Ok(Self { kind: member_kind(key.kind)?, id: key.id, incarnation: Incarnation(key.incarnation) })
    }
}

impl From<BlockCounts> for wire::BlockCounts {
    fn from(counts: BlockCounts) -> Self {
        Self { total: counts.total, allocated: counts.allocated, cached: counts.cached, free: counts.free }
    }
}

impl From<wire::BlockCounts> for BlockCounts {
    fn from(counts: wire::BlockCounts) -> Self {
        Self { total: counts.total, allocated: counts.allocated, cached: counts.cached, free: counts.free }
    }
}

impl From<CostCoefficients> for wire::CostCoefficients {
    fn from(cost: CostCoefficients) -> Self {
        Self {
            prefill_base_ms: cost.prefill_base_ms,
            prefill_per_token_ms: cost.prefill_per_token_ms,
            prefill_per_token_context_ms: cost.prefill_per_token_context_ms,
            decode_base_ms: cost.decode_base_ms,
            decode_per_sequence_ms: cost.decode_per_sequence_ms,
            decode_per_context_token_ms: cost.decode_per_context_token_ms,
        }
    }
}

impl From<wire::CostCoefficients> for CostCoefficients {
    fn from(cost: wire::CostCoefficients) -> Self {
        Self {
            prefill_base_ms: cost.prefill_base_ms,
            prefill_per_token_ms: cost.prefill_per_token_ms,
            prefill_per_token_context_ms: cost.prefill_per_token_context_ms,
            decode_base_ms: cost.decode_base_ms,
            decode_per_sequence_ms: cost.decode_per_sequence_ms,
            decode_per_context_token_ms: cost.decode_per_context_token_ms,
        }
    }
}

impl From<StepLoad> for wire::StepLoad {
    fn from(load: StepLoad) -> Self {
        let StepLoad { prefill_tokens, prefill_pairs, decode_sequences, decode_context } = load;
        Self { prefill_tokens, prefill_pairs, decode_sequences, decode_context }
    }
}

impl From<wire::StepLoad> for StepLoad {
    fn from(load: wire::StepLoad) -> Self {
        let wire::StepLoad { prefill_tokens, prefill_pairs, decode_sequences, decode_context } = load;
        Self { prefill_tokens, prefill_pairs, decode_sequences, decode_context }
    }
}

impl From<&Occupancy> for wire::Occupancy {
    fn from(occupancy: &Occupancy) -> Self {
        Self {
            engine: Some((&occupancy.engine).into()),
            step: occupancy.step,
            blocks: Some(occupancy.blocks.into()),
            requests_waiting: occupancy.requests_waiting,
            requests_running: occupancy.requests_running,
            slots: occupancy.slots,
            tokens_queued: occupancy.tokens_queued,
            tokens_running: occupancy.tokens_running,
            cost: Some(occupancy.cost.into()),
            step_tokens: occupancy.step_tokens,
            pairs_queued: occupancy.pairs_queued,
            computed: Some(occupancy.computed.into()),
            requests_begun: occupancy.requests_begun,
            prompt_tokens_begun: occupancy.prompt_tokens_begun,
            stalled: occupancy.is_stalled,
            transfer_ms_per_token: occupancy.transfer_ms_per_token,
        }
    }
}

impl TryFrom<wire::Occupancy> for Occupancy {
    type Error = WireError;

    fn try_from(occupancy: wire::Occupancy) -> Result<Self, WireError> {
        Ok(Self {
            engine: required("engine", occupancy.engine)?.into(),
            step: occupancy.step,
            blocks: required("blocks", occupancy.blocks)?.into(),
            requests_waiting: occupancy.requests_waiting,
            requests_running: occupancy.requests_running,
            slots: occupancy.slots,
            tokens_queued: occupancy.tokens_queued,
            tokens_running: occupancy.tokens_running,
            cost: occupancy.cost.map(Into::into).unwrap_or_default(),
            step_tokens: occupancy.step_tokens,
            pairs_queued: occupancy.pairs_queued,
            computed: occupancy.computed.map(Into::into).unwrap_or_default(),
            requests_begun: occupancy.requests_begun,
            prompt_tokens_begun: occupancy.prompt_tokens_begun,
            is_stalled: occupancy.stalled,
            transfer_ms_per_token: occupancy.transfer_ms_per_token,
        })
    }
}

impl From<Option<Role>> for wire::Role {
    fn from(role: Option<Role>) -> Self {
        match role {
            None => Self::Unspecified,
            Some(Role::Mixed) => Self::Mixed,
            Some(Role::Prefill) => Self::Prefill,
            Some(Role::Decode) => Self::Decode,
        }
    }
}

fn role(value: i32) -> Result<Option<Role>, WireError> {
    match wire::Role::try_from(value) {
        Ok(wire::Role::Unspecified) => Ok(None),
        Ok(wire::Role::Mixed) => Ok(Some(Role::Mixed)),
        Ok(wire::Role::Prefill) => Ok(Some(Role::Prefill)),
        Ok(wire::Role::Decode) => Ok(Some(Role::Decode)),
        Err(_) => Err(WireError::UnknownEnum { field: "role", value }),
    }
}

impl From<Option<DrainReason>> for wire::DrainReason {
    fn from(reason: Option<DrainReason>) -> Self {
        match reason {
            None => Self::Unspecified,
            Some(DrainReason::Leaving) => Self::Leaving,
            Some(DrainReason::Stalled) => Self::Stalled,
        }
    }
}

/// A scheduler that is older gives no reason, and one that is newer may give others: it drains all the same.
fn drain_reason(value: i32) -> DrainReason {
    match wire::DrainReason::try_from(value) {
        Ok(wire::DrainReason::Stalled) => DrainReason::Stalled,
        Ok(wire::DrainReason::Unspecified | wire::DrainReason::Leaving) | Err(_) => DrainReason::Leaving,
    }
}

impl From<&EngineView> for wire::EngineView {
    fn from(view: &EngineView) -> Self {
        Self {
            engine: Some((&view.engine).into()),
            address: view.address.clone(),
            identity: Some((&view.identity).into()),
            role: wire::Role::from(view.role).into(),
            draining: view.draining.is_some(),
            occupancy: view.occupancy.as_ref().map(Into::into),
            drain_reason: wire::DrainReason::from(view.draining).into(),
        }
    }
}

impl TryFrom<wire::EngineView> for EngineView {
    type Error = WireError;

    fn try_from(view: wire::EngineView) -> Result<Self, WireError> {
        Ok(Self {
            engine: required("engine", view.engine)?.into(),
            address: view.address,
            identity: required("identity", view.identity)?.try_into()?,
            role: role(view.role)?,
            draining: view.draining.then(|| drain_reason(view.drain_reason)),
            occupancy: view.occupancy.map(TryInto::try_into).transpose()?,
        })
    }
}

impl From<&ClusterView> for wire::ClusterView {
    fn from(view: &ClusterView) -> Self {
        Self { epoch: view.epoch, version: view.version, engines: view.engines.iter().map(Into::into).collect() }
    }
}

impl TryFrom<wire::ClusterView> for ClusterView {
    type Error = WireError;

    fn try_from(view: wire::ClusterView) -> Result<Self, WireError> {
        let engines = view.engines.into_iter().map(TryInto::try_into).collect::<Result<_, _>>()?;
        Ok(Self { epoch: view.epoch, version: view.version, engines })
    }
}

#[cfg(test)]
mod tests {
    use contract::ids::{DataRank, EngineId};
    use contract::model::{Fingerprint, ModelIdentity};

    use super::*;

    fn view() -> ClusterView {
        let engine = EngineId { worker: "w".into(), incarnation: Incarnation(5), data_rank: DataRank(0) };
        let identity = ModelIdentity {
            name: "m".into(),
            block_size: 16,
            context_length: 64,
            vocab_size: 8,
            model: Fingerprint([1; 16]),
            tokenizer: Fingerprint([2; 16]),
            hash_key: Fingerprint([3; 16]),
            numerics: Fingerprint([4; 16]),
        };
        let occupancy = Occupancy {
            engine: engine.clone(),
            step: 9,
            blocks: BlockCounts { total: 3, allocated: 1, cached: 1, free: 1 },
            requests_waiting: 1,
            requests_running: 2,
            slots: 8,
            tokens_queued: 3,
            tokens_running: 4,
            cost: CostCoefficients { decode_base_ms: 1.5, ..CostCoefficients::default() },
            step_tokens: 512,
            pairs_queued: 4.5,
            computed: StepLoad { prefill_tokens: 1 << 40, prefill_pairs: 0.5, decode_sequences: 6, decode_context: 7 },
            requests_begun: 8,
            prompt_tokens_begun: 900,
            is_stalled: true,
            transfer_ms_per_token: 0.25,
        };
        let engine_view = EngineView {
            engine,
            address: "127.0.0.1:1".to_owned(),
            identity,
            role: Some(Role::Decode),
            draining: Some(DrainReason::Stalled),
            occupancy: Some(occupancy),
        };
        ClusterView { epoch: 1, version: 2, engines: vec![engine_view] }
    }

    #[test]
    fn views_survive_the_wire() {
        assert_eq!(ClusterView::try_from(wire::ClusterView::from(&view())), Ok(view()));
    }

    #[test]
    fn members_survive_the_wire_and_unknown_kinds_do_not() {
        let member = Member {
            kind: MemberKind::Worker,
            id: "w".to_owned(),
            incarnation: Incarnation(7),
            address: "a:1".to_owned(),
            n_data_ranks: 1,
            identity: Some(view().engines[0].identity.clone()),
            draining: false,
            role: None,
            epoch: 3,
        };
        let message = wire::Member::from(&member);
        assert_eq!(Member::try_from(message.clone()), Ok(member));
        assert!(Member::try_from(wire::Member { kind: 0, ..message }).is_err());
    }
}
