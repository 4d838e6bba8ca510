//! How fast blocks move by each way, beside what the machine could do at best: plain loopback TCP and plain copies.
//!
//! What bounds a transfer is its bytes over the bandwidth of the plain thing: by TCP that of a loopback connection, on
//! one host that of one thread's `memcpy`. All are measured in one run, over the same number of bytes, far more than
//! caches hold, in memory of the same kind (huge pages, touched before). A plain copy moves blocks of the same length
//! between equally scattered places; a plain connection is kept as a worker's is, has its buffers, moves as many bytes a
//! call and has one thread at each end, as transfers do. Transfers include all that they need: order, checksums on both
//! sides, acknowledgement.
//!
//! A round measures everything once, and every other round in the opposite order. A way's part of its bound is taken
//! within a round, so that both had the same machine, and the median of all rounds counts.

use std::future::pending;
use std::io::{self, Read as _, Write as _};
use std::net::TcpListener as PlainListener;
use std::net::TcpStream as PlainStream;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use contract::error::RequestError;
use contract::ids::{BlockId, DataRank, EngineId, Incarnation, RequestId};
use contract::kv::{KvLayout, KvPart};
use contract::model::{Fingerprint, ModelIdentity};
use daemon::clock;
use daemon::shutdown::Shutdown;
use daemon::task::Tasks;
use kernels::memory::Mapping;
use kernels::memory::blocks::BlockMemory;
use kernels::memory::runs::CALL_BYTES_MAX;
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{oneshot, watch};

use super::client::Client;
use super::endpoint::Endpoint;
use super::fetch::{FetchError, FetchFailure};
use super::link;
use super::listen::listen;
use super::{Order, Peer, PrefillSource, Progress, Reservation, Share, Ticket, TransferConfig, Way};

/// Longest time of one transfer.
const DEADLINE: Duration = Duration::from_secs(60);

/// How fast a way is, and what bounds it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speed {
    /// How blocks were moved.
    pub way: Way,
    /// Bytes in a second, the median of all rounds.
    pub rate: f64,
    /// The same of a plain connection for [`Way::Tcp`], of a plain copy for the others.
    pub bound: f64,
    /// One over the other in the same round, the median of all rounds.
    pub part: f64,
}

/// A measurement could not be made.
#[derive(Debug, Error)]
pub enum SpeedError {
    /// No memory, or no thread.
    #[error("cannot prepare the measurement")]
    Prepare(#[from] kernels::Error),
    /// A socket or a runtime.
    #[error("the system refuses a socket")]
    System(#[from] io::Error),
    /// Blocks did not come.
    #[error("a transfer failed: {0}")]
    Transfer(String),
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Move {
    Copy,
    Loopback,
    Blocks(Way),
}

/// Moves about `n_bytes` of a pool by each way, `n_rounds` times; a way that the system does not permit is left out.
///
/// # Errors
/// When memory, sockets or threads are refused, or a transfer fails where its way is open.
///
/// # Panics
/// When a thread of the measurement panics, or without a round.
pub fn measure(layout: KvLayout, n_bytes: usize, n_rounds: usize) -> Result<Vec<Speed>, SpeedError> {
    let n_blocks = (n_bytes / layout.block_bytes_total()).max(1);
    let n_bytes = n_blocks * layout.block_bytes_total();
    let mut plain = Plain::new(layout, n_bytes)?;
    let mut pairs = Vec::new();
    for way in [Way::Tcp, Way::Pull, Way::Ring] {
        let pair = Pair::start(layout, n_blocks as u32, way)?;
        // Not counted: workers connect and agree, and learn whether the way is open.
        match pair.fetch() {
            Ok(_) => pairs.push((way, pair)),
            Err(FetchError { reason: FetchFailure::NoWay { .. }, .. }) => {}
            Err(error) => return Err(failed(way, &error)),
        }
    }
    let mut moves = vec![Move::Copy, Move::Loopback];
    moves.extend(pairs.iter().map(|(way, _)| Move::Blocks(*way)));
    let mut rounds = Vec::new();
    for _ in 0..n_rounds {
        let mut round = Vec::new();
        for &what in &moves {
            let took = match what {
                Move::Copy => plain.copy(),
                Move::Loopback => plain.loopback()?,
                Move::Blocks(way) => {
                    let (_, pair) = pairs.iter().find(|(known, _)| *known == way).expect("only open ways are moves");
                    pair.fetch().map_err(|error| failed(way, &error))?
                }
            };
            round.push((what, n_bytes as f64 / took.as_secs_f64()));
        }
        rounds.push(round);
        moves.reverse();
    }
    let all = |what: Move| rounds.iter().flatten().filter(move |(known, _)| *known == what).map(|(_, rate)| *rate);
    let speed = |way: Way| {
        let bound = if way == Way::Tcp { Move::Loopback } else { Move::Copy };
        let parts = all(Move::Blocks(way)).zip(all(bound)).map(|(rate, bound)| rate / bound);
        Speed { way, rate: median(all(Move::Blocks(way))), bound: median(all(bound)), part: median(parts) }
    };
    Ok(pairs.iter().map(|(way, _)| speed(*way)).collect())
}

fn failed(way: Way, error: &FetchError) -> SpeedError {
    SpeedError::Transfer(format!("{way:?}: {:?}", error.reason))
}

/// The middle one, the upper of two.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Memory as pools have it, and a connection as workers have it.
struct Plain {
    source: Mapping,
    target: Mapping,
    writer: PlainStream,
    reader: PlainStream,
    block_bytes: usize,
    /// From where each block is copied and to where.
    blocks: Vec<(BlockId, BlockId)>,
}

impl Plain {
    fn new(layout: KvLayout, n_bytes: usize) -> Result<Self, SpeedError> {
        let block_bytes = layout.block_bytes(KvPart::Key);
        let n_blocks = (n_bytes / block_bytes) as u32;
        let blocks = scattered(n_blocks, 1).into_iter().zip(scattered(n_blocks, 2)).collect();
        let (source, target) = (Mapping::zeroed(n_bytes)?, Mapping::zeroed(n_bytes)?);
        let listener = PlainListener::bind("127.0.0.1:0")?;
        let reader = PlainStream::connect(listener.local_addr()?)?;
        let (writer, _) = listener.accept()?;
        link::tune(&reader)?;
        link::tune(&writer)?;
        let mut plain = Self { source, target, writer, reader, block_bytes, blocks };
        plain.source.as_mut_slice().fill(1);
        plain.target.as_mut_slice().fill(2);
        Ok(plain)
    }

    fn copy(&mut self) -> Duration {
        let start = clock::now();
        let (source, target, len) = (self.source.as_slice(), self.target.as_mut_slice(), self.block_bytes);
        for (from, to) in &self.blocks {
            let (from, to) = (from.0 as usize * len, to.0 as usize * len);
            target[to..to + len].copy_from_slice(&source[from..from + len]);
        }
        clock::now() - start
    }

    fn loopback(&mut self) -> io::Result<Duration> {
        let Self { source, target, writer, reader, .. } = self;
        let (source, target) = (source.as_slice(), target.as_mut_slice());
        let start = clock::now();
        thread::scope(|scope| {
            let write = || source.chunks(CALL_BYTES_MAX).try_for_each(|bytes| writer.write_all(bytes));
            let writing = scope.spawn(write);
            target.chunks_mut(CALL_BYTES_MAX).try_for_each(|bytes| reader.read_exact(bytes))?;
            writing.join().expect("the writing thread does not panic")
        })?;
        Ok(clock::now() - start)
    }
}

/// Two pools; the prefill worker's has a thread of its own, the decode worker's is moved by the caller's.
struct Pair {
    runtime: Runtime,
    client: Client,
    peer: Peer,
    order: Order,
    reservation: Reservation,
    stop: Option<oneshot::Sender<()>>,
    serving: Option<thread::JoinHandle<()>>,
}

impl Pair {
    fn start(layout: KvLayout, n_blocks: u32, way: Way) -> Result<Self, SpeedError> {
        let prefill = endpoint("prefill", layout, n_blocks, way)?;
        let decode = endpoint("decode", layout, n_blocks, way)?;
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let listener = PlainListener::bind("127.0.0.1:0")?;
        listener.set_nonblocking(true)?;
        let peer = Peer { address: listener.local_addr()?.to_string(), engine: prefill.engine.clone() };
        let (stop, stopped) = oneshot::channel();
        let serving_runtime = Builder::new_current_thread().enable_all().build()?;
        let source = Arc::new(Computed { layout, table: scattered(n_blocks, 1).into() });
        let serving = thread::spawn(move || {
            serving_runtime.block_on(async move {
                let Ok(listener) = TcpListener::from_std(listener) else { return };
                let listening = listen(Arc::new(prefill), listener, source, Tasks::new(), Shutdown::never());
                tokio::select! {
                    () = listening => {}
                    _ = stopped => {}
                }
            });
        });
        let order = Order {
            request: RequestId(1),
            attempt: 0,
            prompt: vec![0; (n_blocks * layout.block_size) as usize + 1],
            first_block: 0,
            cache_salt: String::new(),
            adapter: String::new(),
            tenant: "bench".into(),
            priority: 0,
            deadline: DEADLINE,
            lease: DEADLINE,
        };
        let reservation = Reservation { blocks: scattered(n_blocks, 2) };
        let client = Client::new(Arc::new(decode));
        Ok(Self { runtime, client, peer, order, reservation, stop: Some(stop), serving: Some(serving) })
    }

    fn fetch(&self) -> Result<Duration, FetchError> {
        let start = clock::now();
        self.runtime.block_on(self.client.fetch(&self.peer, &self.order, &self.reservation))?;
        Ok(clock::now() - start)
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(serving) = self.serving.take() {
            // It panicked on its own account.
            let _ = serving.join();
        }
    }
}

/// A prompt that has been computed already.
struct Computed {
    layout: KvLayout,
    table: Arc<[BlockId]>,
}

impl PrefillSource for Computed {
    async fn begin(&self, order: Order) -> Result<Ticket, RequestError> {
        let tokens_by_layer = vec![order.n_tokens(); self.layout.n_layers as usize].into();
        let progress = Progress { table: Arc::clone(&self.table), tokens_by_layer, failed: None };
        let (sender, progress) = watch::channel(progress);
        Ok(Ticket { progress, lost: Box::pin(pending()), guard: Box::new(sender) })
    }
}

fn endpoint(name: &str, layout: KvLayout, n_blocks: u32, way: Way) -> Result<Endpoint, SpeedError> {
    let block_bytes = [KvPart::Key, KvPart::Value].map(|part| layout.block_bytes(part));
    let memory = BlockMemory::zeroed(layout.n_layers as usize, n_blocks as usize, block_bytes)?;
    for layer in 0..layout.n_layers as usize {
        for region in kernels::memory::blocks::Region::BOTH {
            let bytes: Vec<u8> = (0..memory.block_bytes(region)).map(|i| (i * 31 + layer) as u8).collect();
            for block in 0..n_blocks as usize {
                memory.write(layer, region, block * bytes.len(), &bytes)?;
            }
        }
    }
    let identity = ModelIdentity {
        name: "bench".into(),
        block_size: layout.block_size,
        context_length: u32::MAX,
        vocab_size: 1,
        model: Fingerprint::default(),
        tokenizer: Fingerprint::default(),
        hash_key: Fingerprint::default(),
        numerics: Fingerprint::default(),
    };
    let engine =
        EngineId { worker: name.into(), incarnation: Incarnation(daemon::random::u64()), data_rank: DataRank(0) };
    let config = TransferConfig { ways: vec![way], ..TransferConfig::default() };
    Ok(Endpoint::new(engine, identity, Share::whole(layout), memory, config))
}

/// All blocks, none of them beside the one before it.
fn scattered(n_blocks: u32, salt: u32) -> Vec<BlockId> {
    let mut blocks: Vec<BlockId> = (0..n_blocks).map(BlockId).collect();
    blocks.sort_by_key(|block| (block.0 + salt).wrapping_mul(0x9e37_79b1));
    blocks
}
