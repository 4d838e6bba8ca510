//! Whose a request is: a static table, so that whatever clients send there are only so many tenants.

use std::collections::HashMap;
use std::sync::Arc;

use contract::ids::TenantId;
use thiserror::Error;

use super::settings::{AdmissionSettings, ApiKey, TenantLimits};

/// Name of the tenant that all are who are none of the table.
const DEFAULT: &str = "default";

/// Whoever pays.
#[derive(Debug)]
pub struct Tenant {
    /// Its name.
    pub name: TenantId,
    /// What it may ask for.
    pub limits: TenantLimits,
    is_configured: bool,
}

/// All tenants there are.
#[derive(Debug)]
pub struct TenantTable {
    default: Arc<Tenant>,
    by_name: HashMap<TenantId, Arc<Tenant>>,
    by_key: HashMap<ApiKey, Arc<Tenant>>,
}

/// A table of tenants that does not tell them apart.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TenantsError {
    /// A key of nobody; it is not shown.
    #[error("router.admission.keys: a key stands for {tenant:?}, which is none of router.admission.tenants; add it")]
    Unknown {
        /// Whom the key stands for.
        tenant: String,
    },
    /// A key that says nothing.
    #[error("router.admission.keys: the key of {tenant:?} is empty; give it a secret")]
    Empty {
        /// Whose it is.
        tenant: String,
    },
    /// A name that is taken.
    #[error("router.admission.tenants.{name}: the name is taken; set router.admission.default, or choose another")]
    Name {
        /// The name.
        name: String,
    },
}

impl TenantTable {
    /// Reads the table.
    ///
    /// # Errors
    /// When a key or a name stands for two tenants.
    pub fn new(settings: &AdmissionSettings) -> Result<Self, TenantsError> {
        let default = Tenant { name: DEFAULT.into(), limits: settings.default.clone(), is_configured: false };
        let mut table = Self { default: Arc::new(default), by_name: HashMap::new(), by_key: HashMap::new() };
        for (name, limits) in &settings.tenants {
            if name == DEFAULT || name == Tenant::OTHER || name.is_empty() {
                return Err(TenantsError::Name { name: name.clone() });
            }
            let name = TenantId::from(name.as_str());
            let tenant = Tenant { name: name.clone(), limits: limits.clone(), is_configured: true };
            table.by_name.insert(name, Arc::new(tenant));
        }
        for (key, tenant) in &settings.keys {
            if key.0.is_empty() {
                return Err(TenantsError::Empty { tenant: tenant.clone() });
            }
            let found = table.by_name.get(&TenantId::from(tenant.as_str()));
            let found = found.ok_or_else(|| TenantsError::Unknown { tenant: tenant.clone() })?;
            table.by_key.insert(key.clone(), Arc::clone(found));
        }
        Ok(table)
    }

    /// Finds the tenant of an API key, else the one that a header names, else the default one.
    ///
    /// The header counts only where the configuration allows one; a key cannot be overridden by it.
    pub fn find(&self, key: Option<&str>, header: Option<&str>) -> &Arc<Tenant> {
        let by_key = key.and_then(|key| self.by_key.get(&ApiKey(key.to_owned())));
        let by_name = || header.and_then(|name| self.by_name.get(&TenantId::from(name)));
        by_key.or_else(by_name).unwrap_or(&self.default)
    }

    /// Finds a tenant by its name, else the default one.
    pub fn named(&self, name: &TenantId) -> &Arc<Tenant> {
        self.by_name.get(name).unwrap_or(&self.default)
    }

    /// All tenants, the default one included.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Tenant>> {
        std::iter::once(&self.default).chain(self.by_name.values())
    }
}

impl Tenant {
    /// Label of the default tenant.
    pub const OTHER: &str = "other";

    /// Value of a metric's label: the names of configured tenants and one for all others.
    pub fn label(&self) -> &str {
        if self.is_configured { self.name.as_str() } else { Self::OTHER }
    }
}
