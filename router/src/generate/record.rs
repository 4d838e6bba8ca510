//! What one request leaves in metrics and in its span, however it ends.

use std::sync::Arc;
use std::time::{Duration, Instant};

use contract::error::RequestError;
use daemon::telemetry::names::attribute;
use tracing::Span;

use super::admit::Permit;
use super::{Delta, Operation, Usage};
use crate::metrics::{Counted, Metrics, Times, Tokens};

/// Observes one request; dropping it before its end counts it as cancelled.
pub(super) struct Record {
    metrics: Arc<Metrics>,
    operation: Operation,
    span: Span,
    began: Instant,
    first_token: Option<Duration>,
    /// Output tokens by choice.
    n_tokens: Vec<u32>,
    reasons: Vec<&'static str>,
    usage: Usage,
    is_over: bool,
    permit: Permit,
    _running: Counted,
}

impl Record {
    pub(super) fn new(
        metrics: &Arc<Metrics>,
        operation: Operation,
        span: Span,
        began: Instant,
        permit: Permit,
    ) -> Self {
        Self {
            metrics: Arc::clone(metrics),
            operation,
            span,
            began,
            first_token: None,
            n_tokens: Vec::new(),
            reasons: Vec::new(),
            usage: Usage::default(),
            is_over: false,
            permit,
            _running: metrics.run(),
        }
    }

    /// Tells the prompts' lengths and the number of choices, and charges the tenant for the prompts.
    ///
    /// # Errors
    /// `QuotaExceeded` when it has no tokens left.
    pub(super) fn begin(&mut self, prompt_tokens: u32, n_choices: usize) -> Result<(), RequestError> {
        self.permit.charge(u64::from(prompt_tokens))?;
        self.usage.prompt_tokens = prompt_tokens;
        self.n_tokens = vec![0; n_choices];
        Ok(())
    }

    pub(super) fn span(&self) -> &Span {
        &self.span
    }

    pub(super) fn cached(&mut self, tokens: u32) {
        self.usage.cached_tokens = self.usage.cached_tokens.saturating_add(tokens);
    }

    pub(super) fn delta(&mut self, delta: &Delta) {
        let n = u32::try_from(delta.tokens.len()).unwrap_or(u32::MAX);
        self.usage.completion_tokens = self.usage.completion_tokens.saturating_add(n);
        if let Some(of_choice) = self.n_tokens.get_mut(delta.index as usize) {
            *of_choice = of_choice.saturating_add(n);
        }
        if n > 0 && self.first_token.is_none() {
            let after = self.elapsed();
            self.first_token = Some(after);
            self.metrics.first_token(self.operation, after);
        }
        self.reasons.extend(delta.finish.as_ref().map(|finish| finish.reason));
    }

    /// The request ended well.
    pub(super) fn finish(&mut self) -> Usage {
        self.is_over = true;
        let times = Times { whole: self.elapsed(), first_token: self.first_token };
        self.metrics.finished(self.operation, times, self.tokens());
        self.settle();
        self.describe();
        self.usage
    }

    /// The request ended before anything was computed for it.
    pub(super) fn refuse(&mut self, error: &RequestError) {
        self.permit.settle(0);
        self.end_with(error.code());
    }

    /// The request ended badly.
    pub(super) fn fail(&mut self, error: &RequestError) {
        self.end_with(error.code());
    }

    fn end_with(&mut self, code: &'static str) {
        self.is_over = true;
        self.metrics.failed(self.operation, self.elapsed(), code, self.tokens());
        self.span.record(attribute::ERROR_TYPE, code);
        self.settle();
        self.describe();
    }

    /// Cached tokens cost a tenant nothing.
    fn settle(&mut self) {
        let tokens = self.tokens();
        self.permit.settle(tokens.input.saturating_sub(tokens.cached) + tokens.output);
    }

    fn describe(&self) {
        self.span.record(attribute::INPUT_TOKENS, self.usage.prompt_tokens);
        self.span.record(attribute::OUTPUT_TOKENS, self.usage.completion_tokens);
        self.span.record(attribute::CACHED_TOKENS, self.usage.cached_tokens);
        if !self.reasons.is_empty() {
            self.span.record(attribute::FINISH_REASONS, self.reasons.join(","));
        }
    }

    fn elapsed(&self) -> Duration {
        daemon::clock::now().saturating_duration_since(self.began)
    }

    fn tokens(&self) -> Tokens {
        Tokens {
            input: u64::from(self.usage.prompt_tokens),
            cached: u64::from(self.usage.cached_tokens),
            output: u64::from(self.usage.completion_tokens),
            output_longest: self.n_tokens.iter().copied().max().unwrap_or(0),
        }
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        if !self.is_over {
            self.end_with(RequestError::Cancelled.code());
        }
    }
}
