//! What breaks, drawn by seed: workers crash and come back, routers start anew, links are cut, workers are slow, the
//! scheduler goes, news of caches is late or lost.

use std::time::Duration;

use contract::view::Role;

use crate::event::Event;
use crate::network::Network;
use crate::random::Random;

/// A change for the worse or the better.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fault {
    Crash {
        worker: usize,
    },
    Restart {
        worker: usize,
    },
    /// A router loses all that it knows, and those who asked it lose their requests.
    RestartRouter {
        router: usize,
    },
    Cut {
        router: usize,
        worker: usize,
    },
    Heal {
        router: usize,
        worker: usize,
    },
    Slow {
        worker: usize,
        times: f64,
    },
    SchedulerDown,
    SchedulerUp,
    KvLoss {
        chance: f64,
    },
    /// Two workers cannot reach each other.
    CutPeers {
        one: usize,
        two: usize,
    },
    HealPeers {
        one: usize,
        two: usize,
    },
    /// Messages between workers are lost or late.
    PeerLoss {
        chance: f64,
    },
    /// A worker is told to leave.
    Drain {
        worker: usize,
        grace: Duration,
    },
    /// It has left.
    Exit {
        worker: usize,
        life: u32,
    },
    /// A worker is told to do something else.
    Role {
        worker: usize,
        role: Option<Role>,
    },
    /// The scheduler is to hear what has become of a worker.
    Announce {
        worker: usize,
    },
    /// Nothing breaks from here on.
    Calm,
}

/// What faults are drawn for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scene {
    pub(crate) span: Duration,
    pub(crate) n_routers: usize,
    pub(crate) n_workers: usize,
    /// Faults on average.
    pub(crate) n_mean: f64,
    /// Whether prompts move between workers, so that more can break.
    pub(crate) may_split: bool,
}

/// Longest time that a worker which leaves gives to what it runs, in milliseconds.
const GRACE_MS_MAX: f64 = 200.0;

/// Draws faults over a span, each with its repair, and puts them among what happens; nothing breaks after the time that it
/// returns.
pub(crate) fn draw(scene: &Scene, random: &mut Random, network: &mut Network) -> Duration {
    let &Scene { span, n_mean, may_split, .. } = scene;
    let n = (n_mean * random.exponential()).min(4.0 * n_mean) as usize + 1;
    for _ in 0..n {
        let begin = span.mul_f64(random.unit());
        let lasts = span.mul_f64(0.3 * random.unit() * random.unit()) + Duration::from_millis(5);
        let (fault, repair) = match random.below(if may_split { 22 } else { 11 }) {
            kind @ 0..11 => usual(kind, scene, random),
            kind => (of_splits(kind, scene, random), None),
        };
        network.at(begin, Event::Fault(fault));
        let repair = match fault {
            Fault::CutPeers { one, two } => Some(Fault::HealPeers { one, two }),
            Fault::PeerLoss { .. } => Some(Fault::PeerLoss { chance: 0.0 }),
            _ => repair,
        };
        repair.into_iter().for_each(|repair| network.at(begin + lasts, Event::Fault(repair)));
    }
    let calm_at = span.mul_f64(1.4);
    network.at(calm_at, Event::Fault(Fault::Calm));
    calm_at
}

fn usual(kind: u64, scene: &Scene, random: &mut Random) -> (Fault, Option<Fault>) {
    let (worker, router) = (random.index(scene.n_workers), random.index(scene.n_routers));
    let (fault, repair) = match kind {
        0..=3 => (Fault::Crash { worker }, Fault::Restart { worker }),
        4..=5 => (Fault::Cut { router, worker }, Fault::Heal { router, worker }),
        6 => (Fault::Slow { worker, times: random.between(2.0, 20.0) }, Fault::Slow { worker, times: 1.0 }),
        7 => (Fault::SchedulerDown, Fault::SchedulerUp),
        8 => (Fault::RestartRouter { router }, Fault::RestartRouter { router }),
        _ => (Fault::KvLoss { chance: random.between(0.01, 0.5) }, Fault::KvLoss { chance: 0.0 }),
    };
    (fault, Some(repair))
}

/// What happens where prompts move between workers.
fn of_splits(kind: u64, scene: &Scene, random: &mut Random) -> Fault {
    let (worker, two) = (random.index(scene.n_workers), random.index(scene.n_workers));
    match kind {
        11..=13 => Fault::CutPeers { one: worker, two },
        14..=15 => Fault::PeerLoss { chance: random.between(0.01, 0.5) },
        16..=17 => Fault::Drain { worker, grace: Duration::from_secs_f64(random.between(0.0, GRACE_MS_MAX) / 1e3) },
        _ => Fault::Role { worker, role: *random.one_of(&ROLES) },
    }
}

const ROLES: [Option<Role>; 4] = [None, Some(Role::Mixed), Some(Role::Prefill), Some(Role::Decode)];
