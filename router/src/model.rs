//! The served model as the router knows it: text, identity, defaults.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use contract::hash::{HashKey, PrefixScope};
use contract::ids::Token;
use contract::model::{Fingerprint, IdentityMismatch, ModelIdentity};
use contract::request::GenerateRequest;
use models::{GenerationDefaults, ModelFiles};

use crate::config::Config;
use crate::error::Error;
use crate::text::TextModel;

/// A model's text side and what its workers must agree with.
#[derive(Debug)]
pub struct ServedModel {
    identity: ModelIdentity,
    system_fingerprint: String,
    block_size: OnceLock<u32>,
    key: HashKey,
    /// Its tokenizer and chat template.
    pub text: Arc<TextModel>,
    /// Tokens that end a generation.
    pub stop_token_ids: Vec<Token>,
    /// Sampling parameters where the client is silent.
    pub defaults: GenerationDefaults,
    /// When it was opened, in seconds since 1970.
    pub created_unix_s: u64,
}

impl ServedModel {
    /// Opens the configured model's files.
    ///
    /// # Errors
    /// What is wrong with the files, the tokenizer or the key.
    pub fn open(config: &Config) -> Result<Self, Error> {
        let key = config.key()?;
        let files = ModelFiles::open(&config.model)?;
        let text = TextModel::open(&files).map_err(|source| text_error(&config.model, source))?;
        let text = text.remembering(config.limits.tokenized_bytes_max);
        let name = if config.model_name.is_empty() { files.suggested_name() } else { &config.model_name };
        let small = |what, value: usize| u32::try_from(value).map_err(|_| Error::ModelValue { what, value });
        let identity = ModelIdentity {
            name: name.into(),
            block_size: 0,
            context_length: small("context length", files.config().context_length)?,
            vocab_size: small("vocabulary size", files.config().vocab_size)?,
            model: files.model_fingerprint(),
            tokenizer: files.tokenizer_fingerprint(),
            hash_key: key.fingerprint(),
            numerics: Fingerprint::default(),
        };
        let block_size = config.block_size.map_or_else(OnceLock::new, OnceLock::from);
        Ok(Self {
            system_fingerprint: format!("fp_{}", &identity.model.to_string()[..10]),
            identity,
            block_size,
            key,
            text: Arc::new(text),
            stop_token_ids: files.stop_token_ids().to_vec(),
            defaults: files.generation_defaults(),
            created_unix_s: daemon::clock::unix_ms() / 1000,
        })
    }

    /// Name that clients ask for.
    pub fn name(&self) -> &str {
        self.identity.name.as_str()
    }

    /// Stands for what decides an answer, for clients that compare seeds.
    pub fn system_fingerprint(&self) -> &str {
        &self.system_fingerprint
    }

    /// Entries of the output head.
    pub fn vocab_size(&self) -> u32 {
        self.identity.vocab_size
    }

    /// Longest sequence that the model was made for.
    pub fn context_length(&self) -> u32 {
        self.identity.context_length
    }

    /// The identity as workers must have it; the first worker that agrees in all else decides the block size where
    /// the configuration is silent.
    ///
    /// # Errors
    /// The first property that differs.
    pub fn agree(&self, theirs: &ModelIdentity, peer: &str) -> Result<ModelIdentity, IdentityMismatch> {
        let known = self.block_size.get().copied();
        let mut ours = ModelIdentity { block_size: known.unwrap_or(theirs.block_size), ..self.identity.clone() };
        if theirs.block_size == 0 {
            // No cache has blocks of nothing; a size of 1 that nobody has makes the check fail.
            ours.block_size = 1;
        }
        ours.check(theirs, peer)?;
        ours.block_size = *self.block_size.get_or_init(|| theirs.block_size);
        ours.check(theirs, peer)?;
        Ok(ours)
    }

    /// Hashes of a prompt's full blocks, and the block size; nothing before the block size is known.
    pub fn hash_blocks(&self, prompt: &[Token], adapter: &str, salt: &str) -> PromptBlocks {
        let Some(&block_size) = self.block_size.get() else { return PromptBlocks::default() };
        // The last token is always computed, so a block that ends with it is never taken from the cache.
        let reusable = &prompt[..prompt.len().saturating_sub(1)];
        let scope = PrefixScope::new(self.identity.model, adapter, salt);
        PromptBlocks { block_size, hashes: scope.hash_blocks(&self.key, reusable, block_size as usize) }
    }

    /// The same of a request's prompt with what was generated after it, where `known` are blocks that it begins with.
    pub fn hash_generated(&self, known: &PromptBlocks, request: &GenerateRequest) -> PromptBlocks {
        let Some(&block_size) = self.block_size.get() else { return PromptBlocks::default() };
        let scope = PrefixScope::new(self.identity.model, &request.adapter, &request.cache_salt);
        let mut hashes = known.hashes.clone();
        let n_known = hashes.len() * block_size as usize;
        let n_reusable = (request.prompt.len() + request.generated.len()).saturating_sub(1);
        let tokens = request.prompt.iter().chain(&request.generated).skip(n_known);
        let rest: Vec<Token> = tokens.take(n_reusable.saturating_sub(n_known)).copied().collect();
        for block in rest.chunks_exact(block_size as usize) {
            hashes.push(scope.hash_next(&self.key, hashes.last().copied(), block));
        }
        PromptBlocks { block_size, hashes }
    }
}

/// The full blocks of a prompt.
#[derive(Clone, Debug, Default)]
pub struct PromptBlocks {
    /// Tokens in each.
    pub block_size: u32,
    /// Their hashes, in order.
    pub hashes: Vec<contract::hash::BlockHash>,
}

fn text_error(path: &Path, source: crate::text::TextError) -> Error {
    Error::Text { path: path.display().to_string(), source }
}
