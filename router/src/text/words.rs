//! The patterns that most byte-level tokenizers cut words with, matched by hand where ASCII decides and by the pattern
//! elsewhere.
//!
//! Hot path: no allocation, no lock, no log.

use tokenizers::utils::SysRegex;

use super::pre_tokenizer::{GPT2, LLAMA3, QWEN2};

/// A pattern that matches at every place of every text, whatever came before it.
#[derive(Debug)]
pub(super) struct Words {
    pattern: SysRegex,
    rules: Rules,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rules {
    /// A space goes before letters, digits and others; numbers are whole.
    Gpt2,
    /// Anything but digits and ends of lines goes before letters; ends of lines go together.
    Llama3 { digits_max: usize },
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Letter,
    Digit,
    Blank,
    LineEnd,
    Other,
    /// Part of a character that is not ASCII.
    Wide,
    /// After the text.
    End,
}

impl Words {
    /// Knows `pattern`, or does not.
    pub(super) fn of(pattern: &str) -> Option<Self> {
        let rules = match pattern {
            GPT2 => Rules::Gpt2,
            LLAMA3 => Rules::Llama3 { digits_max: 3 },
            QWEN2 => Rules::Llama3 { digits_max: 1 },
            _ => return None,
        };
        Some(Self { pattern: SysRegex::new(pattern).ok()?, rules })
    }

    /// Length of the match at the start of `text`, which is not empty; all of it when the pattern gives up.
    pub(super) fn first(&self, text: &str) -> usize {
        let by_hand = match self.rules {
            Rules::Gpt2 => gpt2(text.as_bytes()),
            Rules::Llama3 { digits_max } => llama3(text.as_bytes(), digits_max),
        };
        by_hand.unwrap_or_else(|| match self.pattern.find_iter(text).next() {
            Some((0, end)) => end,
            Some((start, _)) => start,
            None => text.len(),
        })
    }
}

fn class(text: &[u8], at: usize) -> Class {
    match text.get(at) {
        Some(b'a'..=b'z' | b'A'..=b'Z') => Class::Letter,
        Some(b'0'..=b'9') => Class::Digit,
        Some(b' ' | b'\t' | 0x0B | 0x0C) => Class::Blank,
        Some(b'\r' | b'\n') => Class::LineEnd,
        Some(0x80..) => Class::Wide,
        Some(_) => Class::Other,
        None => Class::End,
    }
}

/// Where characters of `class` from `at` on end; none when what follows is not ASCII and may be one of them.
fn run(text: &[u8], mut at: usize, of: Class) -> Option<usize> {
    loop {
        match class(text, at) {
            Class::Wide => return None,
            found if found == of => at += 1,
            _ => return Some(at),
        }
    }
}

/// [`GPT2`], or none when more than ASCII decides.
fn gpt2(text: &[u8]) -> Option<usize> {
    if let Some(end) = contraction(text, false)? {
        return Some(end);
    }
    let start = usize::from(text[0] == b' ');
    match class(text, start) {
        Class::Wide => None,
        kind @ (Class::Letter | Class::Digit | Class::Other) => run(text, start, kind),
        Class::Blank | Class::LineEnd | Class::End => Some(spaces(text)?.1),
    }
}

/// [`LLAMA3`] or [`QWEN2`], or none when more than ASCII decides.
fn llama3(text: &[u8], digits_max: usize) -> Option<usize> {
    if let Some(end) = contraction(text, true)? {
        return Some(end);
    }
    let first = class(text, 0);
    match first {
        Class::Letter => return run(text, 0, Class::Letter),
        Class::Digit => return digits(text, digits_max),
        Class::Wide => return None,
        Class::Blank | Class::Other => match class(text, 1) {
            Class::Letter => return run(text, 1, Class::Letter),
            Class::Wide => return None,
            _ => {}
        },
        Class::LineEnd | Class::End => {}
    }
    let start = usize::from(text[0] == b' ');
    if class(text, start) == Class::Other {
        let end = run(text, start, Class::Other)?;
        return Some(end + text[end..].iter().take_while(|byte| matches!(byte, b'\r' | b'\n')).count());
    }
    let (run, end) = spaces(text)?;
    let line_end = text[..run].iter().rposition(|byte| matches!(byte, b'\r' | b'\n'));
    Some(line_end.map_or(end, |last| last + 1))
}

/// `'s` and its like, in either case when `is_any_case`.
fn contraction(text: &[u8], is_any_case: bool) -> Option<Option<usize>> {
    if text[0] != b'\'' {
        return Some(None);
    }
    if is_any_case && class(text, 1) == Class::Wide {
        // The long s is another case of s.
        return None;
    }
    let is_next = |word: &[u8]| {
        let next = text.get(1..=word.len());
        next.is_some_and(|next| if is_any_case { next.eq_ignore_ascii_case(word) } else { next == word })
    };
    let words: [&[u8]; 7] = [b"s", b"t", b"re", b"ve", b"m", b"ll", b"d"];
    Some(words.into_iter().find(|word| is_next(word)).map(|word| 1 + word.len()))
}

fn digits(text: &[u8], n_max: usize) -> Option<usize> {
    for at in 1..n_max {
        match class(text, at) {
            Class::Digit => {}
            Class::Wide => return None,
            _ => return Some(at),
        }
    }
    Some(n_max)
}

/// Where white space ends, and where what is cut off of it does: the last one goes before what follows.
fn spaces(text: &[u8]) -> Option<(usize, usize)> {
    let mut end = 0;
    while matches!(class(text, end), Class::Blank | Class::LineEnd) {
        end += 1;
    }
    match class(text, end) {
        Class::Wide => None,
        Class::End => Some((end, end)),
        _ => Some((end, (end - 1).max(1))),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PIECES: &[&str] = &[
        "a", "B", "cat", "é", "\u{301}", "日", " ", " ", "  ", "\t", "\n", "\r\n", "\u{b}", "\u{c}", "\u{a0}",
        "\u{3000}", "\u{85}", "'", "'s", "'S", "'re", "'lL", "'v", "'ſ", "1", "22", "333", "½", "٣", ".", ",", "!!",
        "_", "\u{0}", "\u{1c}", "\u{7f}", "😀",
    ];

    proptest! {
        #[test]
        fn matches_are_those_of_the_pattern(pieces in prop::collection::vec(prop::sample::select(PIECES), 0..40)) {
            let text = pieces.concat();
            for pattern in [GPT2, LLAMA3, QWEN2] {
                let words = Words::of(pattern).unwrap();
                let mut at = 0;
                for (start, end) in SysRegex::new(pattern).unwrap().find_iter(&text) {
                    prop_assert_eq!((at, at + words.first(&text[at..])), (start, end), "{} {:?}", pattern, &text);
                    at = end;
                }
                prop_assert_eq!(at, text.len());
            }
        }
    }
}
