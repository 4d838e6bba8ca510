//! Traces of real requests: Mooncake's JSON lines and Azure's CSV.

use std::io::BufRead;
use std::time::Duration;

use serde::Deserialize;
use thiserror::Error;

/// Tokens that one id of Mooncake's `hash_ids` stands for.
pub const TRACE_BLOCK_TOKENS: u32 = 512;

/// Most requests read of a trace.
const ENTRIES_MAX: usize = 1 << 20;
/// Names of the columns of Azure's CSV.
const CSV_NAMES: &str = "TIMESTAMP,ContextTokens,GeneratedTokens";
/// Some programs begin a text with it.
const BYTE_ORDER_MARK: char = '\u{feff}';
/// Longest line of a trace.
const LINE_BYTES_MAX: u64 = 1 << 20;
/// Longest prompt or output of a trace.
const TOKENS_MAX: u32 = 1 << 24;

/// Longest time of a trace, a hundred years.
const SPAN_S_MAX: f64 = 100.0 * 366.0 * 86_400.0;

/// One request of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceEntry {
    /// Time after the trace's first request.
    pub after: Duration,
    /// Tokens of the prompt.
    pub input_len: u32,
    /// Tokens that were generated.
    pub output_len: u32,
    /// Prompts with equal ids at the beginning share as many blocks of [`TRACE_BLOCK_TOKENS`]; empty shares nothing.
    pub blocks: Vec<u64>,
}

/// Why a trace cannot be read.
#[derive(Debug, Error)]
pub enum TraceError {
    /// The file cannot be read.
    #[error("cannot read the trace at line {line}")]
    Io {
        /// Number of the line, from 1.
        line: usize,
        /// What the system says.
        source: std::io::Error,
    },
    /// A line is not a request.
    #[error(
        "line {line} of the trace: {problem}; give JSON lines with timestamp (ms), input_length, output_length and hash_ids, or a CSV with TIMESTAMP,ContextTokens,GeneratedTokens"
    )]
    Line {
        /// Number of the line, from 1.
        line: usize,
        /// What is wrong with it.
        problem: String,
    },
    /// Its times are no times.
    #[error("the trace goes on for {span_s:?} s, at most {SPAN_S_MAX} can be kept; give timestamps in milliseconds")]
    Span {
        /// From the first request to the last.
        span_s: f64,
    },
    /// There is nothing in it.
    #[error("the trace has no requests")]
    Empty,
}

/// Reads up to `n_max` requests; the format is told by the first line.
///
/// # Errors
/// The first line that is not a request.
pub fn read_trace(mut input: impl BufRead, n_max: usize) -> Result<Vec<TraceEntry>, TraceError> {
    let mut entries: Vec<(f64, TraceEntry)> = Vec::new();
    let mut text = String::new();
    let mut is_csv = false;
    for line in 1.. {
        text.clear();
        let read = std::io::Read::take(&mut input, LINE_BYTES_MAX).read_line(&mut text);
        let n_bytes = read.map_err(|source| TraceError::Io { line, source })?;
        let row = text.trim_start_matches(BYTE_ORDER_MARK).trim();
        if n_bytes == 0 || entries.len() >= n_max.min(ENTRIES_MAX) {
            break;
        }
        // No line of JSON begins with the digit of a year; some copies of CSV have lost the line with the names.
        is_csv |= line == 1 && row.starts_with(|first: char| first.is_ascii_digit() || first == 'T');
        if is_csv && line == 1 && row.starts_with('T') {
            if !row.replace(' ', "").eq_ignore_ascii_case(CSV_NAMES) {
                return Err(TraceError::Line { line, problem: format!("{row:?} are not the names of the columns") });
            }
        } else if !row.is_empty() {
            let entry = if is_csv { csv(row) } else { json(row) };
            let entry = entry.and_then(|(at_ms, entry)| check(&entry).map(|()| (at_ms, entry)));
            entries.push(entry.map_err(|problem| TraceError::Line { line, problem })?);
        }
    }
    // Some traces are only nearly in order.
    entries.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    let Some(&(first_ms, _)) = entries.first() else { return Err(TraceError::Empty) };
    let span_s = entries.last().map_or(0.0, |&(last_ms, _)| (last_ms - first_ms) / 1e3);
    if span_s > SPAN_S_MAX {
        return Err(TraceError::Span { span_s });
    }
    let after = |at_ms: f64| Duration::from_secs_f64((at_ms - first_ms) / 1e3);
    Ok(entries.into_iter().map(|(at_ms, entry)| TraceEntry { after: after(at_ms), ..entry }).collect())
}

fn check(entry: &TraceEntry) -> Result<(), String> {
    for (what, n) in [("prompt", entry.input_len), ("output", entry.output_len)] {
        if n == 0 || n > TOKENS_MAX {
            return Err(format!("{what} of {n} tokens, 1 to {TOKENS_MAX} can be sent"));
        }
    }
    Ok(())
}

/// A line of Mooncake's trace (Qin et al., FAST '25).
fn json(row: &str) -> Result<(f64, TraceEntry), String> {
    #[derive(Deserialize)]
    struct Row {
        timestamp: f64,
        input_length: u32,
        output_length: u32,
        #[serde(default)]
        hash_ids: Vec<u64>,
    }
    let row: Row = serde_json::from_str(row).map_err(|error| error.to_string())?;
    let Row { timestamp, input_length: input_len, output_length: output_len, hash_ids: blocks } = row;
    Ok((timestamp, TraceEntry { after: Duration::ZERO, input_len, output_len, blocks }))
}

/// A line of Azure's trace (Patel et al., ISCA '24).
fn csv(row: &str) -> Result<(f64, TraceEntry), String> {
    let fields: Vec<&str> = row.split(',').collect();
    let &[time, input, output] = fields.as_slice() else {
        return Err(format!("{} fields instead of 3", fields.len()));
    };
    let tokens = |text: &str| text.trim().parse::<u32>().map_err(|_| format!("{text:?} is not a number of tokens"));
    let at_ms = time_ms(time).ok_or_else(|| format!("{time:?} is not a time such as 2023-11-16 18:17:03.9799600"))?;
    Ok((
        at_ms,
        TraceEntry { after: Duration::ZERO, input_len: tokens(input)?, output_len: tokens(output)?, blocks: vec![] },
    ))
}

/// Milliseconds of `YYYY-MM-DD HH:MM:SS.fraction` since a fixed day; an offset after it is ignored, as all lines share it.
fn time_ms(text: &str) -> Option<f64> {
    let (date, time) = text.trim().split_once([' ', 'T'])?;
    let mut date = date.split('-').map(|part| part.parse::<i64>().ok());
    let (year, month, day) = (date.next()??, date.next()??, date.next()??);
    if !(1970..=9999).contains(&year) || !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    let time = time.split(['+', 'Z']).next()?;
    let mut time = time.split(':');
    let (hours, minutes): (f64, f64) = (time.next()?.parse().ok()?, time.next()?.parse().ok()?);
    let seconds: f64 = time.next()?.parse().ok()?;
    let ms = ((hours * 60.0 + minutes) * 60.0 + seconds) * 1e3;
    ms.is_finite().then(|| days(year, month, day) as f64 * 86_400_000.0 + ms)
}

/// Days since 1970-01-01 (Hinnant, "chrono-compatible low-level date algorithms").
fn days(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Vec<TraceEntry>, TraceError> {
        read_trace(text.as_bytes(), usize::MAX)
    }

    #[test]
    fn mooncake_lines_keep_lengths_times_and_blocks() {
        let text = "{\"timestamp\": 1000, \"input_length\": 700, \"output_length\": 5, \"hash_ids\": [0, 9]}\n\n\
            {\"timestamp\": 1250, \"input_length\": 3, \"output_length\": 1, \"hash_ids\": []}\n";
        let entries = read(text).unwrap();
        assert_eq!((entries[0].after, entries[1].after), (Duration::ZERO, Duration::from_millis(250)));
        assert_eq!((entries[0].input_len, entries[0].output_len, &entries[0].blocks[..]), (700, 5, &[0, 9][..]));
        assert_eq!(read_trace(text.as_bytes(), 1).unwrap().len(), 1);
    }

    #[test]
    fn azure_lines_cross_midnight_and_months() {
        let text = "TIMESTAMP,ContextTokens,GeneratedTokens\n\
            2024-02-29 23:59:59.5000000,374,44\n2024-03-01 00:00:00.7500000+00:00,396,109\n";
        let entries = read(text).unwrap();
        assert_eq!((entries[1].after, entries[1].input_len), (Duration::from_millis(1250), 396));
    }

    #[test]
    fn a_byte_order_mark_and_a_lost_line_of_names_change_nothing() {
        let names = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n";
        let line = "2023-11-16 18:15:46.0,374,44\n";
        let whole = read(&format!("{names}{line}")).unwrap();
        assert_eq!((whole.len(), whole[0].input_len), (1, 374));
        assert_eq!(read(line).unwrap(), whole);
        assert_eq!(read(&format!("\u{feff}{names}{line}")).unwrap(), whole);
        let json = "{\"timestamp\": 0, \"input_length\": 7, \"output_length\": 5}\n";
        assert_eq!(read(&format!("\u{feff}{json}")).unwrap(), read(json).unwrap());
        let error = read("TIMESTAMP,Output,Input\n").unwrap_err();
        assert!(matches!(error, TraceError::Line { line: 1, .. }), "{error}");
    }

    #[test]
    fn times_that_are_none_are_refused() {
        let at = |ms: &str| format!("{{\"timestamp\": {ms}, \"input_length\": 7, \"output_length\": 5}}\n");
        let error = read(&[at("0"), at("1e300")].concat()).unwrap_err();
        assert!(error.to_string().contains("goes on for 1e297 s"), "{error}");
        assert!(matches!(read(&[at("-1e308"), at("1e308")].concat()), Err(TraceError::Span { .. })));
    }

    #[test]
    fn a_bad_line_is_named() {
        let good = "{\"timestamp\": 0, \"input_length\": 7, \"output_length\": 5}\n";
        for bad in [
            "nonsense",
            "{}",
            "{\"timestamp\":0,\"input_length\":-1,\"output_length\":5}",
            "[",
            "{\"timestamp\":0,\"input_length\":0,\"output_length\":5}",
        ] {
            let error = read(&format!("{good}{bad}\n")).unwrap_err();
            assert!(matches!(error, TraceError::Line { line: 2, .. }), "{bad}: {error}");
        }
        let head = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
        for bad in [
            "x,1,1",
            "2023-13-16 18:17:03,1,1",
            "2023-11-16 18:17:03,1",
            "2023-11-16 18:17:03,-1,1",
            "2023-11-16 18:17:nan,1,1",
        ] {
            let error = read(&format!("{head}{bad}\n")).unwrap_err();
            assert!(matches!(error, TraceError::Line { line: 2, .. }), "{bad}: {error}");
        }
        assert!(matches!(read(""), Err(TraceError::Empty)));
        assert!(matches!(read(head), Err(TraceError::Empty)));
    }
}
