//! Fields that both kinds of request have.

use std::collections::BTreeMap;

use contract::error::RequestError;
use contract::ids::Token;
use serde::Deserialize;
use serde::de::MapAccess;

use super::body::{Fields, Object, list, value};
use super::extras;
use crate::generate::Options;

/// The shared fields as a client gave them.
#[derive(Default)]
pub(super) struct Shared {
    pub(super) model: Option<String>,
    pub(super) is_stream: bool,
    pub(super) stream_options: StreamOptions,
    pub(super) return_token_ids: bool,
    pub(super) options: Options,
    n: Option<i64>,
    top_k: Option<i64>,
    /// A field that would change the answer and is not served.
    unsupported: Option<String>,
}

/// What a stream holds beside text.
#[derive(Clone, Copy, Default)]
pub(super) struct StreamOptions {
    pub(super) include_usage: bool,
}

impl Fields for StreamOptions {
    fn set<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<bool, A::Error> {
        match key {
            "include_usage" => self.include_usage = value::<Option<bool>, A>(key, map)?.unwrap_or(false),
            "include_obfuscation" | "continuous_usage_stats" => drop(value::<serde::de::IgnoredAny, A>(key, map)?),
            _ => return Ok(false),
        }
        Ok(true)
    }
}

/// A seed of either sign.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected an integer of 64 bits")]
enum Seed {
    Unsigned(u64),
    Signed(i64),
}

impl Fields for Shared {
    fn set<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<bool, A::Error> {
        let options = &mut self.options;
        match key {
            "model" => self.model = value(key, map)?,
            "stream" => self.is_stream = flag(key, map, false)?,
            "stream_options" => {
                let given: Option<Object<StreamOptions>> = value(key, map)?;
                self.stream_options = given.map(|Object(options)| options).unwrap_or_default();
            }
            "return_token_ids" => self.return_token_ids = flag(key, map, false)?,
            "max_tokens" => options.max_tokens = value::<Option<u32>, A>(key, map)?.or(options.max_tokens),
            "min_tokens" => options.min_tokens = or(key, map, 0)?,
            "temperature" => options.temperature = value(key, map)?,
            "top_p" => options.top_p = value(key, map)?,
            "top_k" => self.top_k = value(key, map)?,
            "min_p" => options.min_p = value(key, map)?,
            "repetition_penalty" => options.repetition_penalty = value(key, map)?,
            "presence_penalty" => options.presence_penalty = or(key, map, 0.0)?,
            "frequency_penalty" => options.frequency_penalty = or(key, map, 0.0)?,
            "logit_bias" => {
                let bias: Option<BTreeMap<Token, f32>> = value(key, map)?;
                options.logit_bias = bias.unwrap_or_default().into_iter().collect();
            }
            "seed" => {
                options.seed = value::<Option<Seed>, A>(key, map)?.map(|seed| match seed {
                    Seed::Unsigned(seed) => seed,
                    Seed::Signed(seed) => seed.cast_unsigned(),
                });
            }
            "stop" => options.stop = list(key, map)?,
            "include_stop_str_in_output" => options.include_stop = flag(key, map, false)?,
            "stop_token_ids" => options.stop_token_ids = or(key, map, Vec::new())?,
            "ignore_eos" => options.ignore_eos = flag(key, map, false)?,
            "n" => self.n = value(key, map)?,
            "priority" => options.priority = or(key, map, 0)?,
            "cache_salt" => options.cache_salt = or(key, map, String::new())?,
            "skip_special_tokens" => options.skip_special = flag(key, map, true)?,
            "add_special_tokens" => options.add_special = value(key, map)?,
            _ => return extras::set(key, map, &mut self.unsupported),
        }
        Ok(true)
    }
}

impl Shared {
    /// The wishes, numbers of either sign checked.
    ///
    /// # Errors
    /// When a field is not served or a number out of range.
    pub(super) fn options(&mut self) -> Result<Options, RequestError> {
        if let Some(field) = self.unsupported.take() {
            return Err(RequestError::Unsupported(format!("field {field:?} with this value")));
        }
        if self.stream_options.include_usage && !self.is_stream {
            return Err(RequestError::invalid("stream_options", "is only for stream = true"));
        }
        if let Some(n) = self.n {
            let out_of_range = || RequestError::invalid("n", format!("{n} is out of range; give at least 1"));
            self.options.n = u32::try_from(n).ok().filter(|&n| n > 0).ok_or_else(out_of_range)?;
        }
        if let Some(top_k) = self.top_k {
            // As in vLLM, -1 is off; 0 is too.
            let out_of_range =
                || RequestError::invalid("top_k", format!("{top_k} is out of range; give at least 1, or -1 for all"));
            let given = if top_k == -1 { 0 } else { top_k };
            self.options.top_k = Some(u32::try_from(given).map_err(|_| out_of_range())?);
        }
        Ok(std::mem::take(&mut self.options))
    }
}

/// A flag; null is `default`.
pub(super) fn flag<'de, A: MapAccess<'de>>(key: &str, map: &mut A, default: bool) -> Result<bool, A::Error> {
    or(key, map, default)
}

/// A value; null is `default`.
pub(super) fn or<'de, T: Deserialize<'de>, A: MapAccess<'de>>(
    key: &str,
    map: &mut A,
    default: T,
) -> Result<T, A::Error> {
    Ok(value::<Option<T>, A>(key, map)?.unwrap_or(default))
}
