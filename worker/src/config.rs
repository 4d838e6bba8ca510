//! What a worker is told at start.

use std::path::PathBuf;
use std::time::Duration;

use contract::hash::HashKey;
use contract::kv::KvDtype;
use contract::model::Fingerprint;
use contract::view::Role;
use daemon::address::{check_advertise, check_listen, check_peers};
use daemon::announce::Announce;
use daemon::server::ServerConfig;
use engine::EngineConfig;
use engine::config::BLOCKS_MAX;
use kernels::{ComputeDtype, ISA_VARIABLE, Isa};
use membership::MembershipConfig;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::stall::Limits;
use crate::transfer::TransferConfig;

/// Number format of weights in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightDtype {
    /// As they are stored: quantised formats stay quantised in memory and become bf16 as they are multiplied.
    #[default]
    Stored,
    /// Rounded to bf16 at load: the same bits as `Stored` for quantised and bf16 files, fewer for f16 and f32 files;
    /// more memory, less time where batches are small.
    Bf16,
    /// Kept or widened to f32: for comparison with references.
    F32,
    /// Products of 8 bits, the fastest and the least exact: plain formats are rounded at load with a scale for each output
    /// and activations with a scale for each token (W8A8); quantised formats stay as they are and activations are rounded
    /// in groups of 32.
    Int8,
}

/// What computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// The model.
    #[default]
    Model,
    /// Nothing: a step takes the time that a profile says, and tokens are hashes of those before them. Model files are
    /// still named, for whose identity and vocabulary they tell, but no weight is read.
    Sim,
}

/// The `[worker]` table.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Config {
    /// The worker's lasting name; empty makes one up for this life.
    pub id: String,
    /// Where it listens, for gRPC and for `/livez`, `/readyz` and `/metrics`.
    pub listen: String,
    /// The address others reach it at; empty takes the one that is listened on.
    pub advertise: String,
    /// Model files: a Hugging Face folder or a GGUF file.
    pub model: PathBuf,
    /// What it does of a request: `mixed` all of it, `prefill` prompts for others, `decode` what follows prompts that
    /// others compute where that serves all better; absent leaves it to the scheduler.
    pub role: Option<Role>,
    /// What computes, `model` or `sim`.
    pub engine: EngineKind,
    /// With `sim`: a profile that every build knows (`mooncake`, `ascend-910b`, `cpu`, `instant`) or a TOML file. Block
    /// size, batch and budgets are the profile's; `n_blocks` and `context_length` may say otherwise.
    pub sim_profile: PathBuf,
    /// Folder that keeps packed weights, as large as the model, so that the next start reads them instead of packing:
    /// the eight files used last stay, and together they take at most half of what they and the disk's free space are;
    /// a model that alone takes more is not kept. Empty keeps none; absent takes `packed` in the model cache
    /// (`TESSERA_HOME`, else `~/.cache/tessera`) when the `tessera` binary starts the worker, else keeps none.
    pub packed_cache: Option<PathBuf>,
    /// Name that clients ask for; empty takes the one the files suggest.
    pub model_name: String,
    /// Format of weights in memory.
    pub dtype: WeightDtype,
    /// Format of cached keys and values, `bf16`, `f16`, `int8` or `f32`; absent takes `f32` with `dtype` `f32`,
    /// else `bf16`.
    pub kv_dtype: Option<KvDtype>,
    /// Tokens in a KV block, the same on all workers of a model.
    pub block_size: u32,
    /// Blocks in the pool; absent sizes it by `kv_cache_mb`.
    pub n_blocks: Option<u32>,
    /// Memory of the pool in MiB; less is taken when all slots at full length need less.
    pub kv_cache_mb: u64,
    /// Requests that run at once.
    pub max_running: u32,
    /// Requests that wait for a slot; beyond it they are refused with a time to come back.
    pub max_waiting: u32,
    /// Tokens computed in one step, at least `max_running`.
    pub token_budget: u32,
    /// Tokens of one prompt computed in one step; absent is bounded by `token_budget` alone.
    pub max_prefill_chunk: Option<u32>,
    /// Blocks in a hundred of the pool that admission leaves to running requests.
    pub watermark_percent: u32,
    /// Longest sequence, prompt and output together; absent takes the model's.
    pub context_length: Option<u32>,
    /// Time after which a refused client may come back.
    pub retry_after_ms: u64,
    /// Threads that compute; 0 takes the physical cores that affinity and cgroups allow.
    pub threads: usize,
    /// Instruction set (`scalar`, `portable`, `avx2`, `avx512`, `avx512bf16`, `amx`); empty takes the one that the
    /// environment variable `TESSERA_CPU` names, else the fastest there is.
    pub cpu: String,
    /// Tokens that may wait for a request's reader before it is aborted.
    pub reader_tokens_max: u32,
    /// Longest silence towards routers and schedulers.
    pub heartbeat_ms: u64,
    /// The engine counts as standing still when a step runs for so long and for 20 times as long as predicted, or an event
    /// waits for so long; longer than whatever else may hold up the machine.
    pub stall_ms_min: u64,
    /// The same, however long the step was predicted to run, and where nothing is predicted yet, as after the start; longer
    /// than any step, at least `stall_ms_min`.
    pub stall_ms_max: u64,
    /// Shortest time between two reports to a scheduler.
    pub report_interval_ms: u64,
    /// Batches of KV events that a router may lag behind before it gets a new snapshot.
    pub kv_batches_max: usize,
    /// Blocks in one message of a KV snapshot.
    pub kv_snapshot_blocks_max: usize,
    /// Secret of the cluster's prefix hashes, 64 hexadecimal digits.
    pub hash_key: String,
    /// Where members are found.
    pub membership: MembershipConfig,
    /// Schedulers to report to, as HOST:PORT; none reports nothing.
    pub scheduler_addresses: Vec<String>,
    /// How prompts travel to and from other workers.
    pub transfer: TransferConfig,
    /// Bounds of its server; `grace_ms` is the time running requests have at shutdown.
    pub server: ServerConfig,
    /// Tells who started it where it listens.
    #[serde(skip)]
    pub announce: Announce,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            id: String::new(),
            listen: "127.0.0.1:0".to_owned(),
            advertise: String::new(),
            model: PathBuf::new(),
            role: None,
            engine: EngineKind::Model,
            sim_profile: PathBuf::from("instant"),
            packed_cache: None,
            model_name: String::new(),
            dtype: WeightDtype::Stored,
            kv_dtype: None,
            block_size: 16,
            n_blocks: None,
            kv_cache_mb: 512,
            max_running: 256,
            max_waiting: 1_024,
            token_budget: 512,
            max_prefill_chunk: None,
            watermark_percent: 1,
            context_length: None,
            retry_after_ms: 1_000,
            threads: 0,
            cpu: String::new(),
            reader_tokens_max: 1_024,
            heartbeat_ms: 1_000,
            stall_ms_min: 5_000,
            stall_ms_max: 60_000,
            report_interval_ms: 3,
            kv_batches_max: 1_024,
            kv_snapshot_blocks_max: 8_192,
            hash_key: String::new(),
            membership: MembershipConfig::default(),
            scheduler_addresses: Vec::new(),
            transfer: TransferConfig::default(),
            server: ServerConfig::default(),
            announce: Announce::default(),
        }
    }
}

impl std::fmt::Debug for Config {
    /// Shows which model is served where, and no secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { id, listen, model, model_name, dtype, .. } = self;
        f.debug_struct("Config")
            .field("id", id)
            .field("listen", listen)
            .field("model", model)
            .field("model_name", model_name)
            .field("dtype", dtype)
            .finish_non_exhaustive()
    }
}

impl Config {
    /// Checks what can be judged before anything is opened.
    ///
    /// # Errors
    /// The first value out of range, with the range.
    pub fn check(&self) -> Result<(), Error> {
        let within = |field, value: u64, least: u64, most: u64| match (least..=most).contains(&value) {
            true => Ok(()),
            false => Err(engine::ConfigError { field, value, want: format!("{least} to {most}") }),
        };
        within("threads", self.threads as u64, 0, 1_024)?;
        within("kv_batches_max", self.kv_batches_max as u64, 1, 1 << 20)?;
        within("kv_snapshot_blocks_max", self.kv_snapshot_blocks_max as u64, 1, 1 << 16)?;
        within("reader_tokens_max", self.reader_tokens_max.into(), 1, 1 << 24)?;
        within("heartbeat_ms", self.heartbeat_ms, 1, 600_000)?;
        within("stall_ms_min", self.stall_ms_min, 100, 1 << 32)?;
        within("stall_ms_max", self.stall_ms_max, self.stall_ms_min, 1 << 32)?;
        let transfer = &self.transfer;
        within("transfer.deadline_ms", transfer.deadline_ms, 1, 1 << 32)?;
        // Who has nothing to send says so every half second.
        within("transfer.silence_ms", transfer.silence_ms, 1_000, 1 << 32)?;
        within("transfer.lease_ms", transfer.lease_ms, 100, 1 << 32)?;
        within("transfer.bytes_per_s_max", transfer.bytes_per_s_max.unwrap_or(u64::MAX), 1, u64::MAX)?;
        within("transfer.ring_bytes", transfer.ring_bytes, 1, 1 << 30)?;
        within("transfer.connections_max", transfer.connections_max.into(), 1, 1 << 16)?;
        within("transfer.pairing_timeout_ms", transfer.pairing_timeout_ms, 1, 1 << 32)?;
        within("transfer.idle_timeout_ms", transfer.idle_timeout_ms, 1, 1 << 32)?;
        within("watermark_percent", self.watermark_percent.into(), 0, 99)?;
        let (n_blocks, context_length) = (self.n_blocks.unwrap_or(BLOCKS_MAX), self.context_length.unwrap_or(u32::MAX));
        self.engine_config(n_blocks, context_length, self.key()?, Fingerprint([0; 16])).validate()?;
        if !self.id.is_empty() {
            membership::check_id(&self.id)?;
        }
        check_listen("worker.listen", &self.listen)?;
        if !transfer.listen.is_empty() {
            check_listen("worker.transfer.listen", &transfer.listen)?;
        }
        check_advertise("worker.advertise", &self.advertise)?;
        check_advertise("worker.transfer.advertise", &transfer.advertise)?;
        check_peers("worker.scheduler_addresses", &self.scheduler_addresses)?;
        self.membership.check()?;
        self.isa().map(drop)
    }

    /// The instruction set that is named, here or in the environment.
    pub(crate) fn isa(&self) -> Result<Option<Isa>, Error> {
        let (setting, name) = match self.cpu.trim() {
            "" => (ISA_VARIABLE, std::env::var(ISA_VARIABLE).unwrap_or_default()),
            name => ("worker.cpu", name.to_owned()),
        };
        let parse = |name: &str| name.parse::<Isa>().and_then(|isa| isa.check().map(|()| isa));
        let name = Some(name.trim()).filter(|name| !name.is_empty());
        name.map(parse).transpose().map_err(|source| Error::Cpu { setting, source })
    }

    /// Reads the hash key.
    pub(crate) fn key(&self) -> Result<HashKey, Error> {
        self.hash_key.parse().map_err(Error::HashKey)
    }

    /// The folder of packed weights, if they are kept; `~/` at its start is the home folder, as a shell would have it.
    pub(crate) fn keeps_packed(&self) -> Option<PathBuf> {
        let folder = self.packed_cache.as_deref().filter(|folder| !folder.as_os_str().is_empty())?;
        let in_home = folder.strip_prefix("~").ok().and_then(|rest| Some(std::env::home_dir()?.join(rest)));
        Some(in_home.unwrap_or_else(|| folder.to_owned()))
    }

    pub(crate) fn compute_dtype(&self) -> ComputeDtype {
        match self.dtype {
            WeightDtype::Stored => ComputeDtype::Stored,
            WeightDtype::Bf16 => ComputeDtype::Bf16,
            WeightDtype::F32 => ComputeDtype::F32,
            WeightDtype::Int8 => ComputeDtype::Int8,
        }
    }

    pub(crate) fn cache_dtype(&self) -> KvDtype {
        self.kv_dtype.unwrap_or(match self.dtype {
            WeightDtype::Stored | WeightDtype::Bf16 | WeightDtype::Int8 => KvDtype::Bf16,
            WeightDtype::F32 => KvDtype::F32,
        })
    }

    pub(crate) fn heartbeat(&self) -> Duration {
        Duration::from_millis(self.heartbeat_ms)
    }

    pub(crate) fn stall_limits(&self) -> Limits {
        Limits { least: Duration::from_millis(self.stall_ms_min), most: Duration::from_millis(self.stall_ms_max) }
    }

    /// The bounds of an engine with so many blocks.
    pub(crate) fn engine_config(
        &self,
        n_blocks: u32,
        context_length: u32,
        hash_key: HashKey,
        model: Fingerprint,
    ) -> EngineConfig {
        EngineConfig {
            block_size: self.block_size,
            n_blocks,
            max_running: self.max_running,
            max_waiting: self.max_waiting,
            token_budget: self.token_budget,
            prefill_budget: None,
            max_prefill_chunk: self.max_prefill_chunk,
            context_length,
            watermark_blocks: self.watermark_blocks(n_blocks),
            retry_after_ms: self.retry_after_ms,
            hash_key,
            model,
        }
    }

    /// Blocks that admission leaves to running requests, of so many.
    pub(crate) fn watermark_blocks(&self, n_blocks: u32) -> u32 {
        let watermark = u64::from(n_blocks) * u64::from(self.watermark_percent.min(90)) / 100;
        u32::try_from(watermark).unwrap_or(0)
    }

    /// Blocks in the pool, where one takes `block_bytes` and sequences are at most `context_length` long.
    pub(crate) fn pool_blocks(&self, block_bytes: usize, context_length: u32) -> u32 {
        if let Some(n_blocks) = self.n_blocks {
            return n_blocks;
        }
        let by_memory = self.kv_cache_mb.saturating_mul(1 << 20) / (block_bytes as u64).max(1);
        let per_sequence = u64::from(context_length.div_ceil(self.block_size.max(1))) + 1;
        let by_use = per_sequence.saturating_mul(self.max_running.into());
        let n_blocks = by_memory.min(by_use).clamp(1, BLOCKS_MAX.into());
        u32::try_from(n_blocks).unwrap_or(BLOCKS_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> Config {
        Config { hash_key: "0a".repeat(32), ..Config::default() }
    }

    #[test]
    fn bounds_that_cannot_work_are_refused_by_name() {
        assert!(good().check().is_ok());
        let error = |config: Config| config.check().unwrap_err().to_string();
        assert!(error(Config { threads: 1_000_000, ..Config::default() }).contains("worker.threads is 1000000"));
        assert!(error(Config { kv_batches_max: usize::MAX, ..Config::default() }).contains("kv_batches_max"));
        assert!(error(Config { reader_tokens_max: 0, ..Config::default() }).contains("reader_tokens_max is 0"));
        assert!(error(Config { stall_ms_min: 0, ..Config::default() }).contains("stall_ms_min is 0"));
        assert!(error(Config { stall_ms_max: 1, ..Config::default() }).contains("stall_ms_max is 1"));
        assert!(error(Config { watermark_percent: 500, ..Config::default() }).contains("watermark_percent"));
        assert!(error(Config { cpu: " mmx ".to_owned(), ..good() }).contains("worker.cpu"));
        assert!(Config { cpu: " scalar ".to_owned(), ..good() }.check().is_ok());
        assert!(error(Config { n_blocks: Some(0), ..good() }).contains("worker.n_blocks is 0"));
        assert!(error(Config { token_budget: 255, ..good() }).contains("worker.token_budget is 255"));
        assert!(error(Config { hash_key: "zz".to_owned(), ..good() }).contains("worker.hash_key has 2 characters"));
        assert!(error(Config { id: "a ".to_owned(), ..good() }).contains("membership"));
        let membership = MembershipConfig { ttl_ms: 0, ..MembershipConfig::default() };
        assert!(error(Config { membership, ..good() }).contains("membership"));
    }

    #[test]
    fn what_is_no_address_is_refused_by_name() {
        let told = |config: Config, option: &str| {
            let error = config.check().unwrap_err().to_string();
            assert!(error.starts_with(option), "{error}");
        };
        told(Config { listen: "7000".to_owned(), ..good() }, "worker.listen");
        told(Config { advertise: "garbage".to_owned(), ..good() }, "worker.advertise");
        told(Config { scheduler_addresses: vec!["here".to_owned()], ..good() }, "worker.scheduler_addresses");
        let transfer = |listen: &str, advertise: &str| TransferConfig {
            listen: listen.to_owned(),
            advertise: advertise.to_owned(),
            ..TransferConfig::default()
        };
        told(Config { transfer: transfer("x", ""), ..good() }, "worker.transfer.listen");
        told(Config { transfer: transfer("", "[::]:1"), ..good() }, "worker.transfer.advertise");
    }

    #[test]
    fn the_folder_of_packed_weights_may_be_in_the_home_folder() {
        let folder = |path: &str| Config { packed_cache: Some(path.into()), ..Config::default() }.keeps_packed();
        assert_eq!(folder(""), None);
        assert_eq!(folder("/a/~/b"), Some("/a/~/b".into()));
        assert_eq!(folder("~/b"), Some(std::env::home_dir().unwrap().join("b")));
    }

    #[test]
    fn the_key_is_not_shown() {
        let config = Config { hash_key: "abcdef".to_owned(), ..Config::default() };
        assert!(!format!("{config:?} {}", config.key().unwrap_err()).contains("abcdef"));
    }

    #[test]
    fn the_pool_is_bounded_by_memory_and_by_what_can_be_used() {
        let config = Config { max_running: 2, ..Config::default() };
        assert_eq!(config.pool_blocks(1 << 20, 1 << 20), 512);
        assert_eq!(config.pool_blocks(1 << 10, 64), 10);
        assert_eq!(config.pool_blocks(usize::MAX, 64), 1, "an engine judges what is too small");
        assert_eq!(Config { n_blocks: Some(7), ..config }.pool_blocks(1, 64), 7);
    }
}
