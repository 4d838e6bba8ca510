//! A workload made ready for a kind of worker: what every run over it shares.

use contract::cost::CostCoefficients;
use contract::hash::{BlockHash, HashKey, PrefixScope};
use contract::ids::{ModelName, TenantId, Token, WorkerId};
use contract::model::{Fingerprint, ModelIdentity};
use engine::{ConfigError, Engine, EngineConfig};
use worker::sim::{Device, Profile};

use crate::workload::{Request, Workload};

const KEY: HashKey = HashKey([7; 32]);
const VOCAB_SIZE: u32 = 1 << 17;
/// Ends a request, as often as the profile says.
pub(crate) const EOS: Token = VOCAB_SIZE - 1;

/// Requests with the hashes of their blocks, and the workers that serve them.
#[derive(Debug)]
pub struct Prepared {
    workload: Workload,
    hashes: Vec<Box<[BlockHash]>>,
    profile: Profile,
    config: EngineConfig,
    identity: ModelIdentity,
    tenants: Vec<TenantId>,
}

impl Prepared {
    /// Hashes every prompt, which takes about a second for a hundred million tokens.
    ///
    /// # Errors
    /// A bound of the profile that no engine can have.
    pub fn new(workload: Workload, profile: Profile) -> Result<Self, ConfigError> {
        let model = profile.fingerprint();
        let config = profile.engine_config(KEY, model);
        config.validate()?;
        let scope = PrefixScope::new(model, "", "");
        let hash = |request: &Request| {
            let prompt = request.prompt(VOCAB_SIZE);
            // The last token is always computed, so a block that ends with it is never taken from the cache.
            let reusable = &prompt[..prompt.len() - 1];
            scope.hash_blocks(&KEY, reusable, config.block_size as usize).into()
        };
        let hashes = workload.requests().iter().map(hash).collect();
        let n_tenants = workload.requests().iter().map(|request| request.tenant + 1).max().unwrap_or(1);
        let identity = ModelIdentity {
            name: "simulated".into(),
            block_size: config.block_size,
            context_length: config.context_length,
            vocab_size: VOCAB_SIZE,
            model,
            tokenizer: Fingerprint::default(),
            hash_key: KEY.fingerprint(),
            numerics: Fingerprint::default(),
        };
        let tenants = (0..n_tenants).map(|tenant| TenantId::from(format!("tenant-{tenant}"))).collect();
        Ok(Self { workload, hashes, profile, config, identity, tenants })
    }

    /// What is asked.
    #[must_use]
    pub fn workload(&self) -> &Workload {
        &self.workload
    }

    /// What the workers are like.
    #[must_use]
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    pub(crate) fn requests(&self) -> &[Request] {
        self.workload.requests()
    }

    /// Hashes of a prompt's blocks that may be reused.
    pub(crate) fn hashes(&self, request: u32) -> &[BlockHash] {
        &self.hashes[request as usize]
    }

    pub(crate) fn block_size(&self) -> u32 {
        self.config.block_size
    }

    /// Tokens that a request gets unless a token ends it: the context and the pool of a worker are bounded.
    pub(crate) fn output_max(&self, request: &Request) -> u32 {
        request.n_output.min(self.config.length_max().saturating_sub(request.n_prompt))
    }

    pub(crate) fn vocab_size(&self) -> u32 {
        VOCAB_SIZE
    }

    pub(crate) fn model_name(&self) -> ModelName {
        self.identity.name.clone()
    }

    pub(crate) fn identity(&self) -> &ModelIdentity {
        &self.identity
    }

    pub(crate) fn tenant(&self, tenant: u32) -> TenantId {
        self.tenants[tenant as usize].clone()
    }

    /// Names sort like numbers, as the view sorts by name.
    pub(crate) fn worker_name(&self, index: usize) -> WorkerId {
        WorkerId::from(format!("worker-{index:04}"))
    }

    pub(crate) fn engine(&self) -> Engine {
        Engine::new(self.config.clone()).expect("the configuration was checked")
    }

    pub(crate) fn device(&self) -> Device {
        Device::new(&self.profile, VOCAB_SIZE)
    }

    pub(crate) fn cost(&self) -> CostCoefficients {
        self.profile.timing.cost()
    }
}
