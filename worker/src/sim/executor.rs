//! Takes the time that the simulated device says a step takes.

use std::time::Duration;

use contract::plan::{ForwardPlan, StepOutput};
use daemon::clock;

use super::Device;
use crate::executor::{Executor, ExecutorError};

/// A simulated device in real time.
#[derive(Debug)]
pub struct SimExecutor {
    device: Device,
    computed: Duration,
}

impl SimExecutor {
    /// Lets `device` take its time.
    #[must_use]
    pub fn new(device: Device) -> Self {
        Self { device, computed: Duration::ZERO }
    }
}

impl Executor for SimExecutor {
    fn run(&mut self, plan: &ForwardPlan) -> Result<StepOutput, ExecutorError> {
        let began = clock::now();
        let (output, took) = self.device.run(plan)?;
        let left = took.saturating_sub(clock::now().duration_since(began));
        if !left.is_zero() {
            std::thread::sleep(left);
        }
        self.computed = took;
        Ok(output)
    }

    fn computed(&self) -> Duration {
        self.computed
    }
}
