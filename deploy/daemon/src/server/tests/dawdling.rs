//! Peers that open calls and then say no more, in raw HTTP/2: no client library does so.

use super::*;

const HEADERS: u8 = 1;
const DATA: u8 = 0;
const PING: u8 = 6;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut frame = u32::try_from(payload.len()).unwrap().to_be_bytes()[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

/// Opens a call without ending it: POST, http, then literals for path, authority and content type.
fn call(stream: u32, path: &str, content_type: &str) -> Vec<u8> {
    let mut block = vec![0x83, 0x86];
    for (index, value) in [(&[4][..], path), (&[1], "x"), (&[0x0f, 16], content_type)] {
        block.extend(index);
        block.push(u8::try_from(value.len()).unwrap());
        block.extend(value.as_bytes());
    }
    frame(HEADERS, 4, stream, &block)
}

async fn connect(running: &Running, frames: &[Vec<u8>]) -> TcpStream {
    let mut stream = running.send("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await;
    stream.write_all(&[frame(4, 0, 0, &[]), frames.concat()].concat()).await.unwrap();
    stream
}

/// Reads frames until `n` of one of `kinds` came with flag 1: the end of a stream, or the answer to a ping.
async fn read_frames(stream: &mut TcpStream, n: usize, kinds: &[u8]) {
    let reading = async {
        let mut n_seen = 0;
        while n_seen < n {
            let mut head = [0; 9];
            stream.read_exact(&mut head).await.unwrap();
            let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
            stream.read_exact(&mut payload).await.unwrap();
            n_seen += usize::from(kinds.contains(&head[3]) && head[4] & 1 != 0);
        }
    };
    tokio::time::timeout(Duration::from_secs(60), reading).await.expect("the server answers within its deadlines");
}

#[tokio::test]
async fn calls_without_a_body_take_no_place() {
    let config = ServerConfig { n_requests_max: 1, ..ServerConfig::default() };
    let http = Router::new().route("/other", get(async || "done"));
    let running = Running::start(Server::new("test", config).http(http));
    let mut frames = (0..8).map(|n| call(1 + 2 * n, "/a.B/C", "application/grpc")).collect::<Vec<_>>();
    frames.push(call(17, "/other", "text/plain"));
    frames.push(frame(DATA, 0, 1, &[]));
    frames.push(frame(PING, 0, 0, &[0; 8]));
    let mut stream = connect(&running, &frames).await;
    read_frames(&mut stream, 1, &[PING]).await;
    for _ in 0..20 {
        // The place of the request before is free once the server has let go of its response.
        while !running
            .get("/metrics")
            .await
            .contains(&format!("tessera_server_requests{{role=\"test\",instance=\"{}\"}} 0", running.address))
        {}
        assert!(running.get("/other").await.starts_with("HTTP/1.1 200"));
    }
    drop(stream);
    running.stop().await;
}

#[tokio::test]
async fn calls_whose_first_message_stalls_are_answered() {
    let config = ServerConfig { read_timeout_ms: 100, ..ServerConfig::default() };
    let running = Running::start(Server::new("test", config));
    let path = "/grpc.health.v1.Health/Check";
    let mut frames = Vec::new();
    for (stream, kind) in [(1, "application/grpc"), (3, "text/plain")] {
        frames.push(call(stream, path, kind));
        frames.push(call(stream + 4, path, kind));
        frames.push(frame(DATA, 0, stream + 4, &[0, 0]));
        frames.push(call(stream + 8, path, kind));
        frames.push(frame(DATA, 0, stream + 8, &[0, 0, 0, 0, 9, 10]));
    }
    // Streams open in ascending order.
    frames.sort_by_key(|frame| (frame[8], frame[3] == DATA));
    let mut stream = connect(&running, &frames).await;
    read_frames(&mut stream, 6, &[HEADERS, DATA]).await;
    drop(stream);
    running.stop().await;
}
