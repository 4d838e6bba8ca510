//! A bounded number of requests runs at once; the others are told to come back.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::{StatusCode, header};
use hyper::body::{Frame, SizeHint};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::metrics::{Counted, Metrics};

/// When a refused peer may come back, in seconds.
const RETRY_AFTER_SECONDS: u64 = 1;

/// Why a request is refused.
const REASON: &str = "too many requests run at once; try again";

/// Metadata entry that tells a gRPC client in milliseconds when to come back.
const RETRY_AFTER_KEY: &str = "retry-after-ms";

/// Places for requests.
#[derive(Clone)]
pub(super) struct Admission {
    places: Arc<Semaphore>,
    metrics: Metrics,
}

impl Admission {
    /// Makes `n_max` places; more than a semaphore holds are as good as endless.
    pub(super) fn new(n_max: usize, metrics: &Metrics) -> Self {
        let places = Arc::new(Semaphore::new(n_max.min(Semaphore::MAX_PERMITS)));
        Self { places, metrics: metrics.clone() }
    }

    /// Takes a place, if there is one.
    pub(super) fn place(&self) -> Option<OwnedSemaphorePermit> {
        let permit = Arc::clone(&self.places).try_acquire_owned().ok();
        if permit.is_none() {
            self.metrics.refused_requests.inc();
        }
        permit
    }

    /// Takes a place that counts among the requests that run until it is dropped.
    pub(super) fn counted_place(&self) -> Option<(OwnedSemaphorePermit, Counted)> {
        Some((self.place()?, Counted::new(&self.metrics.requests)))
    }
}

/// Makes the answer to a request for which there is no place.
pub(super) fn refuse() -> Response {
    let retry = [(header::RETRY_AFTER, RETRY_AFTER_SECONDS.to_string())];
    (StatusCode::SERVICE_UNAVAILABLE, retry, format!("{REASON}\n")).into_response()
}

/// Lets `held` live until the response's last byte.
pub(super) fn hold<T: Send + Unpin + 'static>(response: Response, held: T) -> Response {
    response.map(|body| Body::new(Held { body, _held: held }))
}

/// Lets a bounded number of operators' endless streams in; other calls of theirs pass.
pub(super) async fn admit_streams(State(admission): State<Admission>, request: Request, next: Next) -> Response {
    let path = request.uri().path();
    if !(path.ends_with("/Watch") || path.ends_with("/ServerReflectionInfo")) {
        return next.run(request).await;
    }
    match admission.place() {
        Some(place) => hold(next.run(request).await, place),
        None => refuse(),
    }
}

/// Makes the refusal's status: one that a caller does not take for a lost server.
pub(super) fn refusal_status() -> tonic::Status {
    let mut status = tonic::Status::resource_exhausted(REASON);
    status.metadata_mut().insert(RETRY_AFTER_KEY, (RETRY_AFTER_SECONDS * 1000).into());
    status
}

/// A response body that holds its request's place until it ends.
struct Held<T> {
    body: Body,
    _held: T,
}

impl<T: Unpin> hyper::body::Body for Held<T> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
