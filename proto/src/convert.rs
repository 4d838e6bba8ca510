//! Conversions between wire and contract types of the worker protocol: the one place where wire data is checked for form.

use std::time::Duration;

use contract::hash::BlockHash;
use contract::ids::{DataRank, EngineId, Incarnation, RequestId};
use contract::kv::{KvDigest, KvEvent};
use contract::model::{Fingerprint, ModelIdentity};
use contract::plan::SampledToken;
use contract::request::{GenerateRequest, PrefillPeer, SamplingParams, StopParams};
use contract::stream::{FinishReason, GenerateFrame};
use thiserror::Error;

use crate::worker::v1 as wire;

/// A message from another process does not have the form it must have.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum WireError {
    /// A field that must be there is not.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// Bytes of another length.
    #[error("{field} has {length} bytes instead of {expected}")]
    Length {
        /// The field.
        field: &'static str,
        /// Bytes it has.
        length: usize,
        /// Bytes it must have.
        expected: usize,
    },
    /// An enum value that this version does not know.
    #[error("{field} has the unknown value {value}")]
    UnknownEnum {
        /// The field.
        field: &'static str,
        /// Its number.
        value: i32,
    },
}

pub(crate) fn required<T>(field: &'static str, value: Option<T>) -> Result<T, WireError> {
    value.ok_or(WireError::Missing(field))
}

fn bytes16(field: &'static str, bytes: &[u8]) -> Result<[u8; 16], WireError> {
    bytes.try_into().map_err(|_| WireError::Length { field, length: bytes.len(), expected: 16 })
}

fn block_hash(field: &'static str, bytes: &[u8]) -> Result<BlockHash, WireError> {
    bytes16(field, bytes).map(BlockHash)
}

fn fingerprint(field: &'static str, bytes: &[u8]) -> Result<Fingerprint, WireError> {
    bytes16(field, bytes).map(Fingerprint)
}

impl From<&EngineId> for wire::EngineId {
    fn from(id: &EngineId) -> Self {
        Self { worker: id.worker.to_string(), incarnation: id.incarnation.0, data_rank: id.data_rank.0 }
    }
}

impl From<wire::EngineId> for EngineId {
    fn from(id: wire::EngineId) -> Self {
        Self { worker: id.worker.into(), incarnation: Incarnation(id.incarnation), data_rank: DataRank(id.data_rank) }
    }
}

impl From<&PrefillPeer> for wire::PrefillPeer {
    fn from(peer: &PrefillPeer) -> Self {
        Self { engine: Some((&peer.engine).into()), address: peer.address.clone() }
    }
}

impl TryFrom<wire::PrefillPeer> for PrefillPeer {
    type Error = WireError;

    fn try_from(peer: wire::PrefillPeer) -> Result<Self, WireError> {
        Ok(Self { engine: required("prefill_on.engine", peer.engine)?.into(), address: peer.address })
    }
}

impl From<&ModelIdentity> for wire::ModelIdentity {
    fn from(identity: &ModelIdentity) -> Self {
        Self {
            name: identity.name.to_string(),
            block_size: identity.block_size,
            context_length: identity.context_length,
            vocab_size: identity.vocab_size,
            model_fingerprint: identity.model.0.to_vec(),
            tokenizer_fingerprint: identity.tokenizer.0.to_vec(),
            hash_key_fingerprint: identity.hash_key.0.to_vec(),
            numerics_fingerprint: identity.numerics.0.to_vec(),
        }
    }
}

impl TryFrom<wire::ModelIdentity> for ModelIdentity {
    type Error = WireError;

    fn try_from(identity: wire::ModelIdentity) -> Result<Self, WireError> {
        Ok(Self {
            name: identity.name.into(),
            block_size: identity.block_size,
            context_length: identity.context_length,
            vocab_size: identity.vocab_size,
            model: fingerprint("model_fingerprint", &identity.model_fingerprint)?,
            tokenizer: fingerprint("tokenizer_fingerprint", &identity.tokenizer_fingerprint)?,
            hash_key: fingerprint("hash_key_fingerprint", &identity.hash_key_fingerprint)?,
            numerics: fingerprint("numerics_fingerprint", &identity.numerics_fingerprint)?,
        })
    }
}

impl wire::GenerateRequest {
    /// Puts a request addressed to `engine` on the wire.
    pub fn new(request: &GenerateRequest, engine: &EngineId) -> Self {
        Self {
            request_id: request.id.0.to_be_bytes().to_vec(),
            attempt: request.attempt,
            engine: Some(engine.into()),
            model: request.model.to_string(),
            prompt: request.prompt.clone(),
            generated: request.generated.clone(),
            tenant: request.tenant.to_string(),
            cache_salt: request.cache_salt.clone(),
            adapter: request.adapter.clone(),
            priority: request.priority,
            deadline_ms: request.deadline.map_or(0, deadline_ms),
            sampling: Some((&request.sampling).into()),
            stop: Some((&request.stop).into()),
            logprobs: request.logprobs,
            prompt_logprobs: request.prompt_logprobs,
            prefill_on: request.prefill_on.iter().map(Into::into).collect(),
        }
    }
}

/// Milliseconds of a deadline; a passed one stays a deadline, since 0 on the wire is none.
fn deadline_ms(left: Duration) -> u64 {
    u64::try_from(left.as_millis()).unwrap_or(u64::MAX).max(1)
}

impl TryFrom<wire::GenerateRequest> for (GenerateRequest, EngineId) {
    type Error = WireError;

    fn try_from(request: wire::GenerateRequest) -> Result<Self, WireError> {
        let engine = required("engine", request.engine)?.into();
        let id = bytes16("request_id", &request.request_id)?;
        let request = GenerateRequest {
            id: RequestId(u128::from_be_bytes(id)),
            attempt: request.attempt,
            model: request.model.into(),
            prompt: request.prompt,
            generated: request.generated,
            tenant: request.tenant.into(),
            cache_salt: request.cache_salt,
            adapter: request.adapter,
            priority: request.priority,
            deadline: (request.deadline_ms > 0).then(|| Duration::from_millis(request.deadline_ms)),
            sampling: required("sampling", request.sampling)?.into(),
            stop: required("stop", request.stop)?.into(),
            logprobs: request.logprobs,
            prompt_logprobs: request.prompt_logprobs,
            prefill_on: request.prefill_on.into_iter().map(TryInto::try_into).collect::<Result<_, _>>()?,
        };
        Ok((request, engine))
    }
}

impl From<&SamplingParams> for wire::Sampling {
    fn from(params: &SamplingParams) -> Self {
        let bias = |&(token, bias): &(u32, f32)| wire::LogitBias { token, bias };
        Self {
            temperature: params.temperature,
            top_k: params.top_k,
            top_p: params.top_p,
            min_p: params.min_p,
            repetition_penalty: params.repetition_penalty,
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
            logit_bias: params.logit_bias.iter().map(bias).collect(),
            seed: params.seed,
        }
    }
}

impl From<wire::Sampling> for SamplingParams {
    fn from(params: wire::Sampling) -> Self {
        Self {
            temperature: params.temperature,
            top_k: params.top_k,
            top_p: params.top_p,
            min_p: params.min_p,
            repetition_penalty: params.repetition_penalty,
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
            logit_bias: params.logit_bias.iter().map(|bias| (bias.token, bias.bias)).collect(),
            seed: params.seed,
        }
    }
}

impl From<&StopParams> for wire::Stop {
    fn from(stop: &StopParams) -> Self {
        Self { token_ids: stop.token_ids.clone(), min_tokens: stop.min_tokens, max_tokens: stop.max_tokens }
    }
}

impl From<wire::Stop> for StopParams {
    fn from(stop: wire::Stop) -> Self {
        Self { token_ids: stop.token_ids, min_tokens: stop.min_tokens, max_tokens: stop.max_tokens }
    }
}

impl From<GenerateFrame> for wire::GenerateFrame {
    fn from(frame: GenerateFrame) -> Self {
        let finish = match frame.finish {
            None => wire::FinishReason::Unspecified,
            Some(FinishReason::Stop) => wire::FinishReason::Stop,
            Some(FinishReason::Length) => wire::FinishReason::Length,
        };
        Self {
            attempt: frame.attempt,
            first_position: frame.first_position,
            tokens: frame.tokens.into_iter().map(Into::into).collect(),
            finish_reason: finish.into(),
            cached_tokens: frame.cached_tokens,
        }
    }
}

impl TryFrom<wire::GenerateFrame> for GenerateFrame {
    type Error = WireError;

    fn try_from(frame: wire::GenerateFrame) -> Result<Self, WireError> {
        let finish = match wire::FinishReason::try_from(frame.finish_reason) {
            Ok(wire::FinishReason::Unspecified) => None,
            Ok(wire::FinishReason::Stop) => Some(FinishReason::Stop),
            Ok(wire::FinishReason::Length) => Some(FinishReason::Length),
            Err(_) => return Err(WireError::UnknownEnum { field: "finish_reason", value: frame.finish_reason }),
        };
        Ok(Self {
            attempt: frame.attempt,
            first_position: frame.first_position,
            tokens: frame.tokens.into_iter().map(Into::into).collect(),
            finish,
            cached_tokens: frame.cached_tokens,
        })
    }
}

impl From<SampledToken> for wire::SampledToken {
    fn from(sampled: SampledToken) -> Self {
        let top = |(token, logprob)| wire::TokenLogprob { token, logprob };
        Self { token: sampled.token, logprob: sampled.logprob, top: sampled.top.into_iter().map(top).collect() }
    }
}

impl From<wire::SampledToken> for SampledToken {
    fn from(sampled: wire::SampledToken) -> Self {
        let top = |top: wire::TokenLogprob| (top.token, top.logprob);
        Self { token: sampled.token, logprob: sampled.logprob, top: sampled.top.into_iter().map(top).collect() }
    }
}

impl wire::StoredBlock {
    /// Puts a stored block on the wire.
    pub fn new(hash: BlockHash, parent: Option<BlockHash>) -> Self {
        Self { hash: hash.0.to_vec(), parent: parent.map_or_else(Vec::new, |parent| parent.0.to_vec()) }
    }

    /// Reads hash and parent.
    ///
    /// # Errors
    /// When either has another length.
    pub fn hashes(&self) -> Result<(BlockHash, Option<BlockHash>), WireError> {
        let hash = block_hash("hash", &self.hash)?;
        let parent = if self.parent.is_empty() { None } else { Some(block_hash("parent", &self.parent)?) };
        Ok((hash, parent))
    }
}

impl From<KvEvent> for wire::KvEvent {
    fn from(event: KvEvent) -> Self {
        use wire::kv_event::Event;
        let event = match event {
            KvEvent::BlockStored { hash, parent } => Event::Stored(wire::StoredBlock::new(hash, parent)),
            KvEvent::BlockRemoved { hash } => Event::Removed(hash.0.to_vec()),
            KvEvent::AllBlocksCleared => Event::Cleared(wire::AllBlocksCleared {}),
        };
        Self { event: Some(event) }
    }
}

impl TryFrom<wire::KvEvent> for KvEvent {
    type Error = WireError;

    fn try_from(event: wire::KvEvent) -> Result<Self, WireError> {
        use wire::kv_event::Event;
        match required("event", event.event)? {
            Event::Stored(stored) => {
                let (hash, parent) = stored.hashes()?;
                Ok(Self::BlockStored { hash, parent })
            }
            Event::Removed(hash) => Ok(Self::BlockRemoved { hash: block_hash("removed", &hash)? }),
            Event::Cleared(_) => Ok(Self::AllBlocksCleared),
        }
    }
}

impl From<KvDigest> for wire::KvDigest {
    fn from(digest: KvDigest) -> Self {
        Self { n_blocks: digest.n_blocks, digest: digest.digest }
    }
}

impl From<wire::KvDigest> for KvDigest {
    fn from(digest: wire::KvDigest) -> Self {
        Self { n_blocks: digest.n_blocks, digest: digest.digest }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn engine() -> EngineId {
        EngineId { worker: "w0".into(), incarnation: Incarnation(u64::MAX), data_rank: DataRank(3) }
    }

    fn request() -> GenerateRequest {
        GenerateRequest {
            id: RequestId(0x0102),
            attempt: 2,
            model: "m".into(),
            prompt: vec![1, 2, 3],
            generated: vec![4],
            tenant: "t".into(),
            cache_salt: "s".into(),
            adapter: "a".into(),
            priority: -7,
            deadline: Some(Duration::from_millis(1500)),
            sampling: SamplingParams { logit_bias: vec![(5, -1.5)], seed: u64::MAX, ..SamplingParams::default() },
            stop: StopParams { token_ids: vec![2], min_tokens: 1, max_tokens: 9 },
            logprobs: Some(0),
            prompt_logprobs: None,
            prefill_on: vec![PrefillPeer { engine: engine(), address: "h:1".to_owned() }; 2],
        }
    }

    #[test]
    fn requests_survive_the_wire() {
        let back: (GenerateRequest, EngineId) =
            wire::GenerateRequest::new(&request(), &engine()).try_into().expect("well-formed");
        assert_eq!(back, (request(), engine()));
    }

    #[test]
    fn a_passed_deadline_stays_a_deadline() {
        let passed = GenerateRequest { deadline: Some(Duration::ZERO), ..request() };
        assert_eq!(wire::GenerateRequest::new(&passed, &engine()).deadline_ms, 1);
    }

    #[test]
    fn malformed_messages_name_the_field() {
        let mut message = wire::GenerateRequest::new(&request(), &engine());
        message.request_id.pop();
        let error = <(GenerateRequest, EngineId)>::try_from(message).expect_err("15 bytes");
        assert_eq!(error.to_string(), "request_id has 15 bytes instead of 16");
        let frame = wire::GenerateFrame { finish_reason: 77, ..wire::GenerateFrame::default() };
        assert!(GenerateFrame::try_from(frame).is_err());
        assert!(KvEvent::try_from(wire::KvEvent { event: None }).is_err());
    }

    #[test]
    fn kv_events_survive_the_wire() {
        let hash = BlockHash([1; 16]);
        for event in [
            KvEvent::BlockStored { hash, parent: None },
            KvEvent::BlockStored { hash, parent: Some(BlockHash([2; 16])) },
            KvEvent::BlockRemoved { hash },
            KvEvent::AllBlocksCleared,
        ] {
            assert_eq!(KvEvent::try_from(wire::KvEvent::from(event)), Ok(event));
        }
    }
}
