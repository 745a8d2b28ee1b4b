//! What a file is, by its content: a file given in the place of another is told as what it is.

use std::fmt;
use std::fs;
use std::path::Path;

use anyhow::{Error, anyhow};
use serde_json::Value;

/// The kinds of file that commands read or write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Graph,
    Plan,
    Profile,
    Cluster,
    Trace,
}

impl Kind {
    /// What the file is, if anything of ours.
    fn of(path: &Path) -> Option<Self> {
        let text = fs::read_to_string(path).ok()?;
        if let Ok(json) = serde_json::from_str(&text) {
            return Self::of_json(&json);
        }
        let toml: toml::Table = text.parse().ok()?;
        ["device", "node", "level"].iter().any(|key| toml.contains_key(*key)).then_some(Self::Cluster)
    }

    fn of_json(json: &Value) -> Option<Self> {
        let has = |keys: &[&str]| keys.iter().all(|key| json.get(key).is_some());
        if has(&["ops", "values", "params"]) {
            Some(Self::Graph)
        } else if has(&["stages", "microbatches", "world_size"]) {
            Some(Self::Plan)
        } else if has(&["graph_hash", "device", "blocks"]) {
            Some(Self::Profile)
        } else if json.get(0).is_some_and(|entry| entry.get("ph").is_some()) {
            Some(Self::Trace)
        } else {
            None
        }
    }

    /// What to do with the file.
    fn advice(self, path: &Path) -> String {
        let path = path.display();
        match self {
            Self::Graph => format!("rannc graph {path}"),
            Self::Plan => format!("rannc show {path}"),
            Self::Profile => format!("rannc plan GRAPH --cluster CLUSTER --batch ROWS --profile {path}"),
            Self::Cluster => format!("rannc cluster {path}"),
            Self::Trace => "open it in ui.perfetto.dev".to_owned(),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Graph => "a graph",
            Self::Plan => "a plan",
            Self::Profile => "a profile",
            Self::Cluster => "a cluster",
            Self::Trace => "a trace",
        })
    }
}

/// Why a file could not be read: it is of another kind, or what reading it as `expected` says.
pub(crate) fn unreadable(path: &Path, expected: Kind, otherwise: impl FnOnce() -> Error) -> Error {
    match Kind::of(path) {
        Some(kind) if kind != expected => {
            anyhow!("{} is {kind}, not {expected}: {}", path.display(), kind.advice(path))
        }
        _ => otherwise(),
    }
}
