//! The table of layers: which crate of the workspace may depend on which.

use anyhow::{Context, Result};
use serde_json::Value;

use crate::run;

/// Crate and layer. Arrows point strictly down.
const LAYERS: [(&str, u32); 16] = [
    ("contract", 0),
    ("kernels", 0),
    ("daemon", 0),
    ("proto", 1),
    ("engine", 1),
    ("membership", 2),
    ("models", 2),
    ("router", 3),
    ("scheduler", 3),
    ("worker", 3),
    ("bench", 4),
    ("simulation", 4),
    ("tessera", 5),
    ("tests", 5),
    ("xtask", 5),
    ("codegen", 5),
];

/// Crates that do no IO and have no runtime, and what they must therefore never depend on, however far down.
const PURE: [&str; 2] = ["contract", "engine"];
const IMPURE: [&str; 6] = ["tokio", "tonic", "hyper", "mio", "socket2", "rayon"];

/// Crates that depend on no other crate of the workspace although they stand high.
const ALONE: [&str; 2] = ["xtask", "codegen"];

/// Complains about every arrow that does not point down.
pub fn complaints() -> Result<Vec<String>> {
    let text = run::output(run::cargo_command().args(["metadata", "--format-version=1", "--locked"]))?;
    let metadata: Value = serde_json::from_str(&text).context("parse cargo metadata")?;
    let members = members(&metadata)?;
    let mut complaints = Vec::new();
    for member in &members {
        complaints.extend(arrow_complaints(member));
        if PURE.contains(&member.name.as_str()) {
            complaints.extend(impure(&metadata, member));
        }
    }
    Ok(complaints)
}

struct Member {
    id: String,
    name: String,
    /// Names of crates of the workspace that it depends on, for building or for running.
    arrows: Vec<String>,
}

fn members(metadata: &Value) -> Result<Vec<Member>> {
    let ids: Vec<&str> = array(&metadata["workspace_members"]).filter_map(Value::as_str).collect();
    let packages: Vec<&Value> = array(&metadata["packages"])
        .filter(|package| package["id"].as_str().is_some_and(|id| ids.contains(&id)))
        .collect();
    let names: Vec<&str> = packages.iter().filter_map(|package| package["name"].as_str()).collect();
    packages.iter().map(|package| member(package, &names)).collect()
}

fn member(package: &Value, names: &[&str]) -> Result<Member> {
    let arrows = array(&package["dependencies"])
        .filter(|dependency| dependency["kind"].as_str() != Some("dev"))
        .filter_map(|dependency| dependency["name"].as_str())
        .filter(|name| names.contains(name))
        .map(ToOwned::to_owned);
    Ok(Member {
        id: package["id"].as_str().context("a package without id")?.to_owned(),
        name: package["name"].as_str().context("a package without name")?.to_owned(),
        arrows: arrows.collect(),
    })
}

fn arrow_complaints(member: &Member) -> Vec<String> {
    let Some(own) = layer(&member.name) else {
        return vec![format!("crate {} is not in the table of layers (tests/xtask/src/layers.rs)", member.name)];
    };
    let alone = ALONE.contains(&member.name.as_str());
    let wrong = |to: &&String| alone || layer(to).is_none_or(|to| to >= own);
    member
        .arrows
        .iter()
        .filter(wrong)
        .map(|to| format!("crate {} must not depend on {to}: arrows point strictly down", member.name))
        .collect()
}

fn layer(name: &str) -> Option<u32> {
    LAYERS.iter().find(|(known, _)| *known == name).map(|&(_, layer)| layer)
}

/// Everything reachable from a pure crate by normal dependencies that it must not reach.
fn impure(metadata: &Value, member: &Member) -> Vec<String> {
    let nodes: Vec<&Value> = array(&metadata["resolve"]["nodes"]).collect();
    let mut seen = vec![member.id.clone()];
    let mut next = 0;
    while let Some(id) = seen.get(next).cloned() {
        next += 1;
        let Some(node) = nodes.iter().find(|node| node["id"].as_str() == Some(&id)) else { continue };
        for dependency in array(&node["deps"]) {
            let normal = array(&dependency["dep_kinds"]).any(|kind| kind["kind"].is_null());
            let Some(id) = dependency["pkg"].as_str().filter(|_| normal) else { continue };
            if !seen.iter().any(|known| known == id) {
                seen.push(id.to_owned());
            }
        }
    }
    let name = |id: &str| {
        let package = array(&metadata["packages"]).find(|package| package["id"].as_str() == Some(id))?;
        package["name"].as_str().map(ToOwned::to_owned)
    };
    seen.iter()
        .filter_map(|id| name(id))
        .filter(|name| IMPURE.contains(&name.as_str()))
        .map(|name| format!("crate {} is pure but reaches {name}", member.name))
        .collect()
}

fn array(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(name: &str, to: &str) -> Member {
        Member { id: name.to_owned(), name: name.to_owned(), arrows: vec![to.to_owned()] }
    }

    #[test]
    fn arrows_up_or_sideways_are_refused() {
        assert!(arrow_complaints(&member("router", "proto")).is_empty());
        assert_eq!(arrow_complaints(&member("proto", "router")).len(), 1);
        assert_eq!(arrow_complaints(&member("router", "worker")).len(), 1, "roles never depend on each other");
        assert_eq!(arrow_complaints(&member("xtask", "contract")).len(), 1);
        assert_eq!(arrow_complaints(&member("newcomer", "contract")).len(), 1);
    }

    #[test]
    fn a_pure_crate_that_reaches_a_runtime_is_found() {
        let metadata = serde_json::json!({
            "packages": [{"id": "e", "name": "engine"}, {"id": "a", "name": "a"}, {"id": "t", "name": "tokio"}],
            "resolve": {"nodes": [
                {"id": "e", "deps": [{"pkg": "a", "dep_kinds": [{"kind": null}]}]},
                {"id": "a", "deps": [{"pkg": "t", "dep_kinds": [{"kind": null}]}]},
                {"id": "t", "deps": []},
            ]},
        });
        let engine = Member { id: "e".to_owned(), name: "engine".to_owned(), arrows: vec![] };
        assert_eq!(impure(&metadata, &engine), ["crate engine is pure but reaches tokio"]);
    }
}
