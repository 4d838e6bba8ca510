//! What a router is asked for: told to all others beside its placements, so that they share quotas and turns with it.

use serde::{Deserialize, Serialize};

use crate::ids::TenantId;

/// What one router is asked for; a later report replaces an earlier one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RouterDemand {
    /// Counts the router's reports from 1; 0 is none.
    pub number: u64,
    /// Tenants of whom there is something to tell, by name.
    pub tenants: Vec<TenantDemand>,
}

/// What one tenant asks a router for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TenantDemand {
    /// Who asks.
    pub tenant: TenantId,
    /// Requests in a second, lately, those that were refused among them; 0 where no quota needs it.
    pub requests_per_s: f32,
    /// Tokens in a second, likewise.
    pub tokens_per_s: f32,
    /// Requests that run; 0 where no quota needs it.
    pub n_running: u32,
    /// Some of its requests wait to be placed.
    pub is_waiting: bool,
}

impl TenantDemand {
    /// What a tenant asks for that asks for nothing.
    #[must_use]
    pub fn none(tenant: TenantId) -> Self {
        Self { tenant, requests_per_s: 0.0, tokens_per_s: 0.0, n_running: 0, is_waiting: false }
    }
}
