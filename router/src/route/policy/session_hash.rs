//! The same engine for the same session (rendezvous hashing, Thaler and Ravishankar 1998).

use crate::route::{Choice, Reason, RoutePolicy, Situation};

/// Takes the engine with the highest hash of session and engine: when one goes, only its sessions move.
#[derive(Clone, Copy, Debug)]
pub struct SessionHash;

impl RoutePolicy for SessionHash {
    fn name(&self) -> &'static str {
        "session_hash"
    }

    fn choose(&self, situation: &Situation<'_>) -> Choice {
        let all = situation.candidates;
        if all.len() == 1 {
            return Choice { index: 0, reason: Reason::Only };
        }
        let weight = |index: &usize| {
            let engine = all[*index].engine;
            let name = engine.worker.as_str().bytes().fold(0xCBF2_9CE4_8422_2325_u64, |hash, byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3)
            });
            mix(mix(name ^ u64::from(engine.data_rank.0)) ^ situation.session)
        };
        let index = (0..all.len()).max_by_key(weight).expect("candidates are never empty");
        Choice { index, reason: Reason::Session }
    }
}

/// The finalizer of SplitMix64 (Steele, Lea and Flood 2014): every input bit changes every output bit.
fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^ (bits >> 31)
}
