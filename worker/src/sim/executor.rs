//! Takes the time that the simulated device says a step takes.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use contract::plan::{ForwardPlan, StepOutput};
use daemon::clock;

use super::Device;
use crate::executor::{Executor, ExecutorError};
use crate::lent::Layers;

/// A simulated device in real time.
#[derive(Debug)]
pub struct SimExecutor {
    device: Device,
    computed: Duration,
    layers: Arc<Layers>,
    n_layers: usize,
    hangs_while: Option<PathBuf>,
}

/// Time between two looks whether a device still hangs.
const HANG_LOOK: Duration = Duration::from_millis(20);

impl SimExecutor {
    /// Lets `device` take its time.
    #[must_use]
    pub fn new(device: Device) -> Self {
        Self { device, computed: Duration::ZERO, layers: Arc::default(), n_layers: 1, hangs_while: None }
    }

    /// The same with so many layers, one after the other, as far as others follow them.
    #[must_use]
    pub fn with_layers(self, n_layers: usize) -> Self {
        Self { n_layers, ..self }
    }

    /// The same that hangs in its step while there is a file, if one is named.
    #[must_use]
    pub fn hanging_while(self, hangs_while: Option<PathBuf>) -> Self {
        Self { hangs_while, ..self }
    }
}

impl Executor for SimExecutor {
    fn run(&mut self, plan: &ForwardPlan) -> Result<StepOutput, ExecutorError> {
        let began = clock::now();
        while self.hangs_while.as_ref().is_some_and(|file| file.exists()) {
            std::thread::sleep(HANG_LOOK);
        }
        let (output, took) = self.device.run(plan)?;
        let n_parts = if self.layers.is_watched() { self.n_layers as u32 } else { 1 };
        for part in 1..=n_parts {
            let left = (took * part / n_parts).saturating_sub(clock::now().duration_since(began));
            if !left.is_zero() {
                std::thread::sleep(left);
            }
            self.layers.written(part as usize - 1);
        }
        self.computed = took;
        Ok(output)
    }

    fn computed(&self) -> Duration {
        self.computed
    }

    fn n_layers(&self) -> usize {
        self.n_layers
    }

    fn tell(&mut self, layers: Arc<Layers>) {
        self.layers = layers;
    }
}
