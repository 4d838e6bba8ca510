//! The requests of a load: a pure function of options, seed and index.

use std::time::Duration;

use super::options::{Amount, Lengths, Load, PromptKind, ServeOptions};
use super::trace::{TRACE_BLOCK_TOKENS, TraceEntry};
use crate::random::Random;

/// Requests of a point that nothing else bounds.
const REQUESTS_MAX: usize = 1 << 20;

/// Ids below are special tokens in most vocabularies.
const FIRST_PLAIN_TOKEN: u32 = 20;

/// Streams of random numbers; prompts take those from `PROMPTS` on.
const SHARED: u64 = 0;
const ARRIVALS: u64 = 1;
const BLOCKS: u64 = 1 << 62;
const PROMPTS: u64 = 1 << 63;

/// Common words that most tokenizers have whole, with the space before them.
const WORDS: [&str; 64] = [
    "the", "of", "and", "to", "in", "is", "that", "for", "it", "was", "on", "are", "as", "with", "they", "at", "be",
    "this", "from", "have", "or", "by", "one", "had", "not", "but", "what", "all", "were", "when", "we", "there",
    "can", "an", "your", "which", "their", "said", "if", "do", "will", "each", "about", "how", "up", "out", "them",
    "then", "she", "many", "some", "so", "these", "would", "other", "into", "has", "more", "her", "two", "like", "him",
    "time", "see",
];

/// One request, before it is written for a protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ask {
    pub(crate) prompt: Prompt,
    /// Tokens of the prompt, as far as we know.
    pub(crate) input_len: u32,
    pub(crate) output_len: u32,
}

/// A prompt in one of its forms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Prompt {
    Tokens(Vec<u32>),
    Text(String),
    Chat(String),
}

/// Makes requests.
#[derive(Clone, Debug)]
pub(crate) struct Workload {
    kind: PromptKind,
    lengths: Lengths,
    trace: Option<Vec<TraceEntry>>,
    seed: u64,
}

impl Workload {
    pub(crate) fn new(options: &ServeOptions) -> Self {
        let ServeOptions { prompt: kind, lengths, trace, seed, .. } = options.clone();
        Self { kind, lengths, trace, seed }
    }

    /// Requests that a point sends at most.
    pub(crate) fn n_requests(&self, load: &Load, amount: Amount) -> usize {
        let n = match amount {
            Amount::Requests(n) => n,
            Amount::PerSlot(n) => load.concurrency().unwrap_or(1).saturating_mul(n),
            Amount::For(_) => REQUESTS_MAX,
        };
        n.min(self.trace.as_ref().map_or(REQUESTS_MAX, Vec::len))
    }

    /// Request `index` of point `point`; no two points or indices share a prompt, prefixes and trace blocks apart.
    pub(crate) fn ask(&self, point: u32, index: usize) -> Ask {
        let mut random = Random::new(self.seed, PROMPTS | u64::from(point) << 32 | index as u64);
        let (input, output, blocks) = match self.trace.as_ref().and_then(|trace| trace.get(index)) {
            Some(entry) => {
                let (input_max, output_max) = self.lengths.trace_max;
                (entry.input_len.min(input_max), entry.output_len.min(output_max), entry.blocks.as_slice())
            }
            None => {
                (self.spread(&mut random, self.lengths.input), self.spread(&mut random, self.lengths.output), &[][..])
            }
        };
        let mut ids = Vec::with_capacity((self.lengths.shared_prefix + input) as usize);
        self.extend(&mut ids, &mut Random::new(self.seed, SHARED), self.lengths.shared_prefix);
        let end = ids.len() + input as usize;
        for block in blocks {
            let n = TRACE_BLOCK_TOKENS.min((end - ids.len()) as u32);
            self.extend(&mut ids, &mut Random::new(self.seed, BLOCKS ^ block), n);
        }
        let n_unique = (end - ids.len()) as u32;
        self.extend(&mut ids, &mut random, n_unique);
        let input_len = ids.len() as u32;
        let prompt = match self.kind {
            PromptKind::Tokens { .. } => Prompt::Tokens(ids),
            PromptKind::Text => Prompt::Text(text(&ids)),
            PromptKind::Chat => Prompt::Chat(text(&ids)),
        };
        Ask { prompt, input_len, output_len: output.max(1) }
    }

    /// When the requests of an open point start, counted from its beginning; a closed point has no times.
    pub(crate) fn arrivals(&self, point: u32, load: &Load) -> Arrivals<'_> {
        let random = Random::new(self.seed, ARRIVALS | u64::from(point) << 32);
        match load {
            Load::Closed { .. } => Arrivals::Trace { entries: &[], speed: 1.0 },
            Load::Open { rate } => Arrivals::Poisson { rate: *rate, random, at_s: 0.0 },
            Load::Replayed { speed } => {
                Arrivals::Trace { entries: self.trace.as_deref().unwrap_or_default(), speed: *speed }
            }
        }
    }

    fn spread(&self, random: &mut Random, length: u32) -> u32 {
        let reach = (f64::from(length) * self.lengths.spread.clamp(0.0, 1.0)) as u32;
        (length - reach + random.below(2 * reach + 1)).max(1)
    }

    fn extend(&self, ids: &mut Vec<u32>, random: &mut Random, n: u32) {
        let (first, bound) = match self.kind {
            PromptKind::Tokens { vocab_size } => {
                let first = FIRST_PLAIN_TOKEN.min(vocab_size.get() - 1);
                (first, vocab_size.get() - first)
            }
            PromptKind::Text | PromptKind::Chat => (0, WORDS.len() as u32),
        };
        ids.extend((0..n).map(|_| first + random.below(bound)));
    }
}

/// Start times, ascending.
#[derive(Clone, Debug)]
pub(crate) enum Arrivals<'a> {
    /// Independent exponential gaps.
    Poisson {
        rate: f64,
        random: Random,
        at_s: f64,
    },
    Trace {
        entries: &'a [TraceEntry],
        speed: f64,
    },
}

impl Iterator for Arrivals<'_> {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        match self {
            Self::Poisson { rate, random, at_s } => {
                let now = *at_s;
                *at_s -= random.unit().ln() / *rate;
                Duration::try_from_secs_f64(now).ok()
            }
            Self::Trace { entries, speed } => {
                let (first, rest) = entries.split_first()?;
                *entries = rest;
                Duration::try_from_secs_f64(first.after.as_secs_f64() / *speed).ok()
            }
        }
    }
}

fn text(ids: &[u32]) -> String {
    ids.iter().map(|&id| WORDS[id as usize]).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;

    const LENGTHS: Lengths =
        Lengths { input: 100, output: 10, spread: 0.0, shared_prefix: 0, ignore_eos: true, trace_max: (1000, 20) };

    fn workload(lengths: Lengths) -> Workload {
        let kind = PromptKind::Tokens { vocab_size: NonZeroU32::new(500).unwrap() };
        Workload { kind, lengths, trace: None, seed: 7 }
    }

    fn tokens(ask: Ask) -> Vec<u32> {
        match ask.prompt {
            Prompt::Tokens(tokens) => tokens,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn prompts_repeat_by_index_and_share_only_the_prefix() {
        let workload = workload(Lengths { shared_prefix: 32, ..LENGTHS });
        assert_eq!(workload.ask(0, 3), workload.ask(0, 3));
        let (a, b) = (tokens(workload.ask(0, 0)), tokens(workload.ask(1, 0)));
        assert_eq!((a.len(), a[..32] == b[..32], a[32..40] == b[32..40]), (132, true, false));
        assert!(a.iter().all(|&id| (FIRST_PLAIN_TOKEN..500).contains(&id)));
    }

    #[test]
    fn lengths_spread_around_their_mean() {
        let workload = workload(Lengths { spread: 0.2, ..LENGTHS });
        let lengths: Vec<usize> = (0..500).map(|index| tokens(workload.ask(0, index)).len()).collect();
        assert!(lengths.iter().all(|n| (80..=120).contains(n)));
        assert!(lengths.iter().any(|&n| n < 85) && lengths.iter().any(|&n| n > 115));
    }

    #[test]
    fn traces_share_blocks_and_are_cut_to_the_bounds() {
        let entry = |input_len, blocks: &[u64]| TraceEntry {
            after: Duration::from_secs(2),
            input_len,
            output_len: 99,
            blocks: blocks.to_vec(),
        };
        let trace = Some(vec![entry(700, &[1, 2]), entry(5000, &[1, 3])]);
        let workload = Workload { trace, ..workload(LENGTHS) };
        let (a, b) = (workload.ask(0, 0), workload.ask(0, 1));
        assert_eq!((a.input_len, b.input_len, b.output_len), (700, 1000, 20));
        let (a, b) = (tokens(a), tokens(b));
        assert!(a[..512] == b[..512] && a[512..600] != b[512..600]);
        let load = Load::Replayed { speed: 4.0 };
        assert_eq!(workload.n_requests(&load, Amount::For(Duration::ZERO)), 2);
        assert_eq!(workload.arrivals(0, &load).next(), Some(Duration::from_millis(500)));
    }

    #[test]
    fn poisson_arrivals_repeat_by_seed_and_have_the_rate() {
        let workload = workload(LENGTHS);
        let load = Load::Open { rate: 50.0 };
        let times: Vec<Duration> = workload.arrivals(0, &load).take(10_000).collect();
        let again: Vec<Duration> = workload.arrivals(0, &load).take(10_000).collect();
        assert!(times == again && times.is_sorted());
        let rate = 10_000.0 / times[9_999].as_secs_f64();
        assert!((48.0..52.0).contains(&rate), "{rate}");
        // The coefficient of variation of exponential gaps is 1.
        let gaps: Vec<f64> = times.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        assert!((0.9..1.1).contains(&(variance.sqrt() / mean)));
    }

    #[test]
    fn text_is_words() {
        let workload = Workload { kind: PromptKind::Text, ..workload(LENGTHS) };
        let Prompt::Text(text) = workload.ask(0, 0).prompt else { panic!("not text") };
        assert_eq!(text.split(' ').count(), 100);
    }
}
