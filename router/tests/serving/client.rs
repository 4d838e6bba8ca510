//! An HTTP/1.1 client of one request a connection, which shows exactly what was sent and closes when dropped.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;

/// Longer than any answer takes on a loaded machine.
pub const PATIENCE: Duration = Duration::from_secs(30);

pub struct Reply {
    pub status: u16,
    pub headers: Vec<String>,
    reader: BufReader<TcpStream>,
}

/// Sends a request and reads the head of its answer.
pub async fn send(address: SocketAddr, method: &str, path: &str, body: &[u8]) -> Reply {
    send_with(address, method, path, &[], body).await
}

/// The same with more headers.
pub async fn send_with(address: SocketAddr, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Reply {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let more: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n{more}content-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(body).await.unwrap();
    let mut reader = BufReader::new(stream);
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        let read = tokio::time::timeout(PATIENCE, reader.read_line(&mut line)).await.expect("an answer in time");
        read.unwrap();
        let line = line.trim_end().to_owned();
        if line.is_empty() {
            break;
        }
        headers.push(line);
    }
    let status = headers[0].split(' ').nth(1).unwrap().parse().unwrap();
    Reply { status, headers, reader }
}

impl Reply {
    /// The whole body; chunk sizes are left in, since tests look for events only.
    pub async fn text(mut self) -> String {
        let mut bytes = Vec::new();
        tokio::time::timeout(PATIENCE, self.reader.read_to_end(&mut bytes)).await.expect("an end in time").unwrap();
        String::from_utf8(bytes).unwrap()
    }

    /// The next event of a stream, `[DONE]` as a string; none at the end.
    pub async fn event(&mut self) -> Option<Value> {
        loop {
            let mut line = String::new();
            let read =
                tokio::time::timeout(PATIENCE, self.reader.read_line(&mut line)).await.expect("an event in time");
            if read.unwrap() == 0 {
                return None;
            }
            if let Some(data) = line.trim_end().strip_prefix("data: ") {
                return Some(serde_json::from_str(data).unwrap_or_else(|_| Value::from(data)));
            }
        }
    }

    pub async fn events(mut self) -> Vec<Value> {
        let mut events = Vec::new();
        while let Some(event) = self.event().await {
            events.push(event);
        }
        events
    }
}

/// Posts JSON and reads a JSON answer.
pub async fn post(address: SocketAddr, path: &str, body: &Value) -> (u16, Value) {
    post_bytes(address, path, body.to_string().as_bytes()).await
}

/// Posts bytes and reads a JSON answer.
pub async fn post_bytes(address: SocketAddr, path: &str, body: &[u8]) -> (u16, Value) {
    let reply = send(address, "POST", path, body).await;
    let (status, text) = (reply.status, reply.text().await);
    let value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    (status, value)
}

/// Posts a streaming request.
pub async fn stream(address: SocketAddr, path: &str, body: &Value) -> Reply {
    let mut body = body.clone();
    body["stream"] = true.into();
    let reply = send(address, "POST", path, body.to_string().as_bytes()).await;
    assert_eq!(reply.status, 200, "{:?}", reply.headers);
    reply
}
