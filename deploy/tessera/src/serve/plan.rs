//! The configuration document that `serve` makes for its roles, and what differs between them.

use std::net::SocketAddr;

use anyhow::{Result, anyhow};
use daemon::config::Document;
use toml::Value;

use super::ready::reachable;
use super::{DEFAULT_GRPC, DEFAULT_HTTP};
use crate::model::Model;
use crate::role::Role;

/// Any free port of this machine.
const ANY_PORT: &str = "127.0.0.1:0";

/// One document for all roles.
pub(super) struct Plan {
    document: Document,
    n_workers: usize,
}

impl Plan {
    /// Starts from the user's document.
    pub(super) fn new(document: Document, n_workers: usize) -> Self {
        Self { document, n_workers }
    }

    /// The document as it stands.
    pub(super) fn document(&self) -> &Document {
        &self.document
    }

    /// Decides every address, thread count and key that the user did not.
    pub(super) fn addresses(&mut self, http: Option<&str>, grpc: Option<&str>) -> Result<()> {
        for (path, flag, default) in [("router.http", http, DEFAULT_HTTP), ("router.grpc", grpc, DEFAULT_GRPC)] {
            match flag {
                Some(address) => self.set(path, address)?,
                None => self.default(path, default)?,
            }
        }
        self.default("scheduler.listen", ANY_PORT)?;
        self.default("worker.listen", ANY_PORT)?;
        // Workers that shared cores would wait for each other in every step.
        let n_threads = (worker::cores::allowed() / self.n_workers).max(1);
        self.default("worker.threads", i64::try_from(n_threads)?)?;
        self.default("membership.kind", "embedded")?;
        let key = daemon::random::key();
        self.default("hash_key", crate::model::hex(&key))
    }

    /// The model of the user's document.
    pub(super) fn configured_model(&self) -> Option<String> {
        self.document.get("worker.model").and_then(Value::as_str).map(str::to_owned)
    }

    /// Gives workers and router the model.
    pub(super) fn model(&mut self, model: &Model) -> Result<()> {
        let name = ["worker.model_name", "router.model_name"]
            .iter()
            .find_map(|path| Some(self.document.get(path)?.as_str()?.to_owned()))
            .unwrap_or_else(|| model.name.clone());
        let path = model.path.to_str().ok_or_else(|| anyhow!("{} is not UTF-8", model.path.display()))?.to_owned();
        for role in ["worker", "router"] {
            self.set(&format!("{role}.model"), path.as_str())?;
            self.set(&format!("{role}.model_name"), name.as_str())?;
        }
        Ok(())
    }

    /// The name clients ask for.
    pub(super) fn model_name(&self) -> String {
        self.document.get("router.model_name").and_then(Value::as_str).unwrap_or_default().to_owned()
    }

    /// Tells the others where the scheduler is.
    pub(super) fn scheduler(&mut self, address: SocketAddr) -> Result<()> {
        let addresses = || Value::Array(vec![Value::String(reachable(address).to_string())]);
        self.set("scheduler_addresses", addresses())?;
        if self.document.get("membership.kind").and_then(Value::as_str) == Some("embedded") {
            self.set("membership.endpoints", addresses())?;
        }
        Ok(())
    }

    /// The workers' names.
    pub(super) fn worker_names(&self) -> Vec<String> {
        (0..self.n_workers).map(|index| format!("worker-{index}")).collect()
    }

    /// The document of one role, in which it has a name of its own.
    pub(super) fn document_of(&self, role: Role, name: &str) -> Result<Document> {
        let mut document = self.document.clone();
        if role == Role::Worker {
            document.set("worker.id", name).map_err(|reason| anyhow!(reason))?;
        }
        Ok(document)
    }

    fn set(&mut self, path: &str, value: impl Into<Value>) -> Result<()> {
        self.document.set(path, value).map_err(|reason| anyhow!("cannot set {path}: {reason}"))
    }

    fn default(&mut self, path: &str, value: impl Into<Value>) -> Result<()> {
        if self.document.get(path).is_some() { Ok(()) } else { self.set(path, value) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(text: &str) -> Plan {
        Plan::new(Document::parse(text, "test").unwrap(), 2)
    }

    fn text<'a>(plan: &'a Plan, path: &str) -> &'a str {
        plan.document.get(path).and_then(Value::as_str).unwrap()
    }

    #[test]
    fn flags_win_over_the_document_and_the_document_over_defaults() {
        let mut plan = plan("hash_key = 'ab'\n[router]\nhttp = '1.2.3.4:1'\ngrpc = '1.2.3.4:2'\n[worker]\nthreads = 9");
        plan.addresses(Some("127.0.0.1:5"), None).unwrap();
        assert_eq!(text(&plan, "router.http"), "127.0.0.1:5");
        assert_eq!(text(&plan, "router.grpc"), "1.2.3.4:2");
        assert_eq!(text(&plan, "hash_key"), "ab");
        assert_eq!(plan.document.get("worker.threads").and_then(Value::as_integer), Some(9));
        assert_eq!(text(&plan, "membership.kind"), "embedded");
    }

    #[test]
    fn every_start_makes_a_key_of_its_own() {
        let keys: Vec<String> = (0..2)
            .map(|_| {
                let mut plan = plan("");
                plan.addresses(None, None).unwrap();
                text(&plan, "hash_key").to_owned()
            })
            .collect();
        assert!(keys[0].len() == 64 && keys[0] != keys[1], "{keys:?}");
    }

    #[test]
    fn roles_share_the_model_and_the_scheduler_but_not_their_name() {
        let mut plan = plan("");
        plan.addresses(None, None).unwrap();
        plan.model(&Model { name: "tiny".to_owned(), path: "/m/tiny".into() }).unwrap();
        plan.scheduler(SocketAddr::from(([0, 0, 0, 0], 7))).unwrap();
        let names = plan.worker_names();
        let document = plan.document_of(Role::Worker, &names[1]).unwrap();
        assert_eq!(document.get("worker.id").and_then(Value::as_str), Some("worker-1"));
        for role in ["worker", "router"] {
            assert_eq!(text(&plan, &format!("{role}.model")), "/m/tiny");
        }
        assert_eq!(plan.document.get("membership.endpoints").unwrap()[0].as_str(), Some("127.0.0.1:7"));
        assert_eq!(plan.model_name(), "tiny");
        assert_eq!(Document::parse(&plan.document.to_toml(), "again").unwrap(), plan.document);
    }
}
