//! The worker's gRPC service: wire in, engine events; frames out, wire.

mod drain;
mod generate;
mod kv;

use std::pin::Pin;
use std::time::Duration;

use contract::error::RequestError;
use contract::ids::{EngineId, Incarnation};
use contract::model::ModelIdentity;
use contract::request::GenerateRequest;
use daemon::shutdown::Shutdown;
use futures::Stream;
use proto::exchange::{self, MESSAGE_BYTES_MAX};
use proto::status::to_status;
use proto::worker::v1 as wire;
use proto::worker::v1::worker_server::{Worker, WorkerServer};
use tonic::service::Routes;
use tonic::{Request, Response, Status, Streaming};

use crate::departure::Departure;
use crate::engine_loop::EngineHandle;

/// Name under which reflection and health know the service.
pub(crate) const NAME: &str = "tessera.worker.v1.Worker";
type Answer<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Serves one engine.
#[derive(Clone, Debug)]
pub(crate) struct Service {
    pub(crate) engine: EngineHandle,
    pub(crate) id: EngineId,
    pub(crate) identity: ModelIdentity,
    /// Where it listens for transfers; empty where it takes no part in them.
    pub(crate) transfer_address: String,
    /// Longest silence of a KV watch.
    pub(crate) heartbeat: Duration,
    /// Blocks in one part of a KV snapshot.
    pub(crate) snapshot_blocks_max: usize,
    /// Lets the worker leave.
    pub(crate) departure: Departure,
    /// What requests have to end by themselves when whoever sends the worker away does not say.
    pub(crate) grace: Duration,
    /// Ends KV watches, and exchanges on which no call runs, once the worker lends no more.
    pub(crate) shutdown: Shutdown,
}

/// Routes of the service.
pub(crate) fn routes(service: Service) -> Routes {
    Routes::new(WorkerServer::new(service).max_decoding_message_size(MESSAGE_BYTES_MAX))
}

#[tonic::async_trait]
impl Worker for Service {
    type GenerateStream = Answer<wire::GenerateFrame>;
    type ExchangeStream = Answer<wire::ExchangeFrame>;
    type WatchKvStream = Answer<wire::KvFrame>;
    type DrainStream = Answer<wire::DrainProgress>;

    async fn generate(
        &self,
        request: Request<wire::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        Ok(Response::new(Box::pin(self.begin(request)?)))
    }

    async fn exchange(
        &self,
        request: Request<Streaming<wire::ExchangeRequest>>,
    ) -> Result<Response<Self::ExchangeStream>, Status> {
        let (service, shutdown) = (self.clone(), self.shutdown.clone());
        let stopping = async move { shutdown.triggered().await };
        let frames = exchange::serve(request.into_inner(), move |request| service.begin(request), stopping);
        Ok(Response::new(Box::pin(frames)))
    }

    async fn watch_kv(&self, request: Request<wire::WatchKvRequest>) -> Result<Response<Self::WatchKvStream>, Status> {
        let theirs = request.into_inner().identity;
        let theirs = theirs.ok_or_else(|| Status::from(proto::WireError::Missing("identity")))?;
        let theirs = ModelIdentity::try_from(theirs)?;
        self.identity
            .check(&theirs, "the watcher")
            .map_err(|mismatch| to_status(&RequestError::StalePlacement(mismatch.to_string())))?;
        let view = self.engine.watch_kv().await.map_err(|error| to_status(&error))?;
        Ok(Response::new(Box::pin(kv::frames(self.clone(), view))))
    }

    async fn drain(&self, request: Request<wire::DrainRequest>) -> Result<Response<Self::DrainStream>, Status> {
        let wire::DrainRequest { grace_ms, incarnation } = request.into_inner();
        if let Some(meant) = incarnation.map(Incarnation).filter(|meant| *meant != self.id.incarnation) {
            let stale = format!("a life {meant} is to leave, this is {}", self.id);
            return Err(to_status(&RequestError::StalePlacement(stale)));
        }
        let grace = grace_ms.map_or(self.grace, Duration::from_millis);
        tracing::info!(grace_ms = grace.as_millis(), "asked to leave");
        self.departure.wish(grace);
        Ok(Response::new(Box::pin(drain::progress(self.engine.occupancy()))))
    }

    async fn describe(&self, _: Request<wire::DescribeRequest>) -> Result<Response<wire::DescribeResponse>, Status> {
        let engines = vec![(&self.id).into()];
        Ok(Response::new(wire::DescribeResponse {
            engines,
            identity: Some((&self.identity).into()),
            transfer_address: self.transfer_address.clone(),
        }))
    }
}

impl Service {
    /// Gives a request to the engine; its frames come as they are there.
    fn begin(
        &self,
        request: Request<wire::GenerateRequest>,
    ) -> Result<impl Stream<Item = Result<wire::GenerateFrame, Status>> + Send + use<>, Status> {
        let (metadata, _, message) = request.into_parts();
        let (request, engine) = message.try_into()?;
        self.check(&request, &engine).map_err(|error| to_status(&error))?;
        let observed = generate::Observed::new(&request, &self.id, &metadata);
        let reader = self.engine.submit(request).map_err(|error| to_status(&error))?;
        Ok(observed.frames(reader, self.engine.clone()))
    }

    /// Checks that the request is meant for this life of this engine and can be served.
    fn check(&self, request: &GenerateRequest, engine: &EngineId) -> Result<(), RequestError> {
        if *engine != self.id {
            return Err(RequestError::StalePlacement(format!("placed on {engine}, this is {}", self.id)));
        }
        if request.model != self.identity.name {
            let served = vec![self.identity.name.to_string()];
            return Err(RequestError::UnknownModel { name: request.model.to_string(), served });
        }
        request.validate(self.identity.vocab_size, self.identity.context_length)
    }
}
