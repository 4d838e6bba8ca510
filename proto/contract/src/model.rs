//! What must be equal on two sides for a hash, a token or a cached block to mean the same.

use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::ids::ModelName;

/// 128 bits that stand for something larger.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub struct Fingerprint(pub [u8; 16]);

impl Fingerprint {
    /// Hashes parts with their lengths, so that no two lists of parts collide by concatenation.
    pub fn of(parts: &[&[u8]]) -> Self {
        let mut hasher = blake3::Hasher::new();
        for part in parts {
            hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
        }
        let mut out = [0; 16];
        out.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        Self(out)
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Identity of a served model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelIdentity {
    /// Name that clients ask for.
    pub name: ModelName,
    /// Tokens in a KV block.
    pub block_size: u32,
    /// Longest sequence, prompt and output together.
    pub context_length: u32,
    /// Entries of the output head.
    pub vocab_size: u32,
    /// Stands for the weights and the architecture.
    pub model: Fingerprint,
    /// Stands for everything that turns text into tokens.
    pub tokenizer: Fingerprint,
    /// Stands for the cluster's hash key.
    pub hash_key: Fingerprint,
    /// Stands for weights, formats, instruction set and parallel layout: equal ones give equal tokens.
    pub numerics: Fingerprint,
}

/// Two sides disagree about a model.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{property} of model {model} differs: {ours} here, {theirs} at {peer}; give both the same {remedy}")]
pub struct IdentityMismatch {
    /// The model.
    pub model: ModelName,
    /// Who disagrees.
    pub peer: String,
    /// What differs.
    pub property: &'static str,
    /// Value on this side.
    pub ours: String,
    /// Value on the other.
    pub theirs: String,
    /// What to make equal.
    pub remedy: &'static str,
}

impl ModelIdentity {
    /// Checks that `theirs` is the same model, tokenized, hashed and paged the same way.
    ///
    /// Numerics may differ: that decides what migration prefers, not whether two sides understand each other.
    ///
    /// # Errors
    /// The first property that differs, with both values.
    pub fn check(&self, theirs: &ModelIdentity, peer: &str) -> Result<(), IdentityMismatch> {
        let rows: [(&'static str, String, String, &'static str); 6] = [
            ("name", self.name.to_string(), theirs.name.to_string(), "model name"),
            ("block size", self.block_size.to_string(), theirs.block_size.to_string(), "worker.block_size"),
            ("vocabulary size", self.vocab_size.to_string(), theirs.vocab_size.to_string(), "model files"),
            ("model fingerprint", self.model.to_string(), theirs.model.to_string(), "model files"),
            ("tokenizer fingerprint", self.tokenizer.to_string(), theirs.tokenizer.to_string(), "tokenizer files"),
            ("hash key fingerprint", self.hash_key.to_string(), theirs.hash_key.to_string(), "hash_key"),
        ];
        match rows.into_iter().find(|(_, ours, theirs, _)| ours != theirs) {
            None => Ok(()),
            Some((property, ours, theirs, remedy)) => Err(IdentityMismatch {
                model: self.name.clone(),
                peer: peer.to_owned(),
                property,
                ours,
                theirs,
                remedy,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity() -> ModelIdentity {
        ModelIdentity {
            name: "m".into(),
            block_size: 16,
            context_length: 100,
            vocab_size: 10,
            model: Fingerprint([1; 16]),
            tokenizer: Fingerprint([2; 16]),
            hash_key: Fingerprint([3; 16]),
            numerics: Fingerprint([4; 16]),
        }
    }

    #[test]
    fn mismatch_names_both_values() {
        let theirs = ModelIdentity { block_size: 128, ..identity() };
        let error = identity().check(&theirs, "w0").expect_err("block sizes differ").to_string();
        assert!(error.contains("16 here") && error.contains("128 at w0"), "{error}");
    }

    #[test]
    fn other_numerics_still_pair() {
        let theirs = ModelIdentity { numerics: Fingerprint([9; 16]), ..identity() };
        assert_eq!(identity().check(&theirs, "w0"), Ok(()));
    }
}
