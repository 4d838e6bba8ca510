//! Many calls on one stream between a router and a worker, both ends: what a call costs is a message each way.
//!
//! A call is what `Generate` is: frames that end with a finish reason or a status. Its reader may be slow or go away
//! without holding up the others: frames that nobody reads join, up to a bound of tokens, and a reader that is dropped
//! aborts its call. When the stream ends, every call on it ends with a status.

mod client;
mod server;

use tonic::metadata::MetadataValue;
use tonic::{Code, Status};

use crate::status::ERROR_KEY;
use crate::worker::v1 as wire;

pub use client::{Frames, Line, Traffic, open};
pub use server::serve;

/// Largest message, on a stream of its own or with others: a prompt of a million tokens fits.
pub const MESSAGE_BYTES_MAX: usize = 16 << 20;

impl From<&Status> for wire::ExchangeError {
    fn from(status: &Status) -> Self {
        let error = status.metadata().get_bin(ERROR_KEY).and_then(|value| value.to_bytes().ok());
        Self {
            code: status.code().into(),
            message: status.message().to_owned(),
            error: error.map_or_else(Vec::new, Vec::from),
        }
    }
}

impl From<wire::ExchangeError> for Status {
    fn from(error: wire::ExchangeError) -> Self {
        let mut status = Status::new(Code::from(error.code), error.message);
        if !error.error.is_empty() {
            status.metadata_mut().insert_bin(ERROR_KEY, MetadataValue::from_bytes(&error.error));
        }
        status
    }
}

/// Whether a frame is its call's last.
fn is_last(frame: &wire::GenerateFrame) -> bool {
    frame.finish_reason != i32::from(wire::FinishReason::Unspecified)
}
