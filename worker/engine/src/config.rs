//! Bounds of an engine, checked once.

use contract::hash::HashKey;
use contract::model::Fingerprint;
use thiserror::Error;

/// Most blocks a pool may have; each takes about 60 bytes of bookkeeping.
pub const BLOCKS_MAX: u32 = 1 << 26;

/// Largest step; buffers are made for it at start.
pub const TOKEN_BUDGET_MAX: u32 = 1 << 17;

/// What an engine is built from.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Tokens in a block, at least 1.
    pub block_size: u32,
    /// Blocks in the pool, 1..=`BLOCKS_MAX`.
    pub n_blocks: u32,
    /// Slots: requests that may run at once, at least 1.
    pub max_running: u32,
    /// Requests that may wait for a slot, at least 1.
    pub max_waiting: u32,
    /// Query tokens in a step at most, at least `max_running` so that every decode advances in every step.
    pub token_budget: u32,
    /// Query tokens of prompts in a step at most, at least 1; none is bounded by the budget alone.
    pub prefill_budget: Option<u32>,
    /// Query tokens of one sequence in a step at most, at least 1; none is bounded by the budget alone.
    pub max_prefill_chunk: Option<u32>,
    /// Longest sequence, prompt and output together, at least 2.
    pub context_length: u32,
    /// Available blocks that admission leaves to running requests, fewer than `n_blocks`.
    pub watermark_blocks: u32,
    /// What a refused client is told to wait.
    pub retry_after_ms: u64,
    /// The cluster's secret for prefix hashes.
    pub hash_key: HashKey,
    /// The served model.
    pub model: Fingerprint,
}

/// A bound that cannot work.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{field} is {value}; give {want}")]
pub struct ConfigError {
    /// Field of `EngineConfig`.
    pub field: &'static str,
    /// Its value.
    pub value: u64,
    /// What would do.
    pub want: String,
}

impl EngineConfig {
    /// Checks every bound.
    ///
    /// # Errors
    /// The first bound that cannot work, with its value and the way out.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let at_least = |field, value: u32, least: u32| match value < least {
            true => Err(ConfigError { field, value: value.into(), want: format!("at least {least}") }),
            false => Ok(()),
        };
        at_least("block_size", self.block_size, 1)?;
        at_least("n_blocks", self.n_blocks, 1)?;
        at_least("max_running", self.max_running, 1)?;
        at_least("max_waiting", self.max_waiting, 1)?;
        at_least("token_budget", self.token_budget, self.max_running)?;
        at_least("prefill_budget", self.prefill_budget.unwrap_or(1), 1)?;
        at_least("max_prefill_chunk", self.max_prefill_chunk.unwrap_or(1), 1)?;
        at_least("context_length", self.context_length, 2)?;
        let at_most = |field, value: u32, most: u32| match value > most {
            true => Err(ConfigError { field, value: value.into(), want: format!("at most {most}") }),
            false => Ok(()),
        };
        at_most("n_blocks", self.n_blocks, BLOCKS_MAX)?;
        at_most("max_running", self.max_running, 1 << 16)?;
        at_most("token_budget", self.token_budget, TOKEN_BUDGET_MAX)?;
        at_most("watermark_blocks", self.watermark_blocks, self.n_blocks - 1)
    }

    /// Longest sequence that context and pool allow; its last token needs no block, for its KV is never read.
    pub fn length_max(&self) -> u32 {
        let pool = u64::from(self.n_blocks) * u64::from(self.block_size) + 1;
        u32::try_from(pool).map_or(self.context_length, |pool| pool.min(self.context_length))
    }
}
