//! A small OTLP receiver that keeps the spans it is sent.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};

/// A span as it arrived.
#[derive(Clone, Debug)]
pub struct Span {
    pub name: String,
    pub trace: Vec<u8>,
    pub id: Vec<u8>,
    pub parent: Vec<u8>,
    /// Attributes, values as text.
    pub attributes: BTreeMap<String, String>,
}

/// A running receiver.
#[derive(Clone)]
pub struct Receiver {
    pub endpoint: String,
    spans: Arc<Mutex<Vec<Span>>>,
}

impl Receiver {
    /// Starts listening; it ends with the test's runtime.
    pub async fn start() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let receiver = Self { endpoint, spans: Arc::default() };
        let service = TraceServiceServer::new(receiver.clone());
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        tokio::spawn(tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming));
        receiver
    }

    /// Everything received so far.
    pub fn spans(&self) -> Vec<Span> {
        self.spans.lock().unwrap().clone()
    }
}

#[tonic::async_trait]
impl TraceService for Receiver {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let resources = request.into_inner().resource_spans;
        let spans = resources.into_iter().flat_map(|resource| resource.scope_spans).flat_map(|scope| scope.spans);
        self.spans.lock().unwrap().extend(spans.map(|span| Span {
            name: span.name,
            trace: span.trace_id,
            id: span.span_id,
            parent: span.parent_span_id,
            attributes:
                span.attributes.into_iter().map(|pair| (pair.key, text(pair.value.and_then(|v| v.value)))).collect(),
        }));
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

fn text(value: Option<Value>) -> String {
    match value {
        Some(Value::StringValue(text)) => text,
        Some(Value::IntValue(number)) => number.to_string(),
        Some(Value::DoubleValue(number)) => number.to_string(),
        Some(Value::BoolValue(flag)) => flag.to_string(),
        other => format!("{other:?}"),
    }
}
