//! Which workers there should be, from membership and the scheduler's view, and a link with each of them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use contract::ids::{Incarnation, WorkerId};
use contract::view::{ClusterView, DrainReason, Member, MemberKey, MemberKind};
use daemon::client::{AddressError, channel};
use daemon::shutdown::{Shutdown, Trigger};
use daemon::task::Tasks;
use membership::{WatchEvent, WatchStream};
use proto::cluster::v1::WatchViewRequest;
use proto::cluster::v1::scheduler_client::SchedulerClient;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tonic::transport::Channel;

use super::leader::Leader;
use super::link::{self, Peer};
use super::{Cluster, hot, ledger};

/// Views and membership events that wait to be looked at.
const N_NEWS_MAX: usize = 64;
/// Largest view, and largest batch of the load ledger.
const MESSAGE_BYTES_MAX: usize = 64 << 20;

/// One life of one worker.
type Life = (WorkerId, Incarnation);

/// Where a worker is, as one source says.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Known {
    address: String,
    draining: bool,
}

enum News {
    Members(WatchEvent),
    /// A scheduler's, by its place among the configured.
    View(usize, ClusterView),
    ViewLost(usize),
}

struct Link {
    stop: Trigger,
    address: String,
    draining: Arc<AtomicBool>,
    /// Whether the worker answers.
    is_ready: Arc<AtomicBool>,
}

/// Follows both sources and keeps a link with every worker that either names, until `shutdown`.
///
/// # Errors
/// When a scheduler's address cannot be parsed.
pub(crate) fn supervise(
    cluster: &Arc<Cluster>,
    mut members: WatchStream,
    schedulers: &[String],
    tasks: &Tasks,
    shutdown: &Shutdown,
) -> Result<(), AddressError> {
    let (sender, news) = mpsc::channel(N_NEWS_MAX);
    for (scheduler, address) in schedulers.iter().enumerate() {
        let client = SchedulerClient::new(channel(address, &cluster.settings.channel)?)
            .max_decoding_message_size(MESSAGE_BYTES_MAX);
        let (sharing, ledger_client) = (Arc::clone(cluster), client.clone());
        until(tasks, "load ledger", shutdown, async move { ledger::share(&sharing, ledger_client).await });
        let (cluster, sender) = (Arc::clone(cluster), sender.clone());
        until(tasks, "cluster view", shutdown, async move { follow_views(&cluster, scheduler, client, sender).await });
    }
    let forgetting = Arc::clone(cluster);
    until(tasks, "load ledger grace", shutdown, async move { ledger::forget_lost(&forgetting).await });
    let emptying = Arc::clone(cluster);
    until(tasks, "prompts of leaving engines", shutdown, async move { hot::keep(emptying).await });
    until(tasks, "membership watch", shutdown, async move {
        while let Some(event) = members.next().await {
            if sender.send(News::Members(event)).await.is_err() {
                return;
            }
        }
    });
    let cluster = Arc::clone(cluster);
    let (tasks_of_links, whole) = (tasks.clone(), shutdown.clone());
    until(tasks, "supervisor", shutdown, async move {
        Supervisor::new(cluster, tasks_of_links, whole).run(news).await;
    });
    Ok(())
}

/// Runs `work` until it ends or `shutdown` comes.
fn until(tasks: &Tasks, name: &'static str, shutdown: &Shutdown, work: impl Future<Output = ()> + Send + 'static) {
    let shutdown = shutdown.clone();
    tasks.spawn(name, async move {
        tokio::select! {
            () = shutdown.triggered() => {}
            () = work => {}
        }
    });
}

async fn follow_views(
    cluster: &Cluster,
    scheduler: usize,
    mut client: SchedulerClient<Channel>,
    news: mpsc::Sender<News>,
) {
    let backoff = Duration::from_millis(cluster.settings.backoff_ms_max.max(1));
    let silence = Duration::from_millis(cluster.settings.view_silence_ms_max);
    let silent = |_| tonic::Status::deadline_exceeded("it is silent");
    loop {
        let request = WatchViewRequest { router: String::new() };
        let result = async {
            let mut views = timeout(silence, client.watch_view(request)).await.map_err(silent)??.into_inner();
            while let Some(view) = timeout(silence, views.message()).await.map_err(silent)?? {
                let view = ClusterView::try_from(view).map_err(tonic::Status::from)?;
                if news.send(News::View(scheduler, view)).await.is_err() {
                    break;
                }
            }
            Ok::<(), tonic::Status>(())
        };
        if let Err(status) = result.await {
            tracing::debug!(scheduler, status = status.message(), "no view from the scheduler; the last one stays");
        }
        if news.send(News::ViewLost(scheduler)).await.is_err() {
            return;
        }
        tokio::time::sleep(backoff).await;
    }
}

struct Supervisor {
    cluster: Arc<Cluster>,
    tasks: Tasks,
    shutdown: Shutdown,
    members: BTreeMap<Life, Known>,
    viewed: BTreeMap<Life, Known>,
    routers: BTreeSet<MemberKey>,
    leader: Leader,
    links: HashMap<Life, Link>,
}

impl Supervisor {
    fn new(cluster: Arc<Cluster>, tasks: Tasks, shutdown: Shutdown) -> Self {
        let (members, viewed, routers) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
        Self { cluster, tasks, shutdown, members, viewed, routers, leader: Leader::default(), links: HashMap::new() }
    }

    async fn run(mut self, mut news: mpsc::Receiver<News>) {
        let mut readiness = self.cluster.changes();
        loop {
            tokio::select! {
                item = news.recv() => match item {
                    Some(News::Members(event)) => {
                        self.take_members(event);
                        self.count_routers();
                    }
                    Some(News::View(scheduler, view)) => self.take_view(scheduler, view),
                    Some(News::ViewLost(scheduler)) => {
                        self.leader.lose(scheduler);
                        if self.leader.is_nobody() {
                            self.cluster.forget_wishes();
                        }
                    }
                    None => return,
                },
                // Whoever no longer answers may be someone whom nobody names.
                Ok(()) = readiness.changed() => {}
            }
            self.adjust();
        }
    }

    fn take_members(&mut self, event: WatchEvent) {
        match event {
            WatchEvent::Snapshot(members) => {
                self.members = members.iter().filter_map(|member| self.worker(member)).collect();
                self.routers = members.iter().map(Member::key).filter(is_router).collect();
            }
            WatchEvent::Changed(member) => {
                let known = self.worker(&member);
                self.members.extend(known);
                self.routers.extend(Some(member.key()).filter(is_router));
            }
            WatchEvent::Removed(key) => {
                self.routers.remove(&key);
                if let Some(life) = life(&key) {
                    self.members.remove(&life);
                    // The scheduler drops it too, but later; its next view tells anew.
                    self.viewed.remove(&life);
                }
            }
        }
    }

    fn count_routers(&self) {
        // This one counts even before it is registered.
        let n_routers = u32::try_from(self.routers.len().max(1)).unwrap_or(u32::MAX);
        self.cluster.n_routers.send_if_modified(|known| std::mem::replace(known, n_routers) != n_routers);
    }

    fn take_view(&mut self, scheduler: usize, view: ClusterView) {
        let counts = self.leader.hear(scheduler, view.epoch);
        self.cluster.metrics.view(counts);
        if !counts {
            return;
        }
        self.viewed = view
            .engines
            .iter()
            .filter(|engine| engine.identity.name.as_str() == self.cluster.model.name())
            .map(|engine| {
                let life = (engine.engine.worker.clone(), engine.engine.incarnation);
                let draining = engine.draining == Some(DrainReason::Leaving);
                (life, Known { address: engine.address.clone(), draining })
            })
            .collect();
        self.cluster.see(view);
    }

    /// Makes links with new workers and drops those with workers that nobody names and that do not answer: a store that
    /// lost its leases removes nobody who lives.
    fn adjust(&mut self) {
        let mut wanted = self.viewed.clone();
        wanted.extend(self.members.clone());
        self.links.retain(|life, link| {
            let stays = match wanted.get(life) {
                Some(known) => known.address == link.address,
                None => link.is_ready.load(Ordering::Relaxed),
            };
            if !stays {
                link.stop.fire();
            }
            stays
        });
        for (life, known) in wanted {
            if let Some(link) = self.links.get(&life) {
                if link.draining.swap(known.draining, Ordering::Relaxed) != known.draining {
                    self.cluster.count();
                    self.cluster.leaving.notify_one();
                }
                continue;
            }
            let link = self.start(&life, known);
            self.links.insert(life, link);
        }
        let n_ready = self.cluster.n_workers();
        self.cluster.metrics.engines_stale.set(self.links.len().saturating_sub(n_ready) as i64);
    }

    /// A member that is a worker and does not serve another model.
    fn worker(&self, member: &Member) -> Option<(Life, Known)> {
        let serves_another =
            member.identity.as_ref().is_some_and(|identity| identity.name.as_str() != self.cluster.model.name());
        let life = life(&member.key()).filter(|_| !serves_another)?;
        Some((life, Known { address: member.address.clone(), draining: member.draining }))
    }

    fn start(&self, (worker, incarnation): &Life, known: Known) -> Link {
        let (stop, stopped) = self.shutdown.part();
        let draining = Arc::new(AtomicBool::new(known.draining));
        let address = known.address.clone();
        let (worker, incarnation) = (worker.clone(), *incarnation);
        let is_ready = Arc::new(AtomicBool::new(false));
        let peer = Peer {
            worker,
            incarnation,
            address: known.address,
            draining: Arc::clone(&draining),
            is_ready: Arc::clone(&is_ready),
        };
        let keeping = link::keep(Arc::clone(&self.cluster), peer, self.tasks.clone(), self.shutdown.clone());
        until(&self.tasks, "worker link", &stopped, keeping);
        Link { stop, address, draining, is_ready }
    }
}

fn is_router(key: &MemberKey) -> bool {
    key.kind == MemberKind::Router
}

fn life(key: &MemberKey) -> Option<Life> {
    (key.kind == MemberKind::Worker).then(|| (key.id.as_str().into(), key.incarnation))
}
