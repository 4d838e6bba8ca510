//! Finds stop strings in text that arrives in pieces and holds back what may become one.
//!
//! Each stop string is a Knuth-Morris-Pratt automaton over bytes (Knuth, Morris and Pratt, 1977), so a byte costs the
//! same however long the stop strings are, and the text held back is exactly the longest suffix that is a proper
//! prefix of one of them.
//! The stop string that is complete first wins; of several that end at one byte, the longest. That does not depend on
//! how the text was cut into pieces.

/// Watches one text.
#[derive(Clone, Debug)]
pub(super) struct StopScanner {
    automata: Vec<Automaton>,
    held: String,
    include_stop: bool,
    is_stopped: bool,
}

#[derive(Clone, Debug)]
struct Automaton {
    /// Place in the list that was given.
    index: usize,
    pattern: Box<[u8]>,
    /// `border[n]`: the longest proper prefix of `pattern[..n]` that is also its suffix; `border[0]` is unused.
    border: Box<[usize]>,
    matched: usize,
}

impl StopScanner {
    /// Watches for `stops`, empty ones ignored; `include_stop` keeps the one that is found in the text.
    pub(super) fn new(stops: &[String], include_stop: bool) -> Self {
        let automata = stops
            .iter()
            .enumerate()
            .filter(|(_, stop)| !stop.is_empty())
            .map(|(index, stop)| Automaton::new(index, stop.as_bytes()))
            .collect();
        Self { automata, held: String::new(), include_stop, is_stopped: false }
    }

    /// Appends to `out` the text that is certain, and returns the index of the stop string when one is complete.
    ///
    /// Everything after that is dropped.
    pub(super) fn push(&mut self, text: &str, out: &mut String) -> Option<usize> {
        if self.is_stopped {
            return None;
        }
        if self.automata.is_empty() {
            out.push_str(text);
            return None;
        }
        let n_before = self.held.len();
        self.held.push_str(text);
        for (offset, &byte) in text.as_bytes().iter().enumerate() {
            if let Some((index, n_bytes)) = self.step(byte) {
                let end = n_before + offset + 1;
                out.push_str(&self.held[..if self.include_stop { end } else { end - n_bytes }]);
                self.held.clear();
                self.is_stopped = true;
                return Some(index);
            }
        }
        let n_held = self.automata.iter().map(|automaton| automaton.matched).max().unwrap_or(0);
        out.extend(self.held.drain(..self.held.len() - n_held));
        None
    }

    /// Gives back what was held, when no more text comes.
    pub(super) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// A stop string was found.
    pub(super) fn is_stopped(&self) -> bool {
        self.is_stopped
    }

    fn step(&mut self, byte: u8) -> Option<(usize, usize)> {
        let mut found: Option<(usize, usize)> = None;
        for automaton in &mut self.automata {
            if automaton.step(byte) && found.is_none_or(|(_, n_bytes)| automaton.pattern.len() > n_bytes) {
                found = Some((automaton.index, automaton.pattern.len()));
            }
        }
        found
    }
}

impl Automaton {
    fn new(index: usize, pattern: &[u8]) -> Self {
        let mut border = vec![0; pattern.len() + 1];
        let mut length = 0;
        for n in 1..pattern.len() {
            while length > 0 && pattern[n] != pattern[length] {
                length = border[length];
            }
            length += usize::from(pattern[n] == pattern[length]);
            border[n + 1] = length;
        }
        Self { index, pattern: pattern.into(), border: border.into(), matched: 0 }
    }

    fn step(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.pattern[self.matched] != byte {
            self.matched = self.border[self.matched];
        }
        self.matched += usize::from(self.pattern[self.matched] == byte);
        self.matched == self.pattern.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(stops: &[String], include_stop: bool, pieces: &[&str]) -> (Vec<String>, Option<usize>) {
        let mut scanner = StopScanner::new(stops, include_stop);
        let mut deltas = Vec::new();
        let mut hit = None;
        for piece in pieces {
            let mut out = String::new();
            hit = hit.or(scanner.push(piece, &mut out));
            deltas.push(out);
        }
        deltas.push(scanner.finish());
        (deltas, hit)
    }

    fn strings(list: &[&str]) -> Vec<String> {
        list.iter().map(|&stop| stop.to_owned()).collect()
    }

    #[test]
    fn holds_back_what_may_become_a_stop_string_and_releases_it_when_it_does_not() {
        let (deltas, hit) = run(&strings(&["\n\nUser"]), false, &["Hi\n", "\nUs", "a\n"]);
        assert_eq!((deltas, hit), (strings(&["Hi", "", "\n\nUsa", "\n"]), None));
    }

    #[test]
    fn a_stop_string_over_three_pieces_is_never_half_emitted() {
        let (deltas, hit) = run(&strings(&["END", "<|stop|>"]), false, &["one <", "|sto", "p|> two", "three"]);
        assert_eq!((deltas, hit), (strings(&["one ", "", "", "", ""]), Some(1)));
    }

    #[test]
    fn the_first_to_be_complete_wins_and_the_longest_of_those_ending_together() {
        assert_eq!(run(&strings(&["abcd", "bc"]), false, &["xabcd"]), (strings(&["xa", ""]), Some(1)));
        assert_eq!(run(&strings(&["c", "abc", "bc"]), false, &["xabc"]), (strings(&["x", ""]), Some(1)));
    }

    #[test]
    fn a_kept_stop_string_is_the_last_text() {
        assert_eq!(run(&strings(&["."]), true, &["a.b"]), (strings(&["a.", ""]), Some(0)));
    }

    #[test]
    fn an_empty_stop_string_is_ignored() {
        assert_eq!(run(&strings(&["", "b"]), false, &["ab"]), (strings(&["a", ""]), Some(1)));
    }

    /// The end of the first occurrence to be complete, found by trying every end.
    fn naive(text: &str, stops: &[String]) -> Option<(usize, usize)> {
        (0..=text.len()).filter(|&end| text.is_char_boundary(end)).find_map(|end| {
            let ending = |stop: &&String| !stop.is_empty() && text[..end].ends_with(stop.as_str());
            stops.iter().filter(ending).map(|stop| stop.len()).max().map(|n_bytes| (end - n_bytes, end))
        })
    }

    proptest! {
        #[test]
        fn equals_a_naive_search_over_the_full_text(
            pieces in prop::collection::vec("[abé]{0,4}", 0..12),
            stops in prop::collection::vec("[abé]{0,5}", 0..4),
            include_stop: bool,
        ) {
            let text = pieces.concat();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            let (deltas, hit) = run(&stops, include_stop, &pieces);
            let found = naive(&text, &stops);
            let expected = found.map_or(text.as_str(), |(start, end)| &text[..if include_stop { end } else { start }]);
            prop_assert_eq!(deltas.concat(), expected);
            prop_assert_eq!(hit.map(|index| stops[index].len()), found.map(|(start, end)| end - start));
        }

        #[test]
        fn holds_back_no_more_than_a_proper_prefix_of_a_stop_string(
            text in "[ab]{0,20}",
            stops in prop::collection::vec("[abc]{1,6}", 1..4),
        ) {
            let mut scanner = StopScanner::new(&stops, false);
            let mut out = String::new();
            if scanner.push(&text, &mut out).is_none() {
                let longest = (0..=text.len()).find(|&start| {
                    let suffix = &text[start..];
                    stops.iter().any(|stop| stop.len() > suffix.len() && stop.starts_with(suffix))
                });
                prop_assert_eq!(out.as_str(), &text[..longest.unwrap_or(text.len())]);
            }
        }
    }
}
