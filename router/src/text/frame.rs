//! The tokens that go around a text's own: BOS and EOS, where a model wants them.

use contract::ids::Token;
use tokenizers::{Encoding, Tokenizer as HuggingFace};

/// Stands for a text's own tokens; no token has this id.
const BODY: Token = Token::MAX;

/// What goes before and after a text.
#[derive(Debug)]
pub(super) struct Frame {
    pub(super) before: Vec<Token>,
    pub(super) after: Vec<Token>,
}

impl Frame {
    /// Asks the post-processor; none when it does more than put tokens around a text.
    pub(super) fn of(tokenizer: &HuggingFace) -> Option<Self> {
        let body = || Encoding::from_tokens(vec![tokenizers::Token::new(BODY, String::new(), (0, 0))], 0);
        if tokenizer.post_process(body(), None, false).ok()?.get_ids() != [BODY] {
            return None;
        }
        let framed = tokenizer.post_process(body(), None, true).ok()?;
        let mut sides = framed.get_ids().split(|&token| token == BODY).map(<[Token]>::to_vec);
        let frame = Self { before: sides.next()?, after: sides.next()? };
        sides.next().is_none().then_some(frame)
    }
}
