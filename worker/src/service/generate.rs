//! One request's frames on their way to the wire, with the span that tells how it went.

use std::pin::pin;
use std::time::Instant;

use async_stream::try_stream;
use contract::ids::EngineId;
use contract::request::GenerateRequest;
use contract::stream::FinishReason;
use daemon::clock;
use daemon::telemetry::propagation::Trace;
use futures::{Stream, StreamExt as _};
use proto::status::to_status;
use proto::worker::v1 as wire;
use tonic::Status;
use tonic::metadata::MetadataMap;
use tracing::{Span, field};

use crate::engine_loop::EngineHandle;
use crate::mailbox::Reader;

/// A request's span and what is to be told at its end, however that comes.
pub(super) struct Observed {
    span: Span,
    began: Instant,
    n_tokens: u64,
}

impl Observed {
    /// Opens the request's span as a child of the caller's; it holds counts and times, never content.
    pub(super) fn new(request: &GenerateRequest, engine: &EngineId, metadata: &MetadataMap) -> Self {
        let span = tracing::info_span!(
            "worker.generate",
            request = %request.id,
            attempt = request.attempt,
            engine = %engine,
            gen_ai.operation.name = "text_completion",
            gen_ai.request.model = %request.model,
            gen_ai.usage.input_tokens = request.prompt.len() + request.generated.len(),
            gen_ai.usage.cache_read.input_tokens = field::Empty,
            gen_ai.usage.output_tokens = field::Empty,
            gen_ai.response.finish_reasons = field::Empty,
            error.r#type = field::Empty,
            time_to_first_token_ms = field::Empty,
            duration_ms = field::Empty,
        );
        let trace = Trace::new(span, metadata.as_ref());
        Self { span: trace.span().clone(), began: clock::now(), n_tokens: 0 }
    }

    /// The request's frames, noted as they pass; they end with an error when the engine stands still.
    pub(super) fn frames(
        mut self,
        mut reader: Reader,
        engine: EngineHandle,
    ) -> impl Stream<Item = Result<wire::GenerateFrame, Status>> {
        try_stream! {
            let mut stalled = pin!(engine.stall().begun());
            loop {
                let frame = tokio::select! {
                    biased;
                    frame = reader.next() => frame,
                    reason = &mut stalled => {
                        Some(Err(engine.lost(&reason, u32::try_from(self.n_tokens).unwrap_or(u32::MAX))))
                    }
                };
                let Some(frame) = frame else { return };
                let frame = frame.map_err(|error| {
                    self.span.record("error.type", error.code());
                    to_status(&error)
                })?;
                if let Some(n) = frame.cached_tokens {
                    self.span.record("gen_ai.usage.cache_read.input_tokens", n);
                    self.span.record("time_to_first_token_ms", self.elapsed_ms());
                }
                self.n_tokens += frame.tokens.len() as u64;
                match frame.finish {
                    None => {}
                    Some(FinishReason::Stop) => drop(self.span.record("gen_ai.response.finish_reasons", "stop")),
                    Some(FinishReason::Length) => drop(self.span.record("gen_ai.response.finish_reasons", "length")),
                }
                yield frame.into();
            }
        }
    }

    fn elapsed_ms(&self) -> f64 {
        clock::now().duration_since(self.began).as_secs_f64() * 1e3
    }
}

impl Drop for Observed {
    fn drop(&mut self) {
        self.span.record("gen_ai.usage.output_tokens", self.n_tokens);
        self.span.record("duration_ms", self.elapsed_ms());
        let _entered = self.span.enter();
        tracing::debug!("request ended");
    }
}
