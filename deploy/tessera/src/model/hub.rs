//! Fetches a repository's model files from a Hugging Face hub, resuming what was begun.

mod download;
mod files;
#[cfg(test)]
mod tests;

use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::cache::{COMPLETE, Cache};
use files::Listing;

const ENDPOINT: &str = "https://huggingface.co";
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
/// A hub that sends nothing for this long is gone.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// Largest answer to a question about a repository.
const LISTING_BYTES_MAX: usize = 16 << 20;

/// `ORG/NAME[/FILE.gguf][@REVISION]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Repository {
    organisation: String,
    model: String,
    /// One GGUF file of several.
    file: Option<String>,
    revision: String,
}

impl FromStr for Repository {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let (path, revision) = text.split_once('@').unwrap_or((text, "main"));
        let mut parts = path.splitn(3, '/');
        let (organisation, model) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let file = parts.next();
        let revision_is_good = revision.split('/').all(files::is_plain_name);
        let file_is_good = file.is_none_or(|file| file.split('/').all(files::is_plain_name) && file.ends_with(".gguf"));
        if !(files::is_plain_name(organisation) && files::is_plain_name(model) && revision_is_good && file_is_good) {
            bail!("{text:?} is no hub model; give hf:ORG/NAME, hf:ORG/NAME@REVISION or hf:ORG/NAME/FILE.gguf");
        }
        Ok(Self {
            organisation: organisation.to_owned(),
            model: model.to_owned(),
            file: file.map(str::to_owned),
            revision: revision.to_owned(),
        })
    }
}

impl Repository {
    /// The name clients ask for.
    pub(super) fn name(&self) -> String {
        format!("{}/{}", self.organisation, self.model)
    }

    /// Its folder in the cache.
    fn folder(&self) -> String {
        format!("hub/{}--{}", self.organisation, self.model)
    }
}

/// A hub and who asks it.
pub(super) struct Hub {
    endpoint: String,
    token: Option<String>,
    client: reqwest::Client,
}

impl Hub {
    /// Opens the hub at `HF_ENDPOINT` (else the public one), with `HF_TOKEN` if it is set.
    pub(super) fn from_environment() -> Result<Self> {
        let set = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        Self::new(&set("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.to_owned()), set("HF_TOKEN"))
    }

    /// Opens the hub at `endpoint`.
    pub(super) fn new(endpoint: &str, token: Option<String>) -> Result<Self> {
        let client = crate::http::client(endpoint)
            .connect_timeout(CONNECT_TIMEOUT)
            .read_timeout(READ_TIMEOUT)
            .build()
            .context("cannot set up TLS")?;
        Ok(Self { endpoint: endpoint.trim_end_matches('/').to_owned(), token, client })
    }

    /// Returns the folder (or GGUF file) of `repository`, fetched first where something is missing.
    pub(super) async fn ensure(&self, repository: &Repository, cache: &Cache) -> Result<PathBuf> {
        let (of_lock, what) = (cache.clone(), repository.folder().replace('/', "--"));
        let _lock = tokio::task::spawn_blocking(move || of_lock.lock(&what)).await.context("cannot wait")??;
        let home = cache.folder(&repository.folder())?;
        let listing = match self.list(repository).await {
            Ok(listing) => listing,
            Err(error) => return offline(repository, &home).ok_or(error),
        };
        let folder = cache.folder(&format!("{}/{}", repository.folder(), listing.commit))?;
        let wanted = files::choose(&listing, repository.file.as_deref(), &repository.name())?;
        let missing: Vec<_> = wanted.iter().filter(|file| !folder.join(file.local_name()).exists()).collect();
        if !missing.is_empty() {
            let _ = fs::remove_file(folder.join(COMPLETE));
        }
        for file in missing {
            let path = format!("{}/resolve/{}/{}", repository.name(), listing.commit, file.name);
            let download = download::Download { hub: self, url: format!("{}/{path}", self.endpoint), file };
            download
                .run(&folder.join(file.local_name()))
                .await
                .with_context(|| format!("cannot fetch {} of {}", file.name, repository.name()))?;
        }
        fs::write(folder.join(COMPLETE), "")?;
        remember(repository, &home, &listing.commit)?;
        Ok(served(&folder, &wanted))
    }

    /// Asks for the files of a revision.
    async fn list(&self, repository: &Repository) -> Result<Listing> {
        let (name, revision) = (repository.name(), repository.revision.replace('/', "%2F"));
        let url = format!("{}/api/models/{name}/revision/{revision}?blobs=true", self.endpoint);
        let mut response = self.get(&url).send().await.with_context(|| {
            format!("cannot reach the hub at {}; give a model on this machine with --model PATH", self.endpoint)
        })?;
        match response.status().as_u16() {
            200 => {}
            401 | 403 => bail!("the hub refuses {name}; set HF_TOKEN to a token that may read it"),
            404 => bail!("the hub at {} has no {name} at revision {}", self.endpoint, repository.revision),
            status => bail!("the hub at {} answers {status} for {name}", self.endpoint),
        }
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await.context("the hub's answer broke off")? {
            body.extend_from_slice(&chunk);
            if body.len() > LISTING_BYTES_MAX {
                bail!("the hub's list of the files of {name} has no end");
            }
        }
        Listing::parse(&body).with_context(|| format!("cannot read the hub's list of the files of {name}"))
    }

    fn get(&self, url: &str) -> reqwest::RequestBuilder {
        let request = self.client.get(url);
        match &self.token {
            Some(token) => request.bearer_auth(token),
            None => request,
        }
    }
}

/// The folder, or its one GGUF file.
fn served(folder: &Path, wanted: &[&files::RemoteFile]) -> PathBuf {
    let gguf = wanted.iter().find(|file| file.is_gguf());
    gguf.map_or_else(|| folder.to_owned(), |file| folder.join(file.local_name()))
}

/// Where the commit is kept that a revision named when it was last asked.
fn reference(repository: &Repository, home: &Path) -> PathBuf {
    home.join(format!("{}.revision", repository.revision.replace('/', "--")))
}

fn remember(repository: &Repository, home: &Path, commit: &str) -> Result<()> {
    let path = reference(repository, home);
    fs::write(&path, commit).with_context(|| format!("cannot write {}", path.display()))
}

/// What is here of a repository whose hub does not answer.
fn offline(repository: &Repository, home: &Path) -> Option<PathBuf> {
    let commit = fs::read_to_string(reference(repository, home)).ok()?;
    let folder = home.join(commit.trim());
    if !folder.join(COMPLETE).exists() {
        return None;
    }
    let gguf = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "gguf");
    let files: Vec<PathBuf> = fs::read_dir(&folder).ok()?.filter_map(|entry| Some(entry.ok()?.path())).collect();
    let found = match &repository.file {
        Some(file) => Some(folder.join(file.rsplit('/').next()?)).filter(|path| path.exists())?,
        None => files.into_iter().find(gguf).unwrap_or(folder),
    };
    tracing::warn!("the hub does not answer; using {}", found.display());
    Some(found)
}
