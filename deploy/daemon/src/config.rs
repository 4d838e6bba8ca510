//! One TOML document configures all roles; flags override it by path.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde::de::{self, Deserialize, DeserializeOwned, Deserializer};
use toml::{Table, Value};

/// A parsed configuration document with its overrides applied.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Document {
    table: Table,
}

/// One role's part of a [`Document`].
#[derive(Clone, Debug)]
pub struct Section<T> {
    /// The configuration, with defaults where the document is silent.
    pub value: T,
    /// Paths of keys that mean nothing; the caller warns, or refuses under `--check-config`.
    pub unknown: Vec<String>,
}

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read configuration {path}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// The text is not TOML.
    #[error("cannot parse configuration {origin}")]
    Parse {
        /// Where the text came from.
        origin: String,
        /// Where in it and why.
        source: Box<toml::de::Error>,
    },
    /// An override is not `path.to.key=value`.
    #[error("cannot apply override {text:?}: {reason}")]
    Override {
        /// The override as given.
        text: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A value in the document is of the wrong type or out of range.
    #[error("cannot use configuration [{section}]")]
    Section {
        /// The table or key.
        section: String,
        /// Which value and why.
        source: Box<toml::de::Error>,
    },
    /// Keys that mean nothing were refused.
    #[error("unknown configuration keys: {}", .0.join(", "))]
    Unknown(Vec<String>),
}

impl Document {
    /// Reads `path` (nothing is an empty document) and applies `sets` (`path.to.key=value`) in order.
    ///
    /// # Errors
    /// When the file cannot be read or parsed or an override cannot be applied.
    pub fn load(path: Option<&Path>, sets: &[String]) -> Result<Self, ConfigError> {
        let mut document = match path {
            None => Self::default(),
            Some(path) => {
                let text = std::fs::read_to_string(path)
                    .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
                Self::parse(&text, &path.display().to_string())?
            }
        };
        for set in sets {
            document.override_with(set)?;
        }
        Ok(document)
    }

    /// Parses `text`; `origin` names it in errors.
    ///
    /// # Errors
    /// When it is not TOML.
    pub fn parse(text: &str, origin: &str) -> Result<Self, ConfigError> {
        let table = text
            .parse()
            .map_err(|source| ConfigError::Parse { origin: origin.to_owned(), source: Box::new(source) })?;
        Ok(Self { table })
    }

    /// Applies one override `path.to.key=value`: the value is read as TOML, and as a plain string when it is none.
    ///
    /// # Errors
    /// When there is no `=`, a name in the path is empty, or the path leads through a value that is no table.
    pub fn override_with(&mut self, set: &str) -> Result<(), ConfigError> {
        let failed = |reason: String| ConfigError::Override { text: set.to_owned(), reason };
        let (path, text) = set.split_once('=').ok_or_else(|| failed("want path.to.key=value".to_owned()))?;
        self.set(path.trim(), parse_value(text.trim())).map_err(failed)
    }

    /// Puts `value` at `path` (names joined by dots), making tables on the way.
    ///
    /// # Errors
    /// Says why the path cannot be followed.
    pub fn set(&mut self, path: &str, value: impl Into<Value>) -> Result<(), String> {
        let mut names: Vec<&str> = path.split('.').collect();
        if names.iter().any(|name| name.is_empty()) {
            return Err(format!("{path:?} has an empty name"));
        }
        let last = names.pop().expect("split yields at least one name");
        let mut table = &mut self.table;
        for name in names {
            table = table
                .entry(name)
                .or_insert_with(|| Value::Table(Table::new()))
                .as_table_mut()
                .ok_or_else(|| format!("{name:?} is a value, not a table"))?;
        }
        table.insert(last.to_owned(), value.into());
        Ok(())
    }

    /// Reads the value at `path` (names joined by dots), if any.
    #[must_use]
    pub fn get(&self, path: &str) -> Option<&Value> {
        let mut names = path.split('.');
        let first = self.table.get(names.next()?)?;
        names.try_fold(first, |value, name| value.get(name))
    }

    /// Reads the top-level table `name` as `T`; a missing table reads as an empty one.
    ///
    /// # Errors
    /// When a value is of the wrong type or out of range.
    pub fn section<T: DeserializeOwned>(&self, name: &str) -> Result<Section<T>, ConfigError> {
        let table = self.table.get(name).cloned().unwrap_or_else(|| Value::Table(Table::new()));
        let mut unknown = Vec::new();
        let value = serde_ignored::deserialize(table, |path| unknown.push(format!("{name}.{path}")))
            .map_err(|source| ConfigError::Section { section: name.to_owned(), source: Box::new(source) })?;
        Ok(Section { value, unknown })
    }

    /// Reads the top-level value `name` as `T`, if it is there.
    ///
    /// # Errors
    /// When it is of the wrong type.
    pub fn value<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.table.get(name) else { return Ok(None) };
        T::deserialize(value.clone())
            .map(Some)
            .map_err(|source| ConfigError::Section { section: name.to_owned(), source: Box::new(source) })
    }

    /// Lists top-level names that are not among `known`.
    #[must_use]
    pub fn unknown_names(&self, known: &[&str]) -> Vec<String> {
        self.table.keys().filter(|name| !known.contains(&name.as_str())).cloned().collect()
    }

    /// Writes the document, overrides included.
    #[must_use]
    pub fn to_toml(&self) -> String {
        toml::to_string(&self.table).expect("a parsed document can be written")
    }
}

/// Reads a bound of at least one, for `#[serde(deserialize_with)]`: a role whose document has a 0 there ends before it
/// listens, and the document's error names the key.
///
/// # Errors
/// When the value is 0 or of another type.
pub fn at_least_one<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default + PartialEq,
{
    let value = T::deserialize(deserializer)?;
    if value == T::default() {
        return Err(de::Error::custom("0 is out of range: give 1 or more"));
    }
    Ok(value)
}

/// Warns loudly about keys that mean nothing, or refuses them when `check`.
///
/// # Errors
/// [`ConfigError::Unknown`] when `check` and there are any.
pub fn judge_unknown(unknown: Vec<String>, check: bool) -> Result<(), ConfigError> {
    if unknown.is_empty() {
        return Ok(());
    }
    if check {
        return Err(ConfigError::Unknown(unknown));
    }
    let mut keys = String::new();
    for key in &unknown {
        let _ = write!(keys, " {key}");
    }
    tracing::warn!("UNKNOWN CONFIGURATION KEYS ARE IGNORED:{keys}");
    Ok(())
}

/// Reads `text` as a TOML value, else as the string it is.
fn parse_value(text: &str) -> Value {
    // A newline would let the text define further keys.
    let document = (!text.contains('\n')).then(|| format!("value = {text}").parse::<Table>().ok()).flatten();
    document
        .filter(|table| table.len() == 1)
        .and_then(|mut table| table.remove("value"))
        .unwrap_or_else(|| Value::String(text.to_owned()))
}

#[cfg(test)]
mod tests {
    use serde::{Deserialize, Serialize};

    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(default)]
    struct Role {
        address: String,
        timeout_ms: u64,
        limits: Limits,
    }

    #[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
    #[serde(default)]
    struct Limits {
        n_requests: usize,
        names: Vec<String>,
    }

    impl Default for Role {
        fn default() -> Self {
            Self { address: "127.0.0.1:0".to_owned(), timeout_ms: 5, limits: Limits::default() }
        }
    }

    fn document(text: &str, sets: &[&str]) -> Result<Document, ConfigError> {
        let mut document = Document::parse(text, "test")?;
        sets.iter().try_for_each(|set| document.override_with(set))?;
        Ok(document)
    }

    #[test]
    fn a_missing_section_is_all_defaults() {
        let section = Document::default().section::<Role>("role").unwrap();
        assert_eq!(section.value, Role::default());
        assert!(section.unknown.is_empty());
    }

    #[test]
    fn overrides_are_toml_values_or_else_strings_and_the_last_wins() {
        let sets = [
            "role.timeout_ms=9",
            "role.timeout_ms = 10",
            "role.address=localhost:80",
            "role.limits.n_requests=3",
            r#"role.limits.names=["a", "b"]"#,
            "hash_key='00'",
        ];
        let document = document("[role]\naddress = '1.2.3.4:5'", &sets).unwrap();
        let role = document.section::<Role>("role").unwrap().value;
        let limits = Limits { n_requests: 3, names: vec!["a".to_owned(), "b".to_owned()] };
        assert_eq!(role, Role { address: "localhost:80".to_owned(), timeout_ms: 10, limits });
        assert_eq!(document.value::<String>("hash_key").unwrap().as_deref(), Some("00"));
        assert_eq!(document.get("role.limits.n_requests").and_then(Value::as_integer), Some(3));
        assert_eq!(document.get("role.limits.absent"), None);
    }

    #[test]
    fn unknown_keys_are_collected_with_their_paths() {
        let document = document("typo = 1\n[role]\ntimeout = 4\n[role.limits]\nmax = 2", &[]).unwrap();
        let mut unknown = document.section::<Role>("role").unwrap().unknown;
        unknown.extend(document.unknown_names(&["role"]));
        unknown.sort();
        assert_eq!(unknown, ["role.limits.max", "role.timeout", "typo"]);
        judge_unknown(unknown.clone(), false).unwrap();
        let error = judge_unknown(unknown, true).unwrap_err();
        assert!(error.to_string().contains("role.limits.max, role.timeout, typo"), "{error}");
    }

    #[test]
    fn a_document_survives_writing_and_reading() {
        let document = document("hash_key = 'ab'\n[role]\naddress = 'x'", &["role.limits.n_requests=7"]).unwrap();
        assert_eq!(Document::parse(&document.to_toml(), "again").unwrap(), document);
    }

    #[test]
    fn bad_input_is_refused_with_what_and_where() {
        let section = document("[role]\ntimeout_ms = 'soon'", &[]).unwrap().section::<Role>("role").unwrap_err();
        assert_eq!(section.to_string(), "cannot use configuration [role]");
        assert!(std::error::Error::source(&section).unwrap().to_string().contains("timeout_ms"));
        assert!(document("[role", &[]).is_err());
        for bad in ["role", "=1", "role.=1", "role.address.x=1"] {
            let error = document("[role]\naddress = 'x'", &[bad]).unwrap_err();
            assert!(error.to_string().contains(bad), "{error}");
        }
        let missing = Document::load(Some(Path::new("/does/not/exist.toml")), &[]).unwrap_err();
        assert!(missing.to_string().contains("/does/not/exist.toml"), "{missing}");
    }

    #[test]
    fn an_override_cannot_smuggle_in_other_keys() {
        let document = document("", &["role.address=1\nother = 2"]).unwrap();
        assert_eq!(document.get("role.address").and_then(Value::as_str), Some("1\nother = 2"));
    }
}
