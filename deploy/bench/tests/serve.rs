//! The load generator against a scripted server: counts, percentiles, errors by kind, deadlines, interrupts.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, missing_docs, reason = "tests: a failed step panics")]

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bench::serve::{
    Amount, Failure, Goals, Lengths, Load, PromptKind, ServeError, ServeOptions, ServeReport, Target, serve,
};
use daemon::shutdown::{Shutdown, Trigger};
use daemon::task::Tasks;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// What the server does with the request of this number.
#[derive(Clone, Copy)]
enum Answer {
    /// So many tokens, then the end.
    Tokens(usize),
    /// A status and no stream.
    Refuse(u16),
    /// One token, then the connection ends.
    Cut,
    /// One token, then nothing.
    Hang,
    /// One token, then an error in the stream.
    GiveUp,
    /// The connection ends once a whole answer was sent, without a word.
    TokensThenClose(usize),
}

struct Server {
    url: String,
    n_connections: Arc<AtomicUsize>,
    _tasks: Tasks,
}

/// Serves until the runtime ends; `script` is asked in the order of requests.
async fn server(script: impl Fn(usize) -> Answer + Send + Sync + 'static) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (tasks, n_connections, n_requests) = (Tasks::new(), Arc::new(AtomicUsize::new(0)), Arc::default());
    let (inner, connections, script) = (tasks.clone(), Arc::clone(&n_connections), Arc::new(script));
    tasks.spawn("server", async move {
        while let Ok((stream, _)) = listener.accept().await {
            connections.fetch_add(1, Ordering::SeqCst);
            let (script, n_requests) = (Arc::clone(&script), Arc::clone(&n_requests));
            inner.spawn("connection", async move { drop(connection(stream, script, n_requests).await) });
        }
    });
    Server { url, n_connections, _tasks: tasks }
}

async fn connection(
    mut stream: TcpStream,
    script: Arc<impl Fn(usize) -> Answer>,
    n_requests: Arc<AtomicUsize>,
) -> std::io::Result<()> {
    while let Some(head) = request(&mut stream).await? {
        if head.starts_with("GET /v1/models") {
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 26\r\n\r\n{\"data\":[{\"id\":\"listed\"}]}").await?;
            continue;
        }
        let answer = script(n_requests.fetch_add(1, Ordering::SeqCst));
        if let Answer::Refuse(status) = answer {
            let refusal = format!("HTTP/1.1 {status} No\r\ncontent-length: 4\r\n\r\nbusy");
            stream.write_all(refusal.as_bytes()).await?;
            continue;
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await?;
        let n_tokens = match answer {
            Answer::Tokens(n) | Answer::TokensThenClose(n) => n,
            _ => 1,
        };
        for _ in 0..n_tokens {
            chunk(&mut stream, "data: {\"choices\":[{\"text\":\" a\"}]}\n\n").await?;
        }
        match answer {
            Answer::Cut => return Ok(()),
            Answer::Hang => std::future::pending().await,
            Answer::GiveUp => chunk(&mut stream, "data: {\"error\":{\"message\":\"lost\"}}\n\n").await?,
            Answer::Tokens(_) | Answer::TokensThenClose(_) | Answer::Refuse(_) => {
                let usage = format!("{{\"prompt_tokens\":9,\"completion_tokens\":{n_tokens}}}");
                // Split in the middle of a line, as networks do.
                chunk(&mut stream, "data: {\"choices\":[],\"usa").await?;
                chunk(&mut stream, &format!("ge\":{usage}}}\n\ndata: [DONE]\n\n")).await?;
            }
        }
        stream.write_all(b"0\r\n\r\n").await?;
        if matches!(answer, Answer::TokensThenClose(_)) {
            return Ok(());
        }
    }
    Ok(())
}

async fn chunk(stream: &mut TcpStream, text: &str) -> std::io::Result<()> {
    stream.write_all(format!("{:x}\r\n{text}\r\n", text.len()).as_bytes()).await
}

/// Reads one request with its body and returns its head; none at the end of the connection.
async fn request(stream: &mut TcpStream) -> std::io::Result<Option<String>> {
    let mut bytes = Vec::new();
    loop {
        if stream.read_buf(&mut bytes).await? == 0 {
            return Ok(None);
        }
        let text = String::from_utf8_lossy(&bytes);
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        if body.len() >= length.map_or(0, |length| length.parse().unwrap()) {
            return Ok(Some(head.to_owned()));
        }
    }
}

fn options(url: &str, load: Load, amount: Amount) -> ServeOptions {
    ServeOptions {
        target: Target::Http { url: url.to_owned(), api_key: None },
        model: None,
        prompt: PromptKind::Tokens { vocab_size: NonZeroU32::new(100).unwrap() },
        lengths: Lengths {
            input: 9,
            output: 4,
            spread: 0.0,
            shared_prefix: 0,
            ignore_eos: true,
            trace_max: (u32::MAX, u32::MAX),
        },
        points: vec![load],
        amount,
        trace: None,
        trace_name: None,
        warmup: 0,
        timeout: Duration::from_secs(60),
        connections_max: 64,
        goals: Goals::default(),
        seed: 1,
    }
}

const FOUR: Load = Load::Closed { concurrency: 4 };

async fn run(options: &ServeOptions) -> ServeReport {
    serve(options, &Shutdown::never()).await.unwrap()
}

#[tokio::test]
async fn all_is_counted_and_connections_are_used_again() {
    let server = server(|_| Answer::Tokens(4)).await;
    let report = run(&ServeOptions { warmup: 3, ..options(&server.url, FOUR, Amount::PerSlot(5)) }).await;
    let point = &report.points[0];
    assert_eq!((report.model.as_str(), point.requests, point.completed, point.short), ("listed", 20, 20, 0));
    assert_eq!((point.input_tokens, point.output_tokens, point.itl_ms.n), (180, 80, 60));
    for times in [&point.ttft_ms, &point.itl_ms, &point.e2e_ms] {
        let ordered = [times.min, times.p50, times.p90, times.p99, times.max];
        assert!(ordered.is_sorted() && times.min >= 0.0, "{times:?}");
    }
    assert!(point.output_tokens_per_s > 0.0 && point.duration_s > 0.0);
    // One for the list of models, three to warm up, four at once; kept alive.
    assert!(server.n_connections.load(Ordering::SeqCst) <= 8);
    let html = report.html();
    assert!(html.contains("<svg") && html.ends_with("</html>\n"));
    let without_namespace = html.replace("http://127.0.0.1", "");
    assert!(!without_namespace.contains("http"), "the page loads nothing");
}

#[tokio::test]
async fn failures_are_counted_by_kind_beside_what_succeeds() {
    let script = [
        Answer::Tokens(4),
        Answer::Refuse(429),
        Answer::Cut,
        Answer::GiveUp,
        Answer::Tokens(2),
        Answer::Refuse(500),
        Answer::Hang,
        Answer::Tokens(4),
    ];
    let server = server(move |n| script[n % script.len()]).await;
    let load = Load::Closed { concurrency: 1 };
    let options = ServeOptions { timeout: Duration::from_secs(3), ..options(&server.url, load, Amount::Requests(8)) };
    let point = run(&options).await.points.remove(0);
    assert_eq!((point.requests, point.completed, point.short, point.interrupted), (8, 3, 1, 0));
    let errors: Vec<(&str, usize)> = point.errors.iter().map(|(kind, n)| (kind.as_str(), *n)).collect();
    let expected = [("disconnected", 1), ("status_429", 1), ("status_500", 1), ("stream", 1), ("timeout", 1)];
    assert_eq!(errors, expected, "{:?}", point.error_examples);
    assert!(point.error_examples["stream"].contains("lost") && point.error_examples["status_429"].contains("busy"));
    assert_eq!(point.goodput_fraction, 3.0 / 8.0);
}

#[tokio::test]
async fn a_connection_that_the_server_closed_between_requests_is_no_failure() {
    let server = server(|_| Answer::TokensThenClose(4)).await;
    let point = run(&options(&server.url, FOUR, Amount::PerSlot(4))).await.points.remove(0);
    assert_eq!((point.completed, point.errors.len()), (16, 0), "{:?}", point.error_examples);
}

#[tokio::test]
async fn arrivals_end_with_their_time_and_connections_are_bounded() {
    let server = server(|_| Answer::Tokens(4)).await;
    let load = Load::Open { rate: 200.0 };
    let amount = Amount::For(Duration::from_millis(300));
    let options =
        ServeOptions { connections_max: 2, model: Some("m".to_owned()), ..options(&server.url, load, amount) };
    let point = run(&options).await.points.remove(0);
    assert!((20..=120).contains(&point.completed), "{} of about 60", point.completed);
    assert_eq!(point.completed, point.requests);
    assert!(server.n_connections.load(Ordering::SeqCst) <= 2);
}

#[tokio::test]
async fn an_interrupt_ends_at_once_and_what_was_measured_is_reported() {
    let (trigger, shutdown): (Trigger, Shutdown) = Shutdown::pair();
    let server = server(move |n| {
        if n == 5 {
            trigger.fire();
        }
        if n < 4 { Answer::Tokens(4) } else { Answer::Hang }
    })
    .await;
    let two = Load::Closed { concurrency: 2 };
    let options = ServeOptions { points: vec![two, two], ..options(&server.url, two, Amount::Requests(100)) };
    let report = serve(&options, &shutdown).await.unwrap();
    assert!(report.interrupted);
    assert_eq!(report.points.len(), 1, "no further point is begun");
    let point = &report.points[0];
    assert_eq!((point.completed, point.interrupted, point.errors.len()), (4, 2, 0));
    assert_eq!(point.goodput_fraction, 1.0);
}

#[tokio::test]
async fn a_target_that_cannot_be_asked_is_named() {
    let gone = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let url = format!("http://{gone}");
    let error = serve(&options(&url, FOUR, Amount::PerSlot(1)), &Shutdown::never()).await.unwrap_err();
    assert!(matches!(error, ServeError::Models { .. }) && error.to_string().contains(&url), "{error}");
    for wrong in ["https://127.0.0.1:1", "127.0.0.1:8080", "nonsense", ""] {
        let error = serve(&options(wrong, FOUR, Amount::PerSlot(1)), &Shutdown::never()).await.unwrap_err();
        assert!(matches!(error, ServeError::Url { .. }), "{wrong}: {error}");
    }
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent = format!("http://{}", listener.local_addr().unwrap());
    let hurried = ServeOptions { timeout: Duration::from_millis(50), ..options(&silent, FOUR, Amount::PerSlot(1)) };
    let error = serve(&hurried, &Shutdown::never()).await.unwrap_err();
    assert!(matches!(error, ServeError::Models { failure: Failure::Timeout(_), .. }), "{error}");
    let (trigger, shutdown) = Shutdown::pair();
    trigger.fire();
    let error = serve(&options(&silent, FOUR, Amount::PerSlot(1)), &shutdown).await.unwrap_err();
    assert!(matches!(error, ServeError::Models { failure: Failure::Interrupted, .. }), "{error}");
    let named = ServeOptions { model: Some("m".to_owned()), ..options(&url, FOUR, Amount::PerSlot(1)) };
    let point = run(&named).await.points.remove(0);
    assert_eq!((point.completed, point.errors["connect"]), (0, 4));
    let page = run(&named).await.html();
    assert!(page.contains("4 failed (connect)") && !page.contains("<svg"), "{page}");
    let point = run(&ServeOptions { amount: Amount::For(Duration::from_millis(300)), ..named }).await.points.remove(0);
    assert!(point.requests <= 40, "slots pause when nobody can be reached: {} requests", point.requests);
}
