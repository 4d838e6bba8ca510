//! The likeliest tokens by partial selection: one pass over the vocabulary, then a sort of what is kept.

use std::cmp::Ordering;

use contract::ids::Token;

/// A token and its logit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Candidate {
    pub(super) logit: f32,
    pub(super) token: Token,
}

impl Candidate {
    /// Larger logits first, then lower ids; numbers before what is none.
    fn order(&self, other: &Self) -> Ordering {
        let value = |logit: f32| if logit.is_nan() { f32::NEG_INFINITY } else { logit };
        let by_logit = value(other.logit).partial_cmp(&value(self.logit)).unwrap_or(Ordering::Equal);
        by_logit.then(self.token.cmp(&other.token))
    }
}

/// A buffer of candidates, kept from token to token.
#[derive(Debug, Default)]
pub(super) struct TopSelect {
    kept: Vec<Candidate>,
}

impl TopSelect {
    /// The `n` largest logits, largest first, lower ids first on ties; all of them when there are fewer.
    pub(super) fn select(&mut self, logits: &[f32], n: usize) -> &[Candidate] {
        self.kept.clear();
        if n == 0 {
            return &self.kept;
        }
        // Twice as many are collected before the lesser half is thrown out, so a pass is linear whatever `n` is.
        let room = n.saturating_mul(2).min(logits.len());
        let mut threshold = f32::NEG_INFINITY;
        let mut full = false;
        for (token, &logit) in logits.iter().enumerate() {
            // Later tokens with an equal logit come after all that are kept.
            if full && (logit <= threshold || logit.is_nan()) {
                continue;
            }
            self.kept.push(Candidate { logit, token: token as Token });
            if self.kept.len() >= room && self.kept.len() > n {
                self.kept.select_nth_unstable_by(n - 1, Candidate::order);
                self.kept.truncate(n);
                threshold = self.kept[n - 1].logit.max(f32::NEG_INFINITY);
                full = true;
            }
        }
        self.kept.sort_unstable_by(Candidate::order);
        self.kept.truncate(n);
        &self.kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equals_a_sort_for_every_count() {
        let logits: Vec<f32> = (0..57_u32).map(|i| ((i * 37) % 11) as f32).collect();
        let mut sorted: Vec<Token> = (0..57).collect();
        sorted.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
        let mut top = TopSelect::default();
        for n in 0..60 {
            let got: Vec<Token> = top.select(&logits, n).iter().map(|c| c.token).collect();
            assert_eq!(got, sorted[..n.min(57)], "{n}");
        }
    }

    #[test]
    fn what_is_not_a_number_comes_last() {
        let logits = [f32::NAN, -1.0, f32::NAN, 2.0];
        let got: Vec<Token> = TopSelect::default().select(&logits, 2).iter().map(|c| c.token).collect();
        assert_eq!(got, [3, 1]);
    }
}
