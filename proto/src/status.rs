//! The one place where errors become gRPC statuses, and statuses errors again: nothing is lost between processes.
//!
//! The whole error travels as JSON in the binary metadata entry `tessera-error-bin`; other clients see code and message.
//! Long texts are cut: peers take no more than 16 KiB of headers, and texts may come from a client.

use std::borrow::Cow;

use contract::error::RequestError;
use serde::{Deserialize, Serialize};
use tonic::metadata::MetadataValue;
use tonic::{Code, Status};

use crate::convert::WireError;

/// Metadata entry that carries the whole error.
pub const ERROR_KEY: &str = "tessera-error-bin";
/// Metadata entry that tells any client in milliseconds when to come back.
pub const RETRY_AFTER_KEY: &str = "retry-after-ms";

/// Longest text of an error and longest message, in bytes; a text's are counted as JSON writes it.
///
/// Percent-encoding makes a message three times as long at most, base64 makes JSON a third longer: 6 KiB in all.
const TEXT_BYTES_MAX: usize = 1024;
/// What a text that was cut ends with.
const CUT: &str = "…";

/// An error in the form it travels in.
#[derive(Serialize, Deserialize)]
#[serde(tag = "code", rename_all = "snake_case")]
enum Wire<'a> {
    InvalidArgument {
        field: Cow<'a, str>,
        message: Cow<'a, str>,
    },
    UnknownModel {
        name: Cow<'a, str>,
        served: Cow<'a, [String]>,
    },
    PromptTooLong {
        n_tokens: u64,
        #[serde(default)]
        at_least: bool,
        limit: u64,
    },
    Unsupported {
        what: Cow<'a, str>,
    },
    Overloaded {
        reason: Cow<'a, str>,
        retry_after_ms: u64,
    },
    QuotaExceeded {
        tenant: Cow<'a, str>,
        quota: Cow<'a, str>,
        retry_after_ms: u64,
    },
    NoWorker {
        model: Cow<'a, str>,
    },
    WorkerLost {
        worker: Cow<'a, str>,
        n_tokens: u32,
        reason: Cow<'a, str>,
    },
    StalePlacement {
        reason: Cow<'a, str>,
    },
    SlowReader {
        n_tokens: u32,
    },
    DeadlineExceeded {
        n_tokens: u32,
    },
    Cancelled,
    ShuttingDown {
        who: Cow<'a, str>,
    },
    Internal {
        message: Cow<'a, str>,
    },
}

/// Makes the status of an error; texts of more than a kilobyte are cut, served names beyond it left out.
pub fn to_status(error: &RequestError) -> Status {
    let wire = to_wire(error);
    let message = from_wire(to_wire(error)).to_string();
    let mut status = Status::new(code(error), cut(&message, char::len_utf8).into_owned());
    if let Ok(json) = serde_json::to_vec(&wire) {
        status.metadata_mut().insert_bin(ERROR_KEY, MetadataValue::from_bytes(&json));
    }
    if let Some(retry_after_ms) = error.retry_after_ms() {
        status.metadata_mut().insert(RETRY_AFTER_KEY, MetadataValue::from(retry_after_ms));
    }
    status
}

/// The whole error as bytes, as the metadata entry carries it: for connections that are no gRPC.
pub fn to_bytes(error: &RequestError) -> Vec<u8> {
    serde_json::to_vec(&to_wire(error)).unwrap_or_default()
}

/// Reads an error back; bytes that `to_bytes` did not make are an internal error of the peer.
pub fn from_bytes(bytes: &[u8]) -> RequestError {
    let parsed = serde_json::from_slice::<Wire<'_>>(bytes).map(from_wire);
    parsed.unwrap_or_else(|error| RequestError::Internal(format!("the peer's error cannot be read: {error}")))
}

/// Reads a status back; one that did not come from `to_status` becomes the variant that its code is nearest to.
pub fn from_status(status: &Status) -> RequestError {
    let carried = status.metadata().get_bin(ERROR_KEY).and_then(|value| value.to_bytes().ok());
    let parsed = carried.and_then(|bytes| serde_json::from_slice::<Wire<'_>>(&bytes).ok().map(from_wire));
    parsed.unwrap_or_else(|| foreign(status))
}

impl From<WireError> for Status {
    fn from(error: WireError) -> Self {
        to_status(&RequestError::invalid("message", error.to_string()))
    }
}

fn code(error: &RequestError) -> Code {
    match error {
        RequestError::InvalidArgument { .. } | RequestError::PromptTooLong { .. } => Code::InvalidArgument,
        RequestError::UnknownModel { .. } => Code::NotFound,
        RequestError::Unsupported(_) => Code::Unimplemented,
        RequestError::Overloaded { .. } | RequestError::QuotaExceeded { .. } | RequestError::SlowReader(_) => {
            Code::ResourceExhausted
        }
        RequestError::NoWorker { .. } | RequestError::WorkerLost { .. } | RequestError::ShuttingDown(_) => {
            Code::Unavailable
        }
        RequestError::StalePlacement(_) => Code::FailedPrecondition,
        RequestError::DeadlineExceeded { .. } => Code::DeadlineExceeded,
        RequestError::Cancelled => Code::Cancelled,
        RequestError::Internal(_) => Code::Internal,
    }
}

fn to_wire(error: &RequestError) -> Wire<'_> {
    match error {
        RequestError::InvalidArgument { field, message } => {
            Wire::InvalidArgument { field: text(field), message: text(message) }
        }
        RequestError::UnknownModel { name, served } => Wire::UnknownModel { name: text(name), served: names(served) },
        &RequestError::PromptTooLong { n_tokens, at_least, limit } => Wire::PromptTooLong { n_tokens, at_least, limit },
        RequestError::Unsupported(what) => Wire::Unsupported { what: text(what) },
        RequestError::Overloaded { reason, retry_after_ms } => {
            Wire::Overloaded { reason: text(reason), retry_after_ms: *retry_after_ms }
        }
        RequestError::QuotaExceeded { tenant, quota, retry_after_ms } => {
            Wire::QuotaExceeded { tenant: text(tenant), quota: text(quota), retry_after_ms: *retry_after_ms }
        }
        RequestError::NoWorker { model } => Wire::NoWorker { model: text(model) },
        RequestError::WorkerLost { worker, n_tokens, reason } => {
            Wire::WorkerLost { worker: text(worker), n_tokens: *n_tokens, reason: text(reason) }
        }
        RequestError::StalePlacement(reason) => Wire::StalePlacement { reason: text(reason) },
        RequestError::SlowReader(n_tokens) => Wire::SlowReader { n_tokens: *n_tokens },
        RequestError::DeadlineExceeded { n_tokens } => Wire::DeadlineExceeded { n_tokens: *n_tokens },
        RequestError::Cancelled => Wire::Cancelled,
        RequestError::ShuttingDown(who) => Wire::ShuttingDown { who: text(who) },
        RequestError::Internal(message) => Wire::Internal { message: text(message) },
    }
}

/// Cuts a text so that its JSON is short.
fn text(text: &str) -> Cow<'_, str> {
    cut(text, json_len)
}

/// Keeps the first names whose JSON is short together.
fn names(names: &[String]) -> Cow<'_, [String]> {
    let mut n_bytes = 0;
    let fits = |name: &&String| {
        n_bytes += name.chars().map(json_len).sum::<usize>() + r#""","#.len();
        n_bytes <= TEXT_BYTES_MAX
    };
    let n_fit = names.iter().take_while(fits).count();
    Cow::Borrowed(&names[..n_fit])
}

/// Bytes that JSON writes for a character.
fn json_len(character: char) -> usize {
    match character {
        '"' | '\\' => 2,
        '\0'..='\x1f' => r"\u0000".len(),
        other => other.len_utf8(),
    }
}

/// Cuts a text between two characters where it grows beyond the bound.
fn cut(text: &str, len: impl Fn(char) -> usize) -> Cow<'_, str> {
    let (mut n_bytes, mut keep) = (0, 0);
    for (index, character) in text.char_indices() {
        n_bytes += len(character);
        if n_bytes > TEXT_BYTES_MAX {
            return Cow::Owned(format!("{}{CUT}", &text[..keep]));
        }
        // What is kept leaves room for the mark.
        if n_bytes + CUT.len() <= TEXT_BYTES_MAX {
            keep = index + character.len_utf8();
        }
    }
    Cow::Borrowed(text)
}

fn from_wire(error: Wire<'_>) -> RequestError {
    match error {
        Wire::InvalidArgument { field, message } => {
            RequestError::InvalidArgument { field: field.into_owned().into(), message: message.into_owned() }
        }
        Wire::UnknownModel { name, served } => {
            RequestError::UnknownModel { name: name.into_owned(), served: served.into_owned() }
        }
        Wire::PromptTooLong { n_tokens, at_least, limit } => RequestError::PromptTooLong { n_tokens, at_least, limit },
        Wire::Unsupported { what } => RequestError::Unsupported(what.into_owned()),
        Wire::Overloaded { reason, retry_after_ms } => {
            RequestError::Overloaded { reason: reason.into_owned(), retry_after_ms }
        }
        Wire::QuotaExceeded { tenant, quota, retry_after_ms } => {
            RequestError::QuotaExceeded { tenant: tenant.into_owned(), quota: quota.into_owned(), retry_after_ms }
        }
        Wire::NoWorker { model } => RequestError::NoWorker { model: model.into_owned() },
        Wire::WorkerLost { worker, n_tokens, reason } => {
            RequestError::WorkerLost { worker: worker.into_owned(), n_tokens, reason: reason.into_owned() }
        }
        Wire::StalePlacement { reason } => RequestError::StalePlacement(reason.into_owned()),
        Wire::SlowReader { n_tokens } => RequestError::SlowReader(n_tokens),
        Wire::DeadlineExceeded { n_tokens } => RequestError::DeadlineExceeded { n_tokens },
        Wire::Cancelled => RequestError::Cancelled,
        Wire::ShuttingDown { who } => RequestError::ShuttingDown(who.into_owned()),
        Wire::Internal { message } => RequestError::Internal(message.into_owned()),
    }
}

fn foreign(status: &Status) -> RequestError {
    let message = status.message().to_owned();
    let retry_after = status.metadata().get(RETRY_AFTER_KEY).and_then(|value| value.to_str().ok()?.parse().ok());
    match status.code() {
        Code::InvalidArgument | Code::OutOfRange => RequestError::InvalidArgument { field: "request".into(), message },
        Code::NotFound => RequestError::UnknownModel { name: message, served: Vec::new() },
        Code::Unimplemented => RequestError::Unsupported(message),
        Code::ResourceExhausted => {
            RequestError::Overloaded { reason: message, retry_after_ms: retry_after.unwrap_or(1000) }
        }
        Code::FailedPrecondition | Code::Aborted => RequestError::StalePlacement(message),
        Code::DeadlineExceeded => RequestError::DeadlineExceeded { n_tokens: 0 },
        Code::Cancelled => RequestError::Cancelled,
        Code::Unavailable => RequestError::WorkerLost { worker: String::new(), n_tokens: 0, reason: message },
        code => RequestError::Internal(format!("{code:?}: {message}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_survives_a_status() {
        let errors = [
            RequestError::invalid("temperature", "-1 is out of range"),
            RequestError::UnknownModel { name: "x".into(), served: vec!["a".into(), "b".into()] },
            RequestError::PromptTooLong { n_tokens: 9, at_least: true, limit: 4 },
            RequestError::Unsupported("adapter".into()),
            RequestError::Overloaded { reason: "queue".into(), retry_after_ms: 250 },
            RequestError::QuotaExceeded {
                tenant: "t".into(),
                quota: "6 requests per minute".into(),
                retry_after_ms: 9,
            },
            RequestError::NoWorker { model: "m".into() },
            RequestError::WorkerLost { worker: "w".into(), n_tokens: 3, reason: "reset".into() },
            RequestError::StalePlacement("incarnation".into()),
            RequestError::SlowReader(7),
            RequestError::DeadlineExceeded { n_tokens: 2 },
            RequestError::Cancelled,
            RequestError::ShuttingDown("worker w".into()),
            RequestError::Internal("昇腾".into()),
        ];
        for error in errors {
            let status = to_status(&error);
            assert_eq!(status.message(), error.to_string());
            assert_eq!(from_status(&status), error);
            assert_eq!(from_bytes(&to_bytes(&error)), error);
        }
        assert!(matches!(from_bytes(b"no error"), RequestError::Internal(_)));
    }

    #[test]
    fn a_foreign_status_keeps_its_message() {
        let error = from_status(&Status::unavailable("connection refused"));
        assert!(error.to_string().contains("connection refused"), "{error}");
        assert_eq!(from_status(&Status::deadline_exceeded("x")), RequestError::DeadlineExceeded { n_tokens: 0 });
    }

    #[test]
    fn a_refusal_tells_any_client_when_to_come_back() {
        let errors = [
            RequestError::Overloaded { reason: "queue".into(), retry_after_ms: 250 },
            RequestError::QuotaExceeded { tenant: "t".into(), quota: "6 at once".into(), retry_after_ms: 250 },
        ];
        for error in errors {
            let status = to_status(&error);
            assert_eq!(status.code(), Code::ResourceExhausted);
            assert_eq!(status.metadata().get(RETRY_AFTER_KEY).and_then(|v| v.to_str().ok()), Some("250"));
        }
    }

    #[test]
    fn a_foreign_refusal_keeps_when_to_come_back() {
        let mut status = Status::resource_exhausted("full");
        let full = |retry_after_ms| RequestError::Overloaded { reason: "full".into(), retry_after_ms };
        assert_eq!(from_status(&status), full(1000));
        status.metadata_mut().insert(RETRY_AFTER_KEY, MetadataValue::from_static("250"));
        assert_eq!(from_status(&status), full(250));
        status.metadata_mut().insert(RETRY_AFTER_KEY, MetadataValue::from_static("soon"));
        assert_eq!(from_status(&status), full(1000));
    }

    #[test]
    fn hostile_texts_are_cut_and_the_error_stays_typed() {
        let endless = |piece: &str| piece.repeat(6_000);
        for piece in ["x", "\0", "\"", "\u{7f}", "é", "昇腾", "🦀", "x🦀", " %"] {
            let long = endless(piece);
            let errors = [
                RequestError::invalid(long.clone(), long.clone()),
                RequestError::UnknownModel { name: long.clone(), served: vec![long.clone(); 3] },
                RequestError::UnknownModel { name: long.clone(), served: vec![piece.repeat(20); 1_000] },
                RequestError::Unsupported(long.clone()),
                RequestError::Overloaded { reason: long.clone(), retry_after_ms: u64::MAX },
                RequestError::QuotaExceeded { tenant: long.clone(), quota: long.clone(), retry_after_ms: u64::MAX },
                RequestError::NoWorker { model: long.clone() },
                RequestError::WorkerLost { worker: long.clone(), n_tokens: 3, reason: long.clone() },
                RequestError::StalePlacement(long.clone()),
                RequestError::ShuttingDown(long.clone()),
                RequestError::Internal(long.clone()),
            ];
            for error in errors {
                let response = to_status(&error).into_http::<()>();
                let list = response.headers().iter().map(|(name, value)| name.as_str().len() + value.len() + 32);
                let n_bytes = list.sum::<usize>();
                assert!(n_bytes < 8 << 10, "{piece:?} {}: {n_bytes}", error.code());
                let received = Status::from_header_map(response.headers()).unwrap();
                let read = from_status(&received);
                assert_eq!(read.code(), error.code());
                assert!(received.message().ends_with(CUT) || received.message().len() <= TEXT_BYTES_MAX);
                assert_eq!(from_status(&to_status(&read)), read);
            }
        }
    }

    #[test]
    fn a_text_is_cut_between_characters_and_only_beyond_the_bound() {
        let fits = "x".repeat(TEXT_BYTES_MAX);
        assert_eq!(text(&fits), fits);
        assert_eq!(text(&format!("{fits}y")), format!("{}{CUT}", "x".repeat(TEXT_BYTES_MAX - CUT.len())));
        assert_eq!(text(&"🦀".repeat(257)), format!("{}{CUT}", "🦀".repeat(255)));
    }
}
