//! Reads a request's JSON field by field, so that every error names the field, the line and the column.

use std::fmt;
use std::marker::PhantomData;

use contract::error::RequestError;
use serde::Deserialize;
use serde::de::{self, DeserializeOwned, MapAccess, Visitor};

/// A JSON object whose fields are known.
pub(super) trait Fields: Default {
    /// Takes the value of `key` from `map`; false when there is no such field.
    ///
    /// # Errors
    /// When the value is of another type.
    fn set<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<bool, A::Error>;
}

/// Reads a body.
///
/// # Errors
/// `InvalidArgument` that says where and what is wrong.
pub(super) fn parse<T: Fields>(body: &[u8]) -> Result<T, RequestError> {
    let text = std::str::from_utf8(body).map_err(|error| {
        RequestError::invalid("body", format!("is not valid UTF-8 after {} bytes", error.valid_up_to()))
    })?;
    let Object(fields) = serde_json::from_str(text).map_err(|error| refused(&error))?;
    Ok(fields)
}

/// Takes a field's value, and names the field where it is of another type.
pub(super) fn value<'de, T: Deserialize<'de>, A: MapAccess<'de>>(key: &str, map: &mut A) -> Result<T, A::Error> {
    map.next_value().map_err(|error| de::Error::custom(format!("{key}{MARK}{error}")))
}

/// Parts a field's name from what is wrong with it.
const MARK: &str = ": ";

fn refused(error: &serde_json::Error) -> RequestError {
    let message = error.to_string();
    match error.classify() {
        serde_json::error::Category::Data => match message.split_once(MARK) {
            Some((field, rest)) if is_name(field) => RequestError::invalid(field.to_owned(), rest),
            _ => RequestError::invalid("body", message),
        },
        _ => RequestError::invalid("body", format!("is not valid JSON: {message}")),
    }
}

fn is_name(field: &str) -> bool {
    !field.is_empty() && field.chars().all(|c| c.is_ascii_alphanumeric() || "_-.[]".contains(c))
}

/// Any object of known fields.
pub(super) struct Object<T>(pub(super) T);

impl<'de, T: Fields> Deserialize<'de> for Object<T> {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reads<T>(PhantomData<T>);
        impl<'de, T: Fields> Visitor<'de> for Reads<T> {
            type Value = T;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<T, A::Error> {
                let mut fields = T::default();
                while let Some(key) = map.next_key::<String>()? {
                    if !fields.set(&key, &mut map)? {
                        let shown: String = key.chars().take(64).collect();
                        return Err(de::Error::custom(format!("{shown}{MARK}is not a field of this request")));
                    }
                }
                Ok(fields)
            }
        }
        deserializer.deserialize_map(Reads(PhantomData)).map(Object)
    }
}

/// One value or several.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of strings")]
enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

/// Takes one value or a list of them; null is none.
pub(super) fn list<'de, T: DeserializeOwned, A: MapAccess<'de>>(key: &str, map: &mut A) -> Result<Vec<T>, A::Error> {
    Ok(match value::<Option<OneOrMany<T>>, A>(key, map)? {
        None => Vec::new(),
        Some(OneOrMany::One(one)) => vec![one],
        Some(OneOrMany::Many(many)) => many,
    })
}
