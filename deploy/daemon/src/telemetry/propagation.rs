//! Carries the W3C trace context through gRPC metadata.

use http::{HeaderMap, HeaderName};
use opentelemetry::Context;
use opentelemetry::propagation::{Extractor, Injector, TextMapPropagator as _};
use opentelemetry::trace::TraceContextExt as _;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use tonic::metadata::{MetadataKey, MetadataMap, MetadataValue};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

/// A request's span, and the trace context that it came with.
#[derive(Clone, Debug)]
pub struct Trace {
    span: Span,
    caller: Context,
}

impl Trace {
    /// Makes `span`, which has not been entered yet, a child of the caller's.
    #[must_use]
    pub fn new(span: Span, headers: &HeaderMap) -> Self {
        let caller = extract(headers);
        // It fails only where nothing is traced, and then there is nothing to do.
        let _ = span.set_parent(caller.clone());
        Self { span, caller }
    }

    /// The span.
    #[must_use]
    pub fn span(&self) -> &Span {
        &self.span
    }

    /// Writes into `metadata` what a call for this request belongs to: its span, or the caller's where spans go nowhere.
    pub fn inject(&self, metadata: &mut MetadataMap) {
        let own = self.span.context();
        let is_traced = own.span().span_context().is_valid();
        inject_context(if is_traced { &own } else { &self.caller }, metadata);
    }
}

/// Writes `context` into `metadata`.
pub fn inject_context(context: &Context, metadata: &mut MetadataMap) {
    TraceContextPropagator::new().inject_context(context, &mut Outgoing(metadata));
}

/// Reads the caller's trace context; an empty one when there is none or it is malformed.
#[must_use]
pub fn extract(headers: &HeaderMap) -> Context {
    TraceContextPropagator::new().extract_with_context(&Context::new(), &Incoming(headers))
}

struct Outgoing<'a>(&'a mut MetadataMap);

impl Injector for Outgoing<'_> {
    fn set(&mut self, key: &str, value: String) {
        if let (Ok(key), Ok(value)) = (MetadataKey::from_bytes(key.as_bytes()), MetadataValue::try_from(value)) {
            self.0.insert(key, value);
        }
    }
}

struct Incoming<'a>(&'a HeaderMap);

impl Extractor for Incoming<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(HeaderName::as_str).collect()
    }
}

#[cfg(test)]
mod tests {
    use opentelemetry::trace::TracerProvider as _;
    use opentelemetry_sdk::trace::SdkTracerProvider;
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    #[test]
    fn a_trace_goes_on_at_the_callee() {
        let provider = SdkTracerProvider::builder().build();
        let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("test"));
        let _default = tracing::subscriber::set_default(tracing_subscriber::registry().with(layer));

        let mut metadata = MetadataMap::new();
        let caller = Trace::new(tracing::info_span!("caller"), &HeaderMap::new());
        caller.inject(&mut metadata);
        let sent = caller.span().context().span().span_context().clone();
        let callee = Trace::new(tracing::info_span!("callee"), metadata.as_ref());

        assert!(metadata.contains_key("traceparent"));
        assert_eq!(extract(metadata.as_ref()).span().span_context().span_id(), sent.span_id());
        assert_eq!(callee.span().context().span().span_context().trace_id(), sent.trace_id());
    }

    #[test]
    fn a_process_that_traces_nothing_hands_the_callers_context_on() {
        let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let headers = HeaderMap::from_iter([(HeaderName::from_static("traceparent"), parent.parse().unwrap())]);
        let mut metadata = MetadataMap::new();
        Trace::new(tracing::info_span!("in between"), &headers).inject(&mut metadata);
        assert_eq!(metadata.get("traceparent").unwrap(), parent);
    }

    #[test]
    fn a_missing_or_malformed_context_is_an_empty_one() {
        let mut headers = HeaderMap::new();
        assert!(!extract(&headers).span().span_context().is_valid());
        headers.insert("traceparent", http::HeaderValue::from_static("00-nonsense"));
        assert!(!extract(&headers).span().span_context().is_valid());
        let mut untouched = MetadataMap::new();
        Trace::new(Span::none(), &headers).inject(&mut untouched);
        assert!(untouched.is_empty());
    }
}
