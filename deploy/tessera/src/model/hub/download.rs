//! Downloads one file: beside its final place first, going on where an earlier attempt broke off.

use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use reqwest::header::{CONTENT_RANGE, RANGE};
use reqwest::{Response, StatusCode};

use super::super::digest;
use super::super::progress::Progress;
use super::Hub;
use super::files::RemoteFile;

/// Attempts in all; each goes on where the last one broke off.
const N_ATTEMPTS: u32 = 4;
/// Pause before the second attempt; it doubles.
const FIRST_PAUSE: Duration = Duration::from_millis(500);

/// One file to fetch.
pub(super) struct Download<'a> {
    pub(super) hub: &'a Hub,
    pub(super) url: String,
    pub(super) file: &'a RemoteFile,
}

/// How an attempt failed.
enum Failure {
    /// Trying again may help.
    Broken(anyhow::Error),
    /// It will not.
    Refused(anyhow::Error),
}

impl Download<'_> {
    /// Fetches the file to `path`, which appears only when it is whole and checked.
    pub(super) async fn run(&self, path: &Path) -> Result<()> {
        let mut part = path.as_os_str().to_owned();
        part.push(".part");
        let part = PathBuf::from(part);
        let mut pause = FIRST_PAUSE;
        for attempt in 1.. {
            match self.attempt(&part).await {
                Ok(()) => break,
                Err(Failure::Refused(error)) => return Err(error),
                Err(Failure::Broken(error)) if attempt == N_ATTEMPTS => {
                    return Err(error.context("the download broke off; the next one goes on from there"));
                }
                Err(Failure::Broken(error)) => {
                    tracing::warn!("{error:#}; going on in {} ms", pause.as_millis());
                    tokio::time::sleep(pause).await;
                    pause *= 2;
                }
            }
        }
        if let (Some(n_bytes), Some(sha256)) = (self.file.n_bytes, self.file.sha256.clone()) {
            let part = part.clone();
            let verified = tokio::task::spawn_blocking(move || digest::verify(&part, n_bytes, &sha256)).await;
            verified.context("checking was interrupted")??;
        }
        fs::rename(&part, path).with_context(|| format!("cannot make {}", path.display()))
    }

    async fn attempt(&self, part: &Path) -> Result<(), Failure> {
        let mut begun = fs::metadata(part).map_or(0, |metadata| metadata.len());
        if self.file.n_bytes == Some(begun) && begun > 0 {
            return Ok(());
        }
        if self.file.n_bytes.is_some_and(|n_bytes| begun > n_bytes) {
            begun = 0;
        }
        let mut request = self.hub.get(&self.url);
        if begun > 0 {
            request = request.header(RANGE, format!("bytes={begun}-"));
        }
        let response = request.send().await.map_err(|error| Failure::Broken(error.into()))?;
        if response.status() == StatusCode::RANGE_NOT_SATISFIABLE {
            let _ = fs::remove_file(part);
            return Err(Failure::Broken(anyhow::anyhow!("the file here does not belong to the hub's")));
        }
        // A hub that does not know ranges sends the whole file.
        if response.status() != StatusCode::PARTIAL_CONTENT || !starts_at(&response, begun) {
            begun = 0;
        }
        check(&response)?;
        let total = self.file.n_bytes.or_else(|| Some(begun + response.content_length()?));
        let file = open(part, begun).map_err(Failure::Refused)?;
        self.receive(response, file, begun, total).await
    }

    async fn receive(
        &self,
        mut response: Response,
        mut file: File,
        begun: u64,
        total: Option<u64>,
    ) -> Result<(), Failure> {
        let progress = Progress::new(&format!("fetching {}", self.file.name), total);
        progress.set(begun);
        let mut received = begun;
        while let Some(chunk) = response.chunk().await.map_err(|error| Failure::Broken(error.into()))? {
            received += chunk.len() as u64;
            if total.is_some_and(|total| received > total) {
                return Err(Failure::Refused(anyhow::anyhow!("the hub sends more than it promised")));
            }
            // A page cache takes this; the file is synced at the end.
            file.write_all(&chunk).context("cannot write the download").map_err(Failure::Refused)?;
            progress.set(received);
        }
        progress.finish();
        file.sync_all().context("cannot write the download to disk").map_err(Failure::Refused)?;
        match total {
            Some(total) if received < total => {
                Err(Failure::Broken(anyhow::anyhow!("the hub sent {received} bytes of {total}")))
            }
            _ => Ok(()),
        }
    }
}

fn check(response: &Response) -> Result<(), Failure> {
    let refuse = |text: String| Err(Failure::Refused(anyhow::anyhow!(text)));
    match response.status().as_u16() {
        200 | 206 => Ok(()),
        401 | 403 => refuse("the hub refuses it; set HF_TOKEN to a token that may read it".to_owned()),
        status @ (429 | 500..=599) => Err(Failure::Broken(anyhow::anyhow!("the hub answers {status}"))),
        status => refuse(format!("the hub answers {status}")),
    }
}

/// Whether the answer's bytes follow the ones already here.
fn starts_at(response: &Response, begun: u64) -> bool {
    let range = response.headers().get(CONTENT_RANGE).and_then(|range| range.to_str().ok());
    range.is_some_and(|range| range.starts_with(&format!("bytes {begun}-")))
}

fn open(part: &Path, begun: u64) -> Result<File> {
    let opened = OpenOptions::new().create(true).append(true).open(part);
    let file = opened.with_context(|| format!("cannot make {}", part.display()))?;
    if begun == 0 {
        file.set_len(0).with_context(|| format!("cannot empty {}", part.display()))?;
    }
    if file.metadata()?.len() != begun {
        bail!("another process writes {}", part.display());
    }
    Ok(file)
}
