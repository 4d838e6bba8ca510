//! One connection between two workers: frames in and out, each wait with a deadline.
//!
//! A frame that has begun goes on without a pause, so that a peer which vanishes inside one is noticed long before the
//! deadline of all.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use daemon::clock;
use kernels::memory::checksum::Checksum;
use kernels::memory::runs::Runs;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{self, RecvFlags, SendFlags, Shutdown, sockopt};
use thiserror::Error;
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};

use super::frame::{HEADER_BYTES, Header, HeaderError, Kind};
use super::message::{MESSAGE_BYTES_MAX, Message, MessageError};

/// Bytes that the system may hold of a connection, on each side: some frames, so that both sides copy all the time. The
/// system allows less where it is told so.
const SOCKET_BYTES: usize = 4 << 20;

/// A connection; reading and writing may go on at the same time, each by one task.
#[derive(Debug)]
pub(super) struct Link {
    stream: TcpStream,
    /// Longest time in which nothing of a frame that has begun comes or goes.
    pause_max: Duration,
}

/// A connection can be used no longer.
#[derive(Debug, Error)]
pub(crate) enum LinkError {
    /// The peer closed it, or its process ended.
    #[error("the peer closed the connection")]
    Closed,
    /// The system says so.
    #[error("the connection failed")]
    Io(#[source] io::Error),
    /// The deadline passed.
    #[error("the deadline passed")]
    Late,
    /// Nothing came, or nothing was taken, for too long.
    #[error("nothing moved for {} ms", .0.as_millis())]
    Silent(Duration),
    /// What came is no frame.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// What came is no message.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// A frame or message that has no place here.
    #[error("unexpected: {0}")]
    Unexpected(String),
}

impl From<io::Error> for LinkError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::UnexpectedEof => Self::Closed,
            _ => Self::Io(error),
        }
    }
}

impl Link {
    pub(super) fn new(stream: TcpStream, pause_max: Duration) -> io::Result<Self> {
        tune(&stream)?;
        // What the system has taken and the peer's system does not confirm counts as well.
        let pause_ms = i32::try_from(pause_max.as_millis()).unwrap_or(i32::MAX);
        sockopt::set_tcp_user_timeout(&stream, pause_ms.unsigned_abs())?;
        Ok(Self { stream, pause_max })
    }

    /// Whether the peer has closed the connection or its process ended, whatever is still to be read; asks the system.
    pub(super) fn is_closed(&self) -> bool {
        let mut polled = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let over = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        !matches!(poll(&mut polled, Some(&at_once)), Ok(0)) && polled[0].revents().intersects(over)
    }

    /// Closes the connection both ways, at once; the peer of a process on this host sees it as soon as this returns.
    pub(super) fn close(&self) {
        // What fails here is closed already.
        let _ = net::shutdown(&self.stream, Shutdown::Both);
    }

    /// Whether something waits to be read; asks the system.
    pub(super) fn has_input(&self) -> bool {
        let mut polled = [PollFd::new(&self.stream, PollFlags::IN)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        !matches!(poll(&mut polled, Some(&at_once)), Ok(0))
    }

    pub(super) async fn say(&self, message: &Message, until: Instant) -> Result<(), LinkError> {
        let bytes = message.encode();
        self.write(&[&Header::of_message(&bytes).to_bytes(), &bytes[..]].concat(), until).await
    }

    /// Sends bytes that a frame consists of.
    pub(super) async fn write(&self, bytes: &[u8], until: Instant) -> Result<(), LinkError> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let send = || Ok(net::send(&self.stream, rest, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?);
            let n_bytes = self.moves(until, Interest::WRITABLE, send).await?;
            rest = &rest[n_bytes..];
        }
        Ok(())
    }

    /// Sends a header and blocks straight from the pool.
    pub(super) async fn write_blocks(&self, header: &Header, runs: &Runs, until: Instant) -> Result<(), LinkError> {
        let head = header.to_bytes();
        let (mut at, end) = (0, head.len() + runs.n_bytes());
        while at < end {
            let send = || runs.send(self.stream.as_fd(), &head, at);
            at += self.moves(until, Interest::WRITABLE, send).await?;
        }
        Ok(())
    }

    /// Reads what a frame begins with, which may be long in coming.
    pub(super) async fn read_header(&self, until: Instant) -> Result<Header, LinkError> {
        let mut bytes = [0; HEADER_BYTES];
        let receive = || Ok(net::recv(&self.stream, &mut bytes[..], RecvFlags::DONTWAIT)?.0);
        let n_bytes = by(until, self.stream.async_io(Interest::READABLE, receive)).await?;
        if n_bytes == 0 {
            return Err(LinkError::Closed);
        }
        self.read(&mut bytes[n_bytes..], until).await?;
        Ok(Header::from_bytes(&bytes)?)
    }

    /// Reads what follows a message's header.
    pub(super) async fn read_message(&self, header: &Header, until: Instant) -> Result<Message, LinkError> {
        if header.kind != Kind::Message || header.payload_bytes > MESSAGE_BYTES_MAX {
            return Err(LinkError::Unexpected(format!("{:?} of {} bytes", header.kind, header.payload_bytes)));
        }
        let mut bytes = vec![0; header.payload_bytes as usize];
        self.read(&mut bytes, until).await?;
        let (stated, actual) = (header.payload_sum, Checksum::of(&bytes));
        if stated != actual {
            return Err(HeaderError::Checksum { stated, actual }.into());
        }
        Ok(Message::decode(&bytes)?)
    }

    /// Reads the next frame, which must be a message.
    pub(super) async fn hear(&self, until: Instant) -> Result<Message, LinkError> {
        let header = self.read_header(until).await?;
        self.read_message(&header, until).await
    }

    pub(super) async fn read(&self, bytes: &mut [u8], until: Instant) -> Result<(), LinkError> {
        let mut at = 0;
        while at < bytes.len() {
            let receive = || Ok(net::recv(&self.stream, &mut bytes[at..], RecvFlags::DONTWAIT)?.0);
            let n_bytes = self.moves(until, Interest::READABLE, receive).await?;
            if n_bytes == 0 {
                return Err(LinkError::Closed);
            }
            at += n_bytes;
        }
        Ok(())
    }

    /// Receives blocks straight into the pool and sums them while they are in the cache.
    pub(super) async fn read_blocks(&self, runs: &Runs, until: Instant) -> Result<u64, LinkError> {
        let (mut at, mut checksum) = (0, Checksum::new());
        while at < runs.n_bytes() {
            let receive = || runs.receive(self.stream.as_fd(), at);
            let n_bytes = self.moves(until, Interest::READABLE, receive).await?;
            if n_bytes == 0 {
                return Err(LinkError::Closed);
            }
            runs.sum(at, n_bytes, &mut checksum);
            at += n_bytes;
        }
        Ok(checksum.value())
    }

    /// Reads bytes that nobody wants.
    pub(super) async fn skip(&self, mut n_bytes: u64, until: Instant) -> Result<(), LinkError> {
        let mut scratch = vec![0; (64 << 10).min(n_bytes as usize)];
        while n_bytes > 0 {
            let part = n_bytes.min(scratch.len() as u64);
            self.read(&mut scratch[..part as usize], until).await?;
            n_bytes -= part;
        }
        Ok(())
    }

    /// Moves bytes of a frame that has begun.
    async fn moves(
        &self,
        until: Instant,
        interest: Interest,
        what: impl FnMut() -> io::Result<usize>,
    ) -> Result<usize, LinkError> {
        let silent_at = Instant::from_std(clock::now() + self.pause_max);
        let moved = by(until.min(silent_at), self.stream.async_io(interest, what)).await;
        self.or_silent(moved, silent_at < until)
    }

    /// [`Self::read_header`] of a peer that always has something to say.
    pub(super) async fn read_header_soon(&self, until: Instant) -> Result<Header, LinkError> {
        let silent_at = Instant::from_std(clock::now() + self.pause_max);
        let header = self.read_header(until.min(silent_at)).await;
        self.or_silent(header, silent_at < until)
    }

    fn or_silent<T>(&self, result: Result<T, LinkError>, is_silence: bool) -> Result<T, LinkError> {
        match result {
            Err(LinkError::Late) if is_silence => Err(LinkError::Silent(self.pause_max)),
            result => result,
        }
    }
}

/// Sets a socket up for large frames.
pub(super) fn tune(socket: impl AsFd) -> io::Result<()> {
    sockopt::set_tcp_nodelay(&socket, true)?;
    sockopt::set_socket_send_buffer_size(&socket, SOCKET_BYTES)?;
    Ok(sockopt::set_socket_recv_buffer_size(&socket, SOCKET_BYTES)?)
}

async fn by<T>(until: Instant, what: impl Future<Output = io::Result<T>>) -> Result<T, LinkError> {
    match timeout_at(until, what).await {
        Ok(result) => Ok(result?),
        Err(_) => Err(LinkError::Late),
    }
}
