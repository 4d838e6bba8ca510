//! A connection between two workers on which things go wrong.

use std::sync::{Arc, Mutex};

use contract::ids::Incarnation;
use daemon::task::Tasks;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};

use super::super::frame::{HEADER_BYTES, Header, Kind};

/// What happens to the nth frame of blocks on its way to the decode worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Fault {
    None,
    /// A bit of what follows the header; of the checksum where nothing follows.
    FlipPayload,
    FlipHeader,
    Lose,
    Double,
    /// It comes a second time, as of an earlier life of the peer, before the first.
    StaleLife,
    /// The same, of another attempt.
    StaleAttempt,
    /// The same, for blocks beyond the order's.
    NotReserved,
    /// The connection breaks off inside it.
    Cut,
    /// Nothing goes on any more, to neither side, and the connection stands.
    Silence,
    /// The same inside a frame.
    Stall,
    /// What the decode worker says after it is lost.
    Deafen,
}

/// Passes frames on to `target`; the nth frame of blocks of each connection meets its fault.
pub(super) struct Proxy {
    pub(super) address: String,
    fault: Arc<Mutex<(Fault, u32)>>,
    _tasks: Tasks,
}

impl Proxy {
    pub(super) async fn start(target: String, fault: Fault, nth: u32) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (fault, tasks) = (Arc::new(Mutex::new((fault, nth))), Tasks::new());
        let (shared, spawner) = (Arc::clone(&fault), tasks.clone());
        tasks.spawn("proxy", async move {
            while let Ok((near, _)) = listener.accept().await {
                let Ok(far) = TcpStream::connect(&target).await else { continue };
                let (near_in, near_out) = near.into_split();
                let (far_in, far_out) = far.into_split();
                let (deaf, hear) = tokio::sync::watch::channel(false);
                spawner.spawn("up", up(near_in, far_out, hear));
                let fault = Arc::clone(&shared);
                spawner.spawn("down", async move { down(far_in, near_out, &fault, &deaf).await });
            }
        });
        Self { address, fault, _tasks: tasks }
    }

    /// From now on nothing goes wrong.
    pub(super) fn heal(&self) {
        self.fault.lock().unwrap().0 = Fault::None;
    }
}

async fn up(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, deaf: tokio::sync::watch::Receiver<bool>) {
    let mut bytes = vec![0; 64 << 10];
    while let Ok(n @ 1..) = from.read(&mut bytes).await {
        if !*deaf.borrow() && to.write_all(&bytes[..n]).await.is_err() {
            return;
        }
    }
}

async fn down(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    fault: &Mutex<(Fault, u32)>,
    deaf: &tokio::sync::watch::Sender<bool>,
) {
    let mut n_frames = 0;
    while let Some((header, mut payload)) = frame(&mut from).await {
        let mut head = header.to_bytes();
        let (fault, nth) = *fault.lock().unwrap();
        let meets = header.kind != Kind::Message && n_frames == nth;
        n_frames += u32::from(header.kind != Kind::Message);
        let mut before = Vec::new();
        match fault {
            _ if !meets => {}
            Fault::None => {}
            Fault::FlipPayload if payload.is_empty() => {
                head = Header { payload_sum: header.payload_sum ^ 1, ..header }.to_bytes();
            }
            Fault::FlipPayload => {
                let at = payload.len() / 3;
                payload[at] ^= 0x10;
            }
            Fault::FlipHeader => head[HEADER_BYTES / 2] ^= 1,
            Fault::Lose => continue,
            Fault::Double => before = [&head[..], &payload].concat(),
            Fault::StaleLife => {
                let stale = Header { incarnation: Incarnation(header.incarnation.0 ^ 1), ..header };
                before = [&stale.to_bytes()[..], &garbage(&payload)].concat();
            }
            Fault::StaleAttempt => {
                let stale = Header { attempt: header.attempt + 1, ..header };
                before = [&stale.to_bytes()[..], &garbage(&payload)].concat();
            }
            Fault::NotReserved => {
                let beyond = Header { first_block: 1 << 20, ..header };
                before = [&beyond.to_bytes()[..], &garbage(&payload)].concat();
            }
            Fault::Cut => {
                let _ = to.write_all(&[&head[..], &payload[..payload.len() / 2]].concat()).await;
                return;
            }
            Fault::Silence => std::future::pending().await,
            Fault::Stall => {
                let all = [&head[..], &payload].concat();
                let _ = to.write_all(&all[..all.len() / 2]).await;
                std::future::pending().await
            }
            Fault::Deafen => {
                deaf.send_replace(true);
            }
        }
        for bytes in [&before[..], &head[..], &payload] {
            if to.write_all(bytes).await.is_err() {
                return;
            }
        }
    }
}

fn garbage(payload: &[u8]) -> Vec<u8> {
    payload.iter().map(|byte| !byte).collect()
}

async fn frame(from: &mut OwnedReadHalf) -> Option<(Header, Vec<u8>)> {
    let mut head = [0; HEADER_BYTES];
    from.read_exact(&mut head).await.ok()?;
    let header = Header::from_bytes(&head).unwrap();
    let n_bytes = match header.kind {
        Kind::Message | Kind::Blocks => header.payload_bytes as usize,
        Kind::Ready => 4 * header.n_blocks as usize,
        Kind::InRing => 0,
    };
    let mut payload = vec![0; n_bytes];
    from.read_exact(&mut payload).await.ok()?;
    Some((header, payload))
}
