//! Why a worker cannot run. Each message leaves its cause to `source()`, so that a chain says it once.

use contract::hash::HashKeyError;
use daemon::address::InvalidAddress;
use daemon::client::AddressError;
use daemon::server::{BindError, ServeError};
use thiserror::Error;

use crate::engine_loop::EngineFailure;
use crate::executor::ExecutorError;
use crate::sim::ProfileError;

/// What ends a worker, or keeps it from starting.
#[derive(Debug, Error)]
pub enum Error {
    /// It cannot listen.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// It cannot listen for orders of other workers.
    #[error("cannot listen on worker.transfer.listen {address:?}")]
    TransferListen {
        /// Where.
        address: String,
        /// What the system says.
        source: std::io::Error,
    },
    /// The key is not of the form it must have; its value is not shown.
    #[error("worker.hash_key {0}")]
    HashKey(HashKeyError),
    /// Something of the configuration is no address.
    #[error(transparent)]
    InvalidAddress(#[from] InvalidAddress),
    /// The model's files cannot be opened.
    #[error("cannot open the model")]
    Open(#[from] models::OpenError),
    /// What is to be simulated is not known.
    #[error("cannot simulate a worker")]
    Profile(#[from] ProfileError),
    /// The model cannot be loaded onto the device.
    #[error("cannot load the model")]
    Load(#[from] models::LoadError),
    /// The device is not there or has too little memory.
    #[error("cannot prepare the device")]
    Device(#[from] kernels::Error),
    /// The buffers of a step cannot be made.
    #[error("cannot prepare the executor")]
    Executor(#[from] ExecutorError),
    /// A bound of the engine cannot work.
    #[error("worker.{0}")]
    Engine(engine::ConfigError),
    /// The instruction set is unknown, or this machine lacks it.
    #[error("{setting} cannot be used")]
    Cpu {
        /// Where it is named.
        setting: &'static str,
        /// What is wrong with it.
        source: kernels::Error,
    },
    /// A value of the model does not fit where it goes.
    #[error("model value {what} = {value} is out of range")]
    ModelValue {
        /// Which.
        what: &'static str,
        /// Its value.
        value: usize,
    },
    /// The system refuses a thread.
    #[error("cannot start a thread")]
    Thread(#[source] std::io::Error),
    /// Loading the model panicked: a defect.
    #[error("loading the model panicked")]
    LoadPanicked(#[source] tokio::task::JoinError),
    /// A scheduler's address cannot be used.
    #[error("worker.scheduler_addresses cannot be used")]
    Address(#[from] AddressError),
    /// Membership is configured wrongly.
    #[error("cannot use membership")]
    Membership(#[from] membership::Error),
    /// The server cannot be built.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// The engine or its device failed while it ran.
    #[error(transparent)]
    Failed(#[from] EngineFailure),
}

impl From<engine::ConfigError> for Error {
    /// Names the value by its path; there is no cause beside it.
    fn from(error: engine::ConfigError) -> Self {
        Self::Engine(error)
    }
}
