//! Errors as OpenAI's clients know them.

use axum::response::{IntoResponse, Response};
use contract::error::RequestError;
use http::{HeaderValue, StatusCode, header};
use serde_json::{Value, json};

/// What a handler ends with.
#[derive(Debug)]
pub(super) enum ApiError {
    /// Of the request itself.
    Request(RequestError),
    /// The body is larger than the bound.
    TooLarge {
        /// The bound.
        most: usize,
    },
}

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> Self {
        Self::Request(error)
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        match self {
            Self::TooLarge { most } => {
                let message = format!("the body is larger than {most} bytes");
                refusal(StatusCode::PAYLOAD_TOO_LARGE, "payload_too_large", &message)
            }
            Self::Request(error) => {
                let mut response = (status(&error), axum::Json(object(&error))).into_response();
                if let Some(retry_after_ms) = error.retry_after_ms() {
                    let seconds = retry_after_ms.div_ceil(1000).max(1);
                    let headers = response.headers_mut();
                    headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
                    headers.insert("retry-after-ms", HeaderValue::from(retry_after_ms));
                }
                response
            }
        }
    }
}

/// An error that no request made.
pub(super) fn refusal(status: StatusCode, code: &str, message: &str) -> Response {
    let error = json!({"error": {"message": message, "type": "invalid_request_error", "param": null, "code": code}});
    (status, axum::Json(error)).into_response()
}

/// The error object.
pub(super) fn object(error: &RequestError) -> Value {
    let status = status(error);
    let kind = match status.as_u16() {
        429 => "rate_limit_error",
        400..=498 => "invalid_request_error",
        _ => "server_error",
    };
    let param = match error {
        RequestError::InvalidArgument { field, .. } => Some(field.as_ref()),
        RequestError::UnknownModel { .. } => Some("model"),
        _ => None,
    };
    json!({"error": {"message": error.to_string(), "type": kind, "param": param, "code": error.code()}})
}

fn status(error: &RequestError) -> StatusCode {
    match error {
        RequestError::InvalidArgument { .. } | RequestError::PromptTooLong { .. } | RequestError::Unsupported(_) => {
            StatusCode::BAD_REQUEST
        }
        RequestError::UnknownModel { .. } => StatusCode::NOT_FOUND,
        RequestError::Overloaded { .. } | RequestError::QuotaExceeded { .. } => StatusCode::TOO_MANY_REQUESTS,
        RequestError::NoWorker { .. }
        | RequestError::WorkerLost { .. }
        | RequestError::StalePlacement(_)
        | RequestError::ShuttingDown(_) => StatusCode::SERVICE_UNAVAILABLE,
        RequestError::SlowReader(_) | RequestError::Cancelled => {
            StatusCode::from_u16(499).expect("it is between 100 and 999")
        }
        RequestError::DeadlineExceeded { .. } => StatusCode::GATEWAY_TIMEOUT,
        RequestError::Internal(_) => StatusCode::INTERNAL_SERVER_ERROR,
    }
}
