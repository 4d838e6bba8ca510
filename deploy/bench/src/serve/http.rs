//! Asks an OpenAI-compatible server over kept-alive HTTP/1.1 connections.

use std::time::Duration;

use bytes::Bytes;
use daemon::clock;
use daemon::task::Tasks;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue};
use http::{Request, Response, Uri};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;

use super::ServeError;
use super::client::{Live, Pool};
use super::record::{Failure, Timeline};
use super::sse::{self, Event, Lines};
use super::workload::{Ask, Prompt};

/// Time to make a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest answer that is not a stream.
const ANSWER_BYTES_MAX: usize = 1 << 20;
/// Characters of a refusal that are kept.
const REFUSAL_CHARS_MAX: usize = 300;

type Sender = SendRequest<Full<Bytes>>;

/// A server and the connections to it that wait for a request.
pub(crate) struct HttpClient {
    host: String,
    port: u16,
    authority: HeaderValue,
    /// Path before `/completions`.
    base: String,
    authorization: Option<HeaderValue>,
    model: String,
    ignore_eos: bool,
    idle: Pool<Sender>,
    tasks: Tasks,
}

impl HttpClient {
    /// Understands `url` and finds the model's name unless it is given.
    pub(crate) async fn new(
        url: &str,
        api_key: Option<&str>,
        model: Option<&str>,
        ignore_eos: bool,
    ) -> Result<Self, ServeError> {
        let wrong = || ServeError::Url { url: url.to_owned() };
        let uri: Uri = url.parse().map_err(|_| wrong())?;
        let authority = uri.authority().filter(|_| uri.scheme_str() == Some("http")).ok_or_else(wrong)?;
        let path = uri.path().trim_end_matches('/');
        let base = if path.ends_with("/v1") { path.to_owned() } else { format!("{path}/v1") };
        let bearer = |key: &str| HeaderValue::try_from(format!("Bearer {key}")).map_err(|_| ServeError::ApiKey);
        let mut client = Self {
            host: authority.host().trim_start_matches('[').trim_end_matches(']').to_owned(),
            port: authority.port_u16().unwrap_or(80),
            authority: HeaderValue::try_from(authority.as_str()).map_err(|_| wrong())?,
            base,
            authorization: api_key.map(bearer).transpose()?,
            model: String::new(),
            ignore_eos,
            idle: Pool::default(),
            tasks: Tasks::new(),
        };
        client.model = match model {
            Some(model) => model.to_owned(),
            None => {
                client.first_model().await.map_err(|failure| ServeError::Models { url: url.to_owned(), failure })?
            }
        };
        Ok(client)
    }

    pub(crate) fn model(&self) -> &str {
        &self.model
    }

    /// Writes the request, so that this costs nothing once the clock runs.
    pub(crate) fn write(&self, ask: &Ask) -> Request<Full<Bytes>> {
        let mut body = json!({
            "model": self.model, "max_tokens": ask.output_len, "temperature": 0, "stream": true,
            "stream_options": {"include_usage": true},
        });
        if self.ignore_eos {
            body["ignore_eos"] = true.into();
            // An end-of-sequence token that was ignored shows as text, or it would look as if nothing came.
            body["skip_special_tokens"] = false.into();
        }
        let path = match &ask.prompt {
            Prompt::Tokens(ids) => {
                body["prompt"] = ids.as_slice().into();
                "completions"
            }
            Prompt::Text(text) => {
                body["prompt"] = text.as_str().into();
                "completions"
            }
            Prompt::Chat(text) => {
                body["messages"] = json!([{"role": "user", "content": text}]);
                "chat/completions"
            }
        };
        self.request("POST", path, Bytes::from(body.to_string()))
    }

    /// Sends a request and reads its answer to the end.
    pub(crate) async fn run(
        &self,
        request: Request<Full<Bytes>>,
        timeline: &mut Timeline,
        live: &Live,
    ) -> Result<(), Failure> {
        if let Some(mut sender) = self.idle.take()
            && sender.ready().await.is_ok()
        {
            match self.exchange(sender, request.clone(), timeline, live).await {
                // The server may close a connection just when it is used again.
                Err(Failure::Disconnected(_)) if !timeline.has_parts() => timeline.restart(),
                result => return result,
            }
        }
        let sender = self.connect().await?;
        self.exchange(sender, request, timeline, live).await
    }

    async fn exchange(
        &self,
        mut sender: Sender,
        request: Request<Full<Bytes>>,
        timeline: &mut Timeline,
        live: &Live,
    ) -> Result<(), Failure> {
        let response = sender.send_request(request).await.map_err(disconnected)?;
        if !response.status().is_success() {
            let status = response.status().as_u16();
            return Err(Failure::Status { status, body: shorten(&text(response).await?) });
        }
        let mut body = response.into_body();
        let mut lines = Lines::default();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(disconnected)?;
            let Some(data) = frame.data_ref() else { continue };
            let now = clock::now();
            let mut error = None;
            lines.feed(data, |data| match sse::read(data) {
                Event::Tokens(usage) => {
                    timeline.part(now);
                    live.part();
                    usage.into_iter().for_each(|usage| timeline.usage(usage));
                }
                Event::Usage(usage) => timeline.usage(usage),
                Event::Done => timeline.end(now),
                Event::Error(text) => error = Some(Failure::Stream(shorten(&text))),
                Event::Other => {}
            })?;
            if let Some(error) = error {
                return Err(error);
            }
        }
        if !timeline.is_ended() {
            return Err(Failure::Disconnected("the stream has no end".to_owned()));
        }
        self.idle.put(sender);
        Ok(())
    }

    async fn connect(&self) -> Result<Sender, Failure> {
        let failed = |error: String| Failure::Connect(error);
        let connecting = TcpStream::connect((self.host.as_str(), self.port));
        let stream = tokio::time::timeout(CONNECT_TIMEOUT, connecting)
            .await
            .map_err(|_| failed(format!("nothing within {CONNECT_TIMEOUT:?}")))?
            .map_err(|error| failed(error.to_string()))?;
        stream.set_nodelay(true).map_err(|error| failed(error.to_string()))?;
        let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream));
        let (sender, connection) = handshake.await.map_err(|error| failed(error.to_string()))?;
        // What goes wrong with a connection is told to the request that it serves.
        self.tasks.spawn("connection", async move { drop(connection.await) });
        Ok(sender)
    }

    async fn first_model(&self) -> Result<String, Failure> {
        let mut sender = self.connect().await?;
        let request = self.request("GET", "models", Bytes::new());
        let response = sender.send_request(request).await.map_err(disconnected)?;
        let status = response.status();
        let body = text(response).await?;
        if !status.is_success() {
            return Err(Failure::Status { status: status.as_u16(), body: shorten(&body) });
        }
        let answer: Value = serde_json::from_str(&body).map_err(|error| Failure::Malformed(error.to_string()))?;
        let id = answer["data"][0]["id"].as_str().map(ToOwned::to_owned);
        id.ok_or_else(|| Failure::Malformed("no model is listed".to_owned()))
    }

    fn request(&self, method: &str, path: &str, body: Bytes) -> Request<Full<Bytes>> {
        let builder = Request::builder().method(method).uri(format!("{}/{path}", self.base));
        let builder = builder.header(HOST, &self.authority).header(CONTENT_TYPE, "application/json");
        let builder = match &self.authorization {
            Some(value) => builder.header(AUTHORIZATION, value),
            None => builder,
        };
        builder.body(Full::new(body)).expect("the path comes from a URI and all headers were checked")
    }
}

async fn text(response: Response<Incoming>) -> Result<String, Failure> {
    let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
    let bytes = body.map_err(|error| Failure::Disconnected(error.to_string()))?.to_bytes();
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn shorten(text: &str) -> String {
    text.chars().take(REFUSAL_CHARS_MAX).collect()
}

fn disconnected(error: hyper::Error) -> Failure {
    Failure::Disconnected(error.to_string())
}
