//! What a load is made of.

use std::fmt;
use std::num::NonZeroU32;
use std::time::Duration;

use serde::Serialize;

use super::trace::TraceEntry;

/// Everything `tessera bench serve` is told.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// Who is asked.
    pub target: Target,
    /// Name of the model to ask for; none takes the first that the target lists.
    pub model: Option<String>,
    /// What a prompt is made of.
    pub prompt: PromptKind,
    /// Tokens of prompts and outputs.
    pub lengths: Lengths,
    /// Points of load, measured one after the other.
    pub points: Vec<Load>,
    /// When a point has enough requests.
    pub amount: Amount,
    /// Requests to copy, in order, in place of [`Lengths`]; a point sends no more than there are.
    pub trace: Option<Vec<TraceEntry>>,
    /// Name of the trace, for the report.
    pub trace_name: Option<String>,
    /// Requests sent before the first point, as many at once as it has, and not counted.
    pub warmup: usize,
    /// Time that one request may take, waiting for a connection included.
    pub timeout: Duration,
    /// Connections, and so requests, at once at most.
    pub connections_max: usize,
    /// What a request must reach to count as good.
    pub goals: Goals,
    /// Makes prompts, lengths and arrival times repeatable.
    pub seed: u64,
}

/// Who is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// An OpenAI-compatible server.
    Http {
        /// `http://HOST:PORT`, with a path before `/v1` if there is one.
        url: String,
        /// Sent as a bearer token.
        api_key: Option<String>,
    },
    /// A Tessera router's gRPC at `HOST:PORT`.
    Grpc(String),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Http { url, .. } => f.write_str(url),
            Self::Grpc(address) => f.write_str(address),
        }
    }
}

/// What a prompt is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptKind {
    /// Random token ids below a vocabulary size.
    Tokens {
        /// Ids are below it.
        vocab_size: NonZeroU32,
    },
    /// Random common English words, about one token each, to be continued.
    Text,
    /// The same words as a user's message.
    Chat,
}

/// Tokens of prompts and outputs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lengths {
    /// Tokens of a prompt after the shared prefix.
    pub input: u32,
    /// Tokens generated.
    pub output: u32,
    /// Lengths are uniform within this part (0..=1) of themselves: 0.2 of 100 is 80..=120.
    pub spread: f64,
    /// Tokens with which every prompt begins.
    pub shared_prefix: u32,
    /// Whether the server is told to go on after an end-of-sequence token.
    pub ignore_eos: bool,
    /// Longest prompt and output copied from a trace.
    pub trace_max: (u32, u32),
}

/// One point of load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Load {
    /// So many requests at any time: each that ends starts another.
    Closed {
        /// Requests at once.
        concurrency: usize,
    },
    /// Poisson arrivals, whatever is still running.
    Open {
        /// Mean requests per second.
        rate: f64,
    },
    /// Arrivals as in the trace.
    Replayed {
        /// 2 is twice as fast as the trace.
        speed: f64,
    },
}

/// When a point has enough requests; those that run are waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    /// So many in all.
    Requests(usize),
    /// So many for each of the requests at once, one after the other.
    PerSlot(usize),
    /// As many as start within this time.
    For(Duration),
}

/// What a request must reach to count as good; none is reached by all that complete.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Goals {
    /// Longest time to first token.
    pub ttft_ms: Option<f64>,
    /// Longest time per output token.
    pub tpot_ms: Option<f64>,
}

impl Load {
    /// Requests at once that it asks for, if it says.
    #[must_use]
    pub fn concurrency(&self) -> Option<usize> {
        match self {
            Self::Closed { concurrency } => Some(*concurrency),
            Self::Open { .. } | Self::Replayed { .. } => None,
        }
    }
}
