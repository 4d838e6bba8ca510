//! Which of a repository's files make a model.

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;

/// Small files that say how to use the weights; those that are there are taken.
const SMALL: [&str; 7] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
    "chat_template.jinja",
];
/// Names the shards of weights in several files.
const INDEX: &str = "model.safetensors.index.json";

/// A repository's files at one commit.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Listing {
    pub(super) commit: String,
    pub(super) files: Vec<RemoteFile>,
}

/// One file of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RemoteFile {
    /// Path inside the repository, of plain names.
    pub(super) name: String,
    /// Its size, where the hub tells it.
    pub(super) n_bytes: Option<u64>,
    /// Its digest in lowercase hex, where the hub tells it (for large files).
    pub(super) sha256: Option<String>,
}

impl RemoteFile {
    /// Its name in the cache's folder, which has no folders of its own.
    pub(super) fn local_name(&self) -> &str {
        self.name.rsplit('/').next().unwrap_or(&self.name)
    }

    /// Whether it is a GGUF file.
    pub(super) fn is_gguf(&self) -> bool {
        self.name.ends_with(".gguf")
    }

    fn is_safetensors(&self) -> bool {
        self.name.ends_with(".safetensors") && !self.name.contains('/')
    }
}

impl Listing {
    /// Reads the hub's answer; files with names that lead elsewhere are left out.
    pub(super) fn parse(json: &[u8]) -> Result<Self> {
        let answer: Answer = serde_json::from_slice(json)?;
        if !(7..=64).contains(&answer.sha.len()) || !answer.sha.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            bail!("{:?} is no commit", answer.sha);
        }
        let known = |file: &Sibling| file.rfilename.split('/').all(is_plain_name);
        let files = answer.siblings.into_iter().filter(known).map(|file| {
            let (size, sha256) = file.lfs.map_or((None, None), |lfs| (lfs.size, lfs.sha256));
            let sha256 = sha256.map(|digest| digest.to_ascii_lowercase());
            RemoteFile { name: file.rfilename, n_bytes: size.or(file.size), sha256 }
        });
        Ok(Self { commit: answer.sha, files: files.collect() })
    }
}

/// A name that stays inside its folder and needs no quoting in a URL.
pub(super) fn is_plain_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-+".contains(&byte);
    !name.is_empty() && !name.starts_with('.') && name.len() <= 200 && name.bytes().all(plain)
}

/// Chooses what to fetch: safetensors and what belongs to them, else the one GGUF file.
pub(super) fn choose<'a>(listing: &'a Listing, file: Option<&str>, model: &str) -> Result<Vec<&'a RemoteFile>> {
    let of_name = |name: &str| listing.files.iter().find(|file| file.name == name);
    if let Some(file) = file {
        let found = of_name(file).with_context(|| format!("{model} has no {file}; {}", ggufs(listing, model)))?;
        return Ok(vec![found]);
    }
    let mut weights: Vec<_> = listing.files.iter().filter(|file| file.is_safetensors()).collect();
    // Some repositories carry the same weights again in another layout.
    if weights.iter().any(|file| file.name.starts_with("model")) {
        weights.retain(|file| file.name.starts_with("model"));
    }
    if weights.is_empty() {
        let mut files = listing.files.iter().filter(|file| file.is_gguf());
        return match (files.next(), files.next()) {
            (Some(only), None) => Ok(vec![only]),
            (None, _) => bail!("{model} has neither safetensors nor GGUF weights"),
            (Some(_), Some(_)) => bail!("{model} has several GGUF files; {}", ggufs(listing, model)),
        };
    }
    for name in ["config.json", "tokenizer.json"] {
        of_name(name).with_context(|| format!("{model} has no {name}, without which it cannot be served"))?;
    }
    let small = SMALL.iter().chain([&INDEX]).filter_map(|name| of_name(name));
    Ok(small.chain(weights).collect())
}

fn ggufs(listing: &Listing, model: &str) -> String {
    let names: Vec<String> =
        listing.files.iter().filter(|file| file.is_gguf()).map(|file| format!("hf:{model}/{}", file.name)).collect();
    if names.is_empty() { "it has no GGUF file".to_owned() } else { format!("give one of {}", names.join(", ")) }
}

#[derive(Deserialize)]
struct Answer {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    size: Option<u64>,
    sha256: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listing(names: &[&str]) -> Listing {
        let file = |name: &&str| RemoteFile { name: (*name).to_owned(), n_bytes: None, sha256: None };
        Listing { commit: "c0ffee0".to_owned(), files: names.iter().map(file).collect() }
    }

    fn chosen(names: &[&str], file: Option<&str>) -> Result<Vec<String>> {
        let listing = listing(names);
        Ok(choose(&listing, file, "o/m")?.iter().map(|file| file.name.clone()).collect())
    }

    #[test]
    fn takes_safetensors_with_what_belongs_to_them_and_nothing_twice() {
        let names = [
            "README.md",
            "config.json",
            "tokenizer.json",
            "chat_template.jinja",
            "model.safetensors.index.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "consolidated.safetensors",
            "original/model.safetensors",
            "m.gguf",
        ];
        let expected = [
            "config.json",
            "tokenizer.json",
            "chat_template.jinja",
            "model.safetensors.index.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
        ];
        assert_eq!(chosen(&names, None).unwrap(), expected);
        assert_eq!(chosen(&names, Some("m.gguf")).unwrap(), ["m.gguf"]);
    }

    #[test]
    fn takes_the_only_gguf_and_lists_the_choices_when_there_are_several() {
        assert_eq!(chosen(&["README.md", "a.gguf"], None).unwrap(), ["a.gguf"]);
        let error = chosen(&["a.gguf", "q/b.gguf"], None).unwrap_err().to_string();
        assert!(error.contains("hf:o/m/a.gguf, hf:o/m/q/b.gguf"), "{error}");
        assert!(chosen(&["README.md"], None).is_err());
        assert!(chosen(&["a.gguf"], Some("c.gguf")).unwrap_err().to_string().contains("hf:o/m/a.gguf"));
        let error = chosen(&["model.safetensors", "config.json"], None).unwrap_err().to_string();
        assert!(error.contains("tokenizer.json"), "{error}");
    }

    #[test]
    fn a_listing_cannot_lead_out_of_its_folder() {
        let json = br#"{"sha": "c0ffee0", "siblings": [
            {"rfilename": "../../x.gguf"}, {"rfilename": "/etc/x.gguf"}, {"rfilename": ".complete"}, {"rfilename": ""},
            {"rfilename": "a.gguf", "size": 5, "lfs": {"size": 7, "sha256": "AB"}}]}"#;
        let file = RemoteFile { name: "a.gguf".to_owned(), n_bytes: Some(7), sha256: Some("ab".to_owned()) };
        assert_eq!(Listing::parse(json).unwrap(), Listing { commit: "c0ffee0".to_owned(), files: vec![file] });
        for bad in [r#"{"sha": "../../etc"}"#, r#"{"sha": ""}"#, "{}", "[", ""] {
            assert!(Listing::parse(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
