//! Fields that OpenAI's clients send and that are not served: harmless ones are passed over, the others refused.

use std::fmt;

use serde::Deserialize;
use serde::de::{self, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::body::value;

/// Change nothing of an answer.
const HARMLESS: [&str; 11] = [
    "user",
    "metadata",
    "store",
    "service_tier",
    "parallel_tool_calls",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prediction",
    "verbosity",
    "request_id",
];

/// Would change the answer; an empty or neutral value is as good as none.
const UNSUPPORTED: [&str; 21] = [
    "truncate_prompt_tokens",
    "tools",
    "tool_choice",
    "functions",
    "function_call",
    "response_format",
    "audio",
    "modalities",
    "web_search_options",
    "reasoning_effort",
    "suffix",
    "echo",
    "prompt_logprobs",
    "best_of",
    "use_beam_search",
    "length_penalty",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
];

/// Takes a field that is known but not served; false when it is not known either.
pub(super) fn set<'de, A: MapAccess<'de>>(
    key: &str,
    map: &mut A,
    unsupported: &mut Option<String>,
) -> Result<bool, A::Error> {
    if HARMLESS.contains(&key) {
        value::<IgnoredAny, A>(key, map)?;
        return Ok(true);
    }
    if UNSUPPORTED.contains(&key) {
        let shape: Shape = value(key, map)?;
        if !shape.is_neutral(key) {
            unsupported.get_or_insert_with(|| key.to_owned());
        }
        return Ok(true);
    }
    Ok(false)
}

/// As much of a value as tells whether it asks for something.
#[derive(Debug, PartialEq)]
enum Shape {
    Empty,
    Number(f64),
    Text(String),
    /// An object and its `type`.
    Object(String),
    List(Vec<Shape>),
    Other,
}

impl Shape {
    fn is_neutral(&self, key: &str) -> bool {
        match self {
            Self::Empty => true,
            Self::Number(number) => matches!(key, "best_of" | "length_penalty") && *number == 1.0,
            Self::Text(text) => match key {
                "tool_choice" => matches!(text.as_str(), "none" | "auto"),
                "function_call" => matches!(text.as_str(), "none" | "auto"),
                "suffix" => text.is_empty(),
                "reasoning_effort" => text == "none",
                _ => false,
            },
            Self::Object(kind) => key == "response_format" && kind == "text",
            Self::List(items) => key == "modalities" && items.iter().all(|item| *item == Self::Text("text".to_owned())),
            Self::Other => false,
        }
    }
}

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Sees)
    }
}

struct Sees;

impl<'de> Visitor<'de> for Sees {
    type Value = Shape;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E>(self) -> Result<Shape, E> {
        Ok(Shape::Empty)
    }

    fn visit_bool<E>(self, is_on: bool) -> Result<Shape, E> {
        Ok(if is_on { Shape::Other } else { Shape::Empty })
    }

    fn visit_u64<E>(self, number: u64) -> Result<Shape, E> {
        Ok(Shape::Number(number as f64))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Shape, E> {
        Ok(Shape::Number(number as f64))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Shape, E> {
        Ok(Shape::Number(number))
    }

    fn visit_str<E>(self, text: &str) -> Result<Shape, E> {
        Ok(Shape::Text(text.chars().take(32).collect()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Shape, A::Error> {
        /// More items than any neutral list has.
        const N_KEPT: usize = 4;
        let mut items = Vec::new();
        let mut is_long = false;
        while items.len() < N_KEPT {
            let Some(item) = list.next_element::<Shape>()? else { break };
            items.push(item);
        }
        while list.next_element::<IgnoredAny>()?.is_some() {
            is_long = true;
        }
        Ok(match items.is_empty() {
            true => Shape::Empty,
            false if is_long => Shape::Other,
            false => Shape::List(items),
        })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Shape, A::Error> {
        let mut kind = String::new();
        let mut is_empty = true;
        while let Some(key) = map.next_key::<String>()? {
            is_empty = false;
            if key == "type" {
                if let Shape::Text(text) = map.next_value()? {
                    kind = text;
                }
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(if is_empty { Shape::Empty } else { Shape::Object(kind) })
    }
}
