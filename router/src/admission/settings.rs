//! The router's table `[router.admission]`.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU64;

use daemon::config::at_least_one;
use serde::{Deserialize, Serialize};

use super::fair_queue::QueueBounds;
use super::order::Order;

/// Who may ask for how much, and in which order requests are placed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AdmissionSettings {
    /// A request whose first token is predicted to take longer is refused.
    #[serde(deserialize_with = "at_least_one")]
    pub first_token_goal_ms: u64,
    /// Longest time that a request waits to be placed.
    #[serde(deserialize_with = "at_least_one")]
    pub wait_ms_max: u64,
    /// Header that may name the tenant where no key does; absent, no client can say who it is without a key.
    pub tenant_header: Option<String>,
    /// Bounds of what waits.
    pub queue: QueueBounds,
    /// The order inside a tenant.
    pub order: Order,
    /// Limits that all share who are no tenant of this table.
    pub default: TenantLimits,
    /// Tenants by name.
    pub tenants: BTreeMap<String, TenantLimits>,
    /// Names of tenants by the keys that their clients send as `Authorization: Bearer KEY`.
    pub keys: BTreeMap<ApiKey, String>,
}

/// What a tenant may ask for, over the whole cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TenantLimits {
    /// Its share of service against others' when all wait.
    #[serde(deserialize_with = "at_least_one")]
    pub weight: u32,
    /// Requests per minute; absent is no limit.
    pub requests_per_minute: Option<NonZeroU64>,
    /// Uncached prompt tokens and generated tokens per minute; absent is no limit.
    pub tokens_per_minute: Option<NonZeroU64>,
    /// Requests at once; absent is no limit.
    pub n_concurrent_max: Option<NonZeroU64>,
    /// For so long a tenant that was idle may ask for everything at once, in seconds of its rate.
    #[serde(deserialize_with = "at_least_one")]
    pub burst_s: u32,
}

/// A client's secret, which is never shown.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ApiKey(pub String);

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiKey(…)")
    }
}

impl Default for AdmissionSettings {
    fn default() -> Self {
        Self {
            first_token_goal_ms: 300_000,
            wait_ms_max: 600_000,
            tenant_header: None,
            queue: QueueBounds::default(),
            order: Order::default(),
            default: TenantLimits::default(),
            tenants: BTreeMap::new(),
            keys: BTreeMap::new(),
        }
    }
}

impl Default for TenantLimits {
    fn default() -> Self {
        Self { weight: 1, requests_per_minute: None, tokens_per_minute: None, n_concurrent_max: None, burst_s: 10 }
    }
}
