//! A worker whose n-th token is a function of n, with hooks for everything that goes wrong.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use contract::error::RequestError;
use contract::hash::BlockHash;
use contract::kv::KvDigest;
use contract::model::ModelIdentity;
use daemon::shutdown::{Shutdown, Trigger};
use daemon::task::Tasks;
use futures::stream::{BoxStream, StreamExt as _, unfold};
use proto::exchange;
use proto::status::to_status;
use proto::worker::v1::worker_server::{Worker, WorkerServer};
use proto::worker::v1::{
    DescribeRequest, DescribeResponse, DrainProgress, DrainRequest, EngineId, ExchangeFrame, ExchangeRequest,
    FinishReason, GenerateFrame, GenerateRequest, KvFrame, KvSnapshot, SampledToken, StoredBlock, TokenLogprob,
    WatchKvRequest, kv_frame::Body,
};
use tonic::{Request, Response, Status, Streaming};

/// Token at an output position; the first are "t10", "t11", ….
pub fn token_at(position: u32) -> u32 {
    10 + position % 100
}

/// What a test sees and changes.
#[derive(Default)]
pub struct State {
    /// Requests that were accepted.
    pub requests: Mutex<Vec<GenerateRequest>>,
    /// Streams that live.
    pub n_streams: AtomicUsize,
    /// Refuse requests as out of date.
    pub is_stale: AtomicBool,
    /// Refuse requests and end those that run, as a worker that leaves does.
    pub leaves: AtomicBool,
    /// Hashes of cached blocks, parents first.
    pub cached: Mutex<Vec<BlockHash>>,
    /// Stop after that many tokens and keep the stream open; 0 is never.
    pub hold_after: AtomicUsize,
    /// Send no first token as long as it is set.
    pub is_held: AtomicBool,
    /// Fail after that many tokens as a broken connection does; 0 is never.
    pub break_after: AtomicUsize,
    /// Say nothing of the cache, not even that it lives.
    pub is_silent: AtomicBool,
}

pub struct Fake {
    pub id: String,
    pub address: SocketAddr,
    pub identity: ModelIdentity,
    pub incarnation: u64,
    pub state: Arc<State>,
    stop: Trigger,
}

impl Fake {
    pub async fn start(id: &str, identity: &ModelIdentity, tasks: &Tasks) -> Self {
        let state = Arc::new(State::default());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let incarnation = daemon::random::u64();
        let engine = EngineId { worker: id.to_owned(), incarnation, data_rank: 0 };
        let (stop, shutdown) = Shutdown::pair();
        let service = Service { state: Arc::clone(&state), engine, identity: identity.clone(), stop: shutdown.clone() };
        let incoming = tonic::transport::server::TcpIncoming::from(listener).with_nodelay(Some(true));
        tasks.spawn("fake worker", async move {
            let server = tonic::transport::Server::builder().add_service(WorkerServer::new(service));
            tokio::select! {
                result = server.serve_with_incoming(incoming) => result.unwrap(),
                () = shutdown.triggered() => {}
            }
        });
        Self { id: id.to_owned(), address, identity: identity.clone(), incarnation, state, stop }
    }

    /// Ends it as a kill does.
    pub fn kill(&self) {
        self.stop.fire();
    }

    pub fn n_requests(&self) -> usize {
        self.state.requests.lock().unwrap().len()
    }
}

#[derive(Clone)]
struct Service {
    state: Arc<State>,
    engine: EngineId,
    identity: ModelIdentity,
    stop: Shutdown,
}

/// Counts a stream until it is dropped.
struct Stream(Arc<State>);

impl Drop for Stream {
    fn drop(&mut self) {
        self.0.n_streams.fetch_sub(1, Ordering::SeqCst);
    }
}

fn frame(request: &GenerateRequest, position: u32) -> GenerateFrame {
    let token = token_at(position);
    let stop = request.stop.as_ref().unwrap();
    let finish = if stop.token_ids.contains(&token) && position >= stop.min_tokens {
        FinishReason::Stop
    } else if position + 1 == stop.max_tokens {
        FinishReason::Length
    } else {
        FinishReason::Unspecified
    };
    let top = (0..request.logprobs.unwrap_or(0)).map(|i| TokenLogprob { token: token + i, logprob: -0.5 - i as f32 });
    let logprob = if request.logprobs.is_some() { -0.5 } else { f32::NAN };
    GenerateFrame {
        attempt: request.attempt,
        first_position: position,
        tokens: vec![SampledToken { token, logprob, top: top.collect() }],
        finish_reason: finish.into(),
        cached_tokens: (position == request.generated.len() as u32).then_some(position),
    }
}

fn leaving() -> Status {
    to_status(&RequestError::ShuttingDown("worker".to_owned()))
}

/// A chain of blocks on the wire.
fn stored(chain: &[BlockHash]) -> Vec<StoredBlock> {
    let parents = [None].into_iter().chain(chain.iter().copied().map(Some));
    chain.iter().zip(parents).map(|(&hash, parent)| StoredBlock::new(hash, parent)).collect()
}

type Frames = BoxStream<'static, Result<GenerateFrame, Status>>;

impl Service {
    fn begin(&self, request: Request<GenerateRequest>) -> Result<Frames, Status> {
        let request = request.into_inner();
        if self.state.is_stale.load(Ordering::SeqCst) {
            return Err(to_status(&RequestError::StalePlacement("restarted".to_owned())));
        }
        if self.state.leaves.load(Ordering::SeqCst) {
            return Err(leaving());
        }
        self.state.requests.lock().unwrap().push(request.clone());
        self.state.n_streams.fetch_add(1, Ordering::SeqCst);
        let counted = Stream(Arc::clone(&self.state));
        let hold_after = self.state.hold_after.load(Ordering::SeqCst);
        let break_after = self.state.break_after.load(Ordering::SeqCst);
        let stop = self.stop.clone();
        let first = request.generated.len() as u32;
        let frames = unfold(Some((first, counted, request, stop)), move |state| async move {
            let (position, counted, request, stop) = state?;
            while position == 0 && counted.0.is_held.load(Ordering::SeqCst) && !stop.is_triggered() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            if stop.is_triggered() || (break_after > 0 && position as usize == break_after) {
                return Some((Err(Status::unavailable("connection reset")), None));
            }
            if hold_after > 0 && position as usize == hold_after {
                while !stop.is_triggered() {
                    if counted.0.leaves.load(Ordering::SeqCst) {
                        return Some((Err(leaving()), None));
                    }
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                return Some((Err(Status::unavailable("connection reset")), None));
            }
            let frame = frame(&request, position);
            let is_last = frame.finish_reason != i32::from(FinishReason::Unspecified);
            Some((Ok(frame), (!is_last).then_some((position + 1, counted, request, stop))))
        });
        Ok(frames.boxed())
    }
}

#[tonic::async_trait]
impl Worker for Service {
    type GenerateStream = Frames;
    type ExchangeStream = BoxStream<'static, Result<ExchangeFrame, Status>>;
    type WatchKvStream = BoxStream<'static, Result<KvFrame, Status>>;
    type DrainStream = BoxStream<'static, Result<DrainProgress, Status>>;

    async fn generate(&self, request: Request<GenerateRequest>) -> Result<Response<Self::GenerateStream>, Status> {
        Ok(Response::new(self.begin(request)?))
    }

    async fn exchange(
        &self,
        request: Request<Streaming<ExchangeRequest>>,
    ) -> Result<Response<Self::ExchangeStream>, Status> {
        let (service, stop) = (self.clone(), self.stop.clone());
        let stopping = async move { stop.triggered().await };
        let frames = exchange::serve(request.into_inner(), move |request| service.begin(request), stopping);
        Ok(Response::new(frames.boxed()))
    }

    async fn watch_kv(&self, _: Request<WatchKvRequest>) -> Result<Response<Self::WatchKvStream>, Status> {
        let service = self.clone();
        let frames = unfold(0, move |n: u64| {
            let Service { state, engine, stop, .. } = service.clone();
            async move {
                let cached = |state: &State| state.cached.lock().unwrap().clone();
                let body = if n == 0 {
                    Body::Snapshot(KvSnapshot { blocks: stored(&cached(&state)), last: true })
                } else {
                    tokio::select! {
                        () = stop.triggered() => return None,
                        () = tokio::time::sleep(Duration::from_millis(200)) => {}
                    }
                    if state.is_silent.load(Ordering::SeqCst) {
                        stop.triggered().await;
                    }
                    let mut digest = KvDigest::default();
                    cached(&state).into_iter().for_each(|hash| digest.insert(hash));
                    Body::Heartbeat(digest.into())
                };
                Some((Ok(KvFrame { engine: Some(engine), sequence: 0, body: Some(body) }), n + 1))
            }
        });
        Ok(Response::new(frames.boxed()))
    }

    async fn drain(&self, _: Request<DrainRequest>) -> Result<Response<Self::DrainStream>, Status> {
        Err(Status::unimplemented("it stays"))
    }

    async fn describe(&self, _: Request<DescribeRequest>) -> Result<Response<DescribeResponse>, Status> {
        let identity = Some((&self.identity).into());
        let engines = vec![self.engine.clone()];
        Ok(Response::new(DescribeResponse { engines, identity, transfer_address: self.engine.worker.clone() }))
    }
}
