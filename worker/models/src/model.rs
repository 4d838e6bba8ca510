//! What an executor sees of a loaded model.

use kernels::{Error, StepInputs, Tensor};

use crate::config::ModelConfig;
use crate::kv_cache::{KvCache, KvSpec};

/// A model on a device, ready to run steps.
pub trait Model: Send {
    /// Architecture and sizes.
    fn config(&self) -> &ModelConfig;

    /// What the cache keeps for it.
    fn kv_spec(&self) -> KvSpec;

    /// Positions it can run: the context length, or less when it was loaded for less.
    fn positions_max(&self) -> usize;

    /// Bytes of its weights on the device.
    fn weight_bytes(&self) -> usize;

    /// Runs one uploaded step: writes keys and values of its tokens into `kv` and returns logits
    /// `[logits rows of the step, vocabulary]` in f32, valid until the next call.
    ///
    /// Allocates nothing: scratch memory was sized for the limits given at load.
    ///
    /// # Errors
    /// A step beyond those limits, a cache of another layout, a position or token outside the model.
    fn forward(&mut self, inputs: &StepInputs, kv: &KvCache) -> Result<Tensor, Error>;
}
