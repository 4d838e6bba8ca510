//! A network namespace for each process, joined by a switch that loses or delays packets as it is told.
//!
//! Each namespace holds one TUN device, whose packets the test process reads and writes to the device of whom they are
//! for; its own namespace holds one more. So a partition is one of IP packets, and loss is what TCP makes of it.

use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, RwLock};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use tokio::runtime::Builder;
use tokio::sync::oneshot;
use tokio::time::sleep;
use tokio_tun::Tun;

use crate::host::Host;
use crate::seed::Random;

/// The block of addresses for tests of networks (RFC 2544); each switch takes 16 of them.
const BLOCK: u32 = u32::from_be_bytes([198, 18, 0, 0]);
const N_SWITCHES: u32 = 1 << 13;
const N_HOSTS_MAX: usize = 14;
/// Bytes of the largest packet: a TUN device's usual limit.
const PACKET: usize = 1500;
/// Packets that wait at each device: a machine that is busy for a second is no lossy network.
const QUEUE: &str = "10000";
/// Begins the names of namespaces; the test's process id and the switch's number follow.
const PREFIX: &str = "tessera-test-";

/// What becomes of packets on their way from one host to another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Link {
    Clear,
    /// Of a hundred so many are lost.
    Lossy(u64),
    /// Each takes so long.
    Slow(Duration),
}

/// No packet arrives, and nobody is told.
pub const CUT: Link = Link::Lossy(100);

/// Hosts by name and the links between them.
pub struct Switch {
    hosts: Hosts,
    shared: Arc<Shared>,
    /// Dropped, it ends the thread that forwards.
    _stop: oneshot::Sender<()>,
}

/// Names and hosts, whose namespaces end with it.
struct Hosts(Vec<(String, Host)>);

/// What those share who forward; the port after the last host's is the test's.
struct Shared {
    /// Host `i` has the address `base + 1 + i`.
    base: u32,
    ports: Vec<Tun>,
    /// From port `i` to port `j` at `i * ports + j`.
    links: RwLock<Vec<Link>>,
    n_lost: AtomicU64,
}

impl Switch {
    /// Joins new hosts of these names and the test itself; gives none, and says so, where the system does not permit it.
    pub fn start(names: &[&str]) -> Option<Arc<Self>> {
        static N_STARTED: AtomicU32 = AtomicU32::new(0);
        assert!(names.len() < N_HOSTS_MAX, "{} hosts are too many", names.len());
        let (process, number) = (std::process::id(), N_STARTED.fetch_add(1, Ordering::Relaxed));
        if let Err(error) = permitted(&format!("{PREFIX}{process}-{number}"), &format!("t{process}n{number}")) {
            eprintln!("SKIPPED: network namespaces take root and /dev/net/tun: {error:#}");
            return None;
        }
        sweep();
        let base = BLOCK + process.wrapping_mul(4).wrapping_add(number) % N_SWITCHES * 16;
        // A thread of its own, so that a busy test is no slow network.
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let inside = runtime.enter();
        let (mut hosts, mut ports) = (Hosts(Vec::new()), Vec::new());
        for index in 0..=names.len() {
            let address = Ipv4Addr::from(base + 1 + u32::try_from(index).unwrap());
            let device = format!("t{process}n{number}x{index}");
            ports.push(tun(&device).unwrap());
            let Some(name) = names.get(index) else {
                bring_up(&device, address, &[]);
                continue;
            };
            let namespace = format!("{PREFIX}{process}-{number}-{name}");
            ip(&["netns", "add", &namespace]).unwrap();
            hosts.0.push(((*name).to_owned(), Host { address, namespace: Some(namespace.clone()) }));
            ip(&["link", "set", &device, "netns", &namespace]).unwrap();
            ip(&["-n", &namespace, "link", "set", "lo", "up"]).unwrap();
            bring_up(&device, address, &["-n", &namespace]);
        }
        let n = ports.len();
        let shared =
            Arc::new(Shared { base, ports, links: RwLock::new(vec![Link::Clear; n * n]), n_lost: AtomicU64::new(0) });
        let (stop, stopped) = oneshot::channel();
        let forwarding = (0..n).map(|from| forward(Arc::clone(&shared), from));
        let forwarding = futures::future::join_all(forwarding);
        drop(inside);
        std::thread::spawn(move || runtime.block_on(futures::future::select(Box::pin(forwarding), stopped)));
        Some(Arc::new(Self { hosts, shared, _stop: stop }))
    }

    /// Where the process of this name runs.
    pub fn host(&self, name: &str) -> &Host {
        &self.hosts.0[self.index(name)].1
    }

    /// Says what becomes of packets between any of `some` and any of `others`, both ways.
    pub fn set(&self, link: Link, some: &[&str], others: &[&str]) {
        self.set_one_way(link, some, others);
        self.set_one_way(link, others, some);
    }

    /// Says what becomes of packets from any of `some` to any of `others`.
    pub fn set_one_way(&self, link: Link, some: &[&str], others: &[&str]) {
        let n = self.shared.ports.len();
        let mut links = self.shared.links.write().unwrap();
        for (from, to) in some.iter().flat_map(|a| others.iter().map(|b| (self.index(a), self.index(b)))) {
            links[from * n + to] = link;
        }
    }

    /// Packets lost so far.
    pub fn n_lost(&self) -> u64 {
        self.shared.n_lost.load(Ordering::Relaxed)
    }

    fn index(&self, name: &str) -> usize {
        self.hosts.0.iter().position(|(known, _)| known == name).unwrap_or_else(|| panic!("no host is called {name}"))
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        self.0.iter().filter_map(|(_, host)| host.namespace.as_deref()).for_each(remove);
    }
}

/// Passes on what the host of one port sends, until its device is gone.
async fn forward(shared: Arc<Shared>, from: usize) {
    let mut random = Random::new(from as u64);
    let mut packet = [0; PACKET];
    while let Ok(n) = shared.ports[from].recv(&mut packet).await {
        let Some(to) = shared.port_of(&packet[..n]) else { continue };
        let link = shared.links.read().unwrap()[from * shared.ports.len() + to];
        match link {
            Link::Lossy(percent) if random.below(100) < percent => drop(shared.n_lost.fetch_add(1, Ordering::Relaxed)),
            Link::Slow(delay) => {
                let (shared, packet) = (Arc::clone(&shared), packet[..n].to_vec());
                tokio::spawn(async move {
                    sleep(delay).await;
                    shared.deliver(to, &packet).await;
                });
            }
            Link::Clear | Link::Lossy(_) => shared.deliver(to, &packet[..n]).await,
        }
    }
}

impl Shared {
    /// Whose port an IPv4 packet is for.
    fn port_of(&self, packet: &[u8]) -> Option<usize> {
        let destination: [u8; 4] = packet.get(16..20)?.try_into().ok()?;
        let port = u32::from_be_bytes(destination).checked_sub(self.base + 1)? as usize;
        (packet[0] >> 4 == 4 && port < self.ports.len()).then_some(port)
    }

    /// Hands a packet to a host; one that does not take it has lost it.
    async fn deliver(&self, to: usize, packet: &[u8]) {
        let _ = self.ports[to].send(packet).await;
    }
}

/// Whether namespaces and devices of these names could be made.
fn permitted(namespace: &str, device: &str) -> Result<()> {
    tun(device)?;
    ip(&["netns", "add", namespace])?;
    remove(namespace);
    Ok(())
}

fn tun(device: &str) -> Result<Tun> {
    let made = Tun::builder().name(device).build().with_context(|| format!("make the TUN device {device}"))?;
    made.into_iter().next().context("no TUN device was made")
}

fn bring_up(device: &str, address: Ipv4Addr, namespace: &[&str]) {
    let address = format!("{address}/28");
    ip(&[namespace, &["address", "add", &address, "dev", device]].concat()).unwrap();
    ip(&[namespace, &["link", "set", device, "txqueuelen", QUEUE, "up"]].concat()).unwrap();
}

/// Removes the namespaces that killed runs left.
fn sweep() {
    let all = ip(&["netns", "list"]).unwrap();
    for namespace in all.lines().filter_map(|line| line.split(' ').next()) {
        let process = namespace.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next());
        if process.is_some_and(|process| !Path::new("/proc").join(process).exists()) {
            remove(namespace);
        }
    }
}

/// Removes a namespace, if there is one, and kills who runs in it.
fn remove(namespace: &str) {
    for process in ip(&["netns", "pids", namespace]).unwrap_or_default().lines() {
        let _ = Command::new("kill").args(["-s", "KILL", process]).status();
    }
    // Another sweep may have been faster.
    let _ = ip(&["netns", "delete", namespace]);
}

fn ip(args: &[&str]) -> Result<String> {
    let output = Command::new("ip").args(args).output().context("run ip")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "ip {}: {}", args.join(" "), errors.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
