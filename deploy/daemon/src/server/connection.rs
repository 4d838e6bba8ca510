//! Accepts connections, drives each, and ends them all in good order.

use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::rt::Executor;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

use super::listener::BACKLOG;
use super::metrics::{Counted, Metrics};
use super::stack::Stack;
use super::{Listener, Readiness, ServerConfig, ms};
use crate::shutdown::Shutdown;
use crate::task::Tasks;

/// Pause after an accept that failed, for want of file descriptors most likely.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Time for connections to notice that they were cut.
const CUT: Duration = Duration::from_secs(1);

/// Time that a connection has for its first request when the server drains.
const FIRST_WORD: Duration = Duration::from_millis(250);

/// Bytes from which hyper knows the protocol; it waits for them without a deadline of its own.
const PREFACE_BYTES: usize = 24;

/// Largest head of an HTTP/2 request.
const HEADER_LIST_BYTES: u32 = 64 << 10;

/// What a server's connections share.
pub(super) struct Settings {
    pub(super) config: ServerConfig,
    pub(super) readiness: Readiness,
    pub(super) metrics: Metrics,
}

/// Serves until `shutdown`, then drains.
pub(super) async fn serve_until(listener: Listener, stack: Stack, settings: Settings, shutdown: Shutdown) {
    let Settings { config, readiness, metrics } = settings;
    let tasks = Tasks::new();
    let shared = Arc::new(Shared {
        builder: builder(&config, &tasks),
        stack,
        read_timeout: ms(config.read_timeout_ms),
        draining: CancellationToken::new(),
        cut: CancellationToken::new(),
    });
    let mut closing = pin!(async {
        shutdown.triggered().await;
        readiness.drain();
        tokio::time::sleep(ms(config.drain_delay_ms)).await;
    });
    loop {
        let accepted = tokio::select! {
            biased;
            () = &mut closing => break,
            accepted = listener.accept(ms(config.keepalive_interval_ms), ms(config.keepalive_timeout_ms)) => accepted,
        };
        match accepted {
            Ok(stream) => admit(stream, &shared, &tasks, &metrics, config.n_connections_max),
            Err(error) if is_of_one_connection(&error) => {}
            Err(error) => {
                tracing::warn!(%error, "cannot accept connections");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    // Who was let in by the system before it closed is no refused connection to its client, so it is served.
    for _ in 0..BACKLOG {
        let waiting = listener.accept(ms(config.keepalive_interval_ms), ms(config.keepalive_timeout_ms));
        let Ok(Ok(stream)) = tokio::time::timeout(Duration::ZERO, waiting).await else { break };
        admit(stream, &shared, &tasks, &metrics, config.n_connections_max);
    }
    drop(listener);
    shared.draining.cancel();
    if let Err(error) = tasks.join(ms(config.grace_ms)).await {
        tracing::warn!(%error, "the grace period is over: cutting connections");
        shared.cut.cancel();
        if let Err(error) = tasks.join(CUT).await {
            tracing::error!(%error, "connections outlive their server");
        }
    }
    metrics.retire();
}

struct Shared {
    builder: Builder<TaskExecutor>,
    stack: Stack,
    read_timeout: Duration,
    draining: CancellationToken,
    cut: CancellationToken,
}

fn builder(config: &ServerConfig, tasks: &Tasks) -> Builder<TaskExecutor> {
    let mut builder = Builder::new(TaskExecutor(tasks.clone()));
    builder.http1().timer(TokioTimer::new()).header_read_timeout(ms(config.read_timeout_ms));
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(config.n_streams_per_connection_max)
        .max_header_list_size(HEADER_LIST_BYTES)
        .keep_alive_interval(ms(config.keepalive_interval_ms))
        .keep_alive_timeout(ms(config.keepalive_timeout_ms));
    builder
}

/// Errors of accept(2) that say nothing of the listener.
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, NotConnected};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | NotConnected)
}

/// Starts a connection's task, or closes it when there are too many.
fn admit(stream: TcpStream, shared: &Arc<Shared>, tasks: &Tasks, metrics: &Metrics, n_max: usize) {
    if metrics.connections.get() >= i64::try_from(n_max).unwrap_or(i64::MAX) {
        metrics.refused_connections.inc();
        tracing::debug!(n_max, "too many connections: closing a new one");
        return;
    }
    let counted = Counted::new(&metrics.connections);
    let shared = Arc::clone(shared);
    tasks.spawn("connection", async move {
        let _counted = counted;
        drive(stream, &shared).await;
    });
}

/// Drives one connection to its end.
async fn drive(stream: TcpStream, shared: &Shared) {
    let n_read = Arc::new(AtomicUsize::new(0));
    let io = TokioIo::new(Counting { stream, n_read: Arc::clone(&n_read) });
    let mut connection = pin!(shared.builder.serve_connection(io, shared.stack.clone()));
    let mut silence = pin!(tokio::time::sleep(shared.read_timeout));
    let (mut draining, mut spoke) = (false, false);
    // Who has just connected is about to ask something, and hyper would close the connection before that.
    let mut drained = pin!(async {
        shared.draining.cancelled().await;
        if n_read.load(Ordering::Relaxed) == 0 {
            tokio::time::sleep(FIRST_WORD).await;
        }
    });
    loop {
        tokio::select! {
            result = connection.as_mut() => {
                if let Err(error) = result {
                    tracing::debug!(error, "a connection ended");
                }
                return;
            }
            () = shared.cut.cancelled() => return,
            () = &mut drained, if !draining => {
                draining = true;
                connection.as_mut().graceful_shutdown();
            }
            () = &mut silence, if !spoke => {
                spoke = true;
                if n_read.load(Ordering::Relaxed) < PREFACE_BYTES {
                    tracing::debug!("closing a connection that said nothing");
                    return;
                }
            }
        }
    }
}

/// Runs hyper's tasks, one for each HTTP/2 stream, where they are counted.
#[derive(Clone)]
struct TaskExecutor(Tasks);

impl<F> Executor<F> for TaskExecutor
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    fn execute(&self, future: F) {
        self.0.spawn("http2 stream", future);
    }
}

/// A stream that counts what was read from it.
struct Counting {
    stream: TcpStream,
    n_read: Arc<AtomicUsize>,
}

impl AsyncRead for Counting {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let result = Pin::new(&mut self.stream).poll_read(context, buffer);
        self.n_read.fetch_add(buffer.filled().len() - before, Ordering::Relaxed);
        result
    }
}

impl AsyncWrite for Counting {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
