//! Reads a Hugging Face folder: `config.json`, safetensors with or without an index, tokenizer and generation settings.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::{Component, Path};
use std::sync::Arc;

use contract::ids::Token;
use kernels::WeightFormat;
use kernels::memory::file::MappedFile;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::error::OpenError;
use super::keys::Keys;
use super::tensors::{TensorPlace, bytes_of};
use super::{FileKind, GenerationDefaults, ModelFiles, TextSettings, WeightFiles};
use crate::architectures::{self, ARCHITECTURES};
use crate::tokenizer::TokenizerSource;

const CONFIG: &str = "config.json";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Largest settings file.
const SETTINGS_BYTES_MAX: u64 = 64 << 20;
/// Largest tokenizer file.
const TOKENIZER_BYTES_MAX: u64 = 512 << 20;

pub(super) fn open(folder: &Path) -> Result<ModelFiles, OpenError> {
    let config_path = folder.join(CONFIG);
    let config_object = read_object(&config_path)?.ok_or_else(|| OpenError::NotAModel {
        path: folder.to_owned(),
        reason: format!("the folder has no {CONFIG}"),
    })?;
    let keys = Keys::new(&config_path, &config_object);
    if keys.get("quantization_config").is_some() {
        return Err(keys.bad("quantization_config", "none: weights in F32, F16 or BF16"));
    }
    let model_type = keys.text_opt("model_type")?.ok_or_else(|| OpenError::missing_key(&config_path, "model_type"))?;
    let architecture = architectures::by_model_type(model_type).ok_or_else(|| OpenError::UnknownArchitecture {
        path: config_path.clone(),
        found: format!("{:?}", model_type.chars().take(100).collect::<String>()),
        supported: ARCHITECTURES.map(|architecture| architecture.model_types.join(", ")).join(", "),
    })?;
    let config = (architecture.from_huggingface)(keys)?;
    let text = text_settings(folder, keys)?;
    let weights = open_weights(folder)?;
    ModelFiles::new(folder, FileKind::HuggingFace, config, text, weights)
}

#[derive(Deserialize)]
struct AddedTokens {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
}

#[derive(Deserialize)]
struct AddedToken {
    id: Token,
    content: String,
}

fn text_settings(folder: &Path, config: Keys<'_>) -> Result<TextSettings, OpenError> {
    let tokenizer_path = folder.join("tokenizer.json");
    let json = read_bounded(&tokenizer_path, TOKENIZER_BYTES_MAX)?.ok_or_else(|| OpenError::MissingFile {
        folder: folder.to_owned(),
        file: "tokenizer.json".into(),
        remedy: "copy it from where the model was published",
    })?;
    let added: AddedTokens = parse(&tokenizer_path, &json)?;
    let tokenizer_config_path = folder.join("tokenizer_config.json");
    let tokenizer_config = read_object(&tokenizer_config_path)?.unwrap_or_default();
    let special = read_object(&folder.join("special_tokens_map.json"))?.unwrap_or_default();
    let special_text = |key| token_text(tokenizer_config.get(key)).or_else(|| token_text(special.get(key)));
    let eos_text = special_text("eos_token");
    let generation_path = folder.join("generation_config.json");
    let generation = read_object(&generation_path)?.unwrap_or_default();
    let generation = Keys::new(&generation_path, &generation);
    let mut stop_token_ids = token_ids(config, "eos_token_id")?;
    if let Some(nested) = config.object("text_config")? {
        stop_token_ids.extend(token_ids(nested, "eos_token_id")?);
    }
    stop_token_ids.extend(token_ids(generation, "eos_token_id")?);
    let is_eos = |token: &&AddedToken| Some(&token.content) == eos_text.as_ref();
    stop_token_ids.extend(added.added_tokens.iter().find(is_eos).map(|token| token.id));
    Ok(TextSettings {
        tokenizer: TokenizerSource::HuggingFace { json: Arc::from(json) },
        chat_template: chat_template(folder, Keys::new(&tokenizer_config_path, &tokenizer_config))?,
        bos_text: special_text("bos_token"),
        eos_text,
        stop_token_ids,
        defaults: generation_defaults(generation)?,
        suggested_name: folder_name(folder),
    })
}

/// `chat_template.jinja`, or `chat_template` of `tokenizer_config.json`: a text, or a list of named ones.
fn chat_template(folder: &Path, tokenizer_config: Keys<'_>) -> Result<Option<String>, OpenError> {
    const EXPECTED: &str = "a text or a list of {name, template}";
    let path = folder.join("chat_template.jinja");
    if let Some(bytes) = read_bounded(&path, SETTINGS_BYTES_MAX)? {
        let text = String::from_utf8(bytes).map_err(|error| {
            OpenError::corrupt(&path, format!("byte {} is not UTF-8", error.utf8_error().valid_up_to()))
        })?;
        return Ok(Some(text));
    }
    match tokenizer_config.get("chat_template") {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(Value::Array(entries)) => {
            let named =
                |name: &str| entries.iter().find(|entry| entry.get("name").and_then(Value::as_str) == Some(name));
            let Some(entry) = named("default").or_else(|| entries.first()) else { return Ok(None) };
            let template = entry.get("template").and_then(Value::as_str);
            template.map(|text| Some(text.to_owned())).ok_or_else(|| tokenizer_config.bad("chat_template", EXPECTED))
        }
        Some(_) => Err(tokenizer_config.bad("chat_template", EXPECTED)),
    }
}

fn generation_defaults(generation: Keys<'_>) -> Result<GenerationDefaults, OpenError> {
    let number = |key| generation.number_opt(key).map(|n| n.map(|n| n as f32));
    // Some files write 0 for "all", which is what absence means too.
    let top_k = generation.number_opt("top_k")?.filter(|&k| k >= 1.0).map(|k| k as u32);
    Ok(GenerationDefaults {
        temperature: number("temperature")?,
        top_p: number("top_p")?,
        top_k,
        min_p: number("min_p")?,
        repetition_penalty: number("repetition_penalty")?,
    })
}

/// A token id or a list of them.
fn token_ids(keys: Keys<'_>, key: &str) -> Result<Vec<Token>, OpenError> {
    let one = |value: &Value| value.as_u64().and_then(|id| Token::try_from(id).ok());
    let ids = match keys.get(key) {
        None => Some(Vec::new()),
        Some(Value::Array(values)) => values.iter().map(one).collect(),
        Some(value) => one(value).map(|id| vec![id]),
    };
    ids.ok_or_else(|| keys.bad(key, "a token id or a list of them"))
}

/// A special token is written as its text or as an object with `content`.
fn token_text(value: Option<&Value>) -> Option<String> {
    let value = value?;
    value.as_str().or_else(|| value.get("content").and_then(Value::as_str)).map(str::to_owned)
}

fn folder_name(folder: &Path) -> String {
    let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
    fs::canonicalize(folder).ok().as_deref().and_then(name).or_else(|| name(folder)).unwrap_or_else(|| "model".into())
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

fn open_weights(folder: &Path) -> Result<WeightFiles, OpenError> {
    let mut weights = WeightFiles::default();
    let index_path = folder.join(INDEX);
    let single = folder.join(SINGLE);
    if single.exists() {
        add_file(&mut weights, &single)?;
        return Ok(weights);
    }
    let Some(bytes) = read_bounded(&index_path, SETTINGS_BYTES_MAX)? else {
        return Err(OpenError::MissingFile {
            folder: folder.to_owned(),
            file: format!("{SINGLE} or {INDEX}"),
            remedy: "weights must be in the safetensors format",
        });
    };
    let index: Index = parse(&index_path, &bytes)?;
    let mut names: Vec<&String> = index.weight_map.values().collect();
    names.sort_unstable();
    names.dedup();
    for name in names {
        let mut parts = Path::new(name).components();
        if !matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None)) {
            return Err(OpenError::bad_value(
                &index_path,
                "weight_map",
                format!("{name:?}"),
                "names of files beside it",
            ));
        }
        let path = folder.join(name);
        if !path.exists() {
            return Err(OpenError::MissingFile {
                folder: folder.to_owned(),
                file: name.clone(),
                remedy: "the index names it; download it again",
            });
        }
        add_file(&mut weights, &path)?;
    }
    match index.weight_map.iter().find(|(tensor, _)| !weights.tensors.contains_key(*tensor)) {
        Some((tensor, file)) => {
            let reason = format!("tensor {tensor} is in no file, the index says {file}");
            Err(OpenError::corrupt(&index_path, reason))
        }
        None => Ok(weights),
    }
}

/// Maps one safetensors file and adds its tensors to the table.
fn add_file(weights: &mut WeightFiles, path: &Path) -> Result<(), OpenError> {
    let map = MappedFile::open(path).map_err(OpenError::io(path))?;
    let bytes = map.as_slice();
    let parsed = SafeTensors::deserialize(bytes).map_err(|error| OpenError::corrupt(path, error))?;
    for (name, view) in parsed.iter() {
        let format = match view.dtype() {
            Dtype::F32 => WeightFormat::F32,
            Dtype::F16 => WeightFormat::F16,
            Dtype::BF16 => WeightFormat::Bf16,
            // Buffers that old checkpoints carry along; no weight is stored so.
            Dtype::I64 | Dtype::BOOL => continue,
            other => {
                return Err(OpenError::UnsupportedFormat {
                    path: path.to_owned(),
                    tensor: name.to_owned(),
                    format: format!("{other:?}"),
                    supported: "F32, F16, BF16".into(),
                });
            }
        };
        let (shape, data) = (view.shape().to_vec(), view.data());
        if bytes_of(format, &shape) != Some(data.len()) {
            let reason = format!("tensor {name} of shape {shape:?} has {} bytes", data.len());
            return Err(OpenError::corrupt(path, reason));
        }
        let offset = data.as_ptr().addr() - bytes.as_ptr().addr();
        let place = TensorPlace { format, shape, file: weights.maps.len(), offset, len: data.len() };
        if weights.tensors.insert(name.to_owned(), place).is_some() {
            return Err(OpenError::corrupt(path, format!("tensor {name} is in two files")));
        }
    }
    weights.maps.push(map);
    Ok(())
}

/// Reads a file that may be absent; refuses one larger than `bytes_max`, whatever length it claims.
fn read_bounded(path: &Path, bytes_max: u64) -> Result<Option<Vec<u8>>, OpenError> {
    let about = match fs::metadata(path) {
        Ok(about) => about,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(OpenError::io(path)(error)),
    };
    // Before it is opened, since opening a pipe waits for its other end.
    if !about.is_file() {
        return Err(OpenError::NotAFile { path: path.to_owned() });
    }
    let mut bytes = Vec::new();
    let file = fs::File::open(path).map_err(OpenError::io(path))?;
    file.take(bytes_max + 1).read_to_end(&mut bytes).map_err(OpenError::io(path))?;
    match bytes.len() as u64 {
        read if read > bytes_max => {
            let bytes = about.len().max(read);
            Err(OpenError::TooLarge { path: path.to_owned(), bytes, bytes_max })
        }
        _ => Ok(Some(bytes)),
    }
}

fn read_object(path: &Path) -> Result<Option<Map<String, Value>>, OpenError> {
    read_bounded(path, SETTINGS_BYTES_MAX)?.map(|bytes| parse(path, &bytes)).transpose()
}

fn parse<'a, T: Deserialize<'a>>(path: &Path, bytes: &'a [u8]) -> Result<T, OpenError> {
    serde_json::from_slice(bytes).map_err(|error| OpenError::Json { path: path.to_owned(), reason: error.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_up_to_its_bound_whatever_length_it_claims() {
        // It claims no bytes and has many.
        let path = Path::new("/proc/self/status");
        assert_eq!(fs::metadata(path).expect("Linux has it").len(), 0);
        let read = read_bounded(path, 10);
        assert!(matches!(read, Err(OpenError::TooLarge { bytes: 11, bytes_max: 10, .. })), "{read:?}");
        assert!(matches!(read_bounded(path, 1 << 20), Ok(Some(bytes)) if bytes.len() > 10));
        assert!(matches!(read_bounded(Path::new("/proc/none"), 10), Ok(None)));
    }
}
