//! The policies there are, one file each.

mod least_loaded;
mod prefix_threshold;
mod round_robin;
#[cfg(test)]
mod tests;

pub use least_loaded::LeastLoaded;
pub use prefix_threshold::PrefixThreshold;
pub use round_robin::RoundRobin;

use super::RoutePolicy;

/// Name of the policy that is used unless another is configured.
pub const DEFAULT: &str = "prefix_threshold";

/// Every policy.
pub static POLICIES: [&dyn RoutePolicy; 3] = [&PrefixThreshold, &LeastLoaded, &RoundRobin];

/// Looks a policy up by its name.
pub fn by_name(name: &str) -> Option<&'static dyn RoutePolicy> {
    POLICIES.into_iter().find(|policy| policy.name() == name)
}
