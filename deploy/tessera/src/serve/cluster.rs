//! The roles that `serve` started: where they listen, which of them failed, and how they are stopped.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use daemon::announce::Announce;
use daemon::shutdown::{Shutdown, Trigger};
use daemon::task::Tasks;
use tokio::sync::mpsc;

use super::plan::Plan;
use super::process;
use crate::role::{self, Role};

/// Longest time for a role to tell where it listens; a large model takes minutes to load.
const LISTEN_MAX: Duration = Duration::from_secs(1_800);
/// Longest time for one kind of role to stop, its servers' grace included.
const STOP_MAX: Duration = Duration::from_secs(75);
/// More events than all roles together have pending.
const N_EVENTS_MAX: usize = 1_024;

/// How roles are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// As tasks of this process.
    Tasks,
    /// As processes of their own.
    Processes,
}

/// What a role tells.
#[derive(Debug)]
pub(super) enum Event {
    /// It listens.
    Listening { name: String, what: String, address: SocketAddr },
    /// It ended.
    Ended { name: String, result: Result<()> },
}

/// All roles on this machine.
pub(super) struct Cluster {
    form: Form,
    tasks: Tasks,
    members: BTreeMap<String, Member>,
    events: mpsc::Receiver<Event>,
    sender: mpsc::Sender<Event>,
    /// The process's own shutdown, which ends no role by itself: they are stopped in order.
    shutdown: Shutdown,
}

struct Member {
    role: Role,
    pid: u32,
    stop: Trigger,
    addresses: BTreeMap<String, SocketAddr>,
    /// Set when it ended.
    ended: bool,
}

impl Cluster {
    /// Makes a cluster without roles.
    pub(super) fn new(form: Form, shutdown: &Shutdown) -> Self {
        let (sender, events) = mpsc::channel(N_EVENTS_MAX);
        let shutdown = shutdown.clone();
        Self { form, tasks: Tasks::new(), members: BTreeMap::new(), events, sender, shutdown }
    }

    /// How its roles are run.
    pub(super) fn form(&self) -> Form {
        self.form
    }

    /// Starts one role.
    pub(super) async fn start(&mut self, plan: &Plan, role: Role, name: &str) -> Result<()> {
        let (stop, shutdown) = Shutdown::pair();
        let document = plan.document_of(role, name)?;
        let pid = match self.form {
            Form::Tasks => {
                self.start_task(role::configure(&document, role)?.value, name, shutdown);
                std::process::id()
            }
            Form::Processes => {
                let child = process::Child::start(role, name, &document)
                    .await
                    .with_context(|| format!("cannot start {name} as a process"))?;
                let pid = child.pid();
                self.tasks.spawn("child process", child.follow(self.sender.clone(), shutdown));
                pid
            }
        };
        let member = Member { role, pid, stop, addresses: BTreeMap::new(), ended: false };
        self.members.insert(name.to_owned(), member);
        Ok(())
    }

    fn start_task(&self, mut configured: role::Configured, name: &str, shutdown: Shutdown) {
        let (announce, mut announced) = Announce::channel();
        configured.announce(announce);
        let (events, of) = (self.sender.clone(), name.to_owned());
        self.tasks.spawn("announcements", async move {
            while let Some((what, address)) = announced.next().await {
                let _ = events.send(Event::Listening { name: of.clone(), what: what.to_owned(), address }).await;
            }
        });
        let running = self.tasks.spawn("role", configured.run(shutdown));
        let (events, name) = (self.sender.clone(), name.to_owned());
        self.tasks.spawn("role's end", async move {
            let result = running.await.unwrap_or_else(|_| Err(anyhow!("it panicked")));
            let _ = events.send(Event::Ended { name, result }).await;
        });
    }

    /// Waits until `name` tells where `what` listens.
    pub(super) async fn address(&mut self, name: &str, what: &str) -> Result<SocketAddr> {
        let wait = async {
            loop {
                let known = self.members.get(name).and_then(|member| member.addresses.get(what));
                if let Some(address) = known {
                    return Ok(*address);
                }
                if let Some(error) = self.next().await {
                    return Err(error);
                }
            }
        };
        let waited = tokio::time::timeout(LISTEN_MAX, wait).await;
        waited.unwrap_or_else(|_| bail!("{name} does not listen after {} s", LISTEN_MAX.as_secs()))
    }

    /// Waits until a role ends that should not.
    pub(super) async fn failure(&mut self) -> anyhow::Error {
        loop {
            if let Some(error) = self.next().await {
                return error;
            }
        }
    }

    /// One line `role pid address` for each role.
    pub(super) fn describe(&self) -> Vec<String> {
        let line = |member: &Member| {
            let address = ["http", "grpc"].iter().find_map(|what| member.addresses.get(*what));
            let address = address.map_or_else(|| "-".to_owned(), SocketAddr::to_string);
            format!("{} {} {address}", member.role.name(), member.pid)
        };
        self.members.values().map(line).collect()
    }

    /// Stops routers, then workers, then the scheduler, each letting running requests finish.
    pub(super) async fn stop(mut self) -> Result<()> {
        let mut first_error = None;
        for role in [Role::Router, Role::Worker, Role::Scheduler] {
            self.members.values().filter(|member| member.role == role).for_each(|member| member.stop.fire());
            let all_ended = async {
                while self.members.values().any(|member| member.role == role && !member.ended) {
                    if let Some(error) = self.next_while_stopping().await {
                        tracing::warn!("{error:#}");
                        first_error.get_or_insert(error);
                    }
                }
            };
            if tokio::time::timeout(STOP_MAX, all_ended).await.is_err() {
                let error = anyhow!("{} does not stop after {} s", role.name(), STOP_MAX.as_secs());
                tracing::error!("{error}");
                first_error.get_or_insert(error);
            }
        }
        // What failed before is the reason for the stop; it was reported. A signal wants a clean end.
        if self.shutdown.is_triggered() { first_error.map_or(Ok(()), Err) } else { Ok(()) }
    }

    /// Takes the next event; an error when it is a role's end.
    async fn next(&mut self) -> Option<anyhow::Error> {
        let (name, result) = self.take().await?;
        Some(match result {
            Ok(()) => anyhow!("{name} ended by itself"),
            Err(error) => error.context(format!("{name} failed")),
        })
    }

    /// Takes the next event; an error when it is a role's bad end.
    async fn next_while_stopping(&mut self) -> Option<anyhow::Error> {
        let (name, result) = self.take().await?;
        result.err().map(|error| error.context(format!("{name} failed while stopping")))
    }

    async fn take(&mut self) -> Option<(String, Result<()>)> {
        // This side holds a sender, so there always is a next one.
        match self.events.recv().await? {
            Event::Listening { name, what, address } => {
                if let Some(member) = self.members.get_mut(&name) {
                    member.addresses.insert(what, address);
                }
                None
            }
            Event::Ended { name, result } => {
                if let Some(member) = self.members.get_mut(&name) {
                    member.ended = true;
                }
                Some((name, result))
            }
        }
    }
}
