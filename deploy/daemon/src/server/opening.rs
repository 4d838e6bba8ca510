//! A request's body begins before the request takes a place, and a call's first message comes without long pauses.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use hyper::body::{Body as _, Frame};
use tokio::time::{Sleep, sleep, timeout};

type Piece = Result<Frame<Bytes>, axum::Error>;

/// Waits for the first bytes of a body that was announced, for `patience` at most.
///
/// Every body counts, whatever its content type says: gRPC methods are found by their path alone.
///
/// # Errors
/// The answer to a request whose body did not come.
pub(super) async fn open(request: Request, patience: Duration) -> Result<Request, Response> {
    let (parts, mut body) = request.into_parts();
    if body.is_end_stream() {
        return Ok(Request::from_parts(parts, body));
    }
    let Ok(first) = timeout(patience, first_bytes(&mut body)).await else {
        return Err((StatusCode::REQUEST_TIMEOUT, "the request's body did not come in time\n").into_response());
    };
    let opened = Opened { first, rest: body, message: Message::default(), silence: None, patience };
    Ok(Request::from_parts(parts, Body::new(opened)))
}

/// Takes the first piece that is not empty.
async fn first_bytes(body: &mut Body) -> Option<Piece> {
    loop {
        let piece = poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await;
        if !is_empty(piece.as_ref()) {
            return piece;
        }
    }
}

fn is_empty(piece: Option<&Piece>) -> bool {
    piece.is_some_and(|piece| piece.as_ref().is_ok_and(|frame| frame.data_ref().is_some_and(Bytes::is_empty)))
}

/// A body whose first message must come without pauses; what follows it may take any time.
struct Opened {
    first: Option<Piece>,
    rest: Body,
    message: Message,
    /// Ends when the reader has waited too long.
    silence: Option<Pin<Box<Sleep>>>,
    patience: Duration,
}

impl hyper::body::Body for Opened {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Piece>> {
        let this = self.get_mut();
        let polled = match this.first.take() {
            Some(piece) => Poll::Ready(Some(piece)),
            None => Pin::new(&mut this.rest).poll_frame(context),
        };
        if this.message.is_complete() {
            return polled;
        }
        match polled {
            Poll::Ready(piece) => {
                // Empty pieces buy no time.
                if !is_empty(piece.as_ref()) {
                    this.silence = None;
                }
                if let Some(Ok(frame)) = &piece
                    && let Some(data) = frame.data_ref()
                {
                    this.message.read(data);
                }
                Poll::Ready(piece)
            }
            Poll::Pending => {
                let patience = this.patience;
                let silence = this.silence.get_or_insert_with(|| Box::pin(sleep(patience)));
                silence.as_mut().poll(context).map(|()| {
                    let late = tonic::Status::deadline_exceeded("the call's first message did not come in time");
                    Some(Err(axum::Error::new(late)))
                })
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.first.is_none() && self.rest.is_end_stream()
    }
}

/// How much of the first gRPC message came: a flag, four bytes of length (big-endian), and as many bytes.
#[derive(Default)]
struct Message {
    head: [u8; 5],
    n_seen: u64,
}

impl Message {
    fn read(&mut self, data: &[u8]) {
        let n_head_seen = usize::try_from(self.n_seen).unwrap_or(usize::MAX).min(self.head.len());
        for (slot, byte) in self.head[n_head_seen..].iter_mut().zip(data) {
            *slot = *byte;
        }
        self.n_seen = self.n_seen.saturating_add(data.len() as u64);
    }

    fn is_complete(&self) -> bool {
        let [_, length @ ..] = self.head;
        let n_head = self.head.len() as u64;
        self.n_seen >= n_head && self.n_seen - n_head >= u64::from(u32::from_be_bytes(length))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_complete_with_its_last_byte_however_it_is_cut() {
        let bytes = [0, 0, 0, 1, 2].into_iter().chain(std::iter::repeat_n(7, 258)).collect::<Vec<u8>>();
        for n_piece in [1, 2, 3, 5, 6, 262] {
            let mut message = Message::default();
            for piece in bytes[..262].chunks(n_piece) {
                message.read(piece);
                assert!(!message.is_complete());
            }
            message.read(&bytes[262..]);
            assert!(message.is_complete());
        }
    }
}
