//! A TCP proxy on the loopback interface that delays every byte as it is told.

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep_until};

use toml::{Table, Value};

use crate::etcd::free_port;

/// Chunks on their way in one direction of a connection; beyond it the sender is held up.
const N_CHUNKS_MAX: usize = 1024;

/// Passes connections on to a target.
pub struct Proxy {
    pub address: String,
    target: watch::Sender<Option<String>>,
    delay: watch::Sender<Duration>,
    cuts: watch::Sender<u64>,
    accepting: JoinHandle<()>,
}

impl Proxy {
    /// Listens; connections wait until there is a target.
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (target, delay, cuts) = (watch::Sender::new(None), watch::Sender::default(), watch::Sender::new(0));
        let (targets, delays, cutting) = (target.subscribe(), delay.subscribe(), cuts.subscribe());
        let accepting = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((near, _)) = listener.accept().await {
                let (target, delay, mut cut) = (targets.clone(), delays.clone(), cutting.clone());
                cut.mark_unchanged();
                connections.spawn(async move {
                    tokio::select! {
                        _ = cut.changed() => {}
                        () = pass(near, target, delay) => {}
                    }
                });
                while connections.try_join_next().is_some() {}
            }
        });
        Self { address, target, delay, cuts, accepting }
    }

    /// Where it leads from now on.
    pub fn lead_to(&self, target: &str) {
        self.target.send_replace(Some(target.to_owned()));
    }

    /// How long bytes take that are read from now on.
    pub fn delay(&self, delay: Duration) {
        self.delay.send_replace(delay);
    }

    /// Breaks every connection.
    pub fn cut(&self) {
        self.cuts.send_modify(|n| *n += 1);
    }
}

/// A worker's table that has others reach it through proxies.
pub struct Behind {
    pub table: Table,
    /// To its service.
    pub service: Proxy,
    /// To where it hands prompts over.
    pub transfer: Proxy,
}

impl Behind {
    /// Starts both proxies.
    pub async fn start() -> Self {
        let (service, transfer) = (Proxy::start().await, Proxy::start().await);
        // What is advertised must be known before the worker runs.
        let listens = [format!("127.0.0.1:{}", free_port()), format!("127.0.0.1:{}", free_port())];
        service.lead_to(&listens[0]);
        transfer.lead_to(&listens[1]);
        let text = |value: &str| Value::from(value.to_owned());
        let moves = Table::from_iter([
            ("ways".to_owned(), vec!["tcp"].into()),
            ("listen".to_owned(), text(&listens[1])),
            ("advertise".to_owned(), text(&transfer.address)),
        ]);
        let table = Table::from_iter([
            ("listen".to_owned(), text(&listens[0])),
            ("advertise".to_owned(), text(&service.address)),
            ("transfer".to_owned(), moves.into()),
        ]);
        Self { table, service, transfer }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn pass(near: TcpStream, mut target: watch::Receiver<Option<String>>, delay: watch::Receiver<Duration>) {
    let Ok(address) = target.wait_for(Option::is_some).await.map(|target| target.clone().unwrap()) else { return };
    let Ok(far) = TcpStream::connect(&address).await else { return };
    let _ = (near.set_nodelay(true), far.set_nodelay(true));
    let (near_in, near_out) = near.into_split();
    let (far_in, far_out) = far.into_split();
    // Either end's end ends both: nobody here goes on with half a connection.
    tokio::select! {
        () = carry(near_in, far_out, delay.clone()) => {}
        () = carry(far_in, near_out, delay) => {}
    }
}

/// Carries one direction to its end.
async fn carry(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, delay: watch::Receiver<Duration>) {
    let (sender, mut chunks) = mpsc::channel::<(Instant, Vec<u8>)>(N_CHUNKS_MAX);
    let reading = async move {
        let mut bytes = vec![0; 16 << 10];
        while let Ok(n @ 1..) = from.read(&mut bytes).await {
            let due = Instant::now() + *delay.borrow();
            if sender.send((due, bytes[..n].to_vec())).await.is_err() {
                return;
            }
        }
    };
    let writing = async move {
        while let Some((due, bytes)) = chunks.recv().await {
            sleep_until(due).await;
            if to.write_all(&bytes).await.is_err() {
                return;
            }
        }
    };
    // What was read is still written when the reader is done; a writer that is done ends both.
    tokio::select! {
        () = writing => {}
        () = async { reading.await; std::future::pending().await } => {}
    }
}
