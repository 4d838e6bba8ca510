//! Puts a model together from its files: finds each weight by name, checks its shape, hands it to the device.

use std::path::PathBuf;
use std::sync::Arc;

use kernels::{Norm, Ops, RawWeight, RopeTable, Shape, StepLimits, Weight, WeightFormat, WeightRole};
use thiserror::Error;

use crate::architectures::{self, Architecture};
use crate::config::{LayerKind, ModelConfig};
use crate::decoder::{Decoder, LoadedDecoder};
use crate::files::tensors::StoredTensor;
use crate::files::{FileKind, ModelFiles};
use crate::layers::{FeedForward, Layer, Linear, SelfAttention};
use crate::model::Model;
use crate::names::Part;
use crate::rope::{FREQUENCY, RopeConfig, check_frequencies};

/// Where the language model's tensors lie in Hugging Face folders, and its output head beside them.
const PREFIXES: [(&str, &str); 4] =
    [("model.", ""), ("language_model.model.", "language_model."), ("model.language_model.", ""), ("", "")];

/// Longest sequence that tables are made for when nobody says how long they will be.
const POSITIONS_DEFAULT_MAX: usize = 1 << 18;

/// How a model is to be loaded.
#[derive(Clone, Copy, Debug)]
pub struct LoadOptions {
    /// The largest step: scratch memory is made for it.
    pub limits: StepLimits,
    /// Longest sequence to prepare for, at most the model's context length; when none, that or 262144 if less.
    pub positions_max: Option<usize>,
}

/// Why a model could not be loaded.
#[derive(Debug, Error)]
pub enum LoadError {
    /// A weight is absent.
    #[error("{path} has no tensor {tensor}")]
    MissingTensor {
        /// What was opened.
        path: PathBuf,
        /// The weight's name.
        tensor: String,
    },
    /// A weight has another shape than the configuration says.
    #[error("{path}: tensor {tensor} has shape {actual:?}, the configuration says {expected:?}")]
    Shape {
        /// What was opened.
        path: PathBuf,
        /// The weight's name.
        tensor: String,
        /// Shape it should have.
        expected: Vec<usize>,
        /// Shape it has.
        actual: Vec<usize>,
    },
    /// A weight holds a number that cannot be computed with.
    #[error("{path}: tensor {tensor} has {value} at {index}, which makes a frequency that is not {expected}")]
    Value {
        /// What was opened.
        path: PathBuf,
        /// The weight's name.
        tensor: String,
        /// Where the number is.
        index: usize,
        /// The number.
        value: f32,
        /// What must come out.
        expected: &'static str,
    },
    /// The device refused a weight.
    #[error("{path}: the device refused tensor {tensor}")]
    Weight {
        /// What was opened.
        path: PathBuf,
        /// The weight's name.
        tensor: String,
        /// What the device says.
        source: Box<kernels::Error>,
    },
    /// The device refused scratch memory or tables.
    #[error("cannot prepare the device for the model")]
    Device(#[from] kernels::Error),
}

/// Loads a model onto a device.
///
/// # Errors
/// A weight that is absent or of another shape, or what the device says.
pub fn load(files: &ModelFiles, ops: Arc<dyn Ops>, options: LoadOptions) -> Result<Box<dyn Model>, LoadError> {
    let decoder = Loader::new(files, ops.as_ref()).decoder(&options)?;
    Ok(Box::new(LoadedDecoder::new(decoder, ops, options.limits)?))
}

struct Loader<'a> {
    files: &'a ModelFiles,
    config: &'a ModelConfig,
    architecture: &'static Architecture,
    ops: &'a dyn Ops,
    prefix: (&'static str, &'static str),
}

impl<'a> Loader<'a> {
    fn new(files: &'a ModelFiles, ops: &'a dyn Ops) -> Self {
        let config = files.config();
        let architecture =
            architectures::by_name(config.architecture).expect("files name an architecture of the table");
        let embedding = Part::Embedding.huggingface();
        let has_embedding = |prefix: &&(&str, &str)| files.tensor(&format!("{}{embedding}", prefix.0)).is_some();
        let prefix = PREFIXES.iter().find(has_embedding).copied().unwrap_or(PREFIXES[0]);
        Self { files, config, architecture, ops, prefix }
    }

    fn decoder(&self, options: &LoadOptions) -> Result<Decoder, LoadError> {
        let config = self.config;
        let positions_max = options.positions_max.unwrap_or(POSITIONS_DEFAULT_MAX).min(config.context_length);
        let vocabulary = [config.vocab_size, config.hidden_size];
        let embedding = self.weight(Part::Embedding, 0, &vocabulary, WeightRole::Embedding)?;
        let head = match config.tie_embeddings {
            true => embedding.clone(),
            false => self.weight(Part::Head, 0, &vocabulary, WeightRole::Matrix)?,
        };
        // Before tables are made for a head dimension, a weight must have it.
        self.find(Part::Query, 0, &[config.n_heads * config.head_dim, config.hidden_size])?;
        let rope_full = self.rope(&config.rope_full, positions_max)?;
        let rope_sliding = match config.rope_sliding == config.rope_full {
            true => rope_full.clone(),
            false => self.rope(&config.rope_sliding, positions_max)?,
        };
        let mut layers = Vec::with_capacity(config.n_layers());
        for (index, kind) in config.layers.iter().enumerate() {
            let rope = match kind {
                LayerKind::Full => &rope_full,
                LayerKind::Sliding => &rope_sliding,
            };
            layers.push(self.layer(index, rope)?);
        }
        let final_norm = self.norm(Part::FinalNorm, 0, config.hidden_size)?;
        Ok(Decoder { config: config.clone(), embedding, layers, final_norm, head, positions_max })
    }

    fn layer(&self, index: usize, rope: &RopeTable) -> Result<Layer, LoadError> {
        let hidden = self.config.hidden_size;
        let post = |part| self.config.post_norms.then(|| self.norm(part, index, hidden)).transpose();
        Ok(Layer {
            attention_norm: self.norm(Part::AttentionNorm, index, hidden)?,
            attention: self.attention(index, rope)?,
            post_attention_norm: post(Part::PostAttentionNorm)?,
            feed_forward_norm: self.norm(Part::MlpNorm, index, hidden)?,
            feed_forward: self.feed_forward(index)?,
            post_feed_forward_norm: post(Part::PostMlpNorm)?,
        })
    }

    fn attention(&self, index: usize, rope: &RopeTable) -> Result<SelfAttention, LoadError> {
        let config = self.config;
        let (hidden, dim) = (config.hidden_size, config.head_dim);
        let (queries, keys) = (config.n_heads * dim, config.n_kv_heads * dim);
        let bias = |part| config.qkv_bias.then_some(part);
        let head_norm = |part| config.qk_norm.then(|| self.norm(part, index, dim)).transpose();
        Ok(SelfAttention {
            query: self.linear(Part::Query, bias(Part::QueryBias), index, [queries, hidden])?,
            key: self.linear(Part::Key, bias(Part::KeyBias), index, [keys, hidden])?,
            value: self.linear(Part::Value, bias(Part::ValueBias), index, [keys, hidden])?,
            output: {
                let bias = config.output_bias.then_some(Part::OutputBias);
                self.linear(Part::Output, bias, index, [hidden, queries])?
            },
            query_norm: head_norm(Part::QueryNorm)?,
            key_norm: head_norm(Part::KeyNorm)?,
            rope: rope.clone(),
            scale: config.attention_scale,
            window: config.window(index),
            soft_cap: config.attention_soft_cap,
        })
    }

    fn feed_forward(&self, index: usize) -> Result<FeedForward, LoadError> {
        let (hidden, inner) = (self.config.hidden_size, self.config.intermediate_size);
        let bias = |part| self.config.mlp_bias.then_some(part);
        Ok(FeedForward {
            gate: self.linear(Part::Gate, bias(Part::GateBias), index, [inner, hidden])?,
            up: self.linear(Part::Up, bias(Part::UpBias), index, [inner, hidden])?,
            down: self.linear(Part::Down, bias(Part::DownBias), index, [hidden, inner])?,
            activation: self.config.activation,
        })
    }

    fn linear(
        &self,
        part: Part,
        bias: Option<Part>,
        index: usize,
        [rows, columns]: [usize; 2],
    ) -> Result<Linear, LoadError> {
        let bias = bias.map(|part| self.weight(part, index, &[rows], WeightRole::VECTOR)).transpose()?;
        Ok(Linear { weight: self.weight(part, index, &[rows, columns], WeightRole::Matrix)?, bias })
    }

    fn norm(&self, part: Part, index: usize, dim: usize) -> Result<Norm, LoadError> {
        let role = WeightRole::Vector { offset: self.config.norm_weight_offset };
        Ok(Norm { weight: self.weight(part, index, &[dim], role)?, epsilon: self.config.norm_epsilon })
    }

    fn rope(&self, rope: &RopeConfig, positions_max: usize) -> Result<RopeTable, LoadError> {
        let mut frequencies = rope.frequencies();
        if self.files.kind() == FileKind::Gguf
            && let Some(divisors) = self.files.tensor(&Part::RopeDivisors.gguf(0))
        {
            let name = Part::RopeDivisors.gguf(0);
            self.check_shape(&name, &divisors, &[frequencies.len()])?;
            if divisors.format != WeightFormat::F32 {
                let what = format!("{name} in {:?}", divisors.format);
                return Err(kernels::Error::Unsupported { op: "load", what }.into());
            }
            let divisors: Vec<f32> =
                divisors.bytes.as_chunks::<4>().0.iter().copied().map(f32::from_le_bytes).collect();
            frequencies.iter_mut().zip(&divisors).for_each(|(frequency, divisor)| *frequency /= divisor);
            check_frequencies(&frequencies).map_err(|(index, _)| {
                let (path, tensor, value) = (self.files.path().to_owned(), name, divisors[index]);
                LoadError::Value { path, tensor, index, value, expected: FREQUENCY }
            })?;
        }
        let (amplitude, style) = (rope.amplitude(), self.config.rope_style);
        Ok(RopeTable::build(self.ops, &frequencies, amplitude, positions_max, style)?)
    }

    fn weight(&self, part: Part, index: usize, expected: &[usize], role: WeightRole) -> Result<Weight, LoadError> {
        let (tensor, stored) = self.find(part, index, expected)?;
        let shape = Shape::new(expected).ok_or(kernels::Error::OutOfMemory { bytes: stored.bytes.len() })?;
        let raw = RawWeight { bytes: stored.bytes, format: stored.format, shape };
        let path = self.files.path().to_owned();
        self.ops.load_weight(raw, role).map_err(|source| LoadError::Weight { path, tensor, source: Box::new(source) })
    }

    /// Finds a weight by name and checks its shape.
    fn find(&self, part: Part, index: usize, expected: &[usize]) -> Result<(String, StoredTensor<'a>), LoadError> {
        let tensor = self.name(part, index);
        let Some(stored) = self.files.tensor(&tensor) else {
            return Err(LoadError::MissingTensor { path: self.files.path().to_owned(), tensor });
        };
        self.check_shape(&tensor, &stored, expected)?;
        Ok((tensor, stored))
    }

    fn check_shape(&self, tensor: &str, stored: &StoredTensor<'_>, expected: &[usize]) -> Result<(), LoadError> {
        if stored.shape == expected {
            return Ok(());
        }
        Err(LoadError::Shape {
            path: self.files.path().to_owned(),
            tensor: tensor.to_owned(),
            expected: expected.to_vec(),
            actual: stored.shape.to_vec(),
        })
    }

    fn name(&self, part: Part, index: usize) -> String {
        if self.files.kind() == FileKind::Gguf {
            return part.gguf(index);
        }
        let special = self.architecture.huggingface_names.iter().find(|(other, _)| *other == part);
        let name = special.map_or_else(|| part.huggingface(), |(_, name)| name);
        match (part, part.is_in_layer()) {
            (Part::Head, _) => format!("{}{name}", self.prefix.1),
            (_, false) => format!("{}{name}", self.prefix.0),
            (_, true) => format!("{}layers.{index}.{name}", self.prefix.0),
        }
    }
}
