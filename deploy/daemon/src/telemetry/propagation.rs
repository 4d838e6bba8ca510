//! Carries the W3C trace context through gRPC metadata.

use opentelemetry::Context;
use opentelemetry::propagation::{Extractor, Injector, TextMapPropagator as _};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use tonic::metadata::{KeyRef, MetadataKey, MetadataMap, MetadataValue};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

/// Writes the current span's trace context into `metadata`; writes nothing where nothing is traced.
pub fn inject(metadata: &mut MetadataMap) {
    inject_context(&Span::current().context(), metadata);
}

/// Writes `context` into `metadata`.
pub fn inject_context(context: &Context, metadata: &mut MetadataMap) {
    TraceContextPropagator::new().inject_context(context, &mut Outgoing(metadata));
}

/// Reads the caller's trace context; an empty one when there is none or it is malformed.
#[must_use]
pub fn extract(metadata: &MetadataMap) -> Context {
    TraceContextPropagator::new().extract_with_context(&Context::new(), &Incoming(metadata))
}

/// Makes `span`, which has not been entered yet, a child of the caller's span.
pub fn set_parent(span: &Span, metadata: &MetadataMap) {
    // It fails only where nothing is traced, and then there is nothing to do.
    let _ = span.set_parent(extract(metadata));
}

struct Outgoing<'a>(&'a mut MetadataMap);

impl Injector for Outgoing<'_> {
    fn set(&mut self, key: &str, value: String) {
        if let (Ok(key), Ok(value)) = (MetadataKey::from_bytes(key.as_bytes()), MetadataValue::try_from(value)) {
            self.0.insert(key, value);
        }
    }
}

struct Incoming<'a>(&'a MetadataMap);

impl Extractor for Incoming<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        let ascii = |key| match key {
            KeyRef::Ascii(key) => Some(key.as_str()),
            KeyRef::Binary(_) => None,
        };
        self.0.keys().filter_map(ascii).collect()
    }
}

#[cfg(test)]
mod tests {
    use opentelemetry::trace::{TraceContextExt as _, TracerProvider as _};
    use opentelemetry_sdk::trace::SdkTracerProvider;
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    #[test]
    fn a_trace_goes_on_at_the_callee() {
        let provider = SdkTracerProvider::builder().build();
        let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("test"));
        let _default = tracing::subscriber::set_default(tracing_subscriber::registry().with(layer));

        let mut metadata = MetadataMap::new();
        let caller = tracing::info_span!("caller");
        caller.in_scope(|| inject(&mut metadata));
        let sent = caller.context().span().span_context().clone();
        let callee = tracing::info_span!("callee");
        set_parent(&callee, &metadata);

        assert!(metadata.contains_key("traceparent"));
        assert_eq!(extract(&metadata).span().span_context().span_id(), sent.span_id());
        assert_eq!(callee.context().span().span_context().trace_id(), sent.trace_id());
    }

    #[test]
    fn a_missing_or_malformed_context_is_an_empty_one() {
        let mut metadata = MetadataMap::new();
        assert!(!extract(&metadata).span().span_context().is_valid());
        metadata.insert("traceparent", MetadataValue::from_static("00-nonsense"));
        assert!(!extract(&metadata).span().span_context().is_valid());
        let mut untouched = MetadataMap::new();
        inject(&mut untouched);
        assert!(untouched.is_empty());
    }
}
