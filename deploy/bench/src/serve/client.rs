//! One way to ask, whatever the protocol.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use bytes::Bytes;
use http_body_util::Full;

use super::ServeError;
use super::grpc::{GrpcClient, GrpcRequest};
use super::http::HttpClient;
use super::options::{ServeOptions, Target};
use super::record::{Failure, Timeline};
use super::workload::Ask;

/// Asks one target.
pub(crate) enum Client {
    Http(HttpClient),
    Grpc(Box<GrpcClient>),
}

/// A request as its protocol has it.
pub(crate) enum Written {
    Http(http::Request<Full<Bytes>>),
    Grpc(GrpcRequest),
}

impl Client {
    /// Gets ready to ask what `options` name.
    pub(crate) async fn new(options: &ServeOptions) -> Result<Self, ServeError> {
        let (model, ignore_eos) = (options.model.as_deref(), options.lengths.ignore_eos);
        Ok(match &options.target {
            Target::Http { url, api_key } => {
                Self::Http(HttpClient::new(url, api_key.as_deref(), model, ignore_eos).await?)
            }
            Target::Grpc(address) => Self::Grpc(Box::new(GrpcClient::new(address, model, ignore_eos).await?)),
        })
    }

    /// Name of the model that is asked for.
    pub(crate) fn model(&self) -> &str {
        match self {
            Self::Http(client) => client.model(),
            Self::Grpc(client) => client.model(),
        }
    }

    pub(crate) fn write(&self, ask: Ask) -> Written {
        match self {
            Self::Http(client) => Written::Http(client.write(&ask)),
            Self::Grpc(client) => Written::Grpc(client.write(ask)),
        }
    }

    /// Sends `written` and reads the answer to its end.
    pub(crate) async fn run(&self, written: Written, timeline: &mut Timeline, live: &Live) -> Result<(), Failure> {
        match (self, written) {
            (Self::Http(client), Written::Http(request)) => client.run(request, timeline, live).await,
            (Self::Grpc(client), Written::Grpc(request)) => client.run(request, timeline, live).await,
            (Self::Http(_), Written::Grpc(_)) | (Self::Grpc(_), Written::Http(_)) => {
                Err(Failure::Malformed("a request written for another protocol".to_owned()))
            }
        }
    }
}

/// Counts while requests run, for the progress bar.
#[derive(Debug, Default)]
pub(crate) struct Live {
    n_parts: AtomicU64,
    n_requests: AtomicU64,
    n_failed: AtomicU64,
}

impl Live {
    /// A part with tokens came.
    pub(crate) fn part(&self) {
        self.n_parts.fetch_add(1, Ordering::Relaxed);
    }

    /// A request is over.
    pub(crate) fn over(&self, failed: bool) {
        self.n_requests.fetch_add(1, Ordering::Relaxed);
        self.n_failed.fetch_add(failed.into(), Ordering::Relaxed);
    }

    /// Parts, requests over, and those of them that failed.
    pub(crate) fn counts(&self) -> [u64; 3] {
        [&self.n_parts, &self.n_requests, &self.n_failed].map(|count| count.load(Ordering::Relaxed))
    }
}

/// Connections that wait for a request; there are never more than there were requests at once.
#[derive(Debug)]
pub(crate) struct Pool<T>(Mutex<Vec<T>>);

impl<T> Default for Pool<T> {
    fn default() -> Self {
        Self(Mutex::new(Vec::new()))
    }
}

impl<T> Pool<T> {
    /// The one that was used last.
    pub(crate) fn take(&self) -> Option<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    pub(crate) fn put(&self, connection: T) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
    }
}
