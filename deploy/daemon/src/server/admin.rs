//! What every server answers for operators: liveness, readiness, metrics, gRPC health and reflection.

use std::pin::Pin;

use axum::Router;
use axum::extract::State;
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::{StatusCode, header};
use tokio_stream::Stream;
use tonic::service::Routes;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};
use tonic_reflection::server::Builder;

use super::admission::{Admission, admit_streams};
use super::metrics::Metrics;
use super::{Readiness, ServeError};
use crate::telemetry::metrics as exposition;

/// Health watches and reflection streams open at once; they may last as long as the server.
pub(super) const N_STREAMS_MAX: usize = 256;

/// What an error tells of a name that the caller chose.
const N_NAME_CHARS: usize = 256;

/// Whether a path is one of the operators' routes.
pub(super) fn has(path: &str) -> bool {
    matches!(path, "/livez" | "/readyz" | "/metrics") || path.starts_with("/grpc.")
}

/// Makes the operators' routes.
pub(super) fn router(
    readiness: &Readiness,
    metrics: &Metrics,
    service_names: &[&'static str],
    descriptors: Option<&'static [u8]>,
) -> Result<Router, ServeError> {
    let health = HealthOf { readiness: readiness.clone(), names: service_names.to_vec() };
    let mut grpc = Routes::new(HealthServer::new(health));
    if let Some(descriptors) = descriptors {
        grpc = grpc
            .add_service(reflection(service_names, descriptors).build_v1()?)
            .add_service(reflection(service_names, descriptors).build_v1alpha()?);
    }
    let http = Router::new()
        .route("/livez", get(async || "ok\n"))
        .route("/readyz", get(readyz))
        .route("/metrics", get(async || ([(header::CONTENT_TYPE, exposition::CONTENT_TYPE)], exposition::render())))
        .with_state(readiness.clone());
    let streams = Admission::new(N_STREAMS_MAX, metrics);
    Ok(grpc.into_axum_router().reset_fallback().layer(from_fn_with_state(streams, admit_streams)).merge(http))
}

fn reflection(service_names: &[&'static str], descriptors: &'static [u8]) -> Builder<'static> {
    let builder = Builder::configure()
        .register_encoded_file_descriptor_set(descriptors)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET);
    if service_names.is_empty() {
        return builder;
    }
    let own =
        ["grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"];
    service_names.iter().chain(&own).fold(builder, |builder, name| builder.with_service_name(*name))
}

async fn readyz(State(readiness): State<Readiness>) -> Response {
    let state = readiness.subscribe().borrow().clone();
    if state.ready {
        return "ready\n".into_response();
    }
    (StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {}\n", state.reason)).into_response()
}

/// gRPC health read from a [`Readiness`].
struct HealthOf {
    readiness: Readiness,
    names: Vec<&'static str>,
}

impl HealthOf {
    fn knows(&self, service: &str) -> bool {
        service.is_empty() || self.names.contains(&service)
    }
}

fn answer(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse { status: status.into() }
}

fn answer_ready(ready: bool) -> HealthCheckResponse {
    answer(if ready { ServingStatus::Serving } else { ServingStatus::NotServing })
}

#[tonic::async_trait]
impl Health for HealthOf {
    async fn check(
        &self,
        request: tonic::Request<HealthCheckRequest>,
    ) -> Result<tonic::Response<HealthCheckResponse>, tonic::Status> {
        let service = request.into_inner().service;
        if !self.knows(&service) {
            let service = service.chars().take(N_NAME_CHARS).collect::<String>();
            return Err(tonic::Status::not_found(format!("no service {service:?} here")));
        }
        Ok(tonic::Response::new(answer_ready(self.readiness.is_ready())))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, tonic::Status>> + Send>>;

    async fn watch(
        &self,
        request: tonic::Request<HealthCheckRequest>,
    ) -> Result<tonic::Response<Self::WatchStream>, tonic::Status> {
        let known = self.knows(&request.into_inner().service);
        let mut states = self.readiness.subscribe();
        Ok(tonic::Response::new(Box::pin(async_stream::stream! {
            let mut told = None;
            loop {
                let state = states.borrow_and_update().clone();
                let now = if known { answer_ready(state.ready) } else { answer(ServingStatus::ServiceUnknown) };
                if told.as_ref() != Some(&now) {
                    told = Some(now);
                    yield Ok(now);
                }
                // A watch does not hold up the end of the process.
                if state.draining || states.changed().await.is_err() {
                    return;
                }
            }
        })))
    }
}
