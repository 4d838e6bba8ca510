//! The OpenAI HTTP API, with vLLM's extra fields.

mod body;
mod chat;
mod completions;
mod error;
mod extras;
mod format;
mod sampling;
mod sse;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use contract::error::RequestError;
use http::{HeaderMap, StatusCode, header};
use serde_json::{Value, json};

use self::error::{ApiError, refusal};
use crate::generate::{Question, Service};

/// Header that says how long the client waits, in milliseconds; the router's own limit holds beside it.
const TIMEOUT_HEADER: &str = "x-request-timeout-ms";

/// Makes the routes.
pub(crate) fn router(service: Arc<Service>, cors: bool) -> Router {
    let router = Router::new()
        .route("/v1/completions", post(completions::serve))
        .route("/v1/chat/completions", post(chat::serve))
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model))
        .method_not_allowed_fallback(async |request: Request| {
            let message = format!("{} is not allowed on {}", request.method(), request.uri().path());
            refusal(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", &message)
        })
        .fallback(async |request: Request| {
            let message = format!("there is no {} here", request.uri().path());
            refusal(StatusCode::NOT_FOUND, "not_found", &message)
        })
        .with_state(service);
    if cors { router.layer(tower_http::cors::CorsLayer::permissive()) } else { router }
}

async fn models(State(service): State<Arc<Service>>) -> Response {
    axum::Json(json!({"object": "list", "data": [describe(&service)]})).into_response()
}

async fn model(
    State(service): State<Arc<Service>>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let Path(name) = name.map_err(|error| RequestError::invalid("model", error.body_text()))?;
    service.check_model(&name)?;
    Ok(axum::Json(describe(&service)).into_response())
}

fn describe(service: &Service) -> Value {
    json!({
        "id": service.model.name(),
        "object": "model",
        "created": service.model.created_unix_s,
        "owned_by": "tessera",
        "root": service.model.name(),
        "parent": null,
        "max_model_len": service.cluster.context_length(),
    })
}

/// Reads a whole body within the bound.
async fn read(service: &Service, headers: &HeaderMap, body: Body) -> Result<axum::body::Bytes, ApiError> {
    let most = service.limits.body_bytes_max;
    let stated = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if stated.is_some_and(|length| length > most as u64) {
        return Err(ApiError::TooLarge { most });
    }
    axum::body::to_bytes(body, most).await.map_err(|error| {
        let is_bound = std::error::Error::source(&error)
            .is_some_and(|source| source.to_string().contains("length limit exceeded"));
        if is_bound {
            ApiError::TooLarge { most }
        } else {
            ApiError::from(RequestError::invalid("body", format!("could not be read: {error}")))
        }
    })
}

/// What a reply tells beside the answer itself.
struct Reply {
    /// `cmpl` or `chatcmpl`.
    prefix: &'static str,
    /// Of an object that is no part of a stream.
    object: &'static str,
    /// Of a part of a stream.
    chunk_object: &'static str,
    created_unix_s: u64,
    form: format::Form,
    include_usage: bool,
}

async fn reply(
    service: Arc<Service>,
    headers: &HeaderMap,
    mut question: Question,
    reply: Reply,
) -> Result<Response, ApiError> {
    question.options.timeout = timeout(headers)?;
    let trace = super::span::trace(&question, service.model.name(), headers);
    let is_stream = question.is_stream;
    let n_choices = match &question.input {
        crate::generate::Input::Prompts(prompts) => prompts.len(),
        crate::generate::Input::Chat(..) => 1,
    }
    .saturating_mul(question.options.n as usize);
    let answer = service.ask(question, trace).await?;
    let format = format::Format::new(&service, answer.id, reply);
    if is_stream {
        return Ok(sse::respond(format, answer.events, n_choices).await?);
    }
    let whole = format::collect(format, answer.events, n_choices).await?;
    Ok(([(header::CONTENT_TYPE, "application/json")], whole).into_response())
}

/// Reads how long the client waits, if it says.
fn timeout(headers: &HeaderMap) -> Result<Option<Duration>, RequestError> {
    let Some(value) = headers.get(TIMEOUT_HEADER) else { return Ok(None) };
    let ms = value.to_str().ok().and_then(|text| text.trim().parse::<u64>().ok()).filter(|&ms| ms > 0);
    let wrong =
        || RequestError::invalid(TIMEOUT_HEADER, format!("{value:?} is no time; give milliseconds, at least 1"));
    ms.map(|ms| Some(Duration::from_millis(ms))).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clients_deadline_is_whole_milliseconds() {
        let read = |value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(TIMEOUT_HEADER, value.parse().unwrap());
            timeout(&headers)
        };
        assert_eq!(timeout(&HeaderMap::new()), Ok(None));
        assert_eq!(read("1500"), Ok(Some(Duration::from_millis(1_500))));
        assert_eq!(read("18446744073709551615"), Ok(Some(Duration::from_millis(u64::MAX))));
        for wrong in ["", "0", "-1", "1.5", "5s", "18446744073709551616"] {
            let error = read(wrong).unwrap_err();
            assert!(
                matches!(&error, RequestError::InvalidArgument { field, .. } if field == TIMEOUT_HEADER),
                "{wrong}"
            );
            assert!(error.to_string().contains(&format!("{wrong:?} is no time")), "{error}");
        }
    }
}
