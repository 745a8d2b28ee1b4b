//! What can be wrong with a cluster.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Why a cluster cannot be described.
#[derive(Debug, Error)]
pub enum CostError {
    /// The file cannot be read.
    #[error("cannot read the cluster file {}: {source}; check that it exists on this machine and may be read", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The text is not TOML, or has unknown, misspelt or missing fields.
    #[error("the cluster is not described as it should be: {}", one_line(.0))]
    Form(#[source] toml::de::Error),
    /// A figure that no cluster can have, or figures that contradict each other.
    #[error("the cluster file, line {line}: {fault}")]
    Line {
        /// Line of the file, from 1.
        line: usize,
        /// What is wrong there.
        fault: ClusterFault,
    },
    /// The same of a cluster that was not read from a file.
    #[error("the cluster is impossible: {0}")]
    Fault(#[from] ClusterFault),
}

/// The place and the message, without the drawing of the text around it.
fn one_line(error: &toml::de::Error) -> String {
    let drawn = error.to_string();
    let place = drawn.lines().next().unwrap_or_default();
    format!("{place}: {}", error.message().replace('\n', "; "))
}

/// Which part of a cluster, by its place among its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// The cluster as a whole.
    Cluster,
    /// A kind of device.
    Device(usize),
    /// A node.
    Node(usize),
    /// A level of links.
    Level(usize),
}

/// What is wrong with a field of a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{what}")]
pub struct ClusterFault {
    /// The part.
    pub part: Part,
    /// The field, as the file calls it.
    pub field: &'static str,
    /// What is wrong and what to do.
    pub what: String,
}
