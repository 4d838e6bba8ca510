//! The layers around every handler: trace, panics, load shedding, body bounds, errors in the caller's protocol.

use std::any::Any;
use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, HeaderValue, StatusCode, header};
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::classify::ServerErrorsFailureClass;
use tower_http::limit::RequestBodyLimitLayer;
use tower_http::timeout::RequestBodyTimeoutLayer;
use tower_http::trace::TraceLayer;
use tracing::Span;

use super::admission::{Admission, admit, refusal_status};
use super::metrics::Metrics;
use super::opening::open;
use super::{Readiness, ServeError, Server, admin, ms};

/// What an error tells of a path that the caller chose.
const N_PATH_CHARS: usize = 256;

/// Puts a server's services and layers together.
///
/// Operators' routes are outside the bound on requests: an overloaded server still tells that it lives.
pub(super) fn build(server: Server, readiness: &Readiness, metrics: &Metrics) -> Result<Router, ServeError> {
    let config = &server.config;
    let http = server
        .http
        .layer(DefaultBodyLimit::disable())
        .layer(RequestBodyLimitLayer::new(config.body_bytes_max))
        .layer(RequestBodyTimeoutLayer::new(ms(config.read_timeout_ms)));
    let admission = Admission::new(config.n_requests_max, metrics);
    let services = server
        .grpc
        .into_axum_router()
        .reset_fallback()
        .fallback_service(http)
        .layer(from_fn_with_state(admission, admit));
    let panics = metrics.panics.clone();
    let on_panic = move |panic: Box<dyn Any + Send + 'static>| {
        panics.inc();
        let message = panic_message(panic.as_ref());
        tracing::error!(message, "a request handler panicked");
        (StatusCode::INTERNAL_SERVER_ERROR, "internal error\n").into_response()
    };
    let trace = TraceLayer::new_for_http()
        // The path and nothing of the request's content.
        .make_span_with(
            |request: &Request| tracing::debug_span!("call", method = %request.method(), path = request.uri().path()),
        )
        .on_request(())
        .on_response(|response: &Response, latency: Duration, _: &Span| {
            tracing::debug!(status = response.status().as_u16(), ?latency, "answered");
        })
        .on_failure(|class: ServerErrorsFailureClass, latency: Duration, _: &Span| {
            tracing::debug!(%class, ?latency, "failed");
        });
    Ok(services
        .merge(admin::router(readiness, metrics, &server.service_names, server.descriptors)?)
        .layer(from_fn_with_state(ms(config.read_timeout_ms), open))
        .layer(CatchPanicLayer::custom(on_panic))
        .layer(from_fn(speak_the_callers_protocol))
        .layer(trace))
}

/// Turns errors that have no gRPC status (no such method, overload, a panic) into one for gRPC callers.
async fn speak_the_callers_protocol(request: Request, next: Next) -> Response {
    let is_grpc = is_grpc(request.headers());
    let path = is_grpc.then(|| request.uri().path().chars().take(N_PATH_CHARS).collect::<String>());
    let response = next.run(request).await;
    let Some(path) = path.filter(|_| !is_grpc_response(&response)) else { return response };
    let status = match response.status() {
        StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED => {
            tonic::Status::unimplemented(format!("no method {path} here"))
        }
        StatusCode::SERVICE_UNAVAILABLE => refusal_status(),
        StatusCode::REQUEST_TIMEOUT => {
            tonic::Status::deadline_exceeded("the call's first message did not come in time")
        }
        StatusCode::PAYLOAD_TOO_LARGE => tonic::Status::resource_exhausted("the request is too large"),
        _ => tonic::Status::internal("internal error"),
    };
    status.into_http()
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
