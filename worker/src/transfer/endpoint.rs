//! What both sides of transfers know of this worker.

use std::sync::Arc;

use contract::ids::EngineId;
use contract::model::ModelIdentity;
use kernels::memory::blocks::BlockMemory;

use super::config::TransferConfig;
use super::cost::MoveCost;
use super::host::Host;
use super::metrics::Metrics;
use super::share::Share;
use super::throttle::Throttle;

/// An engine with its pool, ready to exchange blocks.
#[derive(Debug)]
pub(crate) struct Endpoint {
    pub(super) engine: EngineId,
    pub(super) identity: ModelIdentity,
    pub(super) share: Share,
    pub(super) memory: BlockMemory,
    pub(super) config: TransferConfig,
    pub(super) host: Host,
    pub(super) throttle: Throttle,
    pub(crate) cost: Arc<MoveCost>,
    pub(super) metrics: Metrics,
}

impl Endpoint {
    /// Describes an engine whose pool is `memory`, laid out as `share` says.
    pub(crate) fn new(
        engine: EngineId,
        identity: ModelIdentity,
        share: Share,
        memory: BlockMemory,
        config: TransferConfig,
    ) -> Self {
        let throttle = Throttle::new(config.bytes_per_s_max);
        let metrics = Metrics::new(engine.worker.as_str());
        let layout = share.layout;
        let cost = Arc::new(MoveCost::new(layout.block_bytes_total() / layout.block_size as usize));
        Self { engine, identity, share, memory, config, host: Host::new(), throttle, cost, metrics }
    }
}
