//! A real etcd on free ports of its host.

use std::net::TcpListener;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use crate::host::Host;
use crate::process::Process;
use crate::{client, place, wait};

/// `/tessera/v1/members/` as etcd's JSON wants it, and the first key after all that begin so.
const MEMBERS: &str = "L3Rlc3NlcmEvdjEvbWVtYmVycy8=";
const MEMBERS_END: &str = "L3Rlc3NlcmEvdjEvbWVtYmVyczA=";

/// How often it is tried to start one.
const N_STARTS_MAX: usize = 3;

/// One running member.
pub struct Etcd {
    pub process: Process,
    pub endpoint: String,
    data: tempfile::TempDir,
    host: Host,
    /// For clients and for peers.
    ports: (u16, u16),
}

impl Etcd {
    /// Starts an empty one and waits until it is healthy; on other ports when one of them was taken in the meantime.
    pub async fn start(host: Host) -> Self {
        for _ in 0..N_STARTS_MAX {
            let (data, ports) = (tempfile::tempdir().unwrap(), (free_port(), free_port()));
            let endpoint = url(&host, ports.0);
            let mut process = start_process(&host, data.path(), ports);
            if is_healthy(&endpoint, &mut process).await {
                return Self { process, endpoint, data, host, ports };
            }
            eprintln!("etcd ended: {}", process.errors());
        }
        panic!("etcd ends whenever it is started");
    }

    /// Kills it, if it still runs, and starts it again on the same ports, with its data or without.
    pub async fn restart(&mut self, keep_data: bool) {
        self.process.kill();
        if !keep_data {
            self.data = tempfile::tempdir().unwrap();
        }
        self.process = start_process(&self.host, self.data.path(), self.ports);
        assert!(is_healthy(&self.endpoint, &mut self.process).await, "etcd ended: {}", self.process.errors());
    }

    /// How many members are registered.
    pub async fn n_members(&self) -> Result<usize> {
        let range = json!({"key": MEMBERS, "range_end": MEMBERS_END, "count_only": true});
        let told = self.post("range", &range).await?;
        // Zero is left out.
        Ok(told["count"].as_str().map_or(Ok(0), str::parse)?)
    }

    /// Forgets every revision before the present one, for good.
    pub async fn compact(&self) -> Result<()> {
        let told = self.post("range", &json!({"key": MEMBERS})).await?;
        let revision = &told["header"]["revision"];
        self.post("compaction", &json!({"revision": revision, "physical": true})).await.map(drop)
    }

    async fn post(&self, call: &str, body: &Value) -> Result<Value> {
        let address = self.endpoint.trim_start_matches("http://");
        let (status, told) = client::post(address, &format!("/v3/kv/{call}"), body).await?;
        ensure!(status == 200, "{call}: status {status}, {told}");
        Ok(told)
    }
}

fn start_process(host: &Host, data: &Path, ports: (u16, u16)) -> Process {
    let (endpoint, peer) = (&url(host, ports.0), &url(host, ports.1));
    let mut command = host.command(place::etcd());
    command.args(["--name", "t0", "--logger", "zap", "--log-level", "warn", "--data-dir"]).arg(data);
    command.args(["--listen-client-urls", endpoint, "--advertise-client-urls", endpoint]);
    command.args(["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]);
    command.args(["--initial-cluster", &format!("t0={peer}")]);
    Process::start("etcd", command)
}

fn url(host: &Host, port: u16) -> String {
    format!("http://{}:{port}", host.address)
}

/// Waits until it is healthy; false when it has ended before.
async fn is_healthy(endpoint: &str, process: &mut Process) -> bool {
    let health = format!("{endpoint}/health");
    wait::until("etcd is healthy", Duration::from_secs(20), async || {
        if !process.is_running() {
            return Ok(false);
        }
        client::http().get(&health).send().await?.error_for_status().map(|_| true)
    })
    .await
}

/// A port that was free on the loopback interface a moment ago: etcd takes none of its own choosing.
pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}
