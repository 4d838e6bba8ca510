//! A naive model of an engine: what every request must yield, an executor that knows what each block holds, and both at work.

pub mod executor;
pub mod naive;
pub mod world;
