//! Typed access to the keys of `config.json`; every number has a range.

use std::ops::RangeInclusive;
use std::path::Path;

use kernels::Activation;
use serde_json::{Map, Value};

use super::error::OpenError;
use crate::config::{DIMENSION_MAX, LayerKind};
use crate::rope::{RopeConfig, RopeScaling, yarn_attention_factor};

/// A JSON object and the file it is in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Keys<'a> {
    pub(crate) path: &'a Path,
    object: &'a Map<String, Value>,
}

impl<'a> Keys<'a> {
    pub(crate) fn new(path: &'a Path, object: &'a Map<String, Value>) -> Self {
        Self { path, object }
    }

    /// All keys.
    pub(crate) fn as_map(&self) -> &'a Map<String, Value> {
        self.object
    }

    /// The value; none when absent or null.
    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    /// A nested object; none when absent or null.
    pub(crate) fn object(&self, key: &str) -> Result<Option<Keys<'a>>, OpenError> {
        self.get(key)
            .map(|value| {
                value.as_object().map(|object| Self::new(self.path, object)).ok_or_else(|| self.bad(key, "an object"))
            })
            .transpose()
    }

    pub(crate) fn size_opt(&self, key: &str, max: usize) -> Result<Option<usize>, OpenError> {
        self.whole_opt(key, 1..=max)
    }

    pub(crate) fn whole_opt(&self, key: &str, range: RangeInclusive<usize>) -> Result<Option<usize>, OpenError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| range.contains(n));
        let expected = || format!("a whole number from {} to {}", range.start(), range.end());
        number.map(Some).ok_or_else(|| self.bad(key, &expected()))
    }

    pub(crate) fn size(&self, key: &str) -> Result<usize, OpenError> {
        self.size_up_to(key, DIMENSION_MAX)
    }

    pub(crate) fn size_up_to(&self, key: &str, max: usize) -> Result<usize, OpenError> {
        self.size_opt(key, max)?.ok_or_else(|| OpenError::missing_key(self.path, key))
    }

    pub(crate) fn number_opt(&self, key: &str) -> Result<Option<f64>, OpenError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_f64().filter(|n| n.is_finite()).map(Some).ok_or_else(|| self.bad(key, "a number"))
    }

    pub(crate) fn number(&self, key: &str) -> Result<f64, OpenError> {
        self.number_opt(key)?.ok_or_else(|| OpenError::missing_key(self.path, key))
    }

    pub(crate) fn flag_or(&self, key: &str, default: bool) -> Result<bool, OpenError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value.as_bool().ok_or_else(|| self.bad(key, "true or false"))
    }

    pub(crate) fn text_opt(&self, key: &str) -> Result<Option<&'a str>, OpenError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.bad(key, "a text"))
    }

    /// Checks that `hidden_act` and `hidden_activation`, where they are there, name the activation that is computed.
    pub(crate) fn check_activation(&self, activation: Activation) -> Result<(), OpenError> {
        let names = activation_names(activation);
        for key in ["hidden_act", "hidden_activation"] {
            if self.text_opt(key)?.is_some_and(|name| !names.contains(&name)) {
                return Err(self.bad(key, &names.join(" or ")));
            }
        }
        Ok(())
    }

    /// `layer_types`, when it is there: one of two names for each layer.
    pub(crate) fn layer_types(&self, n_layers: usize) -> Result<Option<Vec<LayerKind>>, OpenError> {
        const EXPECTED: &str = "one of full_attention, sliding_attention for each layer";
        let Some(value) = self.get("layer_types") else { return Ok(None) };
        let entries = value.as_array().filter(|entries| entries.len() == n_layers);
        let entries = entries.ok_or_else(|| self.bad("layer_types", &format!("{EXPECTED} ({n_layers})")))?;
        let kinds = entries.iter().map(|entry| match entry.as_str() {
            Some("full_attention") => Ok(LayerKind::Full),
            Some("sliding_attention") => Ok(LayerKind::Sliding),
            _ => Err(OpenError::bad_value(self.path, "layer_types", entry, EXPECTED)),
        });
        kinds.collect::<Result<_, _>>().map(Some)
    }

    /// Rotary embedding from `rope_parameters` (flat or per kind of layer) or `rope_theta` and `rope_scaling`.
    pub(crate) fn rope(&self, kind: LayerKind, theta_default: f64, head_dim: usize) -> Result<RopeConfig, OpenError> {
        let kind_key = match kind {
            LayerKind::Full => "full_attention",
            LayerKind::Sliding => "sliding_attention",
        };
        let mut section = self.object("rope_parameters")?;
        if let Some(parameters) = section
            && let Some(of_kind) = parameters.object(kind_key)?
        {
            section = Some(of_kind);
        }
        let scaling = match section {
            Some(section) => Some(section),
            None => self.object("rope_scaling")?,
        };
        let inner = |key| section.map_or(Ok(None), |section: Keys<'_>| section.number_opt(key));
        let theta = inner("rope_theta")?.or(self.number_opt("rope_theta")?).unwrap_or(theta_default);
        let part = inner("partial_rotary_factor")?.or(self.number_opt("partial_rotary_factor")?).unwrap_or(1.0);
        if !(0.0..=1.0).contains(&part) {
            return Err(self.bad("partial_rotary_factor", "a number from 0 to 1"));
        }
        let rotary_dim = (head_dim as f64 * part) as usize;
        let scaling = scaling.map_or(Ok(RopeScaling::None), |section| section.rope_scaling(self))?;
        Ok(RopeConfig { theta, rotary_dim, scaling })
    }

    fn rope_scaling(&self, config: &Keys<'_>) -> Result<RopeScaling, OpenError> {
        let key = if self.get("rope_type").is_some() { "rope_type" } else { "type" };
        let original = || {
            let key = "original_max_position_embeddings";
            let of_config = || config.number("max_position_embeddings");
            self.number_opt(key)?.or(config.number_opt(key)?).map_or_else(of_config, Ok)
        };
        match self.text_opt(key)? {
            None | Some("default") => Ok(RopeScaling::None),
            Some("linear") => Ok(RopeScaling::Linear { factor: self.number("factor")? }),
            Some("llama3") => Ok(RopeScaling::Llama3 {
                factor: self.number("factor")?,
                low_frequency_factor: self.number("low_freq_factor")?,
                high_frequency_factor: self.number("high_freq_factor")?,
                original_context: original()?,
            }),
            Some("yarn") => {
                let factor = self.number("factor")?;
                let scales = (self.number_opt("mscale")?, self.number_opt("mscale_all_dim")?);
                let derived = match scales {
                    (Some(scale), Some(all)) if scale != 0.0 && all != 0.0 => {
                        yarn_attention_factor(factor, scale) / yarn_attention_factor(factor, all)
                    }
                    _ => yarn_attention_factor(factor, 1.0),
                };
                Ok(RopeScaling::Yarn {
                    factor,
                    original_context: original()?,
                    beta_fast: self.number_opt("beta_fast")?.unwrap_or(32.0),
                    beta_slow: self.number_opt("beta_slow")?.unwrap_or(1.0),
                    truncate: self.flag_or("truncate", true)?,
                    attention_factor: self.number_opt("attention_factor")?.unwrap_or(derived),
                })
            }
            Some(other) => {
                Err(OpenError::bad_value(self.path, format!("rope {key}"), other, "default, linear, llama3 or yarn"))
            }
        }
    }

    pub(crate) fn bad(&self, key: &str, expected: &str) -> OpenError {
        let value = self.object.get(key).map_or_else(|| "absent".to_owned(), short);
        OpenError::bad_value(self.path, key, value, expected)
    }
}

/// What files call an activation; all names of one mean one formula.
pub(crate) fn activation_names(activation: Activation) -> &'static [&'static str] {
    match activation {
        Activation::Silu => &["silu", "swish"],
        Activation::GeluTanh => &["gelu_pytorch_tanh"],
    }
}

/// A value as text, cut to what fits a message.
fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(200) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
