//! Finds the model that `--model` names, and fetches it once.

mod cache;
mod demo;
mod digest;
mod hub;
mod progress;

use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context as _, Result, bail};

pub(crate) use cache::{Cache, Cached};
pub(crate) use demo::NAME as DEMO_NAME;
pub(crate) use digest::hex;

/// What `--model` names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// The model that is served when none is named.
    Demo,
    /// A folder or a GGUF file.
    Path(PathBuf),
    /// A repository of a Hugging Face hub.
    Hub(hub::Repository),
}

/// A model on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Model {
    /// The name clients ask for.
    pub(crate) name: String,
    /// A folder in Hugging Face's layout or a GGUF file.
    pub(crate) path: PathBuf,
}

impl FromStr for Source {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        if let Some(repository) = text.strip_prefix("hf:") {
            return Ok(Self::Hub(repository.parse()?));
        }
        // A folder of that name would be given as ./NAME.
        if text == DEMO_NAME {
            return Ok(Self::Demo);
        }
        Ok(Self::Path(PathBuf::from(text)))
    }
}

/// Finds `source`, fetching it if it is not here yet.
///
/// # Errors
/// Says what could not be found or fetched and what to do instead.
pub(crate) async fn resolve(source: Source, cache: Cache) -> Result<Model> {
    match source {
        Source::Path(path) => local(&path),
        Source::Demo => {
            let fetched = tokio::task::spawn_blocking(move || demo::ensure(&cache)).await;
            let path = fetched.context("fetching the demo model was interrupted")??;
            Ok(Model { name: DEMO_NAME.to_owned(), path })
        }
        Source::Hub(repository) => {
            let path = hub::Hub::from_environment()?.ensure(&repository, &cache).await?;
            Ok(Model { name: repository.name(), path })
        }
    }
}

/// Takes a folder or file that is there; whether it is a model is the worker's to judge.
fn local(path: &Path) -> Result<Model> {
    let path = std::fs::canonicalize(path).with_context(|| {
        format!(
            "cannot find model {}; give a folder in Hugging Face's layout, a GGUF file or hf:ORG/NAME",
            path.display()
        )
    })?;
    let name = if path.is_dir() { path.file_name() } else { path.file_stem() };
    let Some(name) = name.map(|name| name.to_string_lossy().into_owned()) else {
        bail!("cannot name a model after {}; give its folder", path.display());
    };
    Ok(Model { name, path })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_told_apart_by_their_form() {
        let source = |text: &str| text.parse::<Source>().unwrap();
        assert_eq!(source(DEMO_NAME), Source::Demo);
        assert_eq!(source("./some/folder"), Source::Path(PathBuf::from("./some/folder")));
        assert!(matches!(source("hf:org/name"), Source::Hub(_)));
        assert!("hf:../name".parse::<Source>().is_err());
    }

    #[tokio::test]
    async fn a_local_model_is_named_after_its_folder_or_file() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().join("cache"));
        let model = folder.path().join("tiny");
        std::fs::create_dir(&model).unwrap();
        assert_eq!(resolve(Source::Path(model.clone()), cache.clone()).await.unwrap().name, "tiny");
        let file = model.join("small.q8.gguf");
        std::fs::write(&file, b"GGUF").unwrap();
        assert_eq!(resolve(Source::Path(file), cache.clone()).await.unwrap().name, "small.q8");
        let missing = resolve(Source::Path(folder.path().join("no/such")), cache).await.unwrap_err();
        assert!(missing.to_string().contains("no/such"), "{missing}");
    }
}
