//! Model files: a Hugging Face folder or a GGUF file, opened once, checked, and read in place.

pub mod error;
pub mod gguf;
mod gguf_model;
mod huggingface;
pub(crate) mod keys;
pub(crate) mod metadata;
pub mod tensors;

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use contract::ids::Token;
use contract::model::Fingerprint;
use kernels::memory::file::MappedFile;

use self::error::OpenError;
use self::tensors::{StoredTensor, TensorTable};
use crate::config::ModelConfig;
use crate::tokenizer::TokenizerSource;

/// Bytes hashed at the start, in the middle and at the end of each tensor.
const SAMPLE_BYTES: usize = 4096;

/// An opened model: what it is, how its text becomes tokens, and its weights in place.
///
/// Opening reads configuration and tokenizer and checks every length against the files; weights are mapped, not read.
#[derive(Debug)]
pub struct ModelFiles {
    path: PathBuf,
    kind: FileKind,
    config: ModelConfig,
    text: TextSettings,
    weights: WeightFiles,
    model_fingerprint: Fingerprint,
    tokenizer_fingerprint: Fingerprint,
}

/// Form of the files, which decides the names of tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A folder with `config.json` and safetensors.
    HuggingFace,
    /// One GGUF file.
    Gguf,
}

/// Sampling parameters that the model's authors suggest; none where they are silent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// Divides the logits.
    pub temperature: Option<f32>,
    /// Least probability mass kept.
    pub top_p: Option<f32>,
    /// Most tokens kept.
    pub top_k: Option<u32>,
    /// Least probability relative to the best.
    pub min_p: Option<f32>,
    /// Divides the logits of tokens that occurred.
    pub repetition_penalty: Option<f32>,
}

/// Everything between text and tokens.
#[derive(Debug)]
pub(crate) struct TextSettings {
    pub(crate) tokenizer: TokenizerSource,
    pub(crate) chat_template: Option<String>,
    pub(crate) bos_text: Option<String>,
    pub(crate) eos_text: Option<String>,
    pub(crate) stop_token_ids: Vec<Token>,
    pub(crate) defaults: GenerationDefaults,
    pub(crate) suggested_name: String,
}

/// Mapped files and the tensors in them.
#[derive(Debug, Default)]
pub(crate) struct WeightFiles {
    pub(crate) maps: Vec<MappedFile>,
    pub(crate) tensors: TensorTable,
}

impl ModelFiles {
    /// Opens a Hugging Face folder or a GGUF file.
    ///
    /// # Errors
    /// The first thing that is missing, damaged or unknown, with its file and value.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, OpenError> {
        let path = path.as_ref();
        let about = std::fs::metadata(path).map_err(OpenError::io(path))?;
        if about.is_dir() {
            return huggingface::open(path);
        }
        let mut magic = [0; 4];
        let starts_right = about.is_file() && {
            let mut file = File::open(path).map_err(OpenError::io(path))?;
            file.read_exact(&mut magic).is_ok() && &magic == b"GGUF"
        };
        if !starts_right {
            let reason = format!("it starts with {magic:02x?}");
            return Err(OpenError::NotAModel { path: path.to_owned(), reason });
        }
        gguf_model::open(path)
    }

    pub(crate) fn new(
        path: &Path,
        kind: FileKind,
        config: ModelConfig,
        mut text: TextSettings,
        weights: WeightFiles,
    ) -> Result<Self, OpenError> {
        if let Err((key, value, expected)) = config.check() {
            return Err(OpenError::bad_value(path, key, value, expected));
        }
        text.stop_token_ids.retain(|&id| (id as usize) < config.vocab_size);
        text.stop_token_ids.sort_unstable();
        text.stop_token_ids.dedup();
        let model_fingerprint = fingerprint_weights(&config, &weights);
        let tokenizer_fingerprint = fingerprint_text(&text);
        let path = path.to_owned();
        Ok(Self { path, kind, config, text, weights, model_fingerprint, tokenizer_fingerprint })
    }

    /// What was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Form of the files.
    pub fn kind(&self) -> FileKind {
        self.kind
    }

    /// Architecture and sizes.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// What turns text into tokens.
    pub fn tokenizer(&self) -> &TokenizerSource {
        &self.text.tokenizer
    }

    /// The chat template in Jinja, if there is one.
    pub fn chat_template(&self) -> Option<&str> {
        self.text.chat_template.as_deref()
    }

    /// Text of the token that begins a sequence, as chat templates name it `bos_token`.
    pub fn bos_text(&self) -> Option<&str> {
        self.text.bos_text.as_deref()
    }

    /// Text of the token that ends a sequence, as chat templates name it `eos_token`.
    pub fn eos_text(&self) -> Option<&str> {
        self.text.eos_text.as_deref()
    }

    /// Tokens that end a generation, ascending, all below the vocabulary size.
    pub fn stop_token_ids(&self) -> &[Token] {
        &self.text.stop_token_ids
    }

    /// Sampling parameters that the model's authors suggest.
    pub fn generation_defaults(&self) -> GenerationDefaults {
        self.text.defaults
    }

    /// A name to serve the model under when nobody gives one.
    pub fn suggested_name(&self) -> &str {
        &self.text.suggested_name
    }

    /// Stands for configuration and weights: all names, formats and shapes, and samples of each tensor's bytes.
    pub fn model_fingerprint(&self) -> Fingerprint {
        self.model_fingerprint
    }

    /// Stamps of the weight files one after the other: with the fingerprint they tell whether anything has changed.
    pub fn weight_stamps(&self) -> Vec<u8> {
        self.weights.maps.iter().flat_map(|map| map.stamp().0).collect()
    }

    /// Stands for tokenizer, chat template and the special tokens that it names.
    pub fn tokenizer_fingerprint(&self) -> Fingerprint {
        self.tokenizer_fingerprint
    }

    /// Looks a tensor up by its name in the files.
    pub fn tensor(&self, name: &str) -> Option<StoredTensor<'_>> {
        let place = self.weights.tensors.get(name)?;
        let file = self.weights.maps.get(place.file)?.as_slice();
        let bytes = file.get(place.offset..place.offset.checked_add(place.len)?)?;
        Some(StoredTensor { format: place.format, shape: &place.shape, bytes })
    }

    /// Names of all tensors, in order.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.weights.tensors.keys().map(String::as_str)
    }

    /// Bytes of all tensors as stored.
    pub fn weight_bytes(&self) -> u64 {
        self.weights.tensors.values().map(|place| place.len as u64).sum()
    }
}

fn fingerprint_weights(config: &ModelConfig, weights: &WeightFiles) -> Fingerprint {
    let mut hasher = blake3::Hasher::new();
    let mut part = |bytes: &[u8]| {
        hasher.update(&(bytes.len() as u64).to_le_bytes()).update(bytes);
    };
    part(format!("{config:?}").as_bytes());
    for (name, place) in &weights.tensors {
        part(name.as_bytes());
        part(format!("{:?} {:?}", place.format, place.shape).as_bytes());
        let file = weights.maps[place.file].as_slice();
        let bytes = &file[place.offset..place.offset + place.len];
        let sample = SAMPLE_BYTES.min(bytes.len());
        let middle = (bytes.len() - sample) / 2;
        for start in [0, middle, bytes.len() - sample] {
            part(&bytes[start..start + sample]);
        }
    }
    let mut out = [0; 16];
    out.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    Fingerprint(out)
}

fn fingerprint_text(text: &TextSettings) -> Fingerprint {
    let option = |text: &Option<String>| text.clone().map_or_else(Vec::new, |text| [&[1], text.as_bytes()].concat());
    Fingerprint::of(&[
        &text.tokenizer.fingerprint().0,
        &option(&text.chat_template),
        &option(&text.bos_text),
        &option(&text.eos_text),
    ])
}
