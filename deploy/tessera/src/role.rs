//! The three roles behind one type: configured from the document, started, stopped.

use anyhow::Result;
use daemon::announce::Announce;
use daemon::config::{ConfigError, Document, Section};
use daemon::shutdown::Shutdown;
use serde::de::DeserializeOwned;

use crate::model::Cache;

/// Top-level values that every role may read as if they stood in its own table.
pub(crate) const SHARED: [&str; 3] = ["hash_key", "membership", "scheduler_addresses"];

/// A role of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// The control plane.
    Scheduler,
    /// The front door.
    Router,
    /// One model replica.
    Worker,
}

impl Role {
    /// Its table in the document and its subcommand.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Scheduler => "scheduler",
            Self::Router => "router",
            Self::Worker => "worker",
        }
    }
}

/// A role that was configured and not yet run.
pub(crate) enum Configured {
    /// The control plane.
    Scheduler(Box<scheduler::Config>),
    /// The front door.
    Router(Box<router::Config>),
    /// One model replica.
    Worker(Box<worker::Config>),
}

impl Configured {
    /// Lets `announce` hear where the role listens.
    pub(crate) fn announce(&mut self, announce: Announce) {
        match self {
            Self::Scheduler(config) => config.announce = announce,
            Self::Router(config) => config.announce = announce,
            Self::Worker(config) => config.announce = announce,
        }
    }

    /// Checks what can be judged before anything is opened.
    ///
    /// # Errors
    /// The first value that cannot work.
    pub(crate) fn check(&self) -> Result<()> {
        match self {
            Self::Scheduler(config) => Ok(config.check()?),
            Self::Router(config) => Ok(config.check()?),
            Self::Worker(config) => Ok(config.check()?),
        }
    }

    /// Runs until `shutdown`.
    ///
    /// # Errors
    /// What the role failed with.
    pub(crate) async fn run(self, shutdown: Shutdown) -> Result<()> {
        match self {
            Self::Scheduler(config) => Box::pin(scheduler::run(*config, shutdown)).await?,
            Self::Router(config) => Box::pin(router::run(*config, shutdown)).await?,
            Self::Worker(config) => Box::pin(worker::run(*config, shutdown)).await?,
        }
        Ok(())
    }
}

/// Reads `role`'s table, to which shared values are added where it is silent.
///
/// # Errors
/// When a value is of the wrong type or out of range.
pub(crate) fn configure(document: &Document, role: Role) -> Result<Section<Configured>, ConfigError> {
    match role {
        Role::Scheduler => section(document, role, |config| Configured::Scheduler(Box::new(config))),
        Role::Router => section(document, role, |config| Configured::Router(Box::new(config))),
        Role::Worker => section(document, role, |mut config: worker::Config| {
            config.packed_cache = config.packed_cache.or_else(|| Some(Cache::from_environment().ok()?.packed()));
            Configured::Worker(Box::new(config))
        }),
    }
}

fn section<T: DeserializeOwned>(
    document: &Document,
    role: Role,
    wrap: impl Fn(T) -> Configured,
) -> Result<Section<Configured>, ConfigError> {
    let name = role.name();
    let mut document = document.clone();
    let mut added = Vec::new();
    for shared in SHARED {
        let path = format!("{name}.{shared}");
        if let Some(value) = document.get(shared).cloned().filter(|_| document.get(&path).is_none()) {
            // Where the table is no table, reading it says so.
            let _ = document.set(&path, value);
            added.push(path);
        }
    }
    // Membership in the scheduler is where the scheduler is; it needs no address itself.
    let [kind, endpoints, schedulers] =
        ["membership.kind", "membership.endpoints", "scheduler_addresses"].map(|path| format!("{name}.{path}"));
    let is_embedded = document.get(&kind).is_none_or(|kind| kind.as_str() == Some("embedded"));
    if let Some(schedulers) = document.get(&schedulers).cloned()
        && role != Role::Scheduler
        && is_embedded
        && document.get(&endpoints).is_none()
    {
        let _ = document.set(&endpoints, schedulers);
        added.push(format!("{name}.membership"));
    }
    let Section { value, mut unknown } = document.section::<T>(name)?;
    // Not every role reads every shared value, but keys inside one that it reads are judged.
    unknown.retain(|path| !added.contains(path));
    Ok(Section { value: wrap(value), unknown })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn membership_in_the_scheduler_is_where_the_scheduler_is() {
        let endpoints = |sets: &[&str]| {
            let sets: Vec<String> = sets.iter().map(|&set| set.to_owned()).collect();
            let document = Document::load(None, &sets).unwrap();
            let [router, worker] = [Role::Router, Role::Worker].map(|role| configure(&document, role).unwrap());
            assert!(router.unknown.is_empty() && worker.unknown.is_empty(), "{:?}", router.unknown);
            let (Configured::Router(router), Configured::Worker(worker)) = (router.value, worker.value) else {
                panic!("a router and a worker were asked for");
            };
            assert_eq!(router.membership.endpoints, worker.membership.endpoints);
            router.membership.endpoints
        };
        let scheduler = "scheduler_addresses=[\"10.0.0.1:7\"]";
        assert_eq!(endpoints(&[scheduler]), ["10.0.0.1:7"]);
        assert_eq!(endpoints(&[scheduler, "membership.ttl_ms=900"]), ["10.0.0.1:7"]);
        assert_eq!(endpoints(&[scheduler, "membership.endpoints=[\"10.0.0.2:7\"]"]), ["10.0.0.2:7"]);
        assert!(endpoints(&[scheduler, "membership.kind=etcd"]).is_empty());
        assert!(endpoints(&[]).is_empty());
    }
}
