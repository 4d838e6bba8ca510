//! All that a served model needs to turn text into tokens and back.

use std::borrow::Cow;

use contract::ids::Token;
use models::{ModelFiles, TokenizerSource};

use super::chat_template::{ChatMessage, ChatOptions, ChatTemplate};
use super::detokenizer::Detokenizer;
use super::error::TextError;
use super::token_bytes::TokenBytes;
use super::tokenizer::Tokenizer;

/// A token is taken to stand for no fewer bytes than this when a text is bounded by its length alone.
const LONGEST_TOKEN_BYTES_MIN: usize = 64;

/// Texts from here on take longer to encode than an async task may block.
const LONG_TEXT_BYTES: usize = 512;

/// The same for tokenizers that are encoded piece by piece.
const LONG_TEXT_BYTES_IN_PIECES: usize = 2 << 10;

/// What a model's files say about text.
#[derive(Clone, Debug)]
pub struct TextSource {
    /// Its tokenizer.
    pub tokenizer: TokenizerSource,
    /// Its chat template, in Jinja.
    pub chat_template: Option<String>,
    /// Text of the token that begins a text.
    pub bos: Option<String>,
    /// Text of the token that ends a text.
    pub eos: Option<String>,
}

/// A model's tokenizer and chat template: immutable, to be shared.
#[derive(Debug)]
pub struct TextModel {
    tokenizer: Tokenizer,
    chat_template: Result<ChatTemplate, TextError>,
    longest_token_bytes: usize,
}

impl TextModel {
    /// Takes tokenizer and template from a model's files.
    ///
    /// # Errors
    /// When the tokenizer is invalid or not supported.
    pub fn open(files: &ModelFiles) -> Result<Self, TextError> {
        Self::new(TextSource {
            tokenizer: files.tokenizer().clone(),
            chat_template: files.chat_template().map(str::to_owned),
            bos: files.bos_text().map(str::to_owned),
            eos: files.eos_text().map(str::to_owned),
        })
    }

    /// Builds the tokenizer and compiles the template.
    ///
    /// A template that does not compile is an error of [`render_chat`](Self::render_chat), so that the model still
    /// completes plain text.
    ///
    /// # Errors
    /// When the tokenizer is invalid or not supported.
    pub fn new(source: TextSource) -> Result<Self, TextError> {
        let TextSource { tokenizer, chat_template, bos, eos } = source;
        let tokenizer = Tokenizer::open(&tokenizer)?;
        let chat_template = match chat_template {
            Some(template) => ChatTemplate::compile(&template, bos, eos),
            None => Err(TextError::MissingChatTemplate),
        };
        // Special tokens may be spelled longer than they read, and unknown text may take a whole word for a token.
        let longest_token_bytes = tokenizer.bytes().longest().max(LONGEST_TOKEN_BYTES_MIN);
        Ok(Self { tokenizer, chat_template, longest_token_bytes })
    }

    /// Remembers the tokens of parts of long texts in up to `bytes_max` bytes, so that what texts share is encoded once.
    pub fn remembering(self, bytes_max: usize) -> Self {
        Self { tokenizer: self.tokenizer.remembering(bytes_max), ..self }
    }

    /// Tokens of `text`.
    ///
    /// Pure computation, a tenth of a microsecond to a microsecond a byte: see [`is_long`](Self::is_long).
    /// `add_special` puts BOS and EOS where the model's files want them, which is the default; a rendered chat holds
    /// them already and takes `Some(false)`.
    ///
    /// # Errors
    /// [`TextError::Encode`], when a character is not in the vocabulary and nothing stands for unknown ones.
    pub fn encode(&self, text: &str, add_special: Option<bool>) -> Result<Vec<Token>, TextError> {
        self.tokenizer.encode(text, add_special.unwrap_or(true))
    }

    /// Whether encoding `text` blocks for so long (over 500 µs) that it belongs on a thread of its own.
    pub fn is_long(&self, text: &str) -> bool {
        let in_pieces = self.tokenizer.is_in_pieces();
        text.len() >= if in_pieces { LONG_TEXT_BYTES_IN_PIECES } else { LONG_TEXT_BYTES }
    }

    /// Tokens that `text` has at the very least, known without encoding it: no token stands for more bytes than the
    /// longest one.
    pub fn n_tokens_min(&self, text: &str) -> usize {
        text.len() / self.longest_token_bytes
    }

    /// Text of `tokens`; ids that no token has are passed over.
    pub fn decode(&self, tokens: &[Token], skip_special: bool) -> String {
        let mut detokenizer = Detokenizer::new(false);
        let mut text = String::new();
        for &token in tokens {
            if !(skip_special && self.is_special(token)) {
                detokenizer.push(self.token_bytes(), token, &mut text);
            }
        }
        detokenizer.finish(self.token_bytes(), &mut text);
        text
    }

    /// A token by itself: its text, U+FFFD where it is part of a character, and its bytes.
    pub fn token_text(&self, token: Token) -> (String, Vec<u8>) {
        let bytes = self.token_bytes().bytes(token).unwrap_or_default();
        (String::from_utf8_lossy(bytes).into_owned(), bytes.to_vec())
    }

    /// The token as the vocabulary spells it, which for some models is not its text.
    pub fn token_spelling(&self, token: Token) -> Cow<'static, str> {
        self.tokenizer.text(token).map_or(Cow::Borrowed(""), Cow::Owned)
    }

    /// Whether the token steers the model and is not text.
    pub fn is_special(&self, token: Token) -> bool {
        self.tokenizer.is_special(token)
    }

    /// Token ids are below this; a model's logits may have more entries.
    pub fn vocab_size(&self) -> usize {
        self.token_bytes().n_tokens()
    }

    /// Whether there is a chat template.
    pub fn has_chat_template(&self) -> bool {
        !matches!(self.chat_template, Err(TextError::MissingChatTemplate))
    }

    /// The prompt of a conversation, special tokens included as text.
    ///
    /// # Errors
    /// When there is no template, it does not compile, it fails, or it refuses the messages.
    pub fn render_chat(&self, messages: &[ChatMessage], options: &ChatOptions) -> Result<String, TextError> {
        self.chat_template.as_ref().map_err(TextError::clone)?.render(messages, options)
    }

    pub(super) fn token_bytes(&self) -> &TokenBytes {
        self.tokenizer.bytes()
    }
}
