//! Typed access to GGUF metadata; every number has a range.

use std::path::Path;

use kernels::Activation;

use super::error::OpenError;
use super::gguf::{Array, Gguf, Value};
use super::keys::activation_names;
use crate::config::DIMENSION_MAX;
use crate::rope::{RopeConfig, RopeScaling, yarn_attention_factor};

/// A parsed header and the file it is in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Metadata<'a> {
    pub(crate) path: &'a Path,
    pub(crate) gguf: &'a Gguf<'a>,
    architecture: &'a str,
}

impl<'a> Metadata<'a> {
    pub(crate) fn new(path: &'a Path, gguf: &'a Gguf<'a>) -> Result<Self, OpenError> {
        let mut metadata = Self { path, gguf, architecture: "" };
        metadata.architecture = metadata.text("general.architecture")?;
        Ok(metadata)
    }

    pub(crate) fn architecture(&self) -> &'a str {
        self.architecture
    }

    /// A key under the architecture's name: `llama.block_count` for `block_count`.
    pub(crate) fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    pub(crate) fn text_opt(&self, key: &str) -> Result<Option<&'a str>, OpenError> {
        match self.gguf.get(key) {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(_) => Err(self.bad(key, "a text")),
        }
    }

    pub(crate) fn text(&self, key: &str) -> Result<&'a str, OpenError> {
        self.text_opt(key)?.ok_or_else(|| OpenError::missing_key(self.path, key))
    }

    pub(crate) fn array_opt(&self, key: &str) -> Result<Option<Array<'a>>, OpenError> {
        match self.gguf.get(key) {
            None => Ok(None),
            Some(Value::Array(array)) => Ok(Some(array)),
            Some(_) => Err(self.bad(key, "an array")),
        }
    }

    pub(crate) fn flag_opt(&self, key: &str) -> Result<Option<bool>, OpenError> {
        match self.gguf.get(key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(_) => Err(self.bad(key, "true or false")),
        }
    }

    pub(crate) fn whole_opt(&self, key: &str) -> Result<Option<u64>, OpenError> {
        match self.gguf.get(key) {
            None => Ok(None),
            Some(Value::Unsigned(n)) => Ok(Some(n)),
            Some(Value::Signed(n)) => u64::try_from(n).map(Some).map_err(|_| self.bad(key, "a whole number")),
            Some(_) => Err(self.bad(key, "a whole number")),
        }
    }

    /// A size, which some writers repeat for each layer: then all must be equal.
    pub(crate) fn size_opt(&self, key: &str, max: usize) -> Result<Option<usize>, OpenError> {
        let expected = format!("a whole number from 1 to {max}");
        let value = match self.gguf.get(key) {
            Some(Value::Array(array)) => {
                let mut entries = array.iter();
                let first = entries.next();
                if first.is_none() || entries.any(|entry| Some(entry) != first) {
                    return Err(self.bad(key, "one number for all layers"));
                }
                first
            }
            other => other,
        };
        let number = match value {
            None => return Ok(None),
            Some(Value::Unsigned(n)) => usize::try_from(n).ok(),
            Some(Value::Signed(n)) => usize::try_from(n).ok(),
            Some(_) => None,
        };
        number.filter(|n| (1..=max).contains(n)).map(Some).ok_or_else(|| self.bad(key, &expected))
    }

    pub(crate) fn size(&self, key: &str) -> Result<usize, OpenError> {
        let key = self.key(key);
        self.size_opt(&key, DIMENSION_MAX)?.ok_or_else(|| OpenError::missing_key(self.path, key))
    }

    pub(crate) fn number_opt(&self, key: &str) -> Result<Option<f64>, OpenError> {
        let number = match self.gguf.get(&self.key(key)) {
            None => return Ok(None),
            Some(Value::Float(n)) => n,
            Some(Value::Unsigned(n)) => n as f64,
            Some(Value::Signed(n)) => n as f64,
            Some(_) => f64::NAN,
        };
        if number.is_finite() { Ok(Some(number)) } else { Err(self.bad(&self.key(key), "a number")) }
    }

    pub(crate) fn number(&self, key: &str) -> Result<f64, OpenError> {
        self.number_opt(key)?.ok_or_else(|| OpenError::missing_key(self.path, self.key(key)))
    }

    /// Checks that the file, where it names an activation, names the one that is computed.
    pub(crate) fn check_activation(&self, activation: Activation) -> Result<(), OpenError> {
        let (key, names) = (self.key("hidden_activation"), activation_names(activation));
        match self.text_opt(&key)? {
            Some(name) if !names.contains(&name) => Err(self.bad(&key, &names.join(" or "))),
            _ => Ok(()),
        }
    }

    /// Rotary embedding; llama3's scaling is a tensor of divisors instead, which the loader applies.
    pub(crate) fn rope(&self, context_length: usize, head_dim: usize) -> Result<RopeConfig, OpenError> {
        let theta = self.number_opt("rope.freq_base")?.unwrap_or(10000.0);
        let rotary_dim = self.size_opt(&self.key("rope.dimension_count"), DIMENSION_MAX)?.unwrap_or(head_dim);
        let key = self.key("rope.scaling.type");
        let factor = self.number_opt("rope.scaling.factor")?.or(self.number_opt("rope.scale_linear")?);
        let scaling = match (self.text_opt(&key)?, factor) {
            (Some("none"), _) | (_, None) => RopeScaling::None,
            (None | Some("linear"), Some(factor)) => RopeScaling::Linear { factor },
            (Some("yarn"), Some(factor)) => RopeScaling::Yarn {
                factor,
                original_context: self
                    .number_opt("rope.scaling.original_context_length")?
                    .unwrap_or(context_length as f64),
                beta_fast: self.number_opt("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
                beta_slow: self.number_opt("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
                truncate: true,
                attention_factor: self.number_opt("rope.scaling.attn_factor")?.unwrap_or(1.0)
                    * yarn_attention_factor(factor, 1.0),
            },
            (Some(other), _) => return Err(OpenError::bad_value(self.path, key, other, "none, linear or yarn")),
        };
        Ok(RopeConfig { theta, rotary_dim, scaling })
    }

    pub(crate) fn bad(&self, key: &str, expected: &str) -> OpenError {
        let value = match self.gguf.get(key) {
            None => "absent".to_owned(),
            Some(Value::Array(array)) => format!("an array of {}", array.len()),
            Some(Value::Text(text)) => format!("{:?}", text.chars().take(200).collect::<String>()),
            Some(Value::Unsigned(n)) => n.to_string(),
            Some(Value::Signed(n)) => n.to_string(),
            Some(Value::Float(n)) => n.to_string(),
            Some(Value::Bool(flag)) => flag.to_string(),
        };
        OpenError::bad_value(self.path, key, value, expected)
    }
}
