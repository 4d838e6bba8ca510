//! What is around every handler: trace, panics, load shedding, body bounds, errors in the caller's protocol.

use std::any::Any;
use std::convert::Infallible;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{DefaultBodyLimit, Request};
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use hyper::body::Incoming;
use prometheus_client::metrics::counter::Counter;
use tower::{Service as _, ServiceBuilder};
use tower_http::limit::RequestBodyLimitLayer;
use tower_http::timeout::RequestBodyTimeoutLayer;
use tracing::Instrument as _;

use super::admission::{Admission, hold, refusal_status, refuse};
use super::metrics::Metrics;
use super::opening::open;
use super::{Readiness, ServeError, Server, admin, ms};
use crate::clock;

/// What an error tells of a path that the caller chose.
const N_PATH_CHARS: usize = 256;

/// Answers a server's requests; clones share all.
///
/// What every request passes is one future here and not a layer of the router each, which would be a box each.
#[derive(Clone)]
pub(super) struct Stack(Arc<Shared>);

struct Shared {
    services: Router,
    admin: Router,
    admission: Admission,
    patience: Duration,
    panics: Counter,
}

impl Stack {
    /// Puts a server's services together.
    pub(super) fn new(server: Server, readiness: &Readiness, metrics: &Metrics) -> Result<Self, ServeError> {
        let config = &server.config;
        let admission = Admission::new(config.n_requests_max, metrics);
        let patience = ms(config.read_timeout_ms);
        let layers = ServiceBuilder::new()
            .layer(DefaultBodyLimit::disable())
            .layer(RequestBodyLimitLayer::new(config.body_bytes_max))
            .layer(RequestBodyTimeoutLayer::new(patience));
        let http = server.http.layer(layers);
        let services = match server.grpc {
            None => http,
            Some(grpc) => grpc.into_axum_router().reset_fallback().fallback_service(http),
        };
        let admin = admin::router(readiness, metrics, &server.service_names, server.descriptors)?;
        Ok(Self(Arc::new(Shared { services, admin, admission, patience, panics: metrics.panics.clone() })))
    }
}

impl hyper::service::Service<Request<Incoming>> for Stack {
    type Response = Response;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let stack = Arc::clone(&self.0);
        // The path and nothing of the request's content.
        let span = tracing::debug_span!("call", method = %request.method(), path = request.uri().path());
        let answer = async move {
            let began = clock::now();
            let response = stack.answer(request.map(Body::new)).await;
            tracing::debug!(status = response.status().as_u16(), latency = ?clock::now() - began, "answered");
            Ok(response)
        };
        Box::pin(answer.instrument(span))
    }
}

impl Shared {
    /// Turns errors that have no gRPC status (no such method, overload, a panic) into one for gRPC callers.
    async fn answer(&self, request: Request) -> Response {
        let uri = is_grpc(request.headers()).then(|| request.uri().clone());
        let response = self.without_panic(request).await;
        match uri.filter(|_| !is_grpc_response(&response)) {
            Some(uri) => in_grpc(response.status(), &uri).into_http(),
            None => response,
        }
    }

    /// Answers even when the handler panics.
    async fn without_panic(&self, request: Request) -> Response {
        let mut routed = pin!(self.route(request));
        poll_fn(|context| match catch_unwind(AssertUnwindSafe(|| routed.as_mut().poll(context))) {
            Ok(polled) => polled,
            Err(panic) => {
                self.panics.inc();
                let message = panic_message(panic.as_ref());
                tracing::error!(message, "a request handler panicked");
                Poll::Ready((StatusCode::INTERNAL_SERVER_ERROR, "internal error\n").into_response())
            }
        })
        .await
    }

    /// Operators' routes are outside the bound on requests: an overloaded server still tells that it lives.
    async fn route(&self, request: Request) -> Response {
        let request = match open(request, self.patience).await {
            Ok(request) => request,
            Err(late) => return late,
        };
        let Ok(response) = if admin::has(request.uri().path()) {
            self.admin.clone().call(request).await
        } else {
            let Some(place) = self.admission.counted_place() else { return refuse() };
            self.services.clone().call(request).await.map(|response| hold(response, place))
        };
        response
    }
}

/// The status that tells a gRPC caller what an answer without one would have told.
fn in_grpc(status: StatusCode, uri: &Uri) -> tonic::Status {
    match status {
        StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED => {
            let path: String = uri.path().chars().take(N_PATH_CHARS).collect();
            tonic::Status::unimplemented(format!("no method {path} here"))
        }
        StatusCode::SERVICE_UNAVAILABLE => refusal_status(),
        StatusCode::REQUEST_TIMEOUT => {
            tonic::Status::deadline_exceeded("the call's first message did not come in time")
        }
        StatusCode::PAYLOAD_TOO_LARGE => tonic::Status::resource_exhausted("the request is too large"),
        _ => tonic::Status::internal("internal error"),
    }
}

fn is_grpc(headers: &HeaderMap) -> bool {
    headers.get(header::CONTENT_TYPE).is_some_and(|kind: &HeaderValue| kind.as_bytes().starts_with(b"application/grpc"))
}

fn is_grpc_response(response: &Response) -> bool {
    is_grpc(response.headers()) || response.headers().contains_key("grpc-status")
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&'static str>().copied()).unwrap_or("no message")
}
