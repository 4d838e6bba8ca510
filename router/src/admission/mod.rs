//! Who may ask, how much, and whose request is placed next: pure, with time as an argument.
//!
//! [`TenantTable`] tells whose a request is, [`Quotas`] whether the tenant may have it now, [`Outlook`] whether it can be
//! served in time, and [`FairQueue`] when its turn has come.

mod bucket;
mod fair_queue;
mod order;
mod outlook;
mod quotas;
mod settings;
mod share;
mod tenants;

pub use fair_queue::{Ask, FairQueue, QueueBounds, Refused, Ticket, Turn};
pub use order::{Order, PRIORITY_MAX};
pub use outlook::{Late, Outlook};
pub use quotas::{Exceeded, Quota, Quotas};
pub use settings::{AdmissionSettings, ApiKey, TenantLimits};
pub use tenants::{Tenant, TenantTable, TenantsError};

#[cfg(test)]
mod tests;
