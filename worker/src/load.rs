//! From model files to an engine and its executor.

use std::sync::Arc;
use std::time::Instant;

use contract::hash::HashKey;
use contract::kv::BlockOrder;
use contract::model::{Fingerprint, ModelIdentity};
use daemon::clock;
use daemon::telemetry::metrics::scope;
use daemon::telemetry::names;
use engine::{Engine, EngineConfig};
use kernels::{CpuOps, CpuOptions, LayerCache, Ops};
use models::{KvCache, LoadOptions, ModelFiles};

use crate::config::{Config, EngineKind};
use crate::cores;
use crate::error::Error;
use crate::executor::{Executor, ModelExecutor, limits};
use crate::packed::{Keeping, Unwritten};
use crate::sim::{Device, Profile, SimExecutor};
use crate::split::Pool;

/// What a replica runs with.
pub(crate) struct Loaded {
    pub(crate) engine: Engine,
    pub(crate) executor: Box<dyn Executor>,
    pub(crate) identity: ModelIdentity,
    /// Where blocks lie, if they can move to other workers.
    pub(crate) pool: Option<Pool>,
    pub(crate) memory: Memory,
    /// Packed weights that no file has yet.
    pub(crate) unwritten: Option<Unwritten>,
}

/// What a replica's memory is there for.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Memory {
    pub(crate) weight_bytes: usize,
    /// When all blocks are in use.
    pub(crate) pool_bytes: usize,
}

impl Memory {
    /// Shows it among the worker's metrics.
    pub(crate) fn observe(self, worker: &str) {
        let scope = scope("worker", worker);
        for (metric, bytes) in [(&names::MODEL_WEIGHTS, self.weight_bytes), (&names::KV_CACHE_POOL, self.pool_bytes)] {
            scope.gauge(metric, &[]).set(i64::try_from(bytes).unwrap_or(i64::MAX));
        }
    }
}

/// Opens the configured model and loads what is to compute it; takes seconds and blocks.
pub(crate) fn load(config: &Config) -> Result<Loaded, Error> {
    let began = clock::now();
    config.check()?;
    let key = config.key()?;
    let files = ModelFiles::open(&config.model)?;
    match config.engine {
        EngineKind::Model => load_model(config, &files, key, began),
        EngineKind::Sim => load_sim(config, &files, key),
    }
}

fn load_model(config: &Config, files: &ModelFiles, key: HashKey, began: Instant) -> Result<Loaded, Error> {
    let isa = config.isa()?;
    let threads = cores::or_allowed(config.threads);
    let ops = Arc::new(CpuOps::new(&CpuOptions { dtype: config.compute_dtype(), threads, isa })?);
    let engine_config = engine_config(config, files, key)?;
    engine_config.validate()?;
    let limits = limits(&engine_config);
    let positions_max = Some(engine_config.length_max() as usize);
    let keeping = Keeping::begin(config, files, &ops);
    let model = models::load(files, Arc::clone(&ops) as Arc<dyn Ops>, LoadOptions { limits, positions_max })?;
    let is_kept = keeping.is_some();
    let unwritten = keeping.and_then(|keeping| keeping.finish(&ops));
    let layout = model.kv_spec().layout(BlockOrder::HeadsFirst, config.block_size, config.cache_dtype());
    let kv = KvCache::allocate(ops.as_ref(), layout, engine_config.n_blocks as usize)?;
    let layers: Vec<LayerCache> = (0..layout.n_layers as usize).map(|index| kv.layer(index).clone()).collect();
    let pool = Some(Pool { layout, memory: ops.block_memory(&layers)? });
    let numerics = format!("{} kv {:?} {:?}", ops.numerics(), layout.dtype, layout.order);
    let memory = Memory { weight_bytes: model.weight_bytes(), pool_bytes: layout.block_bytes_total() * kv.n_blocks() };
    let mut executor = Box::new(ModelExecutor::new(ops, model, kv, limits)?);
    let loaded = clock::now();
    executor.warm_up()?;
    tracing::info!(
        model = %config.model.display(),
        weights_mb = memory.weight_bytes >> 20,
        kv_cache_mb = memory.pool_bytes >> 20,
        n_blocks = engine_config.n_blocks,
        context_length = engine_config.context_length,
        numerics,
        threads,
        warm = is_kept && unwritten.is_none(),
        seconds = loaded.duration_since(began).as_secs_f64(),
        warm_up_seconds = clock::now().duration_since(loaded).as_secs_f64(),
        "model loaded"
    );
    let identity = identity(config, files, &engine_config, &numerics)?;
    Ok(Loaded { engine: Engine::new(engine_config)?, executor, identity, pool, memory, unwritten })
}

fn load_sim(config: &Config, files: &ModelFiles, key: HashKey) -> Result<Loaded, Error> {
    let profile = Profile::load(&config.sim_profile)?;
    let profile = Profile {
        n_blocks: config.n_blocks.unwrap_or(profile.n_blocks),
        context_length: context_length(config, files)?.min(profile.context_length),
        ..profile
    };
    let engine_config = EngineConfig {
        max_waiting: config.max_waiting,
        watermark_blocks: config.watermark_blocks(profile.n_blocks),
        retry_after_ms: config.retry_after_ms,
        ..profile.engine_config(key, files.model_fingerprint())
    };
    engine_config.validate()?;
    let identity = identity(config, files, &engine_config, &format!("sim {}", profile.fingerprint()))?;
    let (device, layout, memory) = Device::shared(&profile, identity.vocab_size)?;
    let executor = Box::new(
        SimExecutor::new(device).with_layers(layout.n_layers as usize).hanging_while(profile.hangs_while.clone()),
    );
    let pool = Some(Pool { layout, memory });
    tracing::info!(
        model = %config.model.display(),
        profile = %config.sim_profile.display(),
        n_blocks = engine_config.n_blocks,
        context_length = engine_config.context_length,
        "simulating"
    );
    let engine = Engine::new(engine_config)?;
    Ok(Loaded { engine, executor, identity, pool, memory: Memory::default(), unwritten: None })
}

/// The model's longest sequence, or what is configured when that is less.
fn context_length(config: &Config, files: &ModelFiles) -> Result<u32, Error> {
    let native = small("context length", files.config().context_length)?;
    Ok(config.context_length.map_or(native, |length| length.min(native)))
}

fn engine_config(config: &Config, files: &ModelFiles, hash_key: HashKey) -> Result<EngineConfig, Error> {
    let model = files.config();
    let context_length = context_length(config, files)?;
    let row_bytes = config.cache_dtype().row_bytes(model.head_dim);
    let token_bytes = 2 * model.n_layers() * model.n_kv_heads * row_bytes;
    let n_blocks = config.pool_blocks(token_bytes.saturating_mul(config.block_size as usize), context_length);
    let n_tokens = u64::from(n_blocks) * u64::from(config.block_size);
    if n_tokens < u64::from(context_length) {
        tracing::warn!(
            n_tokens,
            context_length,
            "the pool holds less than one context; worker.kv_cache_mb makes it larger"
        );
    }
    Ok(config.engine_config(n_blocks, context_length, hash_key, files.model_fingerprint()))
}

fn identity(
    config: &Config,
    files: &ModelFiles,
    engine: &EngineConfig,
    numerics: &str,
) -> Result<ModelIdentity, Error> {
    let name = if config.model_name.is_empty() { files.suggested_name() } else { &config.model_name };
    Ok(ModelIdentity {
        name: name.into(),
        block_size: engine.block_size,
        context_length: engine.context_length,
        vocab_size: small("vocabulary size", files.config().vocab_size)?,
        model: files.model_fingerprint(),
        tokenizer: files.tokenizer_fingerprint(),
        hash_key: engine.hash_key.fingerprint(),
        numerics: Fingerprint::of(&[&files.model_fingerprint().0, numerics.as_bytes()]),
    })
}

fn small(what: &'static str, value: usize) -> Result<u32, Error> {
    u32::try_from(value).map_err(|_| Error::ModelValue { what, value })
}
