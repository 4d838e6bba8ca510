//! Chained block hashes: equal hashes mean equal prefixes, on every router and worker that share a key.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::ids::Token;
use crate::model::Fingerprint;

/// Secret of a cluster: without it nobody can make a prompt collide with another tenant's.
#[derive(Clone, PartialEq, Eq)]
pub struct HashKey(pub [u8; 32]);

impl HashKey {
    /// What may be published to check that two sides hold the same key.
    pub fn fingerprint(&self) -> Fingerprint {
        let hash = blake3::keyed_hash(&self.0, b"tessera hash key fingerprint");
        Fingerprint(truncate(&hash))
    }
}

/// Text that is no [`HashKey`]; it is not shown.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("has {length} characters, {digits} of them hexadecimal digits; give 64, the same to every router and worker")]
pub struct HashKeyError {
    length: usize,
    digits: usize,
}

impl FromStr for HashKey {
    type Err = HashKeyError;

    /// Reads 64 hexadecimal digits.
    fn from_str(text: &str) -> Result<Self, HashKeyError> {
        let digit = |c: char| c.to_digit(16).and_then(|digit| u8::try_from(digit).ok());
        let digits: Vec<u8> = text.chars().filter_map(digit).collect();
        let wrong = HashKeyError { length: text.chars().count(), digits: digits.len() };
        let (pairs, []) = digits.as_chunks::<2>() else { return Err(wrong) };
        match <[[u8; 2]; 32]>::try_from(pairs) {
            Ok(pairs) if wrong.length == wrong.digits => Ok(Self(pairs.map(|[high, low]| high << 4 | low))),
            _ => Err(wrong),
        }
    }
}

impl std::fmt::Debug for HashKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("HashKey(..)")
    }
}

/// Identifies a full block together with everything before it: 128 bits of keyed BLAKE3.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BlockHash(pub [u8; 16]);

impl BlockHash {
    /// Hashes a block's tokens after its parent; `extra` holds what else decides the block's content.
    ///
    /// Bytes hashed: parent (16 bytes, or none for the first block), length of `extra` as u64, `extra`, tokens as u32, all little-endian.
    pub fn chain(key: &HashKey, parent: Option<BlockHash>, tokens: &[Token], extra: &[u8]) -> BlockHash {
        let mut hasher = blake3::Hasher::new_keyed(&key.0);
        match parent {
            Some(parent) => hasher.update(&[1]).update(&parent.0),
            None => hasher.update(&[0]),
        };
        hasher.update(&(extra.len() as u64).to_le_bytes()).update(extra);
        for chunk in tokens.chunks(64) {
            let mut bytes = [0_u8; 256];
            for (slot, token) in bytes.chunks_exact_mut(4).zip(chunk) {
                slot.copy_from_slice(&token.to_le_bytes());
            }
            hasher.update(&bytes[..chunk.len() * 4]);
        }
        BlockHash(truncate(&hasher.finalize()))
    }

    /// The first eight bytes as a little-endian number, what digests sum over.
    pub fn low_u64(&self) -> u64 {
        let mut low = [0; 8];
        low.copy_from_slice(&self.0[..8]);
        u64::from_le_bytes(low)
    }
}

/// Everything beside tokens that decides the content of a request's first block, and so of all after it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixScope {
    extra: Vec<u8>,
}

impl PrefixScope {
    /// Combines model, adapter and salt; empty adapter or salt means none.
    pub fn new(model: Fingerprint, adapter: &str, salt: &str) -> Self {
        let mut extra = model.0.to_vec();
        for part in [adapter, salt] {
            extra.extend_from_slice(&(part.len() as u64).to_le_bytes());
            extra.extend_from_slice(part.as_bytes());
        }
        Self { extra }
    }

    /// Hashes each full block of `tokens`, in order; a last partial block has no hash.
    pub fn hash_blocks(&self, key: &HashKey, tokens: &[Token], block_size: usize) -> Vec<BlockHash> {
        let mut hashes = Vec::with_capacity(tokens.len() / block_size);
        for block in tokens.chunks_exact(block_size) {
            hashes.push(self.hash_next(key, hashes.last().copied(), block));
        }
        hashes
    }

    /// Hashes one full block after `parent`, the hash of the block before it.
    pub fn hash_next(&self, key: &HashKey, parent: Option<BlockHash>, block: &[Token]) -> BlockHash {
        let extra: &[u8] = if parent.is_none() { &self.extra } else { &[] };
        BlockHash::chain(key, parent, block, extra)
    }
}

fn truncate(hash: &blake3::Hash) -> [u8; 16] {
    let mut out = [0; 16];
    out.copy_from_slice(&hash.as_bytes()[..16]);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: HashKey = HashKey([7; 32]);

    #[test]
    fn keys_are_64_hexadecimal_digits() {
        assert_eq!("0aF1".repeat(16).parse(), Ok(HashKey(std::array::from_fn(|i| [0x0a, 0xf1][i % 2]))));
        let wrong = ["", "zz", &"0".repeat(63), &"0".repeat(65), &"0g".repeat(32), &"+1".repeat(32), &"é".repeat(32)];
        for wrong in wrong.into_iter().chain([format!(" {}", "0a".repeat(32)).as_str()]) {
            let error = wrong.parse::<HashKey>().unwrap_err().to_string();
            assert!(error.contains(&format!("{} characters", wrong.chars().count())), "{wrong}: {error}");
        }
    }

    #[test]
    fn equal_prefixes_share_hashes_until_they_differ() {
        let scope = PrefixScope::new(Fingerprint([1; 16]), "", "");
        let a = scope.hash_blocks(&KEY, &[1, 2, 3, 4, 5, 6, 7], 2);
        let b = scope.hash_blocks(&KEY, &[1, 2, 3, 9, 5, 6], 2);
        assert_eq!(a.len(), 3);
        assert_eq!(a[0], b[0]);
        assert_ne!(a[1], b[1]);
        assert_ne!(a[2], b[2], "the chain carries the difference on");
    }

    #[test]
    fn model_adapter_salt_and_key_each_separate() {
        let tokens = [1, 2, 3, 4];
        let hash = |key: &HashKey, model: u8, adapter: &str, salt: &str| {
            PrefixScope::new(Fingerprint([model; 16]), adapter, salt).hash_blocks(key, &tokens, 4)[0]
        };
        let all = [
            hash(&KEY, 1, "", ""),
            hash(&KEY, 2, "", ""),
            hash(&KEY, 1, "a", ""),
            hash(&KEY, 1, "", "a"),
            hash(&HashKey([8; 32]), 1, "", ""),
        ];
        for (i, a) in all.iter().enumerate() {
            assert!(all[i + 1..].iter().all(|b| a != b));
        }
    }

    #[test]
    fn a_block_never_equals_one_with_shifted_boundaries() {
        let a = BlockHash::chain(&KEY, None, &[1], &[2, 0, 0, 0]);
        let b = BlockHash::chain(&KEY, None, &[2, 1], &[]);
        assert_ne!(a, b);
    }

    #[test]
    fn the_key_is_not_printed() {
        assert_eq!(format!("{KEY:?}"), "HashKey(..)");
    }
}
