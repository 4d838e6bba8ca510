//! A worker without a model: the real engine over a device that takes time by formula and checks every block it reads.
//!
//! [`Device`] is pure and says how long a step takes; virtual time adds that up, [`SimExecutor`] sleeps it.

mod device;
mod draw;
mod executor;
mod kv;
mod profile;

pub use device::Device;
pub use draw::answer;
pub use executor::SimExecutor;
pub use profile::{Profile, ProfileError, Timing};
