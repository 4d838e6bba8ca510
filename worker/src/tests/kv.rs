//! The KV watch: what a router that follows it knows equals what the worker holds.

use std::collections::HashSet;

use contract::hash::BlockHash;
use contract::kv::{KvDigest, KvEvent};
use contract::model::{Fingerprint, ModelIdentity};
use proto::worker::v1 as wire;
use proto::worker::v1::kv_frame::Body;
use tonic::{Status, Streaming};

use super::fake::Behaviour;
use super::harness::{DEADLINE, Worker, config, start_fake};

async fn watch(worker: &Worker, identity: &ModelIdentity) -> Result<Streaming<wire::KvFrame>, Status> {
    let request = wire::WatchKvRequest { identity: Some(identity.into()) };
    worker.client.clone().watch_kv(request).await.map(tonic::Response::into_inner)
}

/// What a follower knows.
#[derive(Default)]
struct Follower {
    blocks: HashSet<BlockHash>,
    sequence: Option<u64>,
    n_snapshot_parts: usize,
    in_snapshot: bool,
}

impl Follower {
    /// Takes a frame; a heartbeat is compared with what is known and returned.
    fn take(&mut self, frame: wire::KvFrame) -> Option<KvDigest> {
        match frame.body.unwrap() {
            Body::Snapshot(part) => {
                if !self.in_snapshot {
                    self.blocks.clear();
                }
                self.n_snapshot_parts += 1;
                self.in_snapshot = !part.last;
                self.blocks.extend(part.blocks.iter().map(|block| block.hashes().unwrap().0));
                self.sequence = Some(frame.sequence);
            }
            Body::Events(events) => {
                let expected = self.sequence.unwrap() + events.events.len() as u64;
                assert_eq!(frame.sequence, expected, "no gap");
                self.sequence = Some(expected);
                for event in events.events {
                    match KvEvent::try_from(event).unwrap() {
                        KvEvent::BlockStored { hash, .. } => assert!(self.blocks.insert(hash), "stored twice"),
                        KvEvent::BlockRemoved { hash } => assert!(self.blocks.remove(&hash), "removed unknown"),
                        KvEvent::AllBlocksCleared => self.blocks.clear(),
                    }
                }
            }
            Body::Heartbeat(digest) => {
                assert_eq!(self.sequence, Some(frame.sequence));
                let digest = KvDigest::from(digest);
                let mut ours = KvDigest::default();
                self.blocks.iter().for_each(|&hash| ours.insert(hash));
                assert_eq!(ours, digest);
                return Some(digest);
            }
        }
        None
    }

    /// Follows until a heartbeat that satisfies `enough`.
    async fn follow(&mut self, stream: &mut Streaming<wire::KvFrame>, enough: impl Fn(KvDigest, u64) -> bool) {
        let follow = async {
            while let Some(frame) = stream.message().await.unwrap() {
                let sequence = frame.sequence;
                if self.take(frame).is_some_and(|digest| enough(digest, sequence)) {
                    return;
                }
            }
            panic!("the watch ended");
        };
        tokio::time::timeout(DEADLINE, follow).await.unwrap();
    }
}

async fn generate(worker: &Worker, first: u32) {
    let prompt: Vec<u32> = (0..37).map(|i| (i * 3 + first) % 1000).collect();
    worker.generate(&worker.request(&prompt, 6)).await.unwrap();
}

#[tokio::test]
async fn followers_from_the_start_and_from_later_know_the_same() {
    let mut config = config();
    config.kv_snapshot_blocks_max = 3;
    // Few blocks, so that some are evicted.
    let worker = start_fake(config, 24, Behaviour::default()).await;
    let mut early_stream = watch(&worker, &worker.identity).await.unwrap();
    let mut early = Follower::default();
    early.follow(&mut early_stream, |digest, _| digest.n_blocks == 0).await;
    for first in 0..8 {
        generate(&worker, first).await;
    }
    let mut late_stream = watch(&worker, &worker.identity).await.unwrap();
    let mut late = Follower::default();
    late.follow(&mut late_stream, |digest, _| digest.n_blocks > 0).await;
    assert!(late.n_snapshot_parts > 1, "a snapshot comes in parts");
    let sequence = late.sequence.unwrap();
    early.follow(&mut early_stream, |_, now| now >= sequence).await;
    assert_eq!(early.blocks, late.blocks);
    assert!(!early.blocks.is_empty() && sequence > early.blocks.len() as u64, "some were evicted");
}

#[tokio::test]
async fn a_follower_that_lags_gets_a_new_snapshot() {
    let mut config = config();
    config.kv_batches_max = 1;
    let worker = start_fake(config, 400, Behaviour::default()).await;
    let mut stream = watch(&worker, &worker.identity).await.unwrap();
    let mut follower = Follower::default();
    for first in 0..40 {
        generate(&worker, first * 7).await;
    }
    let held = u64::from(worker.at_rest().await.cached);
    follower.follow(&mut stream, |digest, _| digest.n_blocks >= held).await;
}

#[tokio::test]
async fn another_identity_is_refused_with_both_values() {
    let worker = start_fake(config(), 8, Behaviour::default()).await;
    let theirs = ModelIdentity { tokenizer: Fingerprint([9; 16]), ..worker.identity.clone() };
    let status = watch(&worker, &theirs).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::FailedPrecondition);
    let (ours, others) = (worker.identity.tokenizer.to_string(), theirs.tokenizer.to_string());
    assert!(status.message().contains(&ours) && status.message().contains(&others), "{status}");
    let missing = worker.client.clone().watch_kv(wire::WatchKvRequest::default()).await.unwrap_err();
    assert_eq!(missing.code(), tonic::Code::InvalidArgument);
}
