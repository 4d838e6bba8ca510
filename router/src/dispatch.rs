//! One choice on its worker: one call out, its frames back, each token once and in order.
//!
//! A call that fails before its first token is placed again; what fails later ends with a typed error.

use std::sync::Arc;
use std::time::{Duration, Instant};

use contract::error::RequestError;
use contract::ids::{EngineId, RequestId};
use contract::request::GenerateRequest;
use contract::stream::GenerateFrame;
use daemon::telemetry::propagation::Trace;
use proto::exchange::Frames;
use proto::status::{ERROR_KEY, from_status};
use proto::worker::v1 as wire;
use tonic::{Code, Status};

use crate::cluster::{Cluster, Flight, Placement};
use crate::model::PromptBlocks;

/// A choice that is being generated; dropping it ends the call to the worker at once.
pub(crate) struct Dispatch {
    cluster: Arc<Cluster>,
    /// What the client asked, which this is a part of.
    question: RequestId,
    request: GenerateRequest,
    blocks: Arc<PromptBlocks>,
    deadline: Instant,
    trace: Trace,
    /// Where to go first.
    placement: Option<Placement>,
    /// Engines that failed before the first token.
    tried: Vec<EngineId>,
    last_error: Option<RequestError>,
    call: Option<Call>,
    n_received: u32,
    is_over: bool,
}

/// What a choice begins with.
pub(crate) struct Job {
    pub(crate) question: RequestId,
    pub(crate) request: GenerateRequest,
    pub(crate) blocks: Arc<PromptBlocks>,
    pub(crate) deadline: Instant,
    pub(crate) placement: Placement,
}

struct Call {
    worker: String,
    frames: Frames,
    flight: Flight,
}

impl Dispatch {
    /// Prepares a choice; nothing is sent before the first frame is asked for.
    pub(crate) fn new(cluster: Arc<Cluster>, job: Job, trace: Trace) -> Self {
        Self {
            cluster,
            question: job.question,
            request: job.request,
            blocks: job.blocks,
            deadline: job.deadline,
            trace,
            placement: Some(job.placement),
            tried: Vec::new(),
            last_error: None,
            call: None,
            n_received: 0,
            is_over: false,
        }
    }

    /// The next frame, its tokens new and in order; none after the last frame or an error.
    pub(crate) async fn next(&mut self) -> Option<Result<GenerateFrame, RequestError>> {
        while !self.is_over {
            match self.advance().await {
                Ok(frame) => {
                    if frame.finish.is_some() {
                        self.end();
                    }
                    return Some(Ok(frame));
                }
                Err(error) => {
                    if let Some(call) = self.call.take() {
                        call.flight.failed(&error);
                    }
                    if let Some(error) = self.judge(error) {
                        self.end();
                        return Some(Err(error));
                    }
                }
            }
        }
        None
    }

    fn end(&mut self) {
        self.is_over = true;
        self.call = None;
    }

    async fn advance(&mut self) -> Result<GenerateFrame, RequestError> {
        if self.call.is_none() {
            self.call = Some(self.open()?);
        }
        loop {
            let call = self.call.as_mut().expect("it was opened above and is taken only when this returns an error");
            let message = tokio::time::timeout_at(self.deadline.into(), call.frames.message()).await;
            let n_tokens = self.n_received;
            let message = message.map_err(|_| RequestError::DeadlineExceeded { n_tokens })?;
            let lost = |reason: &str| RequestError::WorkerLost {
                worker: call.worker.clone(),
                n_tokens,
                reason: reason.to_owned(),
            };
            let frame = message
                .map_err(|status| read_status(&status, &call.worker, n_tokens))?
                .ok_or_else(|| lost("it ended the stream before the last token"))?;
            let frame = GenerateFrame::try_from(frame).map_err(|error| lost(&error.to_string()))?;
            if frame.attempt != self.request.attempt {
                continue;
            }
            call.flight.prefilled();
            let frame = continue_at(&mut self.n_received, frame).map_err(|reason| lost(&reason))?;
            if !frame.tokens.is_empty() || frame.finish.is_some() || frame.cached_tokens.is_some() {
                return Ok(frame);
            }
        }
    }

    fn open(&mut self) -> Result<Call, RequestError> {
        let n_prompt_tokens = self.request.prompt.len() as u64;
        let placement = match self.placement.take() {
            Some(placement) => placement,
            None => {
                let (tenant, blocks) = (&self.request.tenant, &self.blocks);
                self.cluster.place_again(self.question, tenant, n_prompt_tokens, blocks, &self.tried)?
            }
        };
        let Placement { engine, flight } = placement;
        self.tried.push(engine.id.clone());
        let left = self.deadline.saturating_duration_since(daemon::clock::now());
        if left.is_zero() {
            return Err(RequestError::DeadlineExceeded { n_tokens: self.n_received });
        }
        self.request.deadline = Some(left);
        let mut request = tonic::Request::new(wire::GenerateRequest::new(&self.request, &engine.id));
        self.trace.inject(request.metadata_mut());
        Ok(Call { worker: engine.id.worker.to_string(), frames: engine.line.call(request), flight })
    }

    /// The error that ends the choice, none when it is placed again.
    ///
    /// A later issue goes on here with the tokens received so far; now only a choice without any is placed again.
    fn judge(&mut self, error: RequestError) -> Option<RequestError> {
        if let RequestError::NoWorker { .. } = error {
            // Every engine was tried: what the last one said tells more.
            return Some(self.last_error.take().unwrap_or(error));
        }
        let may_go_elsewhere = matches!(
            error,
            RequestError::StalePlacement(_)
                | RequestError::WorkerLost { .. }
                | RequestError::ShuttingDown(_)
                | RequestError::Overloaded { .. }
        );
        let n_attempts = u32::try_from(self.tried.len()).unwrap_or(u32::MAX);
        if self.n_received > 0 || !may_go_elsewhere || n_attempts >= self.cluster.settings.n_attempts_max {
            return Some(error);
        }
        tracing::debug!(request = %self.request.id, "placed again: {error}");
        self.last_error = Some(error);
        self.request.attempt += 1;
        None
    }
}

/// Leaves out tokens that were received before.
fn continue_at(n_received: &mut u32, mut frame: GenerateFrame) -> Result<GenerateFrame, String> {
    let first = frame.first_position;
    if first > *n_received && !frame.tokens.is_empty() {
        return Err(format!("tokens from {n_received} to {first} are missing"));
    }
    let n_known = (*n_received - first.min(*n_received)) as usize;
    frame.tokens.drain(..n_known.min(frame.tokens.len()));
    frame.first_position = *n_received;
    *n_received += u32::try_from(frame.tokens.len()).map_err(|_| "a frame holds too many tokens".to_owned())?;
    Ok(frame)
}

/// Tells an error that the worker states from one of the way to it.
fn read_status(status: &Status, worker: &str, n_tokens: u32) -> RequestError {
    let is_typed = status.metadata().get_bin(ERROR_KEY).is_some();
    let is_of_the_way =
        matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Internal | Code::Cancelled | Code::Aborted);
    if !is_typed && is_of_the_way {
        let reason = status.message().to_owned();
        return RequestError::WorkerLost { worker: worker.to_owned(), n_tokens, reason };
    }
    from_status(status)
}

/// When a request that begins now must be over.
pub(crate) fn deadline(now: Instant, configured_ms: u64, asked: Option<Duration>) -> Instant {
    let configured = Duration::from_millis(configured_ms);
    let left = asked.map_or(configured, |asked| asked.min(configured));
    now.checked_add(left).unwrap_or(now + Duration::from_secs(365 * 24 * 3600))
}

#[cfg(test)]
mod tests {
    use contract::plan::SampledToken;

    use super::*;

    fn frame(first_position: u32, tokens: &[u32]) -> GenerateFrame {
        let sampled = |&token| SampledToken { token, logprob: f32::NAN, top: Vec::new() };
        let tokens = tokens.iter().map(sampled).collect();
        GenerateFrame { attempt: 0, first_position, tokens, finish: None, cached_tokens: None }
    }

    fn tokens(frame: &GenerateFrame) -> Vec<u32> {
        frame.tokens.iter().map(|sampled| sampled.token).collect()
    }

    #[test]
    fn repeated_tokens_are_left_out_and_missing_ones_are_an_error() {
        let mut n_received = 0;
        assert_eq!(tokens(&continue_at(&mut n_received, frame(0, &[1, 2])).unwrap()), [1, 2]);
        assert_eq!(tokens(&continue_at(&mut n_received, frame(0, &[1, 2])).unwrap()), [0_u32; 0]);
        assert_eq!(tokens(&continue_at(&mut n_received, frame(1, &[2, 3])).unwrap()), [3]);
        assert!(continue_at(&mut n_received, frame(4, &[5])).unwrap_err().contains("from 3 to 4"));
        assert_eq!(n_received, 3);
    }

    #[test]
    fn a_broken_connection_is_a_lost_worker_and_a_stated_error_is_itself() {
        let lost = read_status(&Status::unknown("h2 reset"), "w1", 3);
        assert_eq!(
            lost,
            RequestError::WorkerLost { worker: "w1".to_owned(), n_tokens: 3, reason: "h2 reset".to_owned() }
        );
        let stated = RequestError::Internal("defect".to_owned());
        assert_eq!(read_status(&proto::status::to_status(&stated), "w1", 3), stated);
    }
}
