//! What the scheduler is told at start.

use std::time::Duration;

use daemon::address::check_listen;
use daemon::announce::Announce;
use daemon::config::at_least_one;
use daemon::server::ServerConfig;
use membership::MembershipConfig;
use serde::{Deserialize, Serialize};

use crate::run::Error;
use crate::state::roles::RoleSettings;

/// The `[scheduler]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Config {
    /// Where it listens, for gRPC and for `/livez`, `/readyz` and `/metrics`.
    pub listen: String,
    /// The store of members; an embedded one is hosted here and its endpoints are not read.
    pub membership: MembershipConfig,
    /// Time after which a view is sent again although nothing changed.
    pub heartbeat_ms: u64,
    /// Time without a report after which an engine's occupancy no longer counts; several heartbeats of a worker.
    #[serde(deserialize_with = "at_least_one")]
    pub occupancy_stale_ms: u64,
    /// Shortest time between two views; changes in between travel together.
    pub view_interval_ms: u64,
    /// Time that a router whose ledger stream ended has to come back before its placements are forgotten.
    pub ledger_grace_ms: u64,
    /// A router that says nothing on its ledger stream for this long is taken for lost: three of its signs of life.
    #[serde(deserialize_with = "at_least_one")]
    pub ledger_silence_ms_max: u64,
    /// Batches of the ledger that wait for one router; a router that is further behind begins anew with a snapshot.
    #[serde(deserialize_with = "at_least_one")]
    pub ledger_batches_max: usize,
    /// How it gives workers their roles, those that were not told one.
    pub roles: RoleSettings,
    /// Bounds of its server.
    pub server: ServerConfig,
    /// Tells who started it where it listens.
    #[serde(skip)]
    pub announce: Announce,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:50050".to_owned(),
            membership: MembershipConfig::default(),
            heartbeat_ms: 1_000,
            occupancy_stale_ms: 5_000,
            view_interval_ms: 3,
            ledger_grace_ms: 2_000,
            ledger_silence_ms_max: 3_000,
            ledger_batches_max: 4_096,
            roles: RoleSettings::default(),
            // Nothing here runs long after its streams were told to end.
            server: ServerConfig { grace_ms: 5_000, ..ServerConfig::default() },
            announce: Announce::default(),
        }
    }
}

impl Config {
    /// Checks what can be judged before anything is opened.
    ///
    /// # Errors
    /// The first value that cannot work.
    pub fn check(&self) -> Result<(), Error> {
        check_listen("scheduler.listen", &self.listen)?;
        Ok(self.membership.check()?)
    }

    pub(crate) fn heartbeat(&self) -> Duration {
        Duration::from_millis(self.heartbeat_ms.max(1))
    }

    pub(crate) fn occupancy_stale(&self) -> Duration {
        Duration::from_millis(self.occupancy_stale_ms)
    }

    pub(crate) fn ledger_grace(&self) -> Duration {
        Duration::from_millis(self.ledger_grace_ms)
    }

    pub(crate) fn ledger_silence(&self) -> Duration {
        Duration::from_millis(self.ledger_silence_ms_max)
    }

    pub(crate) fn view_interval(&self) -> Duration {
        Duration::from_millis(self.view_interval_ms)
    }
}
