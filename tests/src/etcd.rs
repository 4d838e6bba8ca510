//! A real etcd on free ports of the loopback interface.

use std::net::TcpListener;
use std::process::Command;
use std::time::Duration;

use crate::process::Process;
use crate::{client, place, wait};

/// One running member.
pub struct Etcd {
    pub process: Process,
    pub endpoint: String,
    data: tempfile::TempDir,
    ports: (u16, u16),
}

impl Etcd {
    /// Starts an empty one and waits until it is healthy.
    pub async fn start() -> Self {
        let data = tempfile::tempdir().unwrap();
        let ports = (free_port(), free_port());
        Self::start_in(data, ports).await
    }

    /// Kills it and starts it again on the same ports, with its data or without.
    pub async fn restart(self, keep_data: bool) -> Self {
        let Self { mut process, data, ports, .. } = self;
        process.kill();
        let data = if keep_data { data } else { tempfile::tempdir().unwrap() };
        Self::start_in(data, ports).await
    }

    async fn start_in(data: tempfile::TempDir, (client_port, peer_port): (u16, u16)) -> Self {
        let (endpoint, peer) = (format!("http://127.0.0.1:{client_port}"), format!("http://127.0.0.1:{peer_port}"));
        let mut command = Command::new(place::etcd());
        command.args(["--name", "t0", "--logger", "zap", "--log-level", "warn", "--data-dir"]).arg(data.path());
        command.args(["--listen-client-urls", &endpoint, "--advertise-client-urls", &endpoint]);
        command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        command.args(["--initial-cluster", &format!("t0={peer}")]);
        let process = Process::start("etcd", command);
        let health = format!("{endpoint}/health");
        wait::until("etcd is healthy", Duration::from_secs(20), async || {
            client::http().get(&health).send().await?.error_for_status()
        })
        .await;
        Self { process, endpoint, data, ports: (client_port, peer_port) }
    }
}

/// A port that was free a moment ago: etcd takes none of its own choosing.
pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}
