//! What is simulated.

use contract::view::Role;
use router::admission::{Order, QueueBounds};
use router::route::RoutePolicy;
use router::route::placer::PlacerSettings;
use router::route::policy;
use scheduler::state::roles::RoleSettings;
use serde::{Deserialize, Serialize};
use std::time::Duration;

use thiserror::Error;

use crate::network::{Delays, Links};

/// How much slower or faster than recorded requests may arrive.
const SPEEDS: std::ops::RangeInclusive<f64> = 1e-6..=1e6;
/// Most pairs of a worker and a router, each of which is a connection.
const LINKS_MAX: usize = 1_000_000;

/// A cluster and its load.
#[derive(Clone)]
pub struct Options {
    /// Workers, at least one.
    pub n_workers: usize,
    /// Routers, at least one; each request comes to one of them by chance.
    pub n_routers: usize,
    /// How requests are placed.
    pub policy: &'static dyn RoutePolicy,
    /// What routers are told about placement.
    pub placer: PlacerSettings,
    /// Whether requests wait at the router while their engine has enough to do; none sends them at once.
    pub waiting: Option<Waiting>,
    /// How much faster than the workload requests arrive.
    pub speed: f64,
    /// Decides all that is random.
    pub seed: u64,
    /// How long messages take.
    pub delays: Delays,
    /// What workers do of requests.
    pub roles: Roles,
    /// How prompts move between workers.
    pub links: Links,
    /// Part of the requests whose clients go away at a random time.
    pub aborts: f64,
    /// What a good request reaches.
    pub goals: Goals,
    /// Breaks things at random times.
    pub faults: bool,
    /// Things that break, on average; where requests may be split, workers leave, change roles and lose each other as well.
    pub n_faults_mean: f64,
    /// Longest time that any request may take, where that is checked.
    pub patience: Option<Duration>,
    /// Checks invariants all the time, which takes time itself.
    pub checks: bool,
    /// A defect that the checks must find.
    pub planted: Option<Planted>,
}

/// What workers do of requests.
#[derive(Clone, Debug, PartialEq)]
pub enum Roles {
    /// Each does everything.
    Mixed,
    /// What each was told.
    Fixed(Vec<Role>),
    /// What the scheduler finds best.
    Auto(RoleSettings),
}

/// How requests wait at a router.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Waiting {
    /// A request goes before those that came up to so many times the difference of both predicted prefills earlier.
    pub slack: f64,
    /// Requests of a tenant that are looked at for each that may be placed.
    pub n_scan_max: usize,
    /// Times that others may be placed before a request whose turn it was.
    pub n_overtakes_max: u32,
}

/// What a good request reaches.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Goals {
    /// Longest time to the first token, in seconds.
    pub ttft_s: f64,
    /// Longest mean time between two tokens, in seconds.
    pub tpot_s: f64,
}

/// A defect, for tests of the checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planted {
    /// Routers take what any life of a worker says of its cache for the present one's.
    SkipIncarnation,
    /// Routers place requests again without the tokens that they have.
    ForgetTokens,
    /// Workers take one block more for filled than came.
    OverstateFilled,
    /// Workers let the blocks of a prompt go when all is sent, and not when it is read.
    LetGoEarly,
}

/// Why nothing can be simulated.
#[derive(Clone, Debug, PartialEq, Error)]
#[error("{field} is {}; give {want}", shown(*.value))]
pub struct OptionsError {
    /// Which value.
    pub field: &'static str,
    /// What it is.
    pub value: f64,
    /// What would do.
    pub want: String,
}

impl Roles {
    /// Whether prompts may be computed elsewhere.
    pub(crate) fn may_split(&self) -> bool {
        *self != Self::Mixed
    }

    /// What a worker is told; none leaves it to the scheduler.
    pub(crate) fn of(&self, worker: usize) -> Option<Role> {
        match self {
            Self::Fixed(roles) => roles.get(worker).copied(),
            Self::Mixed | Self::Auto(_) => None,
        }
    }

    /// How the scheduler gives them.
    pub(crate) fn settings(&self) -> RoleSettings {
        match self {
            Self::Auto(settings) => *settings,
            Self::Mixed | Self::Fixed(_) => RoleSettings { auto: false, ..RoleSettings::default() },
        }
    }

    /// For reports, such as `2:6`.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Mixed => "mixed".to_owned(),
            Self::Auto(_) => "auto".to_owned(),
            Self::Fixed(roles) => {
                let n_prefill = roles.iter().filter(|role| **role == Role::Prefill).count();
                format!("{n_prefill}:{}", roles.len() - n_prefill)
            }
        }
    }
}

impl Default for Waiting {
    fn default() -> Self {
        let bounds = QueueBounds::default();
        Self {
            slack: Order::default().slack,
            n_scan_max: bounds.n_scan_per_tenant_max,
            n_overtakes_max: bounds.n_overtakes_max,
        }
    }
}

impl Default for Goals {
    fn default() -> Self {
        Self { ttft_s: 2.0, tpot_s: 0.1 }
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            n_workers: 8,
            n_routers: 1,
            policy: policy::by_name(policy::DEFAULT).expect("the default is one of them"),
            placer: PlacerSettings {
                promise: Duration::from_secs(10),
                decode_ms_goal: f64::INFINITY,
                dispatch_ahead_ms: 200.0,
                give_way: Duration::from_millis(15),
                directory_bytes_max: 1 << 30,
            },
            waiting: Some(Waiting::default()),
            speed: 1.0,
            seed: 0,
            delays: Delays::default(),
            roles: Roles::Mixed,
            links: Links::default(),
            aborts: 0.0,
            goals: Goals::default(),
            faults: false,
            n_faults_mean: 6.0,
            patience: None,
            checks: false,
            planted: None,
        }
    }
}

impl Options {
    /// Whether invariants are checked.
    pub(crate) fn is_checked(&self) -> bool {
        self.checks || self.faults
    }

    /// Checks every value.
    ///
    /// # Errors
    /// The first that cannot be simulated.
    pub fn check(&self) -> Result<(), OptionsError> {
        let wrong = |field, value, want: &str| Err(OptionsError { field, value, want: want.to_owned() });
        for (field, n) in [("workers", self.n_workers), ("routers", self.n_routers)] {
            if !(1..=10_000).contains(&n) {
                return wrong(field, n as f64, "1 to 10000");
            }
        }
        let n_links = self.n_workers * self.n_routers;
        if n_links > LINKS_MAX {
            return wrong("workers times routers", n_links as f64, "at most 1000000");
        }
        if !SPEEDS.contains(&self.speed) {
            return wrong("speed", self.speed, "0.000001 to 1000000");
        }
        if let Roles::Fixed(roles) = &self.roles
            && roles.len() != self.n_workers
        {
            return wrong("roles", roles.len() as f64, "one for each worker");
        }
        if !SPEEDS.contains(&(self.links.tokens_per_s / 1e3)) {
            return wrong("link tokens per second", self.links.tokens_per_s, "0.001 to 1000000000");
        }
        let Delays { view_ms, kv_ms, ledger_ms_min, ledger_ms_max, request_ms_max } = self.delays;
        let delays = [
            ("view delay", view_ms),
            ("kv delay", kv_ms),
            ("ledger delay", ledger_ms_min),
            ("ledger delay", ledger_ms_max),
            ("request delay", request_ms_max),
        ];
        match delays.into_iter().find(|&(_, ms)| !(0.0..=1e6).contains(&ms)) {
            Some((field, ms)) => wrong(field, ms, "0 to 1000000 ms"),
            None => Ok(()),
        }
    }
}

/// Counts without a fraction, and what is very small or large in few digits.
fn shown(value: f64) -> String {
    if value.fract() == 0.0 && value.abs() < 1e15 { value.to_string() } else { format!("{value:?}") }
}
