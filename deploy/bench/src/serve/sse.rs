//! Server-sent events of OpenAI's API, read with as little work as tells tokens from the rest.
//! Hot path: no allocation unless a line is split between chunks.

use serde::Deserialize;

/// Longest line of a stream.
const LINE_BYTES_MAX: usize = 1 << 20;

/// Keys whose text means that tokens came.
const TEXT_KEYS: [&[u8]; 3] = [b"text\"", b"content\"", b"reasoning_content\""];

/// What one event says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// Text or tokens, and token counts if the event has them.
    Tokens(Option<Usage>),
    /// No text, but token counts.
    Usage(Usage),
    /// The stream is complete.
    Done,
    /// The server gave up.
    Error(String),
    /// Neither: a role, a keep-alive, an end without text.
    Other,
}

/// Token counts of a request, as the server has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: u64,
    pub(crate) completion_tokens: u64,
}

/// A line that is too long to be an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a line of the stream is longer than {LINE_BYTES_MAX} bytes")]
pub(crate) struct LineTooLong;

/// Puts lines together from chunks that may end anywhere.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    /// The beginning of a line whose end has not come.
    pending: Vec<u8>,
}

impl Lines {
    /// Calls `each` with the data of every event that `chunk` completes.
    ///
    /// # Errors
    /// When a line is too long.
    pub(crate) fn feed(&mut self, chunk: &[u8], mut each: impl FnMut(&[u8])) -> Result<(), LineTooLong> {
        let mut rest = chunk;
        while let Some(end) = rest.iter().position(|&byte| byte == b'\n') {
            let (line, after) = (&rest[..end], &rest[end + 1..]);
            if self.pending.is_empty() {
                data(line).into_iter().for_each(&mut each);
            } else {
                self.hold(line)?;
                data(&self.pending).into_iter().for_each(&mut each);
                self.pending.clear();
            }
            rest = after;
        }
        self.hold(rest)
    }

    fn hold(&mut self, part: &[u8]) -> Result<(), LineTooLong> {
        if self.pending.len() + part.len() > LINE_BYTES_MAX {
            return Err(LineTooLong);
        }
        self.pending.extend_from_slice(part);
        Ok(())
    }
}

/// Reads one event's data; JSON is parsed only when it has token counts or an error.
pub(crate) fn read(data: &[u8]) -> Event {
    if data == b"[DONE]" {
        return Event::Done;
    }
    let (mut has_tokens, mut has_usage, mut has_error) = (false, false, false);
    // A quote inside a string is escaped, so `"key":` is never part of one.
    for at in data.iter().enumerate().filter(|(_, byte)| **byte == b'"').map(|(at, _)| at + 1) {
        let rest = &data[at..];
        if let Some(key) = TEXT_KEYS.iter().find(|key| rest.starts_with(key)) {
            has_tokens |= value(rest, key).is_some_and(|[first, second]| first == b'"' && second != b'"');
        } else if rest.starts_with(b"token_ids\"") {
            has_tokens |= value(rest, b"token_ids\"").is_some_and(|[first, second]| first == b'[' && second != b']');
        } else if rest.starts_with(b"usage\"") {
            has_usage |= value(rest, b"usage\"").is_some_and(|[first, _]| first == b'{');
        } else if rest.starts_with(b"error\"") {
            has_error |= value(rest, b"error\"").is_some_and(|[first, _]| first == b'{' || first == b'"');
        }
    }
    if has_error {
        return Event::Error(String::from_utf8_lossy(data).into_owned());
    }
    let usage = if has_usage { usage(data) } else { None };
    match (has_tokens, usage) {
        (true, usage) => Event::Tokens(usage),
        (false, Some(usage)) => Event::Usage(usage),
        (false, None) => Event::Other,
    }
}

/// What follows `data:` on a line that has it.
fn data(line: &[u8]) -> Option<&[u8]> {
    line.strip_prefix(b"data:").map(<[u8]>::trim_ascii)
}

/// The first two bytes of the value after `key`, when a colon follows.
fn value(rest: &[u8], key: &[u8]) -> Option<[u8; 2]> {
    let value = rest[key.len()..].trim_ascii_start().strip_prefix(b":")?.trim_ascii_start();
    Some([*value.first()?, *value.get(1)?])
}

fn usage(data: &[u8]) -> Option<Usage> {
    #[derive(Deserialize)]
    struct Part {
        usage: Option<Usage>,
    }
    serde_json::from_slice::<Part>(data).ok()?.usage
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events(chunks: &[&[u8]]) -> Vec<Event> {
        let (mut lines, mut found) = (Lines::default(), Vec::new());
        for chunk in chunks {
            lines.feed(chunk, |data| found.push(read(data))).unwrap();
        }
        found
    }

    const STREAM: &[u8] = b"data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n\
        : keep-alive\n\n\
        data: {\"choices\": [{\"delta\": {\"content\": \"Hi \\\"text\\\":\\\"\"}}], \"usage\": null}\r\n\r\n\
        data:{\"choices\":[{\"text\":\"\",\"finish_reason\":\"length\"}]}\n\n\
        data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2,\"x\":[]}}\n\n\
        data: [DONE]\n\n";

    #[test]
    fn tokens_counts_and_the_end_are_found_wherever_chunks_are_split() {
        let usage = Usage { prompt_tokens: 3, completion_tokens: 2 };
        let expected = [Event::Other, Event::Tokens(None), Event::Other, Event::Usage(usage), Event::Done];
        assert_eq!(events(&[STREAM]), expected);
        for split in 0..STREAM.len() {
            let (first, second) = STREAM.split_at(split);
            assert_eq!(events(&[first, second]), expected, "split at {split}");
        }
        let bytes: Vec<&[u8]> = STREAM.chunks(1).collect();
        assert_eq!(events(&bytes), expected);
    }

    #[test]
    fn text_and_counts_may_come_together_and_token_ids_count_without_text() {
        let both = b"{\"choices\":[{\"text\":\" a\"}],\"usage\":{\"completion_tokens\":9}}";
        assert_eq!(read(both), Event::Tokens(Some(Usage { prompt_tokens: 0, completion_tokens: 9 })));
        assert_eq!(read(b"{\"choices\":[{\"text\":\"\",\"token_ids\":[5]}]}"), Event::Tokens(None));
        assert_eq!(read(b"{\"choices\":[{\"text\":\"\",\"token_ids\":[]}]}"), Event::Other);
        assert_eq!(read(b"{\"object\":\"text\",\"error\":null}"), Event::Other);
    }

    #[test]
    fn an_error_in_the_stream_is_told_and_nonsense_is_nothing() {
        let error = b"{\"error\":{\"message\":\"overloaded\"}}";
        assert!(matches!(read(error), Event::Error(text) if text.contains("overloaded")));
        for nonsense in [&b""[..], b"\"", b"\"usage\":{", b"\"text\":\"", b"\xff\xfe"] {
            assert_eq!(read(nonsense), Event::Other, "{nonsense:?}");
        }
    }

    #[test]
    fn a_line_without_end_is_refused() {
        let mut lines = Lines::default();
        let chunk = vec![b'x'; LINE_BYTES_MAX];
        lines.feed(&chunk, |_| panic!("no event")).unwrap();
        assert_eq!(lines.feed(b"x", |_| panic!("no event")), Err(LineTooLong));
    }
}
