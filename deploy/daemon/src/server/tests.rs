//! Real servers on real sockets.

use std::net::SocketAddr;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::routing::{get, post};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use super::*;
use crate::client::{ChannelOptions, channel};
use crate::shutdown::Trigger;
use crate::task::Tasks;

mod dawdling;

struct Running {
    address: SocketAddr,
    trigger: Trigger,
    served: JoinHandle<Result<(), ServeError>>,
}

impl Running {
    fn start(server: Server) -> Self {
        let listener = Listener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr();
        let (trigger, shutdown) = Shutdown::pair();
        Self { address, trigger, served: Tasks::new().spawn("server", server.serve(listener, shutdown)) }
    }

    fn channel(&self) -> Channel {
        channel(&self.address.to_string(), &ChannelOptions::default()).unwrap()
    }

    async fn send(&self, request: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        stream
    }

    /// Sends one request and returns the whole response.
    async fn ask(&self, head: &str, headers: &str, body: &str) -> String {
        let length = body.len();
        let request = format!(
            "{head} HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-length: {length}\r\n{headers}\r\n{body}"
        );
        let mut stream = self.send(&request).await;
        let mut response = Vec::new();
        stream.read_to_end(&mut response).await.unwrap();
        String::from_utf8(response).unwrap()
    }

    async fn get(&self, path: &str) -> String {
        self.ask(&format!("GET {path}"), "", "").await
    }

    async fn stop(self) {
        self.trigger.fire();
        self.served.await.unwrap().unwrap();
    }
}

/// A route whose response's chunks the test sends.
fn streaming() -> (Router, mpsc::Sender<&'static str>) {
    let (sender, receiver) = mpsc::channel::<&'static str>(4);
    let receiver = std::sync::Arc::new(std::sync::Mutex::new(Some(receiver)));
    let handler = async move || {
        let receiver = receiver.lock().unwrap().take().unwrap();
        Body::from_stream(ReceiverStream::new(receiver).map(Ok::<_, std::convert::Infallible>))
    };
    (Router::new().route("/stream", get(handler)), sender)
}

const STREAM: &str = "GET /stream HTTP/1.1\r\nhost: test\r\n\r\n";

/// Reads until `text` was read.
async fn read_until(stream: &mut TcpStream, text: &str) -> String {
    let mut seen = String::new();
    while !seen.contains(text) {
        let mut buffer = [0; 1024];
        let n = stream.read(&mut buffer).await.unwrap();
        assert_ne!(n, 0, "the connection ended after {seen:?}");
        seen.push_str(std::str::from_utf8(&buffer[..n]).unwrap());
    }
    seen
}

async fn health(channel: Channel, service: &str) -> Result<i32, tonic::Status> {
    let request = HealthCheckRequest { service: service.to_owned() };
    HealthClient::new(channel).check(request).await.map(|answer| answer.into_inner().status)
}

fn server() -> Server {
    Server::new("test", ServerConfig::default())
}

#[tokio::test]
async fn one_port_speaks_grpc_health_reflection_and_http() {
    let http = Router::new().route("/hello", post(async |body: Bytes| body));
    let running = Running::start(server().http(http).reflection(tonic_health::pb::FILE_DESCRIPTOR_SET));
    assert_eq!(health(running.channel(), "").await.unwrap(), ServingStatus::Serving as i32);
    assert_eq!(health(running.channel(), "absent.Service").await.unwrap_err().code(), Code::NotFound);
    assert!(running.ask("POST /hello", "", "you").await.ends_with("you"));
    assert!(running.get("/livez").await.starts_with("HTTP/1.1 200"));
    assert!(running.get("/absent").await.starts_with("HTTP/1.1 404"));
    let metrics = running.get("/metrics").await;
    assert!(metrics.contains("content-type: text/plain; version=0.0.4"), "{metrics}");
    assert!(metrics.contains(&format!("tessera_server_connections{{role=\"test\",instance=\"{}\"}}", running.address)));
    running.stop().await;
}

#[tokio::test]
async fn reflection_lists_the_named_services_in_both_versions() {
    use tonic_reflection::pb::v1alpha::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1alpha::server_reflection_request::MessageRequest;
    use tonic_reflection::pb::v1alpha::server_reflection_response::MessageResponse;
    use tonic_reflection::pb::{v1, v1alpha};

    let named = server().reflection(tonic_health::pb::FILE_DESCRIPTOR_SET).service_names(&["grpc.health.v1.Health"]);
    let running = Running::start(named);
    let request = v1alpha::ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let mut client = ServerReflectionClient::new(running.channel());
    let answers = client.server_reflection_info(tokio_stream::iter([request])).await.unwrap();
    let answer = answers.into_inner().next().await.unwrap().unwrap().message_response.unwrap();
    let MessageResponse::ListServicesResponse(list) = answer else { panic!("{answer:?}") };
    assert!(list.service.iter().any(|service| service.name == "grpc.health.v1.Health"), "{list:?}");

    let request = v1::ServerReflectionRequest {
        host: String::new(),
        message_request: Some(v1::server_reflection_request::MessageRequest::FileContainingSymbol(
            "grpc.health.v1.Health".to_owned(),
        )),
    };
    let mut client = v1::server_reflection_client::ServerReflectionClient::new(running.channel());
    let answers = client.server_reflection_info(tokio_stream::iter([request])).await.unwrap();
    let answer = answers.into_inner().next().await.unwrap().unwrap().message_response.unwrap();
    let found = matches!(answer, v1::server_reflection_response::MessageResponse::FileDescriptorResponse(_));
    assert!(found, "{answer:?}");
    running.stop().await;
}

#[tokio::test]
async fn readiness_flips_health_and_readyz() {
    let readiness = Readiness::new();
    let running = Running::start(server().ready(readiness.clone()).service_names(&["a.B"]));
    let not_ready = running.get("/readyz").await;
    assert!(not_ready.starts_with("HTTP/1.1 503") && not_ready.ends_with("not ready: starting\n"), "{not_ready}");
    assert_eq!(health(running.channel(), "a.B").await.unwrap(), ServingStatus::NotServing as i32);

    let request = HealthCheckRequest { service: String::new() };
    let mut watch = HealthClient::new(running.channel()).watch(request).await.unwrap().into_inner();
    assert_eq!(watch.next().await.unwrap().unwrap().status, ServingStatus::NotServing as i32);
    readiness.set(true, "");
    assert_eq!(watch.next().await.unwrap().unwrap().status, ServingStatus::Serving as i32);
    assert!(running.get("/readyz").await.starts_with("HTTP/1.1 200"));
    assert_eq!(health(running.channel(), "").await.unwrap(), ServingStatus::Serving as i32);

    // The end of the process ends the watch, after telling it.
    running.trigger.fire();
    assert_eq!(watch.next().await.unwrap().unwrap().status, ServingStatus::NotServing as i32);
    assert!(watch.next().await.is_none());
    running.stop().await;
}

#[tokio::test]
async fn shutdown_lets_a_running_stream_finish_and_takes_nobody_new() {
    let (router, chunks) = streaming();
    let running = Running::start(server().http(router));
    let mut stream = running.send(STREAM).await;
    chunks.send("first").await.unwrap();
    read_until(&mut stream, "first").await;
    running.trigger.fire();
    while TcpStream::connect(running.address).await.is_ok() {
        tokio::task::yield_now().await;
    }
    assert!(!running.served.is_finished());
    chunks.send("second").await.unwrap();
    read_until(&mut stream, "second").await;
    drop(chunks);
    read_until(&mut stream, "0\r\n\r\n").await;
    running.stop().await;
}

#[tokio::test]
async fn a_stream_that_outlives_the_grace_is_cut() {
    let (router, chunks) = streaming();
    let config = ServerConfig { grace_ms: 20, ..ServerConfig::default() };
    let running = Running::start(Server::new("test", config).http(router));
    let mut stream = running.send(STREAM).await;
    chunks.send("first").await.unwrap();
    read_until(&mut stream, "first").await;
    running.stop().await;
    assert!(chunks.is_closed());
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest).await;
    assert!(!rest.ends_with(b"0\r\n\r\n"));
}

#[tokio::test]
async fn a_full_server_refuses_work_but_still_tells_that_it_lives() {
    let (router, chunks) = streaming();
    let config = ServerConfig { n_requests_max: 1, ..ServerConfig::default() };
    let running = Running::start(Server::new("test", config).http(router.route("/other", get(async || "done"))));
    let mut stream = running.send(STREAM).await;
    chunks.send("first").await.unwrap();
    read_until(&mut stream, "first").await;
    let refused = running.get("/other").await;
    assert!(refused.starts_with("HTTP/1.1 503") && refused.contains("retry-after"), "{refused}");
    let grpc = running.ask("POST /a.B/C", "content-type: application/grpc\r\n", "").await;
    assert!(grpc.contains("grpc-status: 8") && grpc.contains("retry-after-ms: 1000"), "{grpc}");
    assert!(running.get("/livez").await.starts_with("HTTP/1.1 200"));
    drop(chunks);
    read_until(&mut stream, "0\r\n\r\n").await;
    // The place is free once the server has let go of the response.
    while running.get("/other").await.starts_with("HTTP/1.1 503") {}
    running.stop().await;
}

#[tokio::test]
async fn panics_and_unknown_methods_are_errors_in_the_callers_protocol() {
    async fn panics() -> &'static str {
        panic!("on purpose")
    }
    let routes = Routes::from(Router::new().route("/a.B/Panics", post(panics)));
    let running = Running::start(server().grpc(routes).http(Router::new().route("/panics", get(panics))));
    assert!(running.get("/panics").await.starts_with("HTTP/1.1 500"));
    let grpc = "content-type: application/grpc\r\n";
    let internal = running.ask("POST /a.B/Panics", grpc, "").await;
    assert!(internal.starts_with("HTTP/1.1 200") && internal.contains("grpc-status: 13"), "{internal}");
    let unknown = running.ask("POST /a.B/Absent", grpc, "").await;
    assert!(unknown.starts_with("HTTP/1.1 200") && unknown.contains("grpc-status: 12"), "{unknown}");
    running.stop().await;
}

#[tokio::test]
async fn a_body_over_the_bound_is_refused() {
    let config = ServerConfig { body_bytes_max: 8, ..ServerConfig::default() };
    let router = Router::new().route("/echo", post(async |body: Bytes| body));
    let running = Running::start(Server::new("test", config).http(router));
    assert!(running.ask("POST /echo", "", "12345678").await.ends_with("12345678"));
    assert!(running.ask("POST /echo", "", "123456789").await.starts_with("HTTP/1.1 413"));
    running.stop().await;
}

#[tokio::test]
async fn peers_that_dawdle_over_their_request_are_closed() {
    let config = ServerConfig { read_timeout_ms: 30, ..ServerConfig::default() };
    let running = Running::start(Server::new("test", config));
    for slow in ["", "G", "PRI * HTTP/2.0\r\n", "GET /livez HTTP/1.1\r\nhost: a.long.name.example\r\n"] {
        let mut stream = running.send(slow).await;
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest).await;
        assert!(!String::from_utf8_lossy(&rest).contains("200"), "{slow:?}");
    }
    running.stop().await;
}

#[tokio::test]
async fn connections_beyond_the_bound_are_closed() {
    let config = ServerConfig { n_connections_max: 1, ..ServerConfig::default() };
    let running = Running::start(Server::new("test", config));
    let mut first = running.send("GET /livez HTTP/1.1\r\nhost: test\r\n\r\n").await;
    read_until(&mut first, "ok\n").await;
    let mut second = TcpStream::connect(running.address).await.unwrap();
    assert_eq!(second.read(&mut [0; 16]).await.unwrap_or(0), 0);
    drop(first);
    // The place is free once the server has seen the first one go.
    loop {
        let mut third = running.send("GET /livez HTTP/1.1\r\nhost: test\r\n\r\n").await;
        if third.read(&mut [0; 16]).await.unwrap_or(0) > 0 {
            break;
        }
    }
    running.stop().await;
}

#[tokio::test]
async fn extreme_bounds_serve_and_empty_ones_are_refused() {
    let config = ServerConfig {
        n_connections_max: usize::MAX,
        n_streams_per_connection_max: u32::MAX,
        n_requests_max: usize::MAX,
        read_timeout_ms: u64::MAX,
        keepalive_interval_ms: u64::MAX,
        keepalive_timeout_ms: u64::MAX,
        ..ServerConfig::default()
    };
    let running = Running::start(Server::new("test", config));
    assert!(running.get("/livez").await.starts_with("HTTP/1.1 200"));
    health(running.channel(), "").await.unwrap();
    running.stop().await;

    let config = ServerConfig { keepalive_interval_ms: 20, ..ServerConfig::default() };
    let running = Running::start(Server::new("test", config));
    assert!(running.get("/livez").await.starts_with("HTTP/1.1 200"));
    running.stop().await;

    let config = ServerConfig { n_requests_max: 0, ..ServerConfig::default() };
    let served = Running::start(Server::new("test", config)).served.await.unwrap();
    assert!(matches!(served, Err(ServeError::Config(OutOfRange { key: "n_requests_max", value: 0 }))), "{served:?}");
}

#[tokio::test]
async fn operators_streams_are_bounded_and_checks_still_pass() {
    let running = Running::start(server());
    let mut client = HealthClient::new(running.channel());
    let mut watches = Vec::new();
    for _ in 0..admin::N_STREAMS_MAX {
        watches.push(client.watch(HealthCheckRequest::default()).await.unwrap());
    }
    let refused = client.watch(HealthCheckRequest::default()).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert_eq!(refused.metadata().get("retry-after-ms").unwrap(), "1000");
    health(running.channel(), "").await.unwrap();
    drop(watches);
    while client.watch(HealthCheckRequest::default()).await.is_err() {}
    running.stop().await;
}

#[tokio::test]
async fn errors_repeat_no_more_than_a_piece_of_a_hostile_name() {
    let running = Running::start(server());
    let error = health(running.channel(), &"\u{1}昇".repeat(4_000)).await.unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
    assert!(error.message().len() < 4_096);
    let path = format!("POST /a.B/{}", "x".repeat(8_000));
    let answer = running.ask(&path, "content-type: application/grpc\r\n", "").await;
    assert!(answer.contains("grpc-status: 12") && answer.len() < 1_024, "{answer}");
    running.stop().await;
}
