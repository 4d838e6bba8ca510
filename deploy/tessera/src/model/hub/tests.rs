//! The hub client against a small server that plays the hub.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use sha2::{Digest as _, Sha256};

use super::super::digest::hex;
use super::*;

/// What the stub does to a file's first answer.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    None,
    /// Sends half and closes.
    Truncate,
    /// Sends other bytes of the same length.
    Alter,
}

struct Stub {
    endpoint: String,
    /// Request lines with their Range and Authorization headers.
    requests: Arc<Mutex<Vec<String>>>,
}

impl Stub {
    fn start(files: &[(&str, &[u8])], fault: Fault) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let files: BTreeMap<String, Vec<u8>> =
            files.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec())).collect();
        let log = Arc::clone(&requests);
        std::thread::spawn(move || {
            let mut fault = fault;
            for stream in listener.incoming() {
                answer(stream.unwrap(), &files, &log, &mut fault);
            }
        });
        Self { endpoint, requests }
    }

    fn hub(&self, token: Option<&str>) -> Hub {
        Hub::new(&self.endpoint, token.map(str::to_owned)).unwrap()
    }

    fn n_requests(&self, part: &str) -> usize {
        self.requests.lock().unwrap().iter().filter(|request| request.contains(part)).count()
    }
}

fn answer(mut stream: TcpStream, files: &BTreeMap<String, Vec<u8>>, log: &Mutex<Vec<String>>, fault: &mut Fault) {
    let (mut line, mut begun) = (String::new(), 0);
    for header in BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok) {
        if header.is_empty() {
            break;
        }
        let lower = header.to_ascii_lowercase();
        if line.is_empty() {
            line = header;
        } else if let Some(range) = lower.strip_prefix("range: bytes=") {
            begun = range.trim_end_matches('-').parse().unwrap();
            line += &format!(" from {begun}");
        } else if lower.starts_with("authorization: ") {
            line += &format!(" {header}");
        }
    }
    log.lock().unwrap().push(line.clone());
    let path = line.split(' ').nth(1).unwrap();
    let respond = |stream: &mut TcpStream, status: &str, promised: usize, extra: &str, body: &[u8]| {
        let head = format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {promised}\r\n{extra}\r\n");
        let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
    };
    if path.starts_with("/api/models/o/m/revision/main?") {
        let siblings: Vec<_> = files.iter().map(|(name, bytes)| sibling(name, bytes)).collect();
        let body = serde_json::json!({"sha": "c0ffee0c0ffee0", "siblings": siblings}).to_string();
        return respond(&mut stream, "200 OK", body.len(), "", body.as_bytes());
    }
    let Some(bytes) = path.strip_prefix("/o/m/resolve/c0ffee0c0ffee0/").and_then(|name| files.get(name)) else {
        return respond(&mut stream, "404 Not Found", 0, "", b"");
    };
    let mut body = bytes[begun..].to_vec();
    let promised = body.len();
    if path.ends_with(".safetensors") {
        match std::mem::replace(fault, Fault::None) {
            Fault::None => {}
            Fault::Truncate => body.truncate(promised / 2),
            Fault::Alter => body[0] ^= 1,
        }
    }
    if begun > 0 {
        let range = format!("content-range: bytes {begun}-{}/{}\r\n", bytes.len() - 1, bytes.len());
        return respond(&mut stream, "206 Partial Content", promised, &range, &body);
    }
    respond(&mut stream, "200 OK", promised, "", &body);
}

fn sibling(name: &str, bytes: &[u8]) -> serde_json::Value {
    let mut sibling = serde_json::json!({"rfilename": name, "size": bytes.len()});
    if name.ends_with(".safetensors") || name.ends_with(".gguf") {
        sibling["lfs"] = serde_json::json!({"size": bytes.len(), "sha256": hex(&Sha256::digest(bytes))});
    }
    sibling
}

const FILES: [(&str, &[u8]); 4] = [
    ("README.md", b"read me"),
    ("config.json", b"{}"),
    ("tokenizer.json", b"{ }"),
    ("model.safetensors", b"0123456789abcdefghij"),
];

fn repository() -> Repository {
    "o/m".parse().unwrap()
}

fn home() -> (tempfile::TempDir, Cache) {
    let home = tempfile::tempdir().unwrap();
    let cache = Cache::at(home.path().to_owned());
    (home, cache)
}

#[tokio::test]
async fn fetches_what_is_needed_once_and_with_the_token() {
    let stub = Stub::start(&FILES, Fault::None);
    let (_home, cache) = home();
    let folder = stub.hub(Some("secret")).ensure(&repository(), &cache).await.unwrap();
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), FILES[3].1);
    assert_eq!(fs::read(folder.join("config.json")).unwrap(), FILES[1].1);
    assert!(!folder.join("README.md").exists());
    assert_eq!(stub.n_requests("secret"), 4);
    assert_eq!(stub.hub(None).ensure(&repository(), &cache).await.unwrap(), folder);
    assert_eq!(stub.n_requests("/resolve/"), 3);
    assert_eq!(cache.list().len(), 1);
}

#[tokio::test]
async fn a_broken_download_goes_on_where_it_broke_off() {
    let stub = Stub::start(&FILES, Fault::Truncate);
    let (_home, cache) = home();
    let folder = stub.hub(None).ensure(&repository(), &cache).await.unwrap();
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), FILES[3].1);
    assert_eq!(stub.n_requests("model.safetensors HTTP/1.1 from 10"), 1, "{:?}", stub.requests);
}

#[tokio::test]
async fn an_altered_file_is_refused_and_removed_and_the_next_try_is_whole() {
    let stub = Stub::start(&FILES, Fault::Alter);
    let (home, cache) = home();
    let error = stub.hub(None).ensure(&repository(), &cache).await.unwrap_err();
    assert!(format!("{error:#}").contains("sha256"), "{error:#}");
    let folder = home.path().join("hub/o--m/c0ffee0c0ffee0");
    assert!(!folder.join("model.safetensors").exists() && !folder.join("model.safetensors.part").exists());
    assert_eq!(cache.list(), []);
    stub.hub(None).ensure(&repository(), &cache).await.unwrap();
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), FILES[3].1);
}

#[tokio::test]
async fn a_repository_of_gguf_files_serves_the_file() {
    let stub = Stub::start(&[("a.gguf", b"GGUF a"), ("b.gguf", b"GGUF b")], Fault::None);
    let (_home, cache) = home();
    let error = stub.hub(None).ensure(&repository(), &cache).await.unwrap_err().to_string();
    assert!(error.contains("hf:o/m/a.gguf, hf:o/m/b.gguf"), "{error}");
    let path = stub.hub(None).ensure(&"o/m/b.gguf".parse().unwrap(), &cache).await.unwrap();
    assert_eq!((path.file_name().unwrap(), fs::read(&path).unwrap().as_slice()), ("b.gguf".as_ref(), &b"GGUF b"[..]));
}

#[tokio::test]
async fn what_is_here_serves_without_the_hub_and_what_is_not_says_how_to_go_on() {
    let stub = Stub::start(&FILES, Fault::None);
    let (_home, cache) = home();
    let folder = stub.hub(None).ensure(&repository(), &cache).await.unwrap();
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let offline = Hub::new(&format!("http://{nobody}"), None).unwrap();
    assert_eq!(offline.ensure(&repository(), &cache).await.unwrap(), folder);
    let error = offline.ensure(&"o/other".parse().unwrap(), &cache).await.unwrap_err().to_string();
    assert!(error.contains("--model PATH"), "{error}");
    let missing = stub.hub(None).ensure(&"o/other".parse().unwrap(), &cache).await.unwrap_err().to_string();
    assert!(missing.contains("no o/other"), "{missing}");
}

#[test]
fn repository_names_are_checked_before_anything_is_asked() {
    let parsed = "org/name/q/file.gguf@refs/pr/1".parse::<Repository>().unwrap();
    assert_eq!((parsed.file.as_deref(), parsed.revision.as_str()), (Some("q/file.gguf"), "refs/pr/1"));
    for bad in
        ["", "org", "org/", "/name", "../name", "org/..", "org/name/file.bin", "org/name/../x.gguf", "o/n@", "o/n@.."]
    {
        assert!(bad.parse::<Repository>().is_err(), "{bad}");
    }
}
