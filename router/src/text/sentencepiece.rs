//! Merges of a SentencePiece vocabulary, whose file holds a score for each token instead.
//!
//! SentencePiece's BPE joins, again and again, the neighbours whose union is the best-scored token (Kudo and Richardson,
//! 2018). That is BPE with one merge for every way to cut a token into two others, ranked by the score of the whole.
//! Equal scores do not occur in trained vocabularies; here the longer left part wins, then the longer right part, which
//! is how the tokenizer.json of Llama and Gemma models were made.

use std::collections::HashMap;

/// A token that may come of merging, or take part in it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scored<'a> {
    /// Its text, U+2581 for a space.
    pub(super) text: &'a str,
    /// Higher merges first.
    pub(super) score: f32,
}

/// All merges among `tokens`, best first.
pub(super) fn merges(tokens: &[Scored<'_>]) -> Vec<(String, String)> {
    let known: HashMap<&str, usize> = tokens.iter().enumerate().map(|(index, token)| (token.text, index)).collect();
    let mut merges = Vec::new();
    for token in tokens {
        for (cut, _) in token.text.char_indices().skip(1) {
            let (left, right) = token.text.split_at(cut);
            if let (Some(&left_idx), Some(&right_idx)) = (known.get(left), known.get(right)) {
                merges.push((token.score, left, right, left_idx, right_idx));
            }
        }
    }
    merges.sort_by(|a, b| {
        let by_score = b.0.total_cmp(&a.0);
        let by_length = || (b.1.chars().count(), b.2.chars().count()).cmp(&(a.1.chars().count(), a.2.chars().count()));
        by_score.then_with(by_length).then_with(|| (a.3, a.4).cmp(&(b.3, b.4)))
    });
    merges.into_iter().map(|(_, left, right, ..)| (left.to_owned(), right.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_better_score_merges_first_and_only_known_parts_merge() {
        let tokens = [("a", 0.0), ("b", 0.0), ("c", 0.0), ("bc", -1.0), ("ab", -2.0), ("abc", -3.0), ("xy", -4.0)];
        let tokens = tokens.map(|(text, score)| Scored { text, score });
        let merges = merges(&tokens);
        let merges: Vec<(&str, &str)> = merges.iter().map(|(left, right)| (left.as_str(), right.as_str())).collect();
        assert_eq!(merges, [("b", "c"), ("a", "b"), ("ab", "c"), ("a", "bc")]);
    }
}
